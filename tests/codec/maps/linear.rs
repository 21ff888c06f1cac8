//! Maps, and their limits.

use super::*;
use proptest::prelude::*;

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

            // q . x~ is the logit over the stored channels.
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
}
