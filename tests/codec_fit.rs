//! Fits against slow forms in f64, and the file that keeps them.

use pikv_core::rope::{Pairs, Rope};
use pikv_host::codec::*;
use proptest::prelude::*;
use std::sync::LazyLock;

/// Values of about unit size, from a seed.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|_| unit(pikv_core::hash::next(&mut state))).collect()
}

/// Rows around `mean` whose channels are mixed and fade: channel directions of falling size.
fn rows(seed: u64, n: usize, d: usize, mean: f32) -> Vec<f32> {
    let mix = noise(seed ^ 0xabc, d * d);
    let plain = noise(seed, n * d);
    let shift = noise(seed ^ 0xdef, d);
    let mut out = Vec::with_capacity(n * d);
    for row in plain.chunks(d) {
        for c in 0..d {
            let x: f32 = (0..d).map(|k| row[k] * mix[k * d + c] * 0.8f32.powi(k as i32)).sum();
            out.push(x + mean * shift[c]);
        }
    }
    out
}

fn moments(rows: &[f32], d: usize) -> Moments {
    let mut m = Moments::new(d as u32).unwrap();
    m.observe(rows).unwrap();
    m
}

/// `sum (x - center)(x - center)^T` by its definition.
fn second(rows: &[f32], d: usize, center: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; d * d];
    for row in rows.chunks(d) {
        for i in 0..d {
            for j in 0..d {
                out[i * d + j] += (f64::from(row[i]) - center[i]) * (f64::from(row[j]) - center[j]);
            }
        }
    }
    out
}

/// Eigenvalues of a symmetric matrix by Jacobi's rotations, falling.
fn jacobi(mut a: Vec<f64>, d: usize) -> Vec<f64> {
    for _ in 0..60 {
        for p in 0..d {
            for q in p + 1..d {
                let apq = a[p * d + q];
                if apq == 0.0 {
                    continue;
                }
                let theta = (a[q * d + q] - a[p * d + p]) / (2.0 * apq);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let t = if theta == 0.0 { 1.0 } else { t };
                let (c, s) = (1.0 / (t * t + 1.0).sqrt(), t / (t * t + 1.0).sqrt());
                for k in 0..d {
                    let (x, y) = (a[k * d + p], a[k * d + q]);
                    (a[k * d + p], a[k * d + q]) = (c * x - s * y, s * x + c * y);
                }
                for k in 0..d {
                    let (x, y) = (a[p * d + k], a[q * d + k]);
                    (a[p * d + k], a[q * d + k]) = (c * x - s * y, s * x + c * y);
                }
            }
        }
    }
    let mut values: Vec<f64> = (0..d).map(|i| a[i * d + i]).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    values
}

/// `sum |x - decode encode (x - bias) - bias|^2`, row by row in f64.
fn residual(rows: &[f32], map: &Map) -> f64 {
    let (w, n) = (map.wide() as usize, map.narrow() as usize);
    let (encode, decode) = (map.encode(), map.decode());
    let bias = map.bias().map_or(vec![0.0; w], <[f32]>::to_vec);
    let mut lost = 0.0;
    for row in rows.chunks(w) {
        let x: Vec<f64> = row.iter().zip(&bias).map(|(x, b)| f64::from(*x) - f64::from(*b)).collect();
        let dot = |a: &[f32], b: &[f64]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum::<f64>();
        let stored: Vec<f64> = encode.chunks(w).map(|e| dot(e, &x)).collect();
        lost += decode.chunks(n).zip(&x).map(|(d, x)| (x - dot(d, &stored)).powi(2)).sum::<f64>();
    }
    lost
}

fn near(a: f64, b: f64, relative: f64) -> bool {
    (a - b).abs() <= relative * a.abs().max(b.abs())
}

