//! Steps with tensors in device memory: their waits and allocations, early and late errors, and the stream that they use. Their bits are
//! compared with those of host tensors wherever the two back ends are compared (`suite::same`).

use crate::engine::{Context, Engine};
use crate::script::{Op, Options, Run, noise};
use crate::standin::{Get, Set, Standin};
use crate::suite::{check, config, decode, shape};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::cuda::{CudaError, DeviceOutput, DeviceSlice};
use pikv::policy::{Budget, Candidates, Eviction, H2o, KeyNorm, Policy, StreamingLlm, Token};
use pikv::shape::Pairs;
use pikv::{
    Attend, AttendOutput, Backend, Cache, CacheConfig, Dtype, Error, LayerShape, ReadPages, Rope, Sequence,
    Step,
};
use pikv_test::scaled;

fn in_place() -> Options {
    Options { in_place: true, ..Options::default() }
}

fn setup() -> CacheConfig {
    let layers = vec![shape(2, 2, 8, 8, Dtype::Bf16, Dtype::F16), shape(2, 1, 12, 4, Dtype::F32, Dtype::F32)];
    config(layers, 20, 4)
}

#[test]
fn groups_rotations_and_windows_together() {
    for group in [1, 2, 4, 8] {
        let rope = Some(Rope::new(100.0, 10).pairs([Pairs::Halves, Pairs::Neighbours][group as usize % 2]));
        let plain = shape(1, group, 24, 40, Dtype::Bf16, Dtype::F32);
        let layers = vec![plain, plain.rope(rope), plain.window(30)];
        let mut ops =
            vec![Op::Feed(vec![(0, 37)]), Op::Fork(0), Op::Feed(vec![(0, 1), (1, 11)]), Op::Rollback(1, 6)];
        ops.extend([Op::Feed(vec![(0, 3), (1, 1)]), Op::Abandon(vec![(0, 2)], 2)]);
        ops.extend(decode(3));
        check("together", config(layers, 16, 8).sinks(2).experts(2, 1), ops);
    }
}

/// One sequence that steps over existing tensors.
pub struct Loop {
    pub cache: Cache,
    pub sequence: Sequence,
    /// k, v, q, out and lse of each layer.
    pub tensors: Vec<[DeviceSlice; 5]>,
    rows: u32,
    pub engine: Engine,
}

impl Loop {
    fn new(config: CacheConfig, backend: &Backend, rows: u32) -> Loop {
        Loop::of(config, backend, rows, [Dtype::F32; 4])
    }

    /// With keys, values, queries and outputs in other dtypes.
    pub fn of(config: CacheConfig, backend: &Backend, rows: u32, dtypes: [Dtype; 4]) -> Loop {
        let cache = Cache::new(config.backend(backend.clone())).unwrap();
        let mut engine = Engine::new(backend);
        let n = rows as usize;
        let of = |shape: &LayerShape| {
            let (kv, heads, l) = (n * shape.kv_heads as usize, n * shape.query_heads as usize, shape.layout);
            let (k_dim, v_dim) = (l.k_dim as usize, l.v_dim as usize);
            let mut put = |kind, n| engine.put_of(noise(&[kind], n), dtypes[kind as usize]);
            let given = [put(0, kv * k_dim), put(1, kv * v_dim), put(2, heads * k_dim)];
            [given[0], given[1], given[2], engine.room_of(heads * v_dim, dtypes[3]), engine.room(heads)]
        };
        let tensors = cache.config().layers.iter().map(of).collect();
        Loop { sequence: cache.sequence(), cache, tensors, rows, engine }
    }

    /// A step up to its commit.
    pub fn step(&mut self) -> Result<Step<'_>, Error> {
        let Loop { cache, sequence, tensors, rows, .. } = self;
        let mut step = cache.begin([(sequence, *rows)])?;
        let experts = vec![0; *rows as usize];
        for (layer, [k, v, q, out, lse]) in tensors.iter().copied().enumerate() {
            step.append_device(layer, k, v)?;
            step.attend_device(layer, q, &Attend::new(0.3), DeviceOutput::new(out).lse(lse))?;
            step.route(layer, &experts)?;
        }
        Ok(step)
    }
}

