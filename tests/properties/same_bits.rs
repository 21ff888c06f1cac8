//! Equal bits on all lanes and for any number of threads, shards and splits; and they are the bits of attention.

use half::{bf16, f16};
use pikv::lanes::Lanes;
use pikv::report::{PageMass, Place};
use pikv::shape::Pairs;
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Layout, Position, Rope, Rows, Sequence,
};
use pikv_core::math;
use pikv_core::warp::{Kernel, LANES, Warp};
use pikv_test::{full, scaled};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::ops::Range;

const EXPERTS: u32 = 8;
const TOP_K: u32 = 2;
const BUDGET: u64 = 1 << 40;

/// The error bound of the output against an f64 softmax over the stored keys and values, in units of the largest |v|; and of the
/// log-sum-exp, in units of max(1, |lse|).
const BOUND: f64 = 5e-6;

// ---- Values ----------------------------------------------------------------------------------------------------

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Values in [-1, 1), the same for the same salt.
fn values(salt: u64, n: usize) -> Vec<f32> {
    let base = mix(salt);
    (0..n as u64).map(|i| (mix(base.wrapping_add(i)) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
}

/// Queries: wide enough that the softmax is far from flat.
fn queries(salt: u64, n: usize) -> Vec<f32> {
    values(salt ^ 0x5eed_0000, n).iter().map(|x| x * 6.0).collect()
}

fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        other => panic!("no rounding for {}", other.name()),
    }
}

/// Keys and values of one layer, token by token.
#[derive(Clone)]
struct Tape {
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Tape {
    fn new(salt: u64, tokens: u32, shape: &LayerShape) -> Tape {
        let Layout { k_dim, v_dim, .. } = shape.layout;
        let (kv_heads, k_dim, v_dim) = (shape.kv_heads as usize, k_dim as usize, v_dim as usize);
        let n = tokens as usize * kv_heads;
        Tape {
            kv_heads,
            k_dim,
            v_dim,
            k: values(mix(salt) ^ 1, n * k_dim),
            v: values(mix(salt) ^ 2, n * v_dim),
        }
    }

    fn k(&self, tokens: &Range<u32>) -> &[f32] {
        let row = self.kv_heads * self.k_dim;
        &self.k[tokens.start as usize * row..tokens.end as usize * row]
    }

    fn v(&self, tokens: &Range<u32>) -> &[f32] {
        let row = self.kv_heads * self.v_dim;
        &self.v[tokens.start as usize * row..tokens.end as usize * row]
    }

    /// The tape as stored in a layout.
    fn stored(&self, layout: &Layout) -> Tape {
        Tape {
            k: self.k.iter().map(|x| round(layout.k, *x)).collect(),
            v: self.v.iter().map(|x| round(layout.v, *x)).collect(),
            ..*self
        }
    }
}

/// Two different experts for each token; half of the tokens have expert 3 first, so that one run is long.
fn experts(layer: usize, tokens: &Range<u32>) -> Vec<u16> {
    let chosen = tokens.clone().flat_map(|t| {
        let x = mix((layer as u64) << 32 | u64::from(t));
        let first = if x & 1 == 0 { 3 } else { (x >> 8) % u64::from(EXPERTS) };
        let second = (first + 1 + (x >> 24) % u64::from(EXPERTS - 1)) % u64::from(EXPERTS);
        [first as u16, second as u16]
    });
    chosen.collect()
}

// ---- The cache -------------------------------------------------------------------------------------------------

fn shape(kv_heads: u32, group: u32, dims: (u32, u32), dtype: Dtype, window: Option<u32>) -> LayerShape {
    LayerShape::new(kv_heads, kv_heads * group, dims.0, dtype).values(dims.1, dtype).window(window)
}

fn config(layers: Vec<LayerShape>, ring: u32, sinks: u32) -> CacheConfig {
    CacheConfig::new(layers, BUDGET).ring(ring).sinks(sinks).experts(EXPERTS, TOP_K).nan_fill(true)
}

/// Portable lanes first: the others are compared with them.
fn all_lanes() -> Vec<Lanes> {
    let mut all: Vec<Lanes> = Lanes::available().collect();
    all.reverse();
    assert_eq!(all[0], Lanes::Portable);
    all
}

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Appends tokens of the tapes, one tape a layer, at most `chunk` a step.
fn extend(cache: &Cache, sequence: &mut Sequence, tapes: &[&Tape], tokens: Range<u32>, chunk: u32) {
    let mut from = tokens.start;
    while from < tokens.end {
        let part = from..tokens.end.min(from + chunk);
        let mut step = cache.begin([(&mut *sequence, part.len() as u32)]).unwrap();
        for (layer, tape) in tapes.iter().enumerate() {
            step.append(layer, tape.k(&part), tape.v(&part)).unwrap();
            step.route(layer, &experts(layer, &part)).unwrap();
        }
        step.commit().unwrap();
        from = part.end;
    }
}

/// Output and log-sum-exp of some rows.
#[derive(Clone, Debug)]
struct Result {
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Result {
    /// Room for `rows`, full of NaN.
    fn room(shape: &LayerShape, rows: usize) -> Result {
        let heads = rows * shape.query_heads as usize;
        Result { out: vec![f32::NAN; heads * shape.layout.v_dim as usize], lse: vec![f32::NAN; heads] }
    }

    fn to(&mut self) -> AttendOutput<'_> {
        AttendOutput::new(&mut self.out).lse(&mut self.lse)
    }

