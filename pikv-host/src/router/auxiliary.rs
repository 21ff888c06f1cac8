//! Auxiliary losses of a batch of logits, as values to watch (training is not pikv's).

use super::{RouteError, RowKernel, Shape, length};
use pikv_core::math;
use pikv_core::score::{load, rows, softmax, span};
use pikv_core::warp::{LANES, Warp};

/// What a router's batch would be charged in training.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
/// use pikv_host::router::{Shape, auxiliary};
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
    let z = shape.run(Sums { logits, p: &mut p });
    let share = |count: u64| count as f64 / chosen.len() as f64;
    let sum: f64 = counts.iter().zip(&p).map(|(count, p)| share(*count) * (p / n as f64)).sum();
    Ok(Auxiliary { load_balance: experts as f64 * sum, z: z / n as f64 })
}

/// Adds the softmax of each row to `p`, and gives the sum of the squared log-sum-exps.
struct Sums<'a> {
    logits: &'a [f32],
    p: &'a mut [f64],
}

impl RowKernel for Sums<'_> {
    type Out = f64;
    #[inline(always)]
    fn run<W: Warp, const R: usize>(self, w: W) -> f64 {
        let experts = self.p.len();
        let live = span::<R>(0, experts);
        let mut z = 0.0;
        let mut row = [0.0; LANES];
        for logits in self.logits.chunks_exact(experts) {
            let x = load::<W, R>(w, logits);
            let s = softmax(w, &x, &live);
            for r in 0..rows(experts) {
                w.store(w.div(s.e[r], w.splat(s.sum)), &mut row);
                for (sum, p) in self.p[r * LANES..].iter_mut().zip(&row) {
                    *sum += f64::from(*p);
                }
            }
            let lse = f64::from(s.top) + f64::from(w.lane(math::ln(w, w.splat(s.sum)), 0));
            z += lse * lse;
        }
        z
    }
}
