//! First and second moments of rows: the input of the closed-form fits.

use super::{FitError, Map};
use pikv_core::page::MAX_DIM;

/// Sums over rows of one width, in f64: of each channel and of each product of two channels (exact for a product of two f32).
///
/// `8 (dim^2 + dim)` bytes; a row costs `dim^2 / 2` multiply-adds.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    dim: u32,
    rows: u64,
    sums: Vec<f64>,
    /// `[dim][dim]`; only entries `[i][j]` with `i <= j` are kept.
    products: Vec<f64>,
}

impl Moments {
    /// Moments of no rows.
    ///
    /// # Errors
    /// [`FitError::Setting`] for a width outside 1..=256.
    pub fn new(dim: u32) -> Result<Moments, FitError> {
        if !(1..=MAX_DIM).contains(&dim) {
            return Err(FitError::Setting { name: "dim", value: f64::from(dim), range: "1..=256" });
        }
        let d = dim as usize;
        Ok(Moments { dim, rows: 0, sums: vec![0.0; d], products: vec![0.0; d * d] })
    }

    /// Adds `rows`, `[rows][dim]`.
    ///
    /// # Errors
    /// [`FitError::Rows`] for a part of a row, [`FitError::NotFinite`] for a value that is NaN or infinite; nothing is added then.
    pub fn observe(&mut self, rows: &[f32]) -> Result<(), FitError> {
        let d = self.dim as usize;
        if !rows.len().is_multiple_of(d) {
            return Err(FitError::Rows { what: "rows", len: rows.len(), rows: rows.len() / d, width: d });
        }
        finite("rows", rows)?;
        rows.chunks_exact(d).for_each(|row| self.add(row));
        Ok(())
    }

    /// Adds one finite row.
    pub(super) fn add(&mut self, row: &[f32]) {
        let d = self.dim as usize;
        self.rows += 1;
        for (i, x) in row.iter().enumerate() {
            let x = f64::from(*x);
            self.sums[i] += x;
            for (sum, y) in self.products[i * d + i..(i + 1) * d].iter_mut().zip(&row[i..]) {
                *sum += x * f64::from(*y);
            }
        }
    }

    /// Channels of a row.
    pub fn dim(&self) -> u32 {
        self.dim
    }

    /// Rows added.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The mean row; zeros without rows.
    pub fn mean(&self) -> Vec<f64> {
        self.sums.iter().map(|s| s / self.rows.max(1) as f64).collect()
    }

    /// The sum of squares of each channel.
    pub fn energy(&self) -> Vec<f64> {
        self.products.iter().step_by(self.dim as usize + 1).copied().collect()
    }

    /// The mean square of each channel.
    pub fn mean_squares(&self) -> Vec<f64> {
        self.energy().into_iter().map(|e| e / self.rows.max(1) as f64).collect()
    }

    /// `sum (x - center)(x - center)^T`, `[dim][dim]`; without a center the rows are not centred.
    ///
    /// # Errors
    /// [`FitError::Width`] for a center of another width.
    pub fn second(&self, center: Option<&[f64]>) -> Result<Vec<f64>, FitError> {
        let d = self.dim as usize;
        if let Some(center) = center
            && center.len() != d
        {
            return Err(FitError::Width { what: "center", got: center.len() as u32, wanted: self.dim });
        }
        let mut out = vec![0.0; d * d];
        for i in 0..d {
            for j in i..d {
                let mut x = self.products[i * d + j];
                if let Some(c) = center {
                    x += self.rows as f64 * c[i] * c[j] - self.sums[i] * c[j] - c[i] * self.sums[j];
                }
                (out[i * d + j], out[j * d + i]) = (x, x);
            }
        }
        Ok(out)
    }

    /// `sum |x - decode encode (x - bias) - bias|^2` over the rows: the squared error of the map, exact up to rounding in f64 (about 1e-15
    /// of the total energy). O(dim^3).
    ///
    /// # Errors
    /// [`FitError::Width`] for a map of another width.
    pub fn residual(&self, map: &Map) -> Result<f64, FitError> {
        if map.wide() != self.dim {
            return Err(FitError::Width { what: "the map", got: map.wide(), wanted: self.dim });
        }
        let (d, n) = (self.dim as usize, map.narrow() as usize);
        let bias: Option<Vec<f64>> = map.bias().map(|b| b.iter().map(|b| f64::from(*b)).collect());
        let second = self.second(bias.as_deref())?;
        let (encode, decode) = (map.encode(), map.decode());
        let mut lost = 0.0;
        for i in 0..d {
            let mut row = vec![0.0; d];
            row[i] = 1.0;
            for (up, down) in decode[i * n..(i + 1) * n].iter().zip(encode.chunks_exact(d)) {
                for (x, down) in row.iter_mut().zip(down) {
                    *x -= f64::from(*up) * f64::from(*down);
                }
            }
            for (x, second) in row.iter().zip(second.chunks_exact(d)) {
                lost += x * second.iter().zip(&row).map(|(s, y)| s * y).sum::<f64>();
            }
        }
        Ok(lost.max(0.0))
    }

    #[cfg(feature = "fit")]
    pub(super) fn filled(&self) -> Result<&Moments, FitError> {
        if self.rows == 0 {
            return Err(FitError::TooFew { what: "rows", have: 0, least: 1 });
        }
        Ok(self)
    }
}

/// # Errors
/// The first value that is not finite.
pub(super) fn finite(what: &'static str, values: &[f32]) -> Result<(), FitError> {
    match values.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(FitError::NotFinite { what, index, value: values[index] }),
        None => Ok(()),
    }
}
