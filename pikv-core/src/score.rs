//! Scoring of experts and top-k: from a token's logits to its experts and their weights.
//!
//! A token's experts take `R` rows of 32 lanes: expert `e` is lane `e % 32` of row `e / 32`. One word of bits per row, the same
//! in all lanes, marks the live lanes; padding and experts already chosen are cleared bits, not special values.
//!
//! The score is `logit - bias` with `bias = alpha (mu - mean mu) + lambda ln(1 + m) + beta h`, which [`penalties`] adds up in that
//! order, clamped to `±cap`. The bias does not depend on the token that is ranked. Sums are taken row by row within a lane, then by
//! a butterfly. Logits must be finite; the caller checks that.

use crate::math;
use crate::warp::{LANES, Warp};

/// Most experts: 32 rows of 32.
pub const MAX_EXPERTS: usize = LANES * LANES;

/// Most groups: they are ranked in one row.
pub const MAX_GROUPS: usize = LANES;

/// Rows of lanes for `experts` experts.
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

/// Loads one value per expert into lanes; lanes without an expert get 0. Values past `R` rows are not read.
#[inline(always)]
pub fn load<W: Warp, const R: usize>(w: W, values: &[f32]) -> [W::F; R] {
    let words: &[u32] = bytemuck::must_cast_slice(values);
    let mut x = [w.splat(0.0); R];
    // The loop always takes all rows: a device keeps them in registers, which have no index.
    for (r, x) in x.iter_mut().enumerate() {
        if r * LANES < words.len() {
            *x = w.from_bits(w.load_part(&words[r * LANES..]));
        }
    }
    x
}

/// A softmax before the division by its sum.
#[derive(Clone, Copy, Debug)]
pub struct Softmax<F, const R: usize> {
    /// `x - top`; -inf in lanes that are not live.
    pub below: [F; R],
    /// `exp(x - top)`; 0 in lanes that are not live.
    pub e: [F; R],
    /// Largest live value.
    pub top: f32,
    /// Sum of `e`, from 1 to the number of live values.
    pub sum: f32,
}

/// Softmax of the values at `live`, which must not be empty.
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

/// Weights of the terms of a bias, each finite and at least 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Coefficients {
    /// Weight of the load, `mu - mean mu`.
    pub alpha: f32,
    /// Weight of the misses, `ln(1 + m)`.
    pub lambda: f32,
    /// Weight of the average binary entropy of the gate about an expert, `h`; see [`binary_entropy`].
    pub beta: f32,
}

impl Coefficients {
    /// The weights of the load, of the misses and of the gate's entropy; 0 leaves a term out. They are not checked here: a router refuses
    /// one that is not finite or below 0.
    #[inline(always)]
    pub const fn new(alpha: f32, lambda: f32, beta: f32) -> Coefficients {
        Coefficients { alpha, lambda, beta }
    }
}

/// Writes the bias `alpha (mu - mean mu) + lambda ln(1 + m) + beta h`, which is subtracted from every token's logits. `mu`, `miss`
/// and `entropy` are `[experts]`, or empty for all 0; `out` has [`rows`] rows. Lanes past the experts get 0.
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

/// The gate's binary entropy about each expert of row `r` of lanes, `H2(p) / ln 2` in 0..=1: p is the expert's share of the softmax `s`,
/// and `H2(p) = -p ln p - (1 - p) ln(1 - p)`. 1 if the gate gives the expert one half, 0 if it gives all or nothing.
///
/// # Panics
/// If `r` is not below `R`; a device then reads row 0.
#[inline(always)]
pub fn gate_entropy<W: Warp, const R: usize>(w: W, s: &Softmax<W::F, R>, r: usize) -> W::F {
    let (zero, one) = (w.splat(0.0), w.splat(1.0));
    // -x ln x, and 0 where x is 0.
    let term = |x: W::F| w.select(w.lt(zero, x), w.mul(x, w.sub(zero, math::ln(w, x))), zero);
    let p = w.div(w.pick(&s.e, r), w.splat(s.sum));
    // The logarithm is not exact: near one half the result may exceed 1, and near 1 fall below 0.
    let entropy = w.div(w.add(term(p), term(w.sub(one, p))), w.splat(core::f32::consts::LN_2));
    w.max(w.select(w.lt(one, entropy), one, entropy), zero)
}

/// Moving average after one more value: `keep old + (1 - keep) x`.
#[inline(always)]
pub fn fold<W: Warp>(w: W, keep: f32, old: W::F, x: W::F) -> W::F {
    w.add(w.mul(w.splat(keep), old), w.mul(w.splat(1.0 - keep), x))
}

