//! Auxiliary losses of a batch of logits, as values to watch (training is not pikv's).

use super::{RouteError, Shape, length};
use pikv_lanes::route::softmax_sums;

/// What a router's batch would be charged in training.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Auxiliary {
    /// `E sum_e f_e P_e`: `f_e` the share of the choices that went to expert e, `P_e` the mean over the rows of its softmax.
    /// 1 if both are even, at most E. Fedus et al. (Switch), arXiv 2101.03961, equation 4, without its factor.
    pub load_balance: f64,
    /// Mean over the rows of the squared log-sum-exp of the logits. Zoph et al. (ST-MoE), arXiv 2202.08906, equation 5, without
    /// its factor.
    pub z: f64,
}

/// The auxiliary losses of `logits`, `[rows][experts]`, of which `chosen`, `[rows][top_k]`, were chosen. Both are 0 without rows.
/// The same bits on all lanes. O(rows * experts).
///
/// # Errors
/// A shape that is none, slices of the wrong length, logits that are not finite, or an expert that is not there.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::router::{Shape, auxiliary};
/// let even = auxiliary(Shape::new(2, 1), &[0.0, 0.0, 0.0, 0.0], &[0, 1]).unwrap();
/// assert!((even.load_balance - 1.0).abs() < 1e-7 && (even.z - 2f64.ln().powi(2)).abs() < 1e-6);
/// ```
pub fn auxiliary(shape: Shape, logits: &[f32], chosen: &[u16]) -> Result<Auxiliary, RouteError> {
    let shape = shape.check()?;
    let (n, experts, top_k) = (shape.rows(logits)?, shape.experts as usize, shape.top_k as usize);
    length("chosen", chosen.len(), n * top_k, "rows * top_k")?;
    let mut counts = vec![0u64; experts];
    for (i, &expert) in chosen.iter().enumerate() {
        match counts.get_mut(usize::from(expert)) {
            Some(count) => *count += 1,
            None => return Err(RouteError::Expert { row: i / top_k, expert, experts: shape.experts }),
        }
    }
    if n == 0 {
        return Ok(Auxiliary::default());
    }
    let mut p = vec![0.0; experts];
    let z = softmax_sums(shape.lanes, logits, &mut p);
    let share = |count: u64| count as f64 / chosen.len() as f64;
    let sum: f64 = counts.iter().zip(&p).map(|(count, p)| share(*count) * (p / n as f64)).sum();
    Ok(Auxiliary { load_balance: experts as f64 * sum, z: z / n as f64 })
}
