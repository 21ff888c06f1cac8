//! Maps, crops, token choices and budgets, each against a slow form of its definition.

use pikv_core::rope::{Pairs, Rope};
use pikv_host::codec::*;
use proptest::prelude::*;

/// Values of about unit size, from a seed.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|_| unit(pikv_core::hash::next(&mut state))).collect()
}

fn dense(wide: u32, narrow: u32, bias: bool, seed: u64) -> Map {
    let n = (wide * narrow) as usize;
    let bias = bias.then(|| noise(seed + 2, wide as usize));
    Map::new(wide, narrow, noise(seed, n), noise(seed + 1, n), bias).unwrap()
}

/// One output: the chain that the documentation names.
fn chain(weights: impl Iterator<Item = f32>, x: &[f32]) -> f32 {
    weights.zip(x).fold(0.0, |sum, (w, x)| x.mul_add(w, sum))
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

const SHAPES: [(u32, u32); 10] =
    [(1, 1), (2, 1), (33, 7), (64, 32), (64, 64), (80, 33), (96, 95), (128, 64), (200, 100), (256, 256)];

#[test]
fn a_map_does_one_chain_for_each_output() {
    for (case, (wide, narrow)) in SHAPES.into_iter().enumerate() {
        for with in [false, true] {
            let map = dense(wide, narrow, with, 100 + case as u64);
            let (w, n) = (wide as usize, narrow as usize);
            let (encode, decode) = (map.encode(), map.decode());
            let bias = map.bias().map_or(vec![0.0; w], <[f32]>::to_vec);
            let (x, q) = (noise(7, w), noise(8, w));
            let (mut stored, mut folded, mut back) =
                (vec![f32::NAN; n], vec![f32::NAN; n], vec![f32::NAN; w]);
            map.encode_row(&x, &mut stored);
            map.fold(&q, &mut folded);
            map.decode_row(&stored, &mut back);
            let less: Vec<f32> = x.iter().zip(&bias).map(|(x, b)| if with { x - b } else { *x }).collect();
            let want: Vec<f32> = encode.chunks(w).map(|row| chain(row.iter().copied(), &less)).collect();
            assert_eq!(bits(&stored), bits(&want), "{wide} {narrow}");
            let want: Vec<f32> =
                (0..n).map(|c| chain(decode.iter().skip(c).step_by(n).copied(), &q)).collect();
            assert_eq!(bits(&folded), bits(&want), "{wide} {narrow}");
            let plain = decode.chunks(n).map(|row| chain(row.iter().copied(), &stored));
            let want: Vec<f32> = plain.zip(&bias).map(|(x, b)| if with { x + b } else { x }).collect();
            assert_eq!(bits(&back), bits(&want), "{wide} {narrow}");
            assert_eq!(map.bias_dot(&q).to_bits(), chain(bias.iter().copied(), &q).to_bits());

            // q . x~ is what attention over the stored channels gets.
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let (long, short) = (dot(&q, &back), dot(&folded, &stored) + f64::from(map.bias_dot(&q)));
            let size = 1.0 + dot(&stored, &stored).sqrt() * f64::from(wide);
            assert!((long - short).abs() < 1e-5 * size, "{wide} {narrow}: {long} {short}");
        }
    }
}

#[test]
fn nan_and_infinity_go_through() {
    let map = dense(40, 40, false, 3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut x, mut out) = (noise(1, 40), vec![0.0; 40]);
        x[39] = bad;
        map.encode_row(&x, &mut out);
        assert!(out.iter().all(|x| !x.is_finite()), "{bad}");
        Map::hadamard(40).unwrap().encode_row(&x, &mut out);
        assert!(out[32..].iter().all(|x| !x.is_finite()) && out[..32].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn a_selection_copies() {
    let map = Map::identity_subset(5, &[4, 1]).unwrap();
    let x = [1.0, -0.0, 3.0, f32::NAN, f32::MIN_POSITIVE / 4.0];
    let (mut stored, mut back) = ([9.0; 2], [9.0; 5]);
    map.encode_row(&x, &mut stored);
    assert_eq!(bits(&stored), bits(&[x[4], -0.0]));
    map.decode_row(&stored, &mut back);
    assert_eq!(bits(&back), bits(&[0.0, -0.0, 0.0, 0.0, x[4]]));
    map.fold(&[1.0, 2.0, 3.0, 4.0, 5.0], &mut stored);
    assert_eq!(stored, [5.0, 2.0]);
    assert_eq!(map.encode().to_vec(), [0., 0., 0., 0., 1., 0., 1., 0., 0., 0.]);
    assert_eq!(map.decode().to_vec(), [0., 0., 0., 1., 0., 0., 0., 0., 1., 0.]);
    assert_eq!((map.channels(), map.bytes(), map.limit(3.5)), (Some(&[4, 1][..]), 8, 3.5));

    let again = |map: &Map| {
        let (encode, decode) = (map.encode().into_owned(), map.decode().into_owned());
        Map::new(map.wide(), map.narrow(), encode, decode, None).unwrap()
    };
    assert_eq!(again(&map), map);
    for wide in [1, 2, 7, 48, 80, 128, 256] {
        let map = Map::hadamard(wide).unwrap();
        let same = again(&map);
        // Odd widths and 1 leave rows as they are: as matrices they pick every channel.
        if wide % 2 == 0 { assert_eq!(same, map) } else { assert!(same.channels().is_some()) }
    }
    // A 1 twice in a column, or a bias, is no selection.
    assert!(Map::new(2, 2, vec![1., 0., 1., 0.], vec![1., 1., 0., 0.], None).unwrap().channels().is_none());
    let biased = Map::new(2, 1, vec![1., 0.], vec![1., 0.], Some(vec![0.5, 2.0])).unwrap();
    assert!(biased.channels().is_none());
}

/// Sylvester's matrix in blocks, by its definition: the sign is the parity of the bits that row and column share.
fn sylvester(wide: usize) -> Vec<f64> {
    let block = 1usize << wide.trailing_zeros();
    let at = |r: usize, c: usize| match (r / block == c / block, ((r % block) & (c % block)).count_ones() % 2)
    {
        (false, _) => 0.0,
        (_, 0) => 1.0 / (block as f64).sqrt(),
        _ => -1.0 / (block as f64).sqrt(),
    };
    (0..wide * wide).map(|i| at(i / wide, i % wide)).collect()
}

#[test]
fn hadamard_is_sylvesters_and_its_own_inverse() {
    for wide in [1u32, 2, 4, 16, 40, 64, 80, 96, 128, 160, 255, 256] {
        let (map, n) = (Map::hadamard(wide).unwrap(), wide as usize);
        let oracle = sylvester(n);
        let apart =
            map.encode().iter().zip(&oracle).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-7, "{wide}: {apart}");
        let x = noise(5, n);
        let (mut there, mut back, mut folded) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        map.encode_row(&x, &mut there);
        map.decode_row(&there, &mut back);
        map.fold(&x, &mut folded);
        assert_eq!(bits(&there), bits(&folded));
        for (row, there) in oracle.chunks(n).zip(&there) {
            let want: f64 = row.iter().zip(&x).map(|(a, b)| a * f64::from(*b)).sum();
            assert!((f64::from(*there) - want).abs() < 2e-6, "{wide}");
        }
        assert!(x.iter().zip(&back).all(|(a, b)| (a - b).abs() < 2e-6), "{wide}");

        let block = 1u32 << wide.trailing_zeros();
        if block.trailing_zeros().is_multiple_of(2) {
            let whole: Vec<f32> = x.iter().map(|x| (x * 30_000.0).round()).collect();
            map.encode_row(&whole, &mut there);
            map.decode_row(&there, &mut back);
            assert_eq!(bits(&back), bits(&whole), "{wide}");
        }
    }
    let mut spread = [0.0; 64];
    let mut outlier = [0.0; 64];
    outlier[17] = 8.0;
    Map::hadamard(64).unwrap().encode_row(&outlier, &mut spread);
    assert!(spread.iter().all(|x| x.abs() == 1.0));
}

#[test]
fn maps_that_are_none_are_refused() {
    let new = |w: u32, n: u32, e: usize, d: usize, b: Option<usize>| {
        Map::new(w, n, vec![0.5; e], vec![0.5; d], b.map(|b| vec![0.5; b])).unwrap_err().to_string()
    };
    for (w, n) in [(0, 0), (4, 0), (4, 5), (257, 1), (u32::MAX, u32::MAX)] {
        let said = new(w, n, 1, 1, None);
        assert!(said.contains("1..=256") && said.contains(&w.to_string()), "{said}");
    }
    assert_eq!(new(4, 2, 7, 8, None), "encode has 7 values; 8 are needed");
    assert_eq!(new(4, 2, 8, 9, None), "decode has 9 values; 8 are needed");
    assert_eq!(new(4, 2, 8, 8, Some(2)), "bias has 2 values; 4 are needed");
    for (at, what) in ["encode", "decode", "bias"].into_iter().enumerate() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut parts = [vec![0.5; 8], vec![0.5; 8], vec![0.5; 4]];
            parts[at][3] = bad;
            let [encode, decode, bias] = parts;
            let said = Map::new(4, 2, encode, decode, Some(bias)).unwrap_err().to_string();
            assert!(said.starts_with(&format!("{what}[3] is")), "{said}");
        }
    }
    let subset = |wide, channels: &[u32]| Map::identity_subset(wide, channels).unwrap_err();
    assert_eq!(subset(4, &[1, 4]), MapError::Channel { channel: 4, wide: 4 });
    assert_eq!(subset(4, &[1, 2, 1]), MapError::Channel { channel: 1, wide: 4 });
    assert_eq!(subset(4, &[]), MapError::Width { wide: 4, narrow: 0 });
    assert!(Map::hadamard(0).is_err() && Map::hadamard(257).is_err());
    assert!(lora_plus(4, 2, f32::NAN, vec![0.5; 8], vec![0.5; 8], vec![0.0; 4]).is_err());
    assert!(lora_plus(4, 2, 0.0, vec![0.5; 8], vec![0.5; 8], vec![0.0; 4]).is_err());
}

