//! Which pages of the pool a row reads.

use crate::filing::Head;
use crate::lanes::Lanes;
use pikv_core::bound::bound;
use pikv_core::warp::{Kernel, LANES, Warp};

/// What is read of a head's expert pages.
#[derive(Clone, Debug)]
pub(crate) enum Selection {
    /// The chains of these experts.
    Experts(Vec<u16>),
    /// Of the full pages these, by chain and ordinal, ascending; the others all.
    Pages(Vec<(usize, u32)>),
}

impl Selection {
    /// Whether the page at `ordinal` of chain `c` is read; `full` if it takes no more tokens.
    pub fn reads(&self, c: usize, ordinal: u32, full: bool) -> bool {
        match self {
            Selection::Experts(experts) => experts.iter().any(|e| usize::from(*e) + 1 == c),
            Selection::Pages(pages) => !full || pages.binary_search(&(c, ordinal)).is_ok(),
        }
    }
}

/// The bounds of pages under some queries, the largest of the queries' for each page.
struct Bounds<'a> {
    /// `[queries][rows]`
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

/// The `n` full pages of a head with the highest bounds under `queries`, `[queries][rows]`; of equals the lower in order.
pub(crate) fn highest(
    head: &Head,
    lanes: Lanes,
    queries: &[[f32; LANES]],
    rows: usize,
    n: usize,
) -> Selection {
    let (mut ids, mut pages) = (Vec::new(), Vec::new());
    for (c, chain) in head.chains.iter().enumerate().skip(1) {
        for (ordinal, entry) in (chain.first..).zip(&chain.entries) {
            if let Some(bounds) = entry.bounds.as_deref().filter(|_| entry.live != 0) {
                ids.push((c, ordinal));
                pages.push(bounds);
            }
        }
    }
    let mut bounds = vec![0.0; pages.len()];
    lanes.run(Bounds { queries, rows, pages: &pages, out: &mut bounds });
    let mut order: Vec<usize> = (0..ids.len()).collect();
    if n < order.len() {
        if n > 0 {
            order.select_nth_unstable_by(n - 1, |a, b| bounds[*b].total_cmp(&bounds[*a]).then(a.cmp(b)));
        }
        order.truncate(n);
    }
    let mut chosen: Vec<(usize, u32)> = order.into_iter().map(|i| ids[i]).collect();
    chosen.sort_unstable();
    Selection::Pages(chosen)
}
