//! Auxiliary losses of a batch of logits, for monitoring (pikv does not train).

use super::{RouteError, Shape, length};
use pikv_lanes::route::softmax_sums;

/// Auxiliary training losses of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Auxiliary {
    /// `E sum_e f_e P_e`: `f_e` is the share of the choices of expert e, `P_e` the mean over rows of its softmax. 1 if both are uniform, at
    /// most E. Fedus et al. (Switch), arXiv 2101.03961, equation 4, without its factor.
    pub load_balance: f64,
    /// Mean over the rows of the squared log-sum-exp of the logits. Zoph et al. (ST-MoE), arXiv 2202.08906, equation 5, without
    /// its factor.
    pub z: f64,
}

/// The auxiliary losses of `logits`, `[rows][experts]`, with the choices `chosen`, `[rows][top_k]`. Both are 0 without rows. Same
/// bits on all lanes. O(rows * experts).
///
/// # Errors
/// An invalid shape (see [`Shape`]), slices of the wrong length, logits that are not finite, or an expert at or above `experts`.
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