#[test]
fn svd_loses_its_tail_and_nothing_more() {
    for (d, n, ranks) in
        [(1, 5, vec![1]), (6, 40, vec![1, 3, 6]), (24, 200, vec![4, 12, 20]), (64, 300, vec![16, 32])]
    {
        let x = rows(d as u64, n, d, 1.0);
        let (m, zero) = (moments(&x, d), vec![0.0; d]);
        let oracle = jacobi(second(&x, d, &zero), d);
        let energy: f64 = oracle.iter().sum();
        for rank in ranks {
            let found = svd(&m, rank).unwrap();
            let want: f64 = oracle[rank as usize..].iter().sum();
            assert!((found.tail - want).abs() <= 1e-12 * energy, "{d} {rank}");
            assert!(found.spectrum.iter().zip(&oracle).all(|(a, b)| (a - b).abs() <= 1e-12 * energy));
            let lost = residual(&x, &found.map);
            if rank < d as u32 {
                println!(
                    "d {d} rank {rank}: tail {want:.6e}, residual {lost:.6e}, apart {:.1e}",
                    lost / want - 1.0
                );
                assert!(near(lost, want, 1e-5), "{d} {rank}: {lost} {want}");
            } else {
                assert!(lost <= 1e-12 * energy);
            }
            assert!((m.residual(&found.map).unwrap() - lost).abs() <= 1e-12 * energy);
            // Storing and reading in f32 loses no more than rounding beside that.
            let mut f32s = 0.0;
            for row in x.chunks(d) {
                let (mut stored, mut back) = (vec![0.0; rank as usize], vec![0.0; d]);
                found.map.encode_row(row, &mut stored);
                found.map.decode_row(&stored, &mut back);
                f32s += row.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            }
            assert!((f32s - want).abs() <= 1e-5 * want + 1e-10 * energy, "{d} {rank}");
            // One matrix serves as the other's transpose; 1 by 1 it is no matrix at all.
            assert_eq!(found.map.bytes(), if d == 1 { 4 } else { 8 * u64::from(rank) * d as u64 });
        }
    }
    let m = moments(&rows(1, 9, 4, 0.0), 4);
    assert_eq!(svd(&m, 0), Err(FitError::Rank { rank: 0, dim: 4 }));
    assert!(svd(&m, 5).unwrap_err().to_string().contains("1..=4"));
    assert!(matches!(svd(&Moments::new(4).unwrap(), 2), Err(FitError::TooFew { .. })));
    // Rows of zeros have a basis too.
    assert_eq!(svd(&moments(&[0.0; 12], 4), 2).unwrap().tail, 0.0);
}

#[test]
fn a_given_projector_equals_svd_only_in_its_subspace() {
    let (d, r) = (16usize, 5usize);
    let x = rows(3, 120, d, 0.5);
    let m = moments(&x, d);
    let best = svd(&m, r as u32).unwrap();
    let (b, energy) = (best.map.encode().into_owned(), best.spectrum.iter().sum::<f64>());
    // The same subspace in another basis: down = A B^T, up = B A^-1, with A lower triangular with ones, and its inverse.
    let a = |i: usize, k: usize| {
        if i == k {
            1.0
        } else if i == k + 1 {
            0.5
        } else {
            0.0
        }
    };
    let inverse = |i: usize, k: usize| if i >= k { (-0.5f32).powi((i - k) as i32) } else { 0.0 };
    let mut down = vec![0.0; r * d];
    let mut up = vec![0.0; d * r];
    for i in 0..r {
        for c in 0..d {
            down[i * d + c] = (0..r).map(|k| a(i, k) * b[k * d + c]).sum();
            up[c * r + i] = (0..r).map(|k| b[k * d + c] * inverse(k, i)).sum();
        }
    }
    let same = lora(d as u32, r as u32, down.clone(), up.clone()).unwrap();
    assert!(near(m.residual(&same).unwrap(), best.tail, 1e-5));
    for row in x.chunks(d) {
        let through = |map: &Map| {
            let (mut stored, mut back) = (vec![0.0; r], vec![0.0; d]);
            map.encode_row(row, &mut stored);
            map.decode_row(&stored, &mut back);
            back
        };
        assert!(through(&same).iter().zip(through(&best.map)).all(|(a, b)| (a - b).abs() < 1e-4));
    }
    // Another subspace, orthonormal as well: the directions after the best.
    let all = svd(&m, d as u32).unwrap().map.encode().into_owned();
    let other = &all[d..(r + 1) * d];
    let back = (0..d).flat_map(|c| other.iter().skip(c).step_by(d).copied()).collect();
    let worse = m.residual(&lora(d as u32, r as u32, other.to_vec(), back).unwrap()).unwrap();
    assert!(worse > best.tail + 1e-3 * energy);
    // A projector along, not across: the same encoder, with a decoder that is off.
    up[0] += 0.25;
    let off = lora(d as u32, r as u32, down, up).unwrap();
    assert!(m.residual(&off).unwrap() > best.tail + 1e-6 * energy);
    assert!(near(m.residual(&off).unwrap(), residual(&x, &off), 1e-9));
}

#[test]
fn lora_plus_takes_the_mean_out() {
    let (d, r) = (20usize, 4u32);
    let x = rows(5, 150, d, 3.0);
    let m = moments(&x, d);
    let found = fit_lora_plus(&m, r).unwrap();
    let bias: Vec<f64> = found.map.bias().unwrap().iter().map(|b| f64::from(*b)).collect();
    let mean: Vec<f64> =
        (0..d).map(|c| x.iter().skip(c).step_by(d).map(|x| f64::from(*x)).sum::<f64>() / 150.0).collect();
    assert!(bias.iter().zip(&mean).all(|(a, b)| (a - b).abs() < 1e-6));
    let oracle = jacobi(second(&x, d, &mean), d);
    let want: f64 = oracle[r as usize..].iter().sum();
    assert!(near(found.tail, want, 1e-9));
    assert!(near(residual(&x, &found.map), want, 1e-5));
    assert!(near(m.residual(&found.map).unwrap(), want, 1e-5));
    assert!(found.tail < svd(&m, r).unwrap().tail);

    // The scale is alpha / sqrt(rank): with W_u = B / s any alpha gives this map.
    for alpha in [0.5f32, 2.0, 16.0] {
        let s = alpha / 2.0;
        let up = found.map.decode().iter().map(|x| x / s).collect();
        let (down, bias) = (found.map.encode().into_owned(), found.map.bias().unwrap().to_vec());
        let map = lora_plus(d as u32, r, alpha, down, up, bias).unwrap();
        assert_eq!(map.decode(), found.map.decode());
    }
    let three = lora_plus(2, 1, 3.0, vec![1.0, 0.0], vec![1.0, 0.0], vec![0.5, 2.0]).unwrap();
    let (mut stored, mut back) = ([0.0], [0.0; 2]);
    three.encode_row(&[1.5, 7.0], &mut stored);
    three.decode_row(&stored, &mut back);
    assert_eq!((stored, back), ([1.0], [3.5, 2.0]));
}

