//! Maps of low rank, and bases of blocks, compared with eigenvalues from another method.

use super::*;

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
            // The sign of a direction makes its largest entry positive.
            for direction in found.map.encode().chunks(d) {
                let most =
                    direction.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
                assert!(most > 0.0, "{d} {rank}: {direction:?}");
            }
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
    // Equal rows: the mean is exact, and the basis 0.
    let found = block_basis(&[0.5; 32 * 4], 4, 2).unwrap();
    assert_eq!((found.mean, found.basis, found.tail), (vec![0.5; 4], vec![0.0; 8], 0.0));
    for (rows, wide, rank) in
        [(&[1.0; 7][..], 3, 1), (&[], 3, 1), (&[f32::NAN; 6], 3, 1), (&[1.0; 6], 3, 4), (&[1.0; 6], 3, 0)]
    {
        assert!(block_basis(rows, wide, rank).is_err(), "{rows:?} {wide} {rank}");
    }
}
