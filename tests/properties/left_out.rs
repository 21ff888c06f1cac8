//! Sequences that leave a step at any point, compared with steps that never had them: outputs, pages, masses and hits of the others are
//! equal bit for bit, and the sequences that left are unchanged.

use pikv::report::PageMass;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, Dtype, Error, LayerShape, Sequence, Step, StepReport};
use pikv_test::backend::backend;
use pikv_test::numbers::bits;
use pikv_test::twins::{self, CHANGES, Change, Given, Model, Pair, Values, at};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; the form of reading; sequences that leave, by index, and the call after which they do; whether the step is
    /// dropped.
    Step {
        parts: Vec<(u8, u32)>,
        read: u8,
        leave: Vec<(usize, usize)>,
        dropped: bool,
    },
    /// Moves pages of a sequence to the lower tier.
    Demote {
        sequence: u8,
        share: f64,
    },
    Change(Change),
}

fn op() -> impl Strategy<Value = Op> {
    let part = || (0u8..4, prop_oneof![3 => Just(1u32), 2 => 1u32..=12, 3 => 10u32..=90]);
    let parts = || proptest::collection::vec(part(), 1..=4);
    let leave = || proptest::collection::vec((0usize..4, 0usize..=9), 0..=3);
    prop_oneof![
        2 => Just(Op::New),
        14 => (parts(), any::<u8>(), leave(), prop_oneof![9 => Just(false), 1 => Just(true)])
            .prop_map(|(parts, read, leave, dropped)| Op::Step { parts, read, leave, dropped }),
        8 => (0u8..4, 0.0..1.0f64).prop_map(|(sequence, share)| Op::Demote { sequence, share }),
        CHANGES => twins::change().prop_map(Op::Change),
    ]
}

/// The results of a call of attention: outputs, log-sum-exps, and masses by page.
type Attended = (Vec<f32>, Vec<f32>, Vec<PageMass>);

/// The rows of the sequences that stay.
fn staying<T: Copy>(all: &[T], rows: &[bool]) -> Vec<T> {
    let width = all.len() / rows.len();
    let own = |(row, stays): (usize, &bool)| all[row * width..][..if *stays { width } else { 0 }].to_vec();
    rows.iter().enumerate().flat_map(own).collect()
}

/// A step that some leave.
struct Leaving<'a> {
    step: Step<'a>,
    /// The tokens of each sequence, and whether it has left.
    parts: Vec<(u32, bool)>,
    leave: Vec<(usize, usize)>,
    calls: usize,
}

impl Leaving<'_> {
    /// Before each call: the sequences that are due leave, some of them twice.
    fn leave(&mut self) {
        let due = self.leave.iter().filter(|(_, after)| *after <= self.calls).copied();
        for (place, _) in due.collect::<Vec<_>>() {
            self.step.leave_out(place).unwrap();
            self.parts[place].1 = true;
        }
        self.calls += 1;
    }

    /// Whether each row is still in the step.
    fn rows(&self) -> Vec<bool> {
        self.parts.iter().flat_map(|(n, out)| (0..*n).map(|_| !*out)).collect()
    }

    /// The input of a layer; rows of sequences that left hold values that a cache refuses.
    fn given(&self, of: &Given) -> Given {
        fn spoilt<T: Copy>(all: &[T], rows: &[bool], by: T) -> Vec<T> {
            let width = all.len() / rows.len();
            all.iter().enumerate().map(|(i, x)| if rows[i / width] { *x } else { by }).collect()
        }
        let rows = self.rows();
        let values = |of: &[f32]| spoilt(of, &rows, f32::NAN);
        Given {
            k: values(&of.k),
            v: values(&of.v),
            q: values(&of.q),
            routes: spoilt(&of.routes, &rows, 9999),
        }
    }

    /// The calls of a layer.
    fn layer(&mut self, model: &Model, layer: usize, of: &Given, how: &Attend) -> Attended {
        self.leave();
        let Given { k, v, .. } = self.given(of);
        self.step.append(layer, &k, &v).unwrap();
        self.leave();
        if model.experts > 1 {
            self.step.route(layer, &self.given(of).routes).unwrap();
        }
        self.leave();
        let (outs, lses) = model.outs(self.step.rows());
        let (mut out, mut lse, mut mass) = (vec![7.0; outs], vec![7.0; lses], Vec::new());
        let to = AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass);
        self.step.attend(layer, &self.given(of).q, how, to).unwrap();
        // Rows of sequences that left are not written.
        let gone: Vec<bool> = self.rows().iter().map(|stays| !stays).collect();
        assert!(staying(&out, &gone).iter().chain(&staying(&lse, &gone)).all(|x| *x == 7.0));
        let left = |mass: &PageMass| self.parts[mass.sequence].1;
        assert!(!mass.iter().any(left), "masses of a sequence that was left out");
        (out, lse, mass)
    }
}

