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

use super::code::{Any, Code, Coded, Int4, Int8, Scale};
use super::pack::Turn;
use super::packed::{K_COLS, Packed, TAGS, V_GROUPS};
use crate::attend::{Form, Sight, filled};
use crate::dtype::{Element, F16, F32};
use crate::full::Query;
use crate::page::MAX_DIM;
use crate::rope;
use crate::warp::{LANES, Routine, Warp};

/// A packed page of the list.
#[derive(Clone, Copy, Debug)]
pub struct PackedRef<'a> {
    /// The page's words.
    pub words: &'a [u32],
    /// Lanes that hold a token, from lane 0.
    pub fill: u32,
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
    /// The transform of [`Turn::Hadamard`], which is its own inverse.
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
    queries: [[[f32; LANES]; K_COLS]; R],
    halves: [[[u32; LANES / 2]; K_COLS]; R],
}

impl<const R: usize> Default for Scratch<R> {
    #[inline(always)]
    fn default() -> Self {
        Scratch { queries: [[[0.0; LANES]; K_COLS]; R], halves: [[[0; LANES / 2]; K_COLS]; R] }
    }
}

/// Words of 16-bit queries: two channels each.
const QUERY_WORDS: usize = K_COLS * LANES / 2;

/// Rows of 32 words that rebuilt keys take: the stored channels, then those of the head.
pub const REBUILT: usize = 2 * MAX_DIM as usize;

/// Packed pages of a block, and what is read with them.
pub struct PackedPages<'a, W: Warp, const R: usize> {
    packed: &'a Packed,
    pages: &'a [PackedRef<'a>],
    next: Option<&'a [u32]>,
    query: Folded<'a, R>,
    scratch: &'a mut Scratch<R>,
    rebuilt: &'a mut [[f32; LANES]],
    /// `sum_t p_t min_t` of each group, lane = token.
    zero: [[W::F; R]; V_GROUPS],
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
fn rows(words: &[u32], first: u32, count: u32) -> &[[u32; LANES]] {
    words[first as usize..(first as usize + count as usize * LANES)].as_chunks().0
}

/// Positions of a page's tokens.
#[inline(always)]
fn positions<W: Warp>(w: W, page: &PackedRef<'_>) -> W::U {
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
                    filled(page.fill)
                } else {
                    sight.mask(w, positions(w, page), page.fill)
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

/// Scores by integer products.
struct IntegerScores<'a, 'b, W: Warp, const R: usize, const BITS: u32>(&'a mut PackedPages<'b, W, R>, usize);

impl<W: Warp, const R: usize, const BITS: u32> Routine<W> for IntegerScores<'_, '_, W, R, BITS> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.integer_scores::<BITS>(w, self.1)
    }
}

/// Scores by products of f32.
struct FloatScores<'a, 'b, W: Warp, const R: usize>(&'a mut PackedPages<'b, W, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for FloatScores<'_, '_, W, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.float_scores(w, self.1)
    }
}

/// Scores of keys that are rebuilt and turned.
struct RebuiltScores<'a, 'b, W: Warp, const R: usize>(&'a mut PackedPages<'b, W, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for RebuiltScores<'_, '_, W, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.rebuilt_scores(w, self.1)
    }
}

/// The weighted values of page `i`; `WIDTH` is that of [`PackedPages::weigh_values`] where it is known.
struct Weigh<'a, 'b, W: Warp, C, const R: usize, const WIDTH: usize> {
    pages: &'a mut PackedPages<'b, W, R>,
    code: C,
    i: usize,
    p: &'a [W::Slot; R],
    acc: &'a mut [[f32; LANES]],
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
    /// What is read after the keys of page `i`: those of the next, or the values of the first.
    #[inline(always)]
    fn ahead(&self, i: usize) -> &[[u32; LANES]] {
        let (keys, values) = (TAGS as usize, self.packed.v_scales() as usize);
        let next = match self.pages.get(i + 1) {
            Some(page) => &page.words[keys..values],
            None => &self.pages[0].words[values..],
        };
        next.as_chunks().0
    }

