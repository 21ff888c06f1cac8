//! Two partial results of attention joined into one.

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

/// Adds `right` to `left`, `left` being that of the lower leaves; both are of one shape.
pub fn join(lanes: Lanes, left: Partial<'_>, right: Partial<'_>) {
    lanes.run(Merge { left, right });
}
