//! Attention mass: the softmax weights of pages, added up over query rows.

use crate::Lanes;
use pikv_core::warp::{Kernel, LANES, Warp};

/// The weights of some pages in the rows of one token.
pub struct Sum<'a> {
    /// `[rows][pages]`
    pub raw: &'a [[f32; LANES]],
    /// What the weights of a row count.
    pub factors: &'a [f32],
    /// `[pages][sets]`
    pub mass: &'a mut [[f32; LANES]],
    /// Sets that masses are added up for.
    pub sets: usize,
    /// Sets that the token is of, and whether it is the first.
    pub to: &'a [(usize, bool)],
}

impl Sum<'_> {
    /// Adds the weights to `mass` on `lanes`.
    pub fn run(self, lanes: Lanes) {
        lanes.run(self);
    }
}

impl Kernel for Sum<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let pages = self.mass.len() / self.sets;
        for (i, mass) in self.mass.chunks_exact_mut(self.sets).enumerate() {
            let mut sum = w.splat(0.0);
            for (row, factor) in self.raw.chunks_exact(pages).zip(self.factors) {
                sum = w.add(sum, w.mul(w.load_f(&row[i]), w.splat(*factor)));
            }
            for (set, first) in self.to {
                let before = if *first { w.splat(0.0) } else { w.load_f(&mass[*set]) };
                w.store(w.add(before, sum), &mut mass[*set]);
            }
        }
    }
}