#[test]
fn steps_of_a_known_size_wait_for_nothing_and_allocate_nothing() {
    let standin = Standin::new();
    let evict = |rule: Eviction| setup().evict(rule.batch(2));
    let int8 = || Codec::new(Coding::new(Code::Int8).map(Map::hadamard(8).unwrap()), Coding::new(Code::Int8));
    let cases = [
        ("plain", setup(), 0),
        ("packed", setup().compress_layer(0, int8()), 0),
        ("StreamingLLM", evict(Eviction::new(StreamingLlm, Budget::Tokens(60))), 0),
        ("H2O", evict(Eviction::new(H2o, Budget::Tokens(60))), 1),
        // It looks at keys.
        ("key norm", evict(Eviction::new(KeyNorm, Budget::Tokens(60))), 1),
    ];
    let [f32, f16, bf16] = Dtype::ALL;
    let dtypes = [[f32; 4], [bf16; 4], [f16, bf16, bf16, f16], [bf16; 4], [bf16, f32, f16, bf16]];
    for ((name, config, at_commit), dtypes) in cases.into_iter().zip(dtypes) {
        let mut run = Loop::of(config, &standin.backend(), 1, dtypes);
        for _ in 0..140 {
            run.step().unwrap().commit().unwrap();
        }
        for _ in 0..40 {
            let (allocated, waited) = (standin.get(Get::Allocated), standin.get(Get::Waited));
            let step = run.step().unwrap();
            assert_eq!(standin.get(Get::Waited), waited, "{name}: waits up to the last attend");
            step.commit().unwrap();
            assert_eq!(standin.get(Get::Waited) - waited, at_commit, "{name}: waits with the commit");
            assert_eq!(standin.get(Get::Allocated), allocated, "{name}: allocations");
        }
        // The host waits where it asks.
        let waited = standin.get(Get::Waited);
        let mut step = run.step().unwrap();
        step.check().unwrap();
        assert_eq!(standin.get(Get::Waited), waited + 1);
    }
}

#[test]
fn a_device_that_lags_behind_is_waited_for_once_the_ring_is_full() {
    let standin = Standin::new();
    let mut run = Loop::new(setup(), &standin.backend(), 1);
    for _ in 0..40 {
        run.step().unwrap().commit().unwrap();
    }
    standin.set(Set::Slow, 1);
    let waited = |standin: &Standin| standin.get(Get::Waited);
    let before = waited(&standin);
    for _ in 0..8 {
        run.step().unwrap().commit().unwrap();
    }
    assert_eq!(waited(&standin), before, "8 steps of 2 layers are within the ring");
    for _ in 0..400 {
        run.step().unwrap().commit().unwrap();
    }
    assert!(waited(&standin) > before, "400 are not");
}

#[test]
fn an_engine_and_its_cache_on_one_stream() {
    let standin = Standin::with_devices(2);
    let live = standin.get(Get::Live);
    let shape = shape(1, 2, 8, 8, Dtype::Bf16, Dtype::Bf16);
    let cpu = Cache::new(config(vec![shape], 16, 0)).unwrap();
    let mut sequence = cpu.sequence();
    let mut want = vec![0.0; 16];
    let mut step = cpu.begin([(&mut sequence, 1)]).unwrap();
    step.append(0, &noise(&[1], 8), &noise(&[2], 8)).unwrap();
    step.attend(0, &noise(&[3], 16), &Attend::new(0.3), AttendOutput::new(&mut want)).unwrap();
    for default in [false, true] {
        let context = Context::new(1);
        let stream = context.stream();
        let of = if default { std::ptr::null_mut() } else { stream };
        // SAFETY: a stream of the second device's primary context, destroyed after the back end was dropped.
        let backend = unsafe { Backend::cuda_stream(1, of) }.unwrap();
        assert_eq!(backend.stream(), Some(of));
        let mut engine = Engine::on(1, &backend);
        let cache = Cache::new(config(vec![shape], 16, 0).backend(backend)).unwrap();
        let mut sequence = cache.sequence();
        let (k, v, q, out) = (engine.room(8), engine.room(8), engine.room(16), engine.room(16));
        let waited = standin.get(Get::Waited);
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        // The writes are still queued on the stream; the host does not wait.
        engine.write(k, noise(&[1], 8));
        engine.write(v, noise(&[2], 8));
        step.append_device(0, k, v).unwrap();
        engine.write(q, noise(&[3], 16));
        step.attend_device(0, q, &Attend::new(0.3), DeviceOutput::new(out)).unwrap();
        step.commit().unwrap();
        // The first upload, table and parts of a back end take room.
        let grown = standin.get(Get::Waited) - waited;
        assert!(grown < 8, "{grown} waits");
        assert_eq!(
            engine.read(out).iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            want.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        );
        drop((engine, sequence, cache));
        context.destroy(stream);
    }
    assert_eq!(standin.get(Get::Live), live);
}

