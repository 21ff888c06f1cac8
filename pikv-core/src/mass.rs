//! The attention mass of a page, by lanes: what a host sums up on one thread, for a device that keeps the weights. The bits are the
//! same.

use crate::math::exp2i;
use crate::warp::{BLOCK, LANES, Warp};

/// f32 that a block's weights take for each row: those of [`BLOCK`] pages, as `attend_block` gives them, and the block's exponent.
pub const ROW: usize = BLOCK * LANES + 1;

/// Rows whose weights lie together: `width` rows in every block, at `raw + block * width * ROW`. First the weights `[width][BLOCK]`
/// rows of lanes, then the exponents.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Rows.
    pub width: usize,
    /// Of the block that has the page.
    pub raw: &'a [f32],
    /// Exponents of the rows' whole results.
    pub m: &'a [f32],
    /// Sums of the rows' whole results.
    pub l: &'a [f32],
}

/// Adds up a page's weights, row by row, of `group` rows a token.
#[derive(Clone, Copy, Debug)]
pub struct PageSum<F> {
    /// Of the tokens so far.
    all: F,
    /// Of the rows so far of a token.
    sum: F,
    /// Rows since the last token ended.
    rows: u32,
    /// Tokens so far.
    token: u32,
}

impl<F: Copy> PageSum<F> {
    /// Goes on from `all`; the next row is the first of `token`.
    #[inline(always)]
    pub fn new<W: Warp<F = F>>(w: W, all: F, token: u32) -> Self {
        PageSum { all, sum: w.splat(0.0), rows: 0, token }
    }

    /// Takes the rows of page `page` of its block; tokens in `from..to` count.
    ///
    /// # Panics
    /// If a slice is too short.
    #[inline(always)]
    pub fn take<W: Warp<F = F>>(&mut self, w: W, of: &Rows<'_>, page: usize, group: u32, from: u32, to: u32) {
        let tops = &of.raw[of.width * BLOCK * LANES..];
        #[allow(clippy::needless_range_loop, reason = "a row is more than its exponent")]
        for r in 0..of.width {
            let top = tops[r];
            if top != f32::NEG_INFINITY {
                let weight = exp2i(top - of.m[r]) / of.l[r];
                if let Some(p) = of.raw[(r * BLOCK + page) * LANES..].first_chunk() {
                    self.sum = w.add(self.sum, w.mul(w.load_f(p), w.splat(weight)));
                }
            }
            self.rows += 1;
            if self.rows == group {
                if self.token >= from && self.token < to {
                    self.all = w.add(self.all, self.sum);
                }
                (self.sum, self.rows) = (w.splat(0.0), 0);
                self.token += 1;
            }
        }
    }

    /// The page's mass.
    #[inline(always)]
    pub fn all(self) -> F {
        self.all
    }
}