/// Updates the averages `h`, `[experts]`, of the gate's binary entropy about each expert ([`gate_entropy`]) with a token's `logits`,
/// `[experts]`. An average that starts in [0, 1] stays there.
///
/// # Panics
/// If `h` is shorter than `logits`, or there are more than `32 R` experts or none.
#[inline(always)]
pub fn binary_entropy<W: Warp, const R: usize>(w: W, logits: &[f32], keep: f32, h: &mut [f32]) {
    let experts = logits.len();
    let s = softmax(w, &load::<W, R>(w, logits), &span::<R>(0, experts));
    for (r, h) in h[..experts].chunks_mut(LANES).enumerate() {
        let entropy = gate_entropy(w, &s, r);
        let [old] = load::<W, 1>(w, h);
        w.store_part(fold(w, keep, old, entropy), h);
    }
}

/// Average of an expert's load after a step in which it got `n` of `total` choices (`total` is not 0) among `experts`:
/// `keep mu + (1 - keep) experts n / total`.
#[inline(always)]
pub fn learn_load(keep: f32, mu: f32, n: u64, total: u64, experts: u32) -> f32 {
    keep * mu + (1.0 - keep) * (f64::from(experts) * n as f64 / total as f64) as f32
}

/// Average of an expert's miss rate after a step: `keep m + (1 - keep) missed / wanted`; unchanged if `wanted` is 0.
#[inline(always)]
pub fn learn_rate(keep: f32, m: f32, wanted: u32, missed: u32) -> f32 {
    if wanted == 0 {
        return m;
    }
    keep * m + (1.0 - keep) * (f64::from(missed) / f64::from(wanted)) as f32
}

/// Decayed count of an expert's misses after a step, in pages of `of_page` parts: `keep m + missed / of_page`.
#[inline(always)]
pub fn learn_count(keep: f32, m: f32, missed: u32, of_page: u32) -> f32 {
    let of_page = if of_page == 0 { 1 } else { of_page };
    keep * m + (f64::from(missed) / f64::from(of_page)) as f32
}

/// Bias that is subtracted from a token's logits.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// Output of [`penalties`].
    pub fixed: &'a [[f32; LANES]],
    /// If set, the bias is clamped to `-cap..=cap`.
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
/// Clears its bit. -0 and 0 are equal.
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
    let mut best = None;
    for r in 0..R {
        let equal = live[r] & !w.ballot(w.lt(scores[r], w.splat(top)));
        if equal != 0 {
            best = Some(r * LANES + equal.trailing_zeros() as usize);
            break;
        }
    }
    let Some(best) = best else { unreachable!("no expert is live") };
    // After the loop: on a device a row found inside it would be a dynamic index.
    w.put_bit(live, best, false);
    (best as u16, top)
}

/// Integer type of expert ids in a list: u16 on a host, u32 if an engine reads it on a device.
pub trait Number: Copy + From<u16> + Into<u32> {}

impl<T: Copy + From<u16> + Into<u32>> Number for T {}

/// Takes the best experts at `live`, best first, as many as `chosen` holds; `live` must have as many.
#[inline(always)]
pub fn top_k<W: Warp, const R: usize>(
    w: W,
    scores: &[W::F; R],
    live: &mut [u32; R],
    chosen: &mut [impl Number],
) {
    for expert in chosen.iter_mut() {
        *expert = take(w, scores, live).0.into();
    }
}

/// Routing by groups: consecutive experts in groups of equal size, of which the best are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups, at most [`MAX_GROUPS`]; it divides the number of experts.
    pub count: u32,
    /// Number of groups that are kept.
    pub kept: u32,
    /// A group's score is the sum of its `best` largest shares of the softmax: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
    pub best: u32,
}

/// Experts of the kept groups: those whose best `scores` have the largest sum. Among equal groups the lower wins.
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

/// Mixture weights: the softmax over the logits of the `chosen` experts, without bias. They depend on the set of chosen
/// experts, not on its order.
#[inline(always)]
pub fn weights<W: Warp, const R: usize>(w: W, logits: &[W::F; R], chosen: &[impl Number], out: &mut [f32]) {
    let mut live = [0; R];
    for expert in chosen {
        w.put_bit(&mut live, number(*expert), true);
    }
    let s = softmax(w, logits, &live);
    for (expert, out) in chosen.iter().zip(out) {
        let expert = number(*expert);
        *out = w.lane(w.pick(&s.e, expert / LANES), expert % LANES) / s.sum;
    }
}

#[inline(always)]
fn number(expert: impl Number) -> usize {
    let expert: u32 = expert.into();
    expert as usize
}

/// Rule that ranks experts. The default is by logits alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranking<'a> {
    /// Subtracted from the logits first.
    pub bias: Option<Bias<'a>>,
    /// If set, only experts of the best groups are chosen.
    pub groups: Option<Groups>,
}

/// Routes one token: writes its experts, best first, and their weights. `logits` is `[experts]` with `experts` at most `32 R`;
/// `chosen` and `weight` are `[top_k]`.
///
/// # Panics
/// If there are fewer experts to choose from than `chosen` holds, or slices do not fit.
#[inline(always)]
pub fn route<W: Warp, const R: usize>(
    w: W,
    logits: &[f32],
    ranking: &Ranking<'_>,
    chosen: &mut [impl Number],
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
    w.sync();
    weights(w, &x, chosen, weight);
}