proptest! {
    #[test]
    fn no_stored_channel_passes_the_limit(
        (wide, narrow) in (1u32..=64).prop_flat_map(|w| (Just(w), 1..=w)),
        bias in any::<bool>(), hadamard in any::<bool>(), seed in any::<u64>(), top in 0.1f32..1e6,
    ) {
        let map = if hadamard { Map::hadamard(wide).unwrap() } else { dense(wide, narrow, bias, seed >> 8) };
        let limit = map.limit(top);
        let (w, n) = (map.wide() as usize, map.narrow() as usize);
        let encode = map.encode().into_owned();
        let mut reached = 0f32;
        for row in encode.chunks(w) {
            // The worst row of channels: each with the sign of its weight, against that of the bias.
            for sign in [1.0f32, -1.0] {
                for size in [limit, limit * 1.0001] {
                    let x: Vec<f32> = row.iter().map(|e| (sign * size).copysign(e * sign)).collect();
                    let mut stored = vec![0.0; n];
                    map.encode_row(&x, &mut stored);
                    let most = stored.iter().fold(0f32, |m, s| m.max(s.abs()));
                    if size == limit && limit > 0.0 { prop_assert!(most <= top, "{most} > {top}") }
                    reached = reached.max(most);
                }
            }
        }
        // Without a bias the bound is sharp.
        if map.bias().is_none() && encode.iter().any(|e| *e != 0.0) { prop_assert!(reached > top * 0.9999, "{reached} {top}") }
    }

    #[test]
    fn chunks_by_a_slow_choice(scores in prop::collection::vec(-4i8..4, 0..40), chunk in 1u32..6, budget in 0u32..50) {
        let scores: Vec<f32> = scores.into_iter().map(|s| f32::from(s) / 2.0).collect();
        let n = scores.len();
        let got = ChunkKv { chunk, budget }.keep(&scores);
        if (budget as usize) < n.min(chunk as usize) {
            let refused = matches!(got, Err(SelectError::Setting { name: "budget", .. }));
            prop_assert!(refused);
            return Ok(());
        }
        let mut keep = vec![false; n];
        let mut left = budget as usize;
        let mut open: Vec<Vec<usize>> = (0..n).collect::<Vec<_>>().chunks(chunk as usize).map(<[usize]>::to_vec).collect();
        while !open.is_empty() {
            let mean = |c: &[usize]| c.iter().map(|t| f64::from(scores[*t])).sum::<f64>() / c.len() as f64;
            let mut best = 0;
            for i in 1..open.len() {
                if mean(&open[i]) > mean(&open[best]) { best = i }
            }
            let taken = open.remove(best);
            if taken.len() <= left {
                left -= taken.len();
                taken.into_iter().for_each(|t| keep[t] = true);
            }
        }
        prop_assert_eq!(got.unwrap(), keep);
    }

    #[test]
    fn fastv_by_counting(scores in prop::collection::vec(0u8..6, 0..60), ratio in 0.0f64..1.0, sinks in 0u32..8, window in 0u32..8, layer in 0u32..5) {
        let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
        let n = scores.len();
        let got = FastV { ratio, from: 2, sinks, window }.keep(layer, &scores).unwrap();
        let open: Vec<usize> = (sinks as usize..n.saturating_sub(window as usize)).collect();
        let drop = if layer < 2 { 0 } else { (ratio * open.len() as f64) as usize };
        for t in 0..n {
            // How many would go before t: the less attended, and of equals the newer.
            let before = open.iter().filter(|o| scores[**o] < scores[t] || (scores[**o] == scores[t] && **o > t)).count();
            prop_assert_eq!(got[t], !(open.contains(&t) && before < drop), "token {}", t);
        }
    }

    #[test]
    fn pyramids_add_up(layers in 1u32..130, capacity in 1u32..5000, window in 0u32..64, beta in 1.0f64..40.0, scores in prop::collection::vec(0u8..9, 0..80), at in any::<prop::sample::Index>()) {
        let pyramid = PyramidKv { capacity, window, beta };
        if capacity <= window {
            prop_assert_eq!(pyramid.budgets(layers), Err(SelectError::Capacity { capacity, window }));
            return Ok(());
        }
        let (shares, budgets) = (pyramid.shares(layers).unwrap(), pyramid.budgets(layers).unwrap());
        prop_assert!((shares.iter().sum::<f64>() / f64::from(layers) - f64::from(capacity)).abs() < 1e-3);
        prop_assert_eq!(budgets.iter().map(|b| u64::from(*b)).sum::<u64>(), u64::from(layers) * u64::from(capacity));
        for (l, (share, budget)) in shares.iter().zip(&budgets).enumerate() {
            prop_assert!((share - f64::from(*budget)).abs() <= 1.0 && *budget >= window);
            if layers > 1 {
                let (c, w) = (f64::from(capacity), f64::from(window));
                let least = (c - w) / beta;
                let most = 2.0 * (c - w) - least;
                let want = most - l as f64 * (most - least) / f64::from(layers - 1) + w;
                prop_assert!((share - want).abs() < 1e-9 * c);
            }
        }
        let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
        let (n, layer) = (scores.len(), at.index(layers as usize));
        let keep = pyramid.keep(layer as u32, layers, &scores).unwrap();
        let old = n.saturating_sub(window as usize);
        for t in 0..n {
            let ahead = (0..old).filter(|o| scores[*o] > scores[t] || (scores[*o] == scores[t] && *o < t)).count();
            prop_assert_eq!(keep[t], t >= old || ahead < (budgets[layer] - window) as usize);
        }
    }

    #[test]
    fn hybrid_against_every_choice(
        heads in prop::collection::vec((0u8..4, prop::collection::vec((0u64..12, 0u32..40), 1..4)), 0..5),
        budget in 0u64..50,
    ) {
        let heads: Vec<HeadCodings> = heads.into_iter().map(|(importance, codings)| HeadCodings {
            importance: f64::from(importance) / 2.0,
            codings: codings.into_iter().map(|(bytes, error)| Cost { bytes, error: f64::from(error) }).collect(),
        }).collect();
        let best = every(&heads, budget);
        match hybrid(&heads, budget) {
            Ok(found) => {
                let best = best.unwrap();
                let (bytes, error) = cost(&heads, &found.chosen);
                prop_assert_eq!(bytes, found.bytes);
                prop_assert!(bytes <= budget && (error - found.error).abs() < 1e-9);
                prop_assert!(found.bound <= best + 1e-9 && best <= found.error + 1e-9, "{:?} {}", found, best);
            }
            Err(e) => { prop_assert!(best.is_none(), "{}", e); }
        }
    }

    #[test]
    fn hybrid_is_exact_on_convex_codings_in_equal_steps(
        heads in prop::collection::vec((1u8..5, prop::collection::vec(0u32..9, 1..5)), 1..5), budget in 0u64..60,
    ) {
        // Gains that fall from step to step of 3 bytes.
        let heads: Vec<HeadCodings> = heads.into_iter().map(|(importance, mut gains)| {
            gains.sort_unstable();
            let mut error = 0.0;
            let mut codings = vec![Cost { bytes: 3 * gains.len() as u64, error }];
            for (i, gain) in gains.iter().enumerate() {
                error += f64::from(*gain);
                codings.push(Cost { bytes: 3 * (gains.len() - 1 - i) as u64, error });
            }
            HeadCodings { importance: f64::from(importance), codings }
        }).collect();
        prop_assert_eq!(hybrid(&heads, budget).unwrap().error, every(&heads, budget).unwrap());
    }
}

