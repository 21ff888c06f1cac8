//! Many query rows over one block of full pages: each page is widened to f32 once for all rows of the tile.
//!
//! [`attend_block`](pikv_core::attend::attend_block) widens a page for each bundle of rows, as many as the registers hold. That is right
//! for the rows of one token, which wait for memory. With tens of rows arithmetic dominates, so here the loops are nested the other way:
//!
//! ```text
//! for each page: widen K to f32                           16 KiB for 128 channels: it stays in the first cache
//!     for each bundle of rows: scores of 32 tokens
//! for each row: cap, mask, maximum, weights, their sum
//! for each 4 pages: widen V to f32
//!     for each 32 channels:                               16 KiB, again
//!         for each bundle of rows: weighted sums of 128 tokens
//! ```
//!
//! Every row goes through the same operations in the same order, so its bits are the same. Keys of f32 are read in place.

use crate::attend::{Block, Common, Rows, each_bundle};
use pikv_core::attend::{BLOCK, Sight};
use pikv_core::dtype::{Bf16, Dtype, Element, F16, F32};
use pikv_core::full::PageRef;
use pikv_core::math;
use pikv_core::page::Layout;
use pikv_core::rope::{Pairs, Rotation};
use pikv_core::warp::{LANES, Routine, Warp};
use std::marker::PhantomData;
use std::ops::Range;

/// 32 lanes, aligned to cache lines: a vector that straddles two lines loads at half the rate.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
struct Row([f32; LANES]);

/// Pages whose values are widened together: the sums then pass through memory once per 128 tokens, and 32 channels of these take half
/// of the first-level cache.
const RUN: usize = 4;

/// Working memory of a tile: 194 KiB at most for 64 rows. It grows to the needs of the largest tile so far.
#[derive(Debug, Default)]
pub struct Tile {
    /// K or V of a page in f32.
    wide: Vec<Row>,
    /// `[rows][BLOCK]`: scores, then weights.
    p: Vec<Row>,
    /// Tokens of each page that each row sees: `[rows][BLOCK]`.
    seen: Vec<[u32; BLOCK]>,
}

/// Whether a tile is faster than bundles of `most`: if enough rows share the widening, and there are more than the rows of one token,
/// which wait for memory.
pub fn pays(rows: usize, most: usize) -> bool {
    rows >= 16 && rows >= 2 * most
}

impl Tile {
    /// Room for `rows` rows over pages of `layout`.
    fn fit(&mut self, layout: &Layout, rows: usize) {
        let wide = (layout.k_channels() as usize).max(layout.acc_rows() as usize * RUN * LANES);
        grow(&mut self.wide, wide, Row([0.0; LANES]));
        grow(&mut self.p, rows * BLOCK, Row([0.0; LANES]));
        grow(&mut self.seen, rows, [0; BLOCK]);
    }
}

fn grow<T: Copy>(to: &mut Vec<T>, n: usize, x: T) {
    to.resize(n.max(to.len()), x);
}

/// Attends all rows of `block`, as in [`Block::run`].
#[inline(always)]
pub(crate) fn attend<W: Warp>(w: W, block: Block<'_>, tile: &mut Tile) {
    let Block { common, pages, next, out, first, mut raw, .. } = block;
    let rows = common.sights.len();
    assert!(pages.len() <= BLOCK);
    tile.fit(common.layout, rows);
    let Tile { wide, p, seen } = tile;
    let (p, seen) = (&mut p[..rows * BLOCK], &mut seen[..rows]);
    see(w, &common, pages, seen);
    for (i, page) in pages.iter().enumerate().filter(|(i, _)| is_seen(seen, *i)) {
        let ahead = match pages.get(i + 1) {
            Some(page) => [keys_of(common.layout, page.words), &[], &[], &[]],
            None => values_ahead(common.layout, pages),
        };
        let wide = w.call(Keys { common: &common, words: page.words, wide });
        let ahead = Ahead::new(ahead, rows);
        let mut scores = ScorePage { common: &common, wide, page: i, p, seen, ahead };
        each(w, rows, common.most, &mut scores);
    }
    let (m, l) = (&mut out.m[first..first + rows], &mut out.l[first..first + rows]);
    w.call(Weights { pages: pages.len(), softcap: common.softcap, p, seen, m, l });
    if let Some(raw) = &mut raw {
        for (raw, p) in raw.chunks_exact_mut(pages.len().max(1)).zip(p.chunks_exact(BLOCK)) {
            raw.iter_mut().zip(p).for_each(|(raw, p)| *raw = p.0);
        }
    }
    let acc_rows = common.layout.acc_rows() as usize;
    let acc = &mut out.acc[first * acc_rows..(first + rows) * acc_rows];
    acc.fill([0.0; LANES]);
    for start in (0..pages.len()).step_by(RUN) {
        let run = start..(start + RUN).min(pages.len());
        if !run.clone().any(|i| is_seen(seen, i)) {
            continue;
        }
        let ahead = match pages.get(run.end..) {
            Some(after @ [_, ..]) => values_ahead(common.layout, after),
            _ => [next[0].get(Layout::K_BASE as usize..).unwrap_or_default().as_chunks().0, &[], &[], &[]],
        };
        let mut ahead = Ahead::new(ahead, rows * acc_rows);
        w.call(Values { layout: common.layout, pages: &pages[run.clone()], wide });
        for (at, wide) in wide.chunks_exact(RUN * LANES).take(acc_rows).enumerate() {
            let (acc, stride, ahead) = (&mut acc[at..], acc_rows, &mut ahead);
            let mut sums = WeighRun { wide: flat(wide), run: run.clone(), p, seen, acc, stride, ahead };
            each(w, rows, common.most, &mut sums);
        }
    }
}

