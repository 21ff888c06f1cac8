//! Matrices whose weights stay in the blocks of a GGUF file, and their products with a few rows: 32 weights are read as 4- or 8-bit
//! integers and widened to f32 in registers. The inputs stay in f32, so a product has the exact weights of the file.

use half::f16;
use rayon::prelude::*;

/// Weights of a block.
const BLOCK: usize = 32;
/// Most rows that [`Blocks::mul`] computes at a time.
pub const ROWS: usize = 4;
/// Outputs of a thread's turn.
const OUTPUTS: usize = 64;

/// Formats of a file that are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// `scale * q + least`, q from 0 to 15: weights `i` and `i + 16` in byte `i`.
    Four,
    /// `scale * q`, q from -128 to 127.
    Eight,
}

impl Form {
    /// Bytes of the integers of a block, and the scales of a block.
    fn sizes(self) -> (usize, usize) {
        match self {
            Form::Four => (16, 2),
            Form::Eight => (32, 1),
        }
    }
}

/// `[outputs][inputs]` in blocks along the inputs.
pub struct Blocks {
    form: Form,
    inputs: usize,
    outputs: usize,
    /// Integers, `[outputs][block]`.
    integers: Vec<u8>,
    /// `[outputs][block]` of the scale, or of the scale and the least value.
    scales: Vec<f32>,
}

impl Blocks {
    /// Joins matrices side by side. Each is `[outputs][block]`; a block is its scales in f16, then its integers.
    pub fn new(form: Form, inputs: usize, parts: &[Vec<u8>]) -> Blocks {
        let (size, n) = form.sizes();
        let (mut integers, mut scales) = (Vec::new(), Vec::new());
        for block in parts.iter().flat_map(|part| part.chunks_exact(2 * n + size)) {
            let (of, rest) = block.split_at(2 * n);
            scales.extend(of.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()));
            integers.extend_from_slice(rest);
        }
        let outputs = scales.len() / n / (inputs / BLOCK);
        Blocks { form, inputs, outputs, integers, scales }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Writes all weights as f32, `[outputs][inputs]`.
    pub fn widen(&self, threads: bool, out: &mut Vec<f32>) {
        let (size, n) = self.form.sizes();
        out.resize(self.outputs * self.inputs, 0.0);
        let block = |((integers, scales), out): ((&[u8], &[f32]), &mut [f32])| match self.form {
            Form::Four => {
                let (low, high) = out.split_at_mut(BLOCK / 2);
                for ((low, high), q) in low.iter_mut().zip(high).zip(integers) {
                    *low = scales[0] * f32::from(q & 15) + scales[1];
                    *high = scales[0] * f32::from(q >> 4) + scales[1];
                }
            }
            Form::Eight => {
                out.iter_mut().zip(integers).for_each(|(w, q)| *w = scales[0] * f32::from(*q as i8));
            }
        };
        let some = |(i, out): (usize, &mut [f32])| {
            let at = i * OUTPUTS * self.inputs / BLOCK;
            let integers = self.integers[at * size..].chunks_exact(size);
            let scales = self.scales[at * n..].chunks_exact(n);
            integers.zip(scales).zip(out.chunks_exact_mut(BLOCK)).for_each(block);
        };
        let chunk = OUTPUTS * self.inputs;
        match threads {
            true => out.par_chunks_mut(chunk).enumerate().for_each(some),
            false => out.chunks_mut(chunk).enumerate().for_each(some),
        }
    }

    /// `x`: `[n][inputs]` of at most [`ROWS`] rows; writes `y`, `[n][outputs]`. A row has the same bits for any `n` and any threads.
    pub fn mul(&self, x: &[f32], y: &mut [f32], threads: bool) {
        let n = x.len() / self.inputs;
        assert!((1..=ROWS).contains(&n) && x.len() == n * self.inputs && y.len() == n * self.outputs);
        let sums: Vec<f32> = x.chunks_exact(BLOCK).map(|block| block.iter().sum()).collect();
        // Rows of an output side by side, so that threads write apart.
        let mut columns = vec![[0.0; ROWS]; self.outputs];
        let some = |(i, columns): (usize, &mut [[f32; ROWS]])| {
            for (output, column) in columns.iter_mut().enumerate() {
                self.dots(i * OUTPUTS + output, x, &sums, &mut column[..n]);
            }
        };
        match threads {
            true => columns.par_chunks_mut(OUTPUTS).enumerate().for_each(some),
            false => columns.chunks_mut(OUTPUTS).enumerate().for_each(some),
        }
        for (row, y) in y.chunks_exact_mut(self.outputs).enumerate() {
            y.iter_mut().zip(&columns).for_each(|(y, column)| *y = column[row]);
        }
    }

