//! Rows of a call that are in device memory: gathers queries, checks keys and values as they are written, and writes results in place. One
//! warp per row.
//!
//! Several warps write to one bundle, each the words of its own row, as in [`crate::attend`]. Values that a host would reject are recorded
//! in a word for each cause: the row in the upper half, and the bits of the value in the lower; of several rows the first is kept.

use crate::args::{
    CopyArg, FoldArg, FoldMapArg, HeadArg, JoinArg, LayoutArg, QueryArg, RopeArg, RowArg, TensorArg, WriteArg,
};
use crate::attend::turns;
use crate::gpu::{Lane, thread};
use crate::join::{End, Lists};
use crate::store::{copy_after, parts};
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};
use pikv_core::codec::back::WORK;
use pikv_core::codec::fold::fold;
use pikv_core::page::Layout;
use pikv_core::rope::Rotation;
use pikv_core::rows::{beyond, bundle, sound};
use pikv_core::tensor::Row;
use pikv_core::{LANES, Warp, store};

/// Records that element `index` is at fault.
///
/// # Safety
/// `fault` must point to a 64-bit word that only this function accesses while the kernel runs.
#[inline(always)]
pub(crate) unsafe fn note(fault: *mut u64, index: u32, value: f32) {
    // SAFETY: the caller's promise.
    let fault = unsafe { AtomicU64::from_ptr(fault) };
    fault.fetch_min(u64::from(index) << 32 | u64::from(value.to_bits()), Ordering::Relaxed);
}

/// The warp's entry of a list of `count`; none for warps past the last entry.
///
/// # Safety
/// The list must have `count` entries.
#[inline(always)]
pub(crate) unsafe fn entry<T: Copy>(list: *const T, count: u32) -> Option<T> {
    let index = thread::warp_index();
    // SAFETY: the caller's promise.
    (index < count).then(|| unsafe { *list.add(index as usize) })
}

impl TensorArg {
    /// Row `row` of rows of `width` elements of `T`.
    ///
    /// # Safety
    /// The row must exist, with elements of `T`.
    #[inline(always)]
    pub(crate) unsafe fn row<'a, T>(&self, row: u32, width: u32) -> &'a [T] {
        let width = width as usize;
        // SAFETY: the caller's promise.
        unsafe { slice::from_raw_parts((self.at as *const T).add(row as usize * width), width) }
    }
}

/// Writes `count` queries, rows of `q`, `[rows][k_dim]` in f32, into bundles of `[channels][rows]`, the channels padded to whole words:
/// rotated to their positions, if there is a rotation, and times `factor`. `fault` records the first element of `q` that is not finite.
///
/// # Safety
/// The pointers must be valid for the memory described, no row of a bundle may occur twice in `list`, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn gather_queries(
    layout: LayoutArg,
    q: TensorArg,
    factor: f32,
    rope: RopeArg,
    table: *const f32,
    list: *const QueryArg,
    count: u32,
    bundles: *mut f32,
    fault: *mut u64,
) {
    let layout = layout.layout();
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's query.
    unsafe {
        let Some(of) = entry(list, count) else { return };
        let q = q.row::<f32>(of.query, layout.k_dim);
        gather_one(Lane::new(), &layout, q, factor, (&rope, table), &of, bundles, fault);
    }
}

/// # Safety
/// The requirements of [`gather_queries`], for the query `q`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the parameters of the kernels that it is the body of")]
pub(crate) unsafe fn gather_one(
    lanes: Lane,
    layout: &Layout,
    q: impl Row<Lane>,
    factor: f32,
    (rope, table): (&RopeArg, *const f32),
    of: &QueryArg,
    bundles: *mut f32,
    fault: *mut u64,
) {
    let QueryArg { bundle: to, query, position, row, width } = *of;
    let width = width as usize;
    // SAFETY: the caller's promise.
    unsafe {
        let table = turns(rope, table);
        let rotation = rope.rope().map(|r| Rotation { rope: r, table, capacity: rope.capacity });
        let out = slice::from_raw_parts_mut(bundles.add(to as usize), layout.k_channels() as usize * width);
        if let Some((channel, value)) = beyond(lanes, q, f32::MAX) {
            note(fault, query * layout.k_dim + channel, value);
        }
        bundle(lanes, q, rotation.as_ref().map(|r| (r, position)), factor, (row as usize, width), out);
    }
}

