//! Routing from logits in device memory: choices, weights, states and pages equal those of host routing, bit for bit.

use crate::engine::Engine;
use crate::script::noise;
use crate::standin::{Get, Set, Standin};
use crate::suite::{config, shape};
use pikv::closed_loop::LoopError;
use pikv::cuda::{DeviceOutput, DeviceRoutes, DeviceSlice};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::router::{
    Adaptive, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, Misses, RouteError, Router,
    RouterKind, Shape, Start, TopK,
};
use pikv::rules::Hits;
use pikv::{
    Attend, AttendOutput, Backend, Cache, CacheConfig, ClosedLoop, Dtype, Error, ReadPages, Sequence,
};
use pikv_test::numbers::{Rng, bits};
use pikv_test::routers::Wrapped;
use pikv_test::scaled;

const LAYERS: usize = 2;

/// Every router, with strong coefficients so that learnt averages often decide.
fn routers(experts: u32, top_k: u32) -> Vec<Box<dyn Router>> {
    let shape = Shape::new(experts, top_k);
    let mut all: Vec<Box<dyn Router>> = vec![
        Box::new(Hashed::default().router(shape).unwrap()),
        Box::new(Hashed::default().start(Start::RoundRobin).model_choice(true).router(shape).unwrap()),
        Box::new(TopK.router(shape).unwrap()),
        Box::new(LoadBalanced::default().alpha(0.5).router(shape).unwrap()),
        Box::new(CacheAware::default().lambda(2.0).router(shape).unwrap()),
        Box::new(CacheAware::default().lambda(2.0).model_choice(true).router(shape).unwrap()),
        Box::new(CacheAware::default().misses(Misses::Count).cap(None).router(shape).unwrap()),
        Box::new(EntropyPenalised::default().beta(3.0).router(shape).unwrap()),
        Box::new(Adaptive::new(top_k, 5).router(shape).unwrap()),
    ];
    // With few experts no setting of groups acts.
    all.extend(Hierarchical::fitting(experts, top_k).router(shape).map(|r| Box::new(r) as Box<dyn Router>));
    all
}

fn setup(experts: u32, top_k: u32, rollback: u32) -> CacheConfig {
    config(vec![shape(1, 2, 8, 8, Dtype::F32, Dtype::F32); LAYERS], 8, rollback)
        .experts(experts, top_k)
        .hits(Hits::new().pages(2).every(1))
        .evict(Eviction::new(H2o, Budget::Tokens(60)).batch(4))
}

/// A loop on the host, or on the device if there is an engine.
struct Run {
    cache: Cache,
    pikv: ClosedLoop,
    sequences: Vec<Sequence>,
    engine: Option<Engine>,
}

impl Run {
    /// With router `id` of all in each layer.
    fn new(config: CacheConfig, backend: Option<Backend>, id: usize, sequences: usize) -> Run {
        let engine = backend.as_ref().map(Engine::new);
        let (experts, top_k) = (config.experts, config.top_k);
        let cache = Cache::new(config.backend(backend.unwrap_or_default())).unwrap();
        let routers = (0..LAYERS).map(|_| routers(experts, top_k).swap_remove(id)).collect();
        let pikv = ClosedLoop::new(cache.clone(), routers).unwrap();
        Run { sequences: (0..sequences).map(|_| cache.sequence()).collect(), cache, pikv, engine }
    }

