//! C_SVD: truncated singular value decomposition (arXiv 2508.06526, C_SVD; the basis is fixed ahead, as in Eigen Attention,
//! arXiv 2408.05646).

use super::eigen::{LowRank, low_rank};
use super::{FitError, Moments};

/// The top `rank` right singular vectors `B` of a head's calibration rows `X`: `stored = B^T x`, `x ~ B stored`.
///
/// Needs the feature `fit`.
///
/// They are the eigenvectors of `X^T X`, not centred. `tail`, the sum of the dropped `sigma^2`, is exactly `||X - X B B^T||_F^2`, and
/// no map of that rank without a bias loses less on those rows (Eckart-Young). It says nothing of rows unlike them, nor of
/// perplexity. O(wide^3) to fit; a row costs `rank wide` multiply-adds, a query as many.
///
/// Fit to what the store keeps: keys before their rotation, where it turns them on read. Keys that were rotated mix positions
/// in one basis.
///
/// # Errors
/// No rows, or a rank that is not 1..=wide.
#[cfg(feature = "fit")]
pub fn svd(moments: &Moments, rank: u32) -> Result<LowRank, FitError> {
    low_rank(moments.dim(), &moments.filled()?.second(None)?, rank, None)
}
