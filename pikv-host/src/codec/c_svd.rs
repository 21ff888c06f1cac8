//! C_SVD: truncated singular value decomposition (arXiv 2508.06526, C_SVD) with a basis fitted in advance, as in Eigen Attention
//! (arXiv 2408.05646).

use super::eigen::{LowRank, low_rank};
use super::{FitError, Moments};

/// The top `rank` right singular vectors `B` of a head's calibration rows `X`: `stored = B^T x`, `x ~ B stored`.
///
/// Needs the feature `fit`.
///
/// They are the eigenvectors of `X^T X`, without centring. `tail`, the sum of the dropped `sigma^2`, equals `||X - X B B^T||_F^2`; no map
/// of that rank without a bias loses less on those rows (Eckart-Young). This does not bound the error on other rows, nor perplexity.
/// Fitting costs O(wide^3); a row costs `rank wide` multiply-adds, a query as many.
///
/// Fit it to the rows that the store keeps: keys before their rotation, for layers that rotate keys on read. Rotated keys mix
/// positions in one basis.
///
/// # Errors
/// [`FitError::TooFew`] without rows, [`FitError::Rank`] for a rank outside 1..=wide.
#[cfg(feature = "fit")]
pub fn svd(moments: &Moments, rank: u32) -> Result<LowRank, FitError> {
    low_rank(moments.dim(), &moments.filled()?.second(None)?, rank, None)
}