    #[track_caller]
    fn same_bits(&self, want: &Result, what: impl Fn() -> String) {
        assert_eq!((self.out.len(), self.lse.len()), (want.out.len(), want.lse.len()), "{}", what());
        for (name, got, want) in [("out", &self.out, &want.out), ("lse", &self.lse, &want.lse)] {
            for (i, (g, w)) in got.iter().zip(want).enumerate() {
                assert!(g.to_bits() == w.to_bits(), "{}: {name}[{i}] is {g:e}, expected {w:e}", what());
            }
        }
    }

    /// Rows `rows`, of `heads` query heads each.
    fn part(&self, rows: Range<usize>, shape: &LayerShape) -> Result {
        let (heads, v_dim) = (shape.query_heads as usize, shape.layout.v_dim as usize);
        let lse = rows.start * heads..rows.end * heads;
        Result { out: self.out[lse.start * v_dim..lse.end * v_dim].to_vec(), lse: self.lse[lse].to_vec() }
    }
}

fn attend(cache: &Cache, layer: usize, rows: &[Rows<'_>], q: &[f32], options: &Attend) -> Result {
    let n = rows.iter().map(|part| part.rows as usize).sum();
    let mut result = Result::room(&cache.config().layers[layer], n);
    cache.attend(layer, rows, q, options, result.to()).unwrap();
    result
}

// ---- The oracle ------------------------------------------------------------------------------------------------

/// Attention in f64 over the stored tokens of one layer.
struct Oracle<'a> {
    shape: LayerShape,
    sinks: u32,
    options: Attend,
    stored: &'a Tape,
    /// Position of the first token of the tape.
    shift: u32,
    /// Positions that were evicted.
    gone: &'a [u32],
}

/// The expected output of one row and query head.
struct Expected {
    out: Vec<f64>,
    lse: f64,
    /// Position and softmax weight of the tokens that are seen.
    weights: Vec<(u32, f64)>,
}

impl<'a> Oracle<'a> {
    fn new(shape: LayerShape, sinks: u32, options: Attend, stored: &'a Tape) -> Oracle<'a> {
        Oracle { shape, sinks, options, stored, shift: 0, gone: &[] }
    }

    fn turned(&self, row: &[f32], position: u32) -> Vec<f64> {
        let mut row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let Some(Rope { theta, rotary_dim, pairs, .. }) = self.shape.rope else { return row };
        let half = rotary_dim as usize / 2;
        for i in 0..half {
            let angle = f64::from(position) * theta.powf(-2.0 * i as f64 / f64::from(rotary_dim));
            let (a, b) = match pairs {
                Pairs::Halves => (i, i + half),
                Pairs::Neighbours => (2 * i, 2 * i + 1),
                other => panic!("no oracle for {other:?}"),
            };
            let (x, y, sin, cos) = (row[a], row[b], angle.sin(), angle.cos());
            (row[a], row[b]) = (x * cos - y * sin, y * cos + x * sin);
        }
        row
    }

    /// The row at `position` of a sequence of `len` tokens, query head `head`.
    fn row(&self, q: &[f32], head: usize, position: u32, len: u32) -> Expected {
        let Tape { kv_heads, k_dim, v_dim, .. } = *self.stored;
        let kv_head = head / self.shape.group() as usize;
        let q = self.turned(q, position);
        let first = self.shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let seen = |p: &u32| (*p >= first || *p < self.sinks) && !self.gone.contains(p);
        let mut weights: Vec<(u32, f64)> = (self.shift..len.min(position + 1))
            .filter(seen)
            .map(|p| {
                let at = ((p - self.shift) as usize * kv_heads + kv_head) * k_dim;
                let key = &self.stored.k[at..at + k_dim];
                let dot: f64 = match self.shape.rope {
                    Some(_) => self.turned(key, p).iter().zip(&q).map(|(k, q)| k * q).sum(),
                    None => key.iter().zip(&q).map(|(k, q)| f64::from(*k) * q).sum(),
                };
                let score = dot * f64::from(self.options.scale);
                let cap = self.options.softcap.map(f64::from);
                (p, cap.map_or(score, |cap| cap * (score / cap).tanh()))
            })
            .collect();
        let top = weights.iter().map(|(_, s)| *s).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = weights.iter().map(|(_, s)| (s - top).exp()).sum();
        let mut out = vec![0.0; v_dim];
        for (p, w) in &mut weights {
            *w = (*w - top).exp() / sum;
            let at = ((*p - self.shift) as usize * kv_heads + kv_head) * v_dim;
            for (out, v) in out.iter_mut().zip(&self.stored.v[at..at + v_dim]) {
                *out += *w * f64::from(*v);
            }
        }
        let lse = if weights.is_empty() { f64::NEG_INFINITY } else { top + sum.ln() };
        Expected { out, lse, weights }
    }

    /// Holds the rows from `first` of a sequence of `len` tokens against f64. Gives the largest errors, in the units of
    /// [`BOUND`].
    #[track_caller]
    fn check(&self, q: &[f32], first: u32, len: u32, got: &Result, bound: f64) -> Worst {
        let (heads, k_dim, v_dim) = (self.shape.query_heads as usize, self.stored.k_dim, self.stored.v_dim);
        let largest = self.stored.v.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        assert_eq!(got.lse.len() * k_dim, q.len());
        let mut worst = Worst::default();
        for (i, (lse, out)) in got.lse.iter().zip(got.out.chunks_exact(v_dim)).enumerate() {
            let (position, head) = (first + (i / heads) as u32, i % heads);
            let want = self.row(&q[i * k_dim..][..k_dim], head, position, len);
            let place = || format!("position {position} of {len}, query head {head}, {:?}", self.shape);
            if want.weights.is_empty() {
                assert!(lse.to_bits() == f32::NEG_INFINITY.to_bits(), "{}: lse {lse}", place());
                assert!(out.iter().all(|x| x.to_bits() == 0), "{}: {out:?}", place());
                continue;
            }
            let off = (f64::from(*lse) - want.lse).abs() / want.lse.abs().max(1.0);
            assert!(off <= bound, "{}: lse {lse}, expected {}", place(), want.lse);
            worst.lse = worst.lse.max(off);
            for (c, (out, want)) in out.iter().zip(&want.out).enumerate() {
                let off = (f64::from(*out) - want).abs() / f64::from(largest);
                assert!(off <= bound, "{}: channel {c} is {out}, expected {want}", place());
                worst.out = worst.out.max(off);
            }
        }
        worst
    }
}

/// The largest errors met.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    out: f64,
    lse: f64,
}

impl Worst {
    fn add(&mut self, other: Worst) {
        *self = Worst { out: self.out.max(other.out), lse: self.lse.max(other.lse) };
    }
}

fn scale(dim: u32) -> f32 {
    1.0 / (dim as f32).sqrt()
}

// ---- The matrix ------------------------------------------------------------------------------------------------

const SPLITS: [Option<u32>; 4] = [None, Some(1), Some(2), Some(4)];
const THREADS: [usize; 3] = [1, 2, 5];

fn with_split(options: Attend, split: Option<u32>) -> Attend {
    split.map_or(options, |blocks| options.split(blocks))
}

fn map(shards: u32) -> ShardMap {
    match shards {
        1 => ShardMap::ONE,
        4 => ShardMap::sum(4).unwrap(),
        _ => ShardMap::xor(16, 8, shards).unwrap(),
    }
}

/// Lanes x threads x shards x splits x head widths x group sizes x lengths x with and without a window: all the same bits
/// as the portable lanes on one thread, one shard, uncut; and those within [`BOUND`] of f64.
fn matrix(dtype: Dtype, ring: u32, sinks: u32) {
    const DIMS: [u32; 7] = [1, 32, 64, 80, 96, 128, 256];
    const GROUPS: [u32; 4] = [1, 4, 7, 8];
    const WINDOW: u32 = 64;
    const LAST: u32 = 5000;
    const LENGTHS: [u32; 10] = [0, 1, 31, 32, 33, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, LAST];

    let kv_heads = |dim: u32| if dim <= 64 { 2 } else { 1 };
    let tapes = DIMS.map(|dim| {
        let shape = shape(kv_heads(dim), 1, (dim, dim), dtype, None);
        Tape::new(u64::from(dim), LAST, &shape)
    });
    let mut layers: Vec<LayerShape> = Vec::new();
    let mut tape_of: Vec<&Tape> = Vec::new();
    for (i, (dim, tape)) in DIMS.iter().zip(&tapes).enumerate() {
        // Quick: every width with half of the groups, every group with half of the widths.
        for (_, group) in GROUPS.into_iter().enumerate().filter(|(j, _)| full() || (i + j) % 2 == 0) {
            for window in [None, Some(WINDOW)] {
                layers.push(shape(kv_heads(*dim), group, (*dim, *dim), dtype, window));
                tape_of.push(tape);
            }
        }
    }
    let stored: Vec<Tape> = tapes.iter().map(|tape| tape.stored(&layers[0].layout)).collect();
    // Queries of each length and layer: rows at len - 1 and at len, the latter before its own token was appended.
    let rows = |len: u32| (len.saturating_sub(1), if len == 0 || len == LAST { 1 } else { 2 });
    let q = |len: u32, layer: usize| {
        let shape = &layers[layer];
        let n = rows(len).1 * shape.query_heads * shape.layout.k_dim;
        queries(u64::from(len) << 32 | layer as u64, n as usize)
    };
    let q: Vec<Vec<Vec<f32>>> = LENGTHS.map(|len| (0..layers.len()).map(|l| q(len, l)).collect()).to_vec();
    let pools = THREADS.map(pool);
    let mut want: Vec<Vec<Result>> = Vec::new();
    let mut worst = Worst::default();

    for lanes in all_lanes() {
        for shards in scaled(vec![1, 4], vec![1, 2, 4, 8]) {
            let cache =
                Cache::new(config(layers.clone(), ring, sinks).shards(map(shards)).lanes(lanes)).unwrap();
            let mut sequence = cache.sequence();
            for (i, &len) in LENGTHS.iter().enumerate() {
                let new = sequence.next_position().0..len;
                extend(&cache, &mut sequence, &tape_of, new, ring);
                let (first, rows) = rows(len);
                let rows = [Rows::new(&sequence, Position(first), rows)];
                let at = |layer: usize, split| {
                    let options = with_split(Attend::new(scale(layers[layer].layout.k_dim)), split);
                    attend(&cache, layer, &rows, &q[i][layer], &options)
                };
                if want.len() == i {
                    assert_eq!((lanes, shards), (Lanes::Portable, 1));
                    want.push(pools[0].install(|| (0..layers.len()).map(|layer| at(layer, None)).collect()));
                    for (layer, shape) in layers.iter().enumerate() {
                        let options = Attend::new(scale(shape.layout.k_dim));
                        let tape = DIMS.iter().position(|d| *d == shape.layout.k_dim).unwrap();
                        let oracle = Oracle::new(*shape, sinks, options, &stored[tape]);
                        worst.add(oracle.check(&q[i][layer], first, len, &want[i][layer], BOUND));
                    }
                }
                for (pool, threads) in pools.iter().zip(THREADS) {
                    pool.install(|| {
                        for (layer, shape) in layers.iter().enumerate() {
                            for split in SPLITS {
                                at(layer, split).same_bits(&want[i][layer], || {
                                    format!(
                                        "{}, {threads} threads, {shards} shards, split {split:?}, {len} tokens, {shape:?}",
                                        lanes.name()
                                    )
                                });
                            }
                        }
                    });
                }
            }
            let usage = cache.usage();
            assert!(
                usage.shards.len() == shards as usize && usage.shards.iter().all(|bytes| *bytes > 0),
                "{usage:?}"
            );
        }
    }
    println!("{}: off f64 by {worst:?}", dtype.name());
}

#[test]
fn matrix_f32() {
    matrix(Dtype::F32, 40, 4);
}

#[test]
fn matrix_f16() {
    matrix(Dtype::F16, 256, 4);
}

#[test]
fn matrix_bf16() {
    matrix(Dtype::Bf16, 50, 0);
}

// ---- Steps -----------------------------------------------------------------------------------------------------

/// Runs `tokens` tokens through a new sequence, `chunk` a step, attending in each: for each layer the results of all rows.
fn prefill(
    cache: &Cache,
    tapes: &[&Tape],
    q: &[Vec<f32>],
    tokens: u32,
    chunk: u32,
    options: &[Attend],
) -> Vec<Result> {
    let layers = &cache.config().layers;
    let mut all: Vec<Result> = layers.iter().map(|shape| Result::room(shape, 0)).collect();
    let mut sequence = cache.sequence();
    let mut from = 0;
    while from < tokens {
        let part = from..tokens.min(from + chunk);
        let mut step = cache.begin([(&mut sequence, part.len() as u32)]).unwrap();
        for (layer, shape) in layers.iter().enumerate() {
            step.append(layer, tapes[layer].k(&part), tapes[layer].v(&part)).unwrap();
            let width = (shape.query_heads * shape.layout.k_dim) as usize;
            let q = &q[layer][part.start as usize * width..part.end as usize * width];
            let mut result = Result::room(shape, part.len());
            step.attend(layer, q, &options[layer], result.to()).unwrap();
            all[layer].out.extend(result.out);
            all[layer].lse.extend(result.lse);
            step.route(layer, &experts(layer, &part)).unwrap();
        }
        step.commit().unwrap();
        from = part.end;
    }
    all
}

/// Layers with and without a window (shorter and longer than the ring) and a cap, of several dtypes and groups.
fn assorted() -> (Vec<LayerShape>, Vec<Attend>) {
    let mut layers = Vec::new();
    let mut options = Vec::new();
    for (i, window) in [None, Some(1), Some(20), Some(48), Some(49), Some(64)].into_iter().enumerate() {
        for (j, cap) in [None, Some(5.0)].into_iter().enumerate() {
            let dtype = Dtype::ALL[(i + j) % 3];
            let (kv_heads, group) = [(1, 4), (2, 3), (1, 8), (3, 1)][(i + 2 * j) % 4];
            layers.push(shape(kv_heads, group, (32, 40), dtype, window));
            let option = Attend::new(scale(32));
            options.push(cap.map_or(option, |cap| option.softcap(cap)));
        }
    }
    (layers, options)
}

#[test]
fn a_chunk_gives_the_bits_of_its_tokens_one_by_one() {
    const TOKENS: u32 = 500;
    const RING: u32 = 48;
    let (layers, options) = assorted();
    let tapes: Vec<Tape> = (0..layers.len()).map(|i| Tape::new(100 + i as u64, TOKENS, &layers[i])).collect();
    let tapes: Vec<&Tape> = tapes.iter().collect();
    let q: Vec<Vec<f32>> = layers
        .iter()
        .enumerate()
        .map(|(i, s)| queries(200 + i as u64, (TOKENS * s.query_heads * s.layout.k_dim) as usize))
        .collect();
    for sinks in [0, 4, 40] {
        let mut want: Option<Vec<Result>> = None;
        for lanes in all_lanes() {
            let cache = Cache::new(config(layers.clone(), RING, sinks).lanes(lanes)).unwrap();
            for chunk in [1, 7, 32, 48] {
                let got = prefill(&cache, &tapes, &q, TOKENS, chunk, &options);
                let Some(want) = &want else {
                    let mut worst = Worst::default();
                    for (layer, shape) in layers.iter().enumerate() {
                        let stored = tapes[layer].stored(&shape.layout);
                        let oracle = Oracle::new(*shape, sinks, options[layer], &stored);
                        worst.add(oracle.check(&q[layer], 0, TOKENS, &got[layer], BOUND));
                    }
                    println!("prefill, {sinks} sinks: off f64 by {worst:?}");
                    want = Some(got);
                    continue;
                };
                for (layer, (got, want)) in got.iter().zip(want).enumerate() {
                    got.same_bits(want, || {
                        format!("{}, chunks of {chunk}, {sinks} sinks, {:?}", lanes.name(), layers[layer])
                    });
                }
            }
        }
    }
}

/// For chunks longer than the ring the sums have another order. The result is still attention, with the same bits on all lanes.
#[test]
fn a_chunk_longer_than_the_ring_is_attention_too() {
    const TOKENS: u32 = 500;
    let (layers, options) = assorted();
    let tapes: Vec<Tape> = (0..layers.len()).map(|i| Tape::new(300 + i as u64, TOKENS, &layers[i])).collect();
    let tapes: Vec<&Tape> = tapes.iter().collect();
    let q: Vec<Vec<f32>> = layers
        .iter()
        .enumerate()
        .map(|(i, s)| queries(400 + i as u64, (TOKENS * s.query_heads * s.layout.k_dim) as usize))
        .collect();
    for (ring, chunk, sinks) in [(48, 49, 4), (48, 200, 0), (1, 33, 40), (32, 500, 4)] {
        let mut want: Option<Vec<Result>> = None;
        for lanes in all_lanes() {
            let cache = Cache::new(config(layers.clone(), ring, sinks).lanes(lanes)).unwrap();
            let got = prefill(&cache, &tapes, &q, TOKENS, chunk, &options);
            let Some(want) = &want else {
                for (layer, shape) in layers.iter().enumerate() {
                    let stored = tapes[layer].stored(&shape.layout);
                    let oracle = Oracle::new(*shape, sinks, options[layer], &stored);
                    oracle.check(&q[layer], 0, TOKENS, &got[layer], BOUND);
                }
                want = Some(got);
                continue;
            };
            for (layer, (got, want)) in got.iter().zip(want).enumerate() {
                got.same_bits(want, || format!("{}, chunks of {chunk}, {:?}", lanes.name(), layers[layer]));
            }
        }
    }
}

#[test]
fn a_batch_gives_the_bits_of_each_sequence_alone() {
    // Tokens before the step, and in it.
    const PARTS: [(u32, u32); 5] = [(0, 1), (5, 48), (100, 7), (1333, 1), (64, 30)];
    let (layers, options) = assorted();
    let tapes: Vec<Vec<Tape>> = PARTS
        .iter()
        .enumerate()
        .map(|(s, (old, new))| {
            let tape = |l: usize| Tape::new((500 + 20 * s + l) as u64, old + new, &layers[l]);
            (0..layers.len()).map(tape).collect()
        })
        .collect();
    for lanes in all_lanes() {
        for threads in [1, 5] {
            let cache = Cache::new(config(layers.clone(), 48, 4).lanes(lanes)).unwrap();
            let mut sequences: Vec<Sequence> = PARTS.iter().map(|_| cache.sequence()).collect();
            for ((sequence, tapes), (old, _)) in sequences.iter_mut().zip(&tapes).zip(PARTS) {
                extend(&cache, sequence, &tapes.iter().collect::<Vec<_>>(), 0..old, 48);
            }
            let mut forks: Vec<Sequence> = sequences.iter().map(Sequence::fork).collect();
            let pool = pool(threads);
            let rows: u32 = PARTS.iter().map(|(_, new)| new).sum();
            let parts = sequences.iter_mut().zip(PARTS).map(|(s, (_, new))| (s, new));
            let mut step = cache.begin(parts).unwrap();
            for (layer, shape) in layers.iter().enumerate() {
                let width = (shape.query_heads * shape.layout.k_dim) as usize;
                let q = queries(600 + layer as u64, rows as usize * width);
                let new = |s: usize| PARTS[s].0..PARTS[s].0 + PARTS[s].1;
                let k: Vec<f32> =
                    (0..PARTS.len()).flat_map(|s| tapes[s][layer].k(&new(s)).to_vec()).collect();
                let v: Vec<f32> =
                    (0..PARTS.len()).flat_map(|s| tapes[s][layer].v(&new(s)).to_vec()).collect();
                step.append(layer, &k, &v).unwrap();
                let mut all = Result::room(shape, rows as usize);
                pool.install(|| step.attend(layer, &q, &options[layer], all.to())).unwrap();
                let mut row = 0;
                for (s, fork) in forks.iter_mut().enumerate() {
                    let n = PARTS[s].1 as usize;
                    let mut alone = cache.begin([(fork, n as u32)]).unwrap();
                    alone.append(layer, tapes[s][layer].k(&new(s)), tapes[s][layer].v(&new(s))).unwrap();
                    let mut want = Result::room(shape, n);
                    let q = &q[row * width..(row + n) * width];
                    alone.attend(layer, q, &options[layer], want.to()).unwrap();
                    all.part(row..row + n, shape)
                        .same_bits(&want, || format!("{}, sequence {s}, {shape:?}", lanes.name()));
                    row += n;
                }
            }
        }
    }
}

// ---- Shapes and options ----------------------------------------------------------------------------------------

/// One row after `tokens` tokens on all lanes and some splits: the same bits, and attention.
#[track_caller]
fn everywhere(shape: LayerShape, tokens: u32, sinks: u32, options: Attend, bound: f64) -> Worst {
    let tape = Tape::new(700 + u64::from(shape.layout.k_dim), tokens, &shape);
    let stored = tape.stored(&shape.layout);
    let q = queries(tokens.into(), (shape.query_heads * shape.layout.k_dim) as usize);
    everywhere_with(shape, &tape, &stored, &q, tokens, sinks, options, bound)
}

#[track_caller]
#[allow(clippy::too_many_arguments)]
fn everywhere_with(
    shape: LayerShape,
    tape: &Tape,
    stored: &Tape,
    q: &[f32],
    tokens: u32,
    sinks: u32,
    options: Attend,
    bound: f64,
) -> Worst {
    let mut want: Option<Result> = None;
    let mut worst = Worst::default();
    for lanes in all_lanes() {
        let cache = Cache::new(config(vec![shape], 64, sinks).lanes(lanes)).unwrap();
        let mut sequence = cache.sequence();
        extend(&cache, &mut sequence, &[tape], 0..tokens, 64);
        let rows = [Rows::new(&sequence, Position(tokens - 1), 1)];
        for split in SPLITS {
            let got = attend(&cache, 0, &rows, q, &with_split(options, split));
            let Some(want) = &want else {
                let oracle = Oracle::new(shape, sinks, options, stored);
                worst = oracle.check(q, tokens - 1, tokens, &got, bound);
                want = Some(got);
                continue;
            };
            got.same_bits(want, || format!("{}, split {split:?}, {shape:?}", lanes.name()));
        }
    }
    worst
}

#[test]
fn keys_and_values_may_differ_in_width_and_dtype() {
    let mut worst = Worst::default();
    for (k_dim, v_dim) in [(64, 128), (192, 128), (1, 256), (80, 33), (256, 1), (33, 65), (7, 63), (96, 64)] {
        for k in Dtype::ALL {
            for v in Dtype::ALL {
                for group in [1, 3, 8] {
                    let shape = LayerShape::new(2, 2 * group, k_dim, k).values(v_dim, v);
                    worst.add(everywhere(shape, 704, 4, Attend::new(scale(k_dim)), BOUND));
                }
            }
        }
    }
    println!("widths: off f64 by {worst:?}");
}

#[test]
fn softcap_is_cap_tanh_of_the_logit_over_cap() {
    for cap in [0.5, 2.0, 15.0, 50.0] {
        for dtype in Dtype::ALL {
            for window in [None, Some(100)] {
                let shape = shape(2, 4, (64, 64), dtype, window);
                let options = Attend::new(2.0 * scale(64)).softcap(cap);
                let worst = everywhere(shape, 704, 4, options, BOUND);
                println!("cap {cap}, {}: off f64 by {worst:?}", dtype.name());
            }
        }
    }
}

/// Blocks with exponents further apart than the range of f32.
#[test]
fn scores_far_apart_merge_to_attention() {
    const TOKENS: u32 = 3000;
    // An error of a score is relative to the score.
    for (window, low, high, bound) in
        [(None, -400.0, 400.0, 1e-5), (Some(900), -140.0, 20.0, 1e-5), (None, -30000.0, -29900.0, 1e-3)]
    {
        let shape = shape(1, 4, (1, 24), Dtype::F32, window);
        let mut tape = Tape::new(800, TOKENS, &shape);
        // Integers: every logit is exact, so the error is that of the softmax alone.
        for (t, k) in tape.k.iter_mut().enumerate() {
            let block = (mix(t as u64 / 97) % 1000) as f32 / 1000.0;
            *k = (low + (high - low) * block + *k * 8.0).round();
        }
        let q = [1.0, 0.5, -1.0, 0.25];
        let worst = everywhere_with(shape, &tape, &tape, &q, TOKENS, 4, Attend::new(1.0), bound);
        println!("scores {low}..{high}: off f64 by {worst:?}");
    }
}

#[test]
fn query_heads_read_the_kv_head_of_their_group() {
    for (kv_heads, group) in [(1, 8), (8, 1), (8, 4), (3, 7), (32, 2)] {
        let shape = shape(kv_heads, group, (16, 8), Dtype::F32, None);
        let mut tape = Tape::new(900, 150, &shape);
        for (i, v) in tape.v.iter_mut().enumerate() {
            *v = (i / 8 % kv_heads as usize + 1) as f32;
        }
        let q = queries(901, (shape.query_heads * 16) as usize);
        for lanes in all_lanes() {
            let cache = Cache::new(config(vec![shape], 64, 0).lanes(lanes)).unwrap();
            let mut sequence = cache.sequence();
            extend(&cache, &mut sequence, &[&tape], 0..150, 64);
            let rows = [Rows::new(&sequence, Position(149), 1)];
            let got = attend(&cache, 0, &rows, &q, &Attend::new(0.25));
            for (i, x) in got.out.iter().enumerate() {
                let want = (i / 8 / group as usize + 1) as f32;
                assert!(
                    (x - want).abs() <= 1e-5 * want,
                    "{kv_heads} KV heads of {group}: head {}, {x}",
                    i / 8
                );
            }
            Oracle::new(shape, 0, Attend::new(0.25), &tape).check(&q, 149, 150, &got, BOUND * 1.01);
        }
    }
}

// ---- Keys stored before their rotation -------------------------------------------------------------------------

fn ropes(k_dim: u32) -> Vec<Rope> {
    let mut ropes = Vec::new();
    for pairs in [Pairs::Halves, Pairs::Neighbours] {
        for (theta, rotary_dim) in [(10_000.0, k_dim), (10_000.0, k_dim / 2), (500_000.0, 2)] {
            ropes.push(Rope::new(theta, rotary_dim).pairs(pairs));
        }
    }
    ropes
}

#[test]
fn rotated_as_read_is_rotated_in_f64() {
    let mut worst = Worst::default();
    for rope in ropes(64) {
        for dtype in Dtype::ALL {
            for (window, group) in [(None, 1), (None, 7), (Some(100), 4)] {
                let shape = shape(2, group, (64, 48), dtype, window).rope(rope);
                worst.add(everywhere(shape, 896, 4, Attend::new(scale(64)), BOUND));
            }
        }
    }
    println!("rope: off f64 by {worst:?}");
}

/// Widths that do not fill their last word, and a rotation that ends inside a word.
#[test]
fn rotations_may_end_inside_a_word() {
    for dtype in Dtype::ALL {
        for pairs in [Pairs::Halves, Pairs::Neighbours] {
            for (k_dim, rotary_dim) in [(33, 6), (7, 6), (2, 2), (81, 80), (5, 2)] {
                let rope = Some(Rope::new(100.0, rotary_dim).pairs(pairs));
                let shape = shape(1, 5, (k_dim, 16), dtype, None).rope(rope);
                everywhere(shape, 300, 4, Attend::new(scale(k_dim)), BOUND);
            }
        }
    }
}

/// The same tokens 64, 1000 and 20000 positions later, after the tokens before them left the window or were evicted.
#[test]
fn a_constant_added_to_all_positions_changes_nothing() {
    const RING: u32 = 64;
    const TOKENS: u32 = 300;
    let mut worst = Worst::default();
    for rope in ropes(32) {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let plain = shape(1, 4, (32, 32), dtype, None).rope(rope);
            let layers = vec![plain, plain.window(90)];
            let tape = Tape::new(1000, TOKENS, &plain);
            let stored = tape.stored(&plain.layout);
            let junk = Tape::new(1001, 20_000, &plain);
            let options = Attend::new(scale(32));
            let q = queries(1002, (plain.query_heads * 32) as usize);
            let cache = Cache::new(config(layers.clone(), RING, 0)).unwrap();
            let mut results: Vec<Result> = Vec::new();
            for shift in [0, 64, 1000, 20_000] {
                let mut sequence = cache.sequence();
                extend(&cache, &mut sequence, &[&junk; 2], 0..shift, RING);
                extend(&cache, &mut sequence, &[&tape; 2], 0..RING, RING);
                // The ring holds the tape's tokens alone now, the pages the others alone.
                sequence.evict_all();
                extend(&cache, &mut sequence, &[&tape; 2], RING..TOKENS, RING);
                for (layer, shape) in layers.iter().enumerate() {
                    let first = shift + TOKENS - 1;
                    let rows = [Rows::new(&sequence, Position(first), 1)];
                    let got = attend(&cache, layer, &rows, &q, &options);
                    // The oracle stays at position 0: its result must not change.
                    let oracle = Oracle::new(*shape, 0, options, &stored);
                    worst.add(oracle.check(&q, TOKENS - 1, TOKENS, &got, BOUND));
                    let oracle = Oracle { shift, ..Oracle::new(*shape, 0, options, &stored) };
                    worst.add(oracle.check(&q, first, shift + TOKENS, &got, BOUND));
                    match results.get(layer) {
                        None => results.push(got),
                        Some(want) => {
                            let off = got.out.iter().zip(&want.out).map(|(a, b)| (a - b).abs());
                            off.for_each(|off| assert!(off <= 2e-5, "{rope:?}, shift {shift}: {off}"));
                        }
                    }
                }
            }
        }
    }
    println!("shifted: off f64 by {worst:?}");
}

