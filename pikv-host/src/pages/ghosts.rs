//! Bounds of the pages of a KV head, held or not: the least and largest value of each channel of their keys, by which queries rank
//! pages.
//!
//! A page here is 32 tokens of one expert in the order of filing. It is known once no rollback can reach its tokens, and rows ignore
//! later positions. So a rollback, a dropped step or a refused step changes nothing here,
//! and the pages that a row can want depend on its position alone. Ghosts are known pages that are not held any more.

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

/// Tokens of a page: those of its expert from position `first` to `last`.
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
    /// `[pages][rows]`: the least value of a channel in the low half, the largest in the high half.
    words: Vec<[u32; LANES]>,
    rows: usize,
    of: Arc<Total>,
}

/// Bytes of a sheet for keys of `rows` rows of 32 channels.
fn sheet_bytes(rows: usize) -> u64 {
    (size_of::<Sheet>() + SHEET * (size_of::<Mark>() + rows * size_of::<[u32; LANES]>())) as u64
}

/// Bytes of `pages` known pages of a KV head, in whole sheets.
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
    /// Empties the sheet for reuse.
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

/// Tokens of an expert that do not fill a page yet.
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

/// Overwrites words that are not read again.
fn wipe(words: &mut [[u32; LANES]]) {
    words.as_flattened_mut().fill(0);
    std::hint::black_box(words);
}

/// Known pages of a KV head, by ascending position of their last token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ghosts {
    /// All but the last are full.
    sheets: VecDeque<Arc<Sheet>>,
    /// By expert.
    open: Vec<Open>,
    /// Number of leading tiles of 32 positions that were added.
    pub done: u32,
    /// Empty sheets for reuse, up to two, because a tile can fill two pages.
    spare: SmallVec<[Arc<Sheet>; 2]>,
}

/// Dtype of the bounds: f16 for keys in f16 without RoPE, else bf16, rounded outwards. With RoPE a bound is the length of a pair, which
/// f16 may not hold.
pub(crate) fn dtype(layout: &Layout, rope: Option<&Rope>) -> Dtype {
    if layout.k == Dtype::F16 && rope.is_none() { Dtype::F16 } else { Dtype::Bf16 }
}

/// The largest value of the dtype that is not above `x`.
fn below(dtype: Dtype, x: f32) -> u32 {
    // Zero without a sign, so that the result does not depend on which zero is least.
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

/// The inverse of [`word`].
fn extremes(dtype: Dtype, word: u32) -> (f32, f32) {
    (dtype.decode(word & 0xffff), dtype.decode(word >> 16))
}

/// Tokens of a tile.
pub(crate) struct Tile<'a> {
    pub shape: &'a LayerShape,
    /// Position of the first token.
    pub first: u32,
    /// Home expert of each token; `None` for sinks and for tokens that are not filed.
    pub homes: &'a [Option<u16>; LANES],
    pub total: &'a Arc<Total>,
}

impl Ghosts {
    /// Adds the tokens of a ring tile; `words` has their keys.
    pub fn add(&mut self, tile: &Tile<'_>, words: &[u32]) {
        let LayerShape { layout, rope, .. } = tile.shape;
        let (dtype, rows) = (dtype(layout, rope.as_ref()), bound::rows(layout.k_dim));
        let mut wide = [[0.0; LANES]; 2 * bound::rows(MAX_DIM)];
        let wide = &mut wide[..2 * rows];
        let mut key = [0.0; MAX_DIM as usize];
        let key = &mut key[..layout.k_dim as usize];
        // Index of the group whose bounds are in `wide` as f32.
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

    /// Index of the group of an expert; loads its bounds into `wide`.
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

    /// Stores the bounds of a group.
    fn close(&mut self, at: Option<usize>, dtype: Dtype, wide: &[[f32; LANES]]) {
        let Some(open) = at.and_then(|at| self.open.get_mut(at)) else { return };
        for ([least, most], words) in wide.as_chunks::<2>().0.iter().zip(&mut open.words) {
            for ((least, most), to) in least.iter().zip(most).zip(words) {
                *to = word(dtype, *least, *most);
            }
        }
    }

    /// Turns a group of 32 tokens, the last at `last`, into a known page.
    fn fill(&mut self, at: usize, last: u32, total: &Arc<Total>) {
        let open = &mut self.open[at];
        let mark = Mark { expert: open.expert, first: open.first, last };
        open.tokens = 0;
        if self.sheets.back().is_none_or(|sheet| sheet.marks.len() == SHEET) {
            let spare = self.spare.pop().and_then(|mut sheet| {
                // A fork may share it.
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

    /// Frees pages that lie before all windows that start at `seen` or later, and all but the newest `known` pages before
    /// `floor`: whole sheets, so up to 7 more pages stay. [`Ghosts::seen`] does not return those to rows.
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

    /// Number of pages whose tokens all lie before `floor`.
    fn before(&self, floor: u32) -> usize {
        let after = |sheet: &&Arc<Sheet>| sheet.marks.iter().any(|mark| mark.last >= floor);
        let late = self.sheets.iter().rev().take_while(after);
        let late: usize =
            late.map(|sheet| sheet.marks.iter().filter(|mark| mark.last >= floor).count()).sum();
        self.sheets.iter().map(|sheet| sheet.marks.len()).sum::<usize>() - late
    }

    /// The newest `known` pages whose tokens all lie before `floor`, oldest first: tokens and `[rows]` of bounds.
    pub fn seen(&self, floor: u32, known: usize) -> impl Iterator<Item = (Mark, &[[u32; LANES]])> {
        let before = self.before(floor);
        let all = self.sheets.iter().flat_map(|sheet| {
            sheet.marks.iter().zip(sheet.words.chunks_exact(sheet.rows)).map(|(mark, words)| (*mark, words))
        });
        all.take(before).skip(before.saturating_sub(known))
    }

    /// Bytes of the lists, from their capacities, without the sheets.
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
