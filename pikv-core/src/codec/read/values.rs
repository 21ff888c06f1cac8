//! Values of a packed page, summed by their weights.

use super::{Ahead, INTEGERS, PackedPages, TINY, add_plane, next_quad, rows};
use crate::codec::code::{Code, Scale};
use crate::codec::packed::TAGS;
use crate::dtype::{Element, F16};
use crate::warp::{LANES, Routine, Warp};

/// The weighted values of page `i`, of a float code.
pub(super) struct Weigh<'a, 'b, W: Warp, const R: usize> {
    pub pages: &'a mut PackedPages<'b, R>,
    pub i: usize,
    pub p: &'a [W::Slot; R],
    pub acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, const R: usize> Routine<W> for Weigh<'_, '_, W, R> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        self.pages.weigh_values(w, self.i, self.p, self.acc);
    }
}

/// The weighted values of page `i`, of an integer code.
pub(super) struct WeighIntegers<'a, 'b, W: Warp, const R: usize> {
    pub pages: &'a mut PackedPages<'b, R>,
    pub i: usize,
    pub p: &'a [W::Slot; R],
    pub acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, const R: usize> Routine<W> for WeighIntegers<'_, '_, W, R> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        self.pages.weigh_integers(w, self.i, self.p, self.acc);
    }
}

/// Time to fold a group's scales, in rows of products.
const FOLD: usize = 3;

impl<'a, const R: usize> PackedPages<'a, R> {
    /// Words read after the values of page `i`: the values of the next page, or the page after the block.
    #[inline(always)]
    pub(super) fn after<W: Warp>(&self, i: usize) -> &'a [[u32; LANES]] {
        if !W::FETCHES {
            return &[];
        }
        let from = self.v_scales as usize;
        let next: &'a [u32] = match self.pages.get(i + 1) {
            Some(page) => &page.words[from..],
            // The keys of the page after the block, if it is packed too; else as many of its words.
            None => self.next.get(TAGS as usize..from.min(self.next.len())).unwrap_or_default(),
        };
        next.as_chunks().0
    }

    /// Rounds a group's weights `p scale` to integers in units of `max p max scale / 32639`; adds their exact sums with the codes as f32.
    #[inline(always)]
    fn weigh_integers<W: Warp>(&mut self, w: W, i: usize, p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let (packed, words) = (self.packed, self.pages[i].words);
        let groups = self.v_groups;
        let mut ahead = Ahead::new(self.after::<W>(i), groups * (packed.v.bits() as usize + FOLD));
        let (mut share, mut unit) = ([w.splat(0.0); R], [0.0; R]);
        for r in 0..R {
            let x = w.unpark(&p[r]);
            let top = w.reduce_max(x);
            if top > TINY {
                share[r] = w.mul(x, w.splat(1.0 / top));
                unit[r] = top / INTEGERS;
            }
        }
        for (g, row) in rows(words, self.v_scales, groups as u32).iter().enumerate() {
            ahead.step(w, FOLD);
            let word = w.load(row);
            let (scale, min) = (F16::channel(w, word, 0), F16::channel(w, word, 1));
            let top = w.reduce_max(scale);
            let scale = w.mul(scale, w.splat(if top > 0.0 { INTEGERS / top } else { 0.0 }));
            self.scratch.tops[g] = top;
            for r in 0..R {
                w.store_quads(share[r], scale, &mut self.scratch.quads[r][g]);
                let zero = &mut self.scratch.zero[g][r];
                w.store(w.fma(w.unpark(&p[r]), min, w.load_f(zero)), zero);
            }
        }
        w.sync();
        let (v, stride) = (&words[self.v_scales as usize + groups * LANES..], packed.v_stride() as usize);
        // On a CPU each width of one-plane codes has a loop compiled for it. A device has one loop for all, because its kernels
        // contain every code.
        match packed.v.bits() {
            8 if W::FETCHES => self.weigh_plane::<W, 8>(w, v, stride, &unit, acc, &mut ahead),
            4 if W::FETCHES => self.weigh_plane::<W, 4>(w, v, stride, &unit, acc, &mut ahead),
            2 if W::FETCHES => self.weigh_plane::<W, 2>(w, v, stride, &unit, acc, &mut ahead),
            _ => self.weigh_planes(w, v, stride, &unit, acc, &mut ahead),
        }
        w.sync();
    }

    /// Adds the values of an integer code of one plane of `BITS` bits, with rows `v`. `unit` is the unit of each row's weights,
    /// divided by the largest scale of their group.
    #[inline(always)]
    fn weigh_plane<W: Warp, const BITS: u32>(
        &self,
        w: W,
        v: &[u32],
        stride: usize,
        unit: &[f32; R],
        acc: &mut [[f32; LANES]],
        ahead: &mut Ahead<'_>,
    ) {
        for g in 0..self.v_groups {
            let mut sum = [w.splat_u(0); R];
            let plane = self.group_products::<W, BITS>(w, v, stride, g, ahead);
            add_plane(w, &plane, 0, &mut sum);
            self.add_group(w, g, &sum, unit, acc);
        }
    }

    /// [`Self::weigh_plane`] for codes of several planes, plane by plane.
    #[inline(always)]
    fn weigh_planes<W: Warp>(
        &self,
        w: W,
        v: &[u32],
        stride: usize,
        unit: &[f32; R],
        acc: &mut [[f32; LANES]],
        ahead: &mut Ahead<'_>,
    ) {
        for g in 0..self.v_groups {
            let (mut sum, mut shift) = ([w.splat_u(0); R], 0);
            while let Some(bits) = self.packed.v.plane(shift) {
                let v = &v[shift as usize * stride..];
                let plane = match bits {
                    8 => self.group_products::<W, 8>(w, v, stride, g, ahead),
                    4 => self.group_products::<W, 4>(w, v, stride, g, ahead),
                    2 => self.group_products::<W, 2>(w, v, stride, g, ahead),
                    _ => self.group_products::<W, 1>(w, v, stride, g, ahead),
                };
                add_plane(w, &plane, shift, &mut sum);
                shift += bits;
            }
            self.add_group(w, g, &sum, unit, acc);
        }
    }

    /// Products of the weights' integers for group `g` with the codes of a plane of `BITS` bits, whose rows start with `v`.
    #[inline(always)]
    fn group_products<W: Warp, const BITS: u32>(
        &self,
        w: W,
        v: &[u32],
        stride: usize,
        g: usize,
        ahead: &mut Ahead<'_>,
    ) -> [W::Sum; R] {
        let mut sum = [w.no_sum(); R];
        let (first, end) = (g * LANES, stride.min((g + 1) * LANES));
        let quads = 8 / BITS as usize;
        for t in 0..BITS as usize {
            ahead.step(w, 1);
            let mut word = w.load_part(&v[t * stride + first..t * stride + end]);
            for k in 0..quads {
                let codes = next_quad::<W, BITS>(w, &mut word);
                for (sum, row) in sum.iter_mut().zip(&self.scratch.quads) {
                    *sum = w.dot4(codes, &row[g], t * quads + k, *sum);
                }
            }
        }
        sum
    }

    /// Adds the sums of group `g`'s products to its values.
    #[inline(always)]
    fn add_group<W: Warp>(&self, w: W, g: usize, sum: &[W::U; R], unit: &[f32; R], acc: &mut [[f32; LANES]]) {
        for r in 0..R {
            let row = &mut acc[r * self.v_groups + g];
            let x = w.fma(w.to_f(sum[r]), w.splat(unit[r] * self.scratch.tops[g]), w.load_f(row));
            w.store(x, row);
        }
    }

    /// Float codes: the group's scales are multiplied into the weights as f32.
    #[inline(always)]
    fn weigh_values<W: Warp>(&mut self, w: W, i: usize, p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let width = self.packed.v_words() as usize;
        let (packed, words) = (self.packed, self.pages[i].words);
        let (parts, group_parts) = (packed.v_parts() as usize, packed.v_group_parts() as usize);
        let stride = packed.stored_acc_rows() as usize;
        let scales = rows(words, packed.v_scales(), packed.v_groups());
        let mut ahead = Ahead::new(self.after::<W>(i), packed.v_cols() as usize * parts * width);
        for col in 0..packed.v_cols() as usize {
            let v = &words[packed.v_base() as usize..];
            let column = Column { code: packed.v, v, stride: packed.v_stride() as usize, width, col };
            for first in (0..parts).step_by(group_parts) {
                let mut weights = *p;
                if packed.v.scale() == Scale::Float {
                    let g = col * packed.v_col_groups() as usize + first / group_parts;
                    let scale = w.from_bits(w.load(&scales[g]));
                    for weights in &mut weights {
                        *weights = w.park(w.mul(w.unpark(weights), scale));
                    }
                }
                for part in first..(first + group_parts).min(parts) {
                    let acc = &mut acc[col * parts + part..];
                    // Constant parts, so that unpacking needs no shift by a variable.
                    match part {
                        0 => column.weigh::<W, R>(w, 0, &weights, acc, stride, &mut ahead),
                        1 => column.weigh::<W, R>(w, 1, &weights, acc, stride, &mut ahead),
                        2 => column.weigh::<W, R>(w, 2, &weights, acc, stride, &mut ahead),
                        _ => column.weigh::<W, R>(w, 3, &weights, acc, stride, &mut ahead),
                    }
                }
            }
        }
    }
}