/// Whether a row sees any token of page `i`.
#[inline(always)]
fn is_seen(seen: &[[u32; BLOCK]], i: usize) -> bool {
    seen.iter().any(|seen| seen[i] != 0)
}

/// Tokens of each page that each row sees.
#[inline(always)]
fn see<W: Warp>(w: W, common: &Common<'_>, pages: &[PageRef<'_>], seen: &mut [[u32; BLOCK]]) {
    let sight = |row: usize| {
        let (pool, ring) = common.sights[row];
        if common.ring { ring } else { pool }
    };
    // A sight that sees no more than any row does.
    let least = (1..seen.len()).map(sight).fold(sight(0), |a, b| Sight {
        floor: a.floor.max(b.floor),
        lo: a.lo.max(b.lo),
        sinks: a.sinks.min(b.sinks),
        hi: a.hi.min(b.hi),
    });
    for (i, page) in pages.iter().enumerate() {
        let position = w.load_part(&page.words[..LANES]);
        if least.mask(w, position, page.live) == page.live {
            seen.iter_mut().for_each(|seen| seen[i] = page.live);
            continue;
        }
        let mut last = None;
        for (row, seen) in seen.iter_mut().enumerate() {
            // Rows of one token see the same tokens.
            let (from, bits) = match last {
                Some((from, bits)) if from == sight(row) => (from, bits),
                _ => (sight(row), sight(row).mask(w, position, page.live)),
            };
            seen[i] = bits;
            last = Some((from, bits));
        }
    }
}

/// K of a page, as rows of lanes.
#[inline(always)]
fn keys_of<'a>(layout: &Layout, words: &'a [u32]) -> &'a [[u32; LANES]] {
    words[Layout::K_BASE as usize..layout.v_base() as usize].as_chunks().0
}

/// V of a page, as rows of words.
#[inline(always)]
fn values_of<'a>(layout: &Layout, words: &'a [u32]) -> &'a [[u32; LANES]] {
    words[layout.v_base() as usize..].as_chunks().0
}

/// The values of the first pages of `pages`.
#[inline(always)]
fn values_ahead<'a>(layout: &Layout, pages: &[PageRef<'a>]) -> [&'a [[u32; LANES]]; RUN] {
    let mut ahead: [&[[u32; LANES]]; RUN] = [&[]; RUN];
    for (ahead, page) in ahead.iter_mut().zip(pages) {
        *ahead = values_of(layout, page.words);
    }
    ahead
}

/// Rows of words that are read after these; each row of a tile prefetches an equal part.
struct Ahead<'a> {
    words: [&'a [[u32; LANES]]; RUN],
    each: usize,
}

