//! Sums of values by their weights.

use super::Row;
use super::half::{Halved, part, store};
use super::widen::Ahead;
use crate::attend::Rows;
use pikv_core::attend::BLOCK;
use pikv_core::warp::{LANES, Routine, Warp};
use std::ops::Range;

/// 32 channels of the weighted sums of a run of pages.
pub(super) struct WeighRun<'a, 'b> {
    /// `[RUN][LANES]`
    pub(super) wide: &'a [[f32; LANES]],
    pub(super) run: Range<usize>,
    pub(super) p: &'a [Row],
    pub(super) seen: &'a [[u32; BLOCK]],
    /// These channels of each row, `stride` rows of lanes from one row to the next.
    pub(super) acc: &'a mut [[f32; LANES]],
    pub(super) stride: usize,
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl WeighRun<'_, '_> {
    /// Adds the tokens of `pages` in `seen`, which the `R` rows from `row` on all see.
    #[inline(always)]
    fn weigh<W: Warp, const R: usize>(&mut self, w: W, row: usize, pages: Range<usize>, seen: u32) {
        if seen == 0 {
            return;
        }
        let from = (pages.start - self.run.start) * LANES;
        let wide = self.wide[from..from + pages.len() * LANES].as_chunks().0;
        let p = |r: usize| &self.p[(row + r) * BLOCK..][pages.clone()];
        let p: [&[Row]; R] = std::array::from_fn(p);
        let (acc, stride) = (&mut self.acc[row * self.stride..], self.stride);
        if Halved::<W, R>::YES {
            w.call(Sums::<R, { part::LOW }> { wide, p, acc: &mut *acc, stride, seen });
            w.call(Sums::<R, { part::HIGH }> { wide, p, acc, stride, seen });
        } else {
            w.call(Sums::<R, { part::ALL }> { wide, p, acc, stride, seen });
        }
    }

    /// Adds page `i` for the `R` rows from `row` on, which do not all see the whole page.
    #[inline(always)]
    fn apart<W: Warp, const R: usize>(&mut self, w: W, row: usize, i: usize) {
        let masks: [u32; R] = std::array::from_fn(|r| self.seen[row + r][i]);
        let all = masks.iter().fold(u32::MAX, |all, mask| all & mask);
        // A row takes its tokens in order. Those that all rows see are taken together if only some rows see no token between them.
        let span = between(all);
        let together = R > 1 && all != 0 && masks.iter().all(|mask| mask & span == all);
        let before = if together { (1 << all.trailing_zeros()) - 1 } else { u32::MAX };
        for (r, mask) in (row..).zip(masks) {
            self.weigh::<W, 1>(w, r, i..i + 1, mask & before);
        }
        if together {
            self.weigh::<W, R>(w, row, i..i + 1, all);
            for (r, mask) in (row..).zip(masks) {
                self.weigh::<W, 1>(w, r, i..i + 1, mask & !(before | span));
            }
        }
    }
}

impl Rows for WeighRun<'_, '_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        self.ahead.fetch(w, R);
        let whole =
            |seen: &[[u32; BLOCK]], i: usize| seen[row..row + R].iter().all(|seen| seen[i] == u32::MAX);
        let mut i = self.run.start;
        while i < self.run.end {
            let from = i;
            while i < self.run.end && whole(self.seen, i) {
                i += 1;
            }
            if i > from {
                self.weigh::<W, R>(w, row, from..i, u32::MAX);
            } else {
                self.apart::<W, R>(w, row, i);
                i += 1;
            }
        }
    }
}

/// The bits from the lowest set bit to the highest.
#[inline(always)]
fn between(bits: u32) -> u32 {
    if bits == 0 { 0 } else { (u32::MAX << bits.trailing_zeros()) & (u32::MAX >> bits.leading_zeros()) }
}

/// The sums of `R` rows over some tokens.
struct Sums<'a, const R: usize, const PART: usize> {
    /// `[pages][tokens]`
    wide: &'a [[[f32; LANES]; LANES]],
    /// `[R][pages]`
    p: [&'a [Row]; R],
    acc: &'a mut [[f32; LANES]],
    /// Rows of lanes from one row's sums to the next.
    stride: usize,
    /// Tokens to add of each page.
    seen: u32,
}

impl<W: Warp, const R: usize, const PART: usize> Routine<W> for Sums<'_, R, PART> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Sums { wide, p, acc, stride, seen } = self;
        let mut sums = [w.splat(0.0); R];
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = w.load_f(&acc[r * stride]);
        }
        for (i, wide) in wide.iter().enumerate() {
            let p: [&[f32; LANES]; R] = std::array::from_fn(|r| &p[r][i].0);
            if seen == u32::MAX {
                for (t, x) in wide.iter().enumerate() {
                    token(w, x, &p, t, &mut sums);
                }
                continue;
            }
            let mut left = seen;
            while left != 0 {
                let t = left.trailing_zeros() as usize;
                left &= left - 1;
                token(w, &wide[t], &p, t, &mut sums);
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            store::<W, PART>(w, *sum, &mut acc[r * stride]);
        }
    }
}

/// One token of the sums.
#[inline(always)]
fn token<W: Warp, const R: usize>(
    w: W,
    x: &[f32; LANES],
    p: &[&[f32; LANES]; R],
    t: usize,
    sums: &mut [W::F; R],
) {
    let x = w.load_f(x);
    for (sum, p) in sums.iter_mut().zip(p) {
        *sum = w.fma(x, w.splat(p[t]), *sum);
    }
}
