//! Attention over packed pages, as they lie: no page is unpacked before it is read.
//!
//! *Integer K.* A score is `sum_c q_c (scale_c code_c + min_c)`. The scales go into the query, once a page: `q_c scale_c`, rounded
//! to 16 bits against the largest of them, is multiplied with the codes as integers, exactly, and the minima make one number
//! for the page. What the rounding adds to a logit is at most `2^-16` of `255 sum_c max_c |q_c scale_c|` (`15` for 4 bits), far
//! below what the codes themselves lose.
//! *FP8 K.* The scales go into the query as f32.
//! *V.* A group's scales go into the softmax weights of the page's tokens, and `sum_t p_t min_t` is one number a group.
//!
//! Keys that are stored before their rotation are rebuilt channel by channel, and turned, in the lanes.

use super::code::{Any, Code, Int4, Int8, Scale};
use super::packed::{K_COLS, Packed, TAGS, V_GROUPS};
use super::scores::{FloatScores, IntegerScores, RebuiltScores};
use super::values::Weigh;
use crate::attend::{Form, Sight};
use crate::full::Query;
use crate::page::MAX_DIM;
use crate::warp::{LANES, Warp};

/// A packed page of the list.
#[derive(Clone, Copy, Debug)]
pub struct PackedRef<'a> {
    /// The page's words.
    pub words: &'a [u32],
    /// Bit `t` is set if there is a token to be read at lane `t`.
    pub live: u32,
    /// Position of the last token.
    pub last: u32,
    /// Position of the token that packed the page when it left the ring: `last` or a later one. Rows that still have it in the
    /// ring see nothing of the page.
    pub by: u32,
}

/// `R` queries that packed keys are read with.
#[derive(Clone, Copy, Debug)]
pub struct Folded<'a, const R: usize> {
    /// `[R][k_cols]` rows of 32 stored channels, scaled to base 2, the padding 0: what a map of the keys leaves of a query.
    pub rows: &'a [[f32; LANES]],
    /// What each row's scores start from.
    pub start: [f32; R],
    /// Set where keys are turned as they are read: the map to take back first, if any, and the whole queries. `rows` and
    /// `start` are then not read.
    pub whole: Option<(Option<Back<'a>>, Query<'a, R>)>,
}

/// A map taken back: stored channels to those of the head.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Back<'a> {
    /// The transform of [`Turn::Hadamard`](super::pack::Turn::Hadamard), which is its own inverse.
    Hadamard {
        /// Channels of a block.
        block: usize,
    },
    /// The stored channels back in their places, 0 in the others.
    Select {
        /// Where each stored channel belongs.
        channels: &'a [u32],
    },
    /// `decode x + bias`, each output a chain of fused multiply-adds over the stored channels in order, from 0.
    Dense {
        /// `[wide][narrow]`
        decode: &'a [f32],
        /// `[wide]`; empty for 0.
        bias: &'a [f32],
    },
}

/// What reading needs beside the pages: queries under a page's scales, and rebuilt keys.
#[derive(Clone, Debug)]
pub struct Scratch<const R: usize> {
    pub(super) queries: [[[f32; LANES]; K_COLS]; R],
    pub(super) halves: [[[u32; LANES / 2]; K_COLS]; R],
}

impl<const R: usize> Default for Scratch<R> {
    #[inline(always)]
    fn default() -> Self {
        Scratch { queries: [[[0.0; LANES]; K_COLS]; R], halves: [[[0; LANES / 2]; K_COLS]; R] }
    }
}
/// Rows of 32 words that rebuilt keys take: the stored channels, then those of the head.
pub const REBUILT: usize = 2 * MAX_DIM as usize;

/// Packed pages of a block, and what is read with them.
pub struct PackedPages<'a, W: Warp, const R: usize> {
    pub(super) packed: &'a Packed,
    pub(super) pages: &'a [PackedRef<'a>],
    pub(super) next: Option<&'a [u32]>,
    pub(super) query: Folded<'a, R>,
    pub(super) scratch: &'a mut Scratch<R>,
    pub(super) rebuilt: &'a mut [[f32; LANES]],
    /// `sum_t p_t min_t` of each group, lane = token.
    pub(super) zero: [[W::F; R]; V_GROUPS],
}

impl<'a, W: Warp, const R: usize> PackedPages<'a, W, R> {
    /// `pages` has at most [`BLOCK`](crate::attend::BLOCK); `next` is the page that will be read after them. `rebuilt` has
    /// [`REBUILT`] rows where keys are turned as they are read, else none.
    #[inline(always)]
    pub fn new(
        w: W,
        packed: &'a Packed,
        pages: &'a [PackedRef<'a>],
        next: Option<&'a [u32]>,
        query: Folded<'a, R>,
        scratch: &'a mut Scratch<R>,
        rebuilt: &'a mut [[f32; LANES]],
    ) -> Self {
        let zero = [[w.splat(0.0); R]; V_GROUPS];
        PackedPages { packed, pages, next, query, scratch, rebuilt, zero }
    }
}

