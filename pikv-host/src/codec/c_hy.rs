//! C_Hy: chooses a coding for each head by its importance, under one byte budget (arXiv 2508.06526, C_Hy).

use super::SelectError;
use std::cmp::Ordering;

/// Bytes and error of one coding of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Cost {
    /// Bytes that the head takes in this coding.
    pub bytes: u64,
    /// Error, at least 0, in any measure that adds up over heads, such as a tail energy or a KL.
    pub error: f64,
}

impl Cost {
    /// A coding of `bytes` bytes and error `error`.
    pub const fn new(bytes: u64, error: f64) -> Cost {
        Cost { bytes, error }
    }
}

/// The importance of a head and its possible codings.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeadCodings {
    /// Weight of the head's errors, at least 0: its share of the attention mass or of the output's energy, for example.
    pub importance: f64,
    /// Possible codings, in any order.
    pub codings: Vec<Cost>,
}

impl HeadCodings {
    /// A head of this importance, with `codings` to choose from.
    pub fn new(importance: f64, codings: Vec<Cost>) -> HeadCodings {
        HeadCodings { importance, codings }
    }
}

/// A chosen coding for each head.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hybrid {
    /// For each head, the index into its codings.
    pub chosen: Vec<usize>,
    /// Bytes of the chosen codings.
    pub bytes: u64,
    /// Sum of their errors, weighted by importance.
    pub error: f64,
    /// A lower bound on the error of any choice within the budget.
    pub bound: f64,
}

/// One move along a head's hull.
struct Step {
    head: usize,
    to: usize,
    bytes: u64,
    /// Weighted error removed by each byte; at most that of the head's previous step.
    per_byte: f64,
}

/// Picks a coding for each of `heads`, so that the bytes stay within `budget` and the weighted error is small.
///
/// Greedy: every head starts at its smallest coding. Steps along the lower convex hulls of (bytes, error) are then taken by falling
/// gain per byte; of equal gains the lower head is first. A step that does not fit ends the steps of its head; other heads continue.
/// Codings above the hull are never picked. The choice is optimal if the steps before the first that does not fit use the whole budget,
/// which is always so for convex codings in equal steps. Otherwise its error is above the optimum by at most the gain of that step;
/// [`Hybrid::bound`], the optimum of the linear relaxation, bounds the gap. O(n log n) over all codings.
///
/// # Errors
/// [`SelectError::NoCodings`], [`SelectError::Cost`] for errors or importances that are negative or not finite,
/// [`SelectError::Budget`] if the smallest codings exceed `budget`.
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
    // Stable, and the steps of one head never rise, so they stay in order.
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

/// Indices of the codings on the lower convex hull, from fewest bytes to least error; of equal codings the first.
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
        // A point is removed if the slope after it is the steeper one. Points on one line stay, as smaller steps.
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
