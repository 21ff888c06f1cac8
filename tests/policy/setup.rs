//! Small caches, generated tokens, and attention in f64.

use pikv::policy::{
    Budget, Candidates, Eviction, HeadSeen, MassFeedback, OptionError, Policy, Scope, Seen, Token,
};
use pikv::report::{PageId, Place};
use pikv::shape::LANES;
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Rope, Sequence};
use pikv_test::backend::backend;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

pub fn shape(kv_heads: u32, group: u32, k_dim: u32, v_dim: u32) -> LayerShape {
    LayerShape::new(kv_heads, kv_heads * group, k_dim, Dtype::F32).values(v_dim, Dtype::F32)
}

pub fn rope(rotary_dim: u32) -> Rope {
    Rope::new(100.0, rotary_dim)
}

/// A small cache: `layers` layers of 2 KV heads, 2 query heads each, a ring of 4, 2 sinks, freed pages full of NaN.
pub fn config(layers: usize) -> CacheConfig {
    CacheConfig::new(vec![shape(2, 2, 4, 3); layers], 4 << 20)
        .ring(4)
        .sinks(2)
        .nan_fill(true)
        .backend(backend())
}

pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `n` numbers in -1..1.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    (0..n as u64).map(|i| (mix(mix(seed) ^ i) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
}

/// The kind of tokens appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Noise,
    /// Keys of 0: all scores are equal.
    Equal,
    /// All queries attend to every seventh token.
    Hot,
    /// One expert gets nearly all tokens.
    HotExpert,
}

/// A token of all layers: keys `[layer][kv_heads][k_dim]`, values, queries `[layer][query_heads][k_dim]`, experts `[layer][top_k]`.
#[derive(Clone, Debug)]
pub struct Row {
    pub k: Vec<Vec<f32>>,
    pub v: Vec<Vec<f32>>,
    pub q: Vec<Vec<f32>>,
    pub experts: Vec<Vec<u16>>,
}

pub fn row(config: &CacheConfig, kind: Kind, id: u64) -> Row {
    let each = |salt: u64, n: &dyn Fn(&LayerShape) -> u32| -> Vec<Vec<f32>> {
        let layers = (0u64..).zip(&config.layers);
        layers.map(|(l, shape)| noise(id * 64 + l * 4 + salt, n(shape) as usize)).collect()
    };
    let mut k = each(0, &|s| s.kv_heads * s.layout.k_dim);
    let mut q = each(2, &|s| s.query_heads * s.layout.k_dim);
    match kind {
        Kind::Equal => k.iter_mut().for_each(|k| k.fill(0.0)),
        Kind::Hot if id.is_multiple_of(7) => k.iter_mut().for_each(|k| k.fill(2.0)),
        Kind::Hot => q.iter_mut().flatten().for_each(|x| *x = x.abs()),
        _ => {}
    }
    let expert = |l: usize, i: u64| {
        let first = match kind {
            Kind::HotExpert if !mix(id).is_multiple_of(8) => 0,
            _ => mix(id ^ (l as u64) << 40) % u64::from(config.experts),
        };
        ((first + i) % u64::from(config.experts)) as u16
    };
    let experts =
        (0..config.layers.len()).map(|l| (0..u64::from(config.top_k)).map(|i| expert(l, i)).collect());
    let mut v = each(1, &|s| s.kv_heads * s.layout.v_dim);
    for (shape, (k, v)) in config.layers.iter().zip(k.iter_mut().zip(&mut v)) {
        k.iter_mut().for_each(|x| *x = stored(shape.layout.k, *x));
        v.iter_mut().for_each(|x| *x = stored(shape.layout.v, *x));
    }
    Row { k, v, q, experts: experts.collect() }
}

/// A number as stored in a dtype.
fn stored(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => half::f16::from_f32(x).to_f32(),
        Dtype::Bf16 => half::bf16::from_f32(x).to_f32(),
        other => panic!("{} is not used here", other.name()),
    }
}

