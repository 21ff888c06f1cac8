//! Upper bounds on the scores of queries on pages.

use crate::Lanes;
use pikv_core::bound::{self, bound};
use pikv_core::dtype::{Bf16, Dtype, Element, F16};
use pikv_core::page::MAX_DIM;
use pikv_core::warp::{Kernel, LANES, Warp};
use std::marker::PhantomData;

/// Most rows of 32 channels of a key.
const MOST_ROWS: usize = bound::rows(MAX_DIM);

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

/// Writes to `out`, for each of `pages`, the largest bound of any query; -inf without queries. `queries` is `[queries][rows]` rows
/// of lanes; a page is the bounds of its keys' channels, in the layout of [`mod@bound`].
pub fn largest(
    lanes: Lanes,
    queries: &[[f32; LANES]],
    rows: usize,
    pages: &[&[[f32; LANES]]],
    out: &mut [f32],
) {
    lanes.run(Bounds { queries, rows, pages, out });
}

/// [`largest`] for pages whose bounds are stored in 16 bits: word `c` of a page has channel `c`'s least value in its low half and the
/// largest in its high half, both in one dtype.
struct Halves<'a, E> {
    queries: &'a [[f32; LANES]],
    rows: usize,
    pages: &'a [&'a [[u32; LANES]]],
    out: &'a mut [f32],
    dtype: PhantomData<E>,
}

impl<E: Element> Kernel for Halves<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let mut extremes = [[0.0; LANES]; 2 * MOST_ROWS];
        for (page, out) in self.pages.iter().zip(self.out) {
            for (words, pair) in page.iter().zip(extremes.as_chunks_mut::<2>().0) {
                let words = w.load(words);
                w.store(E::channel(w, words, 0), &mut pair[0]);
                w.store(E::channel(w, words, 1), &mut pair[1]);
            }
            let mut most = f32::NEG_INFINITY;
            for query in self.queries.chunks_exact(self.rows) {
                let x = bound(w, query, &extremes);
                if x > most {
                    most = x;
                }
            }
            *out = most;
        }
    }
}

/// [`largest`] for pages of `[rows][32]` words, each with a channel's least value in its low half and the largest in its high half,
/// in `dtype`: bf16 or f16.
///
/// # Panics
/// If a page has more rows than a key can have.
pub fn largest_of_halves(
    lanes: Lanes,
    dtype: Dtype,
    queries: &[[f32; LANES]],
    rows: usize,
    pages: &[&[[u32; LANES]]],
    out: &mut [f32],
) {
    assert!(rows <= MOST_ROWS, "{rows} rows");
    match dtype {
        Dtype::F16 => lanes.run(Halves { queries, rows, pages, out, dtype: PhantomData::<F16> }),
        _ => lanes.run(Halves { queries, rows, pages, out, dtype: PhantomData::<Bf16> }),
    }
}