fn cost(heads: &[HeadCodings], chosen: &[usize]) -> (u64, f64) {
    let picked = || heads.iter().zip(chosen).map(|(h, i)| (h.importance, h.codings[*i]));
    (picked().map(|(_, c)| c.bytes).sum(), picked().map(|(i, c)| i * c.error).sum())
}

/// The least error of all choices within the budget.
fn every(heads: &[HeadCodings], budget: u64) -> Option<f64> {
    let mut choices = vec![vec![]];
    for head in heads {
        choices = choices
            .iter()
            .flat_map(|c: &Vec<usize>| (0..head.codings.len()).map(move |i| [&c[..], &[i]].concat()))
            .collect();
    }
    let errors = choices.iter().map(|c| cost(heads, c)).filter(|(bytes, _)| *bytes <= budget);
    errors.map(|(_, error)| error).min_by(f64::total_cmp)
}

#[test]
fn pyramid_budgets_of_real_depths() {
    for layers in [4u32, 32, 64, 128] {
        for capacity in [9, 64, 128, 2048] {
            let pyramid = PyramidKv::new(capacity);
            let budgets = pyramid.budgets(layers).unwrap();
            assert_eq!(budgets.iter().sum::<u32>(), layers * capacity);
            assert!(budgets.windows(2).all(|b| b[0] >= b[1]));
            let mean = pyramid.shares(layers).unwrap().iter().sum::<f64>() / f64::from(layers);
            assert!((mean - f64::from(capacity)).abs() < 1e-3);
        }
    }
    assert_eq!(PyramidKv::new(77).budgets(1).unwrap(), [77]);
    assert_eq!(PyramidKv { capacity: 10, window: 2, beta: 1.0 }.budgets(3).unwrap(), [10, 10, 10]);
    assert!(PyramidKv { beta: 0.5, ..PyramidKv::new(77) }.budgets(4).is_err());
    assert!(PyramidKv { beta: f64::NAN, ..PyramidKv::new(77) }.budgets(4).is_err());
    assert!(PyramidKv::new(77).budgets(0).is_err());
    assert!(PyramidKv::new(u32::MAX).budgets(4).is_err());
    let said = PyramidKv::new(8).budgets(4).unwrap_err().to_string();
    assert_eq!(said, "a capacity of 8 tokens a layer with a window of 8; it must be more than the window");
    assert!(PyramidKv::new(77).keep(4, 4, &[]).is_err());
}

