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
//! Tokens that a row does not see are skipped, not multiplied by 0, so what lies in their place (NaN included) has no
//! effect. As `m` is an integer, every later rescale is exact; [`crate::merge`] joins blocks by a fixed tree.

use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::math;
use crate::merge::Partial;
use crate::page::Layout;
use crate::rope::{self, Rotation};
use crate::warp::{LANES, Warp};

/// Pages of a block.
pub const BLOCK: usize = 8;

/// Which positions a query row sees: those from `floor` to `hi` that are at least `lo` or are below `sinks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// First position of the store that is read (tokens below it are read elsewhere).
    pub floor: u32,
    /// First position inside the sliding window.
    pub lo: u32,
    /// Positions below this are seen although they left the window.
    pub sinks: u32,
    /// Last position, the row's own for a causal row. Below `floor` nothing is seen.
    pub hi: i32,
}

impl Sight {
    /// Sees nothing.
    pub const NONE: Sight = Sight { floor: 0, lo: 0, sinks: 0, hi: -1 };

    /// Bit `i` is set if the token at lane `i` is seen; `fill` lanes of the page were written.
    #[inline(always)]
    pub fn mask<W: Warp>(&self, w: W, position: W::U, fill: u32) -> u32 {
        let from =
            w.and_m(w.ge_i(position, w.splat_u(self.floor)), w.ge_i(w.splat_u(self.hi as u32), position));
        let window = w.or_m(
            w.ge_i(position, w.splat_u(self.lo)),
            w.ge_i(w.splat_u(self.sinks.wrapping_sub(1)), position),
        );
        w.ballot(w.and_m(from, window)) & filled(fill)
    }
}

/// The lowest `fill` bits.
#[inline(always)]
pub const fn filled(fill: u32) -> u32 {
    if fill >= LANES as u32 { u32::MAX } else { (1 << fill) - 1 }
}

/// A page of the list, and how many of its lanes were written.
#[derive(Clone, Copy, Debug)]
pub struct PageRef<'a> {
    /// The page's words.
    pub words: &'a [u32],
    /// Lanes written, from lane 0.
    pub fill: u32,
}

/// `R` query rows that are read together.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a, const R: usize> {
    /// Channel by channel the rows' queries, scaled to base 2; `k_rows * PER_WORD` channels, the padding 0.
    pub q: &'a [[f32; R]],
    /// Channels of a key.
    pub k_dim: usize,
    /// What each row sees.
    pub sight: [Sight; R],
    /// Logits are capped as `cap * tanh(x / cap)`: the cap in base 2. `q` is then scaled to `x / cap`.
    pub softcap: Option<f32>,
    /// Keys are turned as they are read.
    pub rotation: Option<Rotation<'a>>,
}

/// The scores of a page's 32 tokens against `R` queries.
#[inline(always)]
fn scores<W: Warp, K: Element, const R: usize>(
    w: W,
    k: &[[u32; LANES]],
    query: &Query<'_, R>,
    ahead: &[[u32; LANES]],
) -> [W::F; R] {
    let mut s = [w.splat(0.0); R];
    for (i, (row, q)) in k.iter().zip(query.q.chunks_exact(K::PER_WORD)).enumerate() {
        if let Some(next) = ahead.get(i) {
            w.prefetch(next);
        }
        let word = w.load(row);
        for (j, q) in q.iter().enumerate() {
            let x = K::channel(w, word, j);
            for r in 0..R {
                s[r] = w.fma(x, w.splat(q[r]), s[r]);
            }
        }
    }
    s
}

/// One group of 32 words of every value of a page. (Not a closure: those do not inherit the instruction set of the
/// function that they stand in, and this is read in the innermost loop.)
#[derive(Clone, Copy)]
struct Column<'a> {
    v: &'a [u32],
    /// Words from one value to the next.
    row: usize,
    /// First word of the group, and the end of the value's words.
    first: usize,
    end: usize,
    ahead: &'a [u32],
}

impl Column<'_> {
    /// The words of token `t`; `WHOLE` if there are 32.
    #[inline(always)]
    fn read<W: Warp, const WHOLE: bool>(&self, w: W, t: usize) -> W::U {
        let at = t * self.row + self.first;
        if WHOLE {
            if let Some(Some(next)) = self.ahead.get(at..).map(<[u32]>::first_chunk) {
                w.prefetch(next);
            }
            if let Some(row) = self.v[at..].first_chunk() {
                return w.load(row);
            }
        }
        w.load_part(&self.v[at..t * self.row + self.end])
    }
}