// ---- Attention mass --------------------------------------------------------------------------------------------

#[test]
fn mass_is_the_softmax_weight_of_each_token() {
    const TOKENS: u32 = 700;
    const ROWS: u32 = 40;
    let (mut layers, mut options) = assorted();
    let rope = Rope::new(10_000.0, 16);
    layers.push(layers[0].rope(rope));
    options.push(options[0]);
    let tapes: Vec<Tape> =
        (0..layers.len()).map(|i| Tape::new(1100 + i as u64, TOKENS, &layers[i])).collect();
    let tapes: Vec<&Tape> = tapes.iter().collect();
    let (mut worst, mut worst_sum) = (0.0f64, 0.0f64);
    for lanes in all_lanes() {
        let cache = Cache::new(config(layers.clone(), 48, 4).rollback(64).lanes(lanes)).unwrap();
        let mut sequence = cache.sequence();
        extend(&cache, &mut sequence, &tapes, 0..TOKENS, 48);
        for (layer, shape) in layers.iter().enumerate() {
            for rows in [1, ROWS] {
                let (heads, group) = (shape.query_heads as usize, shape.group() as usize);
                let k_dim = shape.layout.k_dim as usize;
                let q = queries(1200 + layer as u64, rows as usize * heads * k_dim);
                let first = TOKENS - rows;
                let view = [Rows::new(&sequence, Position(first), rows)];
                let want = attend(&cache, layer, &view, &q, &options[layer]);
                let mut got = Result::room(shape, rows as usize);
                // The vector's earlier contents must be gone.
                let mut mass: Vec<PageMass> = Vec::new();
                cache.attend(layer, &view, &q, &options[layer], got.to().mass(&mut mass)).unwrap();
                let again = mass.clone();
                cache.attend(layer, &view, &q, &options[layer], got.to().mass(&mut mass)).unwrap();
                assert_eq!(mass, again);
                got.same_bits(&want, || format!("{} with mass, {shape:?}", lanes.name()));

                let stored = tapes[layer].stored(&shape.layout);
                let oracle = Oracle::new(*shape, 4, options[layer], &stored);
                for kv_head in 0..shape.kv_heads as usize {
                    let ids = sequence.pages(layer, kv_head).unwrap().map(|page| page.id);
                    let mine = || mass.iter().filter(|m| m.kv_head == kv_head);
                    assert!(ids.eq(mine().map(|m| m.page)), "pages of head {kv_head}");
                    let mut tokens = vec![0.0f64; TOKENS as usize];
                    for m in mine() {
                        assert_eq!(m.sequence, 0);
                        for (lane, x) in m.tokens.iter().enumerate().filter(|(_, x)| **x != 0.0) {
                            let (mut k, mut v) = (vec![0.0; k_dim], vec![0.0; shape.layout.v_dim as usize]);
                            let p =
                                sequence.read(layer, kv_head, m.page, lane as u32, &mut k, &mut v).unwrap();
                            tokens[p.0 as usize] += f64::from(*x);
                        }
                    }
                    let mut expected = vec![0.0f64; TOKENS as usize];
                    for row in 0..rows as usize {
                        for head in kv_head * group..(kv_head + 1) * group {
                            let q = &q[(row * heads + head) * k_dim..][..k_dim];
                            for (p, w) in oracle.row(q, head, first + row as u32, TOKENS).weights {
                                expected[p as usize] += w;
                            }
                        }
                    }
                    for (p, (got, want)) in tokens.iter().zip(&expected).enumerate() {
                        let off = (got - want).abs() / want.max(1.0);
                        assert!(
                            off <= 1e-5,
                            "{}, position {p}: {got}, expected {want}, {shape:?}",
                            lanes.name()
                        );
                        worst = worst.max(off);
                    }
                    let all = f64::from(rows) * group as f64;
                    let sum: f64 = mine().map(|m| f64::from(m.total())).sum();
                    assert!((sum - all).abs() <= 1e-4, "{}: {sum}, expected {all}, {shape:?}", lanes.name());
                    worst_sum = worst_sum.max((sum - all).abs());
                }
            }
        }
    }
    println!("mass: a token off by {worst:e}, a sum by {worst_sum:e}");
}

