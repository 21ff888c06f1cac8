//! Attention: one warp a block of pages.

use crate::gpu::{Lane, thread};
use core::slice;
use pikv_core::attend::{BLOCK, PageRef, Query, Sight, attend_block};
use pikv_core::dtype::Dtype;
use pikv_core::merge::Partial;
use pikv_core::page::Layout;

/// Query rows of a launch: the query heads of one KV head.
const ROWS: usize = 4;

/// Attends 4 query rows over `blocks` blocks of bf16 pages with 128 channels, a warp a block.
///
/// `q` is `[128][4]`, scaled; `table` `[blocks][8]` indices of pages in `pages`; `fill` the lanes of each; the partial result
/// of block `b` goes to `parts[b]`.
///
/// # Safety
/// The pointers must reach what is described, `table` must name pages of the arena, and whole warps must be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn attend_bf16_d128_g4(
    q: *const f32,
    pages: *const u32,
    table: *const u32,
    fill: *const u32,
    blocks: u32,
    hi: i32,
    parts: *mut f32,
) {
    let layout = Layout { k_dim: 128, v_dim: 128, k: Dtype::Bf16, v: Dtype::Bf16 };
    let block = thread::warp_index() as usize;
    if block >= blocks as usize {
        return;
    }
    let mut list = [PageRef { words: &[], fill: 0 }; BLOCK];
    for (i, page) in list.iter_mut().enumerate() {
        let at = block * BLOCK + i;
        // SAFETY: by the caller's promise on `table`, `fill` and `pages`.
        *page = unsafe {
            let first = pages.add(layout.page_word(u64::from(*table.add(at))) as usize);
            PageRef { words: slice::from_raw_parts(first, layout.words() as usize), fill: *fill.add(at) }
        };
    }
    let len = Partial::len(ROWS, &layout);
    // SAFETY: by the caller's promise on `q` and `parts`; each warp has a part of its own, whose words its lanes share out.
    let (q, part) = unsafe {
        (slice::from_raw_parts(q, 128 * ROWS), slice::from_raw_parts_mut(parts.add(block * len), len))
    };
    let sight = [Sight { floor: 0, lo: 0, sinks: 0, hi }; ROWS];
    let query = Query { q: q.as_chunks().0, k_dim: 128, sight, softcap: None, rotation: None };
    // SAFETY: whole warps are launched, and the warp's block decides its control flow.
    let lanes = unsafe { Lane::new() };
    attend_block::<Lane, ROWS>(
        lanes,
        &layout,
        &list,
        None,
        &query,
        &mut Partial::new(part, ROWS, &layout),
        0,
        None,
    );
}
