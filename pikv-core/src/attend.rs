//! Attention over one block of pages: the leaf of the canonical reduction.
//!
//! A *block* is [`BLOCK`] pages (256 tokens) of a page list. Its partial result for a query row is `(m, l, acc)`:
//! an integer exponent `m` not below any score, the sum `l` of `p = 2^(score - m)`, and `acc = sum p v`. Within a
//! block
//!
//! * a score is one chain of fused multiply-adds over the channels, in order, scaled to base 2;
//! * `l` is summed lane by lane over the pages, then by a butterfly;
//! * `acc` is one chain of fused multiply-adds over the tokens, in the order of the pages and lanes.
//!
//! ```text
//!                 page 0            page 1              page 7
//! row 0     | 32 lanes        | 32 lanes        | .. 32 lanes        |  a lane is a token; its score and then
//! row 1     | score, then p   |                 |                    |  its p stay on the shelf
//! ..R rows  |                 |                 |                    |
//!
//! for each page i, for each row r:                            first pass: scores
//!     s[r][i][lane] = q[r] . k[i][lane], capped, -inf where the row does not see the token
//! m[r] = ceil(max over i and lanes of s[r])                   an integer, so rescales are exact
//! for each page i, for each row r:                            second pass: weights
//!     p[r][i][lane] = 2^(s[r][i][lane] - m[r])
//!     l[r][lane]   += p[r][i][lane]
//! l[r] = butterfly sum of l[r][lane]
//! for each page i, for each lane in order, for each row r that sees the token:
//!     acc[r] = fma(p[r][i][lane], v[i][lane], acc[r])
//!
//! join((m, l, acc), (m', l', acc')):                          the tree over blocks, left before right
//!     n = max(m, m')
//!     (n, l 2^(m - n) + l' 2^(m' - n), acc 2^(m - n) + acc' 2^(m' - n))
//!
//! b0  b1   b2  b3   b4                                        e.g. of five blocks: a block without a partner goes up alone
//! b0 + b1  b2 + b3  b4
//! (b0 + b1) + (b2 + b3)  b4
//! ((b0 + b1) + (b2 + b3)) + b4
//! ```
//!
//! Tokens that a row does not see are skipped, not multiplied by 0, so the contents of their lanes (NaN included) have no
//! effect. As `m` is an integer, every later rescale is exact; [`crate::merge`] joins blocks by a fixed tree.
//!
//! A [`Form`] reads the pages: [`crate::full`] pages of single tokens, [`crate::codec::read`] packed ones.

pub use crate::warp::BLOCK;

use crate::math;
use crate::merge::Partial;
use crate::warp::{LANES, Shelf, Warp};
use core::borrow::Borrow;

/// Positions that a query row sees: those from `floor` to `hi` that are at least `lo` or below `sinks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// First position of the store that is read (tokens below it are read elsewhere).
    pub floor: u32,
    /// First position inside the sliding window.
    pub lo: u32,
    /// Positions below this stay visible outside the window.
    pub sinks: u32,
    /// Last visible position, the row's own for a causal row. Below `floor` nothing is seen.
    pub hi: i32,
}

impl Sight {
    /// A row that sees nothing.
    pub const NONE: Sight = Sight { floor: 0, lo: 0, sinks: 0, hi: -1 };

    /// Bit `i` is set if the token at lane `i` is seen; `live` are the lanes of the page that are read.
    #[inline(always)]
    pub fn mask<W: Warp>(&self, w: W, position: W::U, live: u32) -> u32 {
        let from =
            w.and_m(w.ge_i(position, w.splat_u(self.floor)), w.ge_i(w.splat_u(self.hi as u32), position));
        let window = w.or_m(
            w.ge_i(position, w.splat_u(self.lo)),
            w.ge_i(w.splat_u(self.sinks.wrapping_sub(1)), position),
        );
        w.ballot(w.and_m(from, window)) & live
    }
}

/// The lowest `fill` bits.
#[inline(always)]
pub const fn filled(fill: u32) -> u32 {
    if fill >= LANES as u32 { u32::MAX } else { (1 << fill) - 1 }
}

