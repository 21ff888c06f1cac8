//! [`Layout::write`] and [`Layout::copy`] by lanes, for pages in device memory. The bits are the same.
//!
//! Pages are f32 slices with the bits of their words, because lanes gather and scatter f32.

use crate::dtype::{Dtype, encode};
use crate::page::Layout;
use crate::rows::part;
use crate::tensor::Row;
use crate::warp::{LANES, Warp};

/// Words `first..first + 32` of a packed row of channels; 0 past its end.
#[inline(always)]
fn words<W: Warp>(w: W, dtype: Dtype, row: impl Row<W>, first: usize) -> W::U {
    let per_word = dtype.per_word();
    let mut word = w.splat_u(0);
    for j in 0..per_word {
        let lane = if per_word == 1 { w.lane_id() } else { w.shl::<1>(w.lane_id()) };
        let channel = w.add_u(lane, w.splat_u(first as u32 * per_word + j));
        let bits = encode(w, dtype, part(w, row, channel));
        word = w.or(word, if j == 0 { bits } else { w.shl::<16>(bits) });
    }
    word
}

/// [`Layout::write`] of values that are known to fit their dtypes; it does not check them.
///
/// # Panics
/// If a slice is too short or `lane` is not below 32.
#[inline(always)]
pub fn append<W: Warp>(
    w: W,
    layout: &Layout,
    page: &mut [f32],
    lane: u32,
    position: u32,
    key: &[f32],
    value: &[f32],
) {
    append_key(w, layout, page, lane, position, key);
    append_value(w, layout, page, lane, value);
}

/// [`append`] without the value.
///
/// # Panics
/// If a slice is too short or `lane` is not below 32.
#[inline(always)]
pub fn append_key<W: Warp>(
    w: W,
    layout: &Layout,
    page: &mut [f32],
    lane: u32,
    position: u32,
    key: impl Row<W>,
) {
    let key = key.first(layout.k_dim as usize);
    let end = layout.v_base() as usize;
    for first in (0..layout.k_rows() as usize).step_by(LANES) {
        let word = w.from_bits(words(w, layout.k, key, first));
        let start = layout.k_word(0, 0, lane) as usize + first * LANES;
        w.scatter(word, &mut page[..end], start, LANES);
    }
    page[lane as usize] = f32::from_bits(position);
}

/// [`append`] without the key and the position.
///
/// # Panics
/// If a slice is too short or `lane` is not below 32.
#[inline(always)]
pub fn append_value<W: Warp>(w: W, layout: &Layout, page: &mut [f32], lane: u32, value: impl Row<W>) {
    let value = value.first(layout.v_dim as usize);
    let start = layout.v_word(0, 0, lane) as usize;
    let end = start + layout.v_stride() as usize;
    for first in (0..layout.v_stride() as usize).step_by(LANES) {
        let word = w.from_bits(words(w, layout.v, value, first));
        w.scatter(word, &mut page[..end], start + first, 1);
    }
}

/// [`Layout::copy`].
///
/// # Panics
/// If a page is too short or a lane is not below 32.
#[inline(always)]
pub fn copy<W: Warp>(w: W, layout: &Layout, source: &[f32], from: u32, target: &mut [f32], to: u32) {
    let rows = layout.v_base() as usize;
    let stride = layout.v_stride() as usize;
    let (from, to) = (from as usize, to as usize);
    // Positions and K: every 32nd word. V: one row.
    strided::<W, LANES>(w, &source[..rows], from, &mut target[..rows], to);
    let (from, to) = (rows + from * stride, rows + to * stride);
    strided::<W, 1>(w, &source[..from + stride], from, &mut target[..to + stride], to);
}

/// Copies every `STEP`th word from index `from` to index `to`, to the end of the slices.
#[inline(always)]
fn strided<W: Warp, const STEP: usize>(w: W, source: &[f32], from: usize, target: &mut [f32], to: usize) {
    for first in (0..source.len() - from).step_by(LANES * STEP) {
        let lane = if STEP == 1 { w.lane_id() } else { w.shl::<5>(w.lane_id()) };
        let word = w.add_u(lane, w.splat_u((from + first) as u32));
        let inside = w.ge_i(w.splat_u(source.len() as u32 - 1), word);
        let at = w.bits(w.select(inside, w.from_bits(word), w.splat(0.0)));
        w.scatter(w.gather(source, at), target, to + first, STEP);
    }
}
