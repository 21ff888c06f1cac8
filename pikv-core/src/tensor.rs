//! Rows of an engine's tensors, in any dtype, by lanes: read as f32, which is exact, and written rounded. A row of 16-bit elements may
//! begin at an odd element: each lane reads an element of its own.

use crate::dtype::{Dtype, Element, encode};
use crate::warp::{LANES, Warp};
use core::marker::PhantomData;

/// A row of elements that lanes read as f32.
pub trait Row<W: Warp>: Copy {
    /// Number of elements.
    fn count(self) -> usize;
    /// Lane `i` gets element `index[i]`.
    ///
    /// # Panics
    /// If an index lies outside the row (a trap on a device).
    fn gather(self, w: W, index: W::U) -> W::F;
    /// The first `count` elements.
    ///
    /// # Panics
    /// If the row has fewer.
    fn first(self, count: usize) -> Self;
    /// Rows of 32 elements; the last may be shorter.
    fn chunks(self) -> impl Iterator<Item = Self>;
    /// The elements in order, each in all lanes.
    fn each(self, w: W) -> impl Iterator<Item = W::F>;
}

impl<W: Warp> Row<W> for &[f32] {
    #[inline(always)]
    fn count(self) -> usize {
        self.len()
    }
    #[inline(always)]
    fn gather(self, w: W, index: W::U) -> W::F {
        w.gather(self, index)
    }
    #[inline(always)]
    fn first(self, count: usize) -> Self {
        &self[..count]
    }
    #[inline(always)]
    fn chunks(self) -> impl Iterator<Item = Self> {
        <[f32]>::chunks(self, LANES)
    }
    #[inline(always)]
    fn each(self, w: W) -> impl Iterator<Item = W::F> {
        self.iter().map(move |x| w.splat(*x))
    }
}

/// A row of 16-bit elements, in the dtype of `E`: [`F16`](crate::dtype::F16) or [`Bf16`](crate::dtype::Bf16).
#[derive(Clone, Copy, Debug)]
pub struct Halves<'a, E> {
    bits: &'a [u16],
    of: PhantomData<E>,
}

impl<'a, E: Element> Halves<'a, E> {
    /// A row of the elements with these bits.
    #[inline(always)]
    pub fn new(bits: &'a [u16]) -> Self {
        Halves { bits, of: PhantomData }
    }
}

impl<W: Warp, E: Element> Row<W> for Halves<'_, E> {
    #[inline(always)]
    fn count(self) -> usize {
        self.bits.len()
    }
    #[inline(always)]
    fn gather(self, w: W, index: W::U) -> W::F {
        widen::<W, E>(w, w.gather_half(self.bits, index))
    }
    #[inline(always)]
    fn first(self, count: usize) -> Self {
        Halves::new(&self.bits[..count])
    }
    #[inline(always)]
    fn chunks(self) -> impl Iterator<Item = Self> {
        self.bits.chunks(LANES).map(Halves::new)
    }
    #[inline(always)]
    fn each(self, w: W) -> impl Iterator<Item = W::F> {
        self.bits.iter().map(move |bits| widen::<W, E>(w, w.splat_u(u32::from(*bits))))
    }
}

/// Element in the low half of each word, exactly; unlike [`Element::channel`] also for infinities and NaN.
#[inline(always)]
fn widen<W: Warp, E: Element>(w: W, bits: W::U) -> W::F {
    let x = E::channel(w, bits, 0);
    if E::DTYPE != Dtype::F16 {
        return x;
    }
    let wild = w.ge_i(w.and(bits, w.splat_u(0x7fff)), w.splat_u(0x7c00));
    w.select(wild, w.from_bits(w.or(w.bits(x), w.splat_u(INFINITE))), x)
}

/// Bits of an infinity.
const INFINITE: u32 = 0x7f80_0000;

/// [`Dtype::encode`] of any values: one past the dtype's [limit](Dtype::limit) becomes an infinity, and NaN stays NaN.
#[inline(always)]
fn narrow<W: Warp, E: Element>(w: W, x: W::F) -> W::U {
    // Bits of the infinity, and the quiet bit of a NaN.
    let (infinite, quiet) = if E::DTYPE == Dtype::F16 { (0x7c00, 0x200) } else { (0x7f80, 0x40) };
    let (size, sign) = (size(w, x), w.and(w.shr::<16>(w.bits(x)), w.splat_u(0x8000)));
    let choose = |from: u32, a: W::U, b: W::U| {
        w.bits(w.select(w.ge_i(size, w.splat_u(from)), w.from_bits(a), w.from_bits(b)))
    };
    let beyond = choose(INFINITE + 1, w.splat_u(infinite | quiet), w.splat_u(infinite));
    choose(E::DTYPE.limit().to_bits() + 1, w.or(sign, beyond), encode(w, E::DTYPE, x))
}

/// Bits without the sign. They order as the magnitudes do, with NaN above all numbers.
#[inline(always)]
pub(crate) fn size<W: Warp>(w: W, x: W::F) -> W::U {
    w.and(w.bits(x), w.splat_u(0x7fff_ffff))
}

/// A row that lanes write f32 results to.
pub trait Results<W: Warp> {
    /// Lane `i` writes element `start + i * step`, if the row has it.
    fn scatter(&mut self, w: W, x: W::F, start: usize, step: usize);
}

