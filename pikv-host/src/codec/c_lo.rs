//! C_Lo: low rank by a given projector, in the form of LoRA (arXiv 2106.09685; arXiv 2508.06526, C_Lo).

use super::{Map, MapError};

/// The map of a projector: `stored = down x`, `x ~ up stored`, with `down`, `[rank][wide]`, and `up`, `[wide][rank]`.
///
/// Its error is that of the truncated SVD of the same rank only where `up down` is the orthogonal projector to the rows' top
/// `rank` directions; any other loses more ([`Moments::residual`](super::Moments::residual) says how much). Storing costs
/// `rank wide` multiply-adds a row, and reading as many a query.
///
/// # Errors
/// Those of [`Map::new`].
pub fn lora(wide: u32, rank: u32, down: Vec<f32>, up: Vec<f32>) -> Result<Map, MapError> {
    Map::new(wide, rank, down, up, None)
}
