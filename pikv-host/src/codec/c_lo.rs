//! C_Lo: low rank by a given projector, as in LoRA (arXiv 2106.09685; arXiv 2508.06526, C_Lo).

use super::{Map, MapError};

/// The map of a given projector: `stored = down x`, `x ~ up stored`, with `down`, `[rank][wide]`, and `up`, `[wide][rank]`.
///
/// The error equals that of the truncated SVD of the same rank only if `up down` is the orthogonal projector to the rows' top `rank`
/// directions; otherwise it is larger ([`Moments::residual`](super::Moments::residual) computes it). Encoding costs `rank wide`
/// multiply-adds a row, and folding as many a query.
///
/// # Errors
/// [`MapError::Width`], [`MapError::Length`] or [`MapError::NotFinite`], as in [`Map::new`].
pub fn lora(wide: u32, rank: u32, down: Vec<f32>, up: Vec<f32>) -> Result<Map, MapError> {
    Map::new(wide, rank, down, up, None)
}