struct Twins {
    model: Model,
    caches: [Cache; 2],
    pairs: Vec<Pair>,
    values: Values,
    left: u32,
    remote: u64,
}

impl Twins {
    fn step(&mut self, parts: &[(u8, u32)], read: u8, leave: &[(usize, usize)], dropped: bool) {
        let Twins { model, caches, pairs, values, left, remote } = self;
        let chosen = twins::chosen(pairs, parts);
        let leave: Vec<(usize, usize)> = leave.iter().filter(|(i, _)| *i < chosen.len()).copied().collect();
        *left += leave.len() as u32;
        let (how, goes) = (model.how(read), |place: usize| leave.iter().any(|(i, _)| *i == place));
        let stay: Vec<(usize, u32)> =
            chosen.iter().enumerate().filter(|(i, _)| !goes(*i)).map(|(_, part)| *part).collect();
        let given = values.step(model, chosen.iter().map(|(_, n)| *n as usize).sum());
        let mut reports = [StepReport::default(), StepReport::default()];
        let (got, rows) = {
            let [first, _] = twins::parts(pairs, &chosen);
            let parts = chosen.iter().map(|(_, n)| (*n, false)).collect();
            let step = caches[0].begin(first).unwrap();
            let mut leaving = Leaving { step, parts, leave: leave.clone(), calls: 0 };
            let layer = |(l, of)| leaving.layer(model, l, of, &how);
            let got: Vec<Attended> = given.iter().enumerate().map(layer).collect();
            // Sequences that leave last.
            leaving.leave.iter_mut().for_each(|(_, after)| *after = 0);
            leaving.leave();
            let rows = leaving.rows();
            match dropped {
                true => drop(leaving.step),
                false => leaving.step.commit_with(&mut reports[0]).unwrap(),
            }
            (got, rows)
        };
        if stay.is_empty() {
            return;
        }
        let [_, second] = twins::parts(pairs, &stay);
        let mut step = caches[1].begin(second).unwrap();
        let places: Vec<usize> = (0..chosen.len()).filter(|place| !goes(*place)).collect();
        for (layer, (of, got)) in given.iter().zip(got).enumerate() {
            let own = |of: &[f32]| staying(of, &rows);
            step.append(layer, &own(&of.k), &own(&of.v)).unwrap();
            if model.experts > 1 {
                step.route(layer, &staying(&of.routes, &rows)).unwrap();
            }
            let (outs, lses) = model.outs(step.rows());
            let (mut out, mut lse, mut mass) = (vec![0.0; outs], vec![0.0; lses], Vec::<PageMass>::new());
            let to = AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass);
            step.attend(layer, &own(&of.q), &how, to).unwrap();
            assert_eq!(bits(&own(&got.0)), bits(&out), "layer {layer}");
            assert_eq!(bits(&own(&got.1)), bits(&lse), "layer {layer}");
            mass.iter_mut().for_each(|mass| mass.sequence = places[mass.sequence]);
            let seen: Vec<&PageMass> = got.2.iter().filter(|mass| !goes(mass.sequence)).collect();
            assert_eq!(seen, mass.iter().collect::<Vec<_>>(), "layer {layer}");
        }
        if dropped {
            return;
        }
        step.commit_with(&mut reports[1]).unwrap();
        for layer in 0..model.layers {
            let [a, b] = reports.each_ref().map(|report| {
                (report.hits(layer).to_vec(), report.misses(layer).to_vec(), report.remote_bytes(layer))
            });
            assert_eq!(a, b, "layer {layer}");
            *remote += a.2;
        }
        let [a, b] = reports.each_ref().map(|report| (report.logical_bytes, &report.evicted));
        assert_eq!(a, b);
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::New => {
                if self.pairs.len() < 4 {
                    self.pairs.push(self.caches.each_ref().map(Cache::sequence));
                }
            }
            Op::Step { parts, read, leave, dropped } => self.step(parts, *read, leave, *dropped),
            Op::Demote { sequence, share } => {
                let at = at(&self.pairs, *sequence);
                let [a, b] = self.pairs[at].each_mut().map(|sequence| {
                    let bytes = (sequence.bytes() as f64 * share) as u64;
                    sequence.demote(bytes)
                });
                assert_eq!(a, b);
            }
            Op::Change(change) => change.apply(&self.model, &mut self.pairs),
        }
        self.pairs.iter().for_each(|pair| twins::check(&self.model, pair, |_| {}));
        let [a, b] = self.caches.each_ref().map(|cache| {
            let usage = cache.usage();
            (usage.taken, usage.shards, usage.ghosts, usage.tiers.iter().map(|t| t.bytes).collect::<Vec<_>>())
        });
        assert_eq!(a, b, "pages of one that left are held, or of one that stayed lost");
    }
}

