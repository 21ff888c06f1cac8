//! What runs on the lanes: a block of pages for some query rows, and the end of a row.

use pikv_core::attend::{BLOCK, PageRef, Query, Sight, attend_block};
use pikv_core::merge::{Partial, finish};
use pikv_core::page::Layout;
use pikv_core::rope::Rotation;
use pikv_core::warp::{Kernel, LANES, Warp};

/// Rows in bundles of powers of two that are at most `most` wide: first row and width of each.
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

/// One block of pages for all rows of an item.
pub struct Block<'a> {
    pub layout: &'a Layout,
    pub pages: &'a [PageRef<'a>],
    pub next: Option<&'a [u32]>,
    pub q: &'a [f32],
    /// Of each row, in the pool and in the ring.
    pub sights: &'a [(Sight, Sight)],
    pub ring: bool,
    pub softcap: Option<f32>,
    pub rotation: Option<Rotation<'a>>,
    pub out: Partial<'a>,
    pub raw: Option<&'a mut [[[f32; LANES]; BLOCK]]>,
}

impl Block<'_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize, at: usize) {
        let channels = self.layout.k_channels() as usize;
        let mut sight = [Sight::NONE; R];
        for (r, sight) in sight.iter_mut().enumerate() {
            let (pool, ring) = self.sights[row + r];
            *sight = if self.ring { ring } else { pool };
        }
        let query = Query {
            q: self.q[at..at + channels * R].as_chunks().0,
            k_dim: self.layout.k_dim as usize,
            sight,
            softcap: self.softcap,
            rotation: self.rotation,
        };
        let raw = self.raw.as_deref_mut().map(|raw| &mut raw[row..row + R]);
        attend_block::<W, R>(w, self.layout, self.pages, self.next, &query, &mut self.out, row, raw);
    }
}

impl Kernel for Block<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(mut self, w: W) {
        let channels = self.layout.k_channels() as usize;
        for (row, width) in bundles(self.sights.len(), W::ROWS) {
            let at = row * channels;
            match width {
                8 => self.rows::<W, 8>(w, row, at),
                4 => self.rows::<W, 4>(w, row, at),
                2 => self.rows::<W, 2>(w, row, at),
                _ => self.rows::<W, 1>(w, row, at),
            }
        }
    }
}

/// Output and log-sum-exp of one row.
pub struct Finish<'a> {
    pub layout: &'a Layout,
    pub m: f32,
    pub l: f32,
    pub acc: &'a [[f32; LANES]],
    pub out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Out = f32;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> f32 {
        finish(w, self.layout, self.m, self.l, self.acc, self.out)
    }
}