    /// A step of `rows` rows of each sequence, in all layers, committed or dropped; returns the bits of the results.
    fn turn(&mut self, rows: &[usize], seed: u64, read: ReadPages, commit: bool) -> Vec<u32> {
        let Run { cache, pikv, sequences, engine } = self;
        let experts = cache.config().experts as usize;
        let n: usize = rows.iter().sum();
        let mut record = Vec::new();
        let parts = sequences.iter_mut().zip(rows).filter(|(_, n)| **n > 0);
        let mut step = pikv.begin(parts.map(|(s, n)| (s, *n as u32))).unwrap();
        for layer in 0..LAYERS {
            let logits = logits(seed, layer, n, experts);
            let device = match engine {
                Some(engine) => Some(step.route_device(layer, engine.put(logits)).unwrap()),
                None => {
                    let routes = step.route(layer, &logits).unwrap();
                    for choice in [routes.model(), routes.filing()] {
                        record.extend(choice.experts.iter().map(|e| u32::from(*e)));
                        record.extend(bits(&choice.weights));
                    }
                    None
                }
            };
            let row = |kind, n| noise(&[seed, layer as u64, kind], n);
            let mut out = vec![f32::NAN; n * 16];
            step.append(layer, &row(0, n * 8), &row(1, n * 8)).unwrap();
            step.attend(layer, &row(2, n * 16), &Attend::new(0.4).read(read), AttendOutput::new(&mut out))
                .unwrap();
            if let (Some(engine), Some(routes)) = (engine.as_mut(), device) {
                assert_eq!(routes.rows, n);
                record.extend(chosen(engine, &routes));
            }
            record.extend(bits(&out));
        }
        if !commit {
            return record;
        }
        step.commit().unwrap();
        for layer in 0..LAYERS {
            let report = pikv.report();
            let pages = report.hits(layer).iter().chain(report.misses(layer));
            record.extend(pages.map(|pages| (*pages * 32.0) as u32));
        }
        record
    }

    fn states(&mut self) -> Vec<Vec<u8>> {
        self.pikv.routers().iter().map(|router| router.state().to_bytes()).collect()
    }
}

/// The experts and weights at the addresses: the model's, then the filing's.
fn chosen(engine: &mut Engine, routes: &DeviceRoutes) -> Vec<u32> {
    let choices = routes.rows * routes.top_k;
    let [model, filing] = [routes.model, routes.filing];
    let lists = [model.experts, model.weights, filing.experts, filing.weights];
    // SAFETY: as many elements of 4 bytes, that the loop has written and keeps.
    let list = |at| unsafe { DeviceSlice::new(at, choices, Dtype::F32) };
    lists.into_iter().flat_map(|at| bits(&engine.read(list(at)))).collect()
}

/// Plain ones, ties, one hot expert, and large ones in turns.
fn logits(seed: u64, layer: usize, rows: usize, experts: usize) -> Vec<f32> {
    let mut x = noise(&[seed, layer as u64, 3], rows * experts);
    match seed % 5 {
        0 => x.fill(0.0),
        1 => x.iter_mut().for_each(|x| *x = (*x * 2.0).round()),
        2 => (0..rows).for_each(|row| x[row * experts + experts / 3] += 20.0),
        3 => x.iter_mut().for_each(|x| *x *= 1e6),
        _ => {}
    }
    x
}

/// Both forms, turn by turn.
fn same_turns(standin: &Standin, experts: u32, top_k: u32, turns: u64) {
    for id in 0..routers(experts, top_k).len() {
        let kind = routers(experts, top_k)[id].kind();
        let mut host = Run::new(setup(experts, top_k, 0), None, id, 2);
        let mut device = Run::new(setup(experts, top_k, 0), Some(standin.backend()), id, 2);
        for turn in 0..turns {
            // The first is longer than the ring, so that pages are filed and looked for.
            let rows = [[40, 7], [1, 1], [1, 0], [3, 2]][(turn as usize).min(1 + turn as usize % 3)];
            let read = [ReadPages::All, ReadPages::Experts][turn as usize % 2];
            let what = format!("{kind}, {top_k} of {experts}, turn {turn}");
            let want = host.turn(&rows, turn, read, true);
            assert!(want == device.turn(&rows, turn, read, true), "{what}: choices, weights or outputs");
            assert!(host.states() == device.states(), "{what}: states");
        }
    }
}

#[test]
fn every_router_chooses_and_learns_as_on_the_host() {
    let standin = Standin::new();
    let live = standin.get(Get::Live);
    for experts in [1, 8, 60, 64, 256, 512] {
        for top_k in [1, 2, 8].into_iter().filter(|k| *k <= experts) {
            // Wide rows take the interpreter longer; in the quick set each width is seen once.
            let quick = match (experts, top_k) {
                (8, 2) => 6,
                (1, 1) | (8, 8) | (60, 8) => 3,
                (64, 2) | (256, 2) | (512, 1) => 2,
                _ => 0,
            };
            same_turns(&standin, experts, top_k, scaled(quick, 30));
        }
    }
    assert_eq!(standin.get(Get::Live), live);
}