#[test]
fn an_evicted_page_takes_its_tokens_out_of_the_softmax() {
    const TOKENS: u32 = 912;
    let shape = shape(2, 3, (32, 32), Dtype::F16, None);
    let tape = Tape::new(1300, TOKENS, &shape);
    let stored = tape.stored(&shape.layout);
    let options = Attend::new(scale(32));
    let q = queries(1301, (shape.query_heads * 32) as usize);
    let mut want: Option<Result> = None;
    for lanes in all_lanes() {
        let cache = Cache::new(config(vec![shape], 48, 4).lanes(lanes)).unwrap();
        let mut sequence = cache.sequence();
        extend(&cache, &mut sequence, &[&tape], 0..TOKENS, 48);
        let victims: Vec<_> = sequence
            .pages(0, 0)
            .unwrap()
            .filter(|page| match page.id.place {
                Place::Run(3) => page.id.ordinal.is_multiple_of(3),
                Place::Run(1) | Place::Sinks => page.id.ordinal == 0,
                _ => false,
            })
            .collect();
        assert!(victims.len() > 4);
        let mut gone = Vec::new();
        for page in &victims {
            for lane in 0..page.tokens {
                let (mut k, mut v) = ([0.0; 32], [0.0; 32]);
                gone.push(sequence.read(0, 0, page.id, lane, &mut k, &mut v).unwrap().0);
            }
        }
        for kv_head in 0..2 {
            victims.iter().for_each(|page| sequence.evict(0, kv_head, page.id).unwrap());
        }
        let rows = [Rows::new(&sequence, Position(TOKENS - 1), 1)];
        for split in SPLITS {
            let got = attend(&cache, 0, &rows, &q, &with_split(options, split));
            let oracle = Oracle { gone: &gone, ..Oracle::new(shape, 4, options, &stored) };
            oracle.check(&q, TOKENS - 1, TOKENS, &got, BOUND);
            got.same_bits(want.get_or_insert_with(|| got.clone()), || lanes.name().to_owned());
        }
    }
}