#[test]
fn tensors_that_are_refused() {
    let standin = Standin::with_devices(2);
    let backends = standin.backends();
    let mut foreign = Engine::on(1, &backends[1]);
    let far = foreign.room(64);
    let mut run = Loop::new(setup(), &backends[0], 2);
    let [k, v, q, out, lse] = run.tensors[0];
    let Loop { cache, sequence, .. } = &mut run;
    // SAFETY: the memory is never accessed: each call is refused.
    let at = |address, like: DeviceSlice| unsafe { DeviceSlice::new(address, like.len(), like.dtype()) };
    // SAFETY: as above.
    let short = |of: DeviceSlice| unsafe { DeviceSlice::new(of.address(), of.len() - 1, of.dtype()) };
    let mut step = cache.begin([(sequence, 2)]).unwrap();
    let length = |what| move |e: &Error| matches!(e, Error::Length { what: w, .. } if *w == what);
    let refused = |what, why: &'static str| move |e: &Error| matches!(e, Error::DeviceTensor { what: w, why: y, .. } if *w == what && y.contains(why));
    let not = |done: Result<(), Error>, expected: &dyn Fn(&Error) -> bool| {
        let error = done.unwrap_err();
        assert!(expected(&error), "{error}");
    };
    not(step.append_device(0, short(k), v), &length("k"));
    not(step.append_device(0, k, short(v)), &length("v"));
    not(step.append_device(0, at(0, k), v), &refused("k", "null"));
    not(step.append_device(0, k, at(v.address() + 2, v)), &refused("v", "multiples of 4"));
    not(step.append_device(0, at(4096, k), v), &refused("k", "no memory"));
    not(step.append_device(0, k, at(far.address(), v)), &refused("v", "another device"));
    not(step.append_device(2, k, v), &|e| matches!(e, Error::Layer { layer: 2, .. }));
    let attend = Attend::new(0.3);
    let to = DeviceOutput::new(out).lse(lse);
    not(step.attend_device(0, q, &attend, to), &|e| matches!(e, Error::NotAppended { layer: 0 }));
    step.append_device(0, k, v).unwrap();
    not(step.append_device(0, k, v), &|e| matches!(e, Error::Twice { layer: 0, .. }));
    not(step.attend_device(0, short(q), &attend, to), &length("q"));
    not(step.attend_device(0, q, &attend, DeviceOutput::new(short(out))), &length("out"));
    not(step.attend_device(0, q, &attend, DeviceOutput::new(out).lse(short(lse))), &length("lse"));
    not(step.attend_device(0, at(far.address(), q), &attend, to), &refused("q", "another device"));
    not(step.attend_device(0, q, &attend, DeviceOutput::new(at(0, out))), &refused("out", "null"));
    not(
        step.attend_device(0, q, &attend, DeviceOutput::new(out).lse(at(7, lse))),
        &refused("lse", "multiples"),
    );
    not(step.attend_device(0, q, &Attend::new(-1.0), to), &|e| matches!(e, Error::Scale(_)));
    let quest = attend.read(ReadPages::Quest { pages: 1 });
    not(
        step.attend_device(0, q, &quest, to),
        &|e| matches!(e, Error::HostTensors { layer: 0, what } if what.contains("Quest")),
    );
    step.attend_device(0, q, &attend, to).unwrap();
    // The layer that is left on slices of the host.
    step.append(1, &[0.5; 48], &[0.5; 16]).unwrap();
    step.attend(1, &[0.5; 48], &attend, AttendOutput::new(&mut [0.0; 16])).unwrap();
    step.check().unwrap();
    step.commit().unwrap();
    drop(foreign);
    for (config, why) in [(setup(), "CPU"), (setup().backend(backends[0].clone()).key_bounds(true), "bounds")]
    {
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        let mut step = cache.begin([(&mut sequence, 2)]).unwrap();
        let host = |e: &Error| matches!(e, Error::HostTensors { layer: 0, what } if what.contains(why));
        not(step.append_device(0, k, v), &host);
        step.check().unwrap();
    }
}

/// A step with the loop's tensors, except one value of one of them.
fn spoiled(run: &mut Loop, layer: usize, tensor: usize, at: usize, value: f32) {
    let of = run.tensors[layer][tensor];
    let mut values = noise(&[tensor as u64], of.len());
    values[at] = value;
    run.engine.write(of, values);
}

