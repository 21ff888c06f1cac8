//! Scores of a packed page.

use super::{
    Ahead, Back, INTEGERS, PackedPages, PackedRef, ROWS, TINY, add_plane, next_quad, positions, rows,
};
use crate::codec::code::{Code, Scale, field};
use crate::codec::pack::{Turn, turn};
use crate::codec::packed::{Packed, TAGS};
use crate::dtype::{Element, F16};
use crate::page::{MAX_DIM, PAGE};
use crate::turned::{self, Query};
use crate::warp::{LANES, Routine, Warp, shifted_left};

/// Time to fold the scales of 32 channels, in products of a word.
const FOLD: usize = 2;

/// Scores by integer products.
pub(super) struct IntegerScores<'a, 'b, const R: usize>(pub &'a mut PackedPages<'b, R>, pub usize);

impl<W: Warp, const R: usize> Routine<W> for IntegerScores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.integer_scores(w, self.1)
    }
}

/// Scores by products of f32.
pub(super) struct FloatScores<'a, 'b, const R: usize>(pub &'a mut PackedPages<'b, R>, pub usize);

impl<W: Warp, const R: usize> Routine<W> for FloatScores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.float_scores(w, self.1)
    }
}

/// Scores of keys that are rebuilt and rotated.
pub(super) struct RebuiltScores<'a, 'b, const R: usize>(pub &'a mut PackedPages<'b, R>, pub usize);

impl<W: Warp, const R: usize> Routine<W> for RebuiltScores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.rebuilt_scores(w, self.1)
    }
}

impl<'a, const R: usize> PackedPages<'a, R> {
    /// Words read after the keys of page `i`: the keys of the next page, or the values of the first.
    #[inline(always)]
    pub(super) fn ahead<W: Warp>(&self, i: usize) -> &'a [[u32; LANES]] {
        if !W::FETCHES {
            return &[];
        }
        let (keys, values) = (TAGS as usize, self.v_scales as usize);
        let next = match self.pages.get(i + 1) {
            Some(page) => &page.words[keys..values],
            None => &self.pages[0].words[values..],
        };
        next.as_chunks().0
    }

    #[inline(always)]
    fn float_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, words) = (self.packed, self.pages[i].words);
        let cols = packed.k_cols() as usize;
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
        let mut ahead = Ahead::new(self.ahead::<W>(i), packed.k_rows() as usize);
        for (at, row) in rows(words, packed.k_base(), packed.k_rows()).iter().enumerate() {
            ahead.step(w, 1);
            let word = w.load(row);
            for j in 0..n {
                let x = packed.k.float_part(w, word, j);
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
    fn integer_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, words) = (self.packed, self.pages[i].words);
        let cols = packed.k_cols() as usize;
        let quads = cols * (LANES / 4) * packed.k.bits().count_ones() as usize;
        let mut ahead = Ahead::new(self.ahead::<W>(i), (FOLD + R) * cols + quads);
        let (mut top, mut base) = ([w.splat(0.0); R], [w.splat(0.0); R]);
        for (c, row) in rows(words, packed.k_scales(), cols as u32).iter().enumerate() {
            ahead.step(w, FOLD);
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
                inverse = INTEGERS / top;
                step[r] = w.splat(if top < f32::INFINITY { top / INTEGERS } else { f32::NAN });
            }
            base[r] = w.splat(w.reduce_sum(base[r]) + self.query.start[r]);
            ahead.step(w, cols);
            for c in 0..cols {
                let x = w.load_f(&self.scratch.queries[r][c]);
                w.store_quads(x, w.splat(inverse), &mut self.scratch.quads[r][c]);
            }
        }
        w.sync();
        // As with values, on a CPU each width of one-plane codes has a loop compiled for it.
        let sum = match packed.k.bits() {
            8 if W::FETCHES => self.plane_scores::<W, 8>(w, words, &mut ahead),
            4 if W::FETCHES => self.plane_scores::<W, 4>(w, words, &mut ahead),
            2 if W::FETCHES => self.plane_scores::<W, 2>(w, words, &mut ahead),
            _ => self.planes_scores(w, words, &mut ahead),
        };
        w.sync();
        let mut s = [w.splat(0.0); R];
        for r in 0..R {
            s[r] = w.fma(w.to_f(sum[r]), step[r], base[r]);
        }
        s
    }

    /// Products of the queries' integers with a page's codes of one plane of `BITS` bits.
    #[inline(always)]
    fn plane_scores<W: Warp, const BITS: u32>(
        &self,
        w: W,
        words: &[u32],
        ahead: &mut Ahead<'_>,
    ) -> [W::U; R] {
        let mut sum = [w.splat_u(0); R];
        let words = rows(words, self.packed.k_base(), self.packed.k_rows());
        add_plane(w, &self.row_products::<W, BITS>(w, words, ahead), 0, &mut sum);
        sum
    }

    /// [`Self::plane_scores`] for codes of several planes, plane by plane.
    #[inline(always)]
    fn planes_scores<W: Warp>(&self, w: W, words: &[u32], ahead: &mut Ahead<'_>) -> [W::U; R] {
        let packed = self.packed;
        let (mut sum, mut shift, mut first) = ([w.splat_u(0); R], 0, packed.k_base());
        while let Some(bits) = packed.k.plane(shift) {
            let words = rows(words, first, packed.k_plane_words(bits));
            let plane = match bits {
                8 => self.row_products::<W, 8>(w, words, ahead),
                4 => self.row_products::<W, 4>(w, words, ahead),
                2 => self.row_products::<W, 2>(w, words, ahead),
                _ => self.row_products::<W, 1>(w, words, ahead),
            };
            add_plane(w, &plane, shift, &mut sum);
            first += words.len() as u32 * PAGE;
            shift += bits;
        }
        sum
    }

    /// Products of the queries' integers with the codes of a plane of `BITS` bits.
    #[inline(always)]
    fn row_products<W: Warp, const BITS: u32>(
        &self,
        w: W,
        words: &[[u32; LANES]],
        ahead: &mut Ahead<'_>,
    ) -> [W::Sum; R] {
        let mut sum = [w.no_sum(); R];
        let quads = 8 / BITS as usize;
        for (at, row) in words.iter().enumerate() {
            ahead.step(w, quads);
            let mut word = w.load(row);
            for k in 0..quads {
                let quad = at * quads + k;
                let x = next_quad::<W, BITS>(w, &mut word);
                for (sum, row) in sum.iter_mut().zip(&self.scratch.quads) {
                    // The remainder, which changes nothing, spares a check of the index.
                    *sum = w.dot4(x, &row[quad / 8 % ROWS], quad % 8, *sum);
                }
            }
        }
        sum
    }

    /// Scores of keys rebuilt and rotated.
    #[inline(always)]
    fn rebuilt_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        let Some((_, query)) = self.query.whole else { return [w.splat(0.0); R] };
        let page = self.pages[i];
        turned_scores(w, &page, self.rebuilt_keys(w, i), &query)
    }

    /// Rebuilds keys: stored channels with scales applied, then the inverse of the map.
    #[inline(always)]
    pub(in crate::codec) fn rebuilt_keys<W: Warp>(&mut self, w: W, i: usize) -> &[[f32; LANES]] {
        let (packed, page) = (self.packed, self.pages[i]);
        let Some((back, query)) = self.query.whole else { return &[] };
        let (stored, whole) = self.rebuilt.split_at_mut(MAX_DIM as usize);
        let stored = &mut stored[..packed.k_dim as usize];
        stored_keys(w, packed, page.words, stored);
        let whole = &mut whole[..query.k_dim];
        match back {
            None => stored,
            Some(Back::Hadamard { block }) => {
                turn(w, &Turn::Hadamard { block }, stored, whole);
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
        }
    }
}

