//! Random histories of two caches: one in a single process, and one with pages on ranks that are moved and replicated. All results must be
//! equal bit for bit.

use crate::setup::over;
use pikv::codec::{Code, Codec, Coding};
use pikv::fabric::{FabricError, Options};
use pikv::report::{PageInfo, PageMass};
use pikv::router::Eplb;
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Position, Rope, Rows, Step,
    StepReport,
};
use pikv_test::numbers::{bits, noise};
use pikv_test::twins::{self, CHANGES, Change, Given, Model, Pair, Values, at};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[derive(Clone, Debug)]
struct Setup {
    model: Model,
    ranks: u32,
    /// Whether the ranks' budgets are small.
    tight: bool,
}

impl Setup {
    fn caches(&self) -> [Cache; 2] {
        let budget = if self.tight { 24 * self.model.page() / u64::from(self.ranks) } else { 1 << 30 };
        let config = || self.model.config(1 << 30);
        [Cache::new(config()).unwrap(), over(config(), self.ranks, budget, Options::default())]
    }
}

fn setup() -> impl Strategy<Value = Setup> {
    (twins::model(1..=4), 1u32..=4, prop_oneof![3 => Just(false), 1 => Just(true)])
        .prop_map(|(model, ranks, tight)| Setup { model, ranks, tight })
}

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; the form of reading; layers done before the step is dropped; a sequence that leaves it, and the layer before
    /// which it does.
    Step {
        parts: Vec<(u8, u32)>,
        read: u8,
        abort: Option<usize>,
        leave: Option<(usize, usize)>,
    },
    Attend {
        sequence: u8,
        back: u32,
        read: u8,
    },
    Rebalance {
        layer: usize,
        loads: Option<[u8; 4]>,
        extra: u32,
    },
    Replicate {
        layer: usize,
        expert: u16,
        copies: u32,
    },
    Change(Change),
}

fn op() -> impl Strategy<Value = Op> {
    let sequence = || 0u8..4;
    let part = || (0u8..4, prop_oneof![3 => Just(1u32), 2 => 1u32..=12, 3 => 10u32..=90]);
    let parts = || proptest::collection::vec(part(), 1..=2);
    prop_oneof![
        1 => Just(Op::New),
        14 => (parts(), any::<u8>())
            .prop_map(|(parts, read)| Op::Step { parts, read, abort: None, leave: None }),
        3 => (parts(), any::<u8>(), (0usize..2, 0usize..=3))
            .prop_map(|(parts, read, leave)| Op::Step { parts, read, abort: None, leave: Some(leave) }),
        2 => (parts(), any::<u8>(), 0usize..=3)
            .prop_map(|(parts, read, at)| Op::Step { parts, read, abort: Some(at), leave: None }),
        3 => (sequence(), 0u32..=20, any::<u8>())
            .prop_map(|(sequence, back, read)| Op::Attend { sequence, back, read }),
        2 => (0usize..3, proptest::option::of(any::<[u8; 4]>()), 0u32..3)
            .prop_map(|(layer, loads, extra)| Op::Rebalance { layer, loads, extra }),
        2 => (0usize..3, 0u16..4, 1u32..=4)
            .prop_map(|(layer, expert, copies)| Op::Replicate { layer, expert, copies }),
        CHANGES => twins::change().prop_map(Op::Change),
    ]
}

struct Twins<'a> {
    setup: &'a Setup,
    caches: [Cache; 2],
    pairs: Vec<Pair>,
    values: Values,
    /// Counts of events, so that a test of nothing does not pass.
    seen: Seen,
}

#[derive(Debug, Default)]
struct Seen {
    steps: u32,
    left: u32,
    refused: u32,
    moved: u64,
    replicated: u64,
    away: u64,
}

/// The same call to both caches, and their results; with masses of pages and without.
fn both((outs, lses): (usize, usize), mut call: impl FnMut(usize, AttendOutput<'_>) -> Result<(), Error>) {
    let mut results = Vec::new();
    for cache in 0..2 {
        let (mut out, mut lse, mut mass) = (vec![0.0; outs], vec![0.0; lses], Vec::<PageMass>::new());
        let made = call(cache, AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass));
        let (mut plain, mut plain_lse) = (vec![0.0; outs], vec![0.0; lses]);
        assert_eq!(call(cache, AttendOutput::new(&mut plain).lse(&mut plain_lse)), made);
        assert_eq!((bits(&out), bits(&lse)), (bits(&plain), bits(&plain_lse)));
        results.push(made.map(|()| (bits(&out), bits(&lse), mass)));
    }
    assert!(results[0] == results[1]);
}

/// A rank that has no room.
fn full(setup: &Setup, seen: &mut Seen, made: Result<(), Error>) {
    let budget = matches!(made, Err(Error::Fabric(FabricError::Budget { .. })));
    assert!(setup.tight && budget, "{made:?}");
    seen.refused += 1;
}

