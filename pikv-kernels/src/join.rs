//! The fixed tree over the partial results of a row, and the output of the row: one block per row, in one launch.
//!
//! A row's tree is joined level by level. The warps of the block divide the joins of a level, which are independent, and all of them
//! wait between one level and the next. The first warp then writes the output.

use crate::args::{HeadArg, JoinArg, LayoutArg, RowArg};
use crate::gpu::{Lane, thread};
use core::slice;
use pikv_core::codec::back::{WORK, take_back};
use pikv_core::merge::{Partial, finish, merge};
use pikv_core::page::Layout;
use pikv_core::{LANES, Warp};

/// The lists of a launch. The kernels take each address as a parameter of its own: of addresses within a struct the compiler does not know
/// that they are of global memory, and accesses them by generic loads and stores.
pub(crate) struct Lists {
    /// A row for each block of the launch.
    pub rows: *const RowArg,
    /// Joins of all bundles, level by level, and the bounds of the levels.
    pub joins: *const JoinArg,
    pub bounds: *const u32,
    /// Heads of the maps, and for each warp of the launch working memory.
    pub heads: *const HeadArg,
    pub work: *mut [[f32; LANES]; WORK],
    /// All partial results.
    pub parts: *mut f32,
}

/// The sums of one row of a partial result of `rows` rows, and the addresses of its exponent and of its sum of weights.
///
/// # Safety
/// `parts` must have the partial result at `at`, with `acc_rows` rows of lanes for each row.
#[inline(always)]
unsafe fn row_of(parts: *mut f32, at: u64, of: &RowArg, acc_rows: u32) -> (*mut f32, *mut f32, *mut f32) {
    let (rows, row, stride) = (of.rows as usize, of.row as usize, acc_rows as usize * LANES);
    // SAFETY: the caller's promise.
    unsafe {
        let part = parts.add(at as usize);
        let m = part.add(rows * stride + row);
        (part.add(row * stride), m, m.add(rows))
    }
}

/// Merges the row of two partial results into the left one.
///
/// # Safety
/// The requirements of [`join_rows`], for this merge.
#[inline(always)]
unsafe fn merge_row(lanes: Lane, of: &RowArg, parts: *mut f32, join: &JoinArg) {
    let floats = join.acc_rows as usize * LANES;
    // SAFETY: by the caller's promise: the two do not overlap, and no other warp has the row of either.
    let [mut left, right] = [join.left, join.right].map(|at| unsafe {
        let (acc, m, l) = row_of(parts, at, of, join.acc_rows);
        Partial {
            m: slice::from_raw_parts_mut(m, 1),
            l: slice::from_raw_parts_mut(l, 1),
            acc: slice::from_raw_parts_mut(acc, floats).as_chunks_mut().0,
        }
    });
    merge(lanes, &mut left, &right);
}

/// Maps the row of a partial result over packed pages back to the channels of its head.
///
/// # Safety
/// The requirements of [`join_rows`], for this map.
#[inline(always)]
unsafe fn map_back(lanes: Lane, layout: &Layout, of: &RowArg, lists: &Lists, join: &JoinArg) {
    let parts = lists.parts;
    // The working memory is that of the warp's last map.
    lanes.sync();
    // SAFETY: by the caller's promise: an output and its working memory belong to the warp, and no other writes its input.
    unsafe {
        let HeadArg { packed, map } = *lists.heads.add(join.head as usize);
        let packed = packed.packed();
        let (from_acc, to_acc) = (packed.acc_rows(), layout.acc_rows());
        let (from, m, l) = row_of(parts, join.right, of, from_acc);
        let (to, to_m, to_l) = row_of(parts, join.left, of, to_acc);
        let (m, l) = (*m, *l);
        (*to_m, *to_l) = (m, l);
        if m == f32::NEG_INFINITY {
            return;
        }
        let acc = slice::from_raw_parts(from.cast::<[f32; LANES]>(), from_acc as usize);
        let out = slice::from_raw_parts_mut(to.cast::<[f32; LANES]>(), to_acc as usize);
        let work = &mut *lists.work.add(thread::warp_index() as usize);
        take_back(lanes, &packed, layout, &map.stored(), (l, acc), out, work);
    }
}

