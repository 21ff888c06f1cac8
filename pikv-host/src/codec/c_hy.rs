//! C_Hy: a coding for each head by its importance, under one budget of bytes (arXiv 2508.06526, C_Hy).

use super::SelectError;
use std::cmp::Ordering;

/// The bytes and the loss of one coding of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Cost {
    /// Bytes that it takes.
    pub bytes: u64,
    /// What it loses, at least 0, in any measure that adds up over heads: a tail energy, a KL.
    pub error: f64,
}

impl Cost {
    /// A coding that takes `bytes` and errs by `error`.
    pub const fn new(bytes: u64, error: f64) -> Cost {
        Cost { bytes, error }
    }
}

/// A head, and the codings it may get.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeadCodings {
    /// What its errors are multiplied by, at least 0: its share of the attention mass, or of the output's energy.
    pub importance: f64,
    /// In any order.
    pub codings: Vec<Cost>,
}

impl HeadCodings {
    /// A head of this importance that may be stored by any of `codings`.
    pub fn new(importance: f64, codings: Vec<Cost>) -> HeadCodings {
        HeadCodings { importance, codings }
    }
}

/// A coding for each head.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hybrid {
    /// Of each head, the index into its codings.
    pub chosen: Vec<usize>,
    /// Bytes of the chosen ones.
    pub bytes: u64,
    /// Their errors, weighted by importance.
    pub error: f64,
    /// No choice under this budget has an error below this.
    pub bound: f64,
}

/// One move along a head's hull.
struct Step {
    head: usize,
    to: usize,
    bytes: u64,
    /// Weighted error that each byte takes away; never more than that of the head's step before.
    per_byte: f64,
}

/// Picks a coding for each of `heads` so that the bytes stay within `budget` and the weighted error is small.
///
/// Greedy: every head starts at its smallest coding; then steps along the lower convex hulls of (bytes, error) are taken by falling
/// gain per byte, of equal gains the lower head first. A step that does not fit ends its head's, and the others go on. Codings above
/// the hull are never picked. The choice is optimal where every step up to the first that does not fit fills the budget, so with
/// convex codings in equal steps always; in general its error is within the gain of that one step of the best, and
/// [`Hybrid::bound`], the optimum of the linear relaxation, tells how near. O(n log n) over all codings.
///
/// # Errors
/// A head without codings, errors or importances that are negative or not finite, a budget that the smallest codings pass.
pub fn hybrid(heads: &[HeadCodings], budget: u64) -> Result<Hybrid, SelectError> {
    let mut chosen = Vec::with_capacity(heads.len());
    let mut steps = Vec::new();
    let mut needed = 0u64;
    for (head, options) in heads.iter().enumerate() {
        check(head, options)?;
        let hull = hull(&options.codings);
        let Some(&start) = hull.first() else { return Err(SelectError::NoCodings { head }) };
        chosen.push(start);
        needed = needed.saturating_add(options.codings[start].bytes);
        let mut steepest = f64::INFINITY;
        for at in hull.windows(2) {
            let (from, to) = (options.codings[at[0]], options.codings[at[1]]);
            let bytes = to.bytes - from.bytes;
            steepest = (options.importance * (from.error - to.error) / bytes as f64).min(steepest);
            steps.push(Step { head, to: at[1], bytes, per_byte: steepest });
        }
    }
    if needed > budget {
        return Err(SelectError::Budget { budget, needed });
    }
    let error = |chosen: &[usize]| -> f64 {
        heads.iter().zip(chosen).map(|(h, i)| h.importance * h.codings[*i].error).sum()
    };
    // Stable, and a head's own steps never rise: they stay in order.
    steps.sort_by(|a, b| b.per_byte.total_cmp(&a.per_byte));
    let mut left = budget - needed;
    let mut ended = vec![false; heads.len()];
    let mut bound = None;
    for step in steps.iter().filter(|s| s.per_byte > 0.0) {
        if ended[step.head] {
            continue;
        }
        if step.bytes <= left {
            left -= step.bytes;
            chosen[step.head] = step.to;
        } else {
            bound.get_or_insert_with(|| error(&chosen) - step.per_byte * left as f64);
            ended[step.head] = true;
        }
    }
    let error = error(&chosen);
    Ok(Hybrid { chosen, bytes: budget - left, error, bound: bound.unwrap_or(error).clamp(0.0, error) })
}

fn check(head: usize, options: &HeadCodings) -> Result<(), SelectError> {
    let cost = |what, value: f64| {
        if value.is_finite() && value >= 0.0 { Ok(()) } else { Err(SelectError::Cost { what, head, value }) }
    };
    cost("importance", options.importance)?;
    options.codings.iter().try_for_each(|c| cost("error", c.error))
}

/// The codings on the lower convex hull, from the smallest to the least error; of equal ones the first.
fn hull(codings: &[Cost]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..codings.len()).collect();
    let key = |i: usize| (codings[i].bytes, codings[i].error);
    order.sort_by(|a, b| {
        let ((x, e), (y, f)) = (key(*a), key(*b));
        x.cmp(&y).then(e.partial_cmp(&f).unwrap_or(Ordering::Equal))
    });
    let mut hull: Vec<usize> = Vec::new();
    for at in order {
        let (bytes, error) = key(at);
        if hull.last().is_some_and(|last| codings[*last].error <= error) {
            continue;
        }
        // Between its neighbours a point stays unless the second slope is the steeper one; on one line it is a smaller step.
        while let [.., a, b] = hull[..] {
            let ((x, e), (y, f)) = (key(a), key(b));
            let (first, second) = ((e - f) / (y - x) as f64, (f - error) / (bytes - y) as f64);
            if first >= second {
                break;
            }
            hull.pop();
        }
        hull.push(at);
    }
    hull
}
