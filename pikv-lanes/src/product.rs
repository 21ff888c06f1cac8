//! Vector times matrix in one order of operations, on any lanes.

use crate::Lanes;
use pikv_core::warp::{Kernel, LANES, Warp};

/// `out[j] = sum_i x[i] weights[i][j]`, weights `[x.len()][out.len()]`: for each output a chain of fused multiply-adds from 0.0
/// over the inputs in order, so that its bits depend neither on the lanes nor on its place.
pub fn product(weights: &[f32], x: &[f32], out: &mut [f32]) {
    Lanes::detect().run(Product { weights, x, out });
}

/// The dot product of `a` and `b`: a chain of fused multiply-adds from 0.0 in order.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| a.mul_add(*b, sum))
}

struct Product<'a> {
    weights: &'a [f32],
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Product<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Product { weights, x, out } = self;
        let n = out.len();
        let mut at = 0;
        while at + 2 * LANES <= n {
            whole::<W, 2>(w, weights, x, at, out);
            at += 2 * LANES;
        }
        if at + LANES <= n {
            whole::<W, 1>(w, weights, x, at, out);
            at += LANES;
        }
        if at < n {
            part(w, weights, x, at, out);
        }
    }
}

/// Outputs `at..at + 32 G`: `G` rows of lanes at once, enough chains to keep the units busy.
#[inline(always)]
fn whole<W: Warp, const G: usize>(w: W, weights: &[f32], x: &[f32], at: usize, out: &mut [f32]) {
    let mut sums = [w.splat(0.0); G];
    for (row, x) in weights.chunks_exact(out.len()).zip(x) {
        let x = w.splat(*x);
        let (rows, _) = row[at..at + G * LANES].as_chunks::<LANES>();
        for (sum, row) in sums.iter_mut().zip(rows) {
            *sum = w.fma(x, w.load_f(row), *sum);
        }
    }
    let (rows, _) = out[at..at + G * LANES].as_chunks_mut::<LANES>();
    for (row, sum) in rows.iter_mut().zip(sums) {
        w.store(sum, row);
    }
}

/// The outputs from `at`, fewer than 32.
#[inline(always)]
fn part<W: Warp>(w: W, weights: &[f32], x: &[f32], at: usize, out: &mut [f32]) {
    let mut sum = w.splat(0.0);
    for (row, x) in weights.chunks_exact(out.len()).zip(x) {
        let row = w.from_bits(w.load_part(bytemuck::cast_slice(&row[at..])));
        sum = w.fma(w.splat(*x), row, sum);
    }
    w.scatter(sum, out, at, 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use pikv_core::hash;

    #[test]
    fn all_lanes_give_the_bits_of_the_chain() {
        let mut state = 4;
        let mut noise = |n: usize| -> Vec<f32> {
            (0..n).map(|_| (hash::next(&mut state) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
        };
        for (inputs, outputs) in [(1, 1), (5, 31), (33, 32), (128, 64), (80, 95), (256, 129), (7, 256)] {
            let (weights, x) = (noise(inputs * outputs), noise(inputs));
            let column = |j: usize| weights.iter().skip(j).step_by(outputs).copied().collect::<Vec<f32>>();
            let want: Vec<u32> = (0..outputs).map(|j| dot(&x, &column(j)).to_bits()).collect();
            for lanes in Lanes::available() {
                let mut out = vec![f32::NAN; outputs];
                lanes.run(Product { weights: &weights, x: &x, out: &mut out });
                let found: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                assert_eq!(found, want, "{} {inputs} {outputs}", lanes.name());
            }
        }
    }
}
