//! `Attend::fast`: tiles of bf16 pages against the definition in f64, and calls that have the same bits however they are computed.

use crate::tiles::Case;
use half::bf16;
use pikv::lanes::Lanes;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, Rope, Rows, Sequence};
use pikv_core::warp::LANES;
use pikv_lanes::tile::{Tile, pays};
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;

// ---- A block ---------------------------------------------------------------------------------------------------

/// The logits of a row to base 2, `[page][token]`, with the row's query in bf16; `None` for tokens that it does not see.
fn logits(of: &Case, row: usize) -> Vec<Option<f64>> {
    let sight = if of.ring { of.sights[row].1 } else { of.sights[row].0 };
    let sees = |position: u32| {
        let old = position >= sight.floor && (position >= sight.lo || position < sight.sinks);
        old && i64::from(position) <= i64::from(sight.hi)
    };
    let each =
        of.pages.iter().flat_map(|(words, live)| (0..LANES as u32).map(move |lane| (words, *live, lane)));
    each.map(|(words, live, lane)| {
        if live >> lane & 1 == 0 || !sees(words[lane as usize]) {
            return None;
        }
        let mut key = vec![0.0; of.layout.k_dim as usize];
        of.layout.read_key(words, lane, &mut key);
        let q = of.q[row].iter().map(|q| bf16::from_f32(*q).to_f64());
        let score: f64 = q.zip(key).map(|(q, k)| q * f64::from(k)).sum();
        Some(of.softcap.map_or(score, |cap| f64::from(cap) * score.tanh()))
    })
    .collect()
}

/// Exponents, weights, their sums and the weighted sums of values of a tile, against the definition: the weights are those of the rounded
/// queries, and each is rounded to bf16, by at most 2^-8 of it, before it multiplies a value.
#[test]
fn a_tile_has_the_weights_of_rounded_queries_and_the_sums_of_rounded_weights() {
    let mut rng = Rng(0xfa57);
    let (mut tile, mut differ) = (Tile::default(), 0);
    for lanes in Lanes::available().filter(|lanes| lanes.multiplies_bf16()) {
        for case in 0..scaled(60, 2000) {
            let mut one = Case::of(&mut rng, [Dtype::Bf16; 2]);
            let rows = one.q.len();
            if one.rope.is_some() || !pays(rows, lanes.rows()) {
                continue;
            }
            let exact = one.attend(lanes, 0, rows, lanes.rows(), Some(&mut tile));
            one.fast = true;
            let found = one.attend(lanes, 0, rows, lanes.rows(), Some(&mut tile));
            differ += usize::from(bits(&exact) != bits(&found));
            (0..rows).for_each(|row| check(&one, row, &found, case));
        }
    }
    let able = Lanes::available().any(Lanes::multiplies_bf16);
    assert_eq!(differ > 5, able, "{differ} cases are rounded");
}

fn check(of: &Case, row: usize, found: &[f32], case: usize) {
    let (rows, pages, width) = (of.q.len(), of.pages.len(), of.layout.acc_rows() as usize * LANES);
    let (acc, rest) = found.split_at(rows * width);
    let (m, rest) = rest.split_at(rows);
    let (l, raw) = rest.split_at(rows);
    let (acc, raw) = (&acc[row * width..][..width], &raw[row * pages * LANES..][..pages * LANES]);
    let logits = logits(of, row);
    let top = logits.iter().flatten().fold(f64::NEG_INFINITY, |top, x| top.max(*x));
    let close = |x: f32, want: f64, slack: f64| (f64::from(x) - want).abs() <= slack;
    if top == f64::NEG_INFINITY {
        assert_eq!((m[row], l[row]), (f32::NEG_INFINITY, 0.0), "case {case}, row {row}");
        assert!(raw.iter().chain(acc).all(|x| *x == 0.0), "case {case}, row {row}");
        return;
    }
    let exponent = f64::from(m[row]);
    assert!(exponent >= top - 1e-3 && exponent < top + 1.001, "case {case}, row {row}: {exponent} for {top}");
    let weights: Vec<f64> = logits.iter().map(|x| x.map_or(0.0, |x| (x - exponent).exp2())).collect();
    for (at, (x, want)) in raw.iter().zip(&weights).enumerate() {
        assert!(close(*x, *want, 2e-4 * want + 1e-30), "case {case}, row {row}, token {at}: {x} for {want}");
    }
    let sum: f64 = weights.iter().sum();
    assert!(close(l[row], sum, 2e-4 * sum), "case {case}, row {row}: {} for {sum}", l[row]);
    let (mut sums, mut sizes) = (vec![0.0; of.layout.v_dim as usize], vec![0.0; of.layout.v_dim as usize]);
    for (at, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
        let mut value = vec![0.0; sums.len()];
        of.layout.read_value(&of.pages[at / LANES].0, (at % LANES) as u32, &mut value);
        for ((sum, size), x) in sums.iter_mut().zip(&mut sizes).zip(value) {
            (*sum, *size) = (*sum + weight * f64::from(x), *size + weight * f64::from(x.abs()));
        }
    }
    for (channel, (want, size)) in sums.into_iter().zip(sizes).enumerate() {
        let x = acc[place(channel)];
        let slack = (1.0 / 256.0 + 3e-4) * size + 1e-30;
        assert!(close(x, want, slack), "case {case}, row {row}, channel {channel}: {x} for {want}");
    }
}

