//! Writes tokens into pages: one warp per token.
//!
//! Several warps write to one page, each the words of its own token, as in [`crate::attend`].

use crate::args::{CopyArg, LayoutArg, WriteArg};
use crate::gpu::{Lane, thread};
use core::slice;
use pikv_core::page::Layout;
use pikv_core::store;

/// The page to which a token is written.
///
/// # Safety
/// The requirements of [`append`].
#[inline(always)]
pub(crate) unsafe fn page<'a>(layout: &Layout, write: &WriteArg) -> &'a mut [f32] {
    // SAFETY: by the caller's promise.
    unsafe { slice::from_raw_parts_mut(write.page as *mut f32, layout.words() as usize) }
}

/// The page, the token's key and its value.
///
/// # Safety
/// The requirements of [`append`].
#[inline(always)]
pub(crate) unsafe fn parts<'a>(
    layout: &Layout,
    write: &WriteArg,
    k: *const f32,
    v: *const f32,
) -> (&'a mut [f32], &'a [f32], &'a [f32]) {
    let (k_dim, v_dim, row) = (layout.k_dim as usize, layout.v_dim as usize, write.row as usize);
    // SAFETY: by the caller's promise.
    unsafe {
        (
            page(layout, write),
            slice::from_raw_parts(k.add(row * k_dim), k_dim),
            slice::from_raw_parts(v.add(row * v_dim), v_dim),
        )
    }
}

/// Copies the token of a warp after the first `count` warps.
///
/// # Safety
/// The requirements of [`append`] on `copies`.
#[inline(always)]
pub(crate) unsafe fn copy_after(layout: &Layout, count: u32, copies: *const CopyArg, copied: u32) {
    let index = thread::warp_index() - count;
    if index >= copied {
        return;
    }
    let words = layout.words() as usize;
    // SAFETY: by the caller's promise; whole warps are launched, and control flow depends only on the warp's token.
    unsafe {
        let CopyArg { source, target, from, to } = *copies.add(index as usize);
        let source = slice::from_raw_parts(source as *const f32, words);
        let target = slice::from_raw_parts_mut(target as *mut f32, words);
        store::copy(Lane::new(), layout, source, from, target, to);
    }
}

/// Writes `count` tokens into pages, from f32 rows: `k` is `[rows][k_dim]`, `v` `[rows][v_dim]`. The values must fit the
/// layout's dtypes. Further warps copy `copied` other tokens from page to page.
///
/// # Safety
/// The pointers must be valid for the memory described, no position may occur twice in `writes` for a page, and whole warps must be
/// launched. The copies must be as [`copy_tokens`] requires, and neither read nor write a lane that `writes` has.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn append(
    layout: LayoutArg,
    k: *const f32,
    v: *const f32,
    writes: *const WriteArg,
    count: u32,
    copies: *const CopyArg,
    copied: u32,
) {
    let layout = layout.layout();
    // SAFETY: by the caller's promise; whole warps are launched, and control flow depends only on the warp's token.
    unsafe {
        let index = thread::warp_index();
        if index >= count {
            return copy_after(&layout, count, copies, copied);
        }
        let write = *writes.add(index as usize);
        let (page, key, value) = parts(&layout, &write, k, v);
        store::append(Lane::new(), &layout, page, write.lane(), write.position, key, value);
    }
}

/// Copies `count` tokens from page to page.
///
/// # Safety
/// The pointers must be valid for the memory described, no page may be both read and written, no lane of a page may be written twice,
/// and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn copy_tokens(layout: LayoutArg, copies: *const CopyArg, count: u32) {
    let layout = layout.layout();
    // SAFETY: the caller's own promise.
    unsafe { copy_after(&layout, 0, copies, count) };
}
