//! Values of a packed page under their weights.

use super::code::{Code, Coded, Scale};
use super::packed::TAGS;
use super::read::{Ahead, PackedPages, rows};
use crate::dtype::{Element, F16};
use crate::warp::{LANES, Routine, Warp};

/// The weighted values of page `i`; `WIDTH` is that of [`PackedPages::weigh_values`] where it is known.
pub(super) struct Weigh<'a, 'b, W: Warp, C, const R: usize, const WIDTH: usize> {
    pub pages: &'a mut PackedPages<'b, W, R>,
    pub code: C,
    pub i: usize,
    pub p: &'a [W::Slot; R],
    pub acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, C: Coded, const R: usize, const WIDTH: usize> Routine<W> for Weigh<'_, '_, W, C, R, WIDTH> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let width = if WIDTH > 0 { WIDTH } else { self.pages.packed.v_words() as usize };
        self.pages.weigh_values(w, self.code, width, self.i, self.p, self.acc);
    }
}

impl<W: Warp, const R: usize> PackedPages<'_, W, R> {
    /// `width` words of a row of 32 are one token's.
    #[inline(always)]
    fn weigh_values<C: Coded>(
        &mut self,
        w: W,
        code: C,
        width: usize,
        i: usize,
        p: &[W::Slot; R],
        acc: &mut [[f32; LANES]],
    ) {
        let (packed, words) = (self.packed, self.pages[i].words);
        let (parts, group_parts) = (packed.v_parts() as usize, packed.v_group_parts() as usize);
        let stride = packed.acc_rows() as usize;
        let scales = rows(words, packed.v_scales(), packed.v_scale_rows());
        let from = packed.v_scales() as usize;
        let ahead: &[u32] = match self.pages.get(i + 1) {
            Some(page) => &page.words[from..],
            // Its keys, if it is packed too; else as many of its words.
            None => self.next.map_or(&[][..], |words| &words[TAGS as usize..from.min(words.len())]),
        };
        let mut ahead = Ahead::new(ahead.as_chunks().0, packed.v_cols() as usize * parts * width);
        for col in 0..packed.v_cols() as usize {
            let v = &words[packed.v_base() as usize..];
            let column = Column { v, stride: packed.v_stride() as usize, width, col };
            for first in (0..parts).step_by(group_parts) {
                let mut weights = *p;
                if code.code().scale() != Scale::None {
                    let g = col * packed.v_col_groups() as usize + first / group_parts;
                    let word = w.load(&scales[g]);
                    for r in 0..R {
                        let p = w.unpark(&p[r]);
                        if code.code().scale() == Scale::Affine {
                            weights[r] = w.park(w.mul(p, F16::channel(w, word, 0)));
                            self.zero[g][r] = w.fma(p, F16::channel(w, word, 1), self.zero[g][r]);
                        } else {
                            weights[r] = w.park(w.mul(p, w.from_bits(word)));
                        }
                    }
                }
                let end = (first + group_parts).min(parts);
                let mut part = first;
                while part < end {
                    let acc = &mut acc[col * parts + part..];
                    // Known parts, so that unpacking needs no shift by a variable.
                    part += match part {
                        0 => column.weigh_at::<W, C, R>(w, code, 0, end, &weights, acc, stride, &mut ahead),
                        1 => column.weigh_at::<W, C, R>(w, code, 1, end, &weights, acc, stride, &mut ahead),
                        2 => column.weigh_at::<W, C, R>(w, code, 2, end, &weights, acc, stride, &mut ahead),
                        3 => column.weigh_at::<W, C, R>(w, code, 3, end, &weights, acc, stride, &mut ahead),
                        4 => column.weigh_at::<W, C, R>(w, code, 4, end, &weights, acc, stride, &mut ahead),
                        5 => column.weigh_at::<W, C, R>(w, code, 5, end, &weights, acc, stride, &mut ahead),
                        6 => column.weigh_at::<W, C, R>(w, code, 6, end, &weights, acc, stride, &mut ahead),
                        _ => column.weigh_at::<W, C, R>(w, code, 7, end, &weights, acc, stride, &mut ahead),
                    };
                }
            }
        }
    }
}

/// A group of 32 words of every value of a page, or the whole values where several share 32 words.
#[derive(Clone, Copy)]
struct Column<'a> {
    v: &'a [u32],
    stride: usize,
    width: usize,
    col: usize,
}

impl Column<'_> {
    /// Adds part `part`, and the next if the sums of both fit the registers; returns how many it added.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn weigh_at<W: Warp, C: Coded, const R: usize>(
        &self,
        w: W,
        code: C,
        part: usize,
        end: usize,
        weights: &[W::Slot; R],
        acc: &mut [[f32; LANES]],
        stride: usize,
        ahead: &mut Ahead<'_>,
    ) -> usize {
        if R * 2 <= W::ROWS && code.code() == Code::Int4 && part.is_multiple_of(2) && part + 2 <= end {
            self.weigh::<W, C, 2, R>(w, code, part, weights, acc, stride, ahead);
            2
        } else {
            self.weigh::<W, C, 1, R>(w, code, part, weights, acc, stride, ahead);
            1
        }
    }

    /// Adds `J` parts from `part` on of all tokens, times their weights.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn weigh<W: Warp, C: Coded, const J: usize, const R: usize>(
        &self,
        w: W,
        code: C,
        part: usize,
        weights: &[W::Slot; R],
        acc: &mut [[f32; LANES]],
        stride: usize,
        ahead: &mut Ahead<'_>,
    ) {
        let mut a = [[w.splat(0.0); J]; R];
        for r in 0..R {
            for j in 0..J {
                a[r][j] = w.load_f(&acc[r * stride + j]);
            }
        }
        let whole = self.width < LANES || self.stride - self.col * LANES >= LANES;
        for t in (0..LANES).step_by(LANES / self.width) {
            let at = t * self.stride + self.col * LANES;
            ahead.step(w, J);
            let word = match self.v[at..].first_chunk() {
                Some(words) if whole => w.load(words),
                _ => w.load_part(&self.v[at..(t + 1) * self.stride]),
            };
            let mut x = [w.splat(0.0); J];
            for (j, x) in x.iter_mut().enumerate() {
                *x = code.part(w, word, part + j);
            }
            for r in 0..R {
                let p = w.spread(&weights[r], t, self.width);
                for j in 0..J {
                    a[r][j] = w.fma(x[j], p, a[r][j]);
                }
            }
        }
        for r in 0..R {
            for j in 0..J {
                w.store(a[r][j], &mut acc[r * stride + j]);
            }
        }
    }
}
