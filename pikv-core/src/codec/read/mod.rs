//! Attention over packed pages in their packed form: no page is unpacked before it is read.
//!
//! *Integer K.* A score is `sum_c q_c (scale_c code_c + min_c)`. The scales are multiplied into the query, once per page: `q_c scale_c`,
//! rounded to 16 bits relative to the largest of them, is multiplied with the codes as integers, exactly; the minima add one number
//! per page. The rounding changes a logit by at most `top / 65278 sum_c max_c |q_c scale_c|`, with `top` the largest code: far
//! less than the error of the codes. Codes of several planes are read plane by plane: the sums are exact, so those of a plane are
//! shifted and added.
//! *FP8 K, FP4 K.* The scales are multiplied into the query as f32; with blocks of 16 tokens, once for each half of the lanes.
//! *V.* A group's scales are multiplied into the softmax weights of the page's tokens.
//! *FP4 V.* Weights times the scales of a block are f32, for each half of 32 channels if a block is 16.
//! *Integer V.* Weights times their scales, `p_t scale_t`, are rounded to 16 bits relative to the largest weight of the page times the
//! largest scale of the group; their sum with the codes is exact, and becomes f32 once per page. The rounding changes
//! `sum_t p_t v_t` by at most `top / 65278 max_t p_t max_t scale_t` for each token of the page: relative to the page's own
//! weight, even if that is small beside other pages'. `sum_t p_t min_t` is one number per group, in f32.
//!
//! Keys that are stored before their rotation are rebuilt channel by channel, and rotated, in the lanes.

mod blocks;
pub(super) mod scores;
mod values;

use self::blocks::{BlockScores, WeighBlocks};
use self::scores::{FloatScores, IntegerScores, RebuiltScores};
use self::values::{Weigh, WeighIntegers};
use super::code::Scale;
use super::packed::{K_COLS, Packed, TAGS, V_GROUPS};
use crate::attend::{Form, Sight};
use crate::page::MAX_DIM;
use crate::turned::Query;
use crate::warp::{LANES, Warp};

/// A packed page of the list.
#[derive(Clone, Copy, Debug)]
pub struct PackedRef<'a> {
    /// The page's words.
    pub words: &'a [u32],
    /// Bit `t` is set if the token at lane `t` is read.
    pub live: u32,
    /// Position of the last token.
    pub last: u32,
    /// Position of the token that packed the page when it left the ring: `last` or a later one. Rows for which it is still in the
    /// ring see nothing of the page.
    pub by: u32,
}

/// `R` queries for packed keys.
#[derive(Clone, Copy, Debug)]
pub struct Folded<'a, const R: usize> {
    /// `[R][k_cols]` rows of 32 stored channels, scaled to base 2, the padding 0: the query after the map of the keys.
    pub rows: &'a [[f32; LANES]],
    /// Start of each row's scores.
    pub start: [f32; R],
    /// Set if keys are rotated when read: the map to undo first, if any, and the whole queries. `rows` and
    /// `start` are then not read.
    pub whole: Option<(Option<Back<'a>>, Query<'a, R>)>,
}