/// Appends rows in one step; `read` attends layer by layer.
pub fn run(
    cache: &Cache,
    sequence: &mut Sequence,
    rows: &[Row],
    mut read: impl FnMut(&mut pikv::Step<'_>, usize, &[f32], usize),
) {
    let layers = cache.config().layers.len();
    let all = |of: &dyn Fn(&Row) -> Vec<f32>| rows.iter().flat_map(of).collect::<Vec<f32>>();
    let mut step = cache.begin([(&mut *sequence, rows.len() as u32)]).unwrap();
    for l in 0..layers {
        step.append(l, &all(&|r| r.k[l].clone()), &all(&|r| r.v[l].clone())).unwrap();
        let experts: Vec<u16> = rows.iter().flat_map(|r| r.experts[l].clone()).collect();
        step.route(l, &experts).unwrap();
        let shape = &cache.config().layers[l];
        let size = rows.len() * (shape.query_heads * shape.layout.v_dim) as usize;
        read(&mut step, l, &all(&|r| r.q[l].clone()), size);
    }
    step.commit().unwrap();
}

/// The positions that a head holds, tokens that left the ring but are kept for rollback apart.
pub fn held(sequence: &Sequence, layer: usize, head: usize) -> BTreeSet<u32> {
    let ring = sequence.next_position().0 - sequence.in_ring().0;
    let mut all = BTreeSet::new();
    for page in sequence.pages(layer, head).unwrap() {
        for (_, p) in sequence.positions(layer, head, page.id).unwrap() {
            if page.id.place != Place::Ring || p.0 >= ring {
                assert!(all.insert(p.0), "position {} is held twice", p.0);
            }
        }
    }
    assert_eq!(sequence.resident(layer, head).unwrap().0 as usize, all.len());
    all
}

/// A row turned to a position.
pub fn turned(row: &[f32], rope: Option<&Rope>, position: f64) -> Vec<f64> {
    let mut out: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
    let Some(rope) = rope else { return out };
    for i in 0..rope.rotary_dim as usize / 2 {
        let (a, b) = rope.pair(i);
        let angle = position * rope.theta.powf(-2.0 * i as f64 / f64::from(rope.rotary_dim));
        let (x, y) = (out[a], out[b]);
        out[a] = x * angle.cos() - y * angle.sin();
        out[b] = y * angle.cos() + x * angle.sin();
    }
    out
}

/// Output and weights of a query over tokens: key and value each, keys and query turned already.
pub fn attention(q: &[f64], tokens: &[(Vec<f64>, Vec<f64>)], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let logits: Vec<f64> =
        tokens.iter().map(|(k, _)| scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()).collect();
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> = logits.iter().map(|x| (x - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    let dim = tokens.first().map_or(0, |(_, v)| v.len());
    let out = (0..dim).map(|c| weights.iter().zip(tokens).map(|(w, (_, v))| w * v[c]).sum()).collect();
    (out, weights)
}

#[track_caller]
pub fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (x, y)) in got.iter().zip(want).enumerate() {
        // Written so that NaN fails.
        assert!((f64::from(*x) - y).abs() <= tolerance, "at {i}: {x}, not {y}");
    }
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// An observation or a ranking of a policy.
#[derive(Clone, Debug)]
pub enum Event {
    Seen {
        layer: usize,
        head: usize,
        group: u32,
        first: u32,
        rows: u32,
        page: PageId,
        live: u32,
        resident: u32,
        /// Positions and masses of the lanes in `live`.
        tokens: Vec<(u32, f32)>,
    },
    Head {
        layer: usize,
        head: usize,
        first: u32,
        rows: u32,
        queries: Vec<f32>,
        hits: f32,
        misses: f32,
        asked: u32,
    },
    /// Positions and pages of the tokens that were ranked.
    Ranked { layer: usize, head: usize, tokens: Vec<(u32, u64)> },
}

pub type Log = Arc<Mutex<Vec<Event>>>;

/// A policy with a log of its calls.
#[derive(Debug)]
pub struct Spy {
    pub of: Box<dyn Policy>,
    pub log: Log,
}

#[deny(clippy::missing_trait_methods)]
impl Policy for Spy {
    fn name(&self) -> &str {
        self.of.name()
    }
    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        self.of.parameters(to);
    }
    fn check(&self) -> Result<(), OptionError> {
        self.of.check()
    }
    fn rotation(&self) -> Option<Rope> {
        self.of.rotation()
    }
    fn sinks(&self) -> u32 {
        self.of.sinks()
    }
    fn reads_tokens(&self) -> bool {
        self.of.reads_tokens()
    }
    /// Never, so that the log has every ranking.
    fn oldest_first(&self) -> bool {
        false
    }
    fn feedback(&self) -> MassFeedback {
        self.of.feedback()
    }
    fn wants_hits(&self) -> bool {
        self.of.wants_hits()
    }
    fn lean(&self, head: &[f32]) -> Option<f32> {
        self.of.lean(head)
    }
    fn words(&self) -> usize {
        self.of.words()
    }
    fn head_words(&self, k_dim: usize, group: usize) -> usize {
        self.of.head_words(k_dim, group)
    }
    fn scope(&self) -> Scope {
        self.of.scope()
    }
    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        self.of.born(token, state);
    }
    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        let tokens = seen.lanes().map(|t| (seen.position(t), seen.mass[t])).collect();
        let Seen { layer, kv_head: head, group, first, rows, page, live, resident, .. } = *seen;
        self.log.lock().unwrap().push(Event::Seen {
            layer,
            head,
            group,
            first: first.0,
            rows,
            page,
            live,
            resident,
            tokens,
        });
        self.of.observe(seen, state);
    }
    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        let HeadSeen { layer, kv_head: head, first, rows, queries, hits, misses, asked, .. } = *seen;
        let queries = queries.to_vec();
        self.log.lock().unwrap().push(Event::Head {
            layer,
            head,
            first: first.0,
            rows,
            queries,
            hits,
            misses,
            asked,
        });
        self.of.observe_head(seen, state);
    }
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        let (layer, head) = (tokens.layer(), tokens.kv_head());
        let list = (0..tokens.len()).map(|i| (tokens.position(i), tokens.page(i))).collect();
        self.log.lock().unwrap().push(Event::Ranked { layer, head, tokens: list });
        self.of.rank(tokens, utility);
    }
    fn threshold(&self, head: &[f32]) -> Option<f32> {
        self.of.threshold(head)
    }
}

/// A rule of a policy behind a pointer.
pub fn eviction(policy: Box<dyn Policy>, budget: Budget) -> Eviction {
    let mut eviction = Eviction::new(pikv::policy::StreamingLlm, budget);
    eviction.policy = policy.into();
    eviction
}