#[test]
fn values_that_do_not_fit_are_found_later_and_named_as_on_the_host() {
    let standin = Standin::new();
    let int8 = Codec::new(Coding::new(Code::F16), Coding::new(Code::Int8));
    for (layer, tensor, at, value) in [
        (0, 0, 17, f32::NAN),
        (0, 0, 31, 65_000.0),
        (0, 1, 5, 65_520.0),
        (1, 0, 40, f32::INFINITY),
        (1, 1, 0, f32::NAN),
        (0, 2, 63, f32::NEG_INFINITY),
        (1, 2, 30, f32::NAN),
    ] {
        let backend = standin.backend();
        let mut run = Loop::new(setup().compress_layer(0, int8.clone()), &backend, 2);
        let mut want = None;
        let shapes = run.cache.config().layers.clone();
        let mut step = run.cache.begin([(&mut run.sequence, 2)]).unwrap();
        for (l, shape) in shapes.iter().enumerate() {
            let mut tensors: Vec<Vec<f32>> =
                (0..3).map(|kind| noise(&[kind], run.tensors[l][kind as usize].len())).collect();
            if l == layer {
                tensors[tensor][at] = value;
            }
            let mut out = vec![0.0; 2 * (shape.query_heads * shape.layout.v_dim) as usize];
            let done = step.append(l, &tensors[0], &tensors[1]);
            let done = done
                .and_then(|()| step.attend(l, &tensors[2], &Attend::new(0.3), AttendOutput::new(&mut out)));
            if let Err(e) = done {
                want = Some(e.to_string());
                break;
            }
        }
        drop(step);
        let want = want.expect("the host refuses it");
        spoiled(&mut run, layer, tensor, at, value);
        let mut step = run.step().unwrap();
        assert_eq!(step.check().unwrap_err().to_string(), want);
        drop(step);
        assert_eq!(run.sequence.next_position().0, 0);
        // As if the step had not been made.
        spoiled(&mut run, layer, tensor, at, 0.5);
        let mut step = run.step().unwrap();
        step.check().unwrap();
        step.commit().unwrap();
    }
}

#[test]
fn the_largest_values_of_a_dtype_fit() {
    let standin = Standin::new();
    for dtype in Dtype::ALL {
        let mut run = Loop::new(config(vec![shape(1, 1, 4, 4, dtype, dtype)], 16, 0), &standin.backend(), 1);
        for (value, fits) in [(dtype.limit(), true), (-dtype.limit(), true), (dtype.limit().next_up(), false)]
        {
            assert_eq!(dtype.encode(value).is_some(), fits);
            spoiled(&mut run, 0, 0, 3, value);
            run.engine.write(run.tensors[0][2], vec![0.0; 4]);
            let mut step = run.step().unwrap();
            assert_eq!(step.check().is_ok(), fits, "{value}");
        }
    }
}

#[test]
fn scores_that_overflow_and_commits_that_look() {
    let standin = Standin::new();
    for (rule, looks) in [(None, false), (Some(Eviction::new(H2o, Budget::Tokens(60))), true)] {
        let config = rule.into_iter().fold(setup(), CacheConfig::evict);
        let mut run = Loop::new(config, &standin.backend(), 2);
        let q = run.tensors[1][2];
        run.engine.write(q, vec![3e38; q.len()]);
        let mut step = run.step().unwrap();
        let error = step.check().unwrap_err();
        assert!(matches!(error, Error::ScoreOverflow { layer: 1, row: 0, head: 0, scale: 0.3 }), "{error}");
        drop(step);
        let committed = run.step().unwrap().commit();
        assert_eq!(committed.is_err(), looks, "a commit looks where it waits");
        assert_eq!(run.sequence.next_position().0, if looks { 0 } else { 2 });
    }
}