#[test]
fn scores_that_are_no_numbers_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let scores = [0.5, 0.25, bad];
        let refused =
            |r: Result<Vec<bool>, SelectError>| matches!(r, Err(SelectError::Score { token: 2, .. }));
        assert!(refused(ChunkKv { chunk: 2, budget: 2 }.keep(&scores)));
        assert!(refused(FastV::new(0.5).keep(0, &scores)));
        assert!(refused(PyramidKv::new(16).keep(0, 2, &scores)));
        assert!(pyramid(&scores, 1, 2).is_err());
    }
    assert!(FastV::new(1.0).keep(2, &[0.5]).is_err() && FastV::new(f64::NAN).keep(2, &[0.5]).is_err());
    assert!(ChunkKv { chunk: 0, budget: 2 }.keep(&[0.5]).is_err());
    // Zeros of both signs are one score.
    let keep = ChunkKv { chunk: 1, budget: 1 }.keep(&[-0.0, 0.0]).unwrap();
    assert_eq!(keep, [true, false]);
    let head = |importance, error| [HeadCodings { importance, codings: vec![Cost { bytes: 1, error }] }];
    for bad in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(hybrid(&head(bad, 1.0), 9).is_err() && hybrid(&head(1.0, bad), 9).is_err());
    }
    assert!(hybrid(&[HeadCodings { importance: 1.0, codings: vec![] }], 9).is_err());
    assert_eq!(hybrid(&head(1.0, 1.0), 0), Err(SelectError::Budget { budget: 0, needed: 1 }));
}