#[test]
fn a_block_loses_its_own_tail() {
    for (n, d, r) in [(32, 24, 6), (5, 16, 5), (32, 64, 8)] {
        let x = rows(n as u64, n, d, 1.0);
        let block = block_pca(&x, d as u32, r).unwrap();
        let want: f64 = jacobi(second(&x, d, &vec![0.0; d]), d)[r as usize..].iter().sum();
        let (r, mut lost, mut energy) = (r as usize, 0.0, 0.0);
        for (row, coefficients) in x.chunks(d).zip(block.coefficients.chunks(r)) {
            for (c, x) in row.iter().map(|x| f64::from(*x)).enumerate() {
                let back: f64 =
                    (0..r).map(|k| f64::from(coefficients[k]) * f64::from(block.basis[k * d + c])).sum();
                lost += (x - back).powi(2);
                energy += x * x;
            }
        }
        assert!((block.tail - want).abs() <= 1e-12 * energy);
        assert!((lost - want).abs() <= 1e-5 * want + 1e-10 * energy, "{n} {d}: {lost} {want}");
        assert_eq!(block.bytes(2), 2 * (r * (n + d)) as u64);
        // The basis of the block beats that of other rows.
        let other = svd(&moments(&rows(99, 60, d, 1.0), d), r as u32).unwrap();
        assert!(block.tail <= residual(&x, &other.map) + 1e-9 * energy);
    }
    assert!(block_pca(&[1.0; 7], 3, 1).is_err() && block_pca(&[], 3, 1).is_err());
    assert!(block_pca(&[f32::NAN; 6], 3, 1).is_err());
}

#[test]
fn a_page_in_its_own_basis_loses_its_tail_around_its_mean() {
    for (n, d, r) in [(32, 24, 6), (5, 16, 4), (32, 64, 7), (32, 32, 31), (7, 40, 31), (1, 8, 3)] {
        let x = rows(n as u64, n, d, 2.0);
        let found = block_basis(&x, d as u32, r).unwrap();
        let center: Vec<f64> = found.mean.iter().map(|x| f64::from(*x)).collect();
        for (c, mean) in center.iter().enumerate() {
            let want = x.iter().skip(c).step_by(d).map(|x| f64::from(*x)).sum::<f64>() / n as f64;
            assert!((mean - want).abs() <= want.abs() / 2048.0 + 1e-7);
        }
        let moment = second(&x, d, &center);
        let energy: f64 = (0..d).map(|c| moment[c * d + c]).sum();
        let want: f64 = jacobi(moment, d)[r as usize..].iter().sum();
        assert!((found.tail - want).abs() <= 1e-10 * energy, "{n} {d}: {} {want}", found.tail);
        let basis: Vec<&[f32]> = found.basis.chunks(d).collect();
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        for (i, a) in basis.iter().enumerate() {
            // No more directions than the block has.
            let unit = if i < n.min(d) && dot(a, a) > 0.0 { 1.0 } else { 0.0 };
            assert!((dot(a, a) - unit).abs() < 2e-3, "{n} {d}: row {i} has length {}", dot(a, a));
            assert!(basis[..i].iter().all(|b| dot(a, b).abs() < 2e-3));
        }
        let mut lost = 0.0;
        for row in x.chunks(d) {
            let row: Vec<f32> = row.iter().zip(&found.mean).map(|(x, mean)| x - mean).collect();
            let stored: Vec<f64> = basis.iter().map(|vector| dot(&row, vector)).collect();
            for (c, x) in row.iter().enumerate() {
                let back: f64 = stored.iter().zip(&basis).map(|(s, vector)| s * f64::from(vector[c])).sum();
                lost += (f64::from(*x) - back).powi(2);
            }
        }
        assert!(lost >= want * (1.0 - 1e-6) - 1e-6 * energy && lost <= want * (1.0 + 1e-3) + 1e-5 * energy);
    }
    // Nothing to be told apart: the mean is all.
    let found = block_basis(&[0.5; 32 * 4], 4, 2).unwrap();
    assert_eq!((found.mean, found.basis, found.tail), (vec![0.5; 4], vec![0.0; 8], 0.0));
    for (rows, wide, rank) in
        [(&[1.0; 7][..], 3, 1), (&[], 3, 1), (&[f32::NAN; 6], 3, 1), (&[1.0; 6], 3, 4), (&[1.0; 6], 3, 0)]
    {
        assert!(block_basis(rows, wide, rank).is_err(), "{rows:?} {wide} {rank}");
    }
}