/// The set bits of a word, lowest first.
struct Bits(u32);

impl Iterator for Bits {
    type Item = usize;
    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let t = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        (t < u32::BITS).then_some(t as usize)
    }
}

/// Adds `p v` of the tokens in `seen` to the sums of `R` rows; `acc` is `[R][stride]` rows of lanes.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn weigh<W: Warp, V: Element, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
    ahead: &[u32],
) {
    let (end, row) = (layout.v_words() as usize, layout.v_stride() as usize);
    for col in 0..layout.v_cols() as usize {
        let first = col * LANES;
        let column = Column { v, row, first, end, ahead };
        let acc = &mut acc[col * V::PER_WORD..];
        if end - first >= LANES {
            weigh_column::<W, V, R, true>(w, column, seen, p, acc, stride);
        } else {
            weigh_column::<W, V, R, false>(w, column, seen, p, acc, stride);
        }
    }
}

/// [`weigh`] for one group of 32 words.
#[inline(always)]
fn weigh_column<W: Warp, V: Element, const R: usize, const WHOLE: bool>(
    w: W,
    column: Column<'_>,
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
) {
    // The channels of a word together while their sums fit the registers, else one after the other.
    if R * V::PER_WORD <= W::ROWS && V::PER_WORD == 2 {
        let mut a = [[w.splat(0.0); 2]; R];
        for r in 0..R {
            a[r] = [w.load_f(&acc[r * stride]), w.load_f(&acc[r * stride + 1])];
        }
        for t in Bits(seen) {
            let word = column.read::<W, WHOLE>(w, t);
            let (x, y) = (V::channel(w, word, 0), V::channel(w, word, 1));
            for r in 0..R {
                let p = w.bcast(&p[r], t);
                a[r] = [w.fma(x, p, a[r][0]), w.fma(y, p, a[r][1])];
            }
        }
        for r in 0..R {
            w.store(a[r][0], &mut acc[r * stride]);
            w.store(a[r][1], &mut acc[r * stride + 1]);
        }
    } else {
        for j in 0..V::PER_WORD {
            let mut a = [w.splat(0.0); R];
            for r in 0..R {
                a[r] = w.load_f(&acc[r * stride + j]);
            }
            for t in Bits(seen) {
                let x = V::channel(w, column.read::<W, WHOLE>(w, t), j);
                for r in 0..R {
                    a[r] = w.fma(x, w.bcast(&p[r], t), a[r]);
                }
            }
            for r in 0..R {
                w.store(a[r], &mut acc[r * stride + j]);
            }
        }
    }
}

/// K of a page, as rows of lanes.
#[inline(always)]
fn k_of<'a>(layout: &Layout, words: &'a [u32]) -> &'a [[u32; LANES]] {
    words[Layout::K_BASE as usize..layout.v_base() as usize].as_chunks().0
}

/// Scores of one page of the list, K in its own dtype.
#[inline(always)]
fn page_scores<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    words: &[u32],
    position: W::U,
    query: &Query<'_, R>,
    ahead: &[[u32; LANES]],
) -> [W::F; R] {
    #[inline(always)]
    fn go<W: Warp, K: Element, const R: usize>(
        w: W,
        k: &[[u32; LANES]],
        position: W::U,
        query: &Query<'_, R>,
        ahead: &[[u32; LANES]],
    ) -> [W::F; R] {
        match &query.rotation {
            Some(rotation) => rope::scores::<W, K, R>(w, rotation, k, query, position),
            None => scores::<W, K, R>(w, k, query, ahead),
        }
    }
    let k = k_of(layout, words);
    match layout.k {
        Dtype::F32 => go::<W, F32, R>(w, k, position, query, ahead),
        Dtype::F16 => go::<W, F16, R>(w, k, position, query, ahead),
        Dtype::Bf16 => go::<W, Bf16, R>(w, k, position, query, ahead),
    }
}

