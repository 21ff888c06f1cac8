//! Elementary functions over lanes, and over one f32 that all lanes share.
//!
//! Polynomials of this crate (minimax), evaluated by fused multiply-adds in one order, so that a CPU
//! and a device agree to the bit. Results below 2^-126 are flushed to +0; subnormal *arguments* keep
//! their value. The stated errors are the largest over all f32; the tests try some f32 at every exponent,
//! and all of them with `--ignored`.

use crate::portable::Portable;
use crate::warp::Warp;

/// Coefficients of 2^f on [-1/2, 1/2], highest power first; relative error of the exact polynomial 2.6e-9.
pub const EXP2_POLY: [f32; 7] =
    [1.559_467_3e-4, 1.340_664_3e-3, 9.617_693e-3, 5.550_310_4e-2, 2.402_265_2e-1, 6.931_472_4e-1, 1.0];

/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, and leaves it in the low bits.
const MAGIC: f32 = 12_582_912.0;

/// The least positive normal f32, 2^-126.
const TINY: f32 = f32::MIN_POSITIVE;

/// `p * 2^n`, where the low bits of `shifted` hold n and the result is a normal number: an addition to the exponent.
#[inline(always)]
fn scale<W: Warp>(w: W, p: W::F, shifted: W::F) -> W::F {
    w.from_bits(w.add_u(w.bits(p), w.shl::<23>(w.bits(shifted))))
}

#[inline(always)]
fn horner<W: Warp>(w: W, c: &[f32], x: W::F) -> W::F {
    let mut p = w.splat(c[0]);
    for c in &c[1..] {
        p = w.fma(p, x, w.splat(*c));
    }
    p
}

/// `y` below `top`; inf from there; NaN for NaN. `y` was computed from an argument held below `top`.
#[inline(always)]
fn upper<W: Warp>(w: W, x: W::F, top: f32, y: W::F) -> W::F {
    let below = w.lt(x, w.splat(top));
    // The rest is NaN, which x + x keeps, or at least `top`, where x + x may still be finite.
    let rest = w.select(w.lt(w.splat(1.0), x), w.splat(f32::INFINITY), w.add(x, x));
    w.select(below, y, rest)
}

/// 2^x for `x` <= 0 or -inf, the form of the softmax. At most 1.02 ulp off; 0 below -126; NaN for NaN. Not for `x` > 0.
#[inline(always)]
pub fn exp2_nonpos<W: Warp>(w: W, x: W::F) -> W::F {
    let y = w.max(x, w.splat(-127.0));
    let shifted = w.add(y, w.splat(MAGIC));
    let f = w.sub(y, w.sub(shifted, w.splat(MAGIC)));
    let y = scale(w, horner(w, &EXP2_POLY, f), shifted);
    // `scale` turns a NaN into a number, which differs between a device's NaN and a CPU's.
    let y = w.select(w.lt(x, w.splat(128.0)), y, x);
    w.select(w.lt(x, w.splat(-126.0)), w.splat(0.0), y)
}

/// 2^x. At most 1.02 ulp off. 0 below -126 and for -inf, inf from 128, NaN for NaN.
#[inline(always)]
pub fn exp2<W: Warp>(w: W, x: W::F) -> W::F {
    let top = 128.0;
    let held = w.select(w.lt(x, w.splat(top)), x, w.splat(0.0));
    upper(w, x, top, exp2_nonpos(w, held))
}

/// e^x. At most 0.99 ulp off. 0 where the result would be below 2^-126 (x < -87.33654), inf from 88.72284, NaN for NaN.
#[inline(always)]
pub fn exp<W: Warp>(w: W, x: W::F) -> W::F {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // e^r = 1 + r + r^2 Q(r) for |r| <= ln 2 / 2; relative error of the exact polynomial 5.2e-11.
    const Q: [f32; 6] = [1.979_034_9e-4, 1.394_465_2e-3, 8.333_497e-3, 4.166_629_5e-2, 1.666_666_6e-1, 0.5];
    const BOTTOM: f32 = -87.336_54;
    let top = 88.722_84;
    let y = w.select(w.lt(x, w.splat(top)), x, w.splat(0.0));
    let y = w.max(y, w.splat(BOTTOM));
    let shifted = w.fma(y, w.splat(core::f32::consts::LOG2_E), w.splat(MAGIC));
    let n = w.sub(shifted, w.splat(MAGIC));
    let r = w.fma(n, w.splat(-LN2_LO), w.fma(n, w.splat(-LN2_HI), y));
    let p = w.add(w.fma(horner(w, &Q, r), w.mul(r, r), r), w.splat(1.0));
    let y = w.select(w.lt(x, w.splat(BOTTOM)), w.splat(0.0), scale(w, p, shifted));
    upper(w, x, top, y)
}