const GROUP: usize = 2;

/// Segments whose keys are strongest where no query looks, so that the best basis for attention is not that of energy.
fn segments(n: usize, tokens: usize, d: usize, v: usize) -> Vec<Segment> {
    let sized = |seed: u64, rows: usize, size: &dyn Fn(usize) -> f32| -> Vec<f32> {
        noise(seed, rows * d).iter().enumerate().map(|(i, x)| x * size(i % d)).collect()
    };
    // Values hold a loud channel that changes its sign from token to token: attention averages it away.
    let mut values = rows(3000, n * tokens, v, 0.5);
    values.iter_mut().step_by(v).enumerate().for_each(|(t, x)| *x += if t % 2 == 0 { 4.0 } else { -4.0 });
    let one = |seed: u64| Segment {
        q: sized(2000 + seed, tokens * GROUP, &|c| {
            if c < d / 4 { 0.1 } else { 6.0 * 0.7f32.powi((c - d / 4) as i32) }
        }),
        k: sized(1000 + seed, tokens, &|c| if c < d / 4 { 3.0 } else { 1.5 }),
        v: values[seed as usize * tokens * v..][..tokens * v].to_vec(),
    };
    (0..n as u64).map(one).collect()
}

/// The KLs of a key map and the output error of a value map by the definitions, a query at a time.
fn measure(segments: &[Segment], k: &Map, v: &Map, options: &Distil) -> Measured {
    let (d, w) = (k.wide() as usize, v.wide() as usize);
    let scale = options.scale.unwrap_or(1.0 / (d as f64).sqrt());
    let rotated = |x: Vec<f64>, t: usize| {
        let mut out = x.clone();
        if let Some(rope) = options.rope {
            for i in 0..rope.rotary_dim as usize / 2 {
                let (a, b) = rope.pair(i);
                let angle = t as f64 * rope.theta.powf(-2.0 * i as f64 / f64::from(rope.rotary_dim));
                out[a] = x[a] * angle.cos() - x[b] * angle.sin();
                out[b] = x[b] * angle.cos() + x[a] * angle.sin();
            }
        }
        out
    };
    let through = |map: &Map, row: &[f32]| -> Vec<f64> {
        let n = map.narrow() as usize;
        let bias = map.bias().map_or(vec![0.0; row.len()], <[f32]>::to_vec);
        let (e, dec) = (map.encode(), map.decode());
        let s: Vec<f64> = (0..n)
            .map(|i| {
                (0..row.len())
                    .map(|c| f64::from(e[i * row.len() + c]) * (f64::from(row[c]) - f64::from(bias[c])))
                    .sum()
            })
            .collect();
        (0..row.len())
            .map(|c| f64::from(bias[c]) + (0..n).map(|i| f64::from(dec[c * n + i]) * s[i]).sum::<f64>())
            .collect()
    };
    let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (mut kl, mut skew, mut count, mut lost, mut energy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for segment in segments {
        let keys: Vec<Vec<f64>> = segment.k.chunks(d).enumerate().map(|(t, k)| rotated(wide(k), t)).collect();
        let students: Vec<Vec<f64>> =
            segment.k.chunks(d).enumerate().map(|(t, row)| rotated(through(k, row), t)).collect();
        let coded: Vec<Vec<f64>> = segment.v.chunks(w).map(|row| through(v, row)).collect();
        for (i, q) in segment.q.chunks(d).enumerate() {
            let t = i / GROUP;
            let q = rotated(wide(q), t);
            let softmax = |keys: &[Vec<f64>]| {
                let logits: Vec<f64> = keys[..=t]
                    .iter()
                    .map(|k| scale * k.iter().zip(&q).map(|(a, b)| a * b).sum::<f64>())
                    .collect();
                let sum: f64 = logits.iter().map(|l| l.exp()).sum();
                logits.iter().map(|l| l.exp() / sum).collect::<Vec<f64>>()
            };
            let (p, s) = (softmax(&keys), softmax(&students));
            kl += p.iter().zip(&s).map(|(p, s)| p * (p / s).ln()).sum::<f64>();
            let mix = |p: f64, s: f64| options.skew * p + (1.0 - options.skew) * s;
            skew += p.iter().zip(&s).map(|(p, s)| p * (p / mix(*p, *s)).ln()).sum::<f64>();
            count += 1.0;
            for c in 0..w {
                let o: f64 = (0..=t).map(|j| p[j] * f64::from(segment.v[j * w + c])).sum();
                let coded: f64 = (0..=t).map(|j| p[j] * coded[j][c]).sum();
                lost += (o - coded).powi(2);
                energy += o * o;
            }
        }
    }
    Measured { kl: kl / count, skew_kl: skew / count, output: lost / energy }
}

#[test]
fn distillation_gets_nearer_to_the_teacher() {
    let (d, w) = (16usize, 12usize);
    let all = segments(12, 32, d, w);
    let (fitted, fresh) = all.split_at(10);
    let gather = |of: fn(&Segment) -> &Vec<f32>, d| {
        let mut m = Moments::new(d as u32).unwrap();
        fitted.iter().for_each(|s| m.observe(of(s)).unwrap());
        m
    };
    let (mk, mv) = (gather(|s| &s.k, d), gather(|s| &s.v, w));
    let rope = Rope { theta: 100.0, rotary_dim: 12, pairs: Pairs::Halves };
    let starts = [svd(&mk, 6).unwrap().map, fit_lora_plus(&mk, 6).unwrap().map];
    for (rope, start_k, start_v) in [
        (None, &starts[0], svd(&mv, 4).unwrap().map),
        (Some(rope), &starts[1], fit_lora_plus(&mv, 4).unwrap().map),
    ] {
        let options = Distil { rope, ..Distil::default() };
        let mut steps = vec![];
        let clock = std::time::Instant::now();
        let found =
            distil(fitted, start_k, &start_v, &options, |step, loss| steps.push((step, loss))).unwrap();
        let Distilled { before, after, .. } = found;
        println!("rope {}: {before:?} -> {after:?}, {:?}", rope.is_some(), clock.elapsed());
        assert!(steps.iter().map(|s| s.0).eq(1..=300) && steps.iter().all(|s| s.1.is_finite() && s.1 >= 0.0));
        let held = &fitted[7..];
        for (said, k, v) in [(before, start_k, &start_v), (after, &found.k, &found.v)] {
            let oracle = measure(held, k, v, &options);
            assert!(
                near(said.kl, oracle.kl, 1e-6) && near(said.skew_kl, oracle.skew_kl, 1e-6),
                "{said:?} {oracle:?}"
            );
            assert!((said.output - oracle.output).abs() < 1e-6, "{said:?} {oracle:?}");
        }
        assert!(after.kl < 0.5 * before.kl && after.skew_kl < 0.5 * before.skew_kl);
        // With the rotation these weights are too sharp to average anything away, and the start stays.
        let least = if rope.is_none() { 0.95 } else { 1.0 };
        assert!(after.output <= least * before.output);
        // On rows that had no part in any of it.
        let (was, is) =
            (measure(fresh, start_k, &start_v, &options), measure(fresh, &found.k, &found.v, &options));
        println!("  fresh: {was:?} -> {is:?}");
        assert!(is.kl < 0.5 * was.kl && is.output <= least * was.output);
        assert_eq!((found.k.narrow(), found.v.narrow()), (6, 4));
        assert_eq!((found.k.bias(), found.v.bias()), (start_k.bias(), start_v.bias()));
        let again = distil(fitted, start_k, &start_v, &options, |_, _| {}).unwrap();
        assert_eq!(again, found);
    }
    // No steps: what came comes back.
    let none = Distil { steps: 0, ..Distil::default() };
    let same = distil(fitted, &starts[0], &svd(&mv, 4).unwrap().map, &none, |_, _| {}).unwrap();
    assert_eq!((same.k, same.after.kl), (starts[0].clone(), same.before.kl));
    // A start that loses nothing cannot be made worse.
    let whole = svd(&mk, d as u32).unwrap().map;
    let kept = distil(
        fitted,
        &whole,
        &svd(&mv, w as u32).unwrap().map,
        &Distil { rate: 1.0, ..Distil::default() },
        |_, _| {},
    )
    .unwrap();
    assert!(kept.after.kl <= kept.before.kl && kept.after.skew_kl <= kept.before.skew_kl);
}

#[test]
fn distillation_refuses_what_it_cannot_use() {
    let good = segments(3, 8, 4, 4);
    let map = Map::identity_subset(4, &[0, 1]).unwrap();
    let go = |segments: &[Segment], options: Distil| distil(segments, &map, &map, &options, |_, _| {});
    let few = |r: Result<Distilled, FitError>| matches!(r, Err(FitError::TooFew { least: 2, .. }));
    assert!(few(go(&good[..1], Distil::default())) && few(go(&[], Distil::default())));
    let setting = |options: Distil| matches!(go(&good, options), Err(FitError::Setting { .. }));
    for bad in [0.0, 1.0, -0.1, f64::NAN] {
        assert!(setting(Distil { skew: bad, ..Distil::default() }));
        assert!(setting(Distil { held: bad, ..Distil::default() }));
    }
    for bad in [0.0, -1.0, 1.5, f64::NAN] {
        assert!(setting(Distil { rate: bad, ..Distil::default() }));
    }
    assert!(setting(Distil { scale: Some(f64::NAN), ..Distil::default() }));
    let rope = |theta, rotary_dim| Some(Rope { theta, rotary_dim, pairs: Pairs::Halves });
    assert!(setting(Distil { rope: rope(f64::NAN, 4), ..Distil::default() }));
    for rotary in [0, 3, 6] {
        let r = go(&good, Distil { rope: rope(1e4, rotary), ..Distil::default() });
        assert!(matches!(r, Err(FitError::Rotary { .. })));
    }
    for (what, at) in ["q", "k", "v"].into_iter().zip(0..) {
        for nan in [true, false] {
            let mut bad = good.clone();
            let Segment { q, k, v } = &mut bad[2];
            let part = [q, k, v].into_iter().nth(at).unwrap();
            if nan {
                part[5] = f32::NAN
            } else {
                part.pop().unwrap();
            }
            match go(&bad, Distil::default()).unwrap_err() {
                FitError::NotFinite { what: said, index: 5, .. } if nan => assert_eq!(said, what),
                FitError::Rows { .. } if !nan => {}
                other => panic!("{other}"),
            }
        }
    }
    let mut empty = good.clone();
    empty[0] = Segment::default();
    assert!(matches!(go(&empty, Distil::default()), Err(FitError::Rows { .. })));
}

const SHAPE: FitShape = FitShape { layers: 2, query_heads: 4, kv_heads: 2, k_dim: 6, v_dim: 5 };

fn filled(calls: usize, tokens: usize) -> Fitter {
    let mut fitter = Fitter::new(SHAPE).unwrap().sample(3, 8, 1);
    for call in 0..calls as u64 {
        for layer in 0..2 {
            let s = call * 10 + u64::from(layer);
            let (q, k, v) =
                (noise(s, tokens * 24), noise(s + 1000, tokens * 12), noise(s + 2000, tokens * 10));
            fitter.observe(layer, &q, &k, &v).unwrap();
        }
    }
    fitter
}

#[test]
fn the_fitter_gathers_each_head_apart() {
    let (q, k, v) = (noise(1, 10 * 24), noise(2, 10 * 12), noise(3, 10 * 10));
    let mut fitter = Fitter::new(SHAPE).unwrap();
    fitter.observe(1, &q[..4 * 24], &k[..4 * 12], &v[..4 * 10]).unwrap();
    fitter.observe(1, &q[4 * 24..], &k[4 * 12..], &v[4 * 10..]).unwrap();
    for head in 0..2usize {
        let of = |values: &[f32], d: usize| -> Vec<f32> {
            values.chunks(d).skip(head).step_by(2).flatten().copied().collect()
        };
        let h = head as u32;
        for (found, rows, d) in [
            (fitter.k(1, h).unwrap(), of(&k, 6), 6),
            (fitter.v(1, h).unwrap(), of(&v, 5), 5),
            // Query heads 2 h and 2 h + 1 read KV head h.
            (fitter.q(1, h).unwrap(), of(&q, 12), 6),
        ] {
            assert_eq!(found.rows() as usize, rows.len() / d);
            let zero = vec![0.0; d];
            let oracle = second(&rows, d, &zero);
            let apart =
                |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart(&found.second(None).unwrap(), &oracle) < 1e-12);
            let energy: Vec<f64> = (0..d).map(|c| oracle[c * d + c]).collect();
            assert!(apart(&found.energy(), &energy) < 1e-12);
            let mean = found.mean();
            assert!(apart(&found.second(Some(&mean)).unwrap(), &second(&rows, d, &mean)) < 1e-12);
            assert!(
                apart(
                    &found.mean_squares(),
                    &energy.iter().map(|e| e / found.rows() as f64).collect::<Vec<_>>()
                ) < 1e-12
            );
        }
        assert_eq!(fitter.k(0, h).unwrap().rows(), 0);
        let kept = fitter.segments(1, h).unwrap();
        assert_eq!(kept.len(), 2);
        assert_eq!([&kept[0].k[..], &kept[1].k[..]].concat(), of(&k, 6));
        assert_eq!([&kept[0].v[..], &kept[1].v[..]].concat(), of(&v, 5));
        assert_eq!([&kept[0].q[..], &kept[1].q[..]].concat(), of(&q, 12));
    }
}