    #[inline(always)]
    fn float_scores(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, words) = (self.packed, self.pages[i].words);
        let (cols, code) = (packed.k_cols() as usize, Any(packed.k));
        let n = packed.k.per_word() as usize;
        for r in 0..R {
            for c in 0..cols {
                let mut x = w.load_f(&self.query.rows[r * cols + c]);
                if packed.k.scale() != Scale::None {
                    x = w.mul(x, w.from_bits(w.load(&rows(words, packed.k_scales(), cols as u32)[c])));
                }
                w.store(x, &mut self.scratch.queries[r][c]);
            }
        }
        w.sync();
        let mut s = [w.splat(0.0); R];
        for (s, start) in s.iter_mut().zip(&self.query.start) {
            *s = w.splat(*start);
        }
        let mut ahead = Ahead::new(self.ahead(i), packed.k_rows() as usize);
        for (at, row) in rows(words, packed.k_base(), packed.k_rows()).iter().enumerate() {
            ahead.step(w, 1);
            let word = w.load(row);
            for j in 0..n {
                let x = code.part(w, word, j);
                let c = at * n + j;
                for (s, query) in s.iter_mut().zip(&self.scratch.queries) {
                    *s = w.fma(x, w.splat(query.as_flattened()[c]), *s);
                }
            }
        }
        w.sync();
        s
    }

    #[inline(always)]
    fn integer_scores<const BITS: u32>(&mut self, w: W, i: usize) -> [W::F; R] {
        /// Below this the largest `q_c scale_c` counts as 0: its inverse could overflow.
        const TINY: f32 = f32::from_bits((127 - 100) << 23);
        const ROUND: f32 = 12_582_912.0;
        let (packed, words) = (self.packed, self.pages[i].words);
        let cols = packed.k_cols() as usize;
        let (mut top, mut base) = ([w.splat(0.0); R], [w.splat(0.0); R]);
        for (c, row) in rows(words, packed.k_scales(), cols as u32).iter().enumerate() {
            let word = w.load(row);
            let (scale, min) = (F16::channel(w, word, 0), F16::channel(w, word, 1));
            for r in 0..R {
                let q = w.load_f(&self.query.rows[r * cols + c]);
                let x = w.mul(q, scale);
                w.store(x, &mut self.scratch.queries[r][c]);
                top[r] = w.max(top[r], w.from_bits(w.and(w.bits(x), w.splat_u(0x7fff_ffff))));
                base[r] = w.fma(q, min, base[r]);
            }
        }
        let mut step = [w.splat(0.0); R];
        for r in 0..R {
            let top = w.reduce_max(top[r]);
            let mut inverse = 0.0;
            if top > TINY {
                inverse = 32767.0 / top;
                step[r] = w.splat(if top < f32::INFINITY { top / 32767.0 } else { f32::NAN });
            }
            base[r] = w.splat(w.reduce_sum(base[r]) + self.query.start[r]);
            for c in 0..cols {
                let x = w.mul(w.load_f(&self.scratch.queries[r][c]), w.splat(inverse));
                w.store_halves(w.bits(w.add(x, w.splat(ROUND))), &mut self.scratch.halves[r][c]);
            }
        }
        w.sync();
        let mut sum = [w.splat_u(0); R];
        let pairs = 16 / BITS as usize;
        let mask = w.splat_u(((1 << BITS) - 1) * 0x1_0001);
        let mut ahead = Ahead::new(self.ahead(i), packed.k_rows() as usize);
        for (at, row) in rows(words, packed.k_base(), packed.k_rows()).iter().enumerate() {
            ahead.step(w, 1);
            let mut word = w.load(row);
            // The mask, which changes nothing, spares a check of every index.
            let base = (at * pairs) & (QUERY_WORDS - pairs);
            for k in 0..pairs {
                let x = w.and(word, mask);
                for (sum, halves) in sum.iter_mut().zip(&self.scratch.halves) {
                    *sum = w.dot2(x, w.splat_u(halves.as_flattened()[base + k]), *sum);
                }
                word = w.shr::<BITS>(word);
            }
        }
        w.sync();
        let mut s = [w.splat(0.0); R];
        for r in 0..R {
            s[r] = w.fma(w.to_f(sum[r]), step[r], base[r]);
        }
        s
    }

    /// Stored channels, scales applied; the map taken back; the rotation.
    #[inline(always)]
    fn rebuilt_scores(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, page) = (self.packed, self.pages[i]);
        let Some((back, query)) = self.query.whole else { return [w.splat(0.0); R] };
        let (stored, whole) = self.rebuilt.split_at_mut(MAX_DIM as usize);
        let stored = &mut stored[..packed.k_dim as usize];
        let keys = rows(page.words, packed.k_base(), packed.k_rows());
        let n = packed.k.per_word() as usize;
        for (c, out) in stored.iter_mut().enumerate() {
            let word = w.load(&keys[c / n]);
            let part = packed.k.key_part((c % n) as u32) as usize;
            let x = Any(packed.k).part(w, word, part);
            let x = match packed.k.scale() {
                Scale::None => x,
                scale => {
                    let word = w.splat_u(page.words[packed.k_scales() as usize + c]);
                    match scale {
                        Scale::Float => w.mul(x, w.from_bits(word)),
                        _ => w.fma(x, F16::channel(w, word, 0), F16::channel(w, word, 1)),
                    }
                }
            };
            w.store(x, out);
        }
        let whole = &mut whole[..query.k_dim];
        let rows: &[[f32; LANES]] = match back {
            None => stored,
            Some(Back::Hadamard { block }) => {
                super::pack::turn(w, &Turn::Hadamard { block }, stored, whole);
                whole
            }
            Some(Back::Select { channels }) => {
                for out in whole.iter_mut() {
                    w.store(w.splat(0.0), out);
                }
                for (x, channel) in stored.iter().zip(channels) {
                    w.store(w.load_f(x), &mut whole[*channel as usize]);
                }
                whole
            }
            Some(Back::Dense { decode, bias }) => {
                for (c, (out, weights)) in whole.iter_mut().zip(decode.chunks_exact(stored.len())).enumerate()
                {
                    let mut sum = w.splat(0.0);
                    for (x, weight) in stored.iter().zip(weights) {
                        sum = w.fma(w.load_f(x), w.splat(*weight), sum);
                    }
                    if let Some(bias) = bias.get(c) {
                        sum = w.add(sum, w.splat(*bias));
                    }
                    w.store(sum, out);
                }
                whole
            }
        };
        let position = positions(w, &page);
        match &query.rotation {
            Some(rotation) => rope::scores::<W, F32, R>(
                w,
                rotation,
                bytemuck::cast_slice::<[f32; LANES], [u32; LANES]>(rows),
                &query,
                position,
            ),
            None => [w.splat(0.0); R],
        }
    }

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

/// Rows of words that will be read later, fetched evenly over a number of steps: a burst would fill the queue of misses and
/// stall the products.
struct Ahead<'a> {
    rows: core::slice::Iter<'a, [u32; LANES]>,
    each: usize,
    steps: usize,
    due: usize,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    fn new(rows: &'a [[u32; LANES]], steps: usize) -> Ahead<'a> {
        Ahead { rows: rows.iter(), each: rows.len(), steps, due: 0 }
    }

    /// `n` steps are done.
    #[inline(always)]
    fn step<W: Warp>(&mut self, w: W, n: usize) {
        self.due += n * self.each;
        while self.due >= self.steps {
            self.due -= self.steps;
            if let Some(row) = self.rows.next() {
                w.prefetch(row);
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
