//! Fits compared with slow forms in f64, and the file of fitted maps.

mod distil;
mod file;
mod fitter;
mod low_rank;
mod peft;

use pikv::codec::*;

/// Values of about unit size, from a seed.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|_| unit(pikv_core::hash::next(&mut state))).collect()
}

/// Rows around `mean` with mixed channels: channel directions of falling size.
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