#[test]
fn the_sample_is_bounded_and_follows_the_seed() {
    let a = filled(20, 20);
    let kept = a.segments(0, 0).unwrap();
    assert!(kept.len() == 3 && kept.iter().all(|s| s.k.len() <= 8 * 6 && s.q.len() == 2 * s.k.len()));
    assert_eq!(kept, filled(20, 20).segments(0, 0).unwrap());
    assert_ne!(kept, filled(1, 20).segments(0, 0).unwrap());
    // Every part of the offer is kept about as often: 60 pieces, 3 kept, 400 seeds.
    let mut early = 0;
    for seed in 0..400 {
        let mut fitter = Fitter::new(FitShape { layers: 1, query_heads: 1, kv_heads: 1, k_dim: 1, v_dim: 1 })
            .unwrap()
            .sample(3, 1, seed);
        for t in 0..60 {
            fitter.observe(0, &[0.0], &[t as f32], &[0.0]).unwrap();
        }
        early += fitter.segments(0, 0).unwrap().iter().filter(|s| s.k[0] < 30.0).count();
    }
    assert!((500..700).contains(&early), "{early} of 1200");
    let none = Fitter::new(SHAPE).unwrap().sample(0, 8, 1);
    let mut none = none;
    none.observe(0, &[0.5; 24], &[0.5; 12], &[0.5; 10]).unwrap();
    assert!(none.segments(0, 1).unwrap().is_empty());
}

