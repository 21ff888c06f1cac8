//! C_Pr: structured pruning of key channels, ThinK (arXiv 2407.21018).

use super::FitError;
use super::pairs::{Crop, choose, energies};
use pikv_core::rope::Rope;

/// Keeps the `keep` key channels of the largest `mean q_c^2 * mean k_c^2`. Up to a factor for the numbers of rows this is the square of
/// ThinK's `|Q_c K_c^T|_F`, the contribution of channel `c` to the logits.
///
/// `q_squares` and `k_squares`, `[wide]`, are [`Moments::mean_squares`](super::Moments::mean_squares) of the queries of a KV head's group
/// and of its keys. Where `rope` is given, a pair stays whole and scores `(q_a^2 + q_b^2)(k_a^2 + k_b^2) / 2`, which no rotation
/// changes. `tail` is the sum of the dropped scores; by Cauchy-Schwarz the mean squared logit error is at most `tail` times the number
/// of dropped channels. Of equal scores the lower channel is kept. O(wide^2).
///
/// # Errors
/// Slices of different length, empty, or longer than 256; values that are negative or not finite; a rotary width that is odd, 0 or
/// above `wide`; or a `keep` that whole pairs and single channels cannot make up ([`FitError::Keep`]).
pub fn think(q_squares: &[f64], k_squares: &[f64], rope: Option<Rope>, keep: u32) -> Result<Crop, FitError> {
    energies("q_squares", q_squares)?;
    energies("k_squares", k_squares)?;
    let wide = k_squares.len();
    if q_squares.len() != wide {
        return Err(FitError::Width { what: "q_squares", got: q_squares.len() as u32, wanted: wide as u32 });
    }
    let (q, k) = (q_squares, k_squares);
    let score = |a: usize, b: Option<usize>| match b {
        Some(b) => (q[a] + q[b]) * (k[a] + k[b]) / 2.0,
        None => q[a] * k[a],
    };
    choose(wide, rope, keep, true, score)
}
