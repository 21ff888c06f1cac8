//! Query rows of a call, by lanes, for a device that holds them: [`bundle`] writes queries as blocks read them, [`beyond`] and
//! [`sound`] find rows that a host would reject. The bits are those of the host's loops.

use crate::rope::Rotation;
use crate::tensor::{Row, size};
use crate::warp::{LANES, Warp, shifted_left};

/// Writes query `q` times `factor` to row `row` of a bundle, `[channels][width]`, rotated to a position if one is given. Channels
/// past the query's get 0.
///
/// # Panics
/// If the bundle is not whole rows, or the position lies outside the table.
#[inline(always)]
pub fn bundle<W: Warp>(
    w: W,
    q: impl Row<W>,
    turn: Option<(&Rotation<'_>, u32)>,
    factor: f32,
    (row, width): (usize, usize),
    bundle: &mut [f32],
) {
    let factor = w.splat(factor);
    let turned = turn.map_or(0, |(rotation, _)| rotation.rope.rotary_dim as usize);
    if let Some((rotation, position)) = turn {
        rotate(w, q, rotation, position, factor, (row, width), bundle);
    }
    let out = &mut bundle[row..];
    for first in (turned..out.len().div_ceil(width)).step_by(LANES) {
        let x = part(w, q, w.add_u(w.lane_id(), w.splat_u(first as u32)));
        w.scatter(w.mul(x, factor), out, first * width, width);
    }
}

/// [`Rotation::rotate`] with one pair per lane, then the product with `factor`.
#[inline(always)]
fn rotate<W: Warp>(
    w: W,
    q: impl Row<W>,
    rotation: &Rotation<'_>,
    position: u32,
    factor: W::F,
    (row, width): (usize, usize),
    bundle: &mut [f32],
) {
    let Rotation { rope, table, capacity } = *rotation;
    let pairs = rope.rotary_dim as usize / 2;
    assert!(position < capacity);
    // Distance between the two channels of a pair, and from one pair to the next.
    let (apart, step) = (rope.pair(0).1, rope.pair(1).0);
    let end = (pairs - 1) * step * width + 1;
    for first in (0..pairs).step_by(LANES) {
        let pair = w.add_u(w.lane_id(), w.splat_u(first as u32));
        let cos = w.add_u(shifted_left(w, pair, capacity.trailing_zeros() + 1), w.splat_u(position));
        let sin = w.add_u(cos, w.splat_u(capacity));
        let (cos, sin) = (part(w, table, cos), part(w, table, sin));
        let a = if step == 1 { pair } else { w.shl::<1>(pair) };
        let (x, y) = (part(w, q, a), part(w, q, w.add_u(a, w.splat_u(apart as u32))));
        let p = w.fma(x, cos, w.sub(w.splat(-0.0), w.mul(y, sin)));
        let r = w.fma(y, cos, w.mul(x, sin));
        let at = first * step * width;
        w.scatter(w.mul(p, factor), &mut bundle[row..][..end], at, step * width);
        w.scatter(w.mul(r, factor), &mut bundle[row + apart * width..][..end], at, step * width);
    }
}

/// Elements of a row at `index`; 0 past its end.
#[inline(always)]
pub(crate) fn part<W: Warp>(w: W, row: impl Row<W>, index: W::U) -> W::F {
    let inside = w.ge_i(w.splat_u(row.count() as u32 - 1), index);
    let at = w.bits(w.select(inside, w.from_bits(index), w.splat(0.0)));
    w.select(inside, row.gather(w, at), w.splat(0.0))
}

/// First channel of a row that is NaN or of a larger magnitude than `limit`, which must be finite; and its value.
#[inline(always)]
pub fn beyond<W: Warp>(w: W, row: impl Row<W>, limit: f32) -> Option<(u32, f32)> {
    for first in (0..row.count()).step_by(LANES) {
        let x = part(w, row, w.add_u(w.lane_id(), w.splat_u(first as u32)));
        let bad = w.ballot(w.ge_i(size(w, x), w.splat_u(limit.to_bits() + 1)));
        if bad != 0 {
            let at = bad.trailing_zeros();
            return Some((first as u32 + at, w.lane(x, at as usize)));
        }
    }
    None
}

/// Scores of this magnitude and more differ by less than f32 resolves, or have overflowed.
pub const TOP_SCORE: f32 = 16_777_216.0;

/// Whether a row's exponent, sum and output come from scores that f32 holds.
#[inline(always)]
pub fn sound<W: Warp>(w: W, m: f32, l: f32, out: &[f32]) -> bool {
    m == f32::NEG_INFINITY || (m.abs() < TOP_SCORE && l.is_finite() && beyond(w, out, f32::MAX).is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::hash;
    use crate::portable::Portable;
    use crate::rope::{Pairs, Rope};

    /// The host's loop: rotated in place, then scaled, channel by channel.
    fn plain(
        q: &[f32],
        turn: Option<(&Rotation<'_>, u32)>,
        factor: f32,
        row: usize,
        width: usize,
        out: &mut [f32],
    ) {
        let mut turned = [0.0; 64];
        let turned = &mut turned[..q.len()];
        turned.copy_from_slice(q);
        if let Some((rotation, position)) = turn {
            rotation.rotate(turned, position);
        }
        for (c, out) in out.chunks_exact_mut(width).enumerate() {
            out[row] = turned.get(c).map_or(0.0, |x| x * factor);
        }
    }

    #[test]
    fn bundles_are_those_of_the_hosts_loop() {
        let mut state = 7;
        let mut draw = |n: u64| hash::next(&mut state) % n;
        const CAPACITY: u32 = 16;
        for _ in 0..400 {
            let k_dim = 1 + draw(64) as usize;
            let channels = k_dim.next_multiple_of(1 + draw(2) as usize);
            let width = 1 << draw(4);
            let mut values = [0.0f32; 64 * CAPACITY as usize + 64];
            values.fill_with(|| (draw(1 << 24) as f32 - 8_388_608.0) / 4e6);
            let (q, table) = values.split_at(64);
            let pairs = [Pairs::Halves, Pairs::Neighbours][draw(2) as usize];
            let rope = Rope { theta: 1.0, rotary_dim: 2 * draw(k_dim as u64 / 2 + 1) as u32, pairs };
            let rotation = Rotation { rope, table, capacity: CAPACITY };
            let turn = (rope.rotary_dim > 0).then_some((&rotation, draw(u64::from(CAPACITY)) as u32));
            let (mut got, mut want) = ([f32::NAN; 64 * 8], [f32::NAN; 64 * 8]);
            for row in 0..width {
                let factor = 0.3 + row as f32;
                bundle(
                    Portable,
                    &q[row..][..k_dim.min(64 - row)],
                    turn.filter(|_| row + k_dim <= 64),
                    factor,
                    (row, width),
                    &mut got[..channels * width],
                );
                plain(
                    &q[row..][..k_dim.min(64 - row)],
                    turn.filter(|_| row + k_dim <= 64),
                    factor,
                    row,
                    width,
                    &mut want[..channels * width],
                );
            }
            assert!(
                got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{k_dim}, {width}, {rope:?}"
            );
        }
    }

    #[test]
    fn the_first_that_is_beyond() {
        for dtype in Dtype::ALL {
            let most = dtype.limit();
            assert!(dtype.encode(most).is_some() && dtype.encode(-most).is_some(), "{dtype:?}");
            assert!(dtype.encode(most.next_up()).is_none(), "{dtype:?}");
            for bad in [most.next_up(), -most.next_up(), f32::INFINITY, f32::NAN, -f32::NAN] {
                for at in [0, 31, 32, 69] {
                    let mut row = [-most; 70];
                    row[at] = bad;
                    row[69] = bad;
                    let (channel, value) = beyond(Portable, &row[..], most).expect("there is one");
                    assert_eq!((channel as usize, value.to_bits()), (at, bad.to_bits()));
                    row[69] = 0.0;
                    assert_eq!(beyond(Portable, &row[..at], most), None);
                }
            }
        }
        assert!(sound(Portable, f32::NEG_INFINITY, 0.0, &[f32::NAN]));
        assert!(sound(Portable, 3.0, 1.0, &[1.0; 40]));
        assert!(!sound(Portable, TOP_SCORE, 1.0, &[1.0]));
        assert!(!sound(Portable, f32::NAN, 1.0, &[1.0]));
        assert!(!sound(Portable, 3.0, f32::INFINITY, &[1.0]));
        assert!(!sound(Portable, 3.0, 1.0, &[f32::NAN]));
    }
}
