//! Random histories of two caches that must agree: a plain one, and one with its pages in other memory.

use crate::numbers::{bits, noise};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, LruPlus, StreamingLlm};
use pikv::report::{PageId, PageInfo};
use pikv::rules::Hits;
use pikv::shape::Resident;
use pikv::shard::ShardMap;
use pikv::{Attend, CacheConfig, Dtype, LayerShape, Position, ReadPages, Rope, Sequence};
use proptest::prelude::*;
use std::ops::RangeInclusive;

/// The configuration of both caches.
#[derive(Clone, Debug)]
pub struct Model {
    pub layers: usize,
    pub kv_heads: u32,
    pub k_dim: u32,
    pub v_dim: u32,
    pub dtype: Dtype,
    pub window: Option<u32>,
    pub rope: bool,
    pub ring: u32,
    pub rollback: u32,
    pub sinks: u32,
    pub experts: u32,
    /// Packs the first head, or all.
    pub codec: Option<(Code, bool)>,
    /// Evicts tokens, or whole pages, by this policy, down to so many tokens.
    pub policy: Option<(u8, bool, u32)>,
    pub shards: u32,
}

pub fn model(shards: RangeInclusive<u32>) -> impl Strategy<Value = Model> {
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)];
    let window = prop_oneof![2 => Just(None), 1 => (60u32..200).prop_map(Some)];
    let code = prop_oneof![Just(Code::Int8), Just(Code::Int4)];
    let codec = prop_oneof![1 => Just(None), 1 => (code, any::<bool>()).prop_map(Some)];
    let policy = prop_oneof![1 => Just(None), 1 => (any::<u8>(), any::<bool>(), 60u32..200).prop_map(Some)];
    (
        (1usize..=3, 1u32..=2, 2u32..=6, 1u32..=6, dtype, window, any::<bool>()),
        (1u32..=40, 0u32..=12, 0u32..=4, prop_oneof![2 => Just(1u32), 2 => 2u32..=4, 1 => Just(20)]),
        (codec, policy, shards),
    )
        .prop_map(|(shape, tokens, store)| {
            let (layers, kv_heads, k_dim, v_dim, dtype, window, rope) = shape;
            let (ring, rollback, sinks, experts) = tokens;
            let (codec, policy, shards) = store;
            Model {
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
            }
        })
}

impl Model {
    fn shape(&self) -> LayerShape {
        let rope = Rope::new(1000.0, 2);
        LayerShape::new(self.kv_heads, 2 * self.kv_heads, self.k_dim, self.dtype)
            .values(self.v_dim, self.dtype)
            .window(self.window)
            .rope(self.rope.then_some(rope))
    }

    /// Bytes of a page of every layer and head.
    pub fn page(&self) -> u64 {
        self.layers as u64 * u64::from(self.kv_heads) * self.shape().layout.bytes()
    }

    pub fn config(&self, budget: u64) -> CacheConfig {
        let mut config = CacheConfig::new(vec![self.shape(); self.layers], budget)
            .ring(self.ring)
            .rollback(self.rollback)
            .sinks(self.sinks)
            .experts(self.experts, self.experts.min(2))
            .shards(ShardMap::sum(self.shards).unwrap())
            .key_bounds(true)
            .hits(Hits::new().pages(2).every(1))
            .nan_fill(true);
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

    /// Lengths of the output, and of the log-sum-exps, of some rows.
    pub fn outs(&self, rows: usize) -> (usize, usize) {
        let heads = 2 * self.kv_heads as usize;
        (rows * heads * self.v_dim as usize, rows * heads)
    }

    pub fn how(&self, read: u8) -> Attend {
        let read = match read % 4 {
            0 | 1 => ReadPages::All,
            2 => ReadPages::Experts,
            _ => ReadPages::Quest { pages: u32::from(read / 4 % 4) },
        };
        Attend::new(0.5).read(read).closed_gaps(self.rope && read != ReadPages::Experts)
    }
}

/// The same sequence in both caches.
pub type Pair = [Sequence; 2];

/// The pair that a number means.
pub fn at(pairs: &[Pair], sequence: u8) -> usize {
    usize::from(sequence) % pairs.len()
}

/// The sequences of a step and their tokens, each once, in order.
pub fn chosen(pairs: &[Pair], parts: &[(u8, u32)]) -> Vec<(usize, u32)> {
    let mut chosen: Vec<(usize, u32)> = Vec::new();
    for (sequence, n) in parts {
        let at = at(pairs, *sequence);
        if chosen.iter().all(|(i, _)| *i != at) {
            chosen.push((at, *n));
        }
    }
    chosen.sort_unstable();
    chosen
}

/// The sequences and tokens that each cache begins a step with.
pub fn parts<'p>(pairs: &'p mut [Pair], chosen: &[(usize, u32)]) -> [Vec<(&'p mut Sequence, u32)>; 2] {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for (i, [a, b]) in pairs.iter_mut().enumerate() {
        if let Some((_, n)) = chosen.iter().find(|(at, _)| *at == i) {
            left.push((a, *n));
            right.push((b, *n));
        }
    }
    [left, right]
}

/// A layer's input for a step.
pub struct Given {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub q: Vec<f32>,
    pub routes: Vec<u16>,
}

/// Values, other ones each time.
#[derive(Default)]
pub struct Values(u64);

impl Values {
    fn noise(&mut self, n: usize) -> Vec<f32> {
        self.0 += 1;
        noise(self.0, n)
    }

    pub fn queries(&mut self, model: &Model, rows: usize) -> Vec<f32> {
        self.noise(rows * (2 * model.kv_heads * model.k_dim) as usize)
    }