/// The inverse of a map: from stored channels to the head's.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Back<'a> {
    /// The transform of [`Turn::Hadamard`](super::pack::Turn::Hadamard), which is its own inverse.
    Hadamard {
        /// Channels of a block.
        block: usize,
    },
    /// The stored channels in their places, 0 in the others.
    Select {
        /// Channel of the head that each stored channel is.
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

/// Queries and weights become integers of at most this magnitude, the limit of [`Warp::dot4`].
pub(super) const INTEGERS: f32 = 32639.0;
/// If the largest query or weight is below this, it counts as 0: its inverse could overflow.
pub(super) const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// Most rows of 32 integers: those of a query, or the weights for all groups of a value.
pub(super) const ROWS: usize = if K_COLS > V_GROUPS { K_COLS } else { V_GROUPS };

/// Working memory of reads: queries and weights times a page's scales.
/// Rows are aligned to cache lines: loads of 64 bytes that straddle two lines are slow.
#[derive(Clone, Debug)]
#[repr(align(128))]
pub struct Scratch<const R: usize> {
    pub(super) queries: [[[f32; LANES]; K_COLS]; R],
    /// Queries, then weights, as [`Warp::store_quads`] writes them: a row of 32 channels, or of the weights for a group.
    /// For keys in blocks of 16, the queries times the scales of the second halves, as f32.
    pub(super) quads: [[[u32; LANES]; ROWS]; R],
    /// `sum_t p_t min_t` of each group, lane = token.
    pub(super) zero: [[[f32; LANES]; R]; V_GROUPS],
    /// The largest scale of each group of a page's values.
    pub(super) tops: [f32; V_GROUPS],
}

impl<const R: usize> Default for Scratch<R> {
    #[inline(always)]
    fn default() -> Self {
        Scratch {
            queries: [[[0.0; LANES]; K_COLS]; R],
            quads: [[[0; LANES]; ROWS]; R],
            zero: [[[0.0; LANES]; R]; V_GROUPS],
            tops: [0.0; V_GROUPS],
        }
    }
}

/// Rows of 32 words for rebuilt keys: the stored channels, then those of the head.
pub const REBUILT: usize = 2 * MAX_DIM as usize;

/// Packed pages of a block, and the working memory to read them.
pub struct PackedPages<'a, const R: usize> {
    pub(super) packed: &'a Packed,
    /// Taken from `packed`, computed once.
    pub(super) v_scales: u32,
    pub(super) v_groups: usize,
    pub(super) pages: &'a [PackedRef<'a>],
    pub(super) next: &'a [u32],
    pub(super) query: Folded<'a, R>,
    pub(super) scratch: &'a mut Scratch<R>,
    pub(super) rebuilt: &'a mut [[f32; LANES]],
}

impl<'a, const R: usize> PackedPages<'a, R> {
    /// `pages` has at most [`BLOCK`](crate::attend::BLOCK); `next` is the page that is read after them, empty if there is
    /// none. `rebuilt` has [`REBUILT`] rows if keys are rotated when read, else none.
    #[inline(always)]
    pub fn new(
        packed: &'a Packed,
        pages: &'a [PackedRef<'a>],
        next: &'a [u32],
        query: Folded<'a, R>,
        scratch: &'a mut Scratch<R>,
        rebuilt: &'a mut [[f32; LANES]],
    ) -> Self {
        let (v_scales, v_groups) = (packed.v_scales(), packed.v_groups() as usize);
        PackedPages { packed, v_scales, v_groups, pages, next, query, scratch, rebuilt }
    }

    #[inline(always)]
    pub(super) fn folded_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        match self.packed.k.scale() {
            Scale::Affine => w.call(IntegerScores(self, i)),
            Scale::Block => w.call(BlockScores(self, i)),
            _ => w.call(FloatScores(self, i)),
        }
    }
}

/// Packed pages whose [`Folded::whole`] is set if `WHOLE`, else unset; compiled without the code for the other case, because a device
/// compiles all of it into one kernel.
pub struct Only<'a, const R: usize, const WHOLE: bool>(pub PackedPages<'a, R>);

