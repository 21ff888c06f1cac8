//! What stays of the pages of a KV head whether or not they are held: the least and the largest value of each channel of their keys, by
//! which a query says what it wants.
//!
//! A page is here what 32 tokens of one expert are, in the order in which they were filed. It is known once none of its tokens can be
//! taken back any more, and positions that can be are not looked at: so a rollback, a dropped step or a refused one changes nothing here,
//! and which pages a row can want is a function of its position alone. Ghosts are pages that are known and no longer held.

use crate::cache::Inner;
use crate::filing::Layer;
use half::f16;
use pikv_core::bound;
use pikv_core::dtype::Dtype;
use pikv_core::page::{Layout, MAX_DIM, PAGE};
use pikv_core::plan::LayerShape;
use pikv_core::rope::Rope;
use pikv_core::warp::LANES;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is counted as a hit, for [`CacheConfig::hits`](crate::CacheConfig::hits).
///
/// A row *wants*, of all pages of a KV head that left the ring, those with the highest bounds on its scores
/// ([`Read::Quest`](crate::Read::Quest) reads by the same bounds), whether they are held or not; where rows read the pages of their
/// experts only, those of its experts. A wanted page that lies in the first tier is a *hit*; a page that lost some of its tokens counts by
/// the share of them that is held. A wanted page that was evicted, lies in a lower tier or on another rank of a fabric, or is of an expert
/// that is not fetched, is a *miss*. Both are counted in pages.
///
/// A page counts from the time on when none of its tokens can be taken back, looked at every 32 positions. So that pages that were evicted
/// can be wanted, the extremes of each channel of a page's keys stay when it goes: 4 bytes a channel of K, rounded up to 32 channels, which
/// is 3.1 % of a page in 16 bits. Those of pages that are held are kept too; [`Cache::bytes_at`](crate::Cache::bytes_at) and
/// [`Usage::ghosts`](crate::Usage::ghosts) count them.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, StreamingLlm};
/// use pikv::{Attend, Cache, CacheConfig, Dtype, Hits, LayerShape, Layout, Output, StepReport};
///
/// let layout = Layout { k_dim: 4, v_dim: 4, k: Dtype::F32, v: Dtype::F32 };
/// let layer = LayerShape { kv_heads: 1, query_heads: 2, layout, window: None, rope: None };
/// let config = CacheConfig::new(vec![layer], 1 << 20).ring(32).hits(Hits::new().pages(2).every(1));
/// let cache = Cache::new(config.evict(Eviction::new(StreamingLlm, Budget::Tokens(100))))?;
/// let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
/// for position in 0..256 {
///     // The keys of the first 64 tokens are what every query looks for.
///     let key = if position < 64 { 1.0 } else { 0.0 };
///     let mut step = cache.begin([(&mut sequence, 1)])?;
///     step.append(0, &[key; 4], &[0.5; 4])?;
///     step.attend(0, &[1.0; 8], &Attend::new(0.5), Output::new(&mut [0.0; 8]))?;
///     step.commit_with(&mut report)?;
/// }
/// // Two pages were wanted by the last row; the oldest tokens are gone.
/// assert_eq!((report.hits(0), report.misses(0)), (&[0.0][..], &[2.0][..]));
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hits {
    /// Pages of each KV head that a row wants, at least 1; 16 by default, which is 512 tokens.
    pub pages: u32,
    /// Rows at positions that are a multiple of this are looked at, at least 1; 4 by default.
    pub every: u32,
    /// Pages of each KV head of a sequence that are known at most, the newest; 4096 by default, which is 131,072 tokens.
    pub known: u32,
}

impl Default for Hits {
    fn default() -> Hits {
        Hits { pages: 16, every: 4, known: 4096 }
    }
}

impl Hits {
    /// The defaults.
    pub fn new() -> Hits {
        Hits::default()
    }

    /// Sets the pages that a row wants.
    pub fn pages(mut self, pages: u32) -> Hits {
        self.pages = pages;
        self
    }

    /// Sets how many positions apart rows are looked at.
    pub fn every(mut self, positions: u32) -> Hits {
        self.every = positions;
        self
    }

    /// Sets the pages that are known.
    pub fn known(mut self, pages: u32) -> Hits {
        self.known = pages;
        self
    }
}

/// Pages of a sheet.
pub(crate) const SHEET: usize = 8;

/// The tokens of a page: what its expert was given from position `first` to `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub expert: u16,
    pub first: u32,
    pub last: u32,
}

