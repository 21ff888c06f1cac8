//! The kernels that rank experts and learn: compared with the CPU's lanes bit for bit, and with the formulas.

use bytemuck::bytes_of;
use pikv::lanes::Lanes;
use pikv_core::hash::mix;
use pikv_core::score::{self, Bias, Coefficients, Groups, Ranking};
use pikv_core::warp::LANES;
use pikv_interpreter::Machine;
use pikv_kernels::args::{LearnArg, RouteArg};
use pikv_lanes::route;
use pikv_test::numbers::{Rng, bits};
use pikv_test::scaled;

const EXPERTS: [u32; 12] = [1, 2, 8, 31, 32, 33, 60, 64, 256, 257, 512, 1024];

fn machine() -> Machine {
    let path = format!("{}/../pikv-kernels/ptx/pikv_sm_70.ptx", env!("CARGO_MANIFEST_DIR"));
    Machine::new(&std::fs::read_to_string(&path).expect(&path)).unwrap()
}

/// Rows for one launch.
struct Case {
    experts: usize,
    top_k: usize,
    rows: usize,
    logits: Vec<f32>,
    fixed: Option<Vec<[f32; LANES]>>,
    cap: Option<f32>,
    groups: Option<Groups>,
    /// Experts by the position, or by its hash, and how far they lie apart.
    placed: Option<(bool, u32)>,
    positions: Vec<u32>,
    /// Whether the plain top-k is a separate choice.
    model: bool,
}

