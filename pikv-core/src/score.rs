//! Scoring of experts and top-k: from a token's logits to its experts and their weights.
//!
//! A token's experts lie 32 to a row of lanes, `R` rows: expert `e` is lane `e % 32` of row `e / 32`. Which of the lanes
//! take part is one word of bits a row, the same in all lanes, so padding and experts that were already taken are no
//! special values.
//!
//! The score is `logit - bias` with `bias = alpha (mu - mean mu) + lambda ln(1 + m) + beta h`, which [`penalties`] adds up in that
//! order, then held within `±cap`. No part of it depends on the token that is ranked. Sums go row by row within a lane, then by a
//! butterfly. Logits must be finite; whoever calls has checked that.

use crate::math;
use crate::warp::{LANES, Warp};

/// The most experts: 32 rows of 32.
pub const MAX_EXPERTS: usize = LANES * LANES;

/// The most groups: they are ranked in one row.
pub const MAX_GROUPS: usize = LANES;

/// Rows of lanes that `experts` take.
pub const fn rows(experts: usize) -> usize {
    experts.div_ceil(LANES)
}

/// A bit for each of the experts `from..to`.
#[inline(always)]
pub const fn span<const R: usize>(from: usize, to: usize) -> [u32; R] {
    let mut bits = [0; R];
    let mut r = 0;
    while r < R {
        let (a, b) = (from.saturating_sub(r * LANES), to.saturating_sub(r * LANES));
        bits[r] = low(b) & !low(a);
        r += 1;
    }
    bits
}

#[inline(always)]
const fn low(n: usize) -> u32 {
    crate::attend::filled(if n > LANES { LANES as u32 } else { n as u32 })
}

/// One value an expert, into lanes; 0 where there is no expert. Values past `R` rows are not read.
#[inline(always)]
pub fn load<W: Warp, const R: usize>(w: W, values: &[f32]) -> [W::F; R] {
    let words: &[u32] = bytemuck::cast_slice(values);
    let mut x = [w.splat(0.0); R];
    for (x, words) in x.iter_mut().zip(words.chunks(LANES)) {
        *x = w.from_bits(w.load_part(words));
    }
    x
}

/// A softmax before its division.
#[derive(Clone, Copy, Debug)]
pub struct Softmax<F, const R: usize> {
    /// `x - top`; -inf in lanes that take no part.
    pub below: [F; R],
    /// `exp(x - top)`; 0 in lanes that take no part.
    pub e: [F; R],
    /// The largest of the values.
    pub top: f32,
    /// The sum of `e`, from 1 to the number of values.
    pub sum: f32,
}

/// The softmax of the values at `live`, of which there must be one.
#[inline(always)]
pub fn softmax<W: Warp, const R: usize>(w: W, x: &[W::F; R], live: &[u32; R]) -> Softmax<W::F, R> {
    let none = w.splat(f32::NEG_INFINITY);
    let mut below = [none; R];
    let mut top = none;
    for r in 0..R {
        below[r] = w.select(w.mask(live[r]), x[r], none);
        top = w.max(top, below[r]);
    }
    let top = w.reduce_max(top);
    let mut e = [w.splat(0.0); R];
    let mut sum = w.splat(0.0);
    for r in 0..R {
        if live[r] != 0 {
            below[r] = w.sub(below[r], w.splat(top));
            e[r] = math::exp(w, below[r]);
            sum = w.add(sum, e[r]);
        }
    }
    Softmax { below, e, top, sum: w.reduce_sum(sum) }
}

/// Weights of the parts of a bias, each finite and from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Coefficients {
    /// Of the load, `mu - mean mu`.
    pub alpha: f32,
    /// Of the misses, `ln(1 + m)`.
    pub lambda: f32,
    /// Of the average binary entropy of the gate about an expert, `h`; see [`binary_entropy`].
    pub beta: f32,
}

