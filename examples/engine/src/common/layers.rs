//! Layers shared by the models, in f32.

use super::blocks::{self, Blocks};
use gemm_common::Parallelism;
use rayon::prelude::*;
use std::cell::RefCell;
use std::num::NonZeroUsize;

/// Options of matrix products.
#[derive(Clone, Copy)]
pub struct Products {
    /// Use of threads; results do not depend on it.
    pub threads: Parallelism,
    /// Rows of a product, padded with zeros at the end: a row's bits then do not depend on the number of rows. `None` computes all rows at
    /// once, which is fastest, but a row may then have other bits alone than among others.
    pub rows: Option<NonZeroUsize>,
}

/// Weights of a linear layer.
pub struct Matrix {
    inputs: usize,
    outputs: usize,
    weights: Weights,
}

enum Weights {
    /// `[inputs][outputs]`: the transpose of a checkpoint's `[outputs][inputs]`, with contiguous outputs.
    F32(Vec<f32>),
    Blocks(Blocks),
}

thread_local! {
    /// Widened blocks, kept from product to product.
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Matrix {
    /// Joins matrices in a checkpoint's form, `[outputs][inputs]`, side by side.
    pub fn new(inputs: usize, parts: &[Vec<f32>]) -> Self {
        /// Rows read at a time, so that writes fill whole cache lines.
        const ROWS: usize = 16;
        let outputs = parts.iter().map(|part| part.len() / inputs).sum();
        let mut weights = vec![0.0; inputs * outputs];
        let mut first = 0;
        for part in parts {
            for rows in part.chunks(ROWS * inputs) {
                let n = rows.len() / inputs;
                for i in 0..inputs {
                    let to = &mut weights[i * outputs + first..][..n];
                    to.iter_mut().zip(rows[i..].iter().step_by(inputs)).for_each(|(to, from)| *to = *from);
                }
                first += n;
            }
        }
        Self { inputs, outputs, weights: Weights::F32(weights) }
    }

    /// A matrix whose weights stay in blocks.
    pub fn of_blocks(inputs: usize, blocks: Blocks) -> Self {
        Self { inputs, outputs: blocks.outputs(), weights: Weights::Blocks(blocks) }
    }

    /// `x`: `[n][inputs]`; returns `[n][outputs]`.
    pub fn mul(&self, x: &[f32], by: Products) -> Vec<f32> {
        let n = x.len() / self.inputs;
        let Some(rows) = by.rows.map(NonZeroUsize::get) else {
            let mut y = vec![0.0; n * self.outputs];
            self.mul_into(x, &mut y, by.threads);
            return y;
        };
        let padded = n.div_ceil(rows) * rows;
        let mut y = vec![0.0; padded * self.outputs];
        let block = |threads| {
            move |(x, y): (&[f32], &mut [f32])| {
                if x.len() == rows * self.inputs {
                    self.mul_into(x, y, threads);
                } else {
                    let mut last = vec![0.0; rows * self.inputs];
                    last[..x.len()].copy_from_slice(x);
                    self.mul_into(&last, y, threads);
                }
            }
        };
        let (from, to) = (rows * self.inputs, rows * self.outputs);
        match by.threads {
            // With several blocks, each thread takes whole blocks.
            Parallelism::Rayon(_) if padded > rows => {
                x.par_chunks(from).zip(y.par_chunks_exact_mut(to)).for_each(block(Parallelism::None));
            }
            threads => x.chunks(from).zip(y.chunks_exact_mut(to)).for_each(block(threads)),
        }
        y.truncate(n * self.outputs);
        y
    }

    fn mul_into(&self, x: &[f32], y: &mut [f32], threads: Parallelism) {
        match &self.weights {
            Weights::F32(weights) => self.gemm(weights, (self.outputs, 1), x, y, threads),
            Weights::Blocks(blocks) => {
                let several = matches!(threads, Parallelism::Rayon(_));
                if x.len() <= blocks::ROWS * self.inputs {
                    return blocks.mul(x, y, several);
                }
                // While threads widen, this one may take another product's turn.
                let mut widened = WIDENED.take();
                blocks.widen(several, &mut widened);
                self.gemm(&widened, (1, self.inputs), x, y, threads);
                WIDENED.set(widened);
            }
        }
    }

    /// The product with f32 weights, which lie so many elements apart along inputs and along outputs.
    fn gemm(&self, w: &[f32], apart: (usize, usize), x: &[f32], y: &mut [f32], threads: Parallelism) {
        let (k, m, n) = (self.inputs, self.outputs, x.len() / self.inputs);
        assert!(x.len() == n * k && y.len() == n * m && w.len() == k * m);
        assert!((k - 1) * apart.0 + (m - 1) * apart.1 < w.len());
        // gemm's column-major (m × k)(k × n) = (m × n): the weights, x and y as they lie.
        let (w, x, y_ptr) = (w.as_ptr(), x.as_ptr(), y.as_mut_ptr());
        let (cols, k_cols) = (m as isize, k as isize);
        let (along_inputs, along_outputs) = (apart.0 as isize, apart.1 as isize);
        // SAFETY: the asserted lengths cover all elements that dimensions and strides reach; y is borrowed exclusively.
        unsafe {
            let no = false;
            let gemm = gemm_f32::gemm::f32::get_gemm_fn();
            gemm(
                m,
                n,
                k,
                y_ptr,
                cols,
                1,
                no,
                w,
                along_inputs,
                along_outputs,
                x,
                k_cols,
                1,
                0.0,
                1.0,
                no,
                no,
                no,
                threads,
            );
        }
    }
}

pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
    }
    out
}

