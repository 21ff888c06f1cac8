//! Upper bounds of the scores that queries can reach on pages.

use crate::Lanes;
use pikv_core::bound::bound;
use pikv_core::warp::{Kernel, LANES, Warp};

struct Bounds<'a> {
    queries: &'a [[f32; LANES]],
    rows: usize,
    pages: &'a [&'a [[f32; LANES]]],
    out: &'a mut [f32],
}

impl Kernel for Bounds<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        for (page, out) in self.pages.iter().zip(self.out) {
            let mut most = f32::NEG_INFINITY;
            for query in self.queries.chunks_exact(self.rows) {
                let x = bound(w, query, page);
                if x > most {
                    most = x;
                }
            }
            *out = most;
        }
    }
}

/// Writes to `out` for each of `pages` the largest bound of any query, -inf without queries. `queries` is `[queries][rows]` rows of
/// lanes; a page is the extremes of its keys' channels, as [`bound`] reads them.
pub fn largest(
    lanes: Lanes,
    queries: &[[f32; LANES]],
    rows: usize,
    pages: &[&[[f32; LANES]]],
    out: &mut [f32],
) {
    lanes.run(Bounds { queries, rows, pages, out });
}
