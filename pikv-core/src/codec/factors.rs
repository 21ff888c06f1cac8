//! Attention over packed pages whose K or V is two factors ([`Side`]): few rows of channels, and what each token takes of them.
//!
//! *Basis.* A token's row is `mean + sum_k c_k basis_k`. A query meets the rows first, once a page: `q . basis_k` are what the
//! coefficients are multiplied with, and `q . mean` is what scores start from. Of values, the weighted coefficients are summed as
//! any packed values are, and make one row of the output with the basis; the mean counts as often as the page weighs.
//! *Means.* A token's row is that of its run, so the tokens of a run have one score and their weights are added before the mean is
//! weighed: to the softmax, a mean whose logit has the logarithm of its run's tokens added.
//!
//! Keys that are stored before their rotation are rebuilt channel by channel, and turned.

use super::packed::{K_COLS, Packed, Side};
use super::read::{Folded, PackedPages, PackedRef, Scratch, rows};
use super::scores::{stored_keys, turned_scores};
use crate::attend::{Form, Sight};
use crate::page::MAX_DIM;
use crate::warp::{LANES, Routine, Warp};

/// Rows in which coefficients of at most 31 channels are summed: four of a word of an 8-bit code.
const COEFFICIENT_ROWS: usize = 4;

/// Factored pages of a block, and what is read with them.
pub struct FactorPages<'a, W: Warp, const R: usize> {
    inner: PackedPages<'a, W, R>,
    /// Of each row, the query's channels by their part in a word: `[part][32 words]`.
    queries: [[W::Slot; K_COLS]; R],
}