#[test]
fn the_pyramid_in_the_letter_and_its_bound() {
    for (tokens, dim, levels) in [(1, 3, 2), (8, 4, 3), (13, 5, 4), (32, 2, 31), (0, 2, 1)] {
        let rows = noise(tokens as u64, tokens * dim);
        let found = pyramid(&rows, dim, levels).unwrap();
        let mut bound = 0.0;
        for l in 0..levels {
            // P_l as a matrix over tokens.
            let run = 1usize << (l + 1);
            let weight = |t: usize, u: usize| {
                let (start, end) = (t / run * run, tokens.min((t / run + 1) * run));
                if (start..end).contains(&u) { 1.0 / (end - start) as f64 } else { 0.0 }
            };
            let rebuilt = found.reconstruct(l).unwrap();
            let mut lost = 0.0;
            for t in 0..tokens {
                for c in 0..dim {
                    let mean: f64 = (0..tokens).map(|u| weight(t, u) * f64::from(rows[u * dim + c])).sum();
                    lost += (mean - f64::from(rows[t * dim + c])).powi(2);
                    assert!((mean - f64::from(rebuilt[t * dim + c])).abs() < 1e-7);
                }
            }
            assert!((lost - found.lost[l as usize]).abs() <= 1e-12 * (1.0 + lost));
            assert_eq!(found.levels[l as usize].len(), tokens.div_ceil(run) * dim);
            bound += lost / 4f64.powi(l as i32);
        }
        assert!((bound - found.bound()).abs() <= 1e-12 * (1.0 + bound));
        for (l, lost) in found.lost.iter().enumerate() {
            assert!(*lost <= found.bound() * 4f64.powi(l as i32) * (1.0 + 1e-12));
        }
    }
    assert!(pyramid(&[1.0; 6], 3, 0).is_err() && pyramid(&[1.0; 6], 3, 32).is_err());
    assert!(pyramid(&[1.0; 7], 3, 1).is_err() && pyramid(&[1.0; 6], 0, 1).is_err());
    assert!(pyramid(&[1.0; 6], 3, 1).unwrap().reconstruct(1).is_err());
}

