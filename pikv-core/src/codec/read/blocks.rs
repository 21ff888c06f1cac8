//! Packed pages of codes in blocks, each with a one-byte scale.

use super::{Ahead, PackedPages};
use crate::codec::code::{Code, fp4};
use crate::codec::packed::BYTES;
use crate::warp::{LANES, Routine, Warp};

/// Codes in a word.
const WORD: usize = 8;
/// Lanes of the first of two blocks.
const FIRST: u32 = 0xffff;

/// Scores by products of f32.
pub(super) struct BlockScores<'a, 'b, const R: usize>(pub &'a mut PackedPages<'b, R>, pub usize);

impl<W: Warp, const R: usize> Routine<W> for BlockScores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.block_scores(w, self.1)
    }
}

/// The weighted values of page `i`.
pub(super) struct WeighBlocks<'a, 'b, W: Warp, const R: usize> {
    pub pages: &'a mut PackedPages<'b, R>,
    pub i: usize,
    pub p: &'a [W::Slot; R],
    pub acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, const R: usize> Routine<W> for WeighBlocks<'_, '_, W, R> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        self.pages.weigh_blocks(w, self.i, self.p, self.acc);
    }
}

/// Scales of K or V of a page.
#[derive(Clone, Copy)]
pub(super) struct Scales<'a> {
    code: Code,
    page: f32,
    /// `[blocks][8]`
    words: &'a [u32],
}

impl<'a> Scales<'a> {
    /// Scales that start with `words`.
    #[inline(always)]
    pub fn new(code: Code, words: &'a [u32]) -> Self {
        let page = if code.page_words() == 0 { 1.0 } else { f32::from_bits(words[0]) };
        Scales { code, page, words: &words[code.page_words() as usize..] }
    }

    /// Scales of block `half` of the `col`-th 32 numbers: lane `i` has that of byte `i`.
    #[inline(always)]
    pub fn of<W: Warp>(&self, w: W, col: usize, half: usize) -> W::F {
        let first = (col * self.code.blocks() as usize + half) * BYTES as usize;
        let words = bytemuck::cast_slice(&self.words[first..first + BYTES as usize]);
        let word = w.bits(w.gather(words, w.shr::<2>(w.lane_id())));
        let mut byte = w.from_bits(word);
        byte = w.select(w.mask(0x2222_2222), w.from_bits(w.shr::<8>(word)), byte);
        byte = w.select(w.mask(0x4444_4444), w.from_bits(w.shr::<16>(word)), byte);
        byte = w.select(w.mask(0x8888_8888), w.from_bits(w.shr::<24>(word)), byte);
        self.code.block_scales(w, w.and(w.bits(byte), w.splat_u(0xff)), self.page)
    }
}

impl<const R: usize> PackedPages<'_, R> {
    #[inline(always)]
    fn block_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, words) = (self.packed, self.pages[i].words);
        let (cols, two) = (packed.k_cols() as usize, packed.k.blocks() == 2);
        let scales = Scales::new(packed.k, &words[packed.k_scales() as usize..]);
        for c in 0..cols {
            let first = scales.of(w, c, 0);
            let second = if two { scales.of(w, c, 1) } else { first };
            for r in 0..R {
                let q = w.load_f(&self.query.rows[r * cols + c]);
                w.store(w.mul(q, first), &mut self.scratch.queries[r][c]);
                w.store(w.mul(q, second), bytemuck::cast_mut(&mut self.scratch.quads[r][c]));
            }
        }
        w.sync();
        let mut s = [w.splat(0.0); R];
        for (s, start) in s.iter_mut().zip(&self.query.start) {
            *s = w.splat(*start);
        }
        let rows = super::rows(words, packed.k_base(), packed.k_rows());
        let mut ahead = Ahead::new(self.ahead::<W>(i), rows.len());
        for (at, row) in rows.iter().enumerate() {
            ahead.step(w, 1);
            let word = w.load(row);
            for j in 0..WORD {
                let x = fp4(w, word, j);
                let c = at * WORD + j;
                for (r, s) in s.iter_mut().enumerate() {
                    let first = w.splat(self.scratch.queries[r].as_flattened()[c]);
                    let second = w.splat(f32::from_bits(self.scratch.quads[r].as_flattened()[c]));
                    *s = w.fma(x, w.select(w.mask(FIRST), first, second), *s);
                }
            }
        }
        w.sync();
        s
    }

    /// Adds the weighted values of page `i`; lane = channel.
    #[inline(always)]
    fn weigh_blocks<W: Warp>(&mut self, w: W, i: usize, p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let (packed, words) = (self.packed, self.pages[i].words);
        let (stride, two) = (packed.v_stride() as usize, packed.v.blocks() == 2);
        let scales = Scales::new(packed.v, &words[self.v_scales as usize..]);
        let v = &words[packed.v_base() as usize..][..LANES / WORD * stride];
        let cols = packed.v_cols() as usize;
        let mut ahead = Ahead::new(self.after::<W>(i), cols * (LANES / WORD));
        for col in 0..cols {
            let scale = scales.of(w, col, 0);
            let scale = [scale, if two { scales.of(w, col, 1) } else { scale }];
            let (mut first, mut second) = (*p, *p);
            for r in 0..R {
                first[r] = w.park(w.mul(w.unpark(&p[r]), scale[0]));
                second[r] = w.park(w.mul(w.unpark(&p[r]), scale[1]));
            }
            let mut a = [w.splat(0.0); R];
            for r in 0..R {
                a[r] = w.load_f(&acc[r * cols + col]);
            }
            for (row, v) in v.chunks_exact(stride).enumerate() {
                ahead.step(w, 1);
                let word = w.load_part(&v[col * LANES..stride.min((col + 1) * LANES)]);
                for j in 0..WORD {
                    let x = fp4(w, word, j);
                    let t = row * WORD + j;
                    for r in 0..R {
                        let (first, second) = (w.bcast(&first[r], t), w.bcast(&second[r], t));
                        a[r] = w.fma(x, w.select(w.mask(FIRST), first, second), a[r]);
                    }
                }
            }
            for r in 0..R {
                w.store(a[r], &mut acc[r * cols + col]);
            }
        }
    }
}
