//! One test for each kind of fault reported publicly by users of other KV caches.
//!
//! A test's first line names the report. Where a row sees a known set of tokens, queries of zero make every weight equal: the log-sum-exp
//! is then ln(tokens seen), and the output the mean of their values.

use pikv::lanes::Lanes;
use pikv::report::{PageId, PageInfo, PageMass, Place};
use pikv::shape::{Pairs, Resident};
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Layout, Position, Rope, Rows,
    Sequence, Step,
};

fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(1, |h, &part| {
        let z = (h ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 32)
    })
}

/// In [-1, 1).
fn noise(parts: &[u64], n: usize) -> Vec<f32> {
    let h = mix(parts);
    (0..n as u64).map(|i| (mix(&[h, i]) >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn layout(k_dim: u32, v_dim: u32, dtype: Dtype) -> Layout {
    Layout::new(k_dim, dtype).values(v_dim, dtype)
}

fn shape(kv_heads: u32, group: u32, layout: Layout) -> LayerShape {
    LayerShape::with_layout(kv_heads, kv_heads * group, layout)
}

/// One KV head of 3 and 5 channels.
fn small() -> LayerShape {
    shape(1, 2, layout(3, 5, Dtype::F32))
}

fn windowed(window: u32) -> LayerShape {
    small().window(window)
}

fn config(layers: Vec<LayerShape>, ring: u32, rollback: u32) -> CacheConfig {
    CacheConfig::new(layers, 1 << 28).ring(ring).rollback(rollback).nan_fill(true)
}

/// The experts of token `id`.
fn experts(config: &CacheConfig, id: u64) -> Vec<u16> {
    let first = mix(&[id, 5]) % u64::from(config.experts);
    (0..u64::from(config.top_k)).map(|i| ((first + i) % u64::from(config.experts)) as u16).collect()
}

/// Keys and values (`heads` KV heads) of token `id`.
fn token(layer: usize, shape: &LayerShape, id: u64) -> (Vec<f32>, Vec<f32>) {
    let heads = shape.kv_heads as usize;
    let k = noise(&[id, layer as u64, 0], heads * shape.layout.k_dim as usize);
    let v = noise(&[id, layer as u64, 1], heads * shape.layout.v_dim as usize);
    (k, v)
}

fn query(layer: usize, shape: &LayerShape, id: u64) -> Vec<f32> {
    noise(&[id, layer as u64, 2], (shape.query_heads * shape.layout.k_dim) as usize)
}

type Outputs = Vec<(Vec<u32>, Vec<u32>)>;

/// Writes tokens `ids` of every layer and commits; bits of outputs and log-sum-exps of each layer.
fn finish(cache: &Cache, mut step: Step<'_>, ids: &[u64]) -> Outputs {
    let mut outputs = Vec::new();
    for (l, shape) in cache.config().layers.iter().enumerate() {
        let (k, v): (Vec<_>, Vec<_>) = ids.iter().map(|id| token(l, shape, *id)).unzip();
        step.append(l, &k.concat(), &v.concat()).unwrap();
        let q: Vec<f32> = ids.iter().flat_map(|id| query(l, shape, *id)).collect();
        let n = ids.len() * shape.query_heads as usize;
        let (mut out, mut lse) = (vec![f32::NAN; n * shape.layout.v_dim as usize], vec![f32::NAN; n]);
        step.attend(l, &q, &Attend::new(0.5), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        let chosen: Vec<u16> = ids.iter().flat_map(|id| experts(cache.config(), *id)).collect();
        step.route(l, &chosen).unwrap();
        outputs.push((bits(&out), bits(&lse)));
    }
    step.commit().unwrap();
    outputs
}

fn feed(cache: &Cache, sequence: &mut Sequence, ids: impl IntoIterator<Item = u64>) -> Outputs {
    let ids: Vec<u64> = ids.into_iter().collect();
    let step = cache.begin([(sequence, ids.len() as u32)]).unwrap();
    finish(cache, step, &ids)
}

/// A sequence that took `ids` one by one.
fn one_by_one(cache: &Cache, ids: impl IntoIterator<Item = u64>) -> Sequence {
    let mut sequence = cache.sequence();
    ids.into_iter().for_each(|id| drop(feed(cache, &mut sequence, [id])));
    sequence
}

/// Outputs and log-sum-exps of the rows `first..end` of a layer, queries all `q`.
fn ask(
    cache: &Cache,
    layer: usize,
    sequence: &Sequence,
    first: u32,
    end: u32,
    q: f32,
) -> (Vec<f32>, Vec<f32>) {
    let shape = cache.config().layers[layer];
    let n = (end - first) as usize * shape.query_heads as usize;
    let (mut out, mut lse) = (vec![f32::NAN; n * shape.layout.v_dim as usize], vec![f32::NAN; n]);
    let rows = Rows::new(sequence, Position(first), end - first);
    let q = vec![q; n * shape.layout.k_dim as usize];
    cache.attend(layer, &[rows], &q, &Attend::new(0.5), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
    (out, lse)
}

type Stored = Vec<(u32, Vec<u32>, Vec<u32>)>;

/// Pages of every layer and head with their contents, as bits.
fn snapshot(cache: &Cache, sequence: &Sequence) -> Vec<(PageInfo, Stored)> {
    let mut all = Vec::new();
    for (l, shape) in cache.config().layers.iter().enumerate() {
        let (mut k, mut v) = (vec![0.0; shape.layout.k_dim as usize], vec![0.0; shape.layout.v_dim as usize]);
        for head in 0..shape.kv_heads as usize {
            for page in sequence.pages(l, head).unwrap() {
                let mut read = |lane| {
                    let p = sequence.read(l, head, page.id, lane, &mut k, &mut v).unwrap();
                    (p.0, bits(&k), bits(&v))
                };
                all.push((page, (0..page.tokens).map(&mut read).collect()));
            }
        }
    }
    all
}

/// f64 softmax of a row over tokens (id, position) that it sees; per query head.
fn oracle(
    layer: usize,
    shape: &LayerShape,
    q: &[f32],
    position: u32,
    seen: &[(u64, u32)],
) -> Vec<(Vec<f64>, f64)> {
    let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
    let decode = |dtype: Dtype, x: &f32| f64::from(dtype.decode(dtype.encode(*x).unwrap()));
    let turn = |mut x: Vec<f64>, p: u32| {
        let Some(rope) = shape.rope else { return x };
        for i in 0..rope.rotary_dim as usize / 2 {
            let angle = f64::from(p) * rope.theta.powf(-2.0 * i as f64 / f64::from(rope.rotary_dim));
            let half = rope.rotary_dim as usize / 2;
            let (a, b) = if rope.pairs == Pairs::Halves { (i, i + half) } else { (2 * i, 2 * i + 1) };
            (x[a], x[b]) = (x[a] * angle.cos() - x[b] * angle.sin(), x[b] * angle.cos() + x[a] * angle.sin());
        }
        x
    };
    let group = (shape.query_heads / shape.kv_heads) as usize;
    (0..shape.query_heads as usize)
        .map(|h| {
            let q = turn(q[h * k_dim..][..k_dim].iter().map(|x| f64::from(*x)).collect(), position);
            let (mut sum, mut acc) = (0.0, vec![0.0; v_dim]);
            for &(id, p) in seen {
                let (k, v) = token(layer, shape, id);
                let k = &k[h / group * k_dim..][..k_dim];
                let k = turn(k.iter().map(|x| decode(shape.layout.k, x)).collect(), p);
                let weight = (0.5 * k.iter().zip(&q).map(|(k, q)| k * q).sum::<f64>()).exp();
                sum += weight;
                for (acc, v) in acc.iter_mut().zip(&v[h / group * v_dim..]) {
                    *acc += weight * decode(shape.layout.v, v);
                }
            }
            (acc.iter().map(|x| x / sum).collect(), sum.ln())
        })
        .collect()
}

/// Compares row `row` of `outputs` of `layer` with [`oracle`]; scores lie in [-0.5 k_dim, 0.5 k_dim], values in [-1, 1].
fn assert_row(
    outputs: &Outputs,
    layer: usize,
    shape: &LayerShape,
    row: usize,
    q: &[f32],
    p: u32,
    seen: &[(u64, u32)],
) {
    let (heads, v_dim) = (shape.query_heads as usize, shape.layout.v_dim as usize);
    for (h, (want, ln)) in oracle(layer, shape, q, p, seen).iter().enumerate() {
        let at = row * heads + h;
        let lse = f64::from(f32::from_bits(outputs[layer].1[at]));
        assert!((lse - ln).abs() <= 1e-5, "row {p} head {h}: lse {lse}, want {ln}");
        for (got, want) in outputs[layer].0[at * v_dim..].iter().zip(want) {
            let got = f64::from(f32::from_bits(*got));
            assert!((got - want).abs() <= 1e-5, "row {p} head {h}: {got}, want {want}");
        }
    }
}

// ---- ring and window

/// litgpt#2182: a prompt longer than the window overwrote the ring inside one forward.
#[test]
fn prompt_longer_than_the_ring() {
    for (ring, count) in [(1, 1), (7, 3), (32, 2), (33, 5)] {
        let cache =
            Cache::new(config(vec![small(), windowed(ring)], ring, 3).experts(count, 1).sinks(2)).unwrap();
        let n = 3 * ring + 5;
        let mut sequence = cache.sequence();
        let outputs = feed(&cache, &mut sequence, 0..u64::from(n));
        for p in 0..n {
            for (l, shape) in cache.config().layers.iter().enumerate() {
                let lo = shape.window.map_or(0, |w| (p + 1).saturating_sub(w));
                let seen: Vec<_> =
                    (0..=p).filter(|t| *t >= lo || *t < 2).map(|t| (u64::from(t), t)).collect();
                assert_row(&outputs, l, shape, p as usize, &query(l, shape, u64::from(p)), p, &seen);
            }
        }
        assert_eq!(snapshot(&cache, &sequence), snapshot(&cache, &one_by_one(&cache, 0..u64::from(n))));
    }
}

/// litgpt#2182: `append(n)` is n times `append(1)`: pages, stored words and outputs, for chunks below, at and above the ring.
#[test]
fn a_chunk_is_its_tokens_one_by_one() {
    for ring in [1, 5, 31, 32, 40] {
        for (count, slack) in [(1, 0), (3, 9)] {
            let cache =
                Cache::new(config(vec![small(), windowed(2 * ring)], ring, slack).experts(count, 1).sinks(3))
                    .unwrap();
            for before in [0, 1, ring, 70] {
                for n in [ring - 1, ring, ring + 1, 2 * ring, 2 * ring + 1, 5 * ring]
                    .into_iter()
                    .filter(|n| *n > 0)
                {
                    let prefix = u64::from(before);
                    let (mut a, mut b) = (one_by_one(&cache, 0..prefix), one_by_one(&cache, 0..prefix));
                    let ids = prefix..prefix + u64::from(n);
                    let whole = feed(&cache, &mut a, ids.clone());
                    let single: Vec<Outputs> = ids.map(|id| feed(&cache, &mut b, [id])).collect();
                    assert_eq!(snapshot(&cache, &a), snapshot(&cache, &b), "ring {ring}, {n} after {before}");
                    for l in 0..2 {
                        if n <= ring {
                            let out: Vec<u32> = single.iter().flat_map(|o| o[l].0.clone()).collect();
                            let lse: Vec<u32> = single.iter().flat_map(|o| o[l].1.clone()).collect();
                            assert_eq!(whole[l], (out, lse), "ring {ring}, {n} after {before}, layer {l}");
                        }
                        let oldest = before + n - slack.min(before + n - 1);
                        let (x, y) = (
                            ask(&cache, l, &a, oldest, before + n + 1, 0.3),
                            ask(&cache, l, &b, oldest, before + n + 1, 0.3),
                        );
                        assert_eq!((bits(&x.0), bits(&x.1)), (bits(&y.0), bits(&y.1)));
                    }
                }
            }
        }
    }
}

/// mlxcel#678, keys_values#140: a chunk that wraps in the middle of a write was corrupted.
#[test]
fn chunk_wraps_in_two_segments() {
    let ring = 40;
    let cache = Cache::new(config(vec![shape(2, 1, layout(3, 2, Dtype::F16))], ring, 0)).unwrap();
    for before in 1..=64 {
        let mut sequence = one_by_one(&cache, 0..before);
        feed(&cache, &mut sequence, before..before + 37);
        let mut expected = before + 37;
        let snapshot = snapshot(&cache, &sequence);
        // The ring pages of head 1, newest token first.
        for (page, tokens) in snapshot.iter().rev().take_while(|(page, _)| page.id.place == Place::Ring) {
            if expected == 0 {
                break;
            }
            assert_eq!(page.last.0 + 1, expected as u32);
            for (p, k, v) in tokens.iter().rev() {
                expected -= 1;
                assert_eq!(u64::from(*p), expected);
                let (key, value) = token(0, &cache.config().layers[0], expected);
                let half = |x: &f32| Dtype::F16.decode(Dtype::F16.encode(*x).unwrap()).to_bits();
                assert_eq!(*k, key[3..].iter().map(half).collect::<Vec<_>>());
                assert_eq!(*v, value[2..].iter().map(half).collect::<Vec<_>>());
            }
        }
        assert!(expected + u64::from(ring) <= before + 37 || expected == 0);
    }
}

/// executorch#21857: the window was applied to the chunk, not to each of its rows.
#[test]
fn window_is_per_row() {
    for (window, ring) in [(1, 8), (4, 8), (8, 8), (9, 8), (20, 8), (20, 3)] {
        let cache = Cache::new(config(vec![windowed(window)], ring, 0)).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 0..13);
        let mut step = cache.begin([(&mut sequence, 30)]).unwrap();
        let values: Vec<f32> = (13..43).flat_map(|p| [p as f32; 5]).collect();
        step.append(0, &[0.25; 90], &values).unwrap();
        let (mut out, mut lse) = (vec![0.0; 300], vec![0.0; 60]);
        step.attend(0, &[0.0; 180], &Attend::new(1.0), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        for row in 0..30u32 {
            let seen = window.min(13 + row + 1);
            assert!((lse[row as usize * 2] - (seen as f32).ln()).abs() < 1e-6, "window {window}, row {row}");
            if row + 1 >= window {
                let mean = (13 + row) as f32 - (window - 1) as f32 / 2.0;
                assert!((out[row as usize * 10] - mean).abs() < 1e-4, "window {window}, row {row}");
            }
        }
    }
}

/// transformers#37574: wrong only where the total is the window.
#[test]
fn total_equals_window() {
    for ring in [1, 6, 16, 17, 32, 50] {
        for window in [1, 2, 16, 32, 33] {
            let cache = Cache::new(config(vec![windowed(window)], ring, 0).experts(2, 1)).unwrap();
            for total in [window - 1, window, window + 1, 2 * window, 3 * window, 7 * window] {
                for chunk in [1, total.max(1)] {
                    let mut sequence = cache.sequence();
                    while sequence.next_position().0 < total {
                        let at = u64::from(sequence.next_position().0);
                        feed(&cache, &mut sequence, at..at + u64::from(chunk));
                    }
                    // The newest token's row, and the row of the next token, which sees one fewer.
                    for (row, seen) in
                        [(total.wrapping_sub(1), window.min(total)), (total, (window - 1).min(total))]
                    {
                        if row == u32::MAX {
                            continue;
                        }
                        let (out, lse) = ask(&cache, 0, &sequence, row, row + 1, 0.0);
                        assert!(
                            (seen == 0 && lse[0] == f32::NEG_INFINITY)
                                || (lse[0] - (seen as f32).ln()).abs() < 1e-6,
                            "window {window}, ring {ring}, total {total}, chunk {chunk}: lse {} for {seen}",
                            lse[0]
                        );
                        assert!(out.iter().all(|x| x.is_finite()));
                    }
                }
            }
        }
    }
}

/// mlx-lm#1437: the absolute offset was taken for the number of resident tokens.
#[test]
fn offset_is_not_resident_count() {
    let cache = Cache::new(config(vec![small()], 8, 0)).unwrap();
    let mut sequence = one_by_one(&cache, 0..100);
    assert_eq!((sequence.next_position(), sequence.in_ring()), (Position(100), Resident(8)));
    assert_eq!(sequence.resident(0, 0).unwrap(), Resident(100));
    sequence.evict_all();
    assert_eq!((sequence.next_position(), sequence.in_ring()), (Position(100), Resident(8)));
    assert_eq!(sequence.resident(0, 0).unwrap(), Resident(8));
    let (_, lse) = ask(&cache, 0, &sequence, 99, 100, 0.0);
    assert!((lse[0] - 8f32.ln()).abs() < 1e-6);
}

/// candle-nn: `positions()` of a rotating cache disagreed with the order of its rows.
#[test]
fn positions_follow_row_order() {
    let cache = Cache::new(config(vec![shape(2, 1, layout(3, 5, Dtype::F32))], 20, 7).experts(3, 1).sinks(2))
        .unwrap();
    let mut sequence = cache.sequence();
    for n in [50, 1, 1, 33, 7, 64] {
        let at = u64::from(sequence.next_position().0);
        feed(&cache, &mut sequence, at..at + n);
        let mut last: Option<(PageId, u32)> = None;
        for (page, tokens) in snapshot(&cache, &sequence) {
            let first = last.is_none_or(|(id, _)| id.place != page.id.place || id.ordinal >= page.id.ordinal);
            let mut before = if first { None } else { last.map(|(_, p)| p) };
            for (p, k, v) in &tokens {
                assert!(before.is_none_or(|before| before < *p));
                before = Some(*p);
                let (key, value) = token(0, &cache.config().layers[0], u64::from(*p));
                assert!(
                    key.chunks(3).any(|key| bits(key) == *k)
                        && value.chunks(5).any(|value| bits(value) == *v)
                );
            }
            assert_eq!((page.first.0, page.last.0), (tokens[0].0, tokens[tokens.len() - 1].0));
            last = Some((page.id, page.last.0));
        }
    }
}

/// candle-nn: a cache grew without end past its declared maximum.
#[test]
fn never_grows_past_its_budget() {
    let layers = vec![small(), shape(2, 1, layout(8, 8, Dtype::Bf16))];
    let budget = 50_000;
    let cache = Cache::new(CacheConfig::new(layers, budget).ring(16).experts(2, 1).nan_fill(true)).unwrap();
    let mut sequence = cache.sequence();
    let mut refused = 0;
    for i in 0..2000 {
        match cache.begin([(&mut sequence, 1)]) {
            Ok(step) => drop(finish(&cache, step, &[i])),
            Err(Error::OutOfBudget { needed, available }) => {
                assert!(needed > available && available == budget - cache.usage().taken);
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
        assert!(cache.usage().taken <= budget);
    }
    assert!(refused > 1000 && sequence.next_position().0 > 100);
    assert_eq!(sequence.resident(1, 1).unwrap(), Resident(sequence.next_position().0), "nothing is lost");
}

/// ferrox#61: the planner priced a window cache as a full one.
#[test]
fn window_cache_is_priced_as_a_window() {
    for (window, ring, slack, count) in
        [(16, 16, 0, 1), (10, 40, 8, 4), (100, 40, 8, 1), (100, 40, 8, 4), (41, 40, 0, 4)]
    {
        let layer = small().window(window);
        let mut base = config(vec![layer], ring, slack).experts(count, 1).sinks(4);
        let store = base.stores().unwrap()[0];
        let most = store.bytes_at_most(&layer, 1 << 20);
        let full = store.bytes_at_most(&layer.window(None), 1 << 20);
        assert!(most * 1000 < full, "{most} of {full} bytes");
        // The ring's new tile is allocated before its oldest is freed, and a router is not known in advance: 2 pages and 2 an expert.
        let budget = most + (2 + 2 * u64::from(count)) * layer.layout.bytes();
        base.budget = budget;
        let cache = Cache::new(base).unwrap();
        let mut sequence = cache.sequence();
        for i in 0..3000 {
            feed(&cache, &mut sequence, [i]);
            let planned = store.bytes_at_most(&layer, i as u32 + 1);
            assert!(sequence.bytes() <= planned, "{} bytes at {i}, planned {planned}", sequence.bytes());
            assert_eq!(cache.usage().taken, sequence.bytes());
        }
    }
}

/// ferrox#61, rMLX#404: the planner, `bytes()` and the arena agree to the byte, and 16-bit forms take half of f32.
#[test]
fn planner_and_allocator_agree() {
    let mut taken = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let layer = shape(3, 2, layout(64, 64, dtype));
        let cache = Cache::new(config(vec![layer; 2], 64, 16)).unwrap();
        for len in [1, 31, 32, 33, 64, 65, 96, 500] {
            let mut sequence = cache.sequence();
            feed(&cache, &mut sequence, 0..len);
            let planned =
                2 * cache.store(0).unwrap().bytes_at(&layer, len as u32, [(len as u32).saturating_sub(64)]);
            assert_eq!((sequence.bytes(), cache.usage().taken), (planned, planned), "{len} tokens");
            assert!(planned <= 2 * cache.store(0).unwrap().bytes_at_most(&layer, len as u32));
            if len == 500 {
                // Positions take 128 bytes a page either way.
                taken.push(planned - planned / layer.layout.bytes() * 128);
            }
        }
    }
    assert_eq!(taken, [taken[0], taken[0] / 2, taken[0] / 2]);
}

/// An evicted page that was not yet full kept all later pages of its expert from leaving with the window.
#[test]
fn an_evicted_page_does_not_hold_back_the_window() {
    let layer = windowed(64);
    let cache = Cache::new(config(vec![layer], 16, 0)).unwrap();
    let mut sequence = one_by_one(&cache, 0..60);
    // 44 tokens are filed: 32, and 12 in the page that is evicted.
    sequence.evict(0, 0, PageId { place: Place::Run(0), ordinal: 1 }).unwrap();
    for id in 60..2000 {
        feed(&cache, &mut sequence, [id]);
        let (bytes, most) = (sequence.bytes(), cache.store(0).unwrap().bytes_at_most(&layer, id as u32 + 1));
        assert!(bytes <= most + layer.layout.bytes(), "{bytes} bytes at {id}, {most} planned");
    }
}

/// An expert that is seldom chosen keeps a page that is not full; the planner must count it.
#[test]
fn planner_counts_pages_of_experts_that_went_quiet() {
    let layer = windowed(17);
    let cache = Cache::new(config(vec![layer], 16, 0).experts(8, 1)).unwrap();
    let mut sequence = cache.sequence();
    for i in 0..200 {
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        step.append(0, &[0.0; 3], &[0.0; 5]).unwrap();
        step.route(0, &[(i % 8) as u16]).unwrap();
        step.commit().unwrap();
        let (bytes, most) = (sequence.bytes(), cache.store(0).unwrap().bytes_at_most(&layer, i + 1));
        assert!(bytes <= most, "{bytes} bytes at {i}, {most} planned");
    }
}

// ---- rollback and fork

/// mlx-swift-lm#424, mlx-lm#1486: a trim was silently a no-op once the ring had wrapped.
#[test]
fn rollback_after_wrap() {
    let (ring, slack) = (12, 9);
    for (count, len) in [(1, 100u64), (3, 100), (3, 97), (1, 64), (2, 21), (2, 22)] {
        let cache =
            Cache::new(config(vec![small(), windowed(20)], ring, slack).experts(count, 1).sinks(2)).unwrap();
        for n in 0..=u64::from(slack) {
            let mut sequence = one_by_one(&cache, 0..len);
            assert!(sequence.rollback_limit() >= slack);
            sequence.rollback(n as u32).unwrap();
            assert_eq!(u64::from(sequence.next_position().0), len - n);
            // It continues with other tokens, as a sequence that never had those.
            let mut twin = one_by_one(&cache, 0..len - n);
            for id in 1000..1030 {
                assert_eq!(feed(&cache, &mut sequence, [id]), feed(&cache, &mut twin, [id]), "{n} of {len}");
            }
            assert_eq!(snapshot(&cache, &sequence), snapshot(&cache, &twin));
        }
        let mut sequence = one_by_one(&cache, 0..len);
        let limit = sequence.rollback_limit();
        if len > u64::from(ring + slack) {
            assert_eq!(limit, slack);
        } else {
            assert_eq!(u64::from(limit), len);
        }
        let before = snapshot(&cache, &sequence);
        for asked in [limit + 1, limit + 2, u32::MAX] {
            assert_eq!(sequence.rollback(asked), Err(Error::RollbackTooFar { asked, limit }));
            assert_eq!(snapshot(&cache, &sequence), before);
        }
    }
}

/// mlxcel#994: rejected + 1 tokens were trimmed.
#[test]
fn trims_exactly_n() {
    let cache = Cache::new(config(vec![small()], 16, 8)).unwrap();
    for n in 0..=8 {
        let mut sequence = one_by_one(&cache, 0..80);
        sequence.rollback(n).unwrap();
        let (page, tokens) = snapshot(&cache, &sequence).pop().unwrap();
        assert_eq!(page.last, Position(79 - n));
        let (k, v) = token(0, &small(), u64::from(79 - n));
        assert_eq!(tokens.last().unwrap(), &(79 - n, bits(&k), bits(&v)));
        assert_eq!(sequence.rollback_limit(), 8 - n);
    }
}

/// mlx-lm#873: a whole batch was trimmed by one amount.
#[test]
fn rows_of_a_batch_trim_apart() {
    let cache = Cache::new(config(vec![small(), small()], 10, 6).experts(2, 1)).unwrap();
    let mut sequences: Vec<Sequence> =
        (0..3).map(|i| one_by_one(&cache, i * 100..i * 100 + 20 + i)).collect();
    let step = cache.begin(sequences.iter_mut().zip([5, 6, 4])).unwrap();
    let ids: Vec<u64> = (500..505).chain(600..606).chain(700..704).collect();
    finish(&cache, step, &ids);
    for ((i, sequence), n) in sequences.iter_mut().enumerate().zip([0, 2, 4]) {
        sequence.rollback(n).unwrap();
        let i = i as u64;
        let new = [500..505, 600..604, 700..700][i as usize].clone();
        let mut twin = one_by_one(&cache, (i * 100..i * 100 + 20 + i).chain(new));
        assert_eq!(sequence.next_position(), twin.next_position());
        assert_eq!(feed(&cache, sequence, [9]), feed(&cache, &mut twin, [9]));
    }
}

/// mlx-swift-lm#308: derived state (tags, bytes, attention mass) was not rolled back with its source.
#[test]
fn derived_state_rolls_back() {
    let cache = Cache::new(config(vec![small()], 20, 12).experts(4, 2).sinks(2)).unwrap();
    let mut twin = one_by_one(&cache, 0..30);
    let mut sequence = one_by_one(&cache, 0..30);
    let taken = cache.usage();
    feed(&cache, &mut sequence, 500..512);
    sequence.rollback(12).unwrap();
    assert_eq!(cache.usage(), taken);
    feed(&cache, &mut sequence, 30..90);
    feed(&cache, &mut twin, 30..90);
    assert_eq!((sequence.bytes(), snapshot(&cache, &sequence)), (twin.bytes(), snapshot(&cache, &twin)));
    for p in 0..90 {
        let tags = |s: &Sequence| s.experts(0, Position(p)).unwrap().map(Iterator::collect::<Vec<_>>);
        assert_eq!(tags(&sequence), Some(experts(cache.config(), u64::from(p))));
        assert_eq!(tags(&sequence), tags(&twin));
    }
    let mass = |sequence: &Sequence| {
        let (mut out, mut mass) = (vec![0.0; 30], vec![]);
        let rows = Rows::new(sequence, Position(88), 3);
        let output = AttendOutput::new(&mut out).mass(&mut mass);
        cache.attend(0, &[rows], &[0.7; 18], &Attend::new(0.5), output).unwrap();
        mass
    };
    let (a, b): (Vec<PageMass>, _) = (mass(&sequence), mass(&twin));
    assert_eq!(a, b);
    let total: f32 = a.iter().map(PageMass::total).sum();
    assert!((total - 6.0).abs() < 1e-4, "3 rows of 2 query heads give 6, not {total}");
}

// ---- positions

/// VeloxQuant-MLX#389: after an eviction the retained length was used as the next position.
#[test]
fn position_is_monotone_after_eviction() {
    let rope = Some(Rope::new(100.0, 2));
    let layer = small().rope(rope);
    let cache = Cache::new(config(vec![layer], 4, 0)).unwrap();
    let mut sequence = cache.sequence();
    for round in 0..20u64 {
        let outputs = feed(&cache, &mut sequence, round * 10..round * 10 + 10);
        assert_eq!(u64::from(sequence.next_position().0), round * 10 + 10);
        // The last row sees the ring of the round before, evicted pages left out, and this chunk, at true positions.
        let from = (round * 10).saturating_sub(4);
        let p = round * 10 + 9;
        let seen: Vec<_> = (from..=p).map(|id| (id, id as u32)).collect();
        assert_row(&outputs, 0, &layer, 9, &query(0, &layer, p), p as u32, &seen);
        sequence.evict_all();
        assert_eq!(u64::from(sequence.next_position().0), round * 10 + 10);
    }
}

/// transformers#31581, llama.cpp#4097: keys were rotated twice, or drifted with many rotations.
#[test]
fn keys_are_stored_before_the_rotation() {
    let rope = Some(Rope::new(10_000.0, 4));
    let layer = shape(1, 1, layout(4, 2, Dtype::F32)).rope(rope);
    let cache = Cache::new(config(vec![layer], 8, 4).experts(2, 1)).unwrap();
    let mut sequence = cache.sequence();
    for id in 0..300 {
        feed(&cache, &mut sequence, [id]);
    }
    for (_, tokens) in snapshot(&cache, &sequence) {
        for (p, k, _) in tokens {
            assert_eq!(k, bits(&token(0, &layer, u64::from(p)).0));
        }
    }
}

/// llama.cpp#4889: partial rotary was taken for full.
#[test]
fn partial_rotary() {
    for pairs in [Pairs::Halves, Pairs::Neighbours] {
        for rotary_dim in [2, 4, 6, 10] {
            let rope = Some(Rope::new(100.0, rotary_dim).pairs(pairs));
            let layer = shape(2, 2, layout(10, 3, Dtype::Bf16)).rope(rope);
            let cache = Cache::new(config(vec![layer], 7, 0)).unwrap();
            let mut sequence = cache.sequence();
            let outputs = feed(&cache, &mut sequence, 0..50);
            for p in 0..50u32 {
                let seen: Vec<_> = (0..=p).map(|t| (u64::from(t), t)).collect();
                assert_row(&outputs, 0, &layer, p as usize, &query(0, &layer, u64::from(p)), p, &seen);
            }
        }
    }
}

/// The oracle of positions: a constant added to all of them changes no output.
#[test]
fn constant_added_to_positions() {
    for pairs in [Pairs::Halves, Pairs::Neighbours] {
        let rope = Some(Rope::new(500.0, 4).pairs(pairs));
        let layer = shape(1, 2, layout(6, 3, Dtype::F32)).rope(rope).window(24);
        let cache = Cache::new(config(vec![layer], 10, 0)).unwrap();
        let last = |before: u64| {
            // The window hides the earlier tokens.
            let mut sequence = cache.sequence();
            if before > 0 {
                feed(&cache, &mut sequence, 5000..5000 + before);
            }
            feed(&cache, &mut sequence, 0..24);
            ask(&cache, 0, &sequence, before as u32 + 23, before as u32 + 24, 0.8)
        };
        let (out, lse) = last(0);
        for before in [1, 31, 32, 33, 257, 4096] {
            let (moved, moved_lse) = last(before);
            for (a, b) in out.iter().chain(&lse).zip(moved.iter().chain(&moved_lse)) {
                assert!((a - b).abs() < 2e-6, "moved by {before}: {a} and {b}");
            }
        }
    }
}

// ---- numerics

/// flashinfer#4401, #4975: empty and fully masked rows gave NaN, garbage or a crash.
#[test]
fn empty_and_masked_rows() {
    let cache = Cache::new(config(vec![windowed(1)], 8, 0)).unwrap();
    let (empty, mut full, mut one) = (cache.sequence(), cache.sequence(), cache.sequence());
    feed(&cache, &mut full, 0..100);
    feed(&cache, &mut one, [7]);
    // An empty sequence; a row with a window past the last token; a part without rows; a row that sees itself.
    let rows = [
        Rows::new(&empty, Position(0), 1),
        Rows::new(&full, Position(100), 1),
        Rows::new(&one, Position(0), 0),
        Rows::new(&one, Position(0), 2),
    ];
    for lanes in Lanes::available() {
        let cache_of_lanes = lanes.name();
        let (mut out, mut lse) = (vec![f32::NAN; 4 * 2 * 5], vec![f32::NAN; 8]);
        let mut mass = Vec::new();
        cache
            .attend(0, &rows, &[0.5; 24], &Attend::new(0.5), AttendOutput::new(&mut out).lse(&mut lse))
            .unwrap();
        let (mut again, mut again_lse) = (vec![f32::NAN; 40], vec![f32::NAN; 8]);
        let output = AttendOutput::new(&mut again).lse(&mut again_lse).mass(&mut mass);
        cache.attend(0, &rows, &[0.5; 24], &Attend::new(0.5), output).unwrap();
        assert_eq!((bits(&out), bits(&lse)), (bits(&again), bits(&again_lse)), "{cache_of_lanes}");
        let value = token(0, &windowed(1), 7).1;
        for row in [0, 1, 3] {
            assert_eq!(bits(&out[row * 10..row * 10 + 10]), [0; 10], "row {row}");
            assert_eq!(lse[row * 2..row * 2 + 2], [f32::NEG_INFINITY; 2]);
        }
        assert!(out[20..25].iter().zip(&value).all(|(a, b)| (a - b).abs() < 1e-6));
        assert!(mass.iter().flat_map(|m| m.tokens).all(|x| x.is_finite()));
        assert!((mass.iter().map(PageMass::total).sum::<f32>() - 2.0).abs() < 1e-6);
    }
    // No rows at all.
    cache.attend(0, &[], &[0.0; 0], &Attend::new(0.5), AttendOutput::new(&mut [0.0; 0])).unwrap();
}

/// flash-attention#1745: uninitialised padding in V became NaN. Here fresh and freed pages are NaN throughout.
#[test]
fn padding_is_never_read() {
    for (k_dim, v_dim) in [(1, 1), (3, 7), (5, 9), (7, 33), (80, 66)] {
        for dtype in Dtype::ALL {
            for lanes in Lanes::available() {
                let layer = shape(1, 3, layout(k_dim, v_dim, dtype)).window(40);
                let run = |fill: bool| {
                    let config = config(vec![layer, shape(1, 3, layer.layout)], 10, 5).experts(3, 1);
                    let cache = Cache::new(config.lanes(lanes).nan_fill(fill)).unwrap();
                    let mut outputs = Vec::new();
                    for round in 0..3 {
                        let mut sequence = cache.sequence();
                        for n in [1u64, 3, 45, 2] {
                            let at = round * 100 + u64::from(sequence.next_position().0);
                            outputs.push(feed(&cache, &mut sequence, at..at + n));
                        }
                        sequence.rollback(5).unwrap();
                        outputs.push(feed(&cache, &mut sequence, round * 100 + 70..round * 100 + 75));
                    }
                    outputs
                };
                let outputs = run(true);
                let words = outputs.iter().flatten().flat_map(|(out, lse)| out.iter().chain(lse));
                assert!(words.copied().map(f32::from_bits).all(f32::is_finite));
                assert_eq!(outputs, run(false), "{k_dim} {v_dim} {dtype:?} {}", lanes.name());
            }
        }
    }
}

/// ik_llama#241: f16 accumulators overflow where f32 does not.
#[test]
fn sums_are_f32() {
    let layer = shape(1, 1, layout(64, 2, Dtype::F16));
    let cache = Cache::new(config(vec![layer], 64, 0)).unwrap();
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, 300)]).unwrap();
    step.append(0, &[200.0; 300 * 64], &[60_000.0; 600]).unwrap();
    step.commit().unwrap();
    let (mut out, mut lse) = (vec![0.0; 2], vec![0.0; 1]);
    let rows = Rows::new(&sequence, Position(299), 1);
    // q . k = 64 * 200 * 100, beyond f16.
    cache
        .attend(0, &[rows], &[100.0; 64], &Attend::new(0.01), AttendOutput::new(&mut out).lse(&mut lse))
        .unwrap();
    assert!(out.iter().all(|x| (x - 60_000.0).abs() < 0.05), "{out:?}");
    let want = 12_800.0 + 300f64.ln();
    assert!((f64::from(lse[0]) - want).abs() < 0.01, "{lse:?}");
}

// ---- sharing, capacity, layout

/// atlas#373: a freed block was still referenced. Forks are dropped in every order, and the pool is full again.
#[test]
fn fork_drop_any_order() {
    let orders = (0..24).map(|i| {
        let mut rest = vec![0, 1, 2, 3];
        [i / 6, i / 2 % 3, i % 2, 0].map(|at: usize| rest.remove(at % rest.len()))
    });
    for order in orders {
        let cache = Cache::new(config(vec![small(), windowed(40)], 8, 4).experts(2, 1).sinks(1)).unwrap();
        let root = one_by_one(&cache, 0..70);
        let mut forks: Vec<Option<Sequence>> = vec![Some(root.fork()), Some(root.fork()), None, Some(root)];
        forks[2] = forks[1].as_ref().map(Sequence::fork);
        for (i, fork) in forks.iter_mut().enumerate() {
            let i = i as u64;
            feed(&cache, fork.as_mut().unwrap(), 1000 * i + 70..1000 * i + 75 + i);
        }
        let want: Vec<_> = (0..4)
            .map(|i| {
                let cache = Cache::new(cache.config().clone()).unwrap();
                let twin = one_by_one(&cache, (0..70).chain(1000 * i + 70..1000 * i + 75 + i));
                snapshot(&cache, &twin)
                    .into_iter()
                    .map(|(page, tokens)| (page.id, tokens))
                    .collect::<Vec<_>>()
            })
            .collect();
        for dropped in order {
            for (i, fork) in forks.iter().enumerate() {
                let Some(fork) = fork else { continue };
                let got: Vec<_> =
                    snapshot(&cache, fork).into_iter().map(|(page, tokens)| (page.id, tokens)).collect();
                assert_eq!(got, want[i]);
            }
            if let Some(mut fork) = forks[dropped].take() {
                fork.evict_all();
            }
        }
        let usage = cache.usage();
        assert_eq!((usage.taken, usage.shards), (0, vec![0]));
    }
}

/// atlas#373: a fork of a fork of a fork, with each generation written after its child was made.
#[test]
fn deep_forks_keep_their_own_tokens() {
    let cache = Cache::new(config(vec![small()], 6, 3).experts(2, 1)).unwrap();
    let mut generations = vec![one_by_one(&cache, 0..37)];
    let mut ids: Vec<Vec<u64>> = vec![(0..37).collect()];
    for g in 1..12u64 {
        let (parent, known) = (generations.last_mut().unwrap(), ids.last_mut().unwrap());
        let child = parent.fork();
        let copy = known.clone();
        let new: Vec<u64> = (g * 100..g * 100 + g % 5 + 1).collect();
        feed(&cache, parent, new.clone());
        known.extend(new);
        generations.push(child);
        ids.push(copy);
        if g % 3 == 0 {
            let n = generations.last().unwrap().rollback_limit().min(3);
            generations.last_mut().unwrap().rollback(n).unwrap();
            let len = ids.last().unwrap().len() - n as usize;
            ids.last_mut().unwrap().truncate(len);
            feed(&cache, generations.last_mut().unwrap(), [g * 1000]);
            ids.last_mut().unwrap().push(g * 1000);
        }
    }
    for (sequence, ids) in generations.iter().zip(&ids) {
        let want = one_by_one(&cache, ids.iter().copied());
        let plain = |s| snapshot(&cache, s).into_iter().map(|(p, t)| (p.id, t)).collect::<Vec<_>>();
        let (got, want) = (plain(sequence), plain(&want));
        // A tile that left the ring before a rollback is not restored.
        assert!(got.iter().all(|page| want.contains(page)));
        let filed =
            |pages: &[(PageId, Stored)]| pages.iter().filter(|(id, _)| id.place != Place::Ring).count();
        assert_eq!(filed(&got), filed(&want));
        assert_eq!(got.last(), want.last());
    }
    drop(generations);
    assert_eq!(cache.usage().taken, 0);
}

/// hyprstream#1280: exhaustion left some layers written and others not.
#[test]
fn exhaustion_is_transactional() {
    let layers = vec![small(), shape(2, 1, layout(40, 40, Dtype::F32)), windowed(9)];
    for forked in [false, true] {
        let config =
            CacheConfig::new(layers.clone(), 200_000).ring(8).rollback(4).experts(3, 1).nan_fill(true);
        let cache = Cache::new(config).unwrap();
        let mut sequence = one_by_one(&cache, 0..60);
        let mut other = one_by_one(&cache, 100..110);
        let fork = forked.then(|| sequence.fork());
        let before = (snapshot(&cache, &sequence), snapshot(&cache, &other), cache.usage());
        let outputs = ask(&cache, 1, &sequence, 59, 61, 0.5);
        let room = before.2.budget - before.2.taken;
        let n = 100;
        match cache.begin([(&mut other, 1), (&mut sequence, n)]) {
            Err(Error::OutOfBudget { needed, available }) => {
                assert!(needed > available, "{needed} {available}");
                assert_eq!(available, room);
                let text = Error::OutOfBudget { needed, available }.to_string();
                assert!(text.contains(&needed.to_string()) && text.contains(&available.to_string()));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!((snapshot(&cache, &sequence), snapshot(&cache, &other), cache.usage()), before);
        assert_eq!(ask(&cache, 1, &sequence, 59, 61, 0.5), outputs);
        assert_eq!((sequence.next_position(), other.next_position()), (Position(60), Position(10)));
        // A smaller step works, with the right bits.
        feed(&cache, &mut sequence, [60]);
        let mut twin_cache = cache.config().clone();
        twin_cache.budget = 1 << 24;
        let twin_cache = Cache::new(twin_cache).unwrap();
        let twin = one_by_one(&twin_cache, 0..61);
        assert_eq!(ask(&cache, 1, &sequence, 60, 62, 0.5), ask(&twin_cache, 1, &twin, 60, 62, 0.5));
        drop((sequence, other, fork));
        assert_eq!(cache.usage().taken, 0);
    }
}

/// hyprstream#1280: a step that is dropped after any number of layers leaves every layer as it was.
#[test]
fn an_abandoned_step_leaves_no_trace() {
    let cache =
        Cache::new(config(vec![small(), windowed(30), small()], 12, 5).experts(3, 1).sinks(2)).unwrap();
    let mut sequence = one_by_one(&cache, 0..77);
    let before = (snapshot(&cache, &sequence), cache.usage());
    for n in [1u32, 12, 13, 70] {
        for layers in 0..=3 {
            let mut step = cache.begin([(&mut sequence, n)]).unwrap();
            for (l, shape) in cache.config().layers.iter().enumerate().take(layers) {
                let (k, v): (Vec<_>, Vec<_>) = (0..n).map(|i| token(l, shape, 900 + u64::from(i))).unzip();
                step.append(l, &k.concat(), &v.concat()).unwrap();
                if l % 2 == 0 {
                    step.route(l, &vec![1; n as usize]).unwrap();
                }
            }
            if layers == 1 {
                assert_eq!(step.commit(), Err(Error::Incomplete { layer: 1, what: "appended" }));
            } else if layers == 3 {
                assert_eq!(step.commit(), Err(Error::Incomplete { layer: 1, what: "routed" }));
            } else {
                drop(step);
            }
            assert_eq!((snapshot(&cache, &sequence), cache.usage()), before, "{n} tokens, {layers} layers");
        }
    }
}

/// atlas#373: memory is allocated and freed over many chunks of the arena, in random order, and every token keeps its bytes.
#[test]
fn pool_is_full_again_after_churn() {
    let layers = vec![shape(1, 1, layout(256, 256, Dtype::F32)), shape(1, 1, layout(256, 200, Dtype::F16))];
    let cache = Cache::new(config(layers, 40, 8).experts(3, 1).shards(ShardMap::sum(2).unwrap())).unwrap();
    let mut live: Vec<(Vec<u64>, Sequence)> = Vec::new();
    let (mut next, mut most) = (0, 0);
    for round in 0..300u64 {
        let pick = mix(&[round, 3]) as usize % 24;
        match mix(&[round, 4]) % 8 {
            0 if live.len() > 4 => drop(live.swap_remove(pick % live.len())),
            1 if !live.is_empty() => {
                let (ids, sequence) = &live[pick % live.len()];
                let fork = (ids.clone(), sequence.fork());
                live.push(fork);
            }
            _ => {
                if live.len() < 24 {
                    live.push((Vec::new(), cache.sequence()));
                }
                let at = pick % live.len();
                let (ids, sequence) = &mut live[at];
                let new: Vec<u64> = (next..next + 1 + mix(&[round, 5]) % 90).collect();
                next += 1000;
                feed(&cache, sequence, new.clone());
                ids.extend(new);
            }
        }
        most = most.max(cache.usage().taken);
    }
    assert!(most > 3 * (2 << 20), "{most} bytes are fewer than some chunks on 2 shards");
    for (ids, sequence) in &live {
        for (page, tokens) in snapshot(&cache, sequence).iter().take(1000) {
            for (p, k, _) in tokens.iter().filter(|(_, k, _)| k.len() == 256 && page.tokens > 0) {
                let id = ids[*p as usize];
                let f32_key = bits(&token(0, &cache.config().layers[0], id).0);
                let half = |x: &f32| Dtype::F16.decode(Dtype::F16.encode(*x).unwrap()).to_bits();
                let f16_key: Vec<u32> = token(1, &cache.config().layers[1], id).0.iter().map(half).collect();
                assert!(*k == f32_key || *k == f16_key, "token {p} of {}", page.id);
            }
        }
    }
    drop(live);
    let usage = cache.usage();
    assert_eq!((usage.taken, usage.shards), (0, vec![0, 0]));
}

/// onnx#7274: query head h reads KV head h / group, never h % kv_heads.
#[test]
fn gqa_maps_by_group() {
    for (kv_heads, group) in [(2, 3), (3, 2), (4, 1), (1, 8), (2, 8), (3, 5)] {
        for lanes in Lanes::available() {
            let layer = shape(kv_heads, group, layout(4, 3, Dtype::F32));
            let cache = Cache::new(config(vec![layer], 4, 0).lanes(lanes)).unwrap();
            let mut sequence = cache.sequence();
            let mut step = cache.begin([(&mut sequence, 9)]).unwrap();
            let v: Vec<f32> = (0..9 * kv_heads).flat_map(|i| [(i % kv_heads) as f32 + 1.0; 3]).collect();
            step.append(0, &vec![0.5; 9 * kv_heads as usize * 4], &v).unwrap();
            let heads = (kv_heads * group) as usize;
            let mut out = vec![0.0; 9 * heads * 3];
            step.attend(0, &vec![0.5; 9 * heads * 4], &Attend::new(0.5), AttendOutput::new(&mut out))
                .unwrap();
            drop(step);
            // Queries of their own for every head, so that they are not mixed up on their way in either.
            let outputs = feed(&cache, &mut sequence, 0..4);
            let seen: Vec<_> = (0..4).map(|t| (u64::from(t), t)).collect();
            assert_row(&outputs, 0, &layer, 3, &query(0, &layer, 3), 3, &seen);
            for (i, x) in out.iter().enumerate() {
                let want = (i / 3 % heads / group as usize) as f32 + 1.0;
                assert!((x - want).abs() < 1e-5, "{kv_heads} KV heads by {group}: {x}, want {want}");
            }
        }
    }
}

/// onnx#7274: groups beyond a tile of query rows, with and without the attention mass.
#[test]
fn large_groups() {
    for group in [63, 64, 65, 71, 100, 200] {
        let layer = shape(2, group, layout(4, 3, Dtype::F32));
        let cache = Cache::new(config(vec![layer], 9, 0).experts(2, 1)).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 0..31);
        // No longer than the ring, so that the bits are those of a row asked for afterwards.
        let outputs = feed(&cache, &mut sequence, 31..40);
        for p in [31u32, 35, 39] {
            let seen: Vec<_> = (0..=p).map(|t| (u64::from(t), t)).collect();
            assert_row(&outputs, 0, &layer, p as usize - 31, &query(0, &layer, u64::from(p)), p, &seen);
        }
        let heads = 2 * group as usize;
        let (mut out, mut lse, mut mass) = (vec![0.0; heads * 3], vec![0.0; heads], Vec::new());
        let rows = Rows::new(&sequence, Position(39), 1);
        let output = AttendOutput::new(&mut out).lse(&mut lse).mass(&mut mass);
        cache.attend(0, &[rows], &query(0, &layer, 39), &Attend::new(0.5), output).unwrap();
        assert_eq!(bits(&out), outputs[0].0[8 * heads * 3..]);
        assert_eq!(bits(&lse), outputs[0].1[8 * heads..]);
        let total: f32 = mass.iter().map(PageMass::total).sum();
        assert!((total - heads as f32).abs() < 1e-3, "{total} of {heads}");
    }
}

/// mojo_opset#266: head_dim 80, 96, 256 and k_dim != v_dim.
#[test]
fn odd_dims() {
    for (k_dim, v_dim) in
        [(1, 1), (2, 1), (3, 64), (80, 80), (96, 96), (256, 256), (192, 128), (64, 65), (255, 129), (1, 256)]
    {
        for (k, v) in [
            (Dtype::F32, Dtype::F32),
            (Dtype::F16, Dtype::Bf16),
            (Dtype::Bf16, Dtype::F32),
            (Dtype::F32, Dtype::F16),
        ] {
            let layer = shape(1, 8, Layout::new(k_dim, k).values(v_dim, v));
            // Scores within the tolerance of `assert_row`: keys of 256 channels make them up to 128.
            let mut outputs: Vec<Outputs> = Vec::new();
            for lanes in Lanes::available() {
                let cache = Cache::new(config(vec![layer], 20, 0).experts(2, 1).lanes(lanes)).unwrap();
                let mut sequence = cache.sequence();
                outputs.push(feed(&cache, &mut sequence, 0..70));
            }
            assert!(
                outputs.iter().all(|o| *o == outputs[0]),
                "lanes disagree at {k_dim} {v_dim} {k:?} {v:?}"
            );
            for p in [0u32, 1, 33, 69] {
                let seen: Vec<_> = (0..=p).map(|t| (u64::from(t), t)).collect();
                assert_row(&outputs[0], 0, &layer, p as usize, &query(0, &layer, u64::from(p)), p, &seen);
            }
        }
    }
}

/// vllm#1486: 32-bit index arithmetic overflowed past 2^31 elements.
#[test]
fn addresses_are_64_bit() {
    let layout = layout(256, 256, Dtype::F32);
    let words = u64::from(layout.words());
    for page in [0, 1, (1 << 31) / words, (1 << 32) / words + 1, 1 << 33, 1 << 40] {
        assert_eq!(layout.page_word(page), page * words);
        assert_eq!(layout.k_word(page, 255, 31), page * words + 32 + 255 * 32 + 31);
        assert_eq!(layout.v_word(page, 255, 31), page * words + words - 1);
    }
    let layer = shape(64, 1, layout);
    let store = config(vec![layer], 256, 0).stores().unwrap()[0];
    let len = Position::MAX.0;
    let pages = u64::from((len - 256).div_ceil(32)) + u64::from(len.div_ceil(32) - (len - 256) / 32);
    assert_eq!(store.bytes_at(&layer, len, [len - 256]), pages * 64 * words * 4);
}

/// vllm#47715: metric buffers without a bound. The mass is of one call.
#[test]
fn mass_is_cleared_by_every_call() {
    let cache = Cache::new(config(vec![small()], 8, 0)).unwrap();
    let sequence = one_by_one(&cache, 0..50);
    let mut mass = Vec::new();
    let mut sizes = Vec::new();
    for _ in 0..3 {
        let mut out = [0.0; 10];
        let rows = Rows::new(&sequence, Position(49), 1);
        let output = AttendOutput::new(&mut out).mass(&mut mass);
        cache.attend(0, &[rows], &[0.0; 6], &Attend::new(0.5), output).unwrap();
        sizes.push(mass.len());
    }
    assert_eq!(sizes, [sizes[0]; 3]);
}

/// sglang#20705: an option was read and then ignored. Each of these changes its own effect, and no other.
#[test]
fn every_knob_acts() {
    let base = || config(vec![small()], 8, 0).experts(4, 1);
    let run = |config: CacheConfig, options: Attend| {
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 0..900);
        let mut out = [0.0; 10];
        let rows = Rows::new(&sequence, Position(899), 1);
        cache.attend(0, &[rows], &[4.0; 6], &options, AttendOutput::new(&mut out)).unwrap();
        let pages: Vec<PageInfo> = sequence.pages(0, 0).unwrap().collect();
        (bits(&out), pages)
    };
    let plain = run(base(), Attend::new(0.5));
    assert_ne!(run(base(), Attend::new(0.25)).0, plain.0);
    assert_ne!(run(base(), Attend::new(0.5).softcap(2.0)).0, plain.0);
    for split in [1, 2, 4, 1 << 31] {
        assert_eq!(run(base(), Attend::new(0.5).split(split)), plain);
    }
    for shards in [ShardMap::sum(3).unwrap(), ShardMap::xor(8, 8, 4).unwrap()] {
        let spread = run(base().shards(shards), Attend::new(0.5));
        assert_eq!(spread.0, plain.0);
        assert!(spread.1.iter().any(|page| page.shard > 0));
    }
    assert_ne!(run(base().ring(40), Attend::new(0.5)).1, plain.1);
    assert_ne!(run(base().sinks(3), Attend::new(0.5)).1, plain.1);
    assert_ne!(run(base().rollback(60), Attend::new(0.5)).1, plain.1);
    assert_ne!(run(base().experts(2, 1), Attend::new(0.5)).1, plain.1);
    for lanes in Lanes::available() {
        assert_eq!(run(base().lanes(lanes), Attend::new(0.5)), plain);
    }
}

// ---- threads

/// Compiles only if the types may cross and be shared between threads.
#[test]
fn types_are_send_and_sync() {
    fn both<T: Send + Sync>() {}
    both::<Cache>();
    both::<Sequence>();
    both::<Step<'_>>();
    both::<Error>();
    both::<CacheConfig>();
    both::<PageMass>();
    both::<Rows<'_>>();
}

/// Two threads that append to and attend over sequences of one cache at once, one of them a fork of the other, get the
/// bits that each gets alone.
#[test]
fn threads_do_not_disturb_each_other() {
    let rope = Some(Rope::new(100.0, 2));
    let layers = vec![small(), windowed(40).rope(rope)];
    let config = config(layers, 12, 6).experts(3, 1).sinks(2).shards(ShardMap::sum(2).unwrap());
    let history = |cache: &Cache, sequence: &mut Sequence, salt: u64| {
        let mut outputs = Vec::new();
        for round in 0..40u64 {
            let at = salt + round * 20;
            outputs.push(feed(cache, sequence, at..at + 1 + round % 17));
            if round % 4 == 3 {
                sequence.rollback(3).unwrap();
            }
            if round % 9 == 8 {
                sequence.evict_all();
            }
            let len = sequence.next_position().0;
            let (out, lse) = ask(cache, 0, sequence, len, len + 1, 0.2);
            outputs.push(vec![(bits(&out), bits(&lse))]);
            let mut copy = sequence.fork();
            outputs.push(feed(cache, &mut copy, [at + 19]));
        }
        outputs
    };
    let alone = |salt| {
        let cache = Cache::new(config.clone()).unwrap();
        let mut sequence = one_by_one(&cache, 0..45);
        history(&cache, &mut sequence, salt)
    };
    let want = [1000, 5000, 9000].map(alone);
    for _ in 0..4 {
        let cache = Cache::new(config.clone()).unwrap();
        let root = one_by_one(&cache, 0..45);
        let mut sequences = vec![root.fork(), one_by_one(&cache, 0..45), root];
        let got: Vec<_> = std::thread::scope(|scope| {
            let cache = &cache;
            let threads: Vec<_> = sequences
                .iter_mut()
                .zip([1000, 5000, 9000])
                .map(|(sequence, salt)| scope.spawn(move || history(cache, sequence, salt)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(got[..] == want[..], "threads change outputs");
        drop(sequences);
        assert_eq!(cache.usage().taken, 0);
    }
}
