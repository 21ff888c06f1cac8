//! Number formats of K and V in the 32-bit words of a page.

use crate::warp::Warp;
use half::{bf16, f16};

/// Number format of K or V in pages, and of the elements of device tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// One f32 a word.
    F32,
    /// Two IEEE binary16 a word.
    F16,
    /// Two bfloat16 a word.
    Bf16,
}

impl Dtype {
    /// All dtypes.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Index in [`Dtype::ALL`].
    pub const fn index(self) -> u32 {
        match self {
            Dtype::F32 => 0,
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
        }
    }

    /// Channels in a word.
    pub const fn per_word(self) -> u32 {
        match self {
            Dtype::F32 => 1,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Bits of a channel.
    pub const fn bits(self) -> u32 {
        32 / self.per_word()
    }

    /// Usual name: `f32`, `f16`, `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }

    /// Largest finite value: 65504 for f16.
    pub const fn largest(self) -> f32 {
        f32::from_bits(match self {
            Dtype::F32 => 0x7f7f_ffff,
            Dtype::F16 => 0x477f_e000,
            Dtype::Bf16 => 0x7f7f_0000,
        })
    }

    /// Largest magnitude that [`Dtype::encode`] accepts: slightly above the [largest](Dtype::largest) value if it rounds down to that.
    pub const fn limit(self) -> f32 {
        f32::from_bits(match self {
            Dtype::F32 => 0x7f7f_ffff,
            // The last f32 before 65520, which is halfway between 65504 and 65536.
            Dtype::F16 => 0x477f_efff,
            Dtype::Bf16 => 0x7f7f_7fff,
        })
    }

    /// The stored bits of `x`, rounded to nearest even; `None` if `x` or its rounded form is not finite.
    #[inline(always)]
    pub fn encode(self, x: f32) -> Option<u32> {
        let (bits, finite) = match self {
            Dtype::F32 => (x.to_bits(), x.is_finite()),
            Dtype::F16 => {
                let h = f16::from_f32(x);
                (u32::from(h.to_bits()), h.is_finite())
            }
            Dtype::Bf16 => {
                let h = bf16::from_f32(x);
                (u32::from(h.to_bits()), h.is_finite())
            }
        };
        finite.then_some(bits)
    }

    /// Value of stored bits.
    #[inline]
    pub fn decode(self, bits: u32) -> f32 {
        match self {
            Dtype::F32 => f32::from_bits(bits),
            Dtype::F16 => f16::from_bits(bits as u16).to_f32(),
            Dtype::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        }
    }
}

/// The bits of `x` as bf16, rounded to nearest even, if bf16 holds it.
#[inline(always)]
pub fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16
}

/// The bits of `x` as f16, rounded to nearest even, if f16 holds it. Without branches, so that loops over it take vector instructions.
#[inline(always)]
pub(crate) fn round_f16(x: f32) -> u32 {
    let bits = x.to_bits();
    let size = bits & 0x7fff_ffff;
    let normal = (size.wrapping_add(0xfff + (size >> 13 & 1)).wrapping_sub(112 << 23)) >> 13;
    // The unit in the last place of 0.5 is that of f16's subnormals, so the sum rounds as they do.
    let subnormal = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    bits >> 16 & 0x8000 | if size >= (127 - 14) << 23 { normal } else { subnormal }
}

/// [`Dtype::encode`] by lanes, of values that are known to fit.
#[inline(always)]
pub(crate) fn encode<W: Warp>(w: W, dtype: Dtype, x: W::F) -> W::U {
    let bits = w.bits(x);
    // Adds half a unit of the last place kept, less one if that place is even.
    let even = |bits, half, odd| w.add_u(w.add_u(bits, w.splat_u(half)), w.and(odd, w.splat_u(1)));
    match dtype {
        Dtype::F32 => bits,
        Dtype::Bf16 => w.shr::<16>(even(bits, 0x7fff, w.shr::<16>(bits))),
        Dtype::F16 => {
            let sign = w.and(w.shr::<16>(bits), w.splat_u(0x8000));
            let size = w.and(bits, w.splat_u(0x7fff_ffff));
            let rounded = even(size, 0xfff, w.shr::<13>(size));
            let normal = w.shr::<13>(w.sub_u(rounded, w.splat_u(112 << 23)));
            // The unit in the last place of 0.5 is that of f16's subnormals, so the sum rounds as they do.
            let sum = w.add(w.from_bits(size), w.splat(0.5));
            let subnormal = w.sub_u(w.bits(sum), w.splat_u(0.5f32.to_bits()));
            let large = w.ge_i(size, w.splat_u((127 - 14) << 23));
            w.or(sign, w.bits(w.select(large, w.from_bits(normal), w.from_bits(subnormal))))
        }
    }
}

/// A [`Dtype`] known when the routine is compiled.
pub trait Element: Copy {
    /// The dtype as a value.
    const DTYPE: Dtype;
    /// Channels in a word.
    const PER_WORD: usize = Self::DTYPE.per_word() as usize;
    /// Channel `j` of each lane's word, exactly. `j` is below [`Element::PER_WORD`].
    fn channel<W: Warp>(w: W, word: W::U, j: usize) -> W::F;
}

/// [`Dtype::F32`]
#[derive(Clone, Copy)]
pub struct F32;
/// [`Dtype::F16`]
#[derive(Clone, Copy)]
pub struct F16;
/// [`Dtype::Bf16`]
#[derive(Clone, Copy)]
pub struct Bf16;

impl Element for F32 {
    const DTYPE: Dtype = Dtype::F32;
    #[inline(always)]
    fn channel<W: Warp>(w: W, word: W::U, _: usize) -> W::F {
        w.from_bits(word)
    }
}

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    #[inline(always)]
    fn channel<W: Warp>(w: W, word: W::U, j: usize) -> W::F {
        w.from_bits(if j == 0 { w.shl::<16>(word) } else { w.and(word, w.splat_u(0xffff_0000)) })
    }
}

impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;
    #[inline(always)]
    fn channel<W: Warp>(w: W, word: W::U, j: usize) -> W::F {
        // Sign, exponent and mantissa moved to their places in an f32 have the value times 2^-112, subnormals
        // included. Stored values are finite, so the all-ones exponent does not occur.
        let top = if j == 0 { w.shl::<16>(word) } else { word };
        let placed = w.and(w.sra::<3>(top), w.splat_u(0x8fff_e000));
        w.mul(w.from_bits(placed), w.splat(f32::from_bits((127 + 112) << 23)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values spread over all bit patterns; those of each dtype of 16 bits, halfway to the next, and their neighbours.
    fn values() -> impl Iterator<Item = f32> {
        let spread = (0..=u32::MAX).step_by(4099).map(f32::from_bits);
        let near = |bits: u32| (-1..=1).map(move |by| f32::from_bits(bits.wrapping_add_signed(by)));
        let exact = [Dtype::F16, Dtype::Bf16]
            .into_iter()
            .flat_map(|of| (0..1 << 16).map(move |bits| of.decode(bits)));
        let halves = |x: f32| [0, 1 << 12, 1 << 15].map(|half| x.to_bits().wrapping_add(half));
        spread.chain(exact.flat_map(move |x| halves(x).into_iter().flat_map(near)))
    }

    #[test]
    fn values_that_fit_are_rounded_as_the_library_of_halves_rounds() {
        let (mut checked, mut refused) = (0, 0);
        for x in values() {
            for (dtype, round) in [(Dtype::Bf16, round_bf16 as fn(f32) -> u32), (Dtype::F16, round_f16)] {
                let Some(bits) = dtype.encode(x) else {
                    refused += 1;
                    continue;
                };
                assert_eq!(round(x), bits, "{x:e} ({:08x}) as {}", x.to_bits(), dtype.name());
                checked += 1;
            }
        }
        assert!(checked > 1_000_000 && refused > 100_000, "{checked} checked, {refused} do not fit");
    }
}
