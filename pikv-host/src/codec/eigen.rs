//! Eigenvectors of second moments, and the maps made of them.

use super::{FitError, Map};
use nalgebra::{DMatrix, SymmetricEigen};

/// The best map of its rank, and its error.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct LowRank {
    /// The map: the rows of `encode` are orthonormal and `decode` is its transpose, up to rounding to f32.
    pub map: Map,
    /// The sum of the eigenvalues of the dropped directions: the squared error over the fitted rows.
    pub tail: f64,
    /// All eigenvalues, falling; their sum is the energy of the rows.
    pub spectrum: Vec<f64>,
}

/// Iterations allowed for each row of a matrix. One or two are enough; beyond this the iteration does not converge.
const SWEEPS: usize = 64;

/// Eigenvalues of a symmetric matrix, `[dim][dim]`, falling, and its eigenvectors, a row each. Each eigenvector has the sign that makes
/// its largest entry positive.
pub(super) fn spectrum(dim: u32, matrix: &[f64]) -> Result<(Vec<f64>, Vec<f64>), FitError> {
    let d = dim as usize;
    let largest = matrix.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let found = SymmetricEigen::try_new(DMatrix::from_row_slice(d, d, matrix), f64::EPSILON, SWEEPS * d)
        .ok_or(FitError::Eigen { dim, largest })?;
    let (u, s) = (found.eigenvectors, found.eigenvalues);
    let mut order: Vec<usize> = (0..d).collect();
    order.sort_unstable_by(|a, b| s[*b].total_cmp(&s[*a]).then(a.cmp(b)));
    let mut vectors = Vec::with_capacity(d * d);
    for &c in &order {
        let most = (0..d).map(|r| u[(r, c)]).fold(0.0f64, |m, x| if x.abs() > m.abs() { x } else { m });
        let sign = if most < 0.0 { -1.0 } else { 1.0 };
        vectors.extend((0..d).map(|r| sign * u[(r, c)]));
    }
    Ok((order.iter().map(|c| s[*c].max(0.0)).collect(), vectors))
}

/// The map to the top `rank` directions of a second moment, around `bias`.
pub(super) fn low_rank(
    dim: u32,
    second: &[f64],
    rank: u32,
    bias: Option<Vec<f32>>,
) -> Result<LowRank, FitError> {
    if !(1..=dim).contains(&rank) {
        return Err(FitError::Rank { rank, dim });
    }
    let (spectrum, vectors) = spectrum(dim, second)?;
    let (d, r) = (dim as usize, rank as usize);
    let encode: Vec<f32> = vectors[..r * d].iter().map(|x| *x as f32).collect();
    let decode = (0..d).flat_map(|c| encode.iter().skip(c).step_by(d).copied()).collect();
    let map = Map::new(dim, rank, encode, decode, bias)?;
    Ok(LowRank { map, tail: spectrum[r..].iter().sum(), spectrum })
}

/// `values`, `[rows][cols]`, as a matrix.
pub(super) fn matrix(values: &[f32], cols: usize) -> DMatrix<f64> {
    DMatrix::from_fn(values.len() / cols, cols, |r, c| f64::from(values[r * cols + c]))
}