impl<'a> Ahead<'a> {
    /// `rows` is the number of rows that prefetch a part each.
    #[inline(always)]
    fn new(words: [&'a [[u32; LANES]]; RUN], rows: usize) -> Self {
        let all: usize = words.iter().map(|words| words.len()).sum();
        Ahead { words, each: all.div_ceil(rows) }
    }

    /// Prefetches the parts of `rows` rows.
    #[inline(always)]
    fn fetch<W: Warp>(&mut self, w: W, rows: usize) {
        if W::FETCHES {
            let mut most = self.each * rows;
            for words in &mut self.words {
                let (now, left) = words.split_at(most.min(words.len()));
                for words in now {
                    w.prefetch(words);
                }
                most -= now.len();
                *words = left;
            }
        }
    }
}

/// K of a page in f32: one channel per row, rotated if `common` has a rotation.
struct Keys<'a> {
    common: &'a Common<'a>,
    words: &'a [u32],
    wide: &'a mut [Row],
}

impl<'a, W: Warp> Routine<W> for Keys<'a> {
    type Out = &'a [[f32; LANES]];
    #[inline(always)]
    fn run(self, w: W) -> Self::Out {
        let Keys { common, words, wide } = self;
        let (layout, keys) = (common.layout, keys_of(common.layout, words));
        if layout.k == Dtype::F32 && common.rotation.is_none() {
            return bytemuck::cast_slice(keys);
        }
        let wide = &mut wide[..layout.k_channels() as usize];
        match layout.k {
            Dtype::F32 => widen::<W, F32>(w, keys, wide),
            Dtype::F16 => widen::<W, F16>(w, keys, wide),
            Dtype::Bf16 => widen::<W, Bf16>(w, keys, wide),
            other => unreachable!("{} has no lanes", other.name()),
        }
        let wide = match &common.rotation {
            None => wide,
            Some(rotation) => {
                turn(w, rotation, w.load_part(&words[..LANES]), wide);
                &mut wide[..layout.k_dim as usize]
            }
        };
        flat(wide)
    }
}

/// The rows as arrays of lanes.
#[inline(always)]
fn flat(rows: &[Row]) -> &[[f32; LANES]] {
    // SAFETY: `Row` is `repr(C)` over `[f32; LANES]`, 128 bytes, which is its alignment too, so it has no padding and a slice of it is a
    // slice of arrays of the same length; arrays of f32 need a smaller alignment.
    unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), rows.len()) }
}

/// Converts rows of words to rows of channels, in order.
#[inline(always)]
fn widen<W: Warp, E: Element>(w: W, words: &[[u32; LANES]], wide: &mut [Row]) {
    for (words, wide) in words.iter().zip(wide.chunks_exact_mut(E::PER_WORD)) {
        let words = w.load(words);
        for (j, wide) in wide.iter_mut().enumerate() {
            w.store(E::channel(w, words, j), &mut wide.0);
        }
    }
}

/// Rotates the channels of keys to `position`, as [`pikv_core::full`] does when it reads them.
#[inline(always)]
fn turn<W: Warp>(w: W, rotation: &Rotation<'_>, position: W::U, keys: &mut [Row]) {
    let n = rotation.capacity as usize;
    // Lanes without a token hold any word; the mask keeps the look-up inside the table, and their scores are not read.
    let at = w.and(position, w.splat_u(rotation.capacity - 1));
    for i in 0..rotation.rope.rotary_dim as usize / 2 {
        let (a, b) = rotation.rope.pair(i);
        let pair = &rotation.table[i * 2 * n..(i + 1) * 2 * n];
        let (cos, sin) = (w.gather(&pair[..n], at), w.gather(&pair[n..], at));
        let (x, y) = (w.load_f(&keys[a].0), w.load_f(&keys[b].0));
        w.store(w.fma(x, cos, w.sub(w.splat(-0.0), w.mul(y, sin))), &mut keys[a].0);
        w.store(w.fma(y, cos, w.mul(x, sin)), &mut keys[b].0);
    }
}

/// V of a run of pages in f32: `[acc_rows][RUN][LANES]`, with the channels in the order of [`pikv_core::merge::Partial`].
struct Values<'a> {
    layout: &'a Layout,
    pages: &'a [PageRef<'a>],
    wide: &'a mut [Row],
}

impl<W: Warp> Routine<W> for Values<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Values { layout, pages, wide } = self;
        for (i, page) in pages.iter().enumerate() {
            let (v, wide) = (&page.words[layout.v_base() as usize..], &mut wide[i * LANES..]);
            match layout.v {
                Dtype::F32 => widen_values::<W, F32>(w, layout, v, wide),
                Dtype::F16 => widen_values::<W, F16>(w, layout, v, wide),
                Dtype::Bf16 => widen_values::<W, Bf16>(w, layout, v, wide),
                other => unreachable!("{} has no lanes", other.name()),
            }
        }
    }
}

