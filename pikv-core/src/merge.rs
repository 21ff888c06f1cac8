//! Merges partial results in a fixed tree over blocks, and computes the output.
//!
//! Leaf `i` of a run of blocks is leaf `i` of a perfect binary tree; missing leaves are the identity (nothing
//! seen). So the tree does not change its shape when the run grows, and any aligned power-of-two range of leaves
//! can be reduced separately: a split, a thread or a device takes whole subtrees.

use crate::math;
use crate::page::Layout;
use crate::tensor::Results;
use crate::warp::{LANES, Warp};

/// Partial results of some query rows: for each row an exponent, a sum, and `acc_rows` rows of lanes.
///
/// For full pages, lane `i` of acc row `col * PER_WORD + j` is channel `(col * 32 + i) * PER_WORD + j` of the output; for packed
/// ones see [`Packed::acc_rows`](crate::codec::packed::Packed::acc_rows).
#[derive(Debug)]
pub struct Partial<'a> {
    /// Exponent of each row; -inf where nothing was seen.
    pub m: &'a mut [f32],
    /// Sum of 2^(score - m) of each row.
    pub l: &'a mut [f32],
    /// `[rows][acc_rows]` rows of lanes: sum of 2^(score - m) v.
    pub acc: &'a mut [[f32; LANES]],
}

impl<'a> Partial<'a> {
    /// f32 in a partial result of `rows` rows with `acc_rows` rows of lanes each.
    pub const fn len(rows: usize, acc_rows: u32) -> usize {
        rows * (2 + acc_rows as usize * LANES)
    }

    /// A partial result of `rows` rows in `buffer`, which has [`Partial::len`] f32.
    ///
    /// # Panics
    /// If the buffer is too short.
    pub fn new(buffer: &'a mut [f32], rows: usize, acc_rows: u32) -> Partial<'a> {
        let (acc, rest) = buffer.split_at_mut(rows * acc_rows as usize * LANES);
        let (m, l) = rest.split_at_mut(rows);
        Partial { m, l: &mut l[..rows], acc: acc.as_chunks_mut().0 }
    }

    /// Makes every row the identity. `acc` is not touched: it is never read while `m` is -inf.
    pub fn clear(&mut self) {
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
    }

    /// `m`, `l` and acc rows of `n` rows from `row`; `stride` is the acc rows of one row.
    pub(crate) fn rows(
        &mut self,
        row: usize,
        n: usize,
        stride: usize,
    ) -> (&mut [f32], &mut [f32], &mut [[f32; LANES]]) {
        (
            &mut self.m[row..row + n],
            &mut self.l[row..row + n],
            &mut self.acc[row * stride..(row + n) * stride],
        )
    }
}

/// `left = left + right`, row by row; `left` has the lower leaves.
#[inline(always)]
pub fn merge<W: Warp>(w: W, left: &mut Partial<'_>, right: &Partial<'_>) {
    let rows = left.m.len();
    if rows == 0 {
        return;
    }
    let stride = left.acc.len() / rows;
    for r in 0..rows {
        // Every lane reads both before any lane writes.
        let (ml, mr, ll, lr) = (left.m[r], right.m[r], left.l[r], right.l[r]);
        w.sync();
        if mr == f32::NEG_INFINITY {
            continue;
        }
        let (a, b) = (&mut left.acc[r * stride..][..stride], &right.acc[r * stride..][..stride]);
        if ml == f32::NEG_INFINITY {
            left.m[r] = mr;
            left.l[r] = lr;
            for (a, b) in a.iter_mut().zip(b) {
                w.store(w.load_f(b), a);
            }
            continue;
        }
        let m = if ml > mr { ml } else { mr };
        let (x, y) = (math::exp2i(ml - m), math::exp2i(mr - m));
        left.m[r] = m;
        left.l[r] = ll * x + lr * y;
        for (a, b) in a.iter_mut().zip(b) {
            let sum = w.add(w.mul(w.load_f(a), w.splat(x)), w.mul(w.load_f(b), w.splat(y)));
            w.store(sum, a);
        }
    }
}

/// Writes the output of one row, `out = acc / l` (`v_dim` channels), and returns the natural log-sum-exp of its scores.
/// A row that saw nothing gets zeros and -inf.
#[inline(always)]
pub fn finish<W: Warp>(
    w: W,
    layout: &Layout,
    m: f32,
    l: f32,
    acc: &[[f32; LANES]],
    out: &mut (impl Results<W> + ?Sized),
) -> f32 {
    let seen = m != f32::NEG_INFINITY;
    let per_word = layout.v.per_word() as usize;
    for (i, row) in acc.iter().enumerate() {
        let (col, j) = (i / per_word, i % per_word);
        let y = if seen { w.div(w.load_f(row), w.splat(l)) } else { w.splat(0.0) };
        out.scatter(w, y, col * LANES * per_word + j, per_word);
    }
    if seen { m * core::f32::consts::LN_2 + w.lane(math::ln(w, w.splat(l)), 0) } else { f32::NEG_INFINITY }
}