#[test]
fn launches_that_are_refused_and_devices_that_are_lost() {
    let standin = Standin::new();
    let ops =
        [Op::Feed(vec![(0, 45)]), Op::Fork(0), Op::Feed(vec![(0, 1), (1, 3)]), Op::Abandon(vec![(0, 20)], 1)];
    let ops = [&ops[..], &[Op::Feed(vec![(0, 30)]), Op::Feed(vec![(1, 1)])]].concat();
    let config = setup().experts(2, 1).evict(Eviction::new(H2o, Budget::Tokens(90)));
    let mut cpu = Run::new(config.clone(), Options::default()).unwrap();
    ops.iter().for_each(|op| cpu.act(op).unwrap());
    cpu.look().unwrap();
    let live = standin.get(Get::Live);
    let mut refusals = 0;
    for n in (0..).step_by(scaled(4, 1)) {
        let mut run = Run::new(config.clone().backend(standin.backend()), in_place()).unwrap();
        standin.set(Set::Launches, n);
        for op in &ops {
            let used = run.cache.usage();
            if let Err(e) = run.act(op) {
                let refused =
                    matches!(e, Error::Device(CudaError::Driver { call: "cuLaunchKernel", code: 701, .. }));
                assert!(refused, "{n}: {e}");
                assert_eq!(run.cache.usage(), used, "{n}: pages of a step that failed are kept");
                refusals += 1;
                run.act(op).unwrap();
            }
        }
        let due = standin.get(Get::Due);
        standin.set(Set::Reset, 0);
        run.look().unwrap();
        assert!(run.record == cpu.record, "{n}");
        drop(run);
        assert_eq!(standin.get(Get::Live), live, "{n}: something was not given back");
        if due > 0 {
            break;
        }
    }
    assert!(refusals > scaled(5, 20), "{refusals}");
    for n in [0, 1, 3, 8, 20] {
        let mut run = Loop::new(setup(), &standin.backend(), 3);
        standin.set(Set::Lose, n);
        let lost = |e: &Error| matches!(e, Error::Device(CudaError::Driver { code: 719, .. }));
        let mut failed = 0;
        for _ in 0..4 {
            let len = run.sequence.next_position();
            let done = match run.step() {
                Ok(mut step) => step.check().and_then(|()| step.commit()),
                Err(e) => Err(e),
            };
            if let Err(e) = done {
                assert!(lost(&e), "{n}: {e}");
                assert_eq!(run.sequence.next_position(), len);
                failed += 1;
            }
        }
        assert!(failed > 0, "{n}: it shows");
        drop(run);
        standin.set(Set::Reset, 0);
        assert_eq!(standin.get(Get::Live), live, "{n}: something was not given back");
    }
}

/// Keeps a function of a token's position, and observes nothing.
#[derive(Debug)]
struct Scattered;

impl Policy for Scattered {
    fn name(&self) -> &str {
        "scattered"
    }

    fn words(&self) -> usize {
        1
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        state[0] = (token.position.0 * 37 % 101) as f32;
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(utility, state)| *utility = state);
    }
}

#[test]
fn policies_that_are_told_nothing() {
    let ops: Vec<Op> = [30, 1, 40, 1, 1, 9, 1, 1].map(|n| Op::Feed(vec![(0, n)])).to_vec();
    // A policy that observes, over two sequences, reuses its lists.
    let two = [&ops[..], &[Op::Fork(0), Op::Feed(vec![(0, 1), (1, 2)])]].concat();
    let told = || setup().evict(Eviction::new(H2o, Budget::Tokens(50)).batch(3));
    check("told", told(), two.clone());
    check("told nothing", setup().evict(Eviction::new(Scattered, Budget::Tokens(50)).batch(3)), ops.clone());
    check("told", told(), two);
    check("no policy", setup(), ops);
}

/// Tokens of the host and of the device in one cache, call by call.
#[test]
fn forms_that_are_mixed() {
    let standin = Standin::new();
    let config = setup().evict(Eviction::new(H2o, Budget::Tokens(50)).batch(2));
    let mut cpu = Run::new(config.clone(), Options::default()).unwrap();
    let mut cuda = Run::new(config.backend(standin.backend()), Options::default()).unwrap();
    for i in 0..40 {
        cuda.options.in_place = i % 3 != 1;
        for run in [&mut cpu, &mut cuda] {
            run.act(&Op::Feed(vec![(0, 1 + i % 4)])).unwrap();
        }
    }
    cpu.look().unwrap();
    cuda.look().unwrap();
    assert!(cpu.record == cuda.record);
}

#[test]
fn a_step_that_is_checked_twice_is_checked_anew() {
    let standin = Standin::new();
    let mut run = Loop::new(setup(), &standin.backend(), 1);
    spoiled(&mut run, 1, 2, 3, f32::NAN);
    let Loop { cache, sequence, tensors, .. } = &mut run;
    let mut step = cache.begin([(sequence, 1)]).unwrap();
    for (layer, [k, v, q, out, lse]) in tensors.iter().copied().enumerate() {
        step.check().unwrap();
        step.append_device(layer, k, v).unwrap();
        step.attend_device(layer, q, &Attend::new(0.3), DeviceOutput::new(out).lse(lse)).unwrap();
    }
    assert!(matches!(step.check(), Err(Error::Query { layer: 1, row: 0, head: 0, channel: 3, .. })));
}

