//! Merges two partial results of attention.

use crate::Lanes;
use pikv_core::merge::{Partial, merge};
use pikv_core::warp::{Kernel, Warp};

struct Merge<'a, 'b> {
    left: Partial<'a>,
    right: Partial<'b>,
}

impl Kernel for Merge<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(mut self, w: W) {
        merge(w, &mut self.left, &self.right);
    }
}

/// Adds `right` to `left`, which has the lower leaves; both have the same shape.
pub fn join(lanes: Lanes, left: Partial<'_>, right: Partial<'_>) {
    lanes.run(Merge { left, right });
}
