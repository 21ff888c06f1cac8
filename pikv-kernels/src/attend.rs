//! Attention over a forest of blocks: one warp a block, then the fixed tree level by level, then the end of it.
//!
//! The 32 threads of a warp each hold a `&mut` to the warp's part, of which each writes its own lane's words, and words that
//! are the same in all lanes. Rust's rules have no word for that: what it comes to is held by running the PTX itself in
//! `tests/ptx_bits.rs`, whose interpreter reports races between lanes and warps.

use crate::args::{LayoutArg, RopeArg, SightArg};
use crate::gpu::{Lane, thread};
use core::slice;
use pikv_core::LANES;
use pikv_core::attend::{BLOCK, Looks, Sight, attend_block};
use pikv_core::full::{Full, PageRef, Query};
use pikv_core::merge::{Partial, finish, merge};
use pikv_core::rope::Rotation;

/// # Safety
/// As [`attend_r1`] and its siblings.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn attend<const R: usize>(
    layout: &LayoutArg,
    q: *const f32,
    pages: *const *const u32,
    live: *const u32,
    first: *const u32,
    blocks: u32,
    sights: *const SightArg,
    softcap: f32,
    rope: &RopeArg,
    table: *const f32,
    parts: *mut f32,
) {
    let layout = layout.layout();
    let block = thread::warp_index() as usize;
    if block >= blocks as usize {
        return;
    }
    let mut list = [PageRef { words: &[], live: 0 }; BLOCK];
    // SAFETY: by the caller's promise on `first`, `pages` and `live`: the block's pages, at most BLOCK of them.
    let count = unsafe {
        let (from, to) = (*first.add(block) as usize, *first.add(block + 1) as usize);
        for (i, page) in list.iter_mut().enumerate() {
            if from + i < to {
                page.words = slice::from_raw_parts(*pages.add(from + i), layout.words() as usize);
                page.live = *live.add(from + i);
            }
        }
        to - from
    };
    let channels = layout.k_channels() as usize;
    let len = Partial::len(R, layout.acc_rows());
    // SAFETY: by the caller's promise on `q`, `table` and `parts`; a warp has a part of its own, whose words its lanes share
    // out.
    let (q, table, part) = unsafe {
        let turned = rope.rotary_dim as usize * rope.capacity as usize;
        let table = if turned == 0 { &[][..] } else { slice::from_raw_parts(table, turned) };
        (
            slice::from_raw_parts(q, channels * R),
            table,
            slice::from_raw_parts_mut(parts.add(block * len), len),
        )
    };
    let mut sight = [Sight::NONE; R];
    for (r, sight) in sight.iter_mut().enumerate() {
        // SAFETY: by the caller's promise on `sights`.
        *sight = unsafe { (*sights.add(block * R + r)).sight() };
    }
    let query = Query {
        q: q.as_chunks().0,
        k_dim: layout.k_dim as usize,
        rotation: rope.rope().map(|r| Rotation { rope: r, table, capacity: rope.capacity }),
    };
    // SAFETY: whole warps are launched, and what decides control flow is the warp's block.
    let lanes = unsafe { Lane::new() };
    let mut part = Partial::new(part, R, layout.acc_rows());
    let looks = Looks { sight, softcap: (softcap > 0.0).then_some(softcap) };
    let mut form = Full { layout: &layout, pages: &list[..count], next: None, query };
    attend_block(lanes, &mut form, &looks, &mut part, 0, None);
}

macro_rules! attend {
    ($($name:ident $rows:literal),*) => {$(
        #[doc = concat!("Attends ", $rows, " query rows over blocks of pages, a warp a block.")]
        ///
        /// `q`: `[channels][rows]`, scaled, the channels padded to whole words. `pages` and `live`: every page's address and
        /// the lanes that are read, a bit each. `first`: `[blocks + 1]`, where each block's pages begin. `sights`: `[blocks][rows]`. `softcap`:
        /// in base 2, 0 for none. `table`: of the rotation, `[rotary_dim / 2][2][capacity]`. The partial result of block `b`
        /// goes to `parts[b]`, [`Partial::len`] f32 long.
        ///
        /// # Safety
        /// The pointers must reach what is described, no block may have more than 8 pages, and whole warps must be launched.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            layout: LayoutArg,
            q: *const f32,
            pages: *const *const u32,
            live: *const u32,
            first: *const u32,
            blocks: u32,
            sights: *const SightArg,
            softcap: f32,
            rope: RopeArg,
            table: *const f32,
            parts: *mut f32,
        ) {
            // SAFETY: the caller's own promise.
            unsafe {
                attend::<$rows>(&layout, q, pages, live, first, blocks, sights, softcap, &rope, table, parts);
            }
        }
    )*};
}

attend!(attend_r1 1, attend_r2 2, attend_r4 4, attend_r8 8);

/// Joins `count` pairs of partial results of `rows` rows, a warp a pair: `parts[left] += parts[right]`, with the indices
/// of `pairs`, `[count][2]`.
///
/// # Safety
/// The pointers must reach what is described, no index may stand twice in `pairs`, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn merge_pairs(
    layout: LayoutArg,
    rows: u32,
    pairs: *const [u32; 2],
    count: u32,
    parts: *mut f32,
) {
    let (layout, rows) = (layout.layout(), rows as usize);
    let pair = thread::warp_index() as usize;
    if pair >= count as usize {
        return;
    }
    let len = Partial::len(rows, layout.acc_rows());
    // SAFETY: by the caller's promise on `pairs` and `parts`: the two are apart, and no other warp has either.
    let (left, right) = unsafe {
        let [left, right] = *pairs.add(pair);
        (
            slice::from_raw_parts_mut(parts.add(left as usize * len), len),
            slice::from_raw_parts_mut(parts.add(right as usize * len), len),
        )
    };
    // SAFETY: whole warps are launched, and what decides control flow is the warp's pair.
    let lanes = unsafe { Lane::new() };
    let acc_rows = layout.acc_rows();
    merge(lanes, &mut Partial::new(left, rows, acc_rows), &Partial::new(right, rows, acc_rows));
}

/// Outputs and log-sum-exps of the `rows` rows of one partial result, a warp a row: `out` is `[rows][v_dim]`.
///
/// # Safety
/// The pointers must reach what is described, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn finish_rows(
    layout: LayoutArg,
    rows: u32,
    part: *const f32,
    out: *mut f32,
    lse: *mut f32,
) {
    let (layout, rows) = (layout.layout(), rows as usize);
    let (row, stride) = (thread::warp_index() as usize, layout.acc_rows() as usize);
    if row >= rows {
        return;
    }
    // SAFETY: by the caller's promise on `part`, `out` and `lse`; a row is one warp's.
    unsafe {
        let acc = slice::from_raw_parts(part.add(row * stride * LANES), stride * LANES);
        let m = *part.add(rows * stride * LANES + row);
        let l = *part.add(rows * stride * LANES + rows + row);
        let width = layout.v_dim as usize;
        let out = slice::from_raw_parts_mut(out.add(row * width), width);
        // Whole warps are launched, and what decides control flow is the warp's row.
        *lse.add(row) = finish(Lane::new(), &layout, m, l, acc.as_chunks().0, out);
    }
}
