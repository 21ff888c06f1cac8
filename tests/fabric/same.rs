//! Random histories of two caches: one in one process, and one whose pages lie on ranks, move between them and are replicated.
//! They may not differ in a bit.

use crate::setup::{bits, noise, over};
use pikv::codec::{Code, Codec, Coding};
use pikv::fabric::{FabricError, Options};
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, LruPlus, StreamingLlm};
use pikv::router::Eplb;
use pikv::{
    Attend, Cache, CacheConfig, Dtype, Error, LayerShape, Layout, Output, PageId, PageInfo, PageMass, Pairs,
    Position, Read, Rope, Rows, Sequence, ShardMap, Step, StepReport,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[derive(Clone, Debug)]
struct Setup {
    layers: usize,
    kv_heads: u32,
    k_dim: u32,
    v_dim: u32,
    dtype: Dtype,
    window: Option<u32>,
    rope: bool,
    ring: u32,
    rollback: u32,
    sinks: u32,
    experts: u32,
    /// Packs the first head, or all.
    codec: Option<(Code, bool)>,
    /// Evicts tokens, or whole pages, by this policy and down to so many tokens.
    policy: Option<(u8, bool, u32)>,
    shards: u32,
    ranks: u32,
    /// Whether the ranks' budgets are small.
    tight: bool,
}

impl Setup {
    fn shape(&self) -> LayerShape {
        let layout = Layout { k_dim: self.k_dim, v_dim: self.v_dim, k: self.dtype, v: self.dtype };
        let rope = Rope { theta: 1000.0, rotary_dim: 2, pairs: Pairs::Halves };
        LayerShape {
            kv_heads: self.kv_heads,
            query_heads: 2 * self.kv_heads,
            layout,
            window: self.window,
            rope: self.rope.then_some(rope),
        }
    }

    fn config(&self) -> CacheConfig {
        let mut config = CacheConfig::new(vec![self.shape(); self.layers], 1 << 30)
            .ring(self.ring)
            .rollback(self.rollback)
            .sinks(self.sinks)
            .experts(self.experts, self.experts.min(2))
            .shards(ShardMap::sum(self.shards).unwrap())
            .bounds(true)
            .poison(true);
        if let Some((code, all)) = self.codec {
            let codec = Codec::new(Coding::new(code), Coding::new(code));
            for layer in 0..self.layers {
                for head in 0..if all { self.kv_heads as usize } else { 1 } {
                    config = config.compress_head(layer, head, codec.clone());
                }
            }
        }
        if let Some((policy, by_page, tokens)) = self.policy {
            let budget = Budget::Tokens(tokens);
            let eviction = match policy % 4 {
                0 => Eviction::new(H2o, budget),
                1 => Eviction::new(KeyNorm, budget),
                2 => Eviction::new(LruPlus::default(), budget),
                _ => Eviction::new(StreamingLlm, budget),
            };
            config = config.evict(if by_page { eviction.by_page() } else { eviction });
        }
        config
    }

    fn caches(&self) -> [Cache; 2] {
        let page = self.layers as u64 * u64::from(self.kv_heads) * self.shape().layout.bytes();
        let budget = if self.tight { 24 * page / u64::from(self.ranks) } else { 1 << 30 };
        [Cache::new(self.config()).unwrap(), over(self.config(), self.ranks, budget, Options::default())]
    }
}

fn setup() -> impl Strategy<Value = Setup> {
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)];
    let window = prop_oneof![2 => Just(None), 1 => (60u32..200).prop_map(Some)];
    let code = prop_oneof![Just(Code::Int8), Just(Code::Int4)];
    let codec = prop_oneof![1 => Just(None), 1 => (code, any::<bool>()).prop_map(Some)];
    let policy = prop_oneof![1 => Just(None), 1 => (any::<u8>(), any::<bool>(), 60u32..200).prop_map(Some)];
    (
        (1usize..=3, 1u32..=2, 2u32..=6, 1u32..=6, dtype, window, any::<bool>()),
        (1u32..=40, 0u32..=12, 0u32..=4, prop_oneof![Just(1u32), 2u32..=4]),
        (codec, policy, 1u32..=4, 1u32..=4, prop_oneof![3 => Just(false), 1 => Just(true)]),
    )
        .prop_map(|(shape, tokens, store)| {
            let (layers, kv_heads, k_dim, v_dim, dtype, window, rope) = shape;
            let (ring, rollback, sinks, experts) = tokens;
            let (codec, policy, shards, ranks, tight) = store;
            // As for tiers: with a policy and rollback, rare histories leave pages without tokens in one cache that the other
            // has freed.
            let rollback = if policy.is_some() { 0 } else { rollback };
            Setup {
                layers,
                kv_heads,
                k_dim,
                v_dim,
                dtype,
                window,
                rope,
                ring,
                rollback,
                sinks,
                experts,
                codec,
                policy,
                shards,
                ranks,
                tight,
            }
        })
}

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; what is read; layers done before the step is dropped.
    Step {
        parts: Vec<(u8, u32)>,
        read: u8,
        abort: Option<usize>,
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
    Rollback {
        sequence: u8,
        n: u32,
    },
    Fork {
        sequence: u8,
    },
    Drop {
        sequence: u8,
    },
    Evict {
        sequence: u8,
        pick: usize,
    },
    EvictAll {
        sequence: u8,
    },
    Clear {
        sequence: u8,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let sequence = || 0u8..4;
    let part = || (0u8..4, prop_oneof![3 => Just(1u32), 2 => 1u32..=12, 3 => 10u32..=90]);
    let parts = || proptest::collection::vec(part(), 1..=2);
    prop_oneof![
        1 => Just(Op::New),
        14 => (parts(), any::<u8>()).prop_map(|(parts, read)| Op::Step { parts, read, abort: None }),
        2 => (parts(), any::<u8>(), 0usize..=3)
            .prop_map(|(parts, read, at)| Op::Step { parts, read, abort: Some(at) }),
        3 => (sequence(), 0u32..=20, any::<u8>())
            .prop_map(|(sequence, back, read)| Op::Attend { sequence, back, read }),
        2 => (0usize..3, proptest::option::of(any::<[u8; 4]>()), 0u32..3)
            .prop_map(|(layer, loads, extra)| Op::Rebalance { layer, loads, extra }),
        2 => (0usize..3, 0u16..4, 1u32..=4)
            .prop_map(|(layer, expert, copies)| Op::Replicate { layer, expert, copies }),
        3 => (sequence(), 0u32..=13).prop_map(|(sequence, n)| Op::Rollback { sequence, n }),
        2 => sequence().prop_map(|sequence| Op::Fork { sequence }),
        1 => sequence().prop_map(|sequence| Op::Drop { sequence }),
        2 => (sequence(), any::<usize>()).prop_map(|(sequence, pick)| Op::Evict { sequence, pick }),
        1 => sequence().prop_map(|sequence| Op::EvictAll { sequence }),
        1 => sequence().prop_map(|sequence| Op::Clear { sequence }),
    ]
}

/// The same sequence in both caches.
type Pair = [Sequence; 2];

struct Twins<'a> {
    setup: &'a Setup,
    caches: [Cache; 2],
    pairs: Vec<Pair>,
    seed: u64,
    /// What was seen, so that a test of nothing does not pass.
    seen: Seen,
}

