//! C_Ch-lit: chunks in the literal form of arXiv 2508.06526, a principal component analysis of each block of tokens.
//!
//! [`Coding::block_pca`](super::Coding::block_pca) stores pages in this form, with a page as the block. It centres the rows: the mean
//! takes as much room as one more vector, but no coefficients.

#[cfg(feature = "fit")]
use super::eigen::low_rank;
use super::{FitError, Moments, jacobi};
use half::f16;

/// A block of rows, factored into a basis and coefficients.
#[derive(Clone, Debug, PartialEq)]
#[cfg(feature = "fit")]
#[non_exhaustive]
pub struct BlockPca {
    /// `[rank][wide]`, orthonormal rows.
    pub basis: Vec<f32>,
    /// `[rows][rank]`: row `i` is about `sum_k coefficients[i][k] basis[k]`.
    pub coefficients: Vec<f32>,
    /// The sum of the dropped `sigma^2`, which equals `||X - X~||_F^2` of the block.
    pub tail: f64,
}

#[cfg(feature = "fit")]
impl BlockPca {
    /// Bytes of both factors at `bytes` a value. They take less than the block itself only if
    /// `rank < rows wide / (rows + wide)`.
    pub fn bytes(&self, bytes: u64) -> u64 {
        (self.basis.len() + self.coefficients.len()) as u64 * bytes
    }
}

/// The best `rank` directions for one block, `[rows][wide]`, without centring, and the block's coefficients in them.
///
/// Needs the feature `fit`.
///
/// O(rows wide^2 + wide^3) for every block, and the basis is stored with the block; [`svd`](super::svd) is fitted once.
///
/// # Errors
/// No rows, or a part of a row ([`FitError::Rows`]); values that are not finite; a rank outside 1..=wide.
#[cfg(feature = "fit")]
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

/// Mean and basis of a block, rounded to f16 as a page stores them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockBasis {
    /// `[wide]`, values of f16.
    pub mean: Vec<f32>,
    /// `[rank][wide]`, orthonormal rows rounded to f16. Rows past the rank of the block are 0.
    pub basis: Vec<f32>,
    /// The sum of the dropped `sigma^2` of the centred rows, before rounding.
    pub tail: f64,
}

/// The best `rank` directions for one block, `[rows][wide]`, around its mean. Same bits on every machine.
///
/// Diagonalises the Gram matrix of the rows in f64 by Jacobi rotations in a fixed order. Meant for blocks of few rows:
/// O(rows^2 wide + rows^3).
///
/// # Errors
/// No rows, or a part of a row ([`FitError::Rows`]); values that are not finite; a rank outside 1..=wide.
pub fn block_basis(rows: &[f32], wide: u32, rank: u32) -> Result<BlockBasis, FitError> {
    // Checks width and rows.
    Moments::new(wide)?.observe(rows)?;
    if rows.is_empty() {
        return Err(FitError::TooFew { what: "rows", have: 0, least: 1 });
    }
    if !(1..=wide).contains(&rank) {
        return Err(FitError::Rank { rank, dim: wide });
    }
    Ok(basis(rows, wide as usize, rank as usize))
}

/// [`block_basis`] of checked arguments.
pub(super) fn basis(rows: &[f32], wide: usize, rank: usize) -> BlockBasis {
    let n = rows.len() / wide;
    let rounded = |x: f64| f16::from_f32((x as f32).clamp(-65504.0, 65504.0)).to_f32();
    let mean: Vec<f32> = (0..wide)
        .map(|c| rounded(rows.iter().skip(c).step_by(wide).map(|x| f64::from(*x)).sum::<f64>() / n as f64))
        .collect();
    let centred: Vec<f64> =
        rows.iter().enumerate().map(|(i, x)| f64::from(*x) - f64::from(mean[i % wide])).collect();
    let row = |i: usize| &centred[i * wide..(i + 1) * wide];
    let mut gram = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let dot: f64 = row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum();
            (gram[i * n + j], gram[j * n + i]) = (dot, dot);
        }
    }
    let vectors = jacobi::diagonal(&mut gram, n);
    let value = |i: usize| gram[i * n + i].max(0.0);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| value(*b).total_cmp(&value(*a)));
    let least = value(order[0]) * 1e-12;
    let mut basis = vec![0.0; rank * wide];
    for (out, &k) in basis.chunks_exact_mut(wide).zip(&order) {
        // A value this far below the largest is rounding error, without a direction.
        if value(k) <= least {
            break;
        }
        let mut sum = vec![0.0; wide];
        for (i, weight) in vectors[k * n..(k + 1) * n].iter().enumerate() {
            sum.iter_mut().zip(row(i)).for_each(|(sum, x)| *sum += *weight * x);
        }
        let norm = value(k).sqrt();
        out.iter_mut().zip(&sum).for_each(|(out, x)| *out = rounded(x / norm));
    }
    let tail = order.iter().skip(rank).map(|k| value(*k)).sum();
    BlockBasis { mean, basis, tail }
}
