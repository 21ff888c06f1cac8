//! Maps, crops, means of tokens and budgets, each compared with a slow form of its definition.

mod crops;
mod hybrid;
mod linear;
mod tokens;

use pikv::codec::*;

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