/// Rolled-back tokens still lie in the pages, past their fill; a row at the next position must not read them.
#[test]
fn a_rollback_gives_the_bits_of_a_sequence_that_never_grew() {
    const TOKENS: u32 = 420;
    let (layers, options) = assorted();
    let tapes: Vec<Tape> =
        (0..layers.len()).map(|i| Tape::new(1350 + i as u64, TOKENS, &layers[i])).collect();
    let tapes: Vec<&Tape> = tapes.iter().collect();
    for lanes in all_lanes() {
        let cache = Cache::new(config(layers.clone(), 48, 4).rollback(64).lanes(lanes)).unwrap();
        let mut grown = cache.sequence();
        extend(&cache, &mut grown, &tapes, 0..TOKENS, 48);
        for back in [1, 3, 32, 63, 64] {
            let len = TOKENS - back;
            let mut sequence = grown.fork();
            sequence.rollback(back).unwrap();
            let mut fresh = cache.sequence();
            extend(&cache, &mut fresh, &tapes, 0..len, 48);
            for (layer, shape) in layers.iter().enumerate() {
                let q = queries(1380, (2 * shape.query_heads * shape.layout.k_dim) as usize);
                let at = |sequence| {
                    let rows = [Rows::new(sequence, Position(len - 1), 2)];
                    attend(&cache, layer, &rows, &q, &options[layer])
                };
                let want = at(&fresh);
                at(&sequence).same_bits(&want, || format!("{}, {back} back, {shape:?}", lanes.name()));
                let stored = tapes[layer].stored(&shape.layout);
                Oracle::new(*shape, 4, options[layer], &stored).check(&q, len - 1, len, &want, BOUND);
            }
        }
    }
}