impl Twins<'_> {
    fn step(&mut self, parts: &[(u8, u32)], read: u8, abort: Option<usize>, leave: Option<(usize, usize)>) {
        let model = &self.setup.model;
        let chosen = twins::chosen(&self.pairs, parts);
        let rows: usize = chosen.iter().map(|(_, n)| *n as usize).sum();
        let given = self.values.step(model, rows);
        let (options, outs) = (model.how(read), model.outs(rows));
        let [one, many] = &self.caches;
        let [left, right] = twins::parts(&mut self.pairs, &chosen);
        let (mut a, mut b): (Step<'_>, Step<'_>) = (one.begin(left).unwrap(), many.begin(right).unwrap());
        let leave = leave.filter(|(place, _)| *place < chosen.len());
        for (layer, Given { k, v, q, routes }) in given.iter().enumerate() {
            if abort == Some(layer) {
                return;
            }
            if let Some((place, _)) = leave.filter(|(_, before)| *before == layer) {
                for step in [&mut a, &mut b] {
                    step.leave_out(place).unwrap();
                }
                self.seen.left += 1;
            }
            a.append(layer, k, v).unwrap();
            let tried = b.append(layer, k, v);
            if tried.is_err() {
                return full(self.setup, &mut self.seen, tried);
            }
            for step in [&mut a, &mut b] {
                step.route(layer, routes).unwrap();
            }
            both(outs, |cache, out| if cache == 0 { &mut a } else { &mut b }.attend(layer, q, &options, out));
        }
        if abort.is_some() {
            return;
        }
        let mut reports = [StepReport::default(), StepReport::default()];
        // The ranks may have no room: then neither step takes place.
        let [left, right] = &mut reports;
        let committed = b.commit_with(right);
        if committed.is_err() {
            drop(a);
            return full(self.setup, &mut self.seen, committed);
        }
        a.commit_with(left).unwrap();
        for layer in 0..self.setup.model.layers {
            let filed = |report: &StepReport| {
                [report.held_tokens(layer), report.lost_tokens(layer)].map(<[u64]>::to_vec)
            };
            assert_eq!(filed(&reports[0]), filed(&reports[1]));
            let [here, far] = reports.each_ref().map(|report| (report.hits(layer), report.misses(layer)));
            // The same pages are wanted. Those that ranks have are missed.
            for e in 0..here.0.len() {
                assert_eq!(here.0[e] + here.1[e], far.0[e] + far.1[e], "layer {layer}, expert {e}");
                assert!(far.1[e] >= here.1[e], "layer {layer}, expert {e}");
            }
            let more = far.1.iter().sum::<f64>() > here.1.iter().sum();
            assert_eq!((reports[0].remote_bytes(layer), more), (0, reports[1].remote_bytes(layer) > 0));
        }
        for report in &mut reports {
            report.evicted.iter_mut().for_each(|evicted| evicted.bytes = 0);
        }
        let rest = reports.map(|report| (report.logical_bytes, report.evicted, report.reused));
        assert_eq!(rest[0], rest[1]);
        self.seen.steps += 1;
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::New => self.pairs.push(self.caches.each_ref().map(Cache::sequence)),
            Op::Step { parts, read, abort, leave } => self.step(parts, *read, *abort, *leave),
            Op::Attend { sequence, back, read } => {
                let at = at(&self.pairs, *sequence);
                let model = &self.setup.model;
                let (q, outs, options) = (self.values.queries(model, 1), model.outs(1), model.how(*read));
                let first = Position(self.pairs[at][0].next_position().0.saturating_sub(*back));
                for layer in 0..model.layers {
                    let Twins { caches, pairs, .. } = self;
                    let call = |cache: usize, out: AttendOutput<'_>| {
                        let rows = [Rows::new(&pairs[at][cache], first, 1)];
                        caches[cache].attend(layer, &rows, &q, &options, out)
                    };
                    let tried = call(1, AttendOutput::new(&mut vec![0.0; outs.0]));
                    if matches!(tried, Err(Error::Fabric(_))) {
                        return full(self.setup, &mut self.seen, tried);
                    }
                    both(outs, call);
                }
            }
            Op::Rebalance { layer, loads, extra } => {
                let Setup { model: Model { experts, layers, .. }, ranks, .. } = *self.setup;
                let loads =
                    loads.map(|loads| (0..experts as usize).map(|e| f64::from(loads[e % 4])).collect());
                let replicas = experts.next_multiple_of(ranks) + extra * ranks;
                let eplb = Eplb::global(replicas, ranks);
                let loads: Option<Vec<f64>> = loads;
                match self.caches[1].rebalance(layer % layers, &eplb, loads.as_deref()) {
                    Ok(moves) => self.seen.moved += moves.moved,
                    Err(error) => full(self.setup, &mut self.seen, Err(error)),
                }
            }
            Op::Replicate { layer, expert, copies } => {
                let Setup { model: Model { experts, layers, .. }, ranks, .. } = *self.setup;
                let (expert, copies) = (expert % experts as u16, (copies - 1) % ranks + 1);
                match self.caches[1].replicate(layer % layers, expert, copies) {
                    Ok(moves) => {
                        self.seen.moved += moves.moved;
                        self.seen.replicated += moves.replicated;
                    }
                    Err(error) => full(self.setup, &mut self.seen, Err(error)),
                }
            }
            Op::Change(change) => change.apply(&self.setup.model, &mut self.pairs),
        }
    }

    /// All that can be seen of a sequence: where its pages are does not count.
    fn check(&mut self) {
        for pair in &self.pairs {
            twins::check(&self.setup.model, pair, |page: &mut PageInfo| {
                (page.shard, page.shared, page.remote) = (0, false, false);
            });
        }
    }
}

