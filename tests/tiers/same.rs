//! Random histories of two caches: one that holds everything, and one whose pages come and go. They may not differ in a bit.

use crate::setup::{Control, bits, bytes, fake, noise};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, LruPlus, StreamingLlm};
use pikv::tiers::Tiers;
use pikv::{
    Attend, Cache, CacheConfig, Dtype, Error, LayerShape, Layout, Output, PageId, PageInfo, PageMass, Pairs,
    Position, Read, Rope, Rows, Sequence, ShardMap, Step, StepReport, TierOperation,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

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
    /// Pages of every layer and head in the first tier, and in the tiers beneath.
    budget: u64,
    host: u64,
    store: u64,
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

    fn config(&self, pages: u64) -> CacheConfig {
        let shape = self.shape();
        let page = self.layers as u64 * u64::from(self.kv_heads) * shape.layout.bytes();
        let mut config = CacheConfig::new(vec![shape; self.layers], page * pages)
            .ring(self.ring)
            .rollback(self.rollback)
            .sinks(self.sinks)
            .experts(self.experts, self.experts.min(2))
            .shards(ShardMap::sum(self.shards).unwrap())
            .bounds(true)
            .poison(true)
            .backend(crate::backend::backend());
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

    fn caches(&self, control: &Arc<Control>) -> [Cache; 2] {
        let shape = self.shape();
        let page = self.layers as u64 * u64::from(self.kv_heads) * shape.layout.bytes();
        let tiers = Tiers::new().host(self.host * page).staging(1 << 30);
        // Pages that lost tokens are put together where there is room: with none, they would be in one cache only.
        let (budget, store) =
            if self.policy.is_some() { (self.budget + 400, 1 << 20) } else { (self.budget, self.store) };
        let tiers = fake(tiers, store * page, control);
        [self.config(1 << 20), self.config(budget).tiers(tiers)].map(|config| Cache::new(config).unwrap())
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
        (codec, policy, 1u32..=3, 8u64..40, 0u64..8, 0u64..40),
    )
        .prop_map(|(shape, tokens, store)| {
            let (layers, kv_heads, k_dim, v_dim, dtype, window, rope) = shape;
            let (ring, rollback, sinks, experts) = tokens;
            let (codec, policy, shards, budget, host, store) = store;
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
                budget,
                host,
                store,
            }
        })
}

