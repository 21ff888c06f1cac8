//! C_F-lit: FastV in the literal form of arXiv 2508.06526, a crop of the channels to the first `r`.

use super::FitError;
use super::pairs::{Crop, choose, energies};
use pikv_core::rope::Rope;

/// The choice of channels that a [`crop`] keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CropBy {
    /// The first channels, the paper's literal form: the first rotation pairs, then channels that do not rotate.
    First,
    /// The channels of the largest energy: no other crop to as many channels loses less.
    Energy,
}

/// Keeps `keep` channels. `energy`, `[wide]`, is the sum of squares of each channel over the rows
/// ([`Moments::energy`](super::Moments::energy)).
///
/// `tail` is the sum of the dropped energies, which equals `||X - X~||_F^2`; divided by the sum of all energies it is the squared
/// relative error. Where `rope` is given, rotation pairs stay whole, for keys stored rotated or rotated on read: half a pair would
/// mix positions. O(wide^2).
///
/// # Errors
/// No channels or more than 256, energies that are negative or not finite, a rotary width that is odd, 0 or above `wide`, or a `keep`
/// that whole pairs and single channels cannot make up ([`FitError::Keep`]).
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