impl Case {
    fn new(rng: &mut Rng, experts: u32) -> Case {
        let top_k = rng.of(&[1, 2, 2, 8, 8, experts]).min(experts);
        let (experts, top_k, rows) = (experts as usize, top_k as usize, 1 + rng.below(6) as usize);
        let kind = rng.below(5);
        let mut logits: Vec<f32> = (0..rows * experts)
            .map(|i| match kind {
                0 => 0.0,
                1 => rng.value(2.0).round(),
                2 => rng.value(1e6),
                3 => rng.value(1.0) + if i % experts == experts / 3 { 20.0 } else { 0.0 },
                _ => rng.value(3.0),
            })
            .collect();
        if rng.one_in(4) {
            for _ in 0..1 + rng.below(3) {
                let at = rng.below(logits.len() as u32) as usize;
                logits[at] = rng.of(&[f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            }
        }
        let fixed = rng.one_in(2).then(|| {
            let scale = rng.of(&[0.3, 3.0]);
            let mut fixed = vec![[0.0; LANES]; score::rows(experts)];
            fixed.as_flattened_mut()[..experts].fill_with(|| rng.value(scale));
            fixed
        });
        let cap = (fixed.is_some() && rng.one_in(2)).then(|| rng.of(&[0.25, 1.0]));
        let count = (2..=32u32).rfind(|n| (experts as u32).is_multiple_of(*n));
        let groups = count.filter(|_| rng.one_in(3)).and_then(|count| {
            let size = experts as u32 / count;
            let least = (top_k as u32).div_ceil(size);
            let best = rng.of(&[1, 2, size]).min(size);
            (least <= count).then(|| Groups { count, kept: least + rng.below(count - least + 1), best })
        });
        let placed = rng.one_in(4).then(|| (rng.one_in(2), 1));
        let positions = (0..rows).map(|_| rng.next() as u32 >> 1).collect();
        let model = fixed.is_some() || groups.is_some() || placed.is_some() || rng.one_in(4);
        Case { experts, top_k, rows, logits, fixed, cap, groups, placed, positions, model }
    }

    fn ranking(&self) -> Ranking<'_> {
        let bias = self.fixed.as_ref().map(|fixed| Bias { fixed, cap: self.cap });
        Ranking { bias, groups: self.groups }
    }

    /// Experts and weights on the CPU's lanes.
    fn host(&self, own: bool, lanes: Lanes) -> (Vec<u16>, Vec<f32>) {
        let (experts, top_k) = (self.experts, self.top_k);
        let (mut chosen, mut weights) = (vec![0; self.rows * top_k], vec![0.0; self.rows * top_k]);
        match self.placed.filter(|_| own) {
            Some((hashed, stride)) => {
                for (i, expert) in chosen.iter_mut().enumerate() {
                    let position = u64::from(self.positions[i / top_k]);
                    let start = if hashed { mix(position) } else { position };
                    *expert = ((u128::from(start) + (i % top_k) as u128 * u128::from(stride))
                        % experts as u128) as u16;
                }
                route::weigh(lanes, &self.logits, experts, top_k, &chosen, &mut weights);
            }
            None => {
                let ranking = if own { self.ranking() } else { Ranking::default() };
                route::rank(lanes, &self.logits, experts, top_k, ranking, &mut chosen, &mut weights);
            }
        }
        (chosen, weights)
    }

    /// The best of a row, by sorting the biased logits.
    fn sorted(&self, row: usize, own: bool) -> Vec<u16> {
        let bias = |e: usize| {
            let fixed = self.fixed.as_ref().filter(|_| own);
            let b = fixed.map_or(0.0, |fixed| fixed.as_flattened()[e]);
            self.cap.filter(|_| own).map_or(b, |cap| b.clamp(-cap, cap))
        };
        let score = |e: usize| self.logits[row * self.experts + e] - bias(e);
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by(|a, b| score(*b).partial_cmp(&score(*a)).expect("finite").then(a.cmp(b)));
        order[..self.top_k].iter().map(|e| *e as u16).collect()
    }

    fn is_finite(&self) -> bool {
        self.logits.iter().all(|x| x.is_finite())
    }
}

/// The results of a launch.
struct Left {
    filing: (Vec<u16>, Vec<f32>),
    model: Option<(Vec<u16>, Vec<f32>)>,
    counts: Vec<u64>,
    entropies: Vec<f32>,
    fault: u64,
}

fn launch(machine: &mut Machine, case: &Case, counts: &[u64]) -> Left {
    let (rows, experts, top_k) = (case.rows, case.experts, case.top_k);
    let memory = &mut machine.memory;
    let choices = rows * top_k;
    let mut room = |bytes: usize| memory.allocate(bytes);
    let [chosen, weights, model, model_weights] = [(); 4].map(|()| room(4 * choices));
    let entropies = room(4 * rows * experts);
    let fault = memory.put(&[u64::MAX]);
    let logits = memory.put(&case.logits);
    let fixed = case.fixed.as_ref().map_or(0, |fixed| memory.put(fixed));
    let counts_at = memory.put(counts);
    let positions = memory.put(&case.positions);
    let groups = case.groups.unwrap_or(Groups { count: 0, kept: 0, best: 0 });
    let of = RouteArg {
        logits,
        fixed,
        chosen,
        weights,
        model: if case.model { model } else { 0 },
        model_weights: if case.model { model_weights } else { 0 },
        counts: counts_at,
        entropies,
        fault,
        positions,
        rows: rows as u32,
        experts: experts as u32,
        top_k: top_k as u32,
        cap: case.cap.unwrap_or(0.0),
        groups: groups.count,
        kept: groups.kept,
        best: groups.best,
        start: match case.placed {
            None => RouteArg::RANKED,
            Some((true, _)) => RouteArg::HASHED,
            Some((false, _)) => RouteArg::ROBIN,
        },
        stride: case.placed.map_or(0, |(_, stride)| stride),
        pad: 0,
    };
    let entry = ["route_r1", "route_r8", "route_r32"][match experts.div_ceil(LANES) {
        0..=1 => 0,
        2..=8 => 1,
        _ => 2,
    }];
    let grid = (2 * rows).div_ceil(4) as u32;
    machine.launch(entry, grid, 128, &[bytes_of(&of)]).unwrap_or_else(|e| panic!("{entry}: {e}"));
    let memory = &mut machine.memory;
    let choice = |experts: u64, weights: u64| {
        let chosen: Vec<u32> = memory.read(experts, choices).expect("written");
        let weights: Vec<f32> = memory.read(weights, choices).expect("written");
        (chosen.into_iter().map(|e| u16::try_from(e).unwrap()).collect(), weights)
    };
    let left = Left {
        filing: choice(chosen, weights),
        model: case.model.then(|| choice(model, model_weights)),
        counts: memory.read(counts_at, experts).unwrap(),
        entropies: memory.read(entropies, rows * experts).unwrap(),
        fault: memory.read(fault, 1).unwrap()[0],
    };
    let all = [chosen, weights, model, model_weights, entropies, fault, logits, counts_at, positions];
    all.into_iter().chain((fixed != 0).then_some(fixed)).for_each(|at| memory.free(at).unwrap());
    left
}

fn check(machine: &mut Machine, rng: &mut Rng, case: &Case) {
    let (experts, top_k) = (case.experts, case.top_k);
    let what = format!("{} rows, {top_k} of {experts}, {:?}, {:?}", case.rows, case.groups, case.placed);
    let before: Vec<u64> = (0..experts).map(|_| rng.next() >> 20).collect();
    let left = launch(machine, case, &before);
    let first_bad = case.logits.iter().position(|x| !x.is_finite());
    let fault = first_bad.map_or(u64::MAX, |at| (at as u64) << 32 | u64::from(case.logits[at].to_bits()));
    assert_eq!(left.fault, fault, "{what}");
    let mut counts = before;
    left.filing.0.iter().for_each(|e| counts[usize::from(*e)] += 1);
    assert_eq!(left.counts, counts, "{what}");
    for chosen in left.filing.0.chunks(top_k) {
        let set: std::collections::BTreeSet<_> = chosen.iter().collect();
        assert!(set.len() == top_k && chosen.iter().all(|e| usize::from(*e) < experts), "{what}: {chosen:?}");
    }
    // Results of a row that the host refuses are unspecified, except that its experts exist.
    if !case.is_finite() {
        return;
    }
    for lanes in Lanes::available() {
        let both = [(true, Some(&left.filing)), (false, left.model.as_ref())];
        for (own, (chosen, weights)) in both.into_iter().filter_map(|(own, of)| Some((own, of?))) {
            let want = case.host(own, lanes);
            assert_eq!((chosen, bits(weights)), (&want.0, bits(&want.1)), "{what}, {own}");
            if !own || (case.groups.is_none() && case.placed.is_none()) {
                for (row, chosen) in chosen.chunks(top_k).enumerate() {
                    assert_eq!(chosen, case.sorted(row, own), "{what}, {own}, row {row}");
                }
            }
        }
    }
    // The averages of entropy, from where they begin, after some rows and after all.
    let keep = rng.of(&[0.0, 0.5, 0.9]);
    let from: Vec<f32> = (0..experts).map(|_| rng.value(0.5) + 0.5).collect();
    let split = rng.below(case.rows as u32 + 1) as usize;
    let mut h = from.clone();
    route::binary_entropy(Lanes::detect(), &case.logits, keep, &mut h);
    let memory = &mut machine.memory;
    let (entropies, at) = (memory.put(&left.entropies), memory.put(&from));
    let between = memory.allocate(4 * experts);
    let grid = experts.div_ceil(4 * LANES) as u32;
    for (first, rows, from, to) in [(0, split, at, between), (split, case.rows - split, between, at)] {
        let (first, rows) = (entropies + 4 * (first * experts) as u64, rows as u32);
        let count = experts as u32;
        let args: &[&[u8]] = &[
            bytes_of(&first),
            bytes_of(&rows),
            bytes_of(&count),
            bytes_of(&keep),
            bytes_of(&from),
            bytes_of(&to),
        ];
        machine.launch("fold_entropies", grid, 128, args).unwrap_or_else(|e| panic!("{what}: {e}"));
    }
    let got: Vec<f32> = machine.memory.read(at, experts).unwrap();
    assert_eq!(bits(&got), bits(&h), "{what}, entropy");
    [entropies, at, between].into_iter().for_each(|at| machine.memory.free(at).unwrap());
}

#[test]
fn ranks_with_the_bits_of_the_cpu() {
    let mut machine = machine();
    let mut rng = Rng(0x90e7);
    for experts in EXPERTS {
        // Wide rows take longer.
        for _ in 0..scaled(if experts > 256 { 6 } else { 16 }, 300) {
            let case = Case::new(&mut rng, experts);
            check(&mut machine, &mut rng, &case);
        }
    }
    for (entry, part) in [("route_r1", 8), ("route_r8", 8), ("route_r32", 4), ("fold_entropies", 3)] {
        let (idle, of) = machine.program.idle(entry);
        assert!(idle.len() * part < of, "{entry}: of {of} instructions {} were never run", idle.len());
    }
}

/// Averages of a router as the formulas say, one expert after the other.
#[test]
fn learns_with_the_bits_of_the_formulas() {
    let mut machine = machine();
    let mut rng = Rng(0x1ea2);
    for experts in EXPERTS.map(|experts| experts as usize) {
        for _ in 0..scaled(12, 200) {
            let [load, miss, entropy, none] = [(); 4].map(|()| rng.one_in(2));
            let counts: Vec<u64> =
                (0..experts).map(|_| if none { 0 } else { rng.next() >> rng.of(&[63, 60, 17]) }).collect();
            let average = |rng: &mut Rng, most: f32| -> Vec<f32> {
                (0..experts).map(|_| (rng.value(0.5) + 0.5) * most).collect()
            };
            let (mu, m) = (average(&mut rng, 3.0), average(&mut rng, 40.0));
            let (h, next) = (average(&mut rng, 1.0), average(&mut rng, 1.0));
            let wanted: Vec<u32> =
                (0..experts).map(|_| rng.next() as u32 >> rng.of(&[0, 24, 31, 31])).collect();
            let missed: Vec<u32> = wanted.iter().map(|n| (rng.next() % (u64::from(*n) + 1)) as u32).collect();
            let (keep_load, keep_miss) = (rng.of(&[0.0, 0.9, 0.99]), rng.of(&[0.0, 0.9, 0.5]));
            let (count_misses, of_page) = (rng.below(2), rng.of(&[0, 1, 32]));
            let [alpha, lambda, beta] = std::array::from_fn(|_| rng.value(1.0).abs());
            let c = Coefficients::new(alpha, lambda, beta);
            let memory = &mut machine.memory;
            let kept = |on: bool, at: u64| if on { at } else { 0 };
            let at = [memory.put(&mu), memory.put(&m), memory.put(&h), memory.put(&next)];
            let (counts_at, wanted_at, missed_at) =
                (memory.put(&counts), memory.put(&wanted), memory.put(&missed));
            let fixed_at = memory.put(&vec![[f32::NAN; LANES]; score::rows(experts)]);
            let of = LearnArg {
                fixed: fixed_at,
                counts: kept(load, counts_at),
                load: kept(load, at[0]),
                miss: kept(miss, at[1]),
                entropy: kept(entropy, at[2]),
                next: kept(entropy, at[3]),
                wanted: kept(miss, wanted_at),
                missed: kept(miss, missed_at),
                experts: experts as u32,
                of_page,
                count_misses,
                keep_load,
                keep_miss,
                alpha: c.alpha,
                lambda: c.lambda,
                beta: c.beta,
            };
            let what = format!("{of:?}");
            machine
                .launch("learn_router", 1, 128, &[bytes_of(&of)])
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            let total: u64 = counts.iter().sum();
            let mu: Vec<f32> = (0..experts)
                .map(|e| match load && total > 0 {
                    true => {
                        let share = experts as f64 * counts[e] as f64 / total as f64;
                        keep_load * mu[e] + (1.0 - keep_load) * share as f32
                    }
                    false => mu[e],
                })
                .collect();
            let m: Vec<f32> = (0..experts)
                .map(|e| {
                    let (wanted, missed) = (f64::from(wanted[e]), f64::from(missed[e]));
                    match (miss, count_misses) {
                        (true, 0) if wanted > 0.0 => {
                            keep_miss * m[e] + (1.0 - keep_miss) * (missed / wanted) as f32
                        }
                        (true, 1) => keep_miss * m[e] + (missed / f64::from(of_page.max(1))) as f32,
                        _ => m[e],
                    }
                })
                .collect();
            let h = if entropy { next.clone() } else { h };
            let memory = &machine.memory;
            let read = |at: u64| bits(&memory.read::<f32>(at, experts).unwrap());
            assert_eq!([read(at[0]), read(at[1]), read(at[2])], [bits(&mu), bits(&m), bits(&h)], "{what}");
            let left: Vec<u64> = memory.read(counts_at, experts).unwrap();
            assert_eq!(left, if load && total > 0 { vec![0; experts] } else { counts }, "{what}");
            let mut fixed = vec![[f32::NAN; LANES]; score::rows(experts)];
            let list = |on: bool, list: &[f32]| if on { list.to_vec() } else { Vec::new() };
            let (mu, m, h) = (list(load, &mu), list(miss, &m), list(entropy, &h));
            route::penalties(Lanes::Portable, c, experts, &mu, &m, &h, &mut fixed);
            let got: Vec<f32> = memory.read(fixed_at, fixed.len() * LANES).unwrap();
            assert_eq!(bits(&got), bits(fixed.as_flattened()), "{what}");
            let all = at.into_iter().chain([counts_at, wanted_at, missed_at, fixed_at]);
            all.for_each(|at| machine.memory.free(at).unwrap());
        }
    }
    let (idle, of) = machine.program.idle("learn_router");
    assert!(idle.len() * 10 < of, "of {of} instructions nothing ran {idle:?}");
}
