//! What stays of the pages of a KV head whether or not they are held: the least and the largest value of each channel of their keys, by
//! which a query says what it wants.
//!
//! A page is here what 32 tokens of one expert are, in the order in which they were filed. It is known once none of its tokens can be
//! taken back any more, and positions that can be are not looked at: so a rollback, a dropped step or a refused one changes nothing here,
//! and which pages a row can want is a function of its position alone. Ghosts are pages that are known and no longer held.

mod save;

use crate::memory::ghost_bytes::Total;
use half::f16;
use pikv_core::bound;
use pikv_core::dtype::Dtype;
use pikv_core::page::{Layout, MAX_DIM, PAGE};
use pikv_core::plan::LayerShape;
use pikv_core::rope::Rope;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;

/// Pages of a sheet.
pub(crate) const SHEET: usize = 8;

/// The tokens of a page: what its expert was given from position `first` to `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub expert: u16,
    pub first: u32,
    pub last: u32,
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
        of.add(sheet_bytes(rows));
        let (marks, words) = (Vec::with_capacity(SHEET), Vec::with_capacity(SHEET * rows));
        Sheet { marks, words, rows, of: of.clone() }
    }
}

impl Sheet {
    /// Empties it.
    fn clear(&mut self) {
        if self.of.wipe {
            wipe(&mut self.words);
        }
        self.marks.clear();
        self.words.clear();
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
        self.of.take(sheet_bytes(self.rows));
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
    pub done: u32,
    /// Those that were forgotten, for the next that are needed: a tile can fill two.
    spare: SmallVec<[Arc<Sheet>; 2]>,
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
pub(crate) struct Tile<'a> {
    pub shape: &'a LayerShape,
    /// Position of the first token.
    pub first: u32,
    /// The expert of each token; none of sinks, and of tokens that are not filed.
    pub homes: &'a [Option<u16>; LANES],
    pub total: &'a Arc<Total>,
}

impl Ghosts {
    /// Adds the tokens of a tile of the ring, whose keys are in `words`.
    pub fn add(&mut self, tile: &Tile<'_>, words: &[u32]) {
        let LayerShape { layout, rope, .. } = tile.shape;
        let (dtype, rows) = (dtype(layout, rope.as_ref()), bound::rows(layout.k_dim));
        let mut wide = [[0.0; LANES]; 2 * bound::rows(MAX_DIM)];
        let wide = &mut wide[..2 * rows];
        let mut key = [0.0; MAX_DIM as usize];
        let key = &mut key[..layout.k_dim as usize];
        // The group that is being widened, as f32.
        let mut at: Option<usize> = None;
        for (lane, home) in (0..).zip(tile.homes) {
            let Some(expert) = *home else { continue };
            if at.is_none_or(|at| self.open[at].expert != expert) {
                self.close(at, dtype, wide);
                at = Some(self.open(expert, dtype, wide, tile.total.wipe));
            }
            let Some(open) = at.and_then(|at| self.open.get_mut(at)) else { continue };
            if open.tokens == 0 {
                open.first = tile.first + lane;
            }
            layout.read_key(words, lane, key);
            bound::widen(wide, key, rope.as_ref());
            open.tokens += 1;
            if open.tokens == PAGE {
                self.close(at, dtype, wide);
                let at = at.take().unwrap_or_default();
                self.fill(at, tile.first + lane, tile.total);
            }
        }
        self.close(at, dtype, wide);
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
            let spare = self.spare.pop().and_then(|mut sheet| {
                // A fork may have it too.
                Arc::get_mut(&mut sheet)?.clear();
                Some(sheet)
            });
            self.sheets.push_back(spare.unwrap_or_else(|| Arc::new(Sheet::new(open.words.len(), total))));
        }
        if let Some(sheet) = self.sheets.back_mut().map(Arc::make_mut) {
            sheet.marks.push(mark);
            sheet.words.extend_from_slice(&open.words);
        }
    }

    /// Frees pages that no row sees any more whose window starts at `seen` or later, and those before the newest `known` as of a row
    /// that sees what lies before `floor`: whole sheets, so up to 7 pages more stay. Rows go by [`Ghosts::seen`], which does not see them.
    pub fn forget(&mut self, seen: u32, floor: u32, known: usize) {
        while let Some(sheet) = self.sheets.front() {
            let before = self.before(floor);
            let gone = sheet.marks.len() == SHEET
                && (before >= known + SHEET || sheet.marks.last().is_some_and(|mark| mark.last < seen));
            if !gone {
                return;
            }
            let sheet = self.sheets.pop_front();
            self.spare.extend(sheet.filter(|_| self.spare.len() < 2));
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