#[test]
fn a_step_that_some_leave_is_one_that_never_had_them() {
    let mut runner = proptest::test_runner::TestRunner::new(pikv_test::cases(48, 2_000));
    let strategy = (twins::model(1..=3), proptest::collection::vec(op(), 8..=48));
    let (mut left, mut remote) = (0, 0);
    for _ in 0..runner.config().cases {
        let (model, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let config = || {
            let config = model.config(model.page() << 20).backend(backend());
            config.tiers(Tiers::new().host(model.page() << 20).staging(1 << 30))
        };
        let caches = [Cache::new(config()).unwrap(), Cache::new(config()).unwrap()];
        let pairs = vec![caches.each_ref().map(Cache::sequence)];
        let mut twins = Twins { model, caches, pairs, values: Values::default(), left: 0, remote: 0 };
        ops.iter().for_each(|op| twins.run(op));
        (left, remote) = (left + twins.left, remote + twins.remote);
    }
    let few = runner.config().cases < 48;
    assert!(few || (left > 0 && remote > 0), "{left} left, {remote} bytes came from the tier beneath");
}

#[test]
fn who_is_not_in_the_step_cannot_leave_it() {
    let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    let cache = Cache::new(pikv::CacheConfig::new(vec![layer], 1 << 20).backend(backend())).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    let mut step = cache.begin([(&mut a, 1), (&mut b, 2)]).unwrap();
    assert_eq!(step.leave_out(2), Err(Error::NotInStep { sequence: 2, sequences: 2 }));
    // All reserved memory is free once all sequences are dropped.
    step.append(0, &[1.0; 12], &[1.0; 12]).unwrap();
    step.leave_out(0).unwrap();
    step.leave_out(1).unwrap();
    step.leave_out(1).unwrap();
    let mut out = [3.0; 12];
    step.attend(0, &[f32::NAN; 12], &Attend::new(1.0), AttendOutput::new(&mut out)).unwrap();
    step.commit().unwrap();
    assert_eq!((out, cache.usage().taken), ([3.0; 12], 0));
    assert_eq!([&a, &b].map(|sequence: &Sequence| sequence.next_position().0), [0, 0]);
}

#[test]
fn an_append_that_failed_is_made_again_without_who_made_it_fail() {
    let layer = LayerShape::new(2, 2, 4, Dtype::F16);
    let cache = Cache::new(pikv::CacheConfig::new(vec![layer], 1 << 20).backend(backend())).unwrap();
    let (mut bad, mut good) = (cache.sequence(), cache.sequence());
    let mut step = cache.begin([(&mut good, 2), (&mut bad, 3)]).unwrap();
    let (mut k, v) = (vec![0.5; 5 * 8], vec![0.25; 5 * 8]);
    k[2 * 8 + 5] = f32::INFINITY;
    assert!(matches!(step.append(0, &k, &v), Err(Error::Unstorable { row: 2, .. })));
    step.leave_out(1).unwrap();
    step.append(0, &k, &v).unwrap();
    let mut out = vec![0.0; 5 * 8];
    step.attend(0, &k, &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
    step.commit().unwrap();
    assert_eq!((out[..16].to_vec(), out[16..].to_vec()), (vec![0.25; 16], vec![0.0; 24]));
    assert_eq!((good.next_position().0, bad.next_position().0), (2, 0));
    assert_eq!(bad.bytes(), 0);
}