// ---- Functions -------------------------------------------------------------------------------------------------

struct Functions<'a>(&'a [f32; LANES]);

impl Kernel for Functions<'_> {
    type Out = [[u32; LANES]; 5];
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> Self::Out {
        let x = w.load_f(self.0);
        let bits = |y: W::F| {
            let mut row = [0.0; LANES];
            w.store(y, &mut row);
            row.map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() })
        };
        // |x| with the sign set: the domain of `exp2_nonpos`.
        let below = self.0.map(|x| -x.abs());
        [
            bits(math::exp2(w, x)),
            bits(math::exp(w, x)),
            bits(math::ln(w, x)),
            bits(math::tanh(w, x)),
            bits(math::exp2_nonpos(w, w.load_f(&below))),
        ]
    }
}

#[test]
fn functions_give_the_same_bits_on_all_lanes() {
    // Some mantissas at every exponent and sign, zeros, infinities, NaNs and subnormals among them.
    let words = (0..512u32).flat_map(|top| {
        (0..256u32).map(move |i| top << 23 | (i * i).wrapping_mul(0x0123_4567).wrapping_add(i) & 0x007f_ffff)
    });
    // And the range where results are neither 0 nor inf.
    let near = values(1400, 1 << 20).into_iter().map(|x| x * 130.0);
    let all: Vec<f32> = words.map(f32::from_bits).chain(near).collect();
    for row in all.as_chunks::<LANES>().0 {
        let want = Lanes::Portable.run(Functions(row));
        for lanes in Lanes::available() {
            assert_eq!(lanes.run(Functions(row)), want, "{} at {row:?}", lanes.name());
        }
    }
}
