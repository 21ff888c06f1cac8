//! C_F-lit: FastV in the letter of arXiv 2508.06526, a crop of the channels to the first `r`.

use super::FitError;
use super::pairs::{Crop, choose, energies};
use pikv_core::rope::Rope;

/// Which channels a [`crop`] keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CropBy {
    /// The first ones, the paper's letter: of a rotation its first pairs, then what does not turn.
    First,
    /// Those of the largest energy, which no other crop of as many beats.
    Energy,
}

/// Keeps `keep` of the channels that `energy`, `[wide]`, is of: for each the sum of its squares over the rows
/// ([`Moments::energy`](super::Moments::energy)).
///
/// `tail` is the sum of the dropped energies and exactly `||X - X~||_F^2`, so relative to the sum of all it is the squared relative
/// error. Where `rope` is given, for keys stored rotated or turned on read alike, its pairs stay whole: half a pair would mix
/// positions. O(wide^2).
///
/// # Errors
/// No channels or more than 256, energies that are negative or not finite, a rotation that is none, or a number to keep that whole
/// pairs cannot make.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::codec::{CropBy, crop};
/// let cropped = crop(&[1.0, 5.0, 0.5, 3.0], None, 2, CropBy::Energy)?;
/// assert_eq!((cropped.channels, cropped.tail), (vec![1, 3], 1.5));
/// # Ok::<(), pikv::codec::FitError>(())
/// ```
pub fn crop(energy: &[f64], rope: Option<Rope>, keep: u32, by: CropBy) -> Result<Crop, FitError> {
    energies("energy", energy)?;
    let score = |a: usize, b: Option<usize>| energy[a] + b.map_or(0.0, |b| energy[b]);
    choose(energy.len(), rope, keep, by == CropBy::Energy, score)
}