fn rope(rotary_dim: u32, pairs: Pairs) -> Rope {
    Rope { theta: 1e4, rotary_dim, pairs }
}

/// The best score of all sets of `keep` channels that hold whole pairs.
fn best_crop(wide: usize, keep: u32, rope: Option<Rope>, score: &dyn Fn(&[usize]) -> f64) -> Option<f64> {
    let pairs: Vec<(usize, usize)> =
        rope.iter().flat_map(|r| (0..r.rotary_dim as usize / 2).map(|i| r.pair(i))).collect();
    let sets = (0u32..1 << wide).filter(|s| s.count_ones() == keep);
    let whole = sets.filter(|s| pairs.iter().all(|(a, b)| (s >> a) & 1 == (s >> b) & 1));
    let left = |s: u32| -> Vec<usize> { (0..wide).filter(|c| (s >> c) & 1 == 0).collect() };
    whole.map(|s| score(&left(s))).min_by(f64::total_cmp)
}

#[test]
fn crops_and_prunings_beat_every_other_choice() {
    for seed in 0..12u64 {
        let wide = 5 + seed as usize % 5;
        let of =
            |s: u64| -> Vec<f64> { noise(seed * 7 + s, wide).iter().map(|x| f64::from(x * x)).collect() };
        let (q, k) = (of(1), of(2));
        let ropes = [
            None,
            Some(rope(4, Pairs::Halves)),
            Some(rope(wide as u32 & !1, Pairs::Halves)),
            Some(rope(4, Pairs::Neighbours)),
        ];
        for rope in ropes {
            let partner = |c: usize| {
                let mut pairs = rope.iter().flat_map(|r| (0..r.rotary_dim as usize / 2).map(|i| r.pair(i)));
                pairs.find_map(|(a, b)| if a == c { Some(b) } else { (b == c).then_some(a) })
            };
            let energy = |left: &[usize]| left.iter().map(|c| k[*c]).sum::<f64>();
            // Averages over a pair are what its two channels have once rotations have been through them.
            let even = |x: &[f64], c: usize| partner(c).map_or(x[c], |p| (x[c] + x[p]) / 2.0);
            let product = |left: &[usize]| left.iter().map(|c| even(&q, *c) * even(&k, *c)).sum::<f64>();
            for keep in 0..=wide as u32 + 1 {
                let crops = [crop(&k, rope, keep, CropBy::Energy), think(&q, &k, rope, keep)];
                for (found, score) in crops.into_iter().zip([&energy as &dyn Fn(&[usize]) -> f64, &product]) {
                    match (found, best_crop(wide, keep, rope, score).filter(|_| keep > 0)) {
                        (Ok(found), Some(best)) => {
                            assert!((found.tail - best).abs() < 1e-12, "{seed} {rope:?} {keep}");
                            let kept = |c: &usize| found.channels.contains(&(*c as u32));
                            let left: Vec<usize> = (0..wide).filter(|c| !kept(c)).collect();
                            assert!((score(&left) - best).abs() < 1e-12);
                            assert!((0..wide).all(|c| partner(c).is_none_or(|p| kept(&c) == kept(&p))));
                            assert_eq!(found.map.channels(), Some(&found.channels[..]));
                            assert!(found.channels.is_sorted() && found.channels.len() == keep as usize);
                        }
                        (Err(FitError::Keep { .. }), None) => {}
                        other => panic!("{seed} {rope:?} {keep}: {other:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_channels_and_ties() {
    let first = |keep, rope| crop(&[1.0; 10], rope, keep, CropBy::First).map(|c| (c.channels, c.tail));
    assert_eq!(first(3, None), Ok((vec![0, 1, 2], 7.0)));
    assert_eq!(first(4, Some(rope(10, Pairs::Halves))), Ok((vec![0, 1, 5, 6], 6.0)));
    assert_eq!(first(5, Some(rope(8, Pairs::Halves))), Ok((vec![0, 1, 4, 5, 8], 5.0)));
    assert_eq!(first(9, Some(rope(8, Pairs::Halves))), Ok((vec![0, 1, 2, 3, 4, 5, 6, 7, 8], 1.0)));
    assert_eq!(first(4, Some(rope(8, Pairs::Neighbours))), Ok((vec![0, 1, 2, 3], 6.0)));
    let said = first(3, Some(rope(10, Pairs::Halves))).unwrap_err().to_string();
    assert!(said.ends_with("2 or 4 would do"), "{said}");
    let said = first(1, Some(rope(10, Pairs::Halves))).unwrap_err().to_string();
    assert!(said.ends_with(": 2 would do"), "{said}");
    let said = first(99, Some(rope(8, Pairs::Halves))).unwrap_err().to_string();
    assert!(said.ends_with(": 10 would do"), "{said}");
    for rotary in [0, 1, 3, 12] {
        assert!(matches!(first(2, Some(rope(rotary, Pairs::Halves))), Err(FitError::Rotary { .. })));
    }
    let even = think(&[1.0; 6], &[1.0; 6], None, 2).unwrap();
    assert_eq!((even.channels, even.tail), (vec![0, 1], 4.0));
    for bad in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(matches!(crop(&[1.0, bad], None, 1, CropBy::First), Err(FitError::Energy { index: 1, .. })));
        assert!(
            think(&[1.0, bad], &[1.0; 2], None, 1).is_err()
                && think(&[1.0; 2], &[1.0, bad], None, 1).is_err()
        );
    }
    assert!(think(&[1.0; 3], &[1.0; 2], None, 1).is_err() && crop(&[], None, 0, CropBy::First).is_err());
}

/// The tail of a crop is what its rows lose; a crop keeps no memory of the rest.
#[test]
fn a_crops_tail_is_its_residual() {
    let rows = noise(77, 50 * 12);
    let mut moments = Moments::new(12).unwrap();
    moments.observe(&rows).unwrap();
    let cropped = crop(&moments.energy(), Some(rope(8, Pairs::Halves)), 7, CropBy::Energy).unwrap();
    let mut lost = 0.0;
    for row in rows.chunks(12) {
        let (mut stored, mut back) = ([0.0; 7], [0.0; 12]);
        cropped.map.encode_row(row, &mut stored);
        cropped.map.decode_row(&stored, &mut back);
        lost += row.iter().zip(back).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    }
    assert!((cropped.tail / lost - 1.0).abs() < 1e-6);
    assert!((moments.residual(&cropped.map).unwrap() / lost - 1.0).abs() < 1e-6);
}
