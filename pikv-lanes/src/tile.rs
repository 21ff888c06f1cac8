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

#[cfg(target_arch = "x86_64")]
mod fast;
mod half;
mod scores;
mod sums;
mod widen;

#[cfg(target_arch = "x86_64")]
pub(crate) use self::fast::Bf16Pairs;
use self::half::each;
use self::scores::{ScorePage, Weights};
use self::sums::WeighRun;
use self::widen::{Ahead, Keys, Values, after_keys, after_values, flat};
use crate::Lanes;
use crate::attend::{Block, Common, Raw};
use pikv_core::attend::{BLOCK, Sight};
#[cfg(target_arch = "x86_64")]
use pikv_core::dtype::Dtype;
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::page::Layout;
use pikv_core::warp::{LANES, Warp};
use std::ops::Range;

/// 32 lanes, aligned to cache lines: a vector that straddles two lines loads at half the rate.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
struct Row([f32; LANES]);

/// Pages whose values are widened together: the sums then pass through memory once per 128 tokens, and 32 channels of these take half
/// of the first-level cache.
const RUN: usize = 4;

/// Working memory of a tile: 194 KiB at most for 64 rows, and 96 KiB more with [`Common::rounded`]. It grows to the needs of the largest tile so far.
#[derive(Debug, Default)]
pub struct Tile {
    /// K or V of a page in f32.
    wide: Vec<Row>,
    /// `[rows][BLOCK]`: scores, then weights.
    p: Vec<Row>,
    /// Tokens of each page that each row sees: `[rows][BLOCK]`.
    seen: Vec<[u32; BLOCK]>,
    #[cfg(target_arch = "x86_64")]
    pairs: fast::Pairs,
}

/// Whether a tile is faster than bundles of `most`: if enough rows share the widening, and there are more than the rows of one token,
/// which wait for memory.
pub fn pays(rows: usize, most: usize) -> bool {
    rows >= 16 && rows >= 2 * most
}