#[test]
fn the_fitter_refuses_and_stays_as_it_was() {
    let shape =
        |layers, query_heads, kv_heads, k_dim| FitShape { layers, query_heads, kv_heads, k_dim, v_dim: 5 };
    for bad in [
        shape(0, 4, 2, 6),
        shape(2, 3, 2, 6),
        shape(2, 0, 2, 6),
        shape(2, 4, 0, 6),
        shape(2, 4, 2, 0),
        shape(2, 4, 2, 257),
    ] {
        assert!(Fitter::new(bad).is_err(), "{bad:?}");
    }
    let mut fitter = filled(1, 3);
    let before = format!("{fitter:?}");
    let (q, k, v) = (vec![0.5; 48], vec![0.5; 24], vec![0.5; 20]);
    let mut refused = |layer, q: &[f32], k: &[f32], v: &[f32]| fitter.observe(layer, q, k, v).unwrap_err();
    assert!(matches!(refused(2, &q, &k, &v), FitError::Head { layer: 2, .. }));
    assert!(matches!(refused(0, &q[1..], &k, &v), FitError::Rows { what: "q", .. }));
    assert!(matches!(refused(0, &q, &k[1..], &v), FitError::Rows { .. }));
    assert!(matches!(refused(0, &q, &k, &v[..10]), FitError::Rows { what: "v", .. }));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut v = v.clone();
        v[19] = bad;
        assert!(matches!(refused(0, &q, &k, &v), FitError::NotFinite { what: "v", index: 19, .. }));
    }
    assert_eq!(format!("{fitter:?}"), before);
    assert!(
        fitter.k(2, 0).is_err()
            && fitter.v(0, 2).is_err()
            && fitter.q(9, 9).is_err()
            && fitter.segments(0, 2).is_err()
    );
    let mut m = Moments::new(3).unwrap();
    assert!(m.observe(&[1.0; 4]).is_err() && m.observe(&[1.0, f32::NAN, 1.0]).is_err() && m.rows() == 0);
    assert!(m.residual(&Map::hadamard(4).unwrap()).is_err() && m.second(Some(&[0.0; 2])).is_err());
}

