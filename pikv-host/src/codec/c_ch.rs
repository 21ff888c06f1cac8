//! C_Ch: keeps or drops whole chunks of tokens, ChunkKV (arXiv 2502.00299).

use super::SelectError;

/// Selects chunks of neighbouring tokens in place of single tokens, so that text that belongs together is kept together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChunkKv {
    /// Tokens of a chunk, at least 1. The paper's choice is 10; a page of pikv has 32.
    pub chunk: u32,
    /// Tokens to keep at most.
    pub budget: u32,
}

impl ChunkKv {
    /// Chunks of `chunk` tokens; at most `budget` tokens are kept.
    pub const fn new(chunk: u32, budget: u32) -> ChunkKv {
        ChunkKv { chunk, budget }
    }
}

impl ChunkKv {
    /// One flag a token, oldest first: true for the tokens to keep, by their `scores`. A chunk's score is the mean of its tokens' scores,
    /// in f64; the last chunk may be shorter. Chunks are taken by falling score while they fit in the budget; of equal scores the older
    /// is first. A chunk that does not fit is skipped, so only a shorter last chunk can be taken after it. O(n log n).
    ///
    /// # Errors
    /// [`SelectError::Setting`] for chunks of no tokens, or a budget that is below both one chunk and the number of tokens;
    /// [`SelectError::Score`] for a score that is not finite.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::codec::ChunkKv;
    /// let keep = ChunkKv::new(2, 2).keep(&[0.9, 0.0, 0.5, 0.5, 0.1])?;
    /// assert_eq!(keep, [false, false, true, true, false]);
    /// # Ok::<(), pikv::codec::SelectError>(())
    /// ```
    pub fn keep(&self, scores: &[f32]) -> Result<Vec<bool>, SelectError> {
        let (chunk, mut left) = (self.chunk as usize, self.budget as usize);
        if chunk == 0 {
            return Err(SelectError::Setting { name: "chunk", value: 0.0, range: "at least 1" });
        }
        if left < chunk.min(scores.len()) {
            let range = "at least one chunk, or all tokens";
            return Err(SelectError::Setting { name: "budget", value: left as f64, range });
        }
        check(scores)?;
        let mean = |c: &[f32]| c.iter().map(|s| f64::from(*s)).sum::<f64>() / c.len() as f64;
        let means: Vec<f64> = scores.chunks(chunk).map(mean).collect();
        let mut order: Vec<usize> = (0..means.len()).collect();
        order.sort_by(|a, b| rank(means[*b], means[*a]));
        let mut keep = vec![false; scores.len()];
        for at in order {
            let tokens = at * chunk..scores.len().min((at + 1) * chunk);
            if tokens.len() <= left {
                left -= tokens.len();
                keep[tokens].fill(true);
            }
        }
        Ok(keep)
    }
}

/// # Errors
/// [`SelectError::Score`]: the first score that is not finite.
pub(super) fn check(scores: &[f32]) -> Result<(), SelectError> {
    match scores.iter().position(|s| !s.is_finite()) {
        Some(token) => Err(SelectError::Score { token, value: scores[token] }),
        None => Ok(()),
    }
}

/// Token indices by falling score; of equal scores (0.0 equals -0.0) the older is first.
pub(super) fn falling(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| rank(scores[*b].into(), scores[*a].into()));
    order
}

/// The order of two finite scores.
fn rank(a: f64, b: f64) -> std::cmp::Ordering {
    // Adding 0.0 makes -0.0 the same as 0.0.
    (a + 0.0).total_cmp(&(b + 0.0))
}