/// Rollbacks, dropped steps and steps routed by the host: states equal those of host routing.
#[test]
fn routers_forget_as_on_the_host() {
    let standin = Standin::new();
    for id in [3, 4, 7, 8] {
        let mut host = Run::new(setup(8, 2, 8), None, id, 1);
        let mut device = Run::new(setup(8, 2, 8), Some(standin.backend()), id, 1);
        let mut rng = Rng(id as u64);
        for turn in 0..scaled(10, 60) {
            // The first has rows that no rollback reaches.
            let rows = if turn == 0 { 40 } else { 1 + rng.below(4) as usize };
            let (back, commit) = (rng.below(rows.min(4) as u32 + 1), turn == 0 || !rng.one_in(4));
            let by_host = rng.one_in(4);
            let mut want = host.turn(&[rows], turn, ReadPages::All, commit);
            let engine = device.engine.take_if(|_| by_host);
            let mut got = device.turn(&[rows], turn, ReadPages::All, commit);
            if engine.is_some() {
                device.engine = engine;
            }
            if commit {
                host.sequences[0].rollback(back).unwrap();
                device.sequences[0].rollback(back).unwrap();
            }
            let what = format!("router {id}, turn {turn}, {back} of {rows} taken back, committed: {commit}");
            want.dedup();
            got.dedup();
            assert!(want == got, "{what}");
            assert!(host.states() == device.states(), "{what}: states");
        }
    }
}

#[test]
fn steps_of_a_known_size_wait_for_nothing_before_the_commit() {
    let standin = Standin::new();
    for slow in [0, 1] {
        for id in 0..routers(8, 2).len() {
            standin.set(Set::Slow, 0);
            let plain = CacheConfig::new(setup(8, 2, 0).layers, 1 << 28).ring(8).experts(8, 2);
            let mut run = Run::new(plain, Some(standin.backend()), id, 1);
            let kind = run.pikv.routers()[0].kind();
            let engine = run.engine.as_mut().unwrap();
            let gate = engine.put(noise(&[1], 8));
            let [k, v, q] = [8, 8, 16].map(|n| engine.put(noise(&[2], n)));
            let out = engine.room(16);
            for turn in 0..80 {
                if turn == 70 {
                    standin.set(Set::Slow, slow);
                }
                let of = |what| standin.get(what);
                let before = [Get::Waited, Get::Allocated].map(of);
                let mut step = run.pikv.begin([(&mut run.sequences[0], 1)]).unwrap();
                for layer in 0..LAYERS {
                    let (sent, launched) = (of(Get::Uploaded), of(Get::Launched));
                    step.route_device(layer, gate).unwrap();
                    if turn > 0 {
                        // The position of the first row alone.
                        let most = if kind == RouterKind::Hash { 16 } else { 0 };
                        assert_eq!(of(Get::Uploaded) - sent, most, "{kind}, {turn}: the state is there");
                    }
                    let most =
                        if [RouterKind::Entropy, RouterKind::Adaptive].contains(&kind) { 2 } else { 1 };
                    assert_eq!(of(Get::Launched) - launched, most, "{kind}");
                    step.append_device(layer, k, v).unwrap();
                    step.attend_device(layer, q, &Attend::new(0.3), DeviceOutput::new(out)).unwrap();
                }
                let now = [Get::Waited, Get::Allocated].map(of);
                if turn >= 70 {
                    assert_eq!(now, before, "{kind}, {turn}: up to the commit");
                }
                step.commit().unwrap();
                if turn >= 70 {
                    // One wait for the choices of all layers. If the router wants hits, they take another, and so do the keys of full
                    // pages.
                    let waited = of(Get::Waited) - before[0];
                    let asks = run.pikv.routers()[0].wants_hits();
                    assert!(
                        waited == 1 || asks && waited > 1,
                        "{kind}, {turn}: {waited} waits with the commit"
                    );
                    assert_eq!(of(Get::Allocated), before[1], "{kind}, {turn}");
                }
            }
            standin.set(Set::Slow, 0);
        }
    }
}