/// A page format: reads the pages of a block for `R` query rows.
pub trait Form<W: Warp, const R: usize> {
    /// Pages of the block, at most [`BLOCK`].
    fn pages(&self) -> usize;
    /// Rows of lanes for one query row's output.
    fn acc_rows(&self) -> usize;
    /// Called before the first page is read: prepares working memory.
    #[inline(always)]
    fn begin(&mut self, w: W) {
        let _ = w;
    }
    /// Tokens of page `i` that each row sees: bit `t` for the token at lane `t`.
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R];
    /// Whether the lanes have registers for the scores of two pages at once.
    const PAIRS: bool = false;
    /// Scores in base 2 of page `i`'s 32 tokens; those of tokens not seen have any value.
    fn scores(&mut self, w: W, i: usize) -> [W::F; R];
    /// Whether the lanes read the keys of two pages in one pass also if a row sees only one of them, where [`Form::twos`] allows it.
    const TWOS: bool = false;
    /// Whether these pages can be read two by two.
    #[inline(always)]
    fn twos(&self) -> bool {
        false
    }
    /// Scores of pages `i` and `i + 1`. With [`Form::TWOS`] there may be no page `i + 1`: its scores then have any value.
    #[inline(always)]
    fn pair(&mut self, w: W, i: usize) -> [[W::F; R]; 2] {
        [self.scores(w, i), self.scores(w, i + 1)]
    }
    /// Adds `p v` of page `i` to the sums: `acc` is `[R][acc_rows]`. `p` is 0 for tokens not seen.
    fn weigh(&mut self, w: W, i: usize, seen: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]);
    /// Called after the last page: completes the sums.
    fn finish(&mut self, w: W, acc: &mut [[f32; LANES]]);
}

/// Visibility and cap of the rows of a block, for any page format.
#[derive(Clone, Copy, Debug)]
pub struct Looks<const R: usize> {
    /// Positions that each row sees.
    pub sight: [Sight; R],
    /// Logits are capped as `cap * tanh(x / cap)`: the cap in base 2. Queries are then scaled to `x / cap`.
    pub softcap: Option<f32>,
}

/// Whether a row sees a token. (Comparing arrays would call memcmp on a device.)
#[inline(always)]
fn any<const R: usize>(seen: &[u32; R]) -> bool {
    let mut bits = 0;
    for row in seen {
        bits |= row;
    }
    bits != 0
}

/// Highest scores of a block, row by row.
struct Tops<W: Warp, const R: usize> {
    /// Highest score of each lane.
    top: [W::F; R],
    /// Lanes with a token seen in any page.
    saw: [u32; R],
}

impl<W: Warp, const R: usize> Tops<W, R> {
    /// Takes the scores of page `i`: caps and masks them, adds them to the maxima, and stores them in the shelf, the block's scores.
    #[inline(always)]
    fn take(
        &mut self,
        w: W,
        looks: &Looks<R>,
        seen: &[u32; R],
        mut s: [W::F; R],
        shelf: &mut W::Shelf<R>,
        i: usize,
    ) {
        let none = w.splat(f32::NEG_INFINITY);
        for r in 0..R {
            if let Some(cap) = looks.softcap {
                s[r] = w.mul(math::tanh(w, s[r]), w.splat(cap));
            }
            if seen[r] != u32::MAX {
                s[r] = w.select(w.mask(seen[r]), s[r], none);
            }
            self.saw[r] |= seen[r];
            // In this order `max` drops a NaN, so that a row's `m` does not depend on which rows are attended with it.
            self.top[r] = w.max(s[r], self.top[r]);
            shelf.put(w, i, r, s[r]);
        }
    }

    /// Scores all pages.
    #[inline(always)]
    fn read<P: Form<W, R>>(&mut self, w: W, form: &mut P, looks: &Looks<R>, shelf: &mut W::Shelf<R>) {
        let pages = form.pages();
        let mut i = 0;
        while i < pages {
            let seen = form.seen(w, i, &looks.sight);
            shelf.see(i, seen);
            if any(&seen) {
                if P::PAIRS && i + 1 < pages {
                    let then = form.seen(w, i + 1, &looks.sight);
                    if any(&then) {
                        shelf.see(i + 1, then);
                        let [s, next] = form.pair(w, i);
                        self.take(w, looks, &seen, s, shelf, i);
                        self.take(w, looks, &then, next, shelf, i + 1);
                        i += 2;
                        continue;
                    }
                }
                let s = form.scores(w, i);
                self.take(w, looks, &seen, s, shelf, i);
            }
            i += 1;
        }
    }