/// Bytes of all sheets of a cache, those that forks share once.
#[derive(Debug, Default)]
pub(crate) struct Total {
    bytes: AtomicU64,
    /// Whether what is given back is overwritten.
    wipe: bool,
}

impl Total {
    pub fn new(wipe: bool) -> Total {
        Total { bytes: AtomicU64::new(0), wipe }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Up to 8 pages; forks share it.
#[derive(Debug)]
struct Sheet {
    marks: Vec<Mark>,
    /// `[pages][rows]`: the least value of a channel in the low half, the largest in the high one.
    words: Vec<[u32; LANES]>,
    rows: usize,
    of: Arc<Total>,
}

/// Bytes of a sheet of keys of so many rows of 32 channels.
fn sheet_bytes(rows: usize) -> u64 {
    (size_of::<Sheet>() + SHEET * (size_of::<Mark>() + rows * size_of::<[u32; LANES]>())) as u64
}

/// Bytes of so many known pages of a KV head, as whole sheets.
pub(crate) fn bytes(layout: &Layout, pages: u64) -> u64 {
    pages.div_ceil(SHEET as u64) * sheet_bytes(bound::rows(layout.k_dim))
}

impl Sheet {
    fn new(rows: usize, of: &Arc<Total>) -> Sheet {
        of.bytes.fetch_add(sheet_bytes(rows), Ordering::Relaxed);
        let (marks, words) = (Vec::with_capacity(SHEET), Vec::with_capacity(SHEET * rows));
        Sheet { marks, words, rows, of: of.clone() }
    }
}

impl Clone for Sheet {
    fn clone(&self) -> Sheet {
        let mut copy = Sheet::new(self.rows, &self.of);
        copy.marks.extend_from_slice(&self.marks);
        copy.words.extend_from_slice(&self.words);
        copy
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        self.of.bytes.fetch_sub(sheet_bytes(self.rows), Ordering::Relaxed);
        if self.of.wipe {
            wipe(&mut self.words);
        }
    }
}

/// Tokens of an expert that are not a page yet.
#[derive(Clone, Debug)]
struct Open {
    expert: u16,
    tokens: u32,
    first: u32,
    words: Vec<[u32; LANES]>,
    wipe: bool,
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.wipe {
            wipe(&mut self.words);
        }
    }
}

/// Overwrites what nobody reads again.
fn wipe(words: &mut [[u32; LANES]]) {
    words.as_flattened_mut().fill(0);
    std::hint::black_box(words);
}

/// The known pages of a KV head, by ascending position of their last token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ghosts {
    /// All but the last are full.
    sheets: VecDeque<Arc<Sheet>>,
    /// By expert.
    open: Vec<Open>,
    /// Tiles of 32 positions that were looked at, from the first on.
    done: u32,
}

/// The form in which extremes are kept: that of the keys where it has 16 bits, and bf16, rounded outwards, for others. The length of a
/// pair that is turned as it is read can be more than f16 holds.
pub(crate) fn dtype(layout: &Layout, rope: Option<&Rope>) -> Dtype {
    if layout.k == Dtype::F16 && rope.is_none() { Dtype::F16 } else { Dtype::Bf16 }
}

/// The largest value of the form that is not above `x`.
fn below(dtype: Dtype, x: f32) -> u32 {
    // Of zeros the one without a sign, so that it does not matter which of them is the least.
    let x = x + 0.0;
    if dtype == Dtype::F16 {
        return u32::from(f16::from_f32(x).to_bits());
    }
    let (bits, largest) = (x.to_bits(), Dtype::Bf16.largest());
    match x < 0.0 && bits & 0xffff != 0 {
        false => bits >> 16,
        true if x < -largest => (-largest).to_bits() >> 16,
        true => (bits >> 16) + 1,
    }
}

/// Least and largest value in one word.
fn word(dtype: Dtype, least: f32, most: f32) -> u32 {
    let above = match below(dtype, -most) {
        0 => 0,
        bits => bits ^ 0x8000,
    };
    below(dtype, least) | above << 16
}

/// [`word`] the other way.
fn extremes(dtype: Dtype, word: u32) -> (f32, f32) {
    (dtype.decode(word & 0xffff), dtype.decode(word >> 16))
}

/// Of whom the pages of a tile are.
struct Tile<'a> {
    shape: &'a LayerShape,
    /// Position of the first token.
    first: u32,
    /// The expert of each token; none of sinks, and of tokens that are not filed.
    homes: &'a [Option<u16>; LANES],
    total: &'a Arc<Total>,
}

