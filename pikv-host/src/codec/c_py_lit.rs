//! C_Py-lit: the pyramid in the letter of arXiv 2508.06526, averages over longer and longer runs of tokens.
//!
//! [`Coding::means`](super::Coding::means) stores pages that way: at one level, every token read as the mean of its run, which is the
//! paper's `P_l K`. Levels that rise with age are two such codecs, the second by [`CacheConfig::age`](crate::CacheConfig::age).

use super::SelectError;
use pikv_core::page::MAX_DIM;

/// The means of a pyramid's levels. Level `l` averages runs of `2^(l + 1)` tokens, the last run what is left.
#[derive(Clone, Debug, PartialEq)]
pub struct Pyramid {
    /// Of each level, `[runs][dim]`, the finest first.
    pub levels: Vec<Vec<f32>>,
    /// Of each level, `||P_l K - K||_F^2`: what [`Pyramid::reconstruct`] of it loses, up to the rounding of the means to f32.
    pub lost: Vec<f64>,
    dim: usize,
    tokens: usize,
}

/// A pyramid of `levels` over `rows`, `[tokens][dim]`. Sums are in f64. O(tokens dim levels); the means are at most as many as the
/// rows, and half as many in the finest level.
///
/// # Errors
/// No levels or more than 31, a `dim` that is not 1..=256, a part of a row, values that are not finite.
pub fn pyramid(rows: &[f32], dim: usize, levels: u32) -> Result<Pyramid, SelectError> {
    if !(1..=31).contains(&levels) {
        return Err(SelectError::Setting { name: "levels", value: levels.into(), range: "1..=31" });
    }
    if !(1..=MAX_DIM as usize).contains(&dim) {
        return Err(SelectError::Setting { name: "dim", value: dim as f64, range: "1..=256" });
    }
    if !rows.len().is_multiple_of(dim) {
        return Err(SelectError::Rows { len: rows.len(), width: dim });
    }
    if let Some(at) = rows.iter().position(|x| !x.is_finite()) {
        return Err(SelectError::NotFinite { row: at / dim, channel: at % dim, value: rows[at] });
    }
    let mut out = Pyramid { levels: Vec::new(), lost: Vec::new(), dim, tokens: rows.len() / dim };
    for level in 0..levels {
        let mut lost = 0.0;
        let means = means(rows, dim, run(level), |x, mean| lost += (x - mean) * (x - mean));
        out.levels.push(means);
        out.lost.push(lost);
    }
    Ok(out)
}

impl Pyramid {
    /// The paper's bound, `sum_l ||P_l K - K||_F^2 / 4^l`.
    ///
    /// Levels count from 0, the finest, so it bounds the squared error of the finest level, and `4^l` times it that of level `l`. (Were
    /// the finest level 1, the sum could be a fourth of that error and would bound nothing.)
    pub fn bound(&self) -> f64 {
        self.lost.iter().rev().fold(0.0, |sum, lost| sum / 4.0 + lost)
    }

    /// The rows, `[tokens][dim]`, that `level` stands for: every token of a run is its mean.
    ///
    /// # Errors
    /// A level that is not there.
    pub fn reconstruct(&self, level: u32) -> Result<Vec<f32>, SelectError> {
        let Some(means) = self.levels.get(level as usize) else {
            return Err(SelectError::Layer { layer: level, layers: self.levels.len() as u32 });
        };
        let run_of = |token: usize| token / run(level) * self.dim;
        Ok((0..self.tokens).flat_map(|t| &means[run_of(t)..][..self.dim]).copied().collect())
    }
}

/// The means of runs of `run` rows, `[runs][dim]`; `each` is told every value and its run's mean.
pub(super) fn means(rows: &[f32], dim: usize, run: usize, mut each: impl FnMut(f64, f64)) -> Vec<f32> {
    let mut means = Vec::new();
    for run in rows.chunks(run.saturating_mul(dim)) {
        let n = (run.len() / dim) as f64;
        for c in 0..dim {
            let channel = || run.iter().skip(c).step_by(dim).map(|x| f64::from(*x));
            let mean = channel().sum::<f64>() / n;
            channel().for_each(|x| each(x, mean));
            means.push(mean as f32);
        }
    }
    means
}

/// Tokens of a run.
fn run(level: u32) -> usize {
    1usize.checked_shl(level + 1).unwrap_or(usize::MAX)
}
