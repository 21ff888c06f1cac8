//! C_Lo+: low rank with bias and the scale of rsLoRA (arXiv 2312.03732; arXiv 2508.06526, LoRA++).

#[cfg(feature = "fit")]
use super::{FitError, LowRank, Moments, eigen};
use super::{Map, MapError};

/// The map of `x ~ s W_u W_d (x - b) + b` with rsLoRA's scale `s = alpha / sqrt(rank)`, which makes the size of the update independent
/// of the rank. `down` is `W_d`, `[rank][wide]`; `up` is `W_u`, `[wide][rank]`; `bias` is `b`, `[wide]`.
///
/// `up` is multiplied by `s`, rounded once, so reading costs the same as with [`lora`](super::lora). The paper writes
/// `W_d W_u K + b`, without subtracting the bias first: if `s W_u W_d` is a projector `P`, this is that form with the bias `(I - P) b`.
///
/// # Errors
/// [`MapError::Alpha`] for an alpha that is 0 or not finite, and the errors of [`Map::new`].
pub fn lora_plus(
    wide: u32,
    rank: u32,
    alpha: f32,
    down: Vec<f32>,
    mut up: Vec<f32>,
    bias: Vec<f32>,
) -> Result<Map, MapError> {
    if !alpha.is_finite() || alpha == 0.0 {
        return Err(MapError::Alpha(alpha));
    }
    let scale = alpha / (rank.max(1) as f32).sqrt();
    up.iter_mut().for_each(|x| *x *= scale);
    Map::new(wide, rank, down, up, Some(bias))
}

/// The best map of this form: the mean as bias and the top `rank` directions of the centred rows. `up` includes the scale.
///
/// Needs the feature `fit`.
///
/// `tail`, the sum of the dropped eigenvalues of `sum (x - mean)(x - mean)^T`, equals `||X - X~||_F^2` and is never above that of
/// [`svd`](super::svd) at the same rank. For keys that are read as they are stored, the bias adds the same constant to every logit of a
/// query and does not change attention, so a smaller tail need not give better attention; for keys that are rotated on read it does
/// change it. O(wide^3).
///
/// # Errors
/// [`FitError::TooFew`] without rows, [`FitError::Rank`] for a rank outside 1..=wide.
#[cfg(feature = "fit")]
pub fn fit_lora_plus(moments: &Moments, rank: u32) -> Result<LowRank, FitError> {
    let mean: Vec<f32> = moments.filled()?.mean().iter().map(|m| *m as f32).collect();
    let center: Vec<f64> = mean.iter().map(|m| f64::from(*m)).collect();
    eigen::low_rank(moments.dim(), &moments.second(Some(&center))?, rank, Some(mean))
}