/// Folds `count` queries, rows of `q`, `[rows][k_dim]` in f32, through the maps of codecs, times `factor`. Writes each folded query and
/// the start of its scores to `folded`.
///
/// # Safety
/// The pointers must be valid for the memory described, the places in `list` must not overlap, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn fold_queries(
    layout: LayoutArg,
    q: TensorArg,
    factor: f32,
    maps: *const FoldMapArg,
    list: *const FoldArg,
    count: u32,
    folded: *mut f32,
) {
    let layout = layout.layout();
    let index = thread::warp_index();
    if index >= count {
        return;
    }
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's query.
    unsafe {
        let FoldArg { to, start, query, map } = *list.add(index as usize);
        let FoldMapArg { map, narrow, cols } = *maps.add(map as usize);
        let q = q.row::<f32>(query, layout.k_dim);
        let out = slice::from_raw_parts_mut(folded.add(to as usize).cast::<[f32; LANES]>(), cols as usize);
        let from = fold(Lane::new(), map.back().as_ref(), q, factor, narrow as usize, out);
        *folded.add(start as usize) = from;
    }
}

/// [`append`](crate::store::append) of unchecked f32, with the same copies: `limits` are the largest magnitudes that each of `heads` heads accepts in a
/// key and in a value. The two `faults` record the first element of `k` and of `v` that is beyond its limit.
///
/// # Safety
/// The requirements of [`append`](crate::store::append).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn append_rows(
    layout: LayoutArg,
    k: TensorArg,
    v: TensorArg,
    writes: *const WriteArg,
    count: u32,
    heads: u32,
    limits: *const [f32; 2],
    faults: *mut u64,
    copies: *const CopyArg,
    copied: u32,
) {
    let layout = layout.layout();
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's token.
    unsafe {
        let Some(write) = entry(writes, count) else { return copy_after(&layout, count, copies, copied) };
        let WriteArg { position, row, .. } = write;
        let lanes = Lane::new();
        let (page, key, value) = parts(&layout, &write, k.at as *const f32, v.at as *const f32);
        let [k_limit, v_limit] = *limits.add((row % heads) as usize);
        if let Some((channel, x)) = beyond(lanes, key, k_limit) {
            note(faults, row * layout.k_dim + channel, x);
        }
        if let Some((channel, x)) = beyond(lanes, value, v_limit) {
            note(faults.add(1), row * layout.v_dim + channel, x);
        }
        store::append(lanes, &layout, page, write.lane(), position, key, value);
    }
}

/// [`finish_rows`](crate::join::finish_rows) for results in f32 that stay on the device: writes the log-sum-exp of output `i` to
/// `lse[i]`, unless that is null; `fault` records a row whose scores or values overflow.
///
/// # Safety
/// The requirements of [`finish_rows`](crate::join::finish_rows).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn finish_in_place(
    layout: LayoutArg,
    rows: *const RowArg,
    joins: *const JoinArg,
    bounds: *const u32,
    heads: *const HeadArg,
    work: *mut [[f32; LANES]; WORK],
    parts: *mut f32,
    out: TensorArg,
    lse: *mut f32,
    fault: *mut u64,
) {
    let layout = layout.layout();
    let lists = Lists { rows, joins, bounds, heads, work, parts };
    // SAFETY: the caller's own promise, also on `lse` and `fault`; whole warps are launched, and control flow depends only on the warp's
    // joins.
    unsafe {
        let lanes = Lane::new();
        let Some(mut end) = End::of(lanes, &layout, &lists, out.at as *mut f32) else { return };
        let of = end.finish(lanes, &layout);
        if !lse.is_null() {
            *lse.add(end.to) = of;
        }
        lanes.sync();
        if !sound(lanes, end.m, end.l, end.out) {
            note(fault, end.to as u32, 0.0);
        }
    }
}