/// [`weigh`], V in its own dtype.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn page_weigh<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
    ahead: &[u32],
) {
    match layout.v {
        Dtype::F32 => weigh::<W, F32, R>(w, layout, v, seen, p, acc, stride, ahead),
        Dtype::F16 => weigh::<W, F16, R>(w, layout, v, seen, p, acc, stride, ahead),
        Dtype::Bf16 => weigh::<W, Bf16, R>(w, layout, v, seen, p, acc, stride, ahead),
    }
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

/// Whether all rows see the same tokens.
#[inline(always)]
fn alike<const R: usize>(seen: &[u32; R]) -> bool {
    let mut bits = 0;
    for row in seen {
        bits |= row ^ seen[0];
    }
    bits == 0
}

/// Attends `R` query rows over at most [`BLOCK`] pages and writes their partial results to rows `row..row + R` of `out`.
///
/// Scores of 2^24 and more, of either sign, are not told apart from an overflow: a row whose scores are all -inf gets `m` =
/// +inf, one with a NaN an `l` that is NaN, and the end of the reduction has to look.
///
/// `next` is the page that will be read after these, for the prefetch. With `raw`, `p` of each row, page and lane is
/// written to `raw[row][page][lane]` (0 for tokens not seen), for the attention mass.
///
/// # Panics
/// If there are more pages than [`BLOCK`], or a slice does not fit `layout`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub fn attend_block<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    pages: &[PageRef<'_>],
    next: Option<&[u32]>,
    query: &Query<'_, R>,
    out: &mut Partial<'_>,
    row: usize,
    mut raw: Option<&mut [[[f32; LANES]; BLOCK]]>,
) {
    assert!(pages.len() <= BLOCK);
    let none = w.splat(f32::NEG_INFINITY);
    let mut slots = [[w.park(none); R]; BLOCK];
    let mut seen = [[0u32; R]; BLOCK];
    let mut top = [none; R];
    let mut saw = [0; R];
    let one_sight = query.sight.iter().all(|s| *s == query.sight[0]);
    for (i, page) in pages.iter().enumerate() {
        let position = w.load_part(&page.words[..LANES]);
        if one_sight {
            seen[i] = [query.sight[0].mask(w, position, page.fill); R];
        } else {
            for (seen, sight) in seen[i].iter_mut().zip(&query.sight) {
                *seen = sight.mask(w, position, page.fill);
            }
        }
        if !any(&seen[i]) {
            continue;
        }
        let ahead = match pages.get(i + 1) {
            Some(next) => k_of(layout, next.words),
            None => pages[0].words[layout.v_base() as usize..].as_chunks().0,
        };
        let mut s = page_scores(w, layout, page.words, position, query, ahead);
        for r in 0..R {
            if let Some(cap) = query.softcap {
                s[r] = w.mul(math::tanh(w, s[r]), w.splat(cap));
            }
            if seen[i][r] != u32::MAX {
                s[r] = w.select(w.mask(seen[i][r]), s[r], none);
            }
            saw[r] |= seen[i][r];
            top[r] = w.max(top[r], s[r]);
            slots[i][r] = w.park(s[r]);
        }
    }
    let mut m = [f32::NEG_INFINITY; R];
    let mut base = [0.0; R];
    for r in 0..R {
        let x = w.reduce_max(top[r]);
        if x != f32::NEG_INFINITY {
            m[r] = math::ceil(x);
            base[r] = m[r];
        } else if saw[r] != 0 {
            m[r] = f32::INFINITY;
        }
    }
    let mut l = [w.splat(0.0); R];
    for i in 0..pages.len() {
        for r in 0..R {
            let p = match seen[i][r] {
                0 => w.splat(0.0),
                _ => math::exp2_nonpos(w, w.sub(w.unpark(&slots[i][r]), w.splat(base[r]))),
            };
            if seen[i][r] != 0 {
                l[r] = w.add(l[r], p);
                slots[i][r] = w.park(p);
            }
            if let Some(raw) = &mut raw {
                w.store(p, &mut raw[r][i]);
            }
        }
    }
    let stride = layout.acc_rows() as usize;
    let (out_m, out_l, acc) = out.rows(row, R, stride);
    for r in 0..R {
        out_m[r] = m[r];
        out_l[r] = w.reduce_sum(l[r]);
    }
    // By lanes, not by a fill: on a device each lane may run ahead with its own words.
    for row in acc.iter_mut() {
        w.store(w.splat(0.0), row);
    }
    for (i, page) in pages.iter().enumerate() {
        let v = &page.words[layout.v_base() as usize..];
        let ahead = match pages.get(i + 1) {
            Some(next) => &next.words[layout.v_base() as usize..],
            None => next.map_or(&[][..], |words| &words[Layout::K_BASE as usize..]),
        };
        if alike(&seen[i]) {
            if seen[i][0] != 0 {
                page_weigh(w, layout, v, seen[i][0], &slots[i], acc, stride, ahead);
            }
        } else {
            for r in 0..R {
                let p = [slots[i][r]];
                page_weigh(w, layout, v, seen[i][r], &p, &mut acc[r * stride..], stride, &[]);
            }
        }
    }
}
