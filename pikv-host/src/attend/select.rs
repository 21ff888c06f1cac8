//! Selection of the expert pages that a row reads.

use crate::base::ids::{Place, run_place};
use crate::codec::HeadCodec;
use crate::pages::entry::Entry;
use crate::pages::head::HeadPages;
use crate::pages::run::Run;
use pikv_core::bound;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use pikv_lanes::Lanes;

/// Expert pages of a head that a row reads.
#[derive(Clone, Debug)]
pub(crate) enum Selection {
    /// The tokens of these home experts.
    Experts(Vec<u16>),
    /// `chosen` (run and ordinal, ascending) among the pages that were full before the row's step, and all other pages. Tokens from
    /// `floor` on were then in the ring.
    Pages { chosen: Vec<(usize, u32)>, floor: u32 },
}

impl Selection {
    /// Lanes, a bit each, that are read from the page of an entry of run `c`; of the sinks, all lanes with tokens.
    pub fn lanes(&self, c: usize, entry: &Entry) -> u32 {
        match (self, run_place(c)) {
            (Selection::Experts(experts), Place::Run(run)) => entry.live & entry.homes.among(run, experts),
            (Selection::Pages { chosen, floor }, Place::Run(_)) => {
                let is_read =
                    bounds(entry, *floor).is_none() || chosen.binary_search(&(c, entry.ordinal)).is_ok();
                if is_read { entry.live } else { 0 }
            }
            _ => entry.live,
        }
    }
}

/// Bounds of a page, if it was full once all tokens before `floor` were filed. A row's choice of pages then does not depend on the number of
/// later tokens in its step.
fn bounds(entry: &Entry, floor: u32) -> Option<&[[f32; LANES]]> {
    let bounds = entry.bounds.as_deref()?;
    entry.last().is_some_and(|last| last < floor).then_some(bounds)
}

/// Converts the queries of a row for a KV head, `[group][k_dim]`, for bounds: `[group][rows]`. `stretch` is the factor by which scaled
/// RoPE enlarges products of rotated channels.
pub(crate) fn folded(shape: &LayerShape, stretch: f32, queries: &[f32], all: &mut Vec<[f32; LANES]>) {
    let (k_dim, rope) = (shape.layout.k_dim, shape.rope.as_ref());
    let rows = bound::rows(k_dim);
    all.clear();
    all.resize(rows * shape.group() as usize, [0.0; LANES]);
    for (query, folded) in queries.chunks_exact(k_dim as usize).zip(all.chunks_exact_mut(rows)) {
        bound::fold(query, rope, folded);
        if let Some(rope) = rope {
            let turned = &mut folded.as_flattened_mut()[..rope.rotary_dim as usize];
            turned.iter_mut().for_each(|x| *x *= stretch);
        }
    }
}

/// Index of the first page of a run with a live token at position `lo`, where the row's window starts, or later.
fn seen_from(run: &Run, codec: Option<&HeadCodec>, lo: u32) -> usize {
    if lo == 0 {
        return 0;
    }
    // Positions of a run ascend.
    let seen = |entry: &Entry| {
        let last = entry.live.checked_ilog2().and_then(|lane| entry.position(codec, lane));
        last.is_some_and(|last| last >= lo)
    };
    run.entries.iter().position(seen).unwrap_or(run.entries.len())
}

/// Queries for bounds of pages, `[queries][rows]` with `rows` rows of lanes each.
pub(crate) struct BoundQueries<'a> {
    pub lanes: Lanes,
    pub queries: &'a [[f32; LANES]],
    pub rows: usize,
}

/// Puts the indices of the `n` largest values into `order`, in no order; the lower index wins a tie.
pub(crate) fn largest(of: &[f32], n: usize, order: &mut Vec<usize>) {
    order.clear();
    order.extend(0..of.len());
    if n < order.len() {
        if n > 0 {
            order.select_nth_unstable_by(n - 1, |a, b| of[*b].total_cmp(&of[*a]).then(a.cmp(b)));
        }
        order.truncate(n);
    }
}

/// The `n` full pages of a head, as of `floor`, with the highest bounds under the queries among those with a token at position `lo` or
/// later; the lower run and ordinal win a tie.
pub(crate) fn highest(
    head: &HeadPages,
    codec: Option<&HeadCodec>,
    (lo, floor): (u32, u32),
    asked: &BoundQueries<'_>,
    n: usize,
) -> Selection {
    let (mut ids, mut pages) = (Vec::new(), Vec::new());
    for (c, run) in head.runs.experts() {
        let from = seen_from(run, codec, lo);
        for entry in run.entries.range(from..) {
            if let Some(bounds) = bounds(entry, floor).filter(|_| entry.live != 0) {
                ids.push((c, entry.ordinal));
                pages.push(bounds);
            }
        }
    }
    let mut most = vec![0.0; pages.len()];
    pikv_lanes::bounds::largest(asked.lanes, asked.queries, asked.rows, &pages, &mut most);
    let mut order = Vec::new();
    largest(&most, n, &mut order);
    let mut chosen: Vec<(usize, u32)> = order.into_iter().map(|i| ids[i]).collect();
    chosen.sort_unstable();
    Selection::Pages { chosen, floor }
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_highest_come_first_of_equals() {
        let sorted = |of: &[f32], n| {
            let mut highest = vec![7; 7];
            largest(of, n, &mut highest);
            highest.sort_unstable();
            highest
        };
        assert_eq!(sorted(&[1.0, 3.0, 2.0, 3.0, 3.0], 2), [1, 3]);
        assert_eq!(sorted(&[1.0, f32::NEG_INFINITY], 5), [0, 1]);
        assert_eq!(sorted(&[], 5), [0usize; 0]);
    }
}