fn fitted() -> Fitted {
    let fitter = filled(4, 20);
    let k = fitter.side("C_Lo+", |l, h| fit_lora_plus(fitter.k(l, h)?, 2 + h).map(|f| f.map)).unwrap();
    let v = fitter.side("C_SVD", |l, h| svd(fitter.v(l, h)?, 3).map(|f| f.map)).unwrap();
    Fitted::new(SHAPE, "a model", Some(k), Some(v)).unwrap()
}

static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| fitted().to_bytes().unwrap());

#[test]
fn what_is_read_is_what_was_written_to_the_bit() {
    let dir = std::env::temp_dir().join(format!("pikv-fitted-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("maps.safetensors");
    let fitter = filled(4, 20);
    let crops = fitter
        .side("C_Pr", |l, h| {
            think(&fitter.q(l, h)?.mean_squares(), &fitter.k(l, h)?.mean_squares(), None, 4).map(|c| c.map)
        })
        .unwrap();
    let turned = Side { row: "Hadamard".into(), maps: vec![Map::hadamard(6).unwrap(); 4] };
    let (k, v) = (fitted().k().cloned(), fitted().v().cloned());
    for fitted in [
        fitted(),
        Fitted::new(SHAPE, "m", Some(crops), None).unwrap(),
        Fitted::new(SHAPE, "", Some(turned), v.clone()).unwrap(),
        Fitted::new(SHAPE, "m", None, v).unwrap(),
        Fitted::new(SHAPE, "m", k, None).unwrap(),
    ] {
        fitted.save(&path).unwrap();
        let read = Fitted::load(&path, fitted.fingerprint(), SHAPE).unwrap();
        assert_eq!(read, fitted);
        for (a, b) in [(read.k(), fitted.k()), (read.v(), fitted.v())] {
            let maps = |s: Option<&Side>| s.map_or(vec![], |s| s.maps.clone());
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (a, b) in maps(a).iter().zip(&maps(b)) {
                assert_eq!((bits(&a.encode()), bits(&a.decode())), (bits(&b.encode()), bits(&b.decode())));
                assert_eq!(a.bias().map(bits), b.bias().map(bits));
            }
        }
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "nothing but the file is left");
    }
    // A folder that is not there, and a name that is a folder: an error, and nothing left behind.
    assert!(matches!(fitted().save(&dir.join("no/such/file")), Err(FittedError::Io { .. })));
    std::fs::create_dir(dir.join("folder")).unwrap();
    assert!(matches!(fitted().save(&dir.join("folder")), Err(FittedError::Io { .. })));
    assert!(matches!(Fitted::load(&dir.join("none"), "m", SHAPE), Err(FittedError::Io { .. })));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_file_for_something_else_is_refused() {
    let read = |model: &str, shape| Fitted::from_bytes(&FILE, model, shape).unwrap_err();
    assert!(matches!(read("another", SHAPE), FittedError::Fingerprint { .. }));
    let missing = read("a model", FitShape { layers: 3, ..SHAPE });
    assert!(
        matches!(&missing, FittedError::Missing { name } if name == "layers.2.heads.0.k.encode"),
        "{missing}"
    );
    let left = read("a model", FitShape { layers: 1, ..SHAPE });
    assert!(matches!(left, FittedError::Unexpected { .. } | FittedError::Metadata { .. }), "{left}");
    assert!(matches!(
        read("a model", FitShape { kv_heads: 1, ..SHAPE }),
        FittedError::Unexpected { .. } | FittedError::Metadata { .. }
    ));
    let said = read("a model", FitShape { k_dim: 7, ..SHAPE }).to_string();
    assert_eq!(said, "tensor \"layers.0.heads.0.k.encode\" is F32 [2, 6]; F32 [1..=7, 7] is needed");
    assert!(matches!(read("a model", FitShape { v_dim: 4, ..SHAPE }), FittedError::Tensor { .. }));

    let side =
        |n: usize, wide| Some(Side { row: "C_SVD".into(), maps: vec![Map::hadamard(wide).unwrap(); n] });
    let new = |k, v| Fitted::new(SHAPE, "m", k, v).unwrap_err();
    assert!(matches!(new(None, None), FittedError::Empty));
    assert_eq!(new(side(3, 6), None).to_string(), "3 maps for k; 2 layers of 2 KV heads need 4");
    assert!(matches!(new(None, side(4, 6)), FittedError::Width { wide: 6, wanted: 5, .. }));
}

/// The file with one piece of its header's text exchanged for another of any length.
fn edited(from: &str, to: &str) -> Vec<u8> {
    let n = u64::from_le_bytes(FILE[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&FILE[8..8 + n]).unwrap();
    assert!(header.contains(from), "{header}");
    let header = header.replace(from, to);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(&FILE[8 + n..]);
    bytes
}

#[test]
fn a_header_that_says_something_else_is_refused() {
    let read = |from, to| Fitted::from_bytes(&edited(from, to), "a model", SHAPE).unwrap_err();
    assert!(Fitted::from_bytes(&edited("a model", "a model"), "a model", SHAPE).is_ok());
    let version = read("\"version\":\"1\"", "\"version\":\"2\"").to_string();
    assert_eq!(version, "metadata \"version\" is Some(\"2\"); \"1\" is needed");
    assert!(matches!(read("pikv fitted maps", "some maps"), FittedError::Metadata { .. }));
    assert!(matches!(read("\"fingerprint\"", "\"finger\""), FittedError::Metadata { found: None, .. }));
    assert!(matches!(read("C_Lo+", "C_SVD"), FittedError::Digest { .. }));
    assert!(matches!(read("\"k.ranks\":\"2,3", "\"k.ranks\":\"3,2"), FittedError::Digest { .. }));
    assert!(matches!(read("\"shape\":[6,2]", "\"shape\":[2,6]"), FittedError::Digest { .. }));
    assert!(matches!(read("\"digest\"", "\"digits\""), FittedError::Metadata { .. }));
    assert!(matches!(read("\"F32\"", "\"I32\""), FittedError::Digest { .. }));
}

proptest! {
    #[test]
    fn damaged_files_are_refused(at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<bool>()) {
        let mut bytes = FILE.clone();
        let at = at.index(bytes.len());
        if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
        let read = Fitted::from_bytes(&bytes, "a model", SHAPE);
        // A change that JSON does not see, as of one blank to another, may pass, with every bit as it was.
        prop_assert!(read.is_err() || read.unwrap() == fitted());
    }

    #[test]
    fn damaged_headers_are_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = FILE.clone();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[at.index(header)] = byte;
        let read = Fitted::from_bytes(&bytes, "a model", SHAPE);
        prop_assert!(read.is_err() || read.unwrap() == fitted());
    }

    #[test]
    fn noise_is_no_file(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(Fitted::from_bytes(&bytes, "a model", SHAPE).is_err());
    }
}

#[test]
fn fingerprints_tell_parts_apart() {
    let a = fingerprint(&[("a", b"bc"), ("d", b"")]);
    assert_eq!(a.len(), 64);
    for other in [
        &[("ab", &b"c"[..]), ("d", b"")][..],
        &[("a", b"bcd")],
        &[("d", b""), ("a", b"bc")],
        &[("a", b"bc")],
        &[],
    ] {
        assert_ne!(a, fingerprint(other));
    }
    // Stable: files outlive versions. BLAKE3 of nothing.
    assert_eq!(fingerprint(&[]), "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
}
