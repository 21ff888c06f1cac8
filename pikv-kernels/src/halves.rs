//! Kernels of [`crate::rows`] for tensors of 16-bit elements: [`Halves`] are read in place, and results rounded when written. They are
//! separate kernels, because those of f32 take fewer registers.

use crate::args::{
    CopyArg, FoldArg, FoldMapArg, HeadArg, JoinArg, LayoutArg, QueryArg, RopeArg, RowArg, TensorArg, WriteArg,
};
use crate::gpu::Lane;
use crate::join::{End, Lists};
use crate::rows::{entry, gather_one, note};
use crate::store::{copy_after, page};
use core::slice;
use pikv_core::codec::back::WORK;
use pikv_core::codec::fold::fold;
use pikv_core::dtype::{Bf16, Dtype, Element, F16};
use pikv_core::merge::finish;
use pikv_core::page::Layout;
use pikv_core::rows::{beyond, sound};
use pikv_core::tensor::{Halves, Rounded, Row};
use pikv_core::{LANES, store};

/// `$body` with `$row` as a row of a 16-bit tensor in its own dtype; compiled once for each dtype.
macro_rules! halves {
    ($row:ident = $tensor:ident[$at:expr; $width:expr] => $body:expr) => {
        match $tensor.dtype() {
            Dtype::F16 => {
                let $row = Halves::<F16>::new($tensor.row($at, $width));
                $body
            }
            _ => {
                let $row = Halves::<Bf16>::new($tensor.row($at, $width));
                $body
            }
        }
    };
}

/// [`gather_queries`](crate::rows::gather_queries) for 16-bit elements.
///
/// # Safety
/// The requirements of [`gather_queries`](crate::rows::gather_queries).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn gather_halves(
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
        let lanes = Lane::new();
        halves!(q = q[of.query; layout.k_dim] => {
            gather_one(lanes, &layout, q, factor, (&rope, table), &of, bundles, fault);
        });
    }
}

/// [`fold_queries`](crate::rows::fold_queries) for 16-bit elements.
///
/// # Safety
/// The requirements of [`fold_queries`](crate::rows::fold_queries).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn fold_halves(
    layout: LayoutArg,
    q: TensorArg,
    factor: f32,
    maps: *const FoldMapArg,
    list: *const FoldArg,
    count: u32,
    folded: *mut f32,
) {
    let layout = layout.layout();
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's query.
    unsafe {
        let Some(FoldArg { to, start, query, map }) = entry(list, count) else { return };
        let FoldMapArg { map, narrow, cols } = *maps.add(map as usize);
        let (lanes, map) = (Lane::new(), map.back());
        let out = slice::from_raw_parts_mut(folded.add(to as usize).cast::<[f32; LANES]>(), cols as usize);
        *folded.add(start as usize) = halves!(q = q[query; layout.k_dim] => {
            fold(lanes, map.as_ref(), q, factor, narrow as usize, out)
        });
    }
}

/// [`append_rows`](crate::rows::append_rows) for 16-bit elements; one of `k` and `v` may be in f32.
///
/// # Safety
/// The requirements of [`append_rows`](crate::rows::append_rows).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn append_halves(
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
        let (lanes, row) = (Lane::new(), write.row);
        let [k_limit, v_limit] = *limits.add((row % heads) as usize);
        match k.dtype() {
            Dtype::F32 => key_of(lanes, &layout, &write, k.row::<f32>(row, layout.k_dim), k_limit, faults),
            _ => halves!(key = k[row; layout.k_dim] => key_of(lanes, &layout, &write, key, k_limit, faults)),
        }
        let fault = faults.add(1);
        match v.dtype() {
            Dtype::F32 => value_of(lanes, &layout, &write, v.row::<f32>(row, layout.v_dim), v_limit, fault),
            _ => {
                halves!(value = v[row; layout.v_dim] => value_of(lanes, &layout, &write, value, v_limit, fault));
            }
        }
    }
}

/// Writes the key and the position of a token, and records the first element beyond `limit`.
///
/// # Safety
/// The requirements of [`append_halves`], for this token and its key.
#[inline(always)]
unsafe fn key_of(
    lanes: Lane,
    layout: &Layout,
    write: &WriteArg,
    key: impl Row<Lane>,
    limit: f32,
    fault: *mut u64,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some((channel, x)) = beyond(lanes, key, limit) {
            note(fault, write.row * layout.k_dim + channel, x);
        }
        store::append_key(lanes, layout, page(layout, write), write.lane(), write.position, key);
    }
}

/// [`key_of`] for the value.
///
/// # Safety
/// The requirements of [`key_of`].
#[inline(always)]
unsafe fn value_of(
    lanes: Lane,
    layout: &Layout,
    write: &WriteArg,
    value: impl Row<Lane>,
    limit: f32,
    fault: *mut u64,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some((channel, x)) = beyond(lanes, value, limit) {
            note(fault, write.row * layout.v_dim + channel, x);
        }
        store::append_value(lanes, layout, page(layout, write), write.lane(), value);
    }
}

/// [`finish_in_place`](crate::rows::finish_in_place) for 16-bit elements. If the dtype of `out` does not hold an output, the output is
/// an infinity, and the second of two `faults` records it.
///
/// # Safety
/// The requirements of [`finish_in_place`](crate::rows::finish_in_place).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn finish_halves(
    layout: LayoutArg,
    rows: *const RowArg,
    joins: *const JoinArg,
    bounds: *const u32,
    heads: *const HeadArg,
    work: *mut [[f32; LANES]; WORK],
    parts: *mut f32,
    out: TensorArg,
    lse: *mut f32,
    faults: *mut u64,
) {
    let layout = layout.layout();
    let lists = Lists { rows, joins, bounds, heads, work, parts };
    // SAFETY: the caller's own promise; whole warps are launched, and control flow depends only on the warp's joins.
    unsafe {
        let lanes = Lane::new();
        let Some(end) = End::of(lanes, &layout, &lists, out.at as *mut u16) else { return };
        match out.dtype() {
            Dtype::F16 => finish_rounded::<F16>(lanes, &layout, end, lse, faults),
            _ => finish_rounded::<Bf16>(lanes, &layout, end, lse, faults),
        }
    }
}

/// # Safety
/// The requirements of [`finish_halves`].
#[inline(always)]
unsafe fn finish_rounded<E: Element>(
    lanes: Lane,
    layout: &Layout,
    end: End<'_, u16>,
    lse: *mut f32,
    faults: *mut u64,
) {
    let End { to, m, l, acc, out } = end;
    let mut out = Rounded::<E>::new(out);
    // SAFETY: the caller's promise.
    unsafe {
        let of = finish(lanes, layout, m, l, acc.as_chunks().0, &mut out);
        if !lse.is_null() {
            *lse.add(to) = of;
        }
        if !(out.finite() && sound(lanes, m, l, &[])) {
            note(faults, to as u32, 0.0);
        }
        if let Some((channel, value)) = out.beyond() {
            note(faults.add(1), to as u32 * layout.v_dim + channel, value);
        }
    }
}
