//! Attention of query rows over a block of pages, and the output of a row.

use crate::Lanes;
#[cfg(target_arch = "x86_64")]
use crate::tile::Bf16Pairs;
use crate::tile::{self, Tile};
use pikv_core::attend::{BLOCK, Form, Looks, Sight, attend_block};
use pikv_core::codec::factors::{FactorPages, FactorScratch};
use pikv_core::codec::packed::Packed;
use pikv_core::codec::read::{Back, Folded, PackedPages, PackedRef, Scratch};
use pikv_core::full::{Full, PageRef, Query};
use pikv_core::merge::{Partial, finish};
use pikv_core::page::Layout;
use pikv_core::rope::Rotation;
use pikv_core::warp::{Holds, Kernel, LANES, Warp};
use std::ops::Range;

/// Splits rows into bundles, powers of two at most `most` wide: first row and width of each.
pub fn bundles(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut row = 0;
    std::iter::from_fn(move || {
        let left = (rows - row).min(most);
        (left > 0).then(|| {
            let width = 1 << left.ilog2();
            row += width;
            (row - width, width)
        })
    })
}

/// Most rows per bundle for packed pages: wider bundles gain nothing, as unpacking is then shared enough.
pub const PACKED_ROWS: usize = 4;

/// Arguments that the rows of a block share.
#[derive(Clone, Copy)]
pub struct Common<'a> {
    /// Places of channels and positions in a full page.
    pub layout: &'a Layout,
    /// Positions that each row sees, in the pool and in the ring: `[rows]`.
    pub sights: &'a [(Sight, Sight)],
    /// Whether the pages are those of the ring.
    pub ring: bool,
    /// Logits are capped by `softcap * tanh(logit / softcap)`.
    pub softcap: Option<f32>,
    /// Largest width of a bundle: that of the lanes, and at most [`PACKED_ROWS`] for packed pages.
    pub most: usize,
    /// Queries in bundles: `[bundle][k_channels][width]`.
    pub q: &'a [f32],
    /// Rotation to apply to keys that are stored unrotated.
    pub rotation: Option<Rotation<'a>>,
    /// The queries as [`round_queries`](tile::round_queries) rounds them: the rows of a tile are then computed with rounded queries and
    /// weights, and their results differ. Empty for exact results.
    pub rounded: &'a [u32],
}

impl<'a> Common<'a> {
    #[inline(always)]
    fn looks<const R: usize>(&self, row: usize) -> Looks<R> {
        let mut sight = [Sight::NONE; R];
        for (r, sight) in sight.iter_mut().enumerate() {
            let (pool, ring) = self.sights[row + r];
            *sight = if self.ring { ring } else { pool };
        }
        Looks { sight, softcap: self.softcap }
    }

    #[inline(always)]
    pub(crate) fn query<const R: usize>(&self, row: usize) -> Query<'a, R> {
        let channels = self.layout.k_channels() as usize;
        Query {
            q: self.q[row * channels..][..channels * R].as_chunks().0,
            k_dim: self.layout.k_dim as usize,
            rotation: self.rotation,
        }
    }
}

/// Output of the weights of every row and page, `[rows][pages]`; `None` if they are not kept.
pub type Raw<'a> = Option<&'a mut [[f32; LANES]]>;

/// Attends, and copies the weights out.
#[inline(always)]
fn attend_rows<W: Warp, P: Form<W, R>, const R: usize>(
    w: W,
    form: &mut P,
    looks: &Looks<R>,
    out: &mut Partial<'_>,
    first: usize,
    raw: Option<&mut [[f32; LANES]]>,
) {
    let pages = form.pages();
    // Weights of a whole block are written to their place directly, and cleared only if they are asked for: this runs for
    // every block.
    let (place, raw) = match raw {
        Some(raw) if pages == BLOCK => (Some(raw.as_chunks_mut().0), None),
        raw => (None, raw),
    };
    let mut weights = if raw.is_some() { Some([[[0.0; LANES]; BLOCK]; R]) } else { None };
    // One call for all cases: its body is large.
    let to = place.or(weights.as_mut().map(|weights| &mut weights[..]));
    attend_block(w, form, looks, out, first, to);
    if let (Some(raw), Some(weights)) = (raw.filter(|_| pages > 0), &weights) {
        for (raw, weights) in raw.chunks_exact_mut(pages).zip(weights) {
            raw.copy_from_slice(&weights[..pages]);
        }
    }
}

/// A block whose rows are attended in bundles.
pub(crate) trait Rows {
    /// Attends to the `R` rows from `row` on. Must be `#[inline(always)]`, like [`Kernel::run`].
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize);

    /// [`Rows::rows`], compiled only for lanes whose registers hold `R` rows; other lanes never get wider bundles.
    #[inline(always)]
    fn if_held<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        if Holds::<W, R>::YES {
            self.rows::<W, R>(w, row);
        } else {
            unreachable!("a bundle is no wider than the lanes");
        }
    }
}

/// The rows of a block in bundles that are at most `most` wide.
#[inline(always)]
pub(crate) fn each_bundle<W: Warp>(w: W, rows: Range<usize>, most: usize, block: &mut impl Rows) {
    for (row, width) in bundles(rows.len(), most) {
        let row = rows.start + row;
        match width {
            8 => block.if_held::<W, 8>(w, row),
            4 => block.if_held::<W, 4>(w, row),
            2 => block.if_held::<W, 2>(w, row),
            _ => block.rows::<W, 1>(w, row),
        }
    }
}