#[inline(always)]
fn widen_values<W: Warp, E: Element>(w: W, layout: &Layout, v: &[u32], wide: &mut [Row]) {
    let (words, stride) = (layout.v_words() as usize, layout.v_stride() as usize);
    for (t, value) in (0..LANES).zip(v.chunks_exact(stride)) {
        for (col, words) in value[..words].chunks(LANES).enumerate() {
            let words = w.load_part(words);
            for j in 0..E::PER_WORD {
                w.store(E::channel(w, words, j), &mut wide[(col * E::PER_WORD + j) * RUN * LANES + t].0);
            }
        }
    }
}

/// Lanes that a routine computes: one half of them, or all. The compiler drops its work for the other lanes.
mod part {
    pub const LOW: usize = 0;
    pub const HIGH: usize = 1;
    pub const ALL: usize = 2;
}

/// Writes the lanes of `PART`.
#[inline(always)]
fn store<W: Warp, const PART: usize>(w: W, x: W::F, row: &mut [f32; LANES]) {
    const HALF: usize = LANES / 2;
    if PART == part::ALL {
        return w.store(x, row);
    }
    let mut all = [0.0; LANES];
    w.store(x, &mut all);
    row[PART * HALF..][..HALF].copy_from_slice(&all[PART * HALF..][..HALF]);
}

/// Rows that lanes of few registers compute together, half of the lanes at a time.
///
/// With 16 registers 2 rows of 32 lanes are 8 chains, as many as are in flight while one multiply-add takes its 4 cycles on 2 units, and
/// each word loaded serves 2 rows; 6 rows of 16 lanes are 12 chains, and each word serves 6. (The loop alone on Zen 3: 0.84 of the peak
/// against 0.69.)
const SIX: usize = 6;

/// Whether `R` rows are computed half of the lanes at a time. A branch on this constant alone leaves the other side uncompiled.
struct Halved<W, const R: usize>(PhantomData<W>);

impl<W: Warp, const R: usize> Halved<W, R> {
    const YES: bool = R == SIX && W::ROWS == 2;
}

/// All rows of a tile, as many together as the registers hold.
#[inline(always)]
fn each<W: Warp>(w: W, rows: usize, most: usize, pass: &mut impl Rows) {
    let mut row = 0;
    if Halved::<W, SIX>::YES {
        while most == 2 && row + SIX <= rows {
            pass.rows::<W, SIX>(w, row);
            row += SIX;
        }
    }
    each_bundle(w, row..rows, most, pass);
}

/// The scores of all lanes of a page, uncapped.
struct ScorePage<'a> {
    common: &'a Common<'a>,
    wide: &'a [[f32; LANES]],
    page: usize,
    p: &'a mut [Row],
    seen: &'a [[u32; BLOCK]],
    ahead: Ahead<'a>,
}

impl ScorePage<'_> {
    /// The scores of `N` bundles of `S` rows.
    #[inline(always)]
    fn score<W: Warp, const N: usize, const S: usize, const PART: usize>(&mut self, w: W, row: usize) {
        let q = std::array::from_fn(|n| self.common.query::<S>(row + n * S).q);
        let p = &mut self.p[row * BLOCK..(row + N * S) * BLOCK];
        let halves = halves(self.common);
        w.call(Scores::<N, S, PART> { wide: self.wide, q, halves, p, page: self.page });
    }
}

impl Rows for ScorePage<'_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        self.ahead.fetch(w, R);
        if !is_seen(&self.seen[row..row + R], self.page) {
            return;
        }
        if Halved::<W, R>::YES {
            self.score::<W, 3, 2, { part::LOW }>(w, row);
            self.score::<W, 3, 2, { part::HIGH }>(w, row);
        } else {
            self.score::<W, 1, R, { part::ALL }>(w, row);
        }
    }
}

/// Number of first channels of a key that the chain takes alternately with as many after them; the others follow in order.
#[inline(always)]
fn halves(common: &Common<'_>) -> usize {
    let rope = common.rotation.map(|rotation| rotation.rope).filter(|rope| rope.pairs == Pairs::Halves);
    rope.map_or(0, |rope| rope.rotary_dim as usize / 2)
}

