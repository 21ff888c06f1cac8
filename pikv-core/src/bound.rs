//! Upper bounds on the scores of a page, from the least and largest value of each channel of its keys (Quest, arXiv 2406.10774).

use crate::rope::Rope;
use crate::warp::{LANES, Warp};

/// Rows of 32 channels that a key of `k_dim` channels takes.
pub const fn rows(k_dim: u32) -> usize {
    (k_dim as usize).div_ceil(LANES)
}

/// Widens the bounds of a page by one key. `bounds` is [`rows`] pairs of rows, the least and the largest value of each channel, at
/// first +inf and -inf. Lanes past the key's channels become 0. For a pair of channels that is rotated when read, the first channel
/// has the pair's length and its negative, and the second 0: that holds at any position.
///
/// # Panics
/// If `bounds` has fewer rows than the key needs.
pub fn widen(bounds: &mut [[f32; LANES]], key: &[f32], rope: Option<&Rope>) {
    let mut put = |c: usize, least: f32, most: f32| {
        let (row, lane) = (c / LANES * 2, c % LANES);
        bounds[row][lane] = bounds[row][lane].min(least);
        bounds[row + 1][lane] = bounds[row + 1][lane].max(most);
    };
    let turned = rope.map_or(0, |rope| rope.rotary_dim as usize);
    for i in 0..turned / 2 {
        let Some((a, b)) = rope.map(|rope| rope.pair(i)) else { continue };
        let length = length(key[a], key[b]);
        put(a, -length, length);
        put(b, 0.0, 0.0);
    }
    for (c, x) in key.iter().enumerate().skip(turned) {
        put(c, *x, *x);
    }
    // An infinity there times a query's 0 would be NaN.
    for c in key.len()..key.len().next_multiple_of(LANES) {
        let (row, lane) = (c / LANES * 2, c % LANES);
        (bounds[row][lane], bounds[row + 1][lane]) = (0.0, 0.0);
    }
}

/// Writes the query to compare with such bounds to [`rows`] rows; the padding is 0. A rotated pair becomes its length and 0.
///
/// # Panics
/// If `out` has fewer rows than the query needs.
pub fn fold(query: &[f32], rope: Option<&Rope>, out: &mut [[f32; LANES]]) {
    out.as_flattened_mut().fill(0.0);
    out.as_flattened_mut()[..query.len()].copy_from_slice(query);
    if let Some(rope) = rope {
        let out = out.as_flattened_mut();
        for i in 0..rope.rotary_dim as usize / 2 {
            let (a, b) = rope.pair(i);
            (out[a], out[b]) = (length(query[a], query[b]), 0.0);
        }
    }
}

/// Upper bound on the length of a pair, also after a rotation in f32.
fn length(x: f32, y: f32) -> f32 {
    let square = f64::from(x) * f64::from(x) + f64::from(y) * f64::from(y);
    // `core` has no square root without std; Newton's iteration from above never falls below the root.
    let mut root = f64::from(x.abs()) + f64::from(y.abs());
    for _ in 0..6 {
        if root > 0.0 {
            root = 0.5 * (root + square / root);
        }
    }
    // Rounding to f32, and the table's cosines and sines, are off by some units of 2^-24 each.
    (root * (1.0 + 1.0 / 1_048_576.0)) as f32
}

/// `sum_c max(q_c least_c, q_c most_c)`, plus a margin for rounding: not below the score of any key that widened `bounds`, as
/// attention computes it.
#[inline(always)]
pub fn bound<W: Warp>(w: W, query: &[[f32; LANES]], bounds: &[[f32; LANES]]) -> f32 {
    let (mut sum, mut size) = (w.splat(0.0), w.splat(0.0));
    for (q, pair) in query.iter().zip(bounds.as_chunks::<2>().0) {
        let (q, least, most) = (w.load_f(q), w.load_f(&pair[0]), w.load_f(&pair[1]));
        let (x, y) = (w.mul(q, least), w.mul(q, most));
        sum = w.add(sum, w.max(x, y));
        let magnitude = w.splat_u(0x7fff_ffff);
        let (x, y) = (w.and(w.bits(x), magnitude), w.and(w.bits(y), magnitude));
        size = w.add(size, w.max(w.from_bits(x), w.from_bits(y)));
    }
    // A chain of 256 products is off by at most 256 * 2^-24 of the sum of their sizes.
    w.reduce_sum(sum) + w.reduce_sum(size) * (1.0 / 32_768.0)
}