/// Natural logarithm. At most 0.84 ulp off, subnormal arguments included. -inf for 0, NaN below 0 and for NaN, inf for inf.
#[inline(always)]
pub fn ln<W: Warp>(w: W, x: W::F) -> W::F {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    /// Bits of sqrt(1/2): the mantissa is taken in [sqrt(1/2), sqrt(2)).
    const ROOT: u32 = 0x3f35_04f3;
    // ln(1 + f) = f - f^2/2 + f^3 P(f); relative error of the exact polynomial 7.5e-10.
    const P: [f32; 9] = [
        6.746_609_5e-2,
        -1.167_563_3e-1,
        1.188_816_6e-1,
        -1.240_559_3e-1,
        1.421_955_2e-1,
        -1.666_799_6e-1,
        2.000_211_9e-1,
        -2.500_001e-1,
        3.333_331_3e-1,
    ];
    let small = w.lt(x, w.splat(TINY));
    let y = w.select(small, w.mul(x, w.splat(8_388_608.0)), x);
    let e = w.sra::<23>(w.sub_u(w.bits(y), w.splat_u(ROOT)));
    // y * 2^-e, as a subtraction from the exponent.
    let m = w.from_bits(w.sub_u(w.bits(y), w.shl::<23>(e)));
    let e = w.add(w.to_f(e), w.select(small, w.splat(-23.0), w.splat(0.0)));
    let f = w.sub(m, w.splat(1.0));
    let z = w.mul(f, f);
    let t = w.mul(w.mul(f, z), horner(w, &P, f));
    let t = w.fma(e, w.splat(LN2_LO), t);
    let t = w.fma(z, w.splat(-0.5), t);
    let t = w.fma(e, w.splat(LN2_HI), w.add(f, t));
    // 0 -> -inf; below 0 or NaN -> NaN; inf -> inf.
    let zero = w.splat(0.0);
    let positive = w.lt(zero, x);
    let finite = w.lt(x, w.splat(f32::INFINITY));
    let negative = w.lt(x, zero);
    let edge = w.select(negative, w.splat(f32::NAN), w.splat(f32::NEG_INFINITY));
    // For NaN and inf `finite` is false, and x + x keeps both.
    let edge = w.select(finite, edge, w.add(x, x));
    w.select(w.and_m(positive, finite), t, edge)
}

/// `cap * tanh(x / cap)` in the form that attention uses: `x` is already divided by `cap`, the result lies in
/// [-1, 1]. Absolute error below 1.2e-7.
#[inline(always)]
pub fn tanh<W: Warp>(w: W, x: W::F) -> W::F {
    let zero = w.splat(0.0);
    let negative = w.lt(x, zero);
    let a = w.select(negative, x, w.sub(zero, x));
    let e = exp(w, w.add(a, a));
    let t = w.div(w.sub(w.splat(1.0), e), w.add(w.splat(1.0), e));
    w.select(negative, w.sub(zero, t), t)
}

/// The least integer not below `x`, for |x| < 2^31; never -0.
#[inline(always)]
pub fn ceil(x: f32) -> f32 {
    let t = x as i32 as f32;
    if t < x { t + 1.0 } else { t }
}

/// 2^d for an integer `d` <= 0, exactly; 0 below -126 and for -inf.
#[inline(always)]
pub fn exp2i(d: f32) -> f32 {
    if d < -126.0 { 0.0 } else { f32::from_bits(((d as i32 + 127) as u32) << 23) }
}

/// [`ln`] of one f32.
#[inline]
pub fn ln1(x: f32) -> f32 {
    ln(Portable, [x; crate::LANES])[0]
}
