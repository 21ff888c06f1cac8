//! Attention over packed pages whose K or V is two factors ([`Side`]): a table of few rows of channels, and each token's share of them.
//!
//! *Basis.* A token's row is `mean + sum_k c_k basis_k`. Once per page, a query is multiplied with the rows: `q . basis_k` are
//! the factors of the coefficients, and scores start from `q . mean`. Weighted coefficients of values are summed like other packed
//! values, and then multiplied with the basis to one row of the output; the mean is weighted by the page's whole weight.
//! *Means.* A token's row is the mean of its run, so the tokens of a run have one score, and their weights are added before the mean
//! is weighted. In the softmax this is a mean whose logit is raised by the logarithm of its run's length.
//!
//! Keys that are stored before their rotation are rebuilt channel by channel, and rotated.

use super::packed::{K_COLS, Packed, Side};
use super::read::scores::{stored_keys, turned_scores};
use super::read::{Folded, PackedPages, PackedRef, Scratch, rows};
use crate::attend::{Form, Sight, filled};
use crate::page::MAX_DIM;
use crate::warp::{LANES, Routine, Warp};

/// Rows in which coefficients of at most 31 channels are summed: one for each of the four codes in a word of an 8-bit code.
const COEFFICIENT_ROWS: usize = 4;

/// Working memory of reads of factored pages.
#[derive(Clone, Debug)]
#[repr(align(128))]
pub struct FactorScratch<const R: usize> {
    inner: Scratch<R>,
    /// Channels of each row's query, by their part in a word: `[part][32 words]`.
    queries: [[[f32; LANES]; K_COLS]; R],
    /// Products of the queries with the slots of a page's table, then weights of its rows.
    rows: [[f32; LANES]; R],
    /// Weighted coefficients.
    sums: [[[f32; LANES]; COEFFICIENT_ROWS]; R],
}

impl<const R: usize> Default for FactorScratch<R> {
    #[inline(always)]
    fn default() -> Self {
        FactorScratch {
            inner: Scratch::default(),
            queries: [[[0.0; LANES]; K_COLS]; R],
            rows: [[0.0; LANES]; R],
            sums: [[[0.0; LANES]; COEFFICIENT_ROWS]; R],
        }
    }
}

/// Factored pages of a block, and the working memory to read them.
pub struct FactorPages<'a, const R: usize> {
    inner: PackedPages<'a, R>,
    queries: &'a mut [[[f32; LANES]; K_COLS]; R],
    rows: &'a mut [[f32; LANES]; R],
    sums: &'a mut [[[f32; LANES]; COEFFICIENT_ROWS]; R],
}