/// One block of full pages for rows `first..` of an item.
pub struct Block<'a> {
    /// Arguments that the rows share.
    pub common: Common<'a>,
    /// The pages, at most [`BLOCK`].
    pub pages: &'a [PageRef<'a>],
    /// The pages that are read after these; empty if there are none.
    pub next: [&'a [u32]; 2],
    /// Partial results, from row `first` on.
    pub out: Partial<'a>,
    /// Row of `out` for the first row.
    pub first: usize,
    /// Output of the rows' weights.
    pub raw: Raw<'a>,
    /// Working memory to attend many rows together, each page widened once for all of them; few rows do not use it. With `None` rows
    /// are attended in bundles, however many there are: the bits are the same.
    pub tile: Option<&'a mut Tile>,
}

impl Block<'_> {
    /// Attends on `lanes`, and writes `out`, and `raw` if given.
    ///
    /// # Panics
    /// If there are more pages than [`BLOCK`], or a slice does not fit the rows or the pages.
    pub fn run(mut self, lanes: Lanes) {
        #[cfg(target_arch = "x86_64")]
        if !self.common.rounded.is_empty()
            && let Some(pairs) = Bf16Pairs::of(lanes)
            && let Some(tile) = self.tile.take()
        {
            return pairs.attend(self, tile);
        }
        lanes.run(self);
    }
}

impl Rows for Block<'_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        let (common, pages, next) = (&self.common, self.pages, self.next);
        let mut form = Full { layout: common.layout, pages, next, query: common.query::<R>(row) };
        let raw = self.raw.as_deref_mut().map(|raw| &mut raw[row * pages.len()..][..R * pages.len()]);
        attend_rows(w, &mut form, &common.looks(row), &mut self.out, self.first + row, raw);
    }
}

impl Kernel for Block<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(mut self, w: W) {
        let (rows, most) = (self.common.sights.len(), self.common.most);
        match self.tile.take() {
            Some(tile) if tile::pays(rows, most) => tile::attend(w, self, tile),
            _ => each_bundle(w, 0..rows, most, &mut self),
        }
    }
}

/// One block of packed pages for all rows of an item.
pub struct PackedBlock<'a> {
    /// Arguments that the rows share.
    pub common: Common<'a>,
    /// Layout and codes of a page.
    pub packed: &'a Packed,
    /// Map from stored keys to the head's channels; `None` if the codec maps none. Used only with a rotation.
    pub back: Option<Back<'a>>,
    /// The pages, at most [`BLOCK`].
    pub pages: &'a [PackedRef<'a>],
    /// The page that is read after these; empty if there is none.
    pub next: &'a [u32],
    /// `[rows][k_cols]` rows of queries, folded by the codec.
    pub folded: &'a [[f32; LANES]],
    /// Start of each row's scores.
    pub start: &'a [f32],
    /// Working memory for keys that are rebuilt before their rotation; empty without one.
    pub rebuilt: &'a mut [[f32; LANES]],
    /// Partial results, from row `first` on.
    pub out: Partial<'a>,
    /// Row of `out` for the first row.
    pub first: usize,
    /// Output of the rows' weights.
    pub raw: Raw<'a>,
}

impl PackedBlock<'_> {
    /// Attends on `lanes`, and writes `out`, and `raw` if given.
    ///
    /// # Panics
    /// If there are more pages than [`BLOCK`], or a slice does not fit the rows or the pages.
    pub fn run(self, lanes: Lanes) {
        lanes.run(self);
    }
}

impl Rows for PackedBlock<'_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        let (common, packed, pages) = (&self.common, self.packed, self.pages);
        let cols = packed.query_cols() as usize;
        let mut start = [0.0; R];
        start.copy_from_slice(&self.start[row..row + R]);
        let folded = Folded {
            rows: &self.folded[row * cols..][..R * cols],
            start,
            whole: common.rotation.map(|_| (self.back, common.query::<R>(row))),
        };
        let raw = self.raw.as_deref_mut().map(|raw| &mut raw[row * pages.len()..][..R * pages.len()]);
        if packed.factored() {
            let mut scratch = FactorScratch::default();
            let mut form =
                FactorPages::new(packed, pages, self.next, folded, &mut scratch, &mut *self.rebuilt);
            return attend_rows(w, &mut form, &common.looks(row), &mut self.out, self.first + row, raw);
        }
        let mut scratch = Scratch::default();
        let mut form = PackedPages::new(packed, pages, self.next, folded, &mut scratch, &mut *self.rebuilt);
        attend_rows(w, &mut form, &common.looks(row), &mut self.out, self.first + row, raw);
    }
}

impl Kernel for PackedBlock<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(mut self, w: W) {
        for (row, width) in bundles(self.common.sights.len(), self.common.most) {
            match width {
                4 => self.if_held::<W, 4>(w, row),
                2 => self.if_held::<W, 2>(w, row),
                _ => self.rows::<W, 1>(w, row),
            }
        }
    }
}

/// Output and log-sum-exp of one row.
pub struct Finish<'a> {
    /// Places of a value's channels in `acc`.
    pub layout: &'a Layout,
    /// Exponent of the row's weights.
    pub m: f32,
    /// Sum of the row's weights.
    pub l: f32,
    /// Weighted sum of the values.
    pub acc: &'a [[f32; LANES]],
    /// The row's output, `[v_dim]`.
    pub out: &'a mut [f32],
}

impl Finish<'_> {
    /// Writes `out` on `lanes` and returns the row's log-sum-exp.
    pub fn run(self, lanes: Lanes) -> f32 {
        lanes.run(self)
    }
}

impl Kernel for Finish<'_> {
    type Out = f32;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> f32 {
        finish(w, self.layout, self.m, self.l, self.acc, self.out)
    }
}