fn run(setup: &Setup, ops: &[Op]) -> Seen {
    let caches = setup.caches();
    let pairs = vec![caches.each_ref().map(Cache::sequence)];
    let mut twins = Twins { setup, caches, pairs, values: Values::default(), seen: Seen::default() };
    for op in ops {
        twins.apply(op);
        twins.check();
    }
    let ranks = twins.caches[1].ranks().unwrap();
    twins.seen.away += ranks.iter().map(|rank| rank.pages).sum::<u64>();
    // All pages are freed on all ranks.
    twins.pairs.clear();
    let ranks = twins.caches[1].ranks().unwrap();
    assert!(ranks.iter().all(|rank| (rank.bytes, rank.pages) == (0, 0)), "{ranks:?}");
    assert_eq!(twins.caches[1].usage().taken, 0);
    twins.seen
}

proptest! {
    #![proptest_config(pikv_test::cases(50, 150))]
    #[test]
    fn wherever_pages_lie(setup in setup(), ops in proptest::collection::vec(op(), 1..60)) {
        run(&setup, &ops);
    }
}

/// The histories above reach the critical cases.
#[test]
fn histories_reach_what_they_are_for() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Seen::default();
    let strategy = (setup(), proptest::collection::vec(op(), 40..60));
    for _ in 0..60 {
        let (setup, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let Seen { steps, left, refused, moved, replicated, away } = run(&setup, &ops);
        sum.steps += steps;
        sum.left += left;
        sum.refused += refused;
        (sum.moved, sum.replicated) = (sum.moved + moved, sum.replicated + replicated);
        sum.away += away;
    }
    let Seen { steps, left, refused, moved, replicated, away } = sum;
    assert!(
        steps > 300 && left > 20 && refused > 5 && moved > 20 && replicated > 50 && away > 400,
        "{sum:?}"
    );
}

/// Codecs whose folded queries have another width than their stored channels, and codecs that store tokens together.
#[test]
fn pages_in_bases_and_means() {
    let rope = Rope::new(1000.0, 32);
    let pca = |n| Coding::block_pca(Code::Int8, n).unwrap();
    for (rope, codec) in [
        (None, Codec::new(pca(5), pca(7))),
        (Some(rope), Codec::new(pca(5), Coding::new(Code::Int4))),
        (None, Codec::new(Coding::new(Code::Int3), Coding::new(Code::Int5))),
        (Some(rope), Codec::new(Coding::new(Code::Nvfp4), Coding::new(Code::Mxfp4))),
        (None, Codec::new(Coding::means(Code::Bf16, 2).unwrap(), Coding::means(Code::Bf16, 1).unwrap())),
    ] {
        let layer = LayerShape::new(1, 3, 80, Dtype::Bf16).values(70, Dtype::Bf16).rope(rope);
        let config = CacheConfig::new(vec![layer], 1 << 26).ring(20).experts(2, 1).compress(codec);
        let config = config.shards(ShardMap::sum(3).unwrap());
        let outs = [Cache::new(config.clone()).unwrap(), over(config, 3, 1 << 26, Options::default())].map(
            |cache| {
                let (mut sequence, mut all) = (cache.sequence(), Vec::new());
                for (i, n) in [(0, 400usize), (1, 150), (2, 1)] {
                    let mut out = vec![0.0; n * 3 * 70];
                    let mut step = cache.begin([(&mut sequence, n as u32)]).unwrap();
                    step.append(0, &noise(3 * i, n * 80), &noise(3 * i + 1, n * 70)).unwrap();
                    step.attend(
                        0,
                        &noise(3 * i + 2, n * 240),
                        &Attend::new(0.3),
                        AttendOutput::new(&mut out),
                    )
                    .unwrap();
                    step.route(0, &[0, 1, 1, 1].repeat(n)[..n]).unwrap();
                    step.commit().unwrap();
                    all.extend(bits(&out));
                }
                all
            },
        );
        assert!(outs[0] == outs[1]);
    }
}
