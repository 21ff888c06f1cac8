//! Attention mass of a page, by lanes, for a device that keeps the weights. The bits are those of the host's sum on one thread.

use crate::math::exp2i;
use crate::warp::{BLOCK, LANES, Warp};

/// f32 per row of a block's weights: the weights of [`BLOCK`] pages, as `attend_block` returns them, and the block's exponent.
pub const ROW: usize = BLOCK * LANES + 1;

/// Rows whose weights are stored together: `width` rows in every block, at `raw + block * width * ROW`. First the weights
/// `[width][BLOCK]` rows of lanes, then the exponents.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Number of rows.
    pub width: usize,
    /// Weights and exponents of the block that has the page.
    pub raw: &'a [f32],
    /// Exponents of the rows' merged results.
    pub m: &'a [f32],
    /// Sums of the rows' merged results.
    pub l: &'a [f32],
}

/// Sums a page's weights, row by row, with `group` rows per token.
#[derive(Clone, Copy, Debug)]
pub struct PageSum<F> {
    /// Sum over the tokens so far.
    all: F,
    /// Sum over the rows so far of the current token.
    sum: F,
    /// Rows since the last token ended.
    rows: u32,
    /// The current token.
    token: u32,
}

impl<F: Copy> PageSum<F> {
    /// Continues from `all`; the next row is the first of `token`.
    #[inline(always)]
    pub fn new<W: Warp<F = F>>(w: W, all: F, token: u32) -> Self {
        PageSum { all, sum: w.splat(0.0), rows: 0, token }
    }

    /// Adds the rows of page `page` of its block; only tokens in `from..to` count.
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