impl<'a, W: Warp, const R: usize> FactorPages<'a, W, R> {
    /// As [`PackedPages::new`]. The rows of `query` are those of [`Packed::query_dim`] channels.
    #[inline(always)]
    pub fn new(
        w: W,
        packed: &'a Packed,
        pages: &'a [PackedRef<'a>],
        next: &'a [u32],
        query: Folded<'a, R>,
        scratch: &'a mut Scratch<R>,
        rebuilt: &'a mut [[f32; LANES]],
    ) -> Self {
        let mut queries = [[w.park(w.splat(0.0)); K_COLS]; R];
        if packed.k_side != Side::Tokens && query.whole.is_none() {
            let n = packed.k_table_code().per_word() as usize;
            let (dim, cols) = (packed.query_dim() as usize, packed.query_cols() as usize);
            for (r, slots) in queries.iter_mut().enumerate() {
                let row = query.rows[r * cols..(r + 1) * cols].as_flattened();
                for (i, slot) in slots.iter_mut().take(parked(dim, n) * n).enumerate() {
                    let (part, first) = (i / parked(dim, n), i % parked(dim, n) * LANES);
                    let mut lanes = [0.0; LANES];
                    for (lane, x) in lanes.iter_mut().enumerate() {
                        let c = (first + lane) * n + part;
                        *x = if c < dim { row[c] } else { 0.0 };
                    }
                    *slot = w.park(w.load_f(&lanes));
                }
            }
        }
        FactorPages { inner: PackedPages::new(w, packed, pages, next, query, scratch, rebuilt), queries }
    }

    /// Products of the queries with the slots of a page's table: lane `i` has those of slot `i % slots`.
    #[inline(always)]
    fn products(&self, w: W, i: usize) -> [W::F; R] {
        let packed = self.inner.packed;
        let (code, slots) = (packed.k_table_code(), packed.k_slots() as usize);
        let (n, together) = (code.per_word() as usize, LANES / slots);
        let groups = parked(packed.query_dim() as usize, n);
        let mut s = [w.splat(0.0); R];
        let table = rows(self.inner.pages[i].words, packed.k_table(), packed.k_table_rows());
        for (at, row) in table.iter().enumerate() {
            let word = w.load(row);
            let first = at * together;
            for part in 0..n {
                let x = code.part(w, word, part);
                for (s, query) in s.iter_mut().zip(&self.queries) {
                    let q = w.spread(&query[part * groups + first / LANES], first % LANES, slots);
                    *s = w.fma(x, q, *s);
                }
            }
        }
        for s in &mut s {
            let mut distance = LANES / 2;
            while distance >= slots {
                *s = w.add(*s, w.shfl_xor(*s, distance as u32));
                distance /= 2;
            }
        }
        s
    }

    #[inline(always)]
    fn factor_scores(&mut self, w: W, i: usize) -> [W::F; R] {
        if self.inner.query.whole.is_some() {
            return self.rebuilt_scores(w, i);
        }
        let mut products = self.products(w, i);
        let rank = self.inner.packed.k_dim as usize;
        let mut rows = [[0.0; LANES]; R];
        let mut start = self.inner.query.start;
        for r in 0..R {
            w.store(products[r], &mut rows[r]);
            if let Side::Means { level } = self.inner.packed.k_side {
                products[r] = w.gather(&rows[r], run_of(w, level));
            } else {
                start[r] += rows[r][rank];
                rows[r][rank..].fill(0.0);
            }
        }
        if let Side::Means { .. } = self.inner.packed.k_side {
            return products;
        }
        let PackedPages { packed, pages, next, .. } = self.inner;
        let query = Folded { rows: &rows, start, whole: None };
        PackedPages::new(w, packed, pages, next, query, &mut *self.inner.scratch, &mut []).scores(w, i)
    }

    /// Keys rebuilt from their factors, and turned.
    #[inline(always)]
    fn rebuilt_scores(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, page) = (self.inner.packed, self.inner.pages[i]);
        let Some((_, query)) = self.inner.query.whole else { return [w.splat(0.0); R] };
        let (stored, whole) = self.inner.rebuilt.split_at_mut(MAX_DIM as usize);
        let whole = &mut whole[..query.k_dim];
        let code = packed.k_table_code();
        if let Side::Means { level } = packed.k_side {
            let mut row = [0.0; LANES];
            for (c, out) in (0..).zip(whole.iter_mut()) {
                let (word, part) = packed.k_table_at(0, c);
                let words: &[u32] = &page.words[word as usize..(word + packed.k_slots()) as usize];
                w.store(code.part(w, w.load_part(words), part as usize), &mut row);
                w.store(w.gather(&row, run_of(w, level)), out);
            }
        } else {
            let stored = &mut stored[..packed.k_dim as usize];
            stored_keys(w, packed, page.words, stored);
            let basis = |k: usize, c: u32| {
                let (word, part) = packed.k_table_at(k as u32, c);
                code.decode(page.words[word as usize] >> (part * code.bits()))
            };
            for (c, out) in (0..).zip(whole.iter_mut()) {
                let mut sum = w.splat(0.0);
                for (k, x) in stored.iter().enumerate() {
                    sum = w.fma(w.load_f(x), w.splat(basis(k, c)), sum);
                }
                w.store(w.add(sum, w.splat(basis(stored.len(), c))), out);
            }
        }
        turned_scores(w, &page, whole, &query)
    }

    #[inline(always)]
    fn weigh_factors(&mut self, w: W, i: usize, p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let PackedPages { packed, pages, next, .. } = self.inner;
        let mut weights = *p;
        if let Side::Means { level } = packed.v_side {
            for weights in &mut weights {
                let mut sum = w.unpark(weights);
                for l in 0..level {
                    sum = w.add(sum, w.shfl_xor(sum, 1 << l));
                }
                let mut row = [0.0; LANES];
                w.store(sum, &mut row);
                *weights = w.park(w.gather(&row, first_of(w, level)));
            }
        } else {
            let mut sums = [[[0.0; LANES]; COEFFICIENT_ROWS]; R];
            let stored = packed.stored_acc_rows() as usize;
            let sums = &mut sums.as_flattened_mut()[..R * stored];
            let query = Folded { rows: &[], start: [0.0; R], whole: None };
            let scratch = &mut *self.inner.scratch;
            let mut inner = PackedPages::new(w, packed, pages, next, query, scratch, &mut []);
            inner.weigh(w, i, &[0; R], p, sums);
            inner.finish(w, sums);
            for (weights, sums) in weights.iter_mut().zip(sums.chunks_exact(stored)) {
                let mut row = [0.0; LANES];
                for (c, x) in (0..packed.v_dim).zip(&mut row) {
                    let (at, lane) = packed.stored_acc_place(c);
                    *x = sums[at as usize][lane as usize];
                }
                row[packed.v_dim as usize] = w.reduce_sum(w.unpark(weights));
                *weights = w.park(w.load_f(&row));
            }
        }
        self.weigh_table(w, i, &weights, acc);
    }

    /// Adds the rows of a page's table, times their weights.
    #[inline(always)]
    fn weigh_table(&self, w: W, i: usize, weights: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let packed = self.inner.packed;
        let out = packed.v_out();
        let table = &self.inner.pages[i].words[packed.v_table() as usize..];
        let (stride, width, parts) =
            (out.v_stride() as usize, out.v_words() as usize, out.v_parts() as usize);
        let acc_rows = packed.acc_rows() as usize;
        let count = packed.v_table_rows() as usize;
        for col in 0..out.v_cols() as usize {
            for part in 0..parts {
                let acc = &mut acc[col * parts + part..];
                let mut a = [w.splat(0.0); R];
                for r in 0..R {
                    a[r] = w.load_f(&acc[r * acc_rows]);
                }
                for t in (0..count).step_by(LANES / width) {
                    let row = if width < LANES {
                        &table[t * stride..][..LANES]
                    } else {
                        &table[t * stride + col * LANES..(t + 1) * stride]
                    };
                    let word = match row.first_chunk() {
                        Some(words) => w.load(words),
                        None => w.load_part(row),
                    };
                    let x = out.v.part(w, word, part);
                    for r in 0..R {
                        a[r] = w.fma(x, w.spread(&weights[r], t, width), a[r]);
                    }
                }
                for r in 0..R {
                    w.store(a[r], &mut acc[r * acc_rows]);
                }
            }
        }
    }
}

