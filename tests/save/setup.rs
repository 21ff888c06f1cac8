//! Two caches of one configuration, with one sequence each that gets the same tokens.

use pikv::codec::{Code, Codec, Coding, Map};
use pikv::policy::{
    AdaKvLit, Budget, Chunks, Dense, Duo, DuoLit, Eviction, ExpectedAttention, H2o, KeyNorm, Lru, LruPlus,
    QuestLit, SnapKv, StreamingLlm, Tova, fast_v,
};
use pikv::report::PageInfo;
use pikv::save::Parked;
use pikv::shard::ShardMap;
use pikv::tiers::Tiers;
use pikv::{AttendOutput, Cache, CacheConfig, Step, StepReport};
use pikv_test::backend::backend;
use pikv_test::numbers::{bits, noise};
use pikv_test::twins::{self, Change, Given, Model, Pair, Values};
use std::num::NonZeroU32;

/// Rows of the table of policies, and heads that share their budgets.
pub const POLICIES: u8 = 15;
/// Rows of the table of codecs, in several codes.
pub const CODECS: u8 = 17;

/// A model of twins, with a policy and a codec of the tables.
#[derive(Clone, Debug)]
pub struct Setup {
    pub model: Model,
    pub policy: Option<u8>,
    pub by_page: bool,
    pub codec: Option<u8>,
    pub aged: bool,
    /// Not with the policy that goes by hits: a page in a lower tier is none.
    pub tiers: bool,
}

/// The policy that goes by hits.
pub const BY_HITS: u8 = 8;

/// Codec `i` of heads of these widths; whether its pages are smaller than those of int4.
fn codec(i: u8, k_dim: u32, v_dim: u32) -> Codec {
    let plain = |code| Codec::new(Coding::new(code), Coding::new(code));
    let mapped = |map: &dyn Fn(u32) -> Map| {
        let side = |dim| Coding::new(Code::F16).map(map(dim));
        Codec::new(side(k_dim), side(v_dim))
    };
    let dense = |dim: u32, bias: bool| {
        let narrow = dim.div_ceil(2);
        let matrix = |seed| noise(seed, (dim * narrow) as usize);
        let bias = bias.then(|| noise(9, dim as usize));
        Map::new(dim, narrow, matrix(3), matrix(4), bias).unwrap()
    };
    match i {
        0 => plain(Code::Int8),
        1 => plain(Code::Int4),
        2 => plain(Code::E4m3),
        3 => plain(Code::E5m2),
        4 => plain(Code::F16),
        5 => plain(Code::Bf16),
        6 => plain(Code::F32),
        7 => mapped(&|dim| Map::hadamard(dim).unwrap()),
        8 => mapped(&|dim| Map::identity_subset(dim, &[dim - 1]).unwrap()),
        9 => mapped(&|dim| dense(dim, false)),
        10 => mapped(&|dim| dense(dim, true)),
        11 => Codec::new(Coding::means(Code::Bf16, 1).unwrap(), Coding::means(Code::F16, 3).unwrap()),
        12 => Codec::new(Coding::block_pca(Code::F16, 1).unwrap(), Coding::new(Code::Bf16)),
        13 => Codec::new(Coding::new(Code::Int8), Coding::block_pca(Code::Bf16, 3).unwrap()),
        14 => Codec::new(Coding::new(Code::Int2), Coding::new(Code::Int3)),
        15 => Codec::new(Coding::new(Code::Int5), Coding::new(Code::Int6)),
        _ => Codec::new(Coding::new(Code::Nvfp4), Coding::new(Code::Mxfp4)),
    }
}

impl Setup {
    pub fn plain(model: Model) -> Setup {
        Setup { model, policy: None, by_page: false, codec: None, aged: false, tiers: false }
    }