/// Writes `alpha (mu - mean mu) + lambda ln(1 + m) + beta h`, what is taken from every token's logits. `mu`, `miss` and `entropy`
/// are `[experts]`, or empty, which counts as all 0; `out` has [`rows`] rows. Lanes past the experts get 0.
///
/// # Panics
/// If a slice is too short.
#[inline(always)]
pub fn penalties<W: Warp>(
    w: W,
    c: Coefficients,
    experts: usize,
    mu: &[f32],
    miss: &[f32],
    entropy: &[f32],
    out: &mut [[f32; LANES]],
) {
    let zero = w.splat(0.0);
    let mut sum = zero;
    for mu in mu.chunks(LANES) {
        let [mu] = load::<W, 1>(w, mu);
        sum = w.add(sum, mu);
    }
    let mean = w.splat(w.reduce_sum(sum) / experts as f32);
    for (r, out) in out[..rows(experts)].iter_mut().enumerate() {
        let [live] = span::<1>(0, experts - r * LANES);
        let mut bias = zero;
        if !mu.is_empty() {
            let [mu] = load::<W, 1>(w, &mu[r * LANES..]);
            bias = w.mul(w.splat(c.alpha), w.sub(mu, mean));
        }
        if !miss.is_empty() {
            let [miss] = load::<W, 1>(w, &miss[r * LANES..]);
            let m = math::ln(w, w.add(w.splat(1.0), miss));
            bias = w.add(bias, w.mul(w.splat(c.lambda), m));
        }
        if !entropy.is_empty() {
            let [h] = load::<W, 1>(w, &entropy[r * LANES..]);
            bias = w.add(bias, w.mul(w.splat(c.beta), h));
        }
        w.store(w.select(w.mask(live), bias, zero), out);
    }
}

/// Folds a token into the average of the gate's binary entropy about each expert: `h = keep h + (1 - keep) H2(p) / ln 2`, where p is
/// the expert's share of the softmax over `logits`, both `[experts]`, and `H2(p) = -p ln p - (1 - p) ln(1 - p)`. 1 where the gate gives
/// the expert one half, 0 where it gives all or nothing. An average that began in [0, 1] stays there.
///
/// # Panics
/// If `h` is shorter than `logits`, or there are more than `32 R` experts or none.
#[inline(always)]
pub fn binary_entropy<W: Warp, const R: usize>(w: W, logits: &[f32], keep: f32, h: &mut [f32]) {
    let experts = logits.len();
    let (zero, one) = (w.splat(0.0), w.splat(1.0));
    let s = softmax(w, &load::<W, R>(w, logits), &span::<R>(0, experts));
    // -x ln x, and 0 where x is 0.
    let term = |x: W::F| w.select(w.lt(zero, x), w.mul(x, w.sub(zero, math::ln(w, x))), zero);
    let mut row = [0.0; LANES];
    for (r, h) in h[..experts].chunks_mut(LANES).enumerate() {
        let p = w.div(s.e[r], w.splat(s.sum));
        // The logarithm is not exact: near one half the sum may pass 1, and near 1 fall below 0.
        let entropy = w.div(w.add(term(p), term(w.sub(one, p))), w.splat(core::f32::consts::LN_2));
        let entropy = w.max(w.select(w.lt(one, entropy), one, entropy), zero);
        let [old] = load::<W, 1>(w, h);
        w.store(w.add(w.mul(w.splat(keep), old), w.mul(w.splat(1.0 - keep), entropy)), &mut row);
        h.copy_from_slice(&row[..h.len()]);
    }
}

/// What is taken from the logits of a token.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// What [`penalties`] wrote.
    pub fixed: &'a [[f32; LANES]],
    /// The bias is held within `-cap..=cap`.
    pub cap: Option<f32>,
}

/// `logit - bias` of the experts at `live`.
///
/// # Panics
/// If `bias.fixed` has too few rows.
#[inline(always)]
pub fn scores<W: Warp, const R: usize>(
    w: W,
    logits: &[W::F; R],
    live: &[u32; R],
    bias: &Bias<'_>,
) -> [W::F; R] {
    let mut out = *logits;
    for r in 0..R {
        if live[r] == 0 {
            continue;
        }
        let mut b = w.load_f(&bias.fixed[r]);
        if let Some(cap) = bias.cap {
            b = w.max(w.select(w.lt(w.splat(cap), b), w.splat(cap), b), w.splat(-cap));
        }
        out[r] = w.sub(logits[r], b);
    }
    out
}