/// A group of 32 words of every value of a page, or whole values if several share 32 words.
#[derive(Clone, Copy)]
struct Column<'a> {
    code: Code,
    v: &'a [u32],
    stride: usize,
    width: usize,
    col: usize,
}

impl Column<'_> {
    /// Adds part `part` of all tokens, times their weights.
    #[inline(always)]
    fn weigh<W: Warp, const R: usize>(
        &self,
        w: W,
        part: usize,
        weights: &[W::Slot; R],
        acc: &mut [[f32; LANES]],
        stride: usize,
        ahead: &mut Ahead<'_>,
    ) {
        let mut a = [w.splat(0.0); R];
        for r in 0..R {
            a[r] = w.load_f(&acc[r * stride]);
        }
        let whole = self.width < LANES || self.stride - self.col * LANES >= LANES;
        for t in (0..LANES).step_by(LANES / self.width) {
            let at = t * self.stride + self.col * LANES;
            ahead.step(w, 1);
            let word = match self.v[at..].first_chunk() {
                Some(words) if whole => w.load(words),
                _ => w.load_part(&self.v[at..(t + 1) * self.stride]),
            };
            let x = self.code.float_part(w, word, part);
            for r in 0..R {
                a[r] = w.fma(x, w.spread(&weights[r], t, self.width), a[r]);
            }
        }
        for r in 0..R {
            w.store(a[r], &mut acc[r * stride]);
        }
    }
}
