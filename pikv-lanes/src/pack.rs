//! Unpacks full pages into channels, and packs channels into packed pages.

use crate::Lanes;
use pikv_core::codec::pack::{Turn, pack as pack_channels, turn, unpack as unpack_page};
use pikv_core::codec::packed::Packed;
use pikv_core::page::Layout;
use pikv_core::warp::{Kernel, LANES, Warp};

struct Unpack<'a> {
    layout: &'a Layout,
    page: &'a [u32],
    fill: u32,
    k: &'a mut [[f32; LANES]],
    v: &'a mut [[f32; LANES]],
}

impl Kernel for Unpack<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Unpack { layout, page, fill, k, v } = self;
        unpack_page(w, layout, bytemuck::cast_slice(page), fill, k, v);
    }
}

/// Writes the channels of the first `fill` tokens of `page` to `k`, `[k_dim]` rows of lanes, and `v`, `[v_dim]`.
///
/// # Panics
/// If a slice is too short.
pub fn unpack(
    lanes: Lanes,
    layout: &Layout,
    page: &[u32],
    fill: u32,
    k: &mut [[f32; LANES]],
    v: &mut [[f32; LANES]],
) {
    lanes.run(Unpack { layout, page, fill, k, v });
}

/// Channels of K or of V of a page, `[channels]` rows of lanes, and the map to apply before they are coded.
pub struct Channels<'a> {
    /// The channels; a map may overwrite them.
    pub rows: &'a mut [[f32; LANES]],
    /// The map, and memory for its output; `None` stores the channels unchanged.
    pub map: Option<(Turn<'a>, &'a mut [[f32; LANES]])>,
}

impl<'a> Channels<'a> {
    #[inline(always)]
    fn mapped<W: Warp>(self, w: W) -> &'a mut [[f32; LANES]] {
        match self.map {
            None => self.rows,
            Some((form, out)) => {
                turn(w, &form, self.rows, out);
                out
            }
        }
    }
}

struct Pack<'a> {
    packed: &'a Packed,
    positions: &'a [u32],
    k: Channels<'a>,
    v: Channels<'a>,
    out: &'a mut [u32],
}

impl Kernel for Pack<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let Pack { packed, positions, k, v, out } = self;
        let (k, v) = (k.mapped(w), v.mapped(w));
        pack_channels(w, packed, positions, k, v, bytemuck::cast_slice_mut(out));
    }
}

/// Packs the tokens at `positions` (one per lane, at most 32) into `out`: the whole page except its tables of means and bases.
///
/// # Panics
/// If a slice is too short.
pub fn pack(
    lanes: Lanes,
    packed: &Packed,
    positions: &[u32],
    k: Channels<'_>,
    v: Channels<'_>,
    out: &mut [u32],
) {
    lanes.run(Pack { packed, positions, k, v, out });
}