    /// For each layer.
    pub fn step(&mut self, model: &Model, rows: usize) -> Vec<Given> {
        let Model { layers, kv_heads, k_dim, v_dim, experts, .. } = *model;
        let layer = |_| {
            let top_k = experts.min(2) as usize;
            let routes = self
                .noise(rows)
                .iter()
                .flat_map(|x| {
                    let first = ((x + 1.0) * 0.5 * experts as f32) as u16 % experts as u16;
                    [first, (first + 1) % experts as u16].into_iter().take(top_k)
                })
                .collect();
            let k = self.noise(rows * (kv_heads * k_dim) as usize);
            let v = self.noise(rows * (kv_heads * v_dim) as usize);
            Given { k, v, q: self.queries(model, rows), routes }
        };
        (0..layers).map(layer).collect()
    }
}

/// An operation on sequences outside a step.
#[derive(Clone, Debug)]
pub enum Change {
    Rollback { sequence: u8, n: u32 },
    Fork { sequence: u8 },
    Drop { sequence: u8 },
    Evict { sequence: u8, pick: usize },
    EvictAll { sequence: u8 },
    Clear { sequence: u8 },
}

/// Weight of these among other operations.
pub const CHANGES: u32 = 10;

pub fn change() -> impl Strategy<Value = Change> {
    let sequence = || 0u8..4;
    prop_oneof![
        3 => (sequence(), 0u32..=13).prop_map(|(sequence, n)| Change::Rollback { sequence, n }),
        2 => sequence().prop_map(|sequence| Change::Fork { sequence }),
        1 => sequence().prop_map(|sequence| Change::Drop { sequence }),
        2 => (sequence(), any::<usize>()).prop_map(|(sequence, pick)| Change::Evict { sequence, pick }),
        1 => sequence().prop_map(|sequence| Change::EvictAll { sequence }),
        1 => sequence().prop_map(|sequence| Change::Clear { sequence }),
    ]
}

impl Change {
    pub fn apply(&self, model: &Model, pairs: &mut Vec<Pair>) {
        match *self {
            Change::Rollback { sequence, n } => {
                let at = at(pairs, sequence);
                let [a, b] = pairs[at].each_mut().map(|sequence| sequence.rollback(n));
                assert_eq!(a, b);
            }
            Change::Fork { sequence } if pairs.len() < 4 => {
                let forks = pairs[at(pairs, sequence)].each_ref().map(Sequence::fork);
                pairs.push(forks);
            }
            Change::Fork { .. } => {}
            Change::Drop { sequence } => {
                let at = at(pairs, sequence);
                if pairs.len() > 1 {
                    pairs.swap_remove(at);
                }
            }
            Change::Evict { sequence, pick } => {
                let at = at(pairs, sequence);
                let (layer, head) = (pick % model.layers, pick / 8 % model.kv_heads as usize);
                let pages: Vec<PageInfo> = pairs[at][0].pages(layer, head).unwrap().collect();
                if !pages.is_empty() {
                    let page = pages[pick / 64 % pages.len()].id;
                    let [a, b] = pairs[at].each_mut().map(|sequence| sequence.evict(layer, head, page));
                    assert_eq!(a, b);
                }
            }
            Change::EvictAll { sequence } => {
                let at = at(pairs, sequence);
                pairs[at].iter_mut().for_each(Sequence::evict_all);
            }
            Change::Clear { sequence } => {
                let at = at(pairs, sequence);
                pairs[at].iter_mut().for_each(Sequence::clear);
            }
        }
    }
}

/// Holds all that can be seen of a pair against each other. Where pages are does not count: `plain` takes that out.
pub fn check(model: &Model, pair: &Pair, plain: impl Fn(&mut PageInfo)) {
    let [a, b] = pair
        .each_ref()
        .map(|sequence| (sequence.next_position(), sequence.in_ring(), sequence.rollback_limit()));
    assert_eq!(a, b);
    for (layer, head) in (0..model.layers).flat_map(|l| (0..model.kv_heads as usize).map(move |h| (l, h))) {
        let [a, b] = pair.each_ref().map(|sequence| seen(model, sequence, layer, head, &plain));
        assert_eq!(a, b);
    }
}

/// A page, the positions of its tokens, and its first and last row.
type Page = (PageInfo, Vec<(u32, Position)>, Vec<u32>);

fn seen(
    model: &Model,
    sequence: &Sequence,
    layer: usize,
    head: usize,
    plain: impl Fn(&mut PageInfo),
) -> (Vec<Page>, Resident) {
    let page = |mut info: PageInfo| {
        plain(&mut info);
        let (positions, rows) = rows(model, sequence, layer, head, info.id);
        (info, positions, rows)
    };
    let pages = sequence.pages(layer, head).unwrap().map(page).collect();
    (pages, sequence.resident(layer, head).unwrap())
}

fn rows(
    model: &Model,
    sequence: &Sequence,
    layer: usize,
    head: usize,
    page: PageId,
) -> (Vec<(u32, Position)>, Vec<u32>) {
    let all: Vec<(u32, Position)> = sequence.positions(layer, head, page).unwrap().collect();
    let mut read = Vec::new();
    for (lane, position) in all.first().into_iter().chain(all.last()) {
        let (mut k, mut v) = (vec![0.0; model.k_dim as usize], vec![0.0; model.v_dim as usize]);
        assert_eq!(sequence.read(layer, head, page, *lane, &mut k, &mut v), Ok(*position));
        read.extend(bits(&[k, v].concat()));
    }
    (all, read)
}
