//! Attention mass: softmax weights of pages, summed over query rows.

use crate::Lanes;
use pikv_core::warp::{Kernel, LANES, Warp};

/// Weights of some pages for the query rows of one token.
pub struct Sum<'a> {
    /// `[rows][pages]`
    pub raw: &'a [[f32; LANES]],
    /// Factor of each row's weights.
    pub factors: &'a [f32],
    /// `[pages][sets]`
    pub mass: &'a mut [[f32; LANES]],
    /// Number of sets for which masses are summed.
    pub sets: usize,
    /// Sets of this token, and whether it is the first of the set.
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
