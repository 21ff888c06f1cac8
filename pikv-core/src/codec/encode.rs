//! Numbers as codes, by lanes, and the scales of groups.

use super::code::{Code, Scale};
use crate::dtype::{self, Dtype, Element, F16};
use crate::warp::{ROUND, Warp};

/// Scales of groups of values, one group per lane.
pub(super) struct Group<W: Warp> {
    /// Scale word in the page.
    pub word: W::U,
    /// Scale coded by the word.
    pub scale: W::F,
    /// Minimum coded by the word, or 0.
    pub min: W::F,
}

impl<W: Warp> Group<W> {
    /// Scale for values in `low..=high`.
    #[inline(always)]
    pub fn of(w: W, code: Code, low: W::F, high: W::F) -> Self {
        if code.scale() == Scale::Float {
            let minus = w.sub(w.splat(-0.0), low);
            let scale = w.div(w.select(w.lt(high, minus), minus, high), w.splat(code.top()));
            return Group { word: w.bits(scale), scale, min: w.splat(0.0) };
        }
        let min = below(w, low);
        let least = F16::channel(w, min, 0);
        let scale = above(w, w.div(w.sub(high, least), w.splat(code.top())));
        let word = w.or(scale, w.shl::<16>(min));
        Group { word, scale: F16::channel(w, scale, 0), min: least }
    }
}

/// The largest f16 at most `x`.
#[inline(always)]
fn below<W: Warp>(w: W, x: W::F) -> W::U {
    let h = dtype::encode(w, Dtype::F16, x);
    // `h` is not 0 if it is decremented: 0 is not above a positive `x`, and a negative `x` rounds to -0.
    let (less, more) = (w.sub_u(h, w.splat_u(1)), w.add_u(h, w.splat_u(1)));
    let negative = w.ge_i(h, w.splat_u(0x8000));
    let next = w.select(negative, w.from_bits(more), w.from_bits(less));
    w.bits(w.select(w.lt(x, F16::channel(w, h, 0)), next, w.from_bits(h)))
}

/// The smallest f16 at least `x`, which is not negative.
#[inline(always)]
fn above<W: Warp>(w: W, x: W::F) -> W::U {
    let h = dtype::encode(w, Dtype::F16, x);
    let next = w.add_u(h, w.splat_u(1));
    w.bits(w.select(w.lt(F16::channel(w, h, 0), x), w.from_bits(next), w.from_bits(h)))
}

/// The codes of `x` in the low bits.
#[inline(always)]
pub(super) fn encode<W: Warp>(w: W, code: Code, x: W::F, scale: W::F, min: W::F) -> W::U {
    match code {
        Code::F32 => w.bits(x),
        Code::F16 | Code::Bf16 => {
            let dtype = if code == Code::F16 { Dtype::F16 } else { Dtype::Bf16 };
            // The cache rejects values beyond the limit; a map's rounding may exceed it, and is clamped.
            let limit = w.splat(code.limit());
            dtype::encode(w, dtype, least(w, w.max(x, w.sub(w.splat(-0.0), limit)), limit))
        }
        // Rebias by 2^-120; the smallest normal is 2^-6.
        Code::E4m3 => fp8::<W, 20>(w, divided(w, x, scale), 448.0, 120 << 3, 1.0 / 64.0, 512.0),
        // Rebias by 2^-112; the smallest normal is 2^-14.
        Code::E5m2 => fp8::<W, 21>(w, divided(w, x, scale), 57344.0, 112 << 2, 1.0 / 16384.0, 65536.0),
        // Rebias by 2^-126; the smallest normal is 1.
        Code::Mxfp4 | Code::Nvfp4 => {
            let x = divided(w, x, scale);
            w.or(w.and(w.shr::<28>(w.bits(x)), w.splat_u(8)), float::<W, 22>(w, x, 6.0, 126 << 1, 1.0, 2.0))
        }
        _ => {
            let steps = divided(w, w.sub(x, min), scale);
            let steps = least(w, w.max(steps, w.splat(0.0)), w.splat(code.top()));
            w.and(w.bits(w.add(steps, w.splat(ROUND))), w.splat_u(0xff))
        }
    }
}

/// `a / b`, or 0 if `b` is 0.
#[inline(always)]
fn divided<W: Warp>(w: W, a: W::F, b: W::F) -> W::F {
    w.select(w.lt(w.splat(0.0), b), w.div(a, b), w.splat(0.0))
}

/// The smaller of both.
#[inline(always)]
fn least<W: Warp>(w: W, a: W::F, b: W::F) -> W::F {
    w.select(w.lt(b, a), b, a)
}

/// FP8 codes of `x`: those of [`float`], with signs.
#[inline(always)]
pub(super) fn fp8<W: Warp, const DROP: u32>(
    w: W,
    x: W::F,
    top: f32,
    bias: u32,
    normal: f32,
    steps: f32,
) -> W::U {
    let sign = w.and(w.shr::<24>(w.bits(x)), w.splat_u(0x80));
    w.or(sign, float::<W, DROP>(w, x, top, bias, normal, steps))
}

/// Codes of the magnitude of `x`: its bits from `DROP` on, rounded to nearest even, at most the code of `top`. `normal` is the
/// smallest normal number; subnormals count in steps of `1 / steps`.
#[inline(always)]
fn float<W: Warp, const DROP: u32>(w: W, x: W::F, top: f32, bias: u32, normal: f32, steps: f32) -> W::U {
    let magnitude = least(w, magnitude(w, x), w.splat(top));
    let bits = w.bits(magnitude);
    let odd = w.and(w.shr::<DROP>(bits), w.splat_u(1));
    let rounded = w.add_u(bits, w.add_u(odd, w.splat_u((1 << (DROP - 1)) - 1)));
    let large = w.sub_u(w.shr::<DROP>(rounded), w.splat_u(bias));
    let small = w.and(w.bits(w.add(w.mul(magnitude, w.splat(steps)), w.splat(ROUND))), w.splat_u(0x7f));
    let is_small = w.lt(magnitude, w.splat(normal));
    w.bits(w.select(is_small, w.from_bits(small), w.from_bits(large)))
}

/// `x` without its sign.
#[inline(always)]
pub(super) fn magnitude<W: Warp>(w: W, x: W::F) -> W::F {
    w.from_bits(w.and(w.bits(x), w.splat_u(0x7fff_ffff)))
}