/// Two sequences step over device tensors, and one is left out: the other has the results of a step alone on the host.
#[test]
fn a_sequence_leaves_a_step_of_tensors_of_the_device() {
    let standin = Standin::new();
    let evict = Eviction::new(KeyNorm, Budget::Tokens(60)).batch(2);
    for config in [setup(), setup().evict(evict), setup().evict(Eviction::new(H2o, Budget::Tokens(60)))] {
        let backend = standin.backend();
        let mut engine = Engine::new(&backend);
        let device = Cache::new(config.clone().backend(backend)).unwrap();
        let host = Cache::new(config).unwrap();
        let (mut gone, mut stays, mut alone) = (device.sequence(), device.sequence(), host.sequence());
        let layers = device.config().layers.len();
        for turn in 0..12usize {
            // The sequence that leaves is first, and has another length each time.
            let (first, own) = (1 + turn % 5, 1 + turn * 7 % 20);
            let mut step = device.begin([(&mut gone, first as u32), (&mut stays, own as u32)]).unwrap();
            let mut twin = host.begin([(&mut alone, own as u32)]).unwrap();
            for layer in 0..layers {
                let shape = device.config().layers[layer];
                let (kv, heads) = (shape.kv_heads as usize, shape.query_heads as usize);
                let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
                let left = turn % 4 * layers / 2;
                if layer >= left {
                    step.leave_out(0).unwrap();
                }
                let given = [kv * k_dim, kv * v_dim, heads * k_dim].map(|width| {
                    let mut all = noise(&[turn as u64, layer as u64, width as u64], (first + own) * width);
                    let rest = all[first * width..].to_vec();
                    // Rows of a sequence that left are not read.
                    all[..first * width].iter_mut().filter(|_| layer >= left).for_each(|x| *x = f32::NAN);
                    (all, rest)
                });
                let [k, v, q] = given.each_ref().map(|(all, _)| engine.put(all.clone()));
                let (out, lse) = (
                    engine.put(vec![7.0; (first + own) * heads * v_dim]),
                    engine.room((first + own) * heads),
                );
                step.append_device(layer, k, v).unwrap();
                let how = Attend::new(0.3);
                step.attend_device(layer, q, &how, DeviceOutput::new(out).lse(lse)).unwrap();
                let mut want = vec![0.0; own * heads * v_dim];
                twin.append(layer, &given[0].1, &given[1].1).unwrap();
                twin.attend(layer, &given[2].1, &how, AttendOutput::new(&mut want)).unwrap();
                let got = engine.read(out);
                let (before, got) = got.split_at(first * heads * v_dim);
                assert!(layer < left || before.iter().all(|x| *x == 7.0), "written to");
                assert_eq!(pikv_test::numbers::bits(got), pikv_test::numbers::bits(&want), "{turn}, {layer}");
            }
            step.leave_out(0).unwrap();
            step.check().unwrap();
            step.commit().unwrap();
            twin.commit().unwrap();
            assert_eq!((gone.next_position().0, gone.bytes()), (0, 0));
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                assert_eq!(stays.resident(layer, head), alone.resident(layer, head));
            }
        }
    }
}

/// A sequence whose tensors have a fault is not left out: the call returns the fault, which may hide those of other sequences.
#[test]
fn a_fault_on_the_device_is_told_before_anybody_leaves() {
    let standin = Standin::new();
    let backend = standin.backend();
    let mut engine = Engine::new(&backend);
    let cache = Cache::new(setup().backend(backend)).unwrap();
    let (mut bad, mut good) = (cache.sequence(), cache.sequence());
    let mut step = cache.begin([(&mut bad, 1), (&mut good, 1)]).unwrap();
    let mut k = noise(&[1], 2 * 16);
    k[3] = f32::NAN;
    let (k, v) = (engine.put(k), engine.put(noise(&[2], 2 * 16)));
    step.append_device(0, k, v).unwrap();
    assert!(matches!(step.leave_out(0), Err(Error::Unstorable { row: 0, .. })));
    drop(step);
    assert_eq!(cache.usage().taken, 0);
}