struct Scores<'a, const N: usize, const S: usize, const PART: usize> {
    wide: &'a [[f32; LANES]],
    /// `[N][channels][S]`
    q: [&'a [[f32; S]]; N],
    halves: usize,
    /// `[N S][BLOCK]`
    p: &'a mut [Row],
    page: usize,
}

impl<W: Warp, const N: usize, const S: usize, const PART: usize> Routine<W> for Scores<'_, N, S, PART> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Scores { wide, q, halves, p, page } = self;
        let mut s = [[w.splat(0.0); S]; N];
        let q = q.map(|q| &q[..wide.len()]);
        for c in 0..halves {
            chain(w, &wide[c], &q, c, &mut s);
            chain(w, &wide[halves + c], &q, halves + c, &mut s);
        }
        for (c, x) in wide.iter().enumerate().skip(2 * halves) {
            chain(w, x, &q, c, &mut s);
        }
        for (n, s) in s.iter().enumerate() {
            for (i, s) in s.iter().enumerate() {
                store::<W, PART>(w, *s, &mut p[(n * S + i) * BLOCK + page].0);
            }
        }
    }
}

/// One channel of the chains.
#[inline(always)]
fn chain<W: Warp, const N: usize, const S: usize>(
    w: W,
    x: &[f32; LANES],
    q: &[&[[f32; S]]; N],
    c: usize,
    s: &mut [[W::F; S]; N],
) {
    let x = w.load_f(x);
    for (s, q) in s.iter_mut().zip(q) {
        for (s, q) in s.iter_mut().zip(&q[c]) {
            *s = w.fma(x, w.splat(*q), *s);
        }
    }
}

/// Turns scores into weights, exponents and sums, row by row.
struct Weights<'a> {
    pages: usize,
    softcap: Option<f32>,
    p: &'a mut [Row],
    seen: &'a [[u32; BLOCK]],
    m: &'a mut [f32],
    l: &'a mut [f32],
}

impl<W: Warp> Routine<W> for Weights<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Weights { pages, softcap, p, seen, m, l } = self;
        let none = w.splat(f32::NEG_INFINITY);
        let rows = p.chunks_exact_mut(BLOCK).zip(seen).zip(m.iter_mut().zip(l));
        for ((p, seen), (m, l)) in rows {
            let (p, seen) = (&mut p[..pages], &seen[..pages]);
            let (mut top, mut saw) = (none, 0);
            for (p, seen) in p.iter_mut().zip(seen).filter(|(_, seen)| **seen != 0) {
                if softcap.is_some() || *seen != u32::MAX {
                    let mut s = w.load_f(&p.0);
                    if let Some(cap) = softcap {
                        s = w.mul(math::tanh(w, s), w.splat(cap));
                    }
                    w.store(w.select(w.mask(*seen), s, none), &mut p.0);
                }
                saw |= *seen;
                top = w.max(w.load_f(&p.0), top);
            }
            let mut base = 0.0;
            *m = match w.reduce_max(top) {
                f32::NEG_INFINITY if saw == 0 => f32::NEG_INFINITY,
                f32::NEG_INFINITY => f32::INFINITY,
                top => {
                    base = math::ceil(top);
                    base
                }
            };
            let mut sum = w.splat(0.0);
            for (p, seen) in p.iter_mut().zip(seen) {
                let mut x = w.splat(0.0);
                if *seen != 0 {
                    x = math::exp2_nonpos(w, w.sub(w.load_f(&p.0), w.splat(base)));
                    sum = w.add(sum, x);
                }
                w.store(x, &mut p.0);
            }
            *l = w.reduce_sum(sum);
        }
    }
}

/// 32 channels of the weighted sums of a run of pages.
struct WeighRun<'a, 'b> {
    /// `[RUN][LANES]`
    wide: &'a [[f32; LANES]],
    run: Range<usize>,
    p: &'a [Row],
    seen: &'a [[u32; BLOCK]],
    /// These channels of each row, `stride` rows of lanes from one row to the next.
    acc: &'a mut [[f32; LANES]],
    stride: usize,
    ahead: &'a mut Ahead<'b>,
}