    fn evicting(&self, config: CacheConfig, policy: u8) -> CacheConfig {
        let model = &self.model;
        let budget = || Budget::Tokens(model.ring + 50);
        let (heads, layers) = (model.kv_heads as usize, model.layers);
        let rope = config.layers[0].rope;
        // Of means whole pages go.
        let by_page = self.by_page || self.codec == Some(11);
        let eviction = match policy {
            0 => Eviction::new(H2o, budget()),
            1 => Eviction::new(KeyNorm, budget()),
            2 => Eviction::new(Lru::default(), Budget::Share(0.5)),
            3 => Eviction::new(
                LruPlus::default().lambda(8.0),
                Budget::Layers(vec![model.ring + 40; layers].into()),
            ),
            4 => Eviction::new(SnapKv::default().window(7).pool(3), budget()),
            5 => Eviction::new(Tova, budget()),
            6 => Eviction::new(StreamingLlm, budget()),
            7 => {
                let layer = Dense::new(noise(5, QuestLit::STATISTICS), vec![0.25]);
                Eviction::new(QuestLit::new(vec![layer]).unwrap(), budget())
            }
            BY_HITS => Eviction::new(AdaKvLit::default(), budget()),
            9 => Eviction::new(DuoLit, budget()),
            10 => Eviction::new(ExpectedAttention::new(rope, false).memory(16), budget()),
            11 => Eviction::new(Chunks::new(H2o, NonZeroU32::new(5).unwrap()), budget()),
            12 => Duo::new(vec![vec![1.0, 0.0][..heads].to_vec(); layers], model.ring + 40).eviction(),
            13 => Eviction::new(H2o, budget()).adaptive(0.3),
            _ if layers > 1 => {
                let rules = fast_v(layers, 1, |policy| Eviction::new(policy, budget())).unwrap();
                return rules.into_iter().fold(config, |config, (layer, mut rule)| {
                    rule.by_page |= by_page;
                    config.evict_layer(layer, rule)
                });
            }
            _ => Eviction::new(H2o, budget()).batch(1),
        };
        let mut eviction = eviction;
        if by_page {
            (eviction.by_page, eviction.adaptive) = (true, None);
        }
        config.evict(eviction)
    }

    pub fn config(&self, shards: u32, tiers: bool) -> CacheConfig {
        let Model { k_dim, v_dim, .. } = self.model;
        let plain = Model { policy: None, codec: None, ..self.model.clone() };
        let mut config = plain.config(plain.page() << 20).shards(ShardMap::sum(shards).unwrap());
        config = config.backend(backend());
        if let Some(policy) = self.policy {
            config = self.evicting(config, policy);
        }
        if let Some(i) = self.codec {
            let first = codec(i, k_dim, v_dim);
            // Means, which keep no scale, are the smallest there are.
            let means = |level| Coding::means(Code::Bf16, level).unwrap();
            let second = Codec::new(means(3), means(3));
            let by_page = config.evictions.iter().all(|rule| rule.eviction.by_page);
            let smaller = second.packed(k_dim, v_dim).bytes() < first.packed(k_dim, v_dim).bytes();
            config = config.compress(first);
            if self.aged && !self.tiers && by_page && smaller {
                config = config.age(40, second);
            }
        }
        let page = plain.page();
        if tiers {
            config.tiers(Tiers::new().host(20 * page).file(std::env::temp_dir(), page << 12))
        } else {
            config
        }
    }
}

/// What a test of nothing would not see.
#[derive(Debug, Default)]
pub struct Seen {
    pub steps: u32,
    pub saves: u32,
    pub away: u64,
    pub packed: u32,
    pub gone: u32,
    pub back: u32,
    pub parks: u32,
}

/// A cache that nothing is saved in, and two that sequences go to and fro between, with other numbers of shards.
pub struct Twins<'a> {
    pub setup: &'a Setup,
    pub caches: [Cache; 3],
    /// Which of the last two they are in.
    pub side: usize,
    pub pairs: Vec<Pair>,
    pub values: Values,
    pub seen: Seen,
    /// Whether a page may be shared in the first cache and not in the other: what is put together is noted in more pages then, as it is where
    /// pages lie in lower tiers.
    forked: bool,
}