/// Rounds queries, `[bundle][k_channels][width]` with bundles of at most `most` rows, for [`Common::rounded`]; leaves `to` empty if `lanes` do not
/// [multiply bf16](Lanes::multiplies_bf16), K or V of `layout` is in another dtype, or a tile of these rows does not [pay](pays). Keys that are rotated when read need exact queries.
pub fn round_queries(lanes: Lanes, layout: &Layout, most: usize, q: &[f32], to: &mut Vec<u32>) {
    to.clear();
    #[cfg(target_arch = "x86_64")]
    if [layout.k, layout.v] == [Dtype::Bf16; 2]
        && lanes.multiplies_bf16()
        && pays(q.len() / layout.k_channels() as usize, most)
    {
        fast::pair_queries(q, layout.k_channels() as usize / 2, most, to);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (lanes, layout, most, q);
}

impl Tile {
    /// Room for the weights of `rows` rows.
    fn fit(&mut self, rows: usize) {
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
    let Block { common, pages, next, mut out, first, mut raw, .. } = block;
    let rows = common.sights.len();
    assert!(pages.len() <= BLOCK);
    tile.fit(rows);
    let Tile { wide, p, seen, .. } = tile;
    let (p, seen) = (&mut p[..rows * BLOCK], &mut seen[..rows]);
    let acc_rows = common.layout.acc_rows() as usize;
    grow(wide, (common.layout.k_channels() as usize).max(acc_rows * RUN * LANES), Row([0.0; LANES]));
    if !see(w, &common, pages, seen) {
        return nothing(&mut out, first..first + rows, acc_rows, raw);
    }
    for (i, page) in pages.iter().enumerate().filter(|(i, _)| is_seen(seen, *i)) {
        let wide = w.call(Keys { common: &common, words: page.words, wide });
        let ahead = Ahead::new(after_keys(common.layout, pages, i), rows);
        let mut scores = ScorePage { common: &common, wide, page: i, p, seen, ahead };
        each(w, rows, common.most, &mut scores);
    }
    let (m, l) = (&mut out.m[first..first + rows], &mut out.l[first..first + rows]);
    w.call(Weights { pages: pages.len(), softcap: common.softcap, p, seen, m, l });
    copy_weights(&mut raw, pages.len(), p);
    let acc = &mut out.acc[first * acc_rows..(first + rows) * acc_rows];
    acc.fill([0.0; LANES]);
    for start in (0..pages.len()).step_by(RUN) {
        let run = start..(start + RUN).min(pages.len());
        if !run.clone().any(|i| is_seen(seen, i)) {
            continue;
        }
        let mut ahead = Ahead::new(after_values(common.layout, pages, run.end, next), rows * acc_rows);
        w.call(Values { layout: common.layout, pages: &pages[run.clone()], wide });
        for (at, wide) in wide.chunks_exact(RUN * LANES).take(acc_rows).enumerate() {
            let (acc, stride, ahead) = (&mut acc[at..], acc_rows, &mut ahead);
            let mut sums = WeighRun { wide: flat(wide), run: run.clone(), p, seen, acc, stride, ahead };
            each(w, rows, common.most, &mut sums);
        }
    }
}

/// Copies the weights of every row and page out.
#[inline(always)]
fn copy_weights(raw: &mut Raw<'_>, pages: usize, p: &[Row]) {
    if let Some(raw) = raw {
        for (raw, p) in raw.chunks_exact_mut(pages.max(1)).zip(p.chunks_exact(BLOCK)) {
            raw.iter_mut().zip(p).for_each(|(raw, p)| *raw = p.0);
        }
    }
}

/// Whether a row sees any token of page `i`.
#[inline(always)]
fn is_seen(seen: &[[u32; BLOCK]], i: usize) -> bool {
    seen.iter().any(|seen| seen[i] != 0)
}

/// The results of rows that see no token of the block.
fn nothing(out: &mut Partial<'_>, rows: Range<usize>, acc_rows: usize, raw: Raw<'_>) {
    out.m[rows.clone()].fill(f32::NEG_INFINITY);
    out.l[rows.clone()].fill(0.0);
    out.acc[rows.start * acc_rows..rows.end * acc_rows].fill([0.0; LANES]);
    if let Some(raw) = raw {
        raw.fill([0.0; LANES]);
    }
}

/// Writes the tokens of each page that each row sees; returns whether any row sees any token.
#[inline(always)]
fn see<W: Warp>(w: W, common: &Common<'_>, pages: &[PageRef<'_>], seen: &mut [[u32; BLOCK]]) -> bool {
    let sight = |row: usize| {
        let (pool, ring) = common.sights[row];
        if common.ring { ring } else { pool }
    };
    let folded = |both: fn(Sight, Sight) -> Sight| (1..seen.len()).map(sight).fold(sight(0), both);
    // Sights that see no more, and no less, than any row does.
    let narrowest = folded(|a, b| Sight {
        floor: a.floor.max(b.floor),
        lo: a.lo.max(b.lo),
        sinks: a.sinks.min(b.sinks),
        hi: a.hi.min(b.hi),
    });
    let widest = folded(|a, b| Sight {
        floor: a.floor.min(b.floor),
        lo: a.lo.min(b.lo),
        sinks: a.sinks.max(b.sinks),
        hi: a.hi.max(b.hi),
    });
    let mut any = false;
    for (i, page) in pages.iter().enumerate() {
        let position = w.load_part(&page.words[..LANES]);
        let all = narrowest.mask(w, position, page.live) == page.live;
        if all || widest.mask(w, position, page.live) == 0 {
            let same = if all { page.live } else { 0 };
            seen.iter_mut().for_each(|seen| seen[i] = same);
            any |= same != 0;
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
            any |= bits != 0;
            last = Some((from, bits));
        }
    }
    any
}