impl Ghosts {
    /// Adds the tokens of a tile of the ring, whose keys are in `words`.
    fn add(&mut self, tile: &Tile<'_>, words: &[u32]) {
        let LayerShape { layout, rope, .. } = tile.shape;
        let (dtype, rows) = (dtype(layout, rope.as_ref()), bound::rows(layout.k_dim));
        let mut wide = vec![[0.0; LANES]; 2 * rows];
        let mut key = [0.0; MAX_DIM as usize];
        let key = &mut key[..layout.k_dim as usize];
        // The group that is being widened, as f32.
        let mut at: Option<usize> = None;
        for (lane, home) in (0..).zip(tile.homes) {
            let Some(expert) = *home else { continue };
            if at.is_none_or(|at| self.open[at].expert != expert) {
                self.close(at, dtype, &wide);
                at = Some(self.open(expert, dtype, &mut wide, tile.total.wipe));
            }
            let Some(open) = at.and_then(|at| self.open.get_mut(at)) else { continue };
            if open.tokens == 0 {
                open.first = tile.first + lane;
            }
            layout.read_key(words, lane, key);
            bound::widen(&mut wide, key, rope.as_ref());
            open.tokens += 1;
            if open.tokens == PAGE {
                self.close(at, dtype, &wide);
                let at = at.take().unwrap_or_default();
                self.fill(at, tile.first + lane, tile.total);
            }
        }
        self.close(at, dtype, &wide);
    }

    /// The group of an expert, its extremes in `wide`.
    fn open(&mut self, expert: u16, dtype: Dtype, wide: &mut [[f32; LANES]], wipe: bool) -> usize {
        let at = self.open.partition_point(|open| open.expert < expert);
        if self.open.get(at).is_none_or(|open| open.expert != expert) {
            let words = vec![[0; LANES]; wide.len() / 2];
            self.open.insert(at, Open { expert, tokens: 0, first: 0, words, wipe });
        }
        let open = &self.open[at];
        for (pair, words) in wide.as_chunks_mut::<2>().0.iter_mut().zip(&open.words) {
            let [least, most] = pair;
            for ((least, most), word) in least.iter_mut().zip(most).zip(words) {
                (*least, *most) = match open.tokens {
                    0 => (f32::INFINITY, f32::NEG_INFINITY),
                    _ => extremes(dtype, *word),
                };
            }
        }
        at
    }

    /// Puts the extremes of a group back.
    fn close(&mut self, at: Option<usize>, dtype: Dtype, wide: &[[f32; LANES]]) {
        let Some(open) = at.and_then(|at| self.open.get_mut(at)) else { return };
        for ([least, most], words) in wide.as_chunks::<2>().0.iter().zip(&mut open.words) {
            for ((least, most), to) in least.iter().zip(most).zip(words) {
                *to = word(dtype, *least, *most);
            }
        }
    }

    /// Makes a page of a group of 32 tokens, the last at `last`.
    fn fill(&mut self, at: usize, last: u32, total: &Arc<Total>) {
        let open = &mut self.open[at];
        let mark = Mark { expert: open.expert, first: open.first, last };
        open.tokens = 0;
        if self.sheets.back().is_none_or(|sheet| sheet.marks.len() == SHEET) {
            self.sheets.push_back(Arc::new(Sheet::new(open.words.len(), total)));
        }
        if let Some(sheet) = self.sheets.back_mut().map(Arc::make_mut) {
            sheet.marks.push(mark);
            sheet.words.extend_from_slice(&open.words);
        }
    }

    /// Frees pages that no row sees any more whose window starts at `seen` or later, and those before the newest `known` as of a row
    /// that sees what lies before `floor`: whole sheets, so up to 7 pages more stay. Rows go by [`Ghosts::seen`], which does not see them.
    fn forget(&mut self, seen: u32, floor: u32, known: usize) {
        while let Some(sheet) = self.sheets.front() {
            let before = self.before(floor);
            let gone = sheet.marks.len() == SHEET
                && (before >= known + SHEET || sheet.marks.last().is_some_and(|mark| mark.last < seen));
            if !gone {
                return;
            }
            self.sheets.pop_front();
        }
    }

    /// Pages whose tokens all lie before `floor`.
    fn before(&self, floor: u32) -> usize {
        let after = |sheet: &&Arc<Sheet>| sheet.marks.iter().any(|mark| mark.last >= floor);
        let late = self.sheets.iter().rev().take_while(after);
        let late: usize =
            late.map(|sheet| sheet.marks.iter().filter(|mark| mark.last >= floor).count()).sum();
        self.sheets.iter().map(|sheet| sheet.marks.len()).sum::<usize>() - late
    }

