//! `ReadPages::Quest` with a window: the candidates of a row are the pages that it sees, so its reads depend neither on how tokens are cut into
//! steps nor on rollbacks.

use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, ReadPages, Sequence};
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

const LAYERS: usize = 2;
const K_DIM: u32 = 4;
const V_DIM: u32 = 3;
const QUERY_HEADS: u32 = 2;

/// A layer of one KV head that `QUERY_HEADS` query heads read.
fn shape(window: Option<u32>) -> LayerShape {
    LayerShape::new(1, QUERY_HEADS, K_DIM, Dtype::F32).values(V_DIM, Dtype::F32).window(window)
}

/// Numbers of a token: `what` selects key, value, query or expert; `branch` the text.
fn of(branch: u64, position: u32, layer: usize, what: u64, n: u32) -> Vec<f32> {
    let mut rng = Rng(branch << 40 ^ u64::from(position) << 8 ^ (layer as u64) << 4 ^ what);
    noise(rng.next(), n as usize).iter().map(|x| x * 2.0).collect()
}

/// Appends `n` tokens of a text and attends them in every layer; the bits of all outputs.
fn push(cache: &Cache, sequence: &mut Sequence, branch: u64, n: u32, read: ReadPages) -> Vec<u32> {
    let first = sequence.next_position().0;
    let config = cache.config();
    let mut outputs = Vec::new();
    let mut step = cache.begin([(sequence, n)]).unwrap();
    for layer in 0..LAYERS {
        let rows = |what, dim| (first..first + n).flat_map(|p| of(branch, p, layer, what, dim)).collect();
        let (k, v, q): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (rows(1, K_DIM), rows(2, V_DIM), rows(3, QUERY_HEADS * K_DIM));
        step.append(layer, &k, &v).unwrap();
        let expert = |p| {
            let first = Rng(branch ^ u64::from(p) << 3 ^ layer as u64).below(config.experts);
            (0..config.top_k).map(move |i| ((first + i) % config.experts) as u16)
        };
        let experts: Vec<u16> = (first..first + n).flat_map(expert).collect();
        step.route(layer, &experts).unwrap();
        let mut out = vec![0.0; (n * QUERY_HEADS * V_DIM) as usize];
        let mut lse = vec![0.0; (n * QUERY_HEADS) as usize];
        let options = Attend::new(0.7).read(read);
        step.attend(layer, &q, &options, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        outputs.extend(bits(&out));
        outputs.extend(bits(&lse));
    }
    step.commit().unwrap();
    outputs
}

/// Page 1 has the highest keys, then page 2, then page 3, then page 4; values are positions.
fn key(p: u32) -> f32 {
    match p / 32 {
        1 => 10.0,
        2 => 8.0,
        3 => 3.0,
        4 => 1.0,
        _ => 0.0,
    }
}

/// Output and log-sum-exp of each row.
fn push_steep(cache: &Cache, sequence: &mut Sequence, n: u32, read: ReadPages) -> Vec<(u32, u32)> {
    let first = sequence.next_position().0;
    let k: Vec<f32> = (first..first + n).map(key).collect();
    let v: Vec<f32> = (first..first + n).map(|p| p as f32).collect();
    let (mut out, mut lse) = (vec![0.0; n as usize], vec![0.0; n as usize]);
    let mut step = cache.begin([(sequence, n)]).unwrap();
    step.append(0, &k, &v).unwrap();
    let to = AttendOutput::new(&mut out).lse(&mut lse);
    step.attend(0, &vec![1.0; n as usize], &Attend::new(1.0).read(read), to).unwrap();
    step.commit().unwrap();
    bits(&out).into_iter().zip(bits(&lse)).collect()
}

fn steep(rollback: u32) -> Cache {
    let layer = LayerShape::new(1, 1, 1, Dtype::F32).window(160);
    Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(64).rollback(rollback).key_bounds(true)).unwrap()
}