    /// [`Tops::read`], two pages at a time.
    #[inline(always)]
    fn read_twos<P: Form<W, R>>(&mut self, w: W, form: &mut P, looks: &Looks<R>, shelf: &mut W::Shelf<R>) {
        let pages = form.pages();
        // The shelf has room for a page after the last, as `BLOCK` is even.
        for i in (0..pages).step_by(2) {
            let seen = form.seen(w, i, &looks.sight);
            let then = if i + 1 < pages { form.seen(w, i + 1, &looks.sight) } else { [0; R] };
            shelf.see(i, seen);
            shelf.see(i + 1, then);
            if any(&seen) || any(&then) {
                let [s, next] = form.pair(w, i);
                self.take(w, looks, &seen, s, shelf, i);
                self.take(w, looks, &then, next, shelf, i + 1);
            }
        }
    }

    /// Exponent of each row, and the value subtracted from its scores: the exponent, or 0 if that is not finite.
    #[inline(always)]
    fn exponents(&self, w: W) -> ([f32; R], [f32; R]) {
        let mut m = [f32::NEG_INFINITY; R];
        let mut base = [0.0; R];
        for r in 0..R {
            let x = w.reduce_max(self.top[r]);
            if x != f32::NEG_INFINITY {
                m[r] = math::ceil(x);
                base[r] = m[r];
            } else if self.saw[r] != 0 {
                m[r] = f32::INFINITY;
            }
        }
        (m, base)
    }
}

/// Attends `R` query rows over the pages of a block and writes their partial results to rows `row..row + R` of `out`.
///
/// Overflow is checked at the end of the reduction, not here: there, scores of 2^24 and more, of either sign, count as overflow
/// ([`crate::rows::sound`]). For that check a row whose scores are all -inf gets `m` = +inf, and a row with a NaN gets an `l` that
/// is NaN and the `m` of its other scores.
///
/// With `raw`, `p` of each row, page and lane is written to `raw[row][page][lane]` (0 for tokens not seen), for the attention
/// mass.
///
/// # Panics
/// If there are more pages than [`BLOCK`], or a slice does not fit the pages.
#[inline(always)]
pub fn attend_block<W: Warp, P: Form<W, R>, const R: usize>(
    w: W,
    form: &mut P,
    looks: &Looks<R>,
    out: &mut Partial<'_>,
    row: usize,
    mut raw: Option<&mut [[[f32; LANES]; BLOCK]]>,
) {
    let pages = form.pages();
    assert!(pages <= BLOCK);
    form.begin(w);
    let none = w.splat(f32::NEG_INFINITY);
    let mut shelf = W::Shelf::<R>::new(w);
    let mut tops = Tops { top: [none; R], saw: [0; R] };
    if P::TWOS && form.twos() {
        tops.read_twos(w, form, looks, &mut shelf);
    } else {
        tops.read(w, form, looks, &mut shelf);
    }
    let (m, base) = tops.exponents(w);
    let mut l = [w.splat(0.0); R];
    for i in 0..pages {
        let seen = shelf.seen(i);
        for r in 0..R {
            let p = match seen[r] {
                0 => w.splat(0.0),
                _ => math::exp2_nonpos(w, w.sub(shelf.get(w, i, r), w.splat(base[r]))),
            };
            if seen[r] != 0 {
                l[r] = w.add(l[r], p);
            }
            // Also for a row that sees nothing of the page: rows are weighed together.
            shelf.put(w, i, r, p);
            if let Some(raw) = &mut raw {
                w.store(p, &mut raw[r][i]);
            }
        }
    }
    let (out_m, out_l, acc) = out.rows(row, R, form.acc_rows());
    for r in 0..R {
        out_m[r] = m[r];
        out_l[r] = w.reduce_sum(l[r]);
    }
    // By lanes, not by a fill: on a device each lane may run ahead with its own words.
    for row in acc.iter_mut() {
        w.store(w.splat(0.0), row);
    }
    for i in 0..pages {
        let seen = shelf.seen(i);
        if any(&seen) {
            form.weigh(w, i, &seen, shelf.rows(w, i).borrow(), acc);
        }
    }
    form.finish(w, acc);
}