/// Groups of 32 words that a row of `dim` channels takes, `n` to a word.
#[inline(always)]
const fn parked(dim: usize, n: usize) -> usize {
    dim.div_ceil(n).div_ceil(LANES)
}

/// The run of each lane's token.
#[inline(always)]
fn run_of<W: Warp>(w: W, level: u32) -> W::U {
    match level {
        1 => w.shr::<1>(w.lane_id()),
        2 => w.shr::<2>(w.lane_id()),
        _ => w.shr::<3>(w.lane_id()),
    }
}

/// The first token of each lane's run, for as many lanes as there are runs.
#[inline(always)]
fn first_of<W: Warp>(w: W, level: u32) -> W::U {
    let first = match level {
        1 => w.shl::<1>(w.lane_id()),
        2 => w.shl::<2>(w.lane_id()),
        _ => w.shl::<3>(w.lane_id()),
    };
    w.and(first, w.splat_u(LANES as u32 - 1))
}

/// Scores of page `.1`.
struct FactorScores<'a, 'b, W: Warp, const R: usize>(&'a mut FactorPages<'b, W, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for FactorScores<'_, '_, W, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.factor_scores(w, self.1)
    }
}

/// The weighted values of page `i`.
struct WeighFactors<'a, 'b, W: Warp, const R: usize> {
    pages: &'a mut FactorPages<'b, W, R>,
    i: usize,
    p: &'a [W::Slot; R],
    acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, const R: usize> Routine<W> for WeighFactors<'_, '_, W, R> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        self.pages.weigh_factors(w, self.i, self.p, self.acc);
    }
}

impl<W: Warp, const R: usize> Form<W, R> for FactorPages<'_, W, R> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.inner.pages()
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.inner.acc_rows()
    }

    #[inline(always)]
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R] {
        self.inner.seen(w, i, sight)
    }

    #[inline(always)]
    fn scores(&mut self, w: W, i: usize) -> [W::F; R] {
        match self.inner.packed.k_side {
            Side::Tokens => self.inner.scores(w, i),
            _ => w.call(FactorScores(self, i)),
        }
    }

    #[inline(always)]
    fn weigh(&mut self, w: W, i: usize, seen: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        match self.inner.packed.v_side {
            Side::Tokens => self.inner.weigh(w, i, seen, p, acc),
            _ => w.call(WeighFactors { pages: self, i, p, acc }),
        }
    }

    /// Where there is a table, joins the rows that the lanes read at once.
    #[inline(always)]
    fn finish(&mut self, w: W, acc: &mut [[f32; LANES]]) {
        if self.inner.packed.v_side == Side::Tokens {
            return self.inner.finish(w, acc);
        }
        let width = self.inner.packed.v_out().v_words();
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