#[derive(Debug, Default)]
struct Seen {
    steps: u32,
    refused: u32,
    moved: u64,
    replicated: u64,
    away: u64,
}

fn how(setup: &Setup, read: u8) -> Attend {
    let read = match read % 4 {
        0 | 1 => Read::All,
        2 => Read::Experts,
        _ => Read::Quest { pages: u32::from(read / 4 % 4) },
    };
    Attend::new(0.5).read(read).closed_gaps(setup.rope && read != Read::Experts)
}

/// What both caches are asked, and what they say; with the masses of pages, and without.
fn both((outs, lses): (usize, usize), mut call: impl FnMut(usize, Output<'_>) -> Result<(), Error>) {
    let mut results = Vec::new();
    for cache in 0..2 {
        let (mut out, mut lse, mut mass) = (vec![0.0; outs], vec![0.0; lses], Vec::<PageMass>::new());
        let made = call(cache, Output::new(&mut out).lse(&mut lse).mass(&mut mass));
        let (mut plain, mut plain_lse) = (vec![0.0; outs], vec![0.0; lses]);
        assert_eq!(call(cache, Output::new(&mut plain).lse(&mut plain_lse)), made);
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
    fn at(&self, sequence: u8) -> usize {
        usize::from(sequence) % self.pairs.len()
    }

    fn noise(&mut self, n: usize) -> Vec<f32> {
        self.seed += 1;
        noise(self.seed, n)
    }

    fn queries(&mut self, rows: usize) -> Vec<f32> {
        self.noise(rows * (2 * self.setup.kv_heads * self.setup.k_dim) as usize)
    }

    fn outs(&self, rows: usize) -> (usize, usize) {
        let heads = 2 * self.setup.kv_heads as usize;
        (rows * heads * self.setup.v_dim as usize, rows * heads)
    }

    fn step(&mut self, parts: &[(u8, u32)], read: u8, abort: Option<usize>) {
        let mut chosen: Vec<(usize, u32)> = Vec::new();
        for (sequence, n) in parts {
            let at = self.at(*sequence);
            if chosen.iter().all(|(i, _)| *i != at) {
                chosen.push((at, *n));
            }
        }
        chosen.sort_unstable();
        let rows: usize = chosen.iter().map(|(_, n)| *n as usize).sum();
        let Setup { layers, kv_heads, k_dim, v_dim, experts, .. } = *self.setup;
        let mut tokens = Vec::new();
        for _ in 0..layers {
            let top_k = experts.min(2) as usize;
            let routes: Vec<u16> = self
                .noise(rows)
                .iter()
                .flat_map(|x| {
                    let first = ((x + 1.0) * 0.5 * experts as f32) as u16 % experts as u16;
                    [first, (first + 1) % experts as u16].into_iter().take(top_k)
                })
                .collect();
            let k = self.noise(rows * (kv_heads * k_dim) as usize);
            let v = self.noise(rows * (kv_heads * v_dim) as usize);
            tokens.push((k, v, self.queries(rows), routes));
        }
        let (options, outs) = (how(self.setup, read), self.outs(rows));
        let [one, many] = &self.caches;
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for (i, [a, b]) in self.pairs.iter_mut().enumerate() {
            if let Some((_, n)) = chosen.iter().find(|(at, _)| *at == i) {
                left.push((a, *n));
                right.push((b, *n));
            }
        }
        let (mut a, mut b): (Step<'_>, Step<'_>) = (one.begin(left).unwrap(), many.begin(right).unwrap());
        for (layer, (k, v, q, routes)) in tokens.iter().enumerate() {
            if abort == Some(layer) {
                return;
            }
            for step in [&mut a, &mut b] {
                step.append(layer, k, v).unwrap();
                step.route(layer, routes).unwrap();
            }
            let tried = b.attend(layer, q, &options, Output::new(&mut vec![0.0; outs.0]));
            if tried.is_err() {
                return full(self.setup, &mut self.seen, tried);
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
        for report in &mut reports {
            report.evicted.iter_mut().for_each(|evicted| evicted.bytes = 0);
        }
        assert_eq!(reports[0], reports[1]);
        self.seen.steps += 1;
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::New => self.pairs.push(self.caches.each_ref().map(Cache::sequence)),
            Op::Step { parts, read, abort } => self.step(parts, *read, *abort),
            Op::Attend { sequence, back, read } => {
                let at = self.at(*sequence);
                let (q, outs, options) = (self.queries(1), self.outs(1), how(self.setup, *read));
                let first = Position(self.pairs[at][0].next_position().0.saturating_sub(*back));
                for layer in 0..self.setup.layers {
                    let Twins { caches, pairs, .. } = self;
                    let call = |cache: usize, out: Output<'_>| {
                        let rows = [Rows { sequence: &pairs[at][cache], first, rows: 1 }];
                        caches[cache].attend(layer, &rows, &q, &options, out)
                    };
                    let tried = call(1, Output::new(&mut vec![0.0; outs.0]));
                    if matches!(tried, Err(Error::Fabric(_))) {
                        return full(self.setup, &mut self.seen, tried);
                    }
                    both(outs, call);
                }
            }
            Op::Rebalance { layer, loads, extra } => {
                let Setup { experts, ranks, layers, .. } = *self.setup;
                let loads =
                    loads.map(|loads| loads[..experts as usize].iter().map(|x| f64::from(*x)).collect());
                let replicas = experts.next_multiple_of(ranks) + extra * ranks;
                let eplb = Eplb::global(replicas, ranks);
                let loads: Option<Vec<f64>> = loads;
                match self.caches[1].rebalance(layer % layers, &eplb, loads.as_deref()) {
                    Ok(moves) => self.seen.moved += moves.moved,
                    Err(error) => full(self.setup, &mut self.seen, Err(error)),
                }
            }
            Op::Replicate { layer, expert, copies } => {
                let Setup { experts, ranks, layers, .. } = *self.setup;
                let (expert, copies) = (expert % experts as u16, (copies - 1) % ranks + 1);
                match self.caches[1].replicate(layer % layers, expert, copies) {
                    Ok(moves) => {
                        self.seen.moved += moves.moved;
                        self.seen.replicated += moves.replicated;
                    }
                    Err(error) => full(self.setup, &mut self.seen, Err(error)),
                }
            }
            Op::Rollback { sequence, n } => {
                let at = self.at(*sequence);
                let [a, b] = self.pairs[at].each_mut().map(|sequence| sequence.rollback(*n));
                assert_eq!(a, b);
            }
            Op::Fork { sequence } if self.pairs.len() < 4 => {
                let at = self.at(*sequence);
                let forks = self.pairs[at].each_ref().map(Sequence::fork);
                self.pairs.push(forks);
            }
            Op::Fork { .. } => {}
            Op::Drop { sequence } => {
                let at = self.at(*sequence);
                if self.pairs.len() > 1 {
                    self.pairs.swap_remove(at);
                }
            }
            Op::Evict { sequence, pick } => {
                let at = self.at(*sequence);
                let (layer, head) = (pick % self.setup.layers, pick / 8 % self.setup.kv_heads as usize);
                let pages: Vec<PageInfo> = self.pairs[at][0].pages(layer, head).unwrap().collect();
                if !pages.is_empty() {
                    let page = pages[pick / 64 % pages.len()].id;
                    let [a, b] = self.pairs[at].each_mut().map(|sequence| sequence.evict(layer, head, page));
                    assert_eq!(a, b);
                }
            }
            Op::EvictAll { sequence } => {
                let at = self.at(*sequence);
                self.pairs[at].iter_mut().for_each(Sequence::evict_all);
            }
            Op::Clear { sequence } => {
                let at = self.at(*sequence);
                self.pairs[at].iter_mut().for_each(Sequence::clear);
            }
        }
    }

    /// All that can be seen of a sequence: where its pages are does not count.
    fn check(&mut self) {
        for pair in &self.pairs {
            let [a, b] = pair
                .each_ref()
                .map(|sequence| (sequence.next_position(), sequence.in_ring(), sequence.rollback_limit()));
            assert_eq!(a, b);
            for (layer, head) in
                (0..self.setup.layers).flat_map(|l| (0..self.setup.kv_heads).map(move |h| (l, h)))
            {
                let head = head as usize;
                let [a, b] = pair.each_ref().map(|sequence| {
                    let plain = |mut page: PageInfo| {
                        (page.shard, page.shared) = (0, false);
                        page
                    };
                    let pages: Vec<PageInfo> = sequence.pages(layer, head).unwrap().map(plain).collect();
                    let rows: Vec<_> =
                        pages.iter().map(|page| rows(self.setup, sequence, layer, head, page.id)).collect();
                    (pages, rows, sequence.resident(layer, head).unwrap())
                });
                assert_eq!(a, b);
            }
        }
    }
}

/// Positions of a page, and its first and last row.
fn rows(
    setup: &Setup,
    sequence: &Sequence,
    layer: usize,
    head: usize,
    page: PageId,
) -> (Vec<(u32, Position)>, Vec<u32>) {
    let all: Vec<(u32, Position)> = sequence.positions(layer, head, page).unwrap().collect();
    let mut read = Vec::new();
    for (lane, position) in all.first().into_iter().chain(all.last()) {
        let (mut k, mut v) = (vec![0.0; setup.k_dim as usize], vec![0.0; setup.v_dim as usize]);
        assert_eq!(sequence.read(layer, head, page, *lane, &mut k, &mut v), Ok(*position));
        read.extend(bits(&[k, v].concat()));
    }
    (all, read)
}

fn run(setup: &Setup, ops: &[Op]) -> Seen {
    let caches = setup.caches();
    let pairs = vec![caches.each_ref().map(Cache::sequence)];
    let mut twins = Twins { setup, caches, pairs, seed: 0, seen: Seen::default() };
    for op in ops {
        twins.apply(op);
        twins.check();
    }
    let ranks = twins.caches[1].ranks().unwrap();
    twins.seen.away += ranks.iter().map(|rank| rank.pages).sum::<u64>();
    // Nothing of it is left anywhere.
    twins.pairs.clear();
    let ranks = twins.caches[1].ranks().unwrap();
    assert!(ranks.iter().all(|rank| (rank.bytes, rank.pages) == (0, 0)), "{ranks:?}");
    assert_eq!(twins.caches[1].usage().taken, 0);
    twins.seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn wherever_pages_lie(setup in setup(), ops in proptest::collection::vec(op(), 1..60)) {
        run(&setup, &ops);
    }
}

/// The histories above do come to where they may fail.
#[test]
fn histories_reach_what_they_are_for() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Seen::default();
    let strategy = (setup(), proptest::collection::vec(op(), 40..60));
    for _ in 0..30 {
        let (setup, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let Seen { steps, refused, moved, replicated, away } = run(&setup, &ops);
        sum.steps += steps;
        sum.refused += refused;
        (sum.moved, sum.replicated) = (sum.moved + moved, sum.replicated + replicated);
        sum.away += away;
    }
    let Seen { steps, refused, moved, replicated, away } = sum;
    assert!(steps > 300 && refused > 5 && moved > 20 && replicated > 50 && away > 400, "{sum:?}");
}