#[derive(Clone, Debug)]
enum Op {
    New,
    /// Sequences and tokens; what is read; what fails; layers done before the step is dropped.
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
    Arrange {
        sequence: u8,
        layer: usize,
        shares: (f64, f64),
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
        3 => (sequence(), 0usize..3, (0.0..1.0f64, 0.0..1.0f64))
            .prop_map(|(sequence, layer, shares)| Op::Arrange { sequence, layer, shares }),
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
    control: Arc<Control>,
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
    /// Failures that the test asked for and that came.
    writes: u32,
    reads: u32,
    away: u32,
}

fn how(setup: &Setup, read: u8) -> Attend {
    let read = match read % 4 {
        0 | 1 => Read::All,
        2 => Read::Experts,
        _ => Read::Quest { pages: u32::from(read / 4 % 4) },
    };
    Attend::new(0.5).read(read).closed_gaps(setup.rope && read != Read::Experts)
}

/// What both caches are asked, and what they say: an error that the second one's store was told to make is cleared, and the call made
/// again.
fn both(
    control: &Control,
    seen: &mut Seen,
    fails: bool,
    (outs, lses): (usize, usize),
    mut call: impl FnMut(usize, Output<'_>) -> Result<(), Error>,
) {
    let mut results = Vec::new();
    for cache in 0..2 {
        let (mut out, mut lse, mut mass) = (vec![0.0; outs], vec![0.0; lses], Vec::<PageMass>::new());
        control.unreadable.store(fails && cache == 1, SeqCst);
        let mut made = call(cache, Output::new(&mut out).lse(&mut lse).mass(&mut mass));
        control.unreadable.store(false, SeqCst);
        if let Err(Error::Tier { operation: TierOperation::Read, .. }) = made {
            assert!(fails && cache == 1);
            seen.reads += 1;
            made = call(cache, Output::new(&mut out).lse(&mut lse).mass(&mut mass));
        }
        results.push(made.map(|()| (bits(&out), bits(&lse), mass)));
    }
    assert_eq!(results[0], results[1]);
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

    fn step(&mut self, parts: &[(u8, u32)], read: u8, fails: u8, abort: Option<usize>) {
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
        let [roomy, tight] = &self.caches;
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for (i, [a, b]) in self.pairs.iter_mut().enumerate() {
            if let Some((_, n)) = chosen.iter().find(|(at, _)| *at == i) {
                left.push((a, *n));
                right.push((b, *n));
            }
        }
        // Where a policy evicts, what it thinned out is put together when a step begins, and pages that cannot be written wait.
        let fails = if self.setup.policy.is_some() { fails & !1 } else { fails };
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
        for (layer, (k, v, q, routes)) in tokens.iter().enumerate() {
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
        for layer in 0..layers {
            let wanted = |report: &StepReport| -> Vec<u64> {
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
                let at = self.at(*sequence);
                let (q, outs, options) = (self.queries(1), self.outs(1), how(self.setup, *read));
                let first = Position(self.pairs[at][0].next_position().0.saturating_sub(*back));
                for layer in 0..self.setup.layers {
                    let Twins { control, seen, caches, pairs, .. } = self;
                    both(control, seen, *fails, outs, |cache, out| {
                        let rows = [Rows { sequence: &pairs[at][cache], first, rows: 1 }];
                        caches[cache].attend(layer, &rows, &q, &options, out)
                    });
                }
            }
            Op::Demote { sequence, share, fails } => {
                let at = self.at(*sequence);
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
                let at = self.at(*sequence);
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
            Op::Arrange { sequence, layer, shares: (fast, host) } => {
                let at = self.at(*sequence);
                let layers = layer % self.setup.layers..self.setup.layers;
                let host = (1.0 - fast) * host;
                match self.pairs[at][1].arrange(layers, &[*fast, host, 1.0 - fast - host]) {
                    Ok(()) | Err(Error::TierFull { .. } | Error::OutOfBudget { .. }) => {}
                    Err(other) => panic!("{other}"),
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
        let mut away = [0; 2];
        let mut near = 0;
        for pair in &self.pairs {
            near += pair[1].bytes();
            for (tier, away) in away.iter_mut().enumerate() {
                *away += pair[1].bytes_in_tier(tier + 1);
            }
            let [a, b] = pair
                .each_ref()
                .map(|sequence| (sequence.next_position(), sequence.in_ring(), sequence.rollback_limit()));
            assert_eq!(a, b);
            for (layer, head) in
                (0..self.setup.layers).flat_map(|l| (0..self.setup.kv_heads).map(move |h| (l, h)))
            {
                let head = head as usize;
                let [a, b] = pair.each_ref().map(|sequence| {
                    let pages = sequence.pages(layer, head).unwrap();
                    let pages: Vec<PageInfo> = pages.collect();
                    let rows: Vec<_> =
                        pages.iter().map(|page| rows(self.setup, sequence, layer, head, page.id)).collect();
                    (pages, rows, sequence.resident(layer, head).unwrap())
                });
                self.seen.away += b.0.iter().filter(|page| page.tier > 0).count() as u32;
                let plain = |pages: Vec<PageInfo>| -> Vec<PageInfo> {
                    let plain = |mut page: PageInfo| {
                        (page.tier, page.shared) = (0, false);
                        page
                    };
                    pages.into_iter().map(plain).collect()
                };
                assert_eq!((plain(a.0), a.1, a.2), (plain(b.0), b.1, b.2));
            }
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
    let control = Arc::new(Control::default());
    let caches = setup.caches(&control);
    let pairs = vec![caches.each_ref().map(Cache::sequence)];
    let mut twins = Twins { setup, control, caches, pairs, seed: 0, seen: Seen::default() };
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
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn wherever_pages_lie(setup in setup(), ops in proptest::collection::vec(op(), 1..80)) {
        run(&setup, &ops);
    }
}

/// The histories above do come to where they may fail.
#[test]
fn histories_reach_what_they_are_for() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Seen::default();
    let strategy = (setup(), proptest::collection::vec(op(), 40..80));
    for _ in 0..40 {
        let (setup, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let Seen { steps, refused, writes, reads, away } = run(&setup, &ops);
        sum.steps += steps;
        (sum.refused, sum.writes, sum.reads) =
            (sum.refused + refused, sum.writes + writes, sum.reads + reads);
        sum.away += away;
    }
    let Seen { steps, refused, writes, reads, away } = sum;
    assert!(steps > 500 && refused > 30 && writes > 5 && reads > 10 && away > 1000, "{sum:?}");
}