/// Takes the best of the experts at `live`, which must not be empty: the largest score, among equal ones the lowest index.
/// Its bit is cleared. -0 and 0 are equal.
#[inline(always)]
pub fn take<W: Warp, const R: usize>(w: W, scores: &[W::F; R], live: &mut [u32; R]) -> (u16, f32) {
    let none = w.splat(f32::NEG_INFINITY);
    let mut top = none;
    for r in 0..R {
        if live[r] != 0 {
            top = w.max(top, w.select(w.mask(live[r]), scores[r], none));
        }
    }
    let top = w.reduce_max(top);
    for r in 0..R {
        let equal = live[r] & !w.ballot(w.lt(scores[r], w.splat(top)));
        if equal != 0 {
            let lane = equal.trailing_zeros();
            live[r] &= !(1 << lane);
            return ((r * LANES) as u16 + lane as u16, top);
        }
    }
    unreachable!("no expert is live")
}

/// Takes the best experts at `live`, best first, as many as `chosen` holds; there must be as many.
#[inline(always)]
pub fn top_k<W: Warp, const R: usize>(w: W, scores: &[W::F; R], live: &mut [u32; R], chosen: &mut [u16]) {
    for expert in chosen.iter_mut() {
        *expert = take(w, scores, live).0;
    }
}

/// Consecutive experts in groups of equal size, of which the best are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups there are, at most [`MAX_GROUPS`]; they divide the experts.
    pub count: u32,
    /// Groups that are kept.
    pub kept: u32,
    /// A group's score is the sum of its so many largest shares of the softmax: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
    pub best: u32,
}

/// The experts of the groups that are kept, those whose best `scores` have the largest sum. Equal groups: the lower wins.
#[inline(always)]
pub fn groups<W: Warp, const R: usize>(w: W, scores: &[W::F; R], experts: usize, groups: Groups) -> [u32; R] {
    let count = groups.count as usize;
    let size = experts / count;
    let mut of_group = [w.splat(0.0)];
    for g in 0..count {
        let mut live = span::<R>(g * size, (g + 1) * size);
        let mut score = take(w, scores, &mut live).1;
        for _ in 1..groups.best {
            score += take(w, scores, &mut live).1;
        }
        of_group = [w.select(w.mask(1 << g), w.splat(score), of_group[0])];
    }
    let mut left = span::<1>(0, count);
    let mut kept = [0; R];
    for _ in 0..groups.kept {
        let g = usize::from(take(w, &of_group, &mut left).0);
        let span = span::<R>(g * size, (g + 1) * size);
        for r in 0..R {
            kept[r] |= span[r];
        }
    }
    kept
}

/// Mixture weights: the softmax over the logits of the `chosen` experts, no bias in it. They depend on the set that was
/// chosen, not on its order.
#[inline(always)]
pub fn weights<W: Warp, const R: usize>(w: W, logits: &[W::F; R], chosen: &[u16], out: &mut [f32]) {
    let mut live = [0; R];
    for expert in chosen {
        live[usize::from(*expert) / LANES] |= 1 << (*expert % LANES as u16);
    }
    let s = softmax(w, logits, &live);
    for (expert, out) in chosen.iter().zip(out) {
        let expert = usize::from(*expert);
        *out = w.lane(s.e[expert / LANES], expert % LANES) / s.sum;
    }
}

/// How experts are ranked. The default is by their logits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranking<'a> {
    /// What is taken from the logits first.
    pub bias: Option<Bias<'a>>,
    /// Only experts of the best groups are chosen.
    pub groups: Option<Groups>,
}

/// One token: its experts, best first, and their weights. `logits` is `[experts]` with `experts` at most `32 R`; `chosen` and
/// `weight` are `[top_k]`.
///
/// # Panics
/// If there are fewer experts to choose from than `chosen` holds, or slices do not fit.
#[inline(always)]
pub fn route<W: Warp, const R: usize>(
    w: W,
    logits: &[f32],
    ranking: &Ranking<'_>,
    chosen: &mut [u16],
    weight: &mut [f32],
) {
    let experts = logits.len();
    let x = load::<W, R>(w, logits);
    let mut live = span::<R>(0, experts);
    let mut ranked = x;
    if let Some(bias) = &ranking.bias {
        ranked = scores(w, &x, &live, bias);
    }
    if let Some(by) = ranking.groups {
        let s = softmax(w, &ranked, &live);
        live = groups(w, &s.e.map(|e| w.div(e, w.splat(s.sum))), experts, by);
    }
    top_k(w, &ranked, &mut live, chosen);
    weights(w, &x, chosen, weight);
}