    /// The newest `known` pages whose tokens all lie before `floor`, the oldest first: of each the tokens, and `[rows]` of extremes.
    pub fn seen(&self, floor: u32, known: usize) -> impl Iterator<Item = (Mark, &[[u32; LANES]])> {
        let before = self.before(floor);
        let all = self.sheets.iter().flat_map(|sheet| {
            sheet.marks.iter().zip(sheet.words.chunks_exact(sheet.rows)).map(|(mark, words)| (*mark, words))
        });
        all.take(before).skip(before.saturating_sub(known))
    }

    /// Bytes of the lists, from their capacities; without the sheets.
    pub fn table_bytes(&self) -> u64 {
        let words: usize = self.open.iter().map(|open| size_of_val(&open.words[..])).sum();
        let lists =
            self.open.capacity() * size_of::<Open>() + self.sheets.capacity() * size_of::<Arc<Sheet>>();
        (lists + words) as u64
    }
}

impl Inner {
    /// What is counted as a hit, if anybody asks.
    pub fn hits(&self) -> Option<Hits> {
        self.asked.load(Ordering::Relaxed).then_some(self.config.hits.unwrap_or_default())
    }

    /// Has hits counted, and pages known that leave the ring from now on.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Rows of a step at `first` know pages whose tokens all lie before this.
    pub fn known_before(&self, first: u32) -> u32 {
        let kept = self.store.ring.kept_from(first);
        kept - kept % PAGE
    }
}

impl Layer {
    /// Takes the extremes of the keys of tokens that can no longer be taken back at `len` tokens, if hits are counted. Their tiles are
    /// still in the ring. Those of a device that fails stay unknown.
    pub fn remember(&mut self, inner: &Inner, shape: &LayerShape, len: u32) {
        let Some(hits) = inner.hits() else { return };
        let until = inner.known_before(len) / PAGE;
        let done = self.heads.first().map_or(0, |head| head.ghosts.done);
        if done >= until {
            return;
        }
        for tile in done.max(self.first_tile)..until {
            let first = tile * PAGE;
            let home = |lane: usize| {
                let chain = self.chain_of(inner, shape, first + lane as u32)?;
                chain.checked_sub(1).map(|expert| expert as u16)
            };
            let homes: [Option<u16>; LANES] = std::array::from_fn(home);
            if homes.iter().all(Option::is_none) {
                continue;
            }
            let tile_of = Tile { shape, first, homes: &homes, total: &inner.ghosts };
            let at = (tile - self.first_tile) as usize;
            #[cfg(feature = "cuda")]
            if let Some(device) = inner.config.backend.device() {
                let words = shape.layout.v_base() as usize;
                let places: Vec<(u64, usize)> =
                    self.heads.iter().map(|head| (head.ring[at].address(), words)).collect();
                let heads = &mut self.heads;
                let _ = device.read_all(&places, |read| {
                    let read = read.chunks_exact(words);
                    heads.iter_mut().zip(read).for_each(|(head, words)| head.ghosts.add(&tile_of, words));
                });
                continue;
            }
            for head in &mut self.heads {
                head.ghosts.add(&tile_of, head.ring[at].words());
            }
        }
        let slack = inner.store.ring.slack();
        let floor = inner.known_before(len.saturating_sub(slack));
        let seen = shape.window.map_or(0, |window| len.saturating_sub(window.saturating_add(slack)));
        for head in &mut self.heads {
            head.ghosts.done = until;
            head.ghosts.forget(seen, floor, hits.known as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_are_rounded_outwards_and_stay_as_they_are() {
        let values =
            [0.0, -0.0, 1.0, -1.0, 1.000_001, -1.000_001, 3.4e38, -3.4e38, f32::MAX, f32::MIN, 1e-42, -1e-42];
        for (dtype, values) in [(Dtype::Bf16, &values[..]), (Dtype::F16, &values[..4])] {
            for x in values {
                let (least, most) = extremes(dtype, word(dtype, *x, *x));
                let largest = Dtype::Bf16.largest();
                assert!(least <= *x || *x < -largest, "{x}: {least}");
                assert!(most >= *x || *x > largest, "{x}: {most}");
                assert!(least.is_finite() && most.is_finite(), "{x}: {least} to {most}");
                assert_eq!(word(dtype, least, most), word(dtype, *x, *x), "{x}");
                assert!(least.to_bits() != (-0f32).to_bits() && most.to_bits() != (-0f32).to_bits());
            }
        }
    }
}
