//! Random histories of two caches: one without lower tiers, and one whose pages move between tiers. All results must be equal bit for bit.

use crate::setup::{Control, bytes, fake};
use pikv::report::{PageId, PageInfo, PageMass, Place};
use pikv::tiers::{TierOperation, Tiers};
use pikv::{AttendOutput, Cache, Error, Position, Rows, Step, StepReport};
use pikv_test::numbers::bits;
use pikv_test::twins::{self, CHANGES, Change, Given, Model, Pair, Values, at};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

#[derive(Clone, Debug)]
struct Setup {
    model: Model,
    /// Pages of every layer and head in the first tier, and in the lower tiers.
    budget: u64,
    host: u64,
    store: u64,
}

impl Setup {
    fn caches(&self, control: &Arc<Control>) -> [Cache; 2] {
        let Setup { model, host, .. } = self;
        let page = model.page();
        let tiers = Tiers::new().host(host * page).staging(1 << 30);
        // Pages that lost tokens are put together where there is room: with none, they would be in one cache only.
        let (budget, store) =
            if model.policy.is_some() { (self.budget + 400, 1 << 20) } else { (self.budget, self.store) };
        let tiers = fake(tiers, store * page, control);
        [model.config(page << 20), model.config(page * budget).tiers(tiers)]
            .map(|config| Cache::new(config).unwrap())
    }
}

fn setup() -> impl Strategy<Value = Setup> {
    (twins::model(1..=3), 8u64..40, 0u64..8, 0u64..40).prop_map(|(model, budget, host, store)| Setup {
        model,
        budget,
        host,
        store,
    })
}

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; the form of reading; the faults; layers done before the step is dropped.
    Step {
        parts: Vec<(u8, u32)>,
        read: u8,
        fails: u8,
        abort: Option<usize>,
    },
    Attend {
        sequence: u8,
        back: u32,
        read: u8,
        fails: bool,
    },
    Demote {
        sequence: u8,
        share: f64,
        fails: bool,
    },
    Promote {
        sequence: u8,
        share: f64,
        fails: bool,
    },
    /// Moves pages of all sequences, up or down.
    Together {
        share: f64,
        fails: bool,
        up: bool,
    },
    Arrange {
        sequence: u8,
        layer: usize,
        shares: (f64, f64),
    },
    Change(Change),
}

fn op() -> impl Strategy<Value = Op> {
    let sequence = || 0u8..4;
    let part = || (0u8..4, prop_oneof![3 => Just(1u32), 2 => 1u32..=12, 3 => 10u32..=90]);
    let share = || prop_oneof![1 => Just(1.0f64), 2 => 0.0..1.0f64];
    let parts = || proptest::collection::vec(part(), 1..=2);
    prop_oneof![
        1 => Just(Op::New),
        14 => (parts(), any::<u8>(), any::<u8>())
            .prop_map(|(parts, read, fails)| Op::Step { parts, read, fails, abort: None }),
        2 => (parts(), any::<u8>(), any::<u8>(), 0usize..=3)
            .prop_map(|(parts, read, fails, at)| Op::Step { parts, read, fails, abort: Some(at) }),
        3 => (sequence(), 0u32..=20, any::<u8>(), any::<bool>())
            .prop_map(|(sequence, back, read, fails)| Op::Attend { sequence, back, read, fails }),
        5 => (sequence(), share(), any::<bool>()).prop_map(|(sequence, share, f)| Op::Demote { sequence, share, fails: f }),
        2 => (sequence(), share(), any::<bool>()).prop_map(|(sequence, share, f)| Op::Promote { sequence, share, fails: f }),
        4 => (share(), any::<bool>(), any::<u8>()).prop_map(|(share, fails, up)| Op::Together { share, fails, up: up < 64 }),
        3 => (sequence(), 0usize..3, (0.0..1.0f64, 0.0..1.0f64))
            .prop_map(|(sequence, layer, shares)| Op::Arrange { sequence, layer, shares }),
        CHANGES => twins::change().prop_map(Op::Change),
    ]
}