impl<'a> Twins<'a> {
    pub fn new(setup: &'a Setup) -> Twins<'a> {
        let shards = setup.model.shards;
        let config = [(shards, false), (shards, setup.tiers), (shards % 3 + 1, false)];
        let caches = config.map(|(shards, tiers)| Cache::new(setup.config(shards, tiers)).unwrap());
        let pairs = vec![[caches[0].sequence(), caches[1].sequence()]];
        let (values, seen) = (Values::default(), Seen::default());
        Twins { setup, caches, side: 1, pairs, values, seen, forked: false }
    }

    pub fn add(&mut self) {
        self.pairs.push([self.caches[0].sequence(), self.caches[self.side].sequence()]);
    }

    pub fn step(&mut self, parts: &[(u8, u32)], read: u8, abort: Option<usize>) {
        let model = &self.setup.model;
        let chosen = twins::chosen(&self.pairs, parts);
        let rows: usize = chosen.iter().map(|(_, n)| *n as usize).sum();
        let given = self.values.step(model, rows);
        let (options, (outs, lses)) = (model.how(read), model.outs(rows));
        let [left, right] = twins::parts(&mut self.pairs, &chosen);
        let mut steps: [Step<'_>; 2] =
            [self.caches[0].begin(left).unwrap(), self.caches[self.side].begin(right).unwrap()];
        for (layer, Given { k, v, q, routes }) in given.iter().enumerate() {
            if abort == Some(layer) {
                return;
            }
            let [a, b] = steps.each_mut().map(|step| {
                step.append(layer, k, v).unwrap();
                step.route(layer, routes).unwrap();
                let (mut out, mut lse) = (vec![0.0; outs], vec![0.0; lses]);
                step.attend(layer, q, &options, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
                (bits(&out), bits(&lse))
            });
            assert_eq!(a, b, "layer {layer} of step {}", self.seen.steps);
        }
        if abort.is_some() {
            return;
        }
        let [a, b] = steps.map(|step| {
            let mut report = StepReport::default();
            step.commit_with(&mut report).unwrap();
            report
        });
        for layer in 0..model.layers {
            if !self.setup.tiers {
                assert_eq!((a.hits(layer), a.misses(layer)), (b.hits(layer), b.misses(layer)));
            }
        }
        self.seen.steps += 1;
    }

    pub fn change(&mut self, change: &Change) {
        self.forked |= matches!(change, Change::Fork { .. });
        self.seen.back += u32::from(matches!(change, Change::Rollback { .. }));
        change.apply(&self.setup.model, &mut self.pairs);
    }

    /// Saves all sequences of one cache, and restores them in the other.
    pub fn carry(&mut self) {
        self.side = 3 - self.side;
        for (i, pair) in self.pairs.iter_mut().enumerate() {
            let (note, mut bytes) = (vec![i as u8; i], Vec::new());
            let saved = pair[1].save(&note, &mut bytes).unwrap();
            assert_eq!(saved, bytes.len() as u64);
            let again = self.caches[self.side].restore(&mut &bytes[..]).unwrap();
            assert_eq!((again.note, again.bytes), (note, saved));
            let before = std::mem::replace(&mut pair[1], again.sequence);
            // What was restored is saved as the same bytes, but for where pages lie.
            let mut second = Vec::new();
            pair[1].save(&[7; 3][..i.min(3)], &mut second).unwrap();
            if i == 0 && !self.setup.tiers {
                assert!(bytes == second);
            }
            drop(before);
        }
        self.seen.saves += 1;
    }

    /// Files the ring of a pair ahead, and keeps it as it is.
    pub fn seal(&mut self, sequence: u8) {
        self.forked = true;
        let at = twins::at(&self.pairs, sequence);
        for sequence in &mut self.pairs[at] {
            sequence.seal().unwrap();
            sequence.checkpoint().unwrap();
        }
    }

    /// Parks all sequences of the cache with tiers, and wakes them.
    pub fn park(&mut self) {
        if !self.setup.tiers || self.side != 1 {
            return;
        }
        let parked: Vec<Parked> = self.pairs.iter_mut().map(|pair| pair[1].park(1).unwrap()).collect();
        assert_eq!(self.caches[1].usage().taken, 0);
        for (pair, parked) in self.pairs.iter_mut().zip(parked) {
            assert_eq!(pair[1].next_position().0, 0);
            pair[1] = parked.wake().unwrap();
        }
        self.seen.parks += 1;
    }

    /// All that can be seen of the pairs.
    pub fn check(&mut self) {
        let model = &self.setup.model;
        for pair in &self.pairs {
            twins::check(model, pair, |page: &mut PageInfo| {
                (page.tier, page.shared, page.shard) = (0, false, 0);
            });
            for page in pair[1].pages(0, 0).unwrap() {
                self.seen.packed += u32::from(page.packed);
                self.seen.gone += u32::from(page.tokens < 32 && !page.open);
            }
            let all = |i: usize| {
                (0..3)
                    .map(|tier| if tier == 0 { pair[i].bytes() } else { pair[i].bytes_in_tier(tier) })
                    .sum::<u64>()
            };
            self.seen.away += all(1) - pair[1].bytes();
            assert!(
                self.forked || self.setup.tiers || all(0) == all(1),
                "{} bytes, and {} restored",
                all(0),
                all(1)
            );
        }
    }

    pub fn end(mut self) -> Seen {
        self.pairs.clear();
        for cache in &self.caches {
            let usage = cache.usage();
            assert_eq!((usage.taken, usage.ghosts), (0, 0));
            assert!(usage.tiers.iter().all(|tier| tier.bytes == 0));
        }
        self.seen
    }
}
