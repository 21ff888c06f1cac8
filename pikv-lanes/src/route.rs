//! Scores of experts: penalties, top-k and mixture weights of rows of logits.

use crate::Lanes;
use pikv_core::math;
use pikv_core::score::{self, Coefficients, Ranking};
use pikv_core::warp::{Holds, Kernel, LANES, Routine, Warp};

/// A routine over rows of experts, `R` rows of lanes each.
trait RowKernel {
    type Out;
    /// Must be `#[inline(always)]`, like [`Kernel::run`].
    fn run<W: Warp, const R: usize>(self, w: W) -> Self::Out;
}

struct Wide<K, const R: usize>(K);

impl<K: RowKernel, const R: usize> Kernel for Wide<K, R> {
    type Out = K::Out;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> K::Out {
        // Lanes in memory keep rows in no registers, so they have only the widest form: that saves two thirds of the code.
        if Holds::<W, 2>::YES { w.call(self) } else { w.call(Wide::<K, 32>(self.0)) }
    }
}

impl<W: Warp, K: RowKernel, const R: usize> Routine<W> for Wide<K, R> {
    type Out = K::Out;
    #[inline(always)]
    fn run(self, w: W) -> K::Out {
        self.0.run::<W, R>(w)
    }
}

/// Runs `k` with enough rows for `experts`. Rows past the last expert do not affect a result, so three widths are enough: up to 32
/// experts, up to 256, and all others.
fn wide<K: RowKernel>(lanes: Lanes, experts: usize, k: K) -> K::Out {
    match score::rows(experts) {
        0..=1 => lanes.run(Wide::<K, 1>(k)),
        2..=8 => lanes.run(Wide::<K, 8>(k)),
        _ => lanes.run(Wide::<K, 32>(k)),
    }
}

struct Rank<'a> {
    logits: &'a [f32],
    experts: usize,
    top_k: usize,
    ranking: Ranking<'a>,
    chosen: &'a mut [u16],
    weights: &'a mut [f32],
}

impl RowKernel for Rank<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp, const R: usize>(self, w: W) {
        let rows = self.logits.chunks_exact(self.experts);
        let out = self.chosen.chunks_exact_mut(self.top_k).zip(self.weights.chunks_exact_mut(self.top_k));
        for (logits, (chosen, weights)) in rows.zip(out) {
            score::route::<W, R>(w, logits, &self.ranking, chosen, weights);
        }
    }
}

/// Ranks each row of `logits`, `[rows][experts]`: its best experts, best first, and their mixture weights, both `[rows][top_k]`.
///
/// # Panics
/// If a row has fewer experts to choose from than `top_k`, or more than [`MAX_EXPERTS`](score::MAX_EXPERTS).
pub fn rank(
    lanes: Lanes,
    logits: &[f32],
    experts: usize,
    top_k: usize,
    ranking: Ranking<'_>,
    chosen: &mut [u16],
    weights: &mut [f32],
) {
    wide(lanes, experts, Rank { logits, experts, top_k, ranking, chosen, weights });
}

struct Weigh<'a> {
    logits: &'a [f32],
    experts: usize,
    top_k: usize,
    chosen: &'a [u16],
    weights: &'a mut [f32],
}

impl RowKernel for Weigh<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp, const R: usize>(self, w: W) {
        let rows = self.logits.chunks_exact(self.experts).zip(self.chosen.chunks_exact(self.top_k));
        for ((logits, chosen), out) in rows.zip(self.weights.chunks_exact_mut(self.top_k)) {
            score::weights(w, &score::load::<W, R>(w, logits), chosen, out);
        }
    }
}

/// Writes the mixture weights of the `chosen` experts, `[rows][top_k]`.
pub fn weigh(
    lanes: Lanes,
    logits: &[f32],
    experts: usize,
    top_k: usize,
    chosen: &[u16],
    weights: &mut [f32],
) {
    wide(lanes, experts, Weigh { logits, experts, top_k, chosen, weights });
}

struct Sums<'a> {
    logits: &'a [f32],
    p: &'a mut [f64],
}

impl RowKernel for Sums<'_> {
    type Out = f64;
    #[inline(always)]
    fn run<W: Warp, const R: usize>(self, w: W) -> f64 {
        let experts = self.p.len();
        let live = score::span::<R>(0, experts);
        let mut z = 0.0;
        let mut row = [0.0; LANES];
        for logits in self.logits.chunks_exact(experts) {
            let x = score::load::<W, R>(w, logits);
            let s = score::softmax(w, &x, &live);
            for r in 0..score::rows(experts) {
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

/// Adds the softmax of each row of `logits` to `p`, `[experts]`, and returns the sum of the squared log-sum-exps.
pub fn softmax_sums(lanes: Lanes, logits: &[f32], p: &mut [f64]) -> f64 {
    wide(lanes, p.len(), Sums { logits, p })
}

struct Entropy<'a> {
    logits: &'a [f32],
    keep: f32,
    h: &'a mut [f32],
}

impl RowKernel for Entropy<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp, const R: usize>(self, w: W) {
        for logits in self.logits.chunks_exact(self.h.len()) {
            score::binary_entropy::<W, R>(w, logits, self.keep, self.h);
        }
    }
}

/// Updates the averages `h`, `[experts]`, with each row of `logits`, `[rows][experts]`, first to last, by [`score::binary_entropy`].
///
/// # Panics
/// If `h` is empty or has more than [`MAX_EXPERTS`](score::MAX_EXPERTS).
pub fn binary_entropy(lanes: Lanes, logits: &[f32], keep: f32, h: &mut [f32]) {
    wide(lanes, h.len(), Entropy { logits, keep, h });
}

struct Penalties<'a> {
    coefficients: Coefficients,
    experts: usize,
    load: &'a [f32],
    miss: &'a [f32],
    entropy: &'a [f32],
    fixed: &'a mut [[f32; LANES]],
}

impl Kernel for Penalties<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Penalties { coefficients, experts, load, miss, entropy, fixed } = self;
        score::penalties(w, coefficients, experts, load, miss, entropy, fixed);
    }
}

/// [`score::penalties`] on `lanes`.
///
/// # Panics
/// If a slice is too short.
pub fn penalties(
    lanes: Lanes,
    coefficients: Coefficients,
    experts: usize,
    load: &[f32],
    miss: &[f32],
    entropy: &[f32],
    fixed: &mut [[f32; LANES]],
) {
    lanes.run(Penalties { coefficients, experts, load, miss, entropy, fixed });
}