const ONE_PAGE: ReadPages = ReadPages::Quest { pages: 1 };

/// The row at 254 sees positions from 95 on: of the full pages the last token of page 2, which has the highest visible key, and pages 3
/// and 4. The row at 255 sees pages 3 and 4; page 3 has the highest keys.
#[test]
fn quest_chooses_among_pages_that_the_row_sees() {
    let (one, chunks) = (steep(0), steep(0));
    let (mut a, mut b) = (one.sequence(), chunks.sequence());
    let x: Vec<_> = (0..256).flat_map(|_| push_steep(&one, &mut a, 1, ONE_PAGE)).collect();
    let y: Vec<_> = (0..4).flat_map(|_| push_steep(&chunks, &mut b, 64, ONE_PAGE)).collect();
    assert_eq!(x, y);
    // The page that is read outweighs the ring.
    let out = |row: usize| f32::from_bits(x[row].0);
    assert!((95.0..100.0).contains(&out(254)), "{}", out(254));
    assert!((110.0..128.0).contains(&out(255)), "{}", out(255));
}

#[test]
fn quest_behind_a_window_forgets_what_was_taken_back() {
    let (c, d) = (steep(40), steep(40));
    let (mut a, mut b) = (c.sequence(), d.sequence());
    for _ in 0..254 {
        push_steep(&c, &mut a, 1, ReadPages::All);
        push_steep(&d, &mut b, 1, ReadPages::All);
    }
    for _ in 0..30 {
        push_steep(&c, &mut a, 1, ReadPages::All);
    }
    a.rollback(30).unwrap();
    assert_eq!(push_steep(&c, &mut a, 1, ONE_PAGE), push_steep(&d, &mut b, 1, ONE_PAGE));
}

#[test]
fn quest_behind_a_window_does_not_depend_on_the_rollback_configured() {
    let run = |rollback| {
        let cache = steep(rollback);
        let mut sequence = cache.sequence();
        (0..255).map(|_| push_steep(&cache, &mut sequence, 1, ONE_PAGE)[0]).collect::<Vec<_>>()
    };
    assert_eq!(run(0), run(40));
}

/// The pages that rows read by their bounds, however tokens are cut into steps, behind windows of any width.
#[test]
fn quest_reads_the_same_however_tokens_are_cut() {
    for seed in 0..scaled(8, 320) {
        let mut rng = Rng(seed);
        let (window, pages, ring) = (30 + rng.below(150), 1 + rng.below(3), 20);
        let read = ReadPages::Quest { pages };
        let experts = 1 + 2 * rng.below(2);
        let config = CacheConfig::new(vec![shape(None), shape(Some(window))], 1 << 22)
            .ring(ring)
            .rollback(16 * rng.below(2))
            .experts(experts, experts.min(2))
            .nan_fill(true)
            .key_bounds(true);
        let (one, cut) = (Cache::new(config.clone()).unwrap(), Cache::new(config.clone()).unwrap());
        let (mut a, mut b) = (one.sequence(), cut.sequence());
        while a.next_position().0 < 400 {
            let n = 1 + rng.below(ring);
            let whole = push(&cut, &mut b, 0, n, read);
            let rows: Vec<Vec<u32>> = (0..n).map(|_| push(&one, &mut a, 0, 1, read)).collect();
            let (out, lse) = ((QUERY_HEADS * V_DIM) as usize, QUERY_HEADS as usize);
            for (layer, whole) in whole.chunks_exact(whole.len() / LAYERS).enumerate() {
                let (outs, lses) = whole.split_at(n as usize * out);
                for (i, row) in rows.iter().enumerate() {
                    let row = &row[layer * (out + lse)..][..out + lse];
                    let same = [&outs[i * out..][..out], &lses[i * lse..][..lse]].concat();
                    assert_eq!(row, same, "{config:?}, seed {seed}, layer {layer}, row {i} of {n}");
                }
            }
        }
    }
}