/// Place of a channel among a row's sums: even and odd channels lie in rows of lanes of their own.
fn place(channel: usize) -> usize {
    let word = channel / 2;
    (word / LANES * 2 + channel % 2) * LANES + word % LANES
}

// ---- A call ----------------------------------------------------------------------------------------------------

/// 396 rows of a group of 6: in items of 64 the last 12 would be exact, in items of 60 none.
const NEWEST: u32 = 66;

fn grown(layer: LayerShape, lanes: Lanes) -> (Cache, Sequence) {
    let config = CacheConfig::new(vec![layer], 64 << 20).ring(64).sinks(4).rollback(NEWEST).nan_fill(true);
    let cache = Cache::new(config.lanes(lanes)).unwrap();
    let mut sequence = cache.sequence();
    for n in [300, 50, 61] {
        let [k, v] = [1, 2].map(|salt| noise(salt + u64::from(n), n as usize * 128));
        let mut step = cache.begin([(&mut sequence, n)]).unwrap();
        step.append(0, &k, &v).unwrap();
        step.commit().unwrap();
    }
    (cache, sequence)
}

fn attend(cache: &Cache, sequence: &Sequence, threads: usize, options: &Attend) -> (Vec<f32>, f32) {
    let rows = [Rows::new(sequence, Position(sequence.next_position().0 - NEWEST), NEWEST)];
    let heads = cache.config().layers[0].query_heads as usize;
    let q: Vec<f32> = noise(9, NEWEST as usize * heads * 64).iter().map(|x| 4.0 * x).collect();
    let (mut out, mut mass) = (vec![f32::NAN; q.len()], Vec::new());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| cache.attend(0, &rows, &q, options, AttendOutput::new(&mut out)).unwrap());
    let mut again = vec![f32::NAN; q.len()];
    let to = AttendOutput::new(&mut again).mass(&mut mass);
    pool.install(|| cache.attend(0, &rows, &q, options, to).unwrap());
    assert_eq!(bits(&out), bits(&again), "with masses");
    (out, mass.iter().map(|page| page.total()).sum())
}

/// Equal bits for any number of threads and any split, near those without rounding; the weights of a row still sum to 1.
#[test]
fn a_fast_call_has_the_same_bits_on_any_threads_and_split() {
    for lanes in Lanes::available() {
        // Groups of 4 and of 6: items of 64 and of 60 rows.
        let group = |heads| LayerShape::new(2, heads, 64, Dtype::Bf16);
        for layer in [group(8), group(8).window(90), group(12)] {
            let (cache, sequence) = grown(layer, lanes);
            let exact = Attend::new(0.125).softcap(20.0);
            let (want, _) = attend(&cache, &sequence, 1, &exact);
            let fast = exact.fast(true);
            let (first, mass) = attend(&cache, &sequence, 1, &fast);
            assert_eq!(bits(&first) != bits(&want), lanes.multiplies_bf16(), "{}", lanes.name());
            let off = first.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(first.iter().all(|x| x.is_finite()) && off < 0.01, "{off}");
            assert!((mass - (NEWEST * layer.query_heads) as f32).abs() < 0.5, "{mass}");
            for (threads, split) in [(2, None), (3, Some(1)), (1, Some(2))] {
                let options = split.map_or(fast, |split| fast.split(split));
                assert_eq!(bits(&attend(&cache, &sequence, threads, &options).0), bits(&first), "{split:?}");
            }
        }
    }
}

/// Pages in other dtypes, keys that are rotated when read, and calls of few rows have the bits that they have without `fast`.
#[test]
fn other_calls_are_not_rounded() {
    let plain = LayerShape::new(2, 8, 64, Dtype::F32);
    let turned = LayerShape::new(2, 8, 64, Dtype::Bf16).rope(Rope::new(10_000.0, 64));
    for layer in [plain, LayerShape::new(2, 8, 64, Dtype::F16), turned] {
        let (cache, sequence) = grown(layer, Lanes::detect());
        let exact = Attend::new(0.125);
        let [want, found] = [exact, exact.fast(true)].map(|options| attend(&cache, &sequence, 2, &options).0);
        assert_eq!(bits(&want), bits(&found), "{layer:?}");
    }
    let (cache, sequence) = grown(LayerShape::new(2, 8, 64, Dtype::Bf16), Lanes::detect());
    let last = [Rows::new(&sequence, Position(sequence.next_position().0 - 1), 1)];
    let [want, found] = [false, true].map(|fast| {
        let mut out = vec![0.0; 8 * 64];
        let options = Attend::new(0.125).fast(fast);
        cache.attend(0, &last, &noise(3, 512), &options, AttendOutput::new(&mut out)).unwrap();
        bits(&out)
    });
    assert_eq!(want, found);
}
