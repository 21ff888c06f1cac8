//! C_Lo+: low rank with bias and scale, rsLoRA's (arXiv 2312.03732; arXiv 2508.06526, LoRA++).

#[cfg(feature = "fit")]
use super::{FitError, LowRank, Moments, eigen};
use super::{Map, MapError};

/// The map of `x ~ s W_u W_d (x - b) + b` with `s = alpha / sqrt(rank)`, rsLoRA's scale, under which the size of the update does not
/// depend on the rank. `down` is `W_d`, `[rank][wide]`; `up` is `W_u`, `[wide][rank]`; `bias` is `b`, `[wide]`.
///
/// `s` is multiplied into `up`, rounded once, so reading costs what [`lora`](super::lora) costs. The paper writes `W_d W_u K + b`, the
/// bias added alone: where `s W_u W_d` is a projector `P`, this is that form with the bias `(I - P) b`.
///
/// # Errors
/// An alpha that is 0 or not finite, and those of [`Map::new`].
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

/// The best map of that form: the mean as bias and the top `rank` directions of the centred rows; `up` comes with any scale already
/// in it.
///
/// Needs the feature `fit`.
///
/// `tail`, the sum of the dropped eigenvalues of `sum (x - mean)(x - mean)^T`, is exactly `||X - X~||_F^2`, and never above that of
/// [`svd`](super::svd) at the same rank. For keys that are read as they are stored the bias adds the same to every logit of a query,
/// so attention never sees it, and a smaller tail need not mean a better one; keys that are turned on read do see it. O(wide^3).
///
/// # Errors
/// No rows, or a rank that is not 1..=wide.
#[cfg(feature = "fit")]
pub fn fit_lora_plus(moments: &Moments, rank: u32) -> Result<LowRank, FitError> {
    let mean: Vec<f32> = moments.filled()?.mean().iter().map(|m| *m as f32).collect();
    let center: Vec<f64> = mean.iter().map(|m| f64::from(*m)).collect();
    eigen::low_rank(moments.dim(), &moments.second(Some(&center))?, rank, Some(mean))
}