struct Twins<'a> {
    setup: &'a Setup,
    control: Arc<Control>,
    caches: [Cache; 2],
    pairs: Vec<Pair>,
    values: Values,
    /// Counts of events, so that a test of nothing does not pass.
    seen: Seen,
}

#[derive(Debug, Default)]
struct Seen {
    steps: u32,
    refused: u32,
    /// Injected failures that occurred.
    writes: u32,
    reads: u32,
    away: u32,
    /// Pages that several sequences held in the first tier and that moved down.
    together: u32,
}

/// The same call to both caches, and their results: an injected error of the second one's store is cleared, and the call repeated.
fn both(
    control: &Control,
    seen: &mut Seen,
    fails: bool,
    (outs, lses): (usize, usize),
    mut call: impl FnMut(usize, AttendOutput<'_>) -> Result<(), Error>,
) {
    let mut results = Vec::new();
    for cache in 0..2 {
        let (mut out, mut lse, mut mass) = (vec![0.0; outs], vec![0.0; lses], Vec::<PageMass>::new());
        control.unreadable.store(fails && cache == 1, SeqCst);
        let mut made = call(cache, AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass));
        control.unreadable.store(false, SeqCst);
        if let Err(Error::Tier { operation: TierOperation::Read, .. }) = made {
            assert!(fails && cache == 1);
            seen.reads += 1;
            made = call(cache, AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass));
        }
        results.push(made.map(|()| (bits(&out), bits(&lse), mass)));
    }
    assert_eq!(results[0], results[1]);
}