/// Logits that are not finite are found by the commit or by a check, with the error of the host's form; the step changes nothing.
#[test]
fn logits_that_are_not_finite() {
    let standin = Standin::new();
    for (id, bad) in [(2, f32::NAN), (3, f32::INFINITY), (7, f32::NEG_INFINITY), (9, f32::NAN)] {
        for (at, rollback, sequences) in [(0, 0, 1), (37, 0, 2), (8 * 21 + 5, 4, 1), (8 * 27 + 1, 4, 1)] {
            let mut host = Run::new(setup(8, 2, rollback), None, id, sequences);
            let mut device = Run::new(setup(8, 2, rollback), Some(standin.backend()), id, sequences);
            let rows = [[28, 0], [3, 4]][sequences - 1];
            let n = rows[0] + rows[1];
            let mut x = logits(4, 0, n, 8);
            x[at] = bad;
            x[8 * n - 1] = f32::INFINITY;
            for check in [false, true] {
                let error = |run: &mut Run| {
                    let Run { pikv, sequences, engine, .. } = run;
                    let parts = sequences.iter_mut().zip(rows).filter(|(_, n)| *n > 0);
                    let mut step = pikv.begin(parts.map(|(s, n)| (s, n as u32))).unwrap();
                    let Some(engine) = engine else { return step.route(1, &x).map(|_| ()).unwrap_err() };
                    for layer in 0..LAYERS {
                        let logits = if layer == 1 { x.clone() } else { logits(4, 0, n, 8) };
                        step.route_device(layer, engine.put(logits)).unwrap();
                        step.append(layer, &noise(&[1], n * 8), &noise(&[2], n * 8)).unwrap();
                    }
                    if check { step.check().unwrap_err() } else { step.commit().unwrap_err() }
                };
                let (want, got) = (error(&mut host), error(&mut device));
                assert!(matches!(&want, LoopError::Route { layer: 1, source: RouteError::Logit { .. } }));
                // A NaN is not equal to itself.
                assert_eq!(format!("{want:?}"), format!("{got:?}"), "router {id}, element {at}");
                assert!(host.states() == device.states());
                let turn =
                    |run: &mut Run| run.turn(&rows[..sequences], 9 + u64::from(check), ReadPages::All, true);
                assert!(turn(&mut host) == turn(&mut device), "router {id}, after the error");
                assert!(host.states() == device.states());
            }
        }
    }
}

#[test]
fn what_is_refused_leaves_the_layer_to_be_routed() {
    let standin = Standin::new();
    let backend = standin.backend();
    let looped = |router: Box<dyn Router>, backend: &Backend| {
        let layers = vec![shape(1, 1, 4, 4, Dtype::F32, Dtype::F32)];
        let cache = Cache::new(config(layers, 8, 0).experts(4, 2).backend(backend.clone())).unwrap();
        (cache.sequence(), ClosedLoop::new(cache, vec![router]).unwrap())
    };
    let of = Shape::new(4, 2);
    let top_k = || Box::new(TopK.router(of).unwrap()) as Box<dyn Router>;
    let mut engine = Engine::new(&backend);
    let gate = engine.put(vec![0.5, 3.0, 1.0, 2.0]);
    // SAFETY: nothing is put on the stream for it.
    let null = unsafe { DeviceSlice::new(0, 4, Dtype::F32) };
    let half = engine.put_of(vec![0.5; 4], Dtype::Bf16);
    let long = engine.put(vec![0.5; 5]);

    let (mut sequence, mut pikv) = looped(top_k(), &backend);
    let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
    assert!(matches!(
        step.route_device(1, gate),
        Err(LoopError::Cache(Error::Layer { layer: 1, layers: 1 }))
    ));
    let length = Error::Length { what: "logits", got: 5, expected: 4, shape: "rows * experts" };
    assert_eq!(step.route_device(0, long), Err(LoopError::Cache(length)));
    for (bad, why) in [(null, "the address is null"), (half, "logits are f32")] {
        let tensor = Error::DeviceTensor { what: "logits", address: bad.address(), why };
        assert_eq!(step.route_device(0, bad), Err(LoopError::Cache(tensor)));
    }
    let routes = step.route_device(0, gate).unwrap();
    assert_eq!((routes.model, routes.rows, routes.top_k), (routes.filing, 1, 2));
    let twice = || LoopError::Cache(Error::Twice { layer: 0, what: "routed" });
    assert_eq!(step.route_device(0, gate), Err(twice()));
    assert_eq!(step.route(0, &[0.0; 4]).map(|_| ()), Err(twice()));
    step.append(0, &[1.0; 4], &[1.0; 4]).unwrap();
    assert_eq!(chosen(&mut engine, &routes)[..2], [1, 3]);
    step.check().unwrap();
    assert_eq!(step.route_device(0, gate), Err(twice()));
    step.commit().unwrap();
    assert_eq!(sequence.next_position().0, 1);

    let more = EntropyPenalised::default().more(1).router(of).unwrap();
    for (router, id) in [(Box::new(Wrapped::new(top_k())) as Box<dyn Router>, "R_T"), (Box::new(more), "R_E")]
    {
        let (mut sequence, mut pikv) = looped(router, &backend);
        let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
        let error = step.route_device(0, gate).unwrap_err();
        let only = matches!(&error, LoopError::Route { layer: 0, source: RouteError::HostOnly { .. } });
        assert!(only && error.to_string().contains(id), "{error}");
        step.route(0, &[0.0; 4]).unwrap();
        step.append(0, &[1.0; 4], &[1.0; 4]).unwrap();
        step.commit().unwrap();
    }
    let (mut sequence, mut pikv) = looped(top_k(), &Backend::CPU);
    let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
    let on_host = LoopError::Cache(Error::HostTensors { layer: 0, what: "a cache on the CPU" });
    assert_eq!(step.route_device(0, gate), Err(on_host));
    step.route(0, &[0.0; 4]).unwrap();
}

