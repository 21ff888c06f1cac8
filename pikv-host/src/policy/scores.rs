//! Scores of tokens, from which the rules [`ChunkKv`](super::ChunkKv), [`FastV`](super::FastV) and [`PyramidKv`](super::PyramidKv) choose.

use crate::codec::SelectError;

/// Checks that scores of tokens are finite.
///
/// # Errors
/// [`SelectError::Score`]: the first that is not.
pub(super) fn finite(scores: &[f32]) -> Result<(), SelectError> {
    match scores.iter().position(|s| !s.is_finite()) {
        Some(token) => Err(SelectError::Score { token, value: scores[token] }),
        None => Ok(()),
    }
}

/// Token indices by falling score; of equal scores (0.0 equals -0.0) the older is first.
pub(super) fn falling(scores: &[f32]) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..scores.len()).collect();
    tokens.sort_by(|a, b| order(scores[*b].into(), scores[*a].into()));
    tokens
}

/// The order of two finite scores.
pub(super) fn order(a: f64, b: f64) -> std::cmp::Ordering {
    // Adding 0.0 makes -0.0 the same as 0.0.
    (a + 0.0).total_cmp(&(b + 0.0))
}