/// Rows of 32 words from word `first`.
#[inline(always)]
pub(super) fn rows(words: &[u32], first: u32, count: u32) -> &[[u32; LANES]] {
    words[first as usize..(first as usize + count as usize * LANES)].as_chunks().0
}

/// Positions of a page's tokens.
#[inline(always)]
pub(super) fn positions<W: Warp>(w: W, page: &PackedRef<'_>) -> W::U {
    let halves = w.from_bits(w.load_part(&page.words[..TAGS as usize]));
    let low = w.and(w.bits(halves), w.splat_u(0xffff));
    let high = w.shr::<16>(w.bits(w.shfl_xor(halves, TAGS)));
    let tags = w.bits(w.select(w.mask(0xffff), w.from_bits(low), w.from_bits(high)));
    let last = w.splat_u(page.last);
    w.sub_u(last, w.and(w.sub_u(last, tags), w.splat_u(0xffff)))
}

impl<W: Warp, const R: usize> Form<W, R> for PackedPages<'_, W, R> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.pages.len()
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.packed.acc_rows() as usize
    }

    /// For rows that have the token that packed the page still in their ring, its tokens are not packed yet.
    #[inline(always)]
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R] {
        let page = &self.pages[i];
        let mut seen = [0; R];
        for (seen, sight) in seen.iter_mut().zip(sight) {
            if page.by as i32 <= sight.hi {
                *seen = if sight.lo == 0 && sight.floor == 0 {
                    page.live
                } else {
                    sight.mask(w, positions(w, page), page.live)
                };
            }
        }
        seen
    }

    #[inline(always)]
    fn scores(&mut self, w: W, i: usize) -> [W::F; R] {
        if self.query.whole.is_some() {
            return w.call(RebuiltScores(self, i));
        }
        match self.packed.k {
            Code::Int8 => w.call(IntegerScores::<W, R, 8>(self, i)),
            Code::Int4 => w.call(IntegerScores::<W, R, 4>(self, i)),
            _ => w.call(FloatScores(self, i)),
        }
    }

    #[inline(always)]
    fn weigh(&mut self, w: W, i: usize, _: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        // The widths of 128 channels have routines of their own.
        match (self.packed.v, self.packed.v_words()) {
            (Code::Int8, 32) => w.call(Weigh::<W, Int8, R, 32> { pages: self, code: Int8, i, p, acc }),
            (Code::Int4, 16) => w.call(Weigh::<W, Int4, R, 16> { pages: self, code: Int4, i, p, acc }),
            (code, _) => w.call(Weigh::<W, Any, R, 0> { pages: self, code: Any(code), i, p, acc }),
        }
    }

    /// Joins the tokens of a row of words, and adds what the minima make.
    #[inline(always)]
    fn finish(&mut self, w: W, acc: &mut [[f32; LANES]]) {
        let packed = self.packed;
        let (parts, stride) = (packed.v_parts(), packed.acc_rows() as usize);
        for r in 0..R {
            for col in 0..packed.v_cols() {
                let mut least = [0.0; V_GROUPS];
                if packed.v.scale() == Scale::Affine {
                    for (g, least) in least.iter_mut().take(packed.v_col_groups() as usize).enumerate() {
                        let g = (col * packed.v_col_groups()) as usize + g;
                        *least = w.reduce_sum(self.zero[g][r]);
                    }
                }
                for part in 0..parts {
                    let row = &mut acc[r * stride + (col * parts + part) as usize];
                    let mut x = w.load_f(row);
                    let mut distance = LANES as u32 / 2;
                    while distance >= packed.v_stride() {
                        x = w.add(x, w.shfl_xor(x, distance));
                        distance /= 2;
                    }
                    let least = least[(part / packed.v_group_parts()) as usize % V_GROUPS];
                    w.store(w.add(x, w.splat(least)), row);
                }
            }
        }
    }
}
/// Rows of words that will be read later, fetched evenly over a number of steps: a burst would fill the queue of misses and
/// stall the products.
pub(super) struct Ahead<'a> {
    rows: core::slice::Iter<'a, [u32; LANES]>,
    each: usize,
    steps: usize,
    due: usize,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    pub fn new(rows: &'a [[u32; LANES]], steps: usize) -> Ahead<'a> {
        Ahead { rows: rows.iter(), each: rows.len(), steps, due: 0 }
    }

    /// `n` steps are done.
    #[inline(always)]
    pub fn step<W: Warp>(&mut self, w: W, n: usize) {
        self.due += n * self.each;
        while self.due >= self.steps {
            self.due -= self.steps;
            if let Some(row) = self.rows.next() {
                w.prefetch(row);
            }
        }
    }
}