impl<'a, const R: usize> FactorPages<'a, R> {
    /// Like [`PackedPages::new`]. The rows of `query` have [`Packed::query_dim`] channels.
    #[inline(always)]
    pub fn new(
        packed: &'a Packed,
        pages: &'a [PackedRef<'a>],
        next: &'a [u32],
        query: Folded<'a, R>,
        scratch: &'a mut FactorScratch<R>,
        rebuilt: &'a mut [[f32; LANES]],
    ) -> Self {
        let FactorScratch { inner, queries, rows, sums } = scratch;
        FactorPages {
            inner: PackedPages::new(packed, pages, next, query, inner, rebuilt),
            queries,
            rows,
            sums,
        }
    }

    /// Stores the queries in the order in which the words of a table are read.
    #[inline(always)]
    fn lay_queries<W: Warp>(&mut self, w: W) {
        let PackedPages { packed, query, .. } = self.inner;
        if packed.k_side == Side::Tokens || query.whole.is_some() {
            return;
        }
        let n = packed.k_table_code().per_word() as usize;
        let (dim, cols) = (packed.query_dim() as usize, packed.query_cols() as usize);
        for (r, rows) in self.queries.iter_mut().enumerate() {
            let row = query.rows[r * cols..(r + 1) * cols].as_flattened();
            for (i, to) in rows.iter_mut().take(parked(dim, n) * n).enumerate() {
                let (part, first) = (i / parked(dim, n), i % parked(dim, n) * LANES);
                let lane = if n == 1 { w.lane_id() } else { w.shl::<1>(w.lane_id()) };
                let channel = w.add_u(lane, w.splat_u((first * n + part) as u32));
                let inside = w.ge_i(w.splat_u(dim as u32 - 1), channel);
                let at = w.bits(w.select(inside, w.from_bits(channel), w.splat(0.0)));
                w.store(w.select(inside, w.gather(row, at), w.splat(0.0)), to);
            }
        }
        w.sync();
    }

    /// Products of the queries with the slots of a page's table: lane `i` has those of slot `i % slots`.
    #[inline(always)]
    fn products<W: Warp>(&self, w: W, i: usize) -> [W::F; R] {
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
                let x = code.plain_part(w, word, part);
                for (s, query) in s.iter_mut().zip(self.queries.iter()) {
                    let q = w.spread_row(&query[part * groups + first / LANES], first % LANES, slots);
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
    fn factor_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        let PackedPages { packed, pages, next, query, .. } = self.inner;
        let mut folded = Folded { whole: None, ..query };
        if packed.k_side != Side::Tokens {
            let mut products = self.products(w, i);
            if let Side::Means { level } = packed.k_side {
                for (row, products) in self.rows.iter_mut().zip(&products) {
                    w.store(*products, row);
                }
                w.sync();
                for (row, products) in self.rows.iter().zip(&mut products) {
                    *products = w.gather(row, run_of(w, level));
                }
                w.sync();
                return products;
            }
            let coefficients = w.mask(filled(packed.k_dim));
            for (r, row) in self.rows.iter_mut().enumerate() {
                folded.start[r] += w.lane(products[r], packed.k_dim as usize);
                w.store(w.select(coefficients, products[r], w.splat(0.0)), row);
            }
            folded.rows = &self.rows[..];
        }
        // One call for single tokens and coefficients: its body is large.
        PackedPages::new(packed, pages, next, folded, &mut *self.inner.scratch, &mut []).folded_scores(w, i)
    }

    /// Scores of keys rebuilt from their factors, and rotated.
    #[inline(always)]
    fn rebuilt_scores<W: Warp>(&mut self, w: W, i: usize) -> [W::F; R] {
        let (packed, page) = (self.inner.packed, self.inner.pages[i]);
        let Some((_, query)) = self.inner.query.whole else { return [w.splat(0.0); R] };
        let keys: &[[f32; LANES]] = match packed.k_side {
            Side::Tokens => self.inner.rebuilt_keys(w, i),
            side => {
                let (stored, whole) = self.inner.rebuilt.split_at_mut(MAX_DIM as usize);
                let whole = &mut whole[..query.k_dim];
                match side {
                    Side::Means { level } => mean_keys(w, packed, page.words, level, whole),
                    _ => basis_keys(w, packed, page.words, &mut stored[..packed.k_dim as usize], whole),
                }
                whole
            }
        };
        turned_scores(w, &page, keys, &query)
    }

    #[inline(always)]
    fn weigh_factors<W: Warp>(&mut self, w: W, i: usize, p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let packed = self.inner.packed;
        let mut weights = *p;
        if let Side::Means { level } = packed.v_side {
            for (row, weights) in self.rows.iter_mut().zip(&weights) {
                let mut sum = w.unpark(weights);
                for l in 0..level {
                    sum = w.add(sum, w.shfl_xor(sum, 1 << l));
                }
                w.store(sum, row);
            }
            w.sync();
            for (row, weights) in self.rows.iter().zip(&mut weights) {
                *weights = w.park(w.gather(row, first_of(w, level)));
            }
        } else {
            let (stored, stride) = (packed.stored_acc_rows() as usize, packed.v_stride() as usize);
            let single = packed.v_side == Side::Tokens;
            let sums = &mut self.sums.as_flattened_mut()[..if single { 0 } else { R * stored }];
            for row in sums.iter_mut() {
                w.store(w.splat(0.0), row);
            }
            if !single {
                self.inner.begin(w);
            }
            // One call, as in `scores`.
            self.inner.weigh(w, i, &[0; R], p, if single { acc } else { sums });
            if single {
                return;
            }
            Form::<W, R>::finish(&mut self.inner, w, sums);
            for row in self.rows.iter_mut() {
                w.store(w.splat(0.0), row);
            }
            w.sync();
            for (row, sums) in self.rows.iter_mut().zip(sums.chunks_exact(stored)) {
                for (part, sum) in sums.iter().enumerate() {
                    let end = (packed.v_dim as usize).min((part + 1) * stride);
                    w.scatter(w.load_f(sum), &mut row[..end], part * stride, 1);
                }
            }
            w.sync();
            for (row, weights) in self.rows.iter().zip(&mut weights) {
                let all = w.splat(w.reduce_sum(w.unpark(weights)));
                *weights = w.park(w.select(w.mask(1 << packed.v_dim), all, w.load_f(row)));
            }
        }
        w.sync();
        self.weigh_table(w, i, &weights, acc);
    }

    /// Adds the rows of a page's table, times their weights.
    #[inline(always)]
    fn weigh_table<W: Warp>(&self, w: W, i: usize, weights: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
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
                    let x = out.v.plain_part(w, word, part);
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

/// Channel rows of keys that are means of runs of `2^level` tokens.
#[inline(always)]
fn mean_keys<W: Warp>(w: W, packed: &Packed, words: &[u32], level: u32, out: &mut [[f32; LANES]]) {
    for (c, out) in (0..).zip(out) {
        let (word, part) = packed.k_table_at(0, c);
        let means = &words[word as usize..(word + packed.k_slots()) as usize];
        let word = w.bits(w.gather(bytemuck::cast_slice(means), run_of(w, level)));
        w.store(packed.k_table_code().plain_part(w, word, part as usize), out);
    }
}

/// Channel rows of keys in a basis that their page stores; `stored` gets their coefficients.
#[inline(always)]
fn basis_keys<W: Warp>(
    w: W,
    packed: &Packed,
    words: &[u32],
    stored: &mut [[f32; LANES]],
    out: &mut [[f32; LANES]],
) {
    stored_keys(w, packed, words, stored);
    let basis = |k: usize, c: u32| {
        let (word, part) = packed.k_table_at(k as u32, c);
        packed.k_table_code().plain_part(w, w.splat_u(words[word as usize]), part as usize)
    };
    for (c, out) in (0..).zip(out) {
        let mut sum = w.splat(0.0);
        for (k, x) in stored.iter().enumerate() {
            sum = w.fma(w.load_f(x), basis(k, c), sum);
        }
        w.store(w.add(sum, basis(stored.len(), c)), out);
    }
}

/// Groups of 32 words in a row of `dim` channels, `n` to a word.
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
struct FactorScores<'a, 'b, const R: usize>(&'a mut FactorPages<'b, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for FactorScores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.factor_scores(w, self.1)
    }
}

/// Scores of page `.1`, whose keys are rebuilt and rotated.
struct TurnedScores<'a, 'b, const R: usize>(&'a mut FactorPages<'b, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for TurnedScores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        self.0.rebuilt_scores(w, self.1)
    }
}

/// The weighted values of page `i`.
struct WeighFactors<'a, 'b, W: Warp, const R: usize> {
    pages: &'a mut FactorPages<'b, R>,
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

impl<W: Warp, const R: usize> Form<W, R> for FactorPages<'_, R> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.inner.pages.len()
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.inner.packed.acc_rows() as usize
    }

    #[inline(always)]
    fn begin(&mut self, w: W) {
        self.inner.begin(w);
        self.lay_queries(w);
    }

    #[inline(always)]
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R] {
        self.inner.seen(w, i, sight)
    }

    #[inline(always)]
    fn scores(&mut self, w: W, i: usize) -> [W::F; R] {
        match self.inner.query.whole {
            None => w.call(FactorScores(self, i)),
            Some(_) => w.call(TurnedScores(self, i)),
        }
    }

    #[inline(always)]
    fn weigh(&mut self, w: W, i: usize, _: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        w.call(WeighFactors { pages: self, i, p, acc });
    }

    /// If there is a table, joins the rows that the lanes read at once.
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
