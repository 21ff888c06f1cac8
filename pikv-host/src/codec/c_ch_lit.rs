//! C_Ch-lit: chunks in the letter of arXiv 2508.06526, a principal component analysis of each block of tokens.

use super::eigen::low_rank;
use super::{FitError, Moments};

/// A block of rows in a basis of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockPca {
    /// `[rank][wide]`, orthonormal rows.
    pub basis: Vec<f32>,
    /// `[rows][rank]`: row `i` is about `sum_k coefficients[i][k] basis[k]`.
    pub coefficients: Vec<f32>,
    /// The sum of the dropped `sigma^2`: exactly `||X - X~||_F^2` of the block.
    pub tail: f64,
}

impl BlockPca {
    /// Bytes of the two factors at `bytes` a value; they are fewer than the block's own only where
    /// `rank < rows wide / (rows + wide)`.
    pub fn bytes(&self, bytes: u64) -> u64 {
        (self.basis.len() + self.coefficients.len()) as u64 * bytes
    }
}

/// The best `rank` directions for one block, `[rows][wide]`, not centred, and the rows in them.
///
/// O(rows wide^2 + wide^3): unlike [`svd`](super::svd), which is fitted once, this is paid for each block, and the basis is stored
/// with it.
///
/// # Errors
/// No rows, or a part of one; values that are not finite; a rank that is not 1..=wide.
pub fn block_pca(rows: &[f32], wide: u32, rank: u32) -> Result<BlockPca, FitError> {
    let mut moments = Moments::new(wide)?;
    moments.observe(rows)?;
    let found = low_rank(wide, &moments.filled()?.second(None)?, rank, None)?;
    let (w, r) = (wide as usize, rank as usize);
    let mut coefficients = vec![0.0; rows.len() / w * r];
    for (row, out) in rows.chunks_exact(w).zip(coefficients.chunks_exact_mut(r)) {
        found.map.encode_row(row, out);
    }
    Ok(BlockPca { basis: found.map.encode().into_owned(), coefficients, tail: found.tail })
}
