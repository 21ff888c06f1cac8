//! Maps a weighted sum of packed values to the head's channels, by lanes, for a device. The bits are those of the host's loop
//! over rows.

use super::pack::orthonormal;
use super::packed::Packed;
use crate::page::{Layout, MAX_DIM};
use crate::tensor::Row;
use crate::warp::{LANES, Warp};

/// Map from the head's channels to the stored channels of values.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Stored<'a> {
    /// None: the head's channels are stored.
    Same,
    /// The orthonormal Walsh-Hadamard transform of the head's channels in blocks, which is its own inverse.
    Hadamard {
        /// Channels of a block, a power of two.
        block: usize,
    },
    /// Some of the head's channels.
    Select {
        /// Channel of the head that each stored channel is, below the head's width.
        channels: &'a [u32],
    },
    /// The head's channels are `decode stored + bias`.
    Dense {
        /// `[narrow][wide]`
        decode_t: &'a [f32],
        /// `[wide]`; empty for 0.
        bias: &'a [f32],
    },
}

/// Rows of lanes of working memory.
pub const WORK: usize = 2 * MAX_DIM as usize / LANES;

/// Lanes in whose number the bit `distance` is 0.
const fn low(distance: usize) -> u32 {
    match distance {
        1 => 0x5555_5555,
        2 => 0x3333_3333,
        4 => 0x0f0f_0f0f,
        8 => 0x00ff_00ff,
        _ => 0x0000_ffff,
    }
}

/// Maps the sum of one row back: reads `acc` in the layout of packed pages, [`Packed::acc_rows`] rows, and writes `out` in that of
/// full pages, [`Layout::acc_rows`] rows. `l` is the sum of the weights: the factor of a bias.
///
/// # Panics
/// If a slice is too short.
#[inline(always)]
pub fn take_back<W: Warp>(
    w: W,
    packed: &Packed,
    layout: &Layout,
    form: &Stored<'_>,
    (l, acc): (f32, &[[f32; LANES]]),
    out: &mut [[f32; LANES]],
    work: &mut [[f32; LANES]; WORK],
) {
    let (stored, whole) = work.split_at_mut(WORK / 2);
    let (narrow, wide) = (packed.v_dim as usize, layout.v_dim as usize);
    let (parts, stride) = (packed.v_parts() as usize, packed.v_stride() as usize);
    let flat = stored.as_flattened_mut();
    for (i, row) in acc[..packed.acc_rows() as usize].iter().enumerate() {
        let (col, part) = (i / parts, i % parts);
        let (start, end) = (part * stride + col * LANES, narrow.min((part + 1) * stride));
        w.scatter(w.load_f(row), &mut flat[..end], start, 1);
    }
    w.sync();
    let stored = stored.as_flattened();
    let whole: &[f32] = match *form {
        Stored::Same => stored,
        Stored::Hadamard { block } => {
            hadamard(w, &stored[..wide], whole, block);
            whole.as_flattened()
        }
        Stored::Select { channels } => {
            whole.iter_mut().for_each(|row| w.store(w.splat(0.0), row));
            w.sync();
            let whole = whole.as_flattened_mut();
            for (channel, x) in channels.iter().zip(stored) {
                whole[*channel as usize] = *x;
            }
            whole
        }
        Stored::Dense { decode_t, bias } => {
            let whole = whole.as_flattened_mut();
            for first in (0..wide).step_by(LANES) {
                let end = wide.min(first + LANES);
                let mut sum = w.splat(0.0);
                for (x, weights) in stored[..narrow].iter().zip(decode_t.chunks_exact(wide)) {
                    sum = w.fma(w.splat(*x), part_of(w, &weights[first..end]), sum);
                }
                if !bias.is_empty() {
                    sum = w.fma(part_of(w, &bias[first..end]), w.splat(l), sum);
                }
                w.scatter(sum, &mut whole[..end], first, 1);
            }
            whole
        }
    };
    w.sync();
    let whole = &whole[..wide];
    let n = layout.v.per_word() as usize;
    for (i, row) in out[..layout.acc_rows() as usize].iter_mut().enumerate() {
        let (col, j) = (i / n, i % n);
        let lane = if n == 1 { w.lane_id() } else { w.shl::<1>(w.lane_id()) };
        let channel = w.add_u(lane, w.splat_u((col * LANES * n + j) as u32));
        let inside = w.ge_i(w.splat_u(wide as u32 - 1), channel);
        let at = w.bits(w.select(inside, w.from_bits(channel), w.splat(0.0)));
        w.store(w.select(inside, w.gather(whole, at), w.splat(0.0)), row);
    }
}

/// 1 to 32 numbers, 0 in the lanes after them.
#[inline(always)]
pub(super) fn part_of<W: Warp>(w: W, row: impl Row<W>) -> W::F {
    let inside = w.ge_i(w.splat_u(row.count() as u32 - 1), w.lane_id());
    let at = w.bits(w.select(inside, w.from_bits(w.lane_id()), w.splat(0.0)));
    w.select(inside, row.gather(w, at), w.splat(0.0))
}

/// The transform of channels across the lanes: butterflies over distances 1, 2, 4, .., then one product by sqrt(1 / block).
#[inline(always)]
pub(super) fn hadamard<W: Warp>(w: W, x: impl Row<W>, out: &mut [[f32; LANES]], block: usize) {
    let rows = x.count().div_ceil(LANES);
    for (x, out) in x.chunks().zip(out.iter_mut()) {
        let mut x = part_of(w, x);
        let mut distance = 1;
        while distance < block.min(LANES) {
            let y = w.shfl_xor(x, distance as u32);
            x = w.select(w.mask(low(distance)), w.add(x, y), w.sub(y, x));
            distance *= 2;
        }
        w.store(x, out);
    }
    let mut distance = 1;
    while distance * LANES < block {
        for first in (0..rows).filter(|row| row & distance == 0) {
            let (x, y) = (w.load_f(&out[first]), w.load_f(&out[first + distance]));
            w.store(w.add(x, y), &mut out[first]);
            w.store(w.sub(x, y), &mut out[first + distance]);
        }
        distance *= 2;
    }
    let scale = w.splat(orthonormal(block));
    for row in &mut out[..rows] {
        w.store(w.mul(w.load_f(row), scale), row);
    }
}