    /// Products of the rows of `x` with the weights of an output.
    fn dots(&self, output: usize, x: &[f32], sums: &[f32], out: &mut [f32]) {
        let (blocks, (size, n)) = (self.inputs / BLOCK, self.form.sizes());
        let integers = &self.integers[output * blocks * size..][..blocks * size];
        let scales = &self.scales[output * blocks * n..][..blocks * n];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let rows = x.chunks_exact(self.inputs).zip(sums.chunks_exact(blocks));
            for (out, (x, sums)) in out.iter_mut().zip(rows) {
                // SAFETY: the processor has AVX2 and FMA.
                *out = unsafe {
                    match self.form {
                        Form::Four => avx2::four(integers, scales, x, sums),
                        Form::Eight => avx2::eight(integers, scales, x),
                    }
                };
            }
            return;
        }
        let rows = x.chunks_exact(self.inputs).zip(sums.chunks_exact(blocks));
        for (out, (x, sums)) in out.iter_mut().zip(rows) {
            *out = plain(self.form, integers, scales, x, sums);
        }
    }
}

/// The product of a row with the weights of an output.
fn plain(form: Form, integers: &[u8], scales: &[f32], x: &[f32], sums: &[f32]) -> f32 {
    let (size, n) = form.sizes();
    let blocks = integers.chunks_exact(size).zip(scales.chunks_exact(n));
    let mut total = 0.0;
    for ((integers, scales), (x, sum)) in blocks.zip(x.chunks_exact(BLOCK).zip(sums)) {
        total += match form {
            Form::Four => {
                let of =
                    |(i, q): (usize, &u8)| f32::from(q & 15) * x[i] + f32::from(q >> 4) * x[i + BLOCK / 2];
                scales[0] * integers.iter().enumerate().map(of).sum::<f32>() + scales[1] * sum
            }
            Form::Eight => {
                scales[0] * integers.iter().zip(x).map(|(q, x)| f32::from(*q as i8) * x).sum::<f32>()
            }
        };
    }
    total
}

/// The same in 8 lanes.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::BLOCK;
    use std::arch::x86_64::*;

    /// 8 inputs.
    #[target_feature(enable = "avx2")]
    fn eight_of(x: &[f32], at: usize) -> __m256 {
        let x = &x[at..at + 8];
        // SAFETY: the slice has 8 values.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[target_feature(enable = "avx2")]
    fn sixteen_of(bytes: &[u8], at: usize) -> __m128i {
        let bytes = &bytes[at..at + 16];
        // SAFETY: the slice has 16 bytes.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    /// The sum of 8 lanes.
    #[target_feature(enable = "avx2")]
    fn sum(x: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    /// Products of 16 integers, already widened, with 16 inputs, added to `to`.
    #[target_feature(enable = "avx2,fma")]
    fn sixteen(to: __m256, low: __m256i, high: __m256i, x: &[f32], at: usize) -> __m256 {
        let to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), eight_of(x, at), to);
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), eight_of(x, at + 8), to)
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn four(integers: &[u8], scales: &[f32], x: &[f32], sums: &[f32]) -> f32 {
        let mask = _mm_set1_epi8(15);
        let (mut total, mut least) = (_mm256_setzero_ps(), 0.0f32);
        let blocks = integers.chunks_exact(BLOCK / 2).zip(scales.chunks_exact(2));
        for ((integers, scales), (x, sum)) in blocks.zip(x.chunks_exact(BLOCK).zip(sums)) {
            let bytes = sixteen_of(integers, 0);
            let (low, high) = (_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask));
            let wide = |q| (_mm256_cvtepu8_epi32(q), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(q, q)));
            let ((a, b), (c, d)) = (wide(low), wide(high));
            let dot = sixteen(sixteen(_mm256_setzero_ps(), a, b, x, 0), c, d, x, 16);
            total = _mm256_fmadd_ps(_mm256_set1_ps(scales[0]), dot, total);
            least = scales[1].mul_add(*sum, least);
        }
        self::sum(total) + least
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn eight(integers: &[u8], scales: &[f32], x: &[f32]) -> f32 {
        let mut total = _mm256_setzero_ps();
        let blocks = integers.chunks_exact(BLOCK).zip(scales);
        for ((integers, scale), x) in blocks.zip(x.chunks_exact(BLOCK)) {
            let wide = |q| (_mm256_cvtepi8_epi32(q), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q)));
            let ((a, b), (c, d)) = (wide(sixteen_of(integers, 0)), wide(sixteen_of(integers, 16)));
            let dot = sixteen(sixteen(_mm256_setzero_ps(), a, b, x, 0), c, d, x, 16);
            total = _mm256_fmadd_ps(_mm256_set1_ps(*scale), dot, total);
        }
        sum(total)
    }
}