/// Stored channels of a page's keys, scales applied, one row each.
#[inline(always)]
pub(in crate::codec) fn stored_keys<W: Warp>(
    w: W,
    packed: &Packed,
    words: &[u32],
    stored: &mut [[f32; LANES]],
) {
    let keys = rows(words, packed.k_base(), packed.k_rows());
    let n = packed.k.per_word() as usize;
    for (c, out) in stored.iter_mut().enumerate() {
        let x = match packed.k {
            Code::Int2 | Code::Int3 | Code::Int5 | Code::Int6 => plane_key(w, packed, keys, c as u32),
            code => {
                let bits = code.bits();
                let part = code.place((c % n) as u32, bits) / bits;
                code.part(w, w.load(&keys[c / n]), part as usize)
            }
        };
        let x = match packed.k.scale() {
            Scale::None => x,
            Scale::Block => {
                let [first, second] =
                    [0, TAGS].map(|lane| w.from_bits(w.splat_u(packed.k_scale(words, lane, c as u32))));
                w.mul(x, w.select(w.mask(0xffff), first, second))
            }
            scale => {
                let word = w.splat_u(words[packed.k_scales() as usize + c]);
                match scale {
                    Scale::Float => w.mul(x, w.from_bits(word)),
                    _ => w.fma(x, F16::channel(w, word, 0), F16::channel(w, word, 1)),
                }
            }
        };
        w.store(x, out);
    }
}

/// Codes of channel `c` of keys, from all planes.
#[inline(always)]
fn plane_key<W: Warp>(w: W, packed: &Packed, keys: &[[u32; LANES]], c: u32) -> W::F {
    let (mut code, mut shift, mut first) = (w.splat_u(0), 0, 0);
    while let Some(bits) = packed.k.plane(shift) {
        let n = LANES as u32 >> bits.trailing_zeros();
        let word = w.load(&keys[(first + c / n) as usize]);
        let x = field(w, word, packed.k.place(c % n, bits), bits);
        code = w.or(code, shifted_left(w, x, shift));
        first += packed.k_plane_words(bits);
        shift += bits;
    }
    w.to_f(code)
}

/// Scores of rebuilt keys, rotated to their positions.
#[inline(always)]
pub(in crate::codec) fn turned_scores<W: Warp, const R: usize>(
    w: W,
    page: &PackedRef<'_>,
    keys: &[[f32; LANES]],
    query: &Query<'_, R>,
) -> [W::F; R] {
    let position = positions(w, page);
    match &query.rotation {
        Some(rotation) => turned::scores(w, rotation, keys, query, position),
        None => [w.splat(0.0); R],
    }
}