/// Joins the partial results of the block's row, and returns the row: complete, and visible to all threads of the block.
///
/// # Safety
/// The requirements of [`join_rows`].
#[inline(always)]
unsafe fn join(lanes: Lane, layout: &Layout, lists: &Lists) -> RowArg {
    // SAFETY: by the caller's promise on the lists; control flow down to the barrier depends only on the block's row and the level.
    unsafe {
        let of = *lists.rows.add(thread::block_index() as usize);
        let bounds = lists.bounds.add(of.bounds as usize);
        for level in 0..of.levels as usize {
            let end = *bounds.add(level + 1);
            let mut at = *bounds.add(level) + thread::warp_of_block();
            while at < end {
                let join = *lists.joins.add(at as usize);
                if join.head == JoinArg::MERGE {
                    merge_row(lanes, &of, lists.parts, &join);
                } else {
                    map_back(lanes, layout, &of, lists, &join);
                }
                at += thread::warps_of_block();
            }
            thread::sync_threads();
        }
        of
    }
}

/// Joins the partial results of rows, one block per row: the tree of each row, level by level. `rows`: [`RowArg`] of each block. `joins`: of
/// all bundles, level by level; `bounds`: of their levels. `heads`: of the maps; `work`: [`WORK`] rows for each warp, of any content.
///
/// # Safety
/// The pointers must be valid for the memory described; the joins of a level must not meet, apart from partial results that both only
/// read, nor the trees of different bundles; no row of a bundle may occur twice; as many blocks as rows must be launched, of whole warps, at
/// most [`JOINING`](crate::JOINING).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn join_rows(
    layout: LayoutArg,
    rows: *const RowArg,
    joins: *const JoinArg,
    bounds: *const u32,
    heads: *const HeadArg,
    work: *mut [[f32; LANES]; WORK],
    parts: *mut f32,
) {
    let layout = layout.layout();
    let lists = Lists { rows, joins, bounds, heads, work, parts };
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's joins.
    unsafe { join(Lane::new(), &layout, &lists) };
}

/// A row of a partial result to finish, with an output of `T`.
pub(crate) struct End<'a, T> {
    /// Index of the output.
    pub to: usize,
    /// Exponent and sum of the row.
    pub m: f32,
    pub l: f32,
    pub acc: &'a [f32],
    pub out: &'a mut [T],
}

impl<'a, T> End<'a, T> {
    /// The block's row, after its joins; none in all warps of the block but the first.
    ///
    /// # Safety
    /// The requirements of [`finish_rows`].
    #[inline(always)]
    pub unsafe fn of(lanes: Lane, layout: &Layout, lists: &Lists, out: *mut T) -> Option<End<'a, T>> {
        // SAFETY: the caller's promise, also on `out`; each output belongs to one block.
        unsafe {
            let of = join(lanes, layout, lists);
            if thread::warp_of_block() > 0 {
                return None;
            }
            let (width, to) = (layout.v_dim as usize, of.out as usize);
            let (acc, m, l) = row_of(lists.parts, of.part, &of, layout.acc_rows());
            let acc = slice::from_raw_parts(acc, layout.acc_rows() as usize * LANES);
            Some(End { to, m: *m, l: *l, acc, out: slice::from_raw_parts_mut(out.add(to * width), width) })
        }
    }
}

impl End<'_, f32> {
    /// Writes the output and returns the log-sum-exp.
    #[inline(always)]
    pub fn finish(&mut self, lanes: Lane, layout: &Layout) -> f32 {
        finish(lanes, layout, self.m, self.l, self.acc.as_chunks().0, self.out)
    }
}

/// [`join_rows`], then finishes the rows: output `i` is written to `out[i]`, `v_dim` f32 long, and its log-sum-exp to `ends[i][0]`, followed
/// by the row's exponent and sum, which show an overflow.
///
/// # Safety
/// The requirements of [`join_rows`]; no output may occur twice in the rows.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn finish_rows(
    layout: LayoutArg,
    rows: *const RowArg,
    joins: *const JoinArg,
    bounds: *const u32,
    heads: *const HeadArg,
    work: *mut [[f32; LANES]; WORK],
    parts: *mut f32,
    out: *mut f32,
    ends: *mut [f32; 3],
) {
    let layout = layout.layout();
    let lists = Lists { rows, joins, bounds, heads, work, parts };
    // SAFETY: the caller's own promise, also on `ends`; whole warps are launched, and control flow depends only on the warp's joins.
    unsafe {
        let lanes = Lane::new();
        let Some(mut end) = End::of(lanes, &layout, &lists, out) else { return };
        let lse = end.finish(lanes, &layout);
        *ends.add(end.to) = [lse, end.m, end.l];
    }
}