/// Splits rows `[n][q + 2 kv]` into queries, keys and values.
pub fn split_qkv(rows: &[f32], q: usize, kv: usize) -> [Vec<f32>; 3] {
    let columns = |from: usize, to: usize| {
        rows.chunks_exact(q + 2 * kv).flat_map(|row| &row[from..to]).copied().collect()
    };
    [columns(0, q), columns(q, q + kv), columns(q + kv, q + 2 * kv)]
}

/// RoPE frequencies in radians a position: `theta^(-2 i / rotary_dim)` for pair `i`.
pub fn frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim).step_by(2).map(|i| theta.powf(-(i as f64) / rotary_dim as f64)).collect()
}

/// RoPE for some positions.
pub struct Rotation {
    /// cos and sin, `[n][pairs]`, from angles in f64, exact enough at any position.
    turns: Vec<(f32, f32)>,
    pairs: usize,
}

impl Rotation {
    /// Computes the angles of these positions, one a row.
    pub fn new(frequencies: &[f64], positions: impl Iterator<Item = usize>) -> Self {
        let angles = positions.flat_map(|p| frequencies.iter().map(move |f| p as f64 * f));
        let turns = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).collect();
        Self { turns, pairs: frequencies.len() }
    }

    /// Rotates `x`, `[n][heads][head_dim]`, in place: channel `i` of each head with channel `i + pairs`, in its first `2 * pairs` channels.
    pub fn apply(&self, x: &mut [f32], heads: usize, head_dim: usize) {
        for (row, turns) in x.chunks_exact_mut(heads * head_dim).zip(self.turns.chunks_exact(self.pairs)) {
            for head in row.chunks_exact_mut(head_dim) {
                let (a, b) = head.split_at_mut(self.pairs);
                for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(turns) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

/// `x += scale * y`
pub fn add(x: &mut [f32], y: &[f32], scale: f32) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += scale * y);
}

/// `silu(gate) * up` of rows `[gate, up]`, `[n][2][ffn]`; `[n][ffn]`.
pub fn swiglu(rows: &[f32], ffn: usize) -> Vec<f32> {
    let halves = rows.chunks_exact(2 * ffn).map(|row| row.split_at(ffn));
    halves.flat_map(|(g, u)| g.iter().zip(u)).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}