/// The device refuses launches or memory: the same step, repeated, has the results of a step without the fault.
#[test]
fn a_device_that_refuses_once() {
    let standin = Standin::new();
    let live = standin.get(Get::Live);
    for fault in [Set::Launches, Set::Allocations] {
        let mut host = Run::new(setup(8, 2, 0), None, 7, 1);
        let want: Vec<_> = (0..3).map(|turn| host.turn(&[12], turn + 4, ReadPages::All, true)).collect();
        for n in 0..scaled(12, 60) {
            let mut device = Run::new(setup(8, 2, 0), Some(standin.backend()), 7, 1);
            assert!(want[0] == device.turn(&[12], 4, ReadPages::All, true));
            let engine = device.engine.as_mut().unwrap();
            let logits: Vec<_> = (0..LAYERS).map(|layer| engine.put(logits(5, layer, 13, 8))).collect();
            standin.set(fault, n);
            {
                let Run { pikv, sequences, .. } = &mut device;
                let mut step = pikv.begin([(&mut sequences[0], 13)]).unwrap();
                let failed = (0..LAYERS).find_map(|layer| step.route_device(layer, logits[layer]).err());
                if let Some(error) = failed {
                    let known = matches!(
                        error,
                        LoopError::Cache(Error::Device(_) | Error::OutOfMemory { bytes: 1.. })
                    );
                    assert!(known, "{error}");
                }
            }
            standin.set(Set::Reset, 0);
            for (turn, want) in (5..).zip(&want[1..]) {
                assert!(*want == device.turn(&[12], turn, ReadPages::All, true), "fault {n}");
            }
        }
        assert_eq!(standin.get(Get::Live), live);
    }
}

#[test]
fn nobody_leaves_a_step_whose_experts_the_device_has_ranked() {
    let standin = Standin::new();
    let backend = standin.backend();
    let mut run = Run::new(setup(8, 2, 0), Some(backend), 2, 2);
    let Run { pikv, sequences, engine, .. } = &mut run;
    let engine = engine.as_mut().unwrap();
    let refused = |layer, what| Err(LoopError::Cache(Error::HostTensors { layer, what }));
    let mut step = pikv.begin(sequences.iter_mut().map(|sequence| (sequence, 1))).unwrap();
    step.route_device(1, engine.put(logits(3, 1, 2, 8))).unwrap();
    let what = "leaving a sequence out of a step whose experts the device has ranked";
    assert_eq!(step.leave_out(0), refused(1, what));
    drop(step);
    let mut step = pikv.begin(sequences.iter_mut().map(|sequence| (sequence, 1))).unwrap();
    step.leave_out(0).unwrap();
    let ranked = step.route_device(0, engine.put(logits(3, 0, 2, 8)));
    let what = "a step that a sequence was left out of";
    assert_eq!(ranked.map(|_| ()), refused(0, what));
    // The step continues from logits in host memory.
    assert_eq!(step.route(0, &logits(3, 0, 2, 8)).unwrap().rows(), 2);
}