impl<W: Warp> Results<W> for [f32] {
    #[inline(always)]
    fn scatter(&mut self, w: W, x: W::F, start: usize, step: usize) {
        w.scatter(x, self, start, step);
    }
}

/// A row of 16-bit elements, in the dtype of `E`. Results are rounded to nearest even.
#[derive(Debug)]
pub struct Rounded<'a, E> {
    bits: &'a mut [u16],
    beyond: Option<(u32, f32)>,
    finite: bool,
    of: PhantomData<E>,
}

impl<'a, E: Element> Rounded<'a, E> {
    /// A row to write over these bits.
    #[inline(always)]
    pub fn new(bits: &'a mut [u16]) -> Self {
        Rounded { bits, beyond: None, finite: true, of: PhantomData }
    }

    /// First written element that its dtype cannot hold, and its value before rounding; the row has an infinity or a NaN there.
    #[inline(always)]
    pub fn beyond(&self) -> Option<(u32, f32)> {
        self.beyond
    }

    /// Whether all written values were finite before rounding.
    #[inline(always)]
    pub fn finite(&self) -> bool {
        self.finite
    }
}

impl<W: Warp, E: Element> Results<W> for Rounded<'_, E> {
    #[inline(always)]
    fn scatter(&mut self, w: W, x: W::F, start: usize, step: usize) {
        w.scatter_half(narrow::<W, E>(w, x), self.bits, start, step);
        let written = self.bits.len().saturating_sub(start).div_ceil(step).min(LANES);
        let written = ((1u64 << written) - 1) as u32;
        let past = |most: u32| w.ballot(w.ge_i(size(w, x), w.splat_u(most + 1))) & written;
        let beyond = past(E::DTYPE.limit().to_bits());
        if beyond != 0 {
            let lane = beyond.trailing_zeros() as usize;
            let at = (start + lane * step) as u32;
            if self.beyond.is_none_or(|(first, _)| at < first) {
                self.beyond = Some((at, w.lane(x, lane)));
            }
        }
        self.finite &= past(f32::MAX.to_bits()) == 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{Bf16, F16};
    use crate::portable::Portable;
    use core::array::from_fn;
    use half::{bf16, f16};

    fn same<E: Element>(to_f32: impl Fn(u16) -> f32, from_f32: impl Fn(f32) -> u16) {
        let alike = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        for first in (0..=u16::MAX).step_by(LANES) {
            let bits: [u16; LANES] = from_fn(|i| first + i as u16);
            let row = Halves::<E>::new(&bits);
            let got = row.gather(Portable, Portable.lane_id());
            for (i, each) in row.each(Portable).enumerate() {
                let want = to_f32(bits[i]);
                assert!(alike(got[i], want) && alike(each[i], want), "{:#x}: {}", bits[i], got[i]);
            }
            // Rounding: each value, points between it and the next, and the neighbours of those.
            for off in [0.0, 0.25, 0.5, 0.75] {
                for nudge in [-1i32, 0, 1] {
                    let x: [f32; LANES] = from_fn(|i| {
                        let (a, b) = (to_f32(bits[i]), to_f32(bits[i].wrapping_add(1)));
                        f32::from_bits((a + (b - a) * off).to_bits().wrapping_add_signed(nudge))
                    });
                    let mut out = [0; LANES];
                    Rounded::<E>::new(&mut out).scatter(Portable, x, 0, 1);
                    for (x, got) in x.iter().zip(out) {
                        assert!(alike(to_f32(got), to_f32(from_f32(*x))), "{x:e}: {got:#x}");
                    }
                }
            }
        }
        for x in [f32::MAX, f32::INFINITY, f32::NAN, f32::from_bits(0x7fff_ffff), 65_519.996, 65_520.0] {
            for x in [x, -x] {
                let mut out = [0; 5];
                let mut row = Rounded::<E>::new(&mut out);
                row.scatter(Portable, from_fn(|i| if i == 2 { x } else { 1.0 }), 1, 2);
                // Lane 2 would be element 5.
                assert_eq!((row.beyond(), row.finite()), (None, true));
                row.scatter(Portable, from_fn(|i| if i == 1 { x } else { 1.0 }), 1, 2);
                let fits = x.abs() <= E::DTYPE.limit();
                assert_eq!(
                    row.beyond().map(|(at, x)| (at, x.to_bits())),
                    (!fits).then_some((3, x.to_bits()))
                );
                assert_eq!(row.finite(), x.is_finite());
                row.scatter(Portable, [f32::INFINITY; LANES], 2, 2);
                assert_eq!((row.beyond().map(|of| of.0), row.finite()), (Some(2), false));
                assert!(alike(to_f32(out[3]), to_f32(from_f32(x))) && out[0] == 0, "{x:e}: {out:?}");
            }
        }
    }

    #[test]
    fn elements_are_those_of_the_half_crate() {
        same::<F16>(|bits| f16::from_bits(bits).to_f32(), |x| f16::from_f32(x).to_bits());
        same::<Bf16>(|bits| bf16::from_bits(bits).to_f32(), |x| bf16::from_f32(x).to_bits());
    }
}
