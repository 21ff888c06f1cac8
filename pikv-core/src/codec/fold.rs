//! Maps queries to the stored channels of a codec, by lanes, for a device. The bits are those of the host's loop over rows.

use super::back::{hadamard, part_of};
use super::read::Back;
use crate::tensor::Row;
use crate::warp::{LANES, Warp};

/// Folds query `q` through the map of its head's keys, if there is one, times `factor`: writes `decode^T q` to `out`, `narrow`
/// channels and 0 after them. Returns the start of the query's scores: `factor (q . bias)`, in all lanes.
///
/// # Panics
/// If a slice is too short.
#[inline(always)]
pub fn fold<W: Warp>(
    w: W,
    map: Option<&Back<'_>>,
    q: impl Row<W>,
    factor: f32,
    narrow: usize,
    out: &mut [[f32; LANES]],
) -> W::F {
    let mut start = w.splat(0.0);
    match map {
        None => {
            for (row, q) in out.iter_mut().zip(q.first(narrow).chunks()) {
                w.store(part_of(w, q), row);
            }
        }
        Some(Back::Hadamard { block }) => hadamard(w, q, out, *block),
        Some(Back::Select { channels }) => {
            for (row, channels) in out.iter_mut().zip(channels[..narrow].chunks(LANES)) {
                let inside = w.ge_i(w.splat_u(channels.len() as u32 - 1), w.lane_id());
                w.store(w.select(inside, q.gather(w, w.load_part(channels)), w.splat(0.0)), row);
            }
        }
        Some(Back::Dense { decode, bias }) => {
            for (row, first) in out.iter_mut().zip((0..narrow).step_by(LANES)) {
                let end = narrow.min(first + LANES);
                let mut sum = w.splat(0.0);
                for (x, weights) in q.each(w).zip(decode.chunks_exact(narrow)) {
                    sum = w.fma(x, part_of(w, &weights[first..end]), sum);
                }
                w.store(sum, row);
            }
            for (x, bias) in q.each(w).zip(*bias) {
                start = w.fma(x, w.splat(*bias), start);
            }
        }
    }
    // Every lane reads the words that it stored itself.
    let (full, rest) = out.split_at_mut(narrow.div_ceil(LANES));
    full.iter_mut().for_each(|row| w.store(w.mul(w.load_f(row), w.splat(factor)), row));
    rest.iter_mut().for_each(|row| w.store(w.splat(0.0), row));
    w.mul(start, w.splat(factor))
}
