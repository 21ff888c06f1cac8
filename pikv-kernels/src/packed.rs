//! Attention over packed pages, as they lie: [`crate::attend`] for pages that a codec wrote.
//!
//! Keys that are turned as they are read are not for these kernels: their queries cannot be folded.

use crate::args::{PackedArg, SightArg, TaskArg};
use crate::gpu::{Lane, thread};
use core::slice;
use pikv_core::LANES;
use pikv_core::attend::{BLOCK, Looks, Sight, attend_block};
use pikv_core::codec::read::{Folded, FoldedPages, PackedPages, PackedRef, Scratch};
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;

/// # Safety
/// As [`attend_packed_r1`] and its sibling.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn attend<const R: usize>(
    packed: &PackedArg,
    q: *const f32,
    start: *const f32,
    pages: *const *const u32,
    live: *const u32,
    last: *const u32,
    by: *const u32,
    tasks: *const TaskArg,
    count: u32,
    sights: *const SightArg,
    softcap: f32,
    scratch: *mut Scratch<R>,
    parts: *mut f32,
    raw: *mut f32,
) {
    let packed = packed.packed();
    let index = thread::warp_index();
    if index >= count {
        return;
    }
    // SAFETY: by the caller's promise on `tasks`.
    let task = unsafe { *tasks.add(index as usize) };
    let mut list = [PackedRef { words: &[], live: 0, last: 0, by: 0 }; BLOCK];
    for (i, page) in list.iter_mut().enumerate() {
        if i < task.count as usize {
            // SAFETY: by the caller's promise on the lists of pages: the block's pages, at most BLOCK of them.
            unsafe {
                let at = task.pages as usize + i;
                page.words = slice::from_raw_parts(*pages.add(at), packed.words() as usize);
                (page.live, page.last, page.by) = (*live.add(at), *last.add(at), *by.add(at));
            }
        }
    }
    let rows = R * packed.k_cols() as usize;
    let len = Partial::len(R, packed.acc_rows());
    let (mut starts, mut sight) = ([0.0; R], [Sight::NONE; R]);
    let bundle = task.q as usize / (rows * LANES);
    for r in 0..R {
        // SAFETY: by the caller's promise on `start` and `sights`.
        unsafe {
            starts[r] = *start.add(bundle * R + r);
            sight[r] = (*sights.add(task.sights as usize + r)).sight();
        }
    }
    // SAFETY: by the caller's promise on `q`, `scratch` and `parts`; a warp has a scratch and a part of its own, whose words
    // its lanes share out.
    let (q, scratch, part) = unsafe {
        (
            slice::from_raw_parts(q.add(task.q as usize).cast::<[f32; LANES]>(), rows),
            &mut *scratch.add(index as usize),
            slice::from_raw_parts_mut(parts.add(task.part as usize), len),
        )
    };
    // SAFETY: whole warps are launched, and what decides control flow is the warp's task.
    let lanes = unsafe { Lane::new() };
    let mut part = Partial::new(part, R, packed.acc_rows());
    let looks = Looks { sight, softcap: (softcap > 0.0).then_some(softcap) };
    let folded = Folded { rows: q, start: starts, whole: None };
    let pages = &list[..task.count as usize];
    let mut form = PackedPages::new(lanes, &packed, pages, None, folded, scratch, &mut []);
    // SAFETY: by the caller's promise on `raw`: [`ROW`] f32 a row, the task's own.
    let mut raw =
        (!raw.is_null()).then(|| unsafe { slice::from_raw_parts_mut(raw.add(task.raw as usize), R * ROW) });
    let weights = raw.as_mut().map(|raw| raw.as_chunks_mut().0.as_chunks_mut().0);
    attend_block(lanes, &mut FoldedPages(&mut form), &looks, &mut part, 0, weights);
    if let Some(raw) = raw {
        raw[R * (ROW - 1)..].copy_from_slice(part.m);
    }
}

macro_rules! attend {
    ($($name:ident $rows:literal),*) => {$(
        #[doc = concat!("Attends bundles of ", $rows, " query rows over blocks of packed pages, a warp a task.")]
        ///
        /// `q`: bundles of `[rows][k_cols][32]`, as [`Folded`] has them. `start`: what their scores start from, bundles of
        /// `[rows]`. `pages`, `live`, `last` and `by`: every page's address and what else a [`PackedRef`] has. `sights`: bundles of
        /// `[rows]`. `softcap`: in base 2, 0 for none. `scratch`: one for each warp, 128-byte aligned, of any content. The partial
        /// result of a task, [`Partial::len`] f32 long, goes to `parts`, and unless `raw` is null its weights, [`ROW`] f32 a row,
        /// to `raw`.
        ///
        /// # Safety
        /// The pointers must reach what is described, no task may have more than 8 pages, their partial results must lie apart,
        /// and whole warps must be launched.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            packed: PackedArg,
            q: *const f32,
            start: *const f32,
            pages: *const *const u32,
            live: *const u32,
            last: *const u32,
            by: *const u32,
            tasks: *const TaskArg,
            count: u32,
            sights: *const SightArg,
            softcap: f32,
            scratch: *mut Scratch<$rows>,
            parts: *mut f32,
            raw: *mut f32,
        ) {
            // SAFETY: the caller's own promise.
            unsafe {
                attend::<$rows>(
                    &packed, q, start, pages, live, last, by, tasks, count, sights, softcap, scratch, parts, raw,
                );
            }
        }
    )*};
}

attend!(attend_packed_r1 1, attend_packed_r4 4);