impl Twins<'_> {
    fn step(&mut self, parts: &[(u8, u32)], read: u8, fails: u8, abort: Option<usize>) {
        let model = &self.setup.model;
        let chosen = twins::chosen(&self.pairs, parts);
        let rows: usize = chosen.iter().map(|(_, n)| *n as usize).sum();
        let given = self.values.step(model, rows);
        let (options, outs) = (model.how(read), model.outs(rows));
        let [roomy, tight] = &self.caches;
        let [left, right] = twins::parts(&mut self.pairs, &chosen);
        // With a policy, thinned pages are compacted when a step begins, and pages that cannot be written wait.
        let fails = if model.policy.is_some() { fails & !1 } else { fails };
        self.control.full.store(fails & 1 == 1, SeqCst);
        let begun = tight.begin(right);
        self.control.full.store(false, SeqCst);
        let second = match begun {
            Ok(step) => step,
            Err(Error::Tier { operation: TierOperation::Write, .. }) => {
                assert!(fails & 1 == 1);
                self.seen.writes += 1;
                drop(roomy.begin(left).unwrap());
                return;
            }
            Err(Error::OutOfBudget { needed, available }) => {
                assert!(needed > available);
                self.seen.refused += 1;
                drop(roomy.begin(left).unwrap());
                return;
            }
            Err(other) => panic!("{other}"),
        };
        let mut steps: [Step<'_>; 2] = [roomy.begin(left).unwrap(), second];
        for (layer, Given { k, v, q, routes }) in given.iter().enumerate() {
            if abort == Some(layer) {
                return;
            }
            for step in &mut steps {
                step.append(layer, k, v).unwrap();
                step.route(layer, routes).unwrap();
            }
            let fails = fails >> (layer + 1) & 1 == 1;
            both(&self.control, &mut self.seen, fails, outs, |cache, out| {
                steps[cache].attend(layer, q, &options, out)
            });
        }
        if abort.is_some() {
            return;
        }
        let mut reports = [StepReport::default(), StepReport::default()];
        for (step, report) in steps.into_iter().zip(&mut reports) {
            step.commit_with(report).unwrap();
        }
        for layer in 0..model.layers {
            let sums = |a: &[u64], b: &[u64]| -> Vec<u64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
            let filed = |report: &StepReport| sums(report.held_tokens(layer), report.lost_tokens(layer));
            assert_eq!(filed(&reports[0]), filed(&reports[1]));
            let wanted = |report: &StepReport| -> Vec<f64> {
                report
                    .hits(layer)
                    .iter()
                    .zip(report.misses(layer))
                    .map(|(hits, misses)| hits + misses)
                    .collect()
            };
            assert_eq!(wanted(&reports[0]), wanted(&reports[1]));
            assert!(reports[0].remote_bytes(layer) == 0);
            assert!(reports[0].misses(layer).iter().zip(reports[1].misses(layer)).all(|(a, b)| a <= b));
        }
        self.seen.steps += 1;
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::New => self.pairs.push(self.caches.each_ref().map(Cache::sequence)),
            Op::Step { parts, read, fails, abort } => self.step(parts, *read, *fails, *abort),
            Op::Attend { sequence, back, read, fails } => {
                let at = at(&self.pairs, *sequence);
                let model = &self.setup.model;
                let (q, outs, options) = (self.values.queries(model, 1), model.outs(1), model.how(*read));
                let first = Position(self.pairs[at][0].next_position().0.saturating_sub(*back));
                for layer in 0..model.layers {
                    let Twins { control, seen, caches, pairs, .. } = self;
                    both(control, seen, *fails, outs, |cache, out| {
                        let rows = [Rows::new(&pairs[at][cache], first, 1)];
                        caches[cache].attend(layer, &rows, &q, &options, out)
                    });
                }
            }
            Op::Demote { sequence, share, fails } => {
                let at = at(&self.pairs, *sequence);
                let sequence = &mut self.pairs[at][1];
                let (before, bytes) = (sequence.bytes(), (sequence.bytes() as f64 * share) as u64);
                self.control.full.store(*fails, SeqCst);
                match sequence.demote(bytes) {
                    Ok(moved) => assert_eq!(before - sequence.bytes(), moved),
                    Err(Error::Tier { operation: TierOperation::Write, .. }) => {
                        assert!(*fails);
                        self.seen.writes += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
                self.control.full.store(false, SeqCst);
            }
            Op::Promote { sequence, share, fails } => {
                let at = at(&self.pairs, *sequence);
                let sequence = &mut self.pairs[at][1];
                let before = sequence.bytes();
                let away = sequence.bytes_in_tier(1) + sequence.bytes_in_tier(2);
                self.control.unreadable.store(*fails, SeqCst);
                match sequence.promote((away as f64 * share) as u64) {
                    Ok(moved) => assert_eq!(sequence.bytes() - before, moved),
                    Err(Error::Tier { operation: TierOperation::Read, .. }) => {
                        assert!(*fails);
                        self.seen.reads += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
                self.control.unreadable.store(false, SeqCst);
            }
            Op::Together { share, fails, up } => self.together(*share, *fails, *up),
            Op::Arrange { sequence, layer, shares: (fast, host) } => {
                let at = at(&self.pairs, *sequence);
                let layers = layer % self.setup.model.layers..self.setup.model.layers;
                let host = (1.0 - fast) * host;
                match self.pairs[at][1].arrange(layers, &[*fast, host, 1.0 - fast - host]) {
                    Ok(()) | Err(Error::TierFull { .. } | Error::OutOfBudget { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Op::Change(change) => change.apply(&self.setup.model, &mut self.pairs),
        }
    }

    /// Pages outside the ring in a tier, or only those that another sequence shares: sequence, layer, head and page.
    fn pages(&self, shared: bool, is_in: impl Fn(usize) -> bool) -> Vec<(usize, usize, usize, PageId)> {
        let Model { layers, kv_heads, .. } = self.setup.model;
        let mut found = Vec::new();
        for (i, pair) in self.pairs.iter().enumerate() {
            for (l, h) in (0..layers).flat_map(|l| (0..kv_heads as usize).map(move |h| (l, h))) {
                let pages = pair[1].pages(l, h).unwrap().filter(|page| page.id.place != Place::Ring);
                let these = pages.filter(|page| is_in(page.tier) && (page.shared || !shared));
                found.extend(these.map(|page| (i, l, h, page.id)));
            }
        }
        found
    }

    fn together(&mut self, share: f64, fails: bool, up: bool) {
        let before = bytes(&self.caches[1]);
        let shared = self.pages(true, |tier| tier == 0);
        let [_, tight] = &self.caches;
        let sequences = self.pairs.iter_mut().map(|pair| &mut pair[1]);
        self.control.full.store(fails && !up, SeqCst);
        self.control.unreadable.store(fails && up, SeqCst);
        let moved = match up {
            true => tight.promote(sequences, (before[1..].iter().sum::<u64>() as f64 * share) as u64),
            false => tight.demote(sequences, (before[0] as f64 * share) as u64),
        };
        self.control.full.store(false, SeqCst);
        self.control.unreadable.store(false, SeqCst);
        let after = bytes(tight);
        match moved {
            Ok(moved) if up => assert_eq!(after[0] - before[0], moved),
            Ok(moved) => {
                assert_eq!(before[0] - after[0], moved);
                assert_eq!(after[1..].iter().sum::<u64>() - before[1..].iter().sum::<u64>(), moved);
            }
            Err(Error::Tier { operation: TierOperation::Write, .. }) if !up => self.seen.writes += 1,
            Err(Error::Tier { operation: TierOperation::Read, .. }) if up => self.seen.reads += 1,
            Err(other) => panic!("{other}"),
        }
        let lower = self.pages(false, |tier| tier > 0);
        self.seen.together += shared.iter().filter(|page| lower.contains(page)).count() as u32;
    }

    /// All that can be seen of a sequence: where its pages are does not count.
    fn check(&mut self) {
        let mut away = [0; 2];
        let mut near = 0;
        for pair in &self.pairs {
            near += pair[1].bytes();
            for (tier, away) in away.iter_mut().enumerate() {
                *away += pair[1].bytes_in_tier(tier + 1);
            }
            let Setup { model, .. } = self.setup;
            for head in (0..model.layers).flat_map(|l| (0..model.kv_heads as usize).map(move |h| (l, h))) {
                let pages = pair[1].pages(head.0, head.1).unwrap();
                self.seen.away += pages.filter(|page| page.tier > 0).count() as u32;
            }
            twins::check(model, pair, |page: &mut PageInfo| (page.tier, page.shared) = (0, false));
        }
        let [_, tight] = &self.caches;
        let usage = tight.usage();
        assert!(usage.taken <= usage.budget && usage.taken <= near);
        assert!(usage.tiers.iter().all(|tier| tier.bytes <= tier.capacity));
        for (tier, away) in usage.tiers.iter().zip(away) {
            assert!(tier.bytes <= away);
            assert!(tier.bytes == away || self.pairs.len() > 1);
        }
    }
}

fn run(setup: &Setup, ops: &[Op]) -> Seen {
    let control = Arc::new(Control::default());
    let caches = setup.caches(&control);
    let pairs = vec![caches.each_ref().map(Cache::sequence)];
    let mut twins = Twins { setup, control, caches, pairs, values: Values::default(), seen: Seen::default() };
    for op in ops {
        twins.apply(op);
        twins.check();
    }
    twins.pairs.clear();
    assert_eq!(bytes(&twins.caches[1]), [0, 0, 0]);
    assert_eq!(twins.caches[1].usage().taken, 0);
    twins.seen
}

proptest! {
    #![proptest_config(pikv_test::cases(200, 400))]
    #[test]
    fn wherever_pages_lie(setup in setup(), ops in proptest::collection::vec(op(), 1..80)) {
        run(&setup, &ops);
    }
}

/// The histories above reach the critical cases.
#[test]
fn histories_reach_what_they_are_for() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Seen::default();
    let strategy = (setup(), proptest::collection::vec(op(), 40..80));
    for _ in 0..40 {
        let (setup, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let Seen { steps, refused, writes, reads, away, together } = run(&setup, &ops);
        sum.steps += steps;
        (sum.refused, sum.writes, sum.reads) =
            (sum.refused + refused, sum.writes + writes, sum.reads + reads);
        (sum.away, sum.together) = (sum.away + away, sum.together + together);
    }
    let Seen { steps, refused, writes, reads, away, together } = sum;
    assert!(steps > 500 && refused > 30 && writes > 5 && reads > 10 && away > 1000, "{sum:?}");
    assert!(together > 40, "{sum:?}");
}