impl WeighRun<'_, '_> {
    /// Adds the tokens of `pages` in `seen`, which the `R` rows from `row` on all see.
    #[inline(always)]
    fn weigh<W: Warp, const R: usize>(&mut self, w: W, row: usize, pages: Range<usize>, seen: u32) {
        if seen == 0 {
            return;
        }
        let from = (pages.start - self.run.start) * LANES;
        let wide = self.wide[from..from + pages.len() * LANES].as_chunks().0;
        let p = |r: usize| &self.p[(row + r) * BLOCK..][pages.clone()];
        let p: [&[Row]; R] = std::array::from_fn(p);
        let (acc, stride) = (&mut self.acc[row * self.stride..], self.stride);
        if Halved::<W, R>::YES {
            w.call(Sums::<R, { part::LOW }> { wide, p, acc: &mut *acc, stride, seen });
            w.call(Sums::<R, { part::HIGH }> { wide, p, acc, stride, seen });
        } else {
            w.call(Sums::<R, { part::ALL }> { wide, p, acc, stride, seen });
        }
    }

    /// Adds page `i` for the `R` rows from `row` on, which do not all see the whole page.
    #[inline(always)]
    fn apart<W: Warp, const R: usize>(&mut self, w: W, row: usize, i: usize) {
        let masks: [u32; R] = std::array::from_fn(|r| self.seen[row + r][i]);
        let all = masks.iter().fold(u32::MAX, |all, mask| all & mask);
        // A row takes its tokens in order. Those that all rows see are taken together if only some rows see no token between them.
        let span = between(all);
        let together = R > 1 && all != 0 && masks.iter().all(|mask| mask & span == all);
        let before = if together { (1 << all.trailing_zeros()) - 1 } else { u32::MAX };
        for (r, mask) in (row..).zip(masks) {
            self.weigh::<W, 1>(w, r, i..i + 1, mask & before);
        }
        if together {
            self.weigh::<W, R>(w, row, i..i + 1, all);
            for (r, mask) in (row..).zip(masks) {
                self.weigh::<W, 1>(w, r, i..i + 1, mask & !(before | span));
            }
        }
    }
}

impl Rows for WeighRun<'_, '_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        self.ahead.fetch(w, R);
        let whole =
            |seen: &[[u32; BLOCK]], i: usize| seen[row..row + R].iter().all(|seen| seen[i] == u32::MAX);
        let mut i = self.run.start;
        while i < self.run.end {
            let from = i;
            while i < self.run.end && whole(self.seen, i) {
                i += 1;
            }
            if i > from {
                self.weigh::<W, R>(w, row, from..i, u32::MAX);
            } else {
                self.apart::<W, R>(w, row, i);
                i += 1;
            }
        }
    }
}

/// The bits from the lowest set bit to the highest.
#[inline(always)]
fn between(bits: u32) -> u32 {
    if bits == 0 { 0 } else { (u32::MAX << bits.trailing_zeros()) & (u32::MAX >> bits.leading_zeros()) }
}

/// The sums of `R` rows over some tokens.
struct Sums<'a, const R: usize, const PART: usize> {
    /// `[pages][tokens]`
    wide: &'a [[[f32; LANES]; LANES]],
    /// `[R][pages]`
    p: [&'a [Row]; R],
    acc: &'a mut [[f32; LANES]],
    /// Rows of lanes from one row's sums to the next.
    stride: usize,
    /// Tokens to add of each page.
    seen: u32,
}

impl<W: Warp, const R: usize, const PART: usize> Routine<W> for Sums<'_, R, PART> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Sums { wide, p, acc, stride, seen } = self;
        let mut sums = [w.splat(0.0); R];
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = w.load_f(&acc[r * stride]);
        }
        for (i, wide) in wide.iter().enumerate() {
            let p: [&[f32; LANES]; R] = std::array::from_fn(|r| &p[r][i].0);
            if seen == u32::MAX {
                for (t, x) in wide.iter().enumerate() {
                    token(w, x, &p, t, &mut sums);
                }
                continue;
            }
            let mut left = seen;
            while left != 0 {
                let t = left.trailing_zeros() as usize;
                left &= left - 1;
                token(w, &wide[t], &p, t, &mut sums);
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            store::<W, PART>(w, *sum, &mut acc[r * stride]);
        }
    }
}

/// One token of the sums.
#[inline(always)]
fn token<W: Warp, const R: usize>(
    w: W,
    x: &[f32; LANES],
    p: &[&[f32; LANES]; R],
    t: usize,
    sums: &mut [W::F; R],
) {
    let x = w.load_f(x);
    for (sum, p) in sums.iter_mut().zip(p) {
        *sum = w.fma(x, w.splat(p[t]), *sum);
    }
}