impl<W: Warp, const R: usize, const WHOLE: bool> Form<W, R> for Only<'_, R, WHOLE> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.0.pages.len()
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.0.packed.acc_rows() as usize
    }

    #[inline(always)]
    fn begin(&mut self, w: W) {
        self.0.begin(w);
    }

    #[inline(always)]
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R] {
        self.0.seen(w, i, sight)
    }

    #[inline(always)]
    fn scores(&mut self, w: W, i: usize) -> [W::F; R] {
        if WHOLE { w.call(RebuiltScores(&mut self.0, i)) } else { self.0.folded_scores(w, i) }
    }

    #[inline(always)]
    fn weigh(&mut self, w: W, i: usize, seen: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        self.0.weigh(w, i, seen, p, acc);
    }

    #[inline(always)]
    fn finish(&mut self, w: W, acc: &mut [[f32; LANES]]) {
        self.0.finish(w, acc);
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

/// Tokens of a page that each row sees. For rows whose ring still has the token that packed the page, its tokens are not
/// packed yet.
#[inline(always)]
pub fn seen<W: Warp, const R: usize>(w: W, page: &PackedRef<'_>, sight: &[Sight; R]) -> [u32; R] {
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

impl<W: Warp, const R: usize> Form<W, R> for PackedPages<'_, R> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.pages.len()
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.packed.acc_rows() as usize
    }

    #[inline(always)]
    fn begin(&mut self, w: W) {
        if self.packed.v.scale() == Scale::Affine {
            for rows in &mut self.scratch.zero[..self.v_groups] {
                for row in rows {
                    w.store(w.splat(0.0), row);
                }
            }
        }
    }

    #[inline(always)]
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R] {
        seen(w, &self.pages[i], sight)
    }

    #[inline(always)]
    fn scores(&mut self, w: W, i: usize) -> [W::F; R] {
        if self.query.whole.is_some() {
            return w.call(RebuiltScores(self, i));
        }
        self.folded_scores(w, i)
    }

    #[inline(always)]
    fn weigh(&mut self, w: W, i: usize, _: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        match self.packed.v.scale() {
            Scale::Affine => w.call(WeighIntegers { pages: self, i, p, acc }),
            Scale::Block => w.call(WeighBlocks { pages: self, i, p, acc }),
            _ => w.call(Weigh { pages: self, i, p, acc }),
        }
    }

    /// Integers: adds the terms of the minima. Float codes: joins the tokens of a row of words.
    #[inline(always)]
    fn finish(&mut self, w: W, acc: &mut [[f32; LANES]]) {
        if self.packed.v.scale() == Scale::Affine {
            for (r, rows) in acc.chunks_exact_mut(self.v_groups).enumerate() {
                for (g, row) in rows.iter_mut().enumerate() {
                    let least = w.splat(w.reduce_sum(w.load_f(&self.scratch.zero[g][r])));
                    w.store(w.add(w.load_f(row), least), row);
                }
            }
            return;
        }
        let width = self.packed.v_words();
        if width < LANES as u32 {
            for row in acc {
                let mut x = w.load_f(row);
                let mut distance = LANES as u32 / 2;
                while distance >= width {
                    x = w.add(x, w.shfl_xor(x, distance));
                    distance /= 2;
                }
                w.store(x, row);
            }
        }
    }
}

/// The first four codes of a word, as bytes, which [`Warp::dot4`] takes at once; shifts the word to the codes after them.
#[inline(always)]
pub(super) fn next_quad<W: Warp, const BITS: u32>(w: W, word: &mut W::U) -> W::U {
    if BITS == 8 {
        return *word;
    }
    let codes = w.and(*word, w.splat_u(0x0101_0101 * ((1 << BITS) - 1)));
    *word = w.shr::<BITS>(*word);
    codes
}

/// Adds sums over a plane of codes to `to`; the plane's lowest bit is bit `shift` of a code, which is 0, 2 or 4.
#[inline(always)]
pub(super) fn add_plane<W: Warp, const R: usize>(w: W, sum: &[W::Sum; R], shift: u32, to: &mut [W::U; R]) {
    for (sum, to) in sum.iter().zip(to) {
        let sum = w.total(*sum);
        let sum = match shift {
            0 => sum,
            2 => w.shl::<2>(sum),
            _ => w.shl::<4>(sum),
        };
        *to = w.add_u(*to, sum);
    }
}

/// Rows of words to prefetch, spread evenly over a number of steps: a burst would fill the queue of misses and
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

    /// Prefetches the rows due after `n` steps.
    #[inline(always)]
    pub fn step<W: Warp>(&mut self, w: W, n: usize) {
        if !W::FETCHES {
            return;
        }
        self.due += n * self.each;
        while self.due >= self.steps {
            self.due -= self.steps;
            if let Some(row) = self.rows.next() {
                w.prefetch(row);
            }
        }
    }
}
