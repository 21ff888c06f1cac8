//! C_Py-lit: the pyramid in the literal form of arXiv 2508.06526, means over runs of tokens that double from level to level.
//!
//! [`Coding::means`](super::Coding::means) stores pages at one level of it: every token is read as the mean of its run, the paper's
//! `P_l K`. For levels that rise with age, use two such codecs, the second through [`CacheConfig::age`](crate::CacheConfig::age).

use super::SelectError;
use pikv_core::page::MAX_DIM;

/// The means of all levels. Level `l` averages runs of `2^(l + 1)` tokens; the last run may be shorter.
#[derive(Clone, Debug, PartialEq)]
pub struct Pyramid {
    /// Means of each level, `[runs][dim]`, the finest level first.
    pub levels: Vec<Vec<f32>>,
    /// Error of each level, `||P_l K - K||_F^2`: that of [`Pyramid::reconstruct`], up to the rounding of the means to f32.
    pub lost: Vec<f64>,
    dim: usize,
    tokens: usize,
}

/// A pyramid of `levels` over `rows`, `[tokens][dim]`. Sums are in f64. O(tokens dim levels). The finest level has half as many means as
/// there are rows; all levels together have at most as many.
///
/// # Errors
/// [`SelectError::Setting`] for levels outside 1..=31 or a `dim` outside 1..=256, [`SelectError::Rows`] for a part of a row,
/// [`SelectError::NotFinite`] for a value that is NaN or infinite.
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
    /// Levels count from 0, the finest, so the sum bounds the squared error of the finest level, and `4^l` times the sum bounds that of
    /// level
    /// `l`. (Counted from 1, the sum could be a fourth of the finest level's error and would not be a bound.)
    pub fn bound(&self) -> f64 {
        self.lost.iter().rev().fold(0.0, |sum, lost| sum / 4.0 + lost)
    }

    /// The rows, `[tokens][dim]`, with every token of a run replaced by the mean of the run at `level`.
    ///
    /// # Errors
    /// [`SelectError::Layer`] for a level out of range.
    pub fn reconstruct(&self, level: u32) -> Result<Vec<f32>, SelectError> {
        let Some(means) = self.levels.get(level as usize) else {
            return Err(SelectError::Layer { layer: level, layers: self.levels.len() as u32 });
        };
        let run_of = |token: usize| token / run(level) * self.dim;
        Ok((0..self.tokens).flat_map(|t| &means[run_of(t)..][..self.dim]).copied().collect())
    }
}

/// The means of runs of `run` rows, `[runs][dim]`; calls `each` with every value and the mean of its run.
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
