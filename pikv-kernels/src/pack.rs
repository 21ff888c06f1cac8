//! Packs full pages: one warp per page.

use crate::args::{CodecArg, LayoutArg, MapArg, PackArg};
use crate::gpu::{Lane, thread};
use core::slice;
use pikv_core::LANES;
use pikv_core::codec::pack::{Turn, pack, turn, unpack};
use pikv_core::page::MAX_DIM;

/// Rows of lanes of a warp's working memory: the channels of K and V, and the output of their maps.
pub const WORK: usize = 4 * MAX_DIM as usize;

impl MapArg {
    /// # Safety
    /// The addresses must be those of slices with the lengths that the widths give.
    #[inline(always)]
    unsafe fn turn<'a>(&self) -> Option<Turn<'a>> {
        let (wide, narrow) = (self.wide as usize, self.narrow as usize);
        // SAFETY: the caller's promise.
        unsafe {
            match self.form {
                0 => None,
                MapArg::HADAMARD => Some(Turn::Hadamard { block: self.block as usize }),
                MapArg::SELECT => {
                    Some(Turn::Select { channels: slice::from_raw_parts(self.table as *const u32, narrow) })
                }
                _ => Some(Turn::Dense {
                    encode: slice::from_raw_parts(self.table as *const f32, wide * narrow),
                    bias: self.bias(),
                }),
            }
        }
    }
}

/// Output of a map of channel rows.
///
/// # Safety
/// The requirements of [`MapArg::turn`].
#[inline(always)]
unsafe fn mapped<'a>(
    lanes: Lane,
    map: &MapArg,
    x: &'a mut [[f32; LANES]],
    out: &'a mut [[f32; LANES]],
) -> &'a mut [[f32; LANES]] {
    // SAFETY: the caller's promise.
    match unsafe { map.turn() } {
        None => x,
        Some(form) => {
            turn(lanes, &form, x, out);
            out
        }
    }
}

/// Packs `count` pages, one warp per page. `work`: [`WORK`] rows for each warp, of any content.
///
/// # Safety
/// The pointers must be valid for the memory described, no page may be both read and written or be written twice, and whole warps must
/// be launched.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn pack_pages(
    layout: LayoutArg,
    codecs: *const CodecArg,
    list: *const PackArg,
    count: u32,
    work: *mut [f32; LANES],
) {
    let layout = layout.layout();
    let index = thread::warp_index();
    if index >= count {
        return;
    }
    // SAFETY: by the caller's promise; whole warps are launched, and control flow depends only on the warp's page.
    unsafe {
        let lanes = Lane::new();
        let PackArg { page, packed: to, fill, codec } = *list.add(index as usize);
        let CodecArg { packed, k: k_map, v: v_map } = *codecs.add(codec as usize);
        let packed = packed.packed();
        let positions = slice::from_raw_parts(page as *const u32, fill as usize);
        let page = slice::from_raw_parts(page as *const f32, layout.words() as usize);
        let to = slice::from_raw_parts_mut(to as *mut f32, packed.words() as usize);
        let work = slice::from_raw_parts_mut(work.add(index as usize * WORK), WORK);
        let (k, rest) = work.split_at_mut(layout.k_dim as usize);
        let (v, rest) = rest.split_at_mut(layout.v_dim as usize);
        let (k_mapped, rest) = rest.split_at_mut(packed.k_dim as usize);
        let (v_mapped, _) = rest.split_at_mut(packed.v_dim as usize);
        unpack(lanes, &layout, page, fill, k, v);
        let k = mapped(lanes, &k_map, k, k_mapped);
        let v = mapped(lanes, &v_map, v, v_mapped);
        pack(lanes, &packed, positions, k, v, to);
    }
}
