//! How many rows are computed together: as many as the registers hold, or six of half the lanes.

use crate::attend::{Rows, each_bundle};
use pikv_core::warp::{LANES, Warp};
use std::marker::PhantomData;

/// Lanes that a routine computes: one half of them, or all. The compiler drops its work for the other lanes.
pub(super) mod part {
    pub const LOW: usize = 0;
    pub const HIGH: usize = 1;
    pub const ALL: usize = 2;
}

/// Writes the lanes of `PART`.
#[inline(always)]
pub(super) fn store<W: Warp, const PART: usize>(w: W, x: W::F, row: &mut [f32; LANES]) {
    const HALF: usize = LANES / 2;
    if PART == part::ALL {
        return w.store(x, row);
    }
    let mut all = [0.0; LANES];
    w.store(x, &mut all);
    row[PART * HALF..][..HALF].copy_from_slice(&all[PART * HALF..][..HALF]);
}

/// Rows that lanes of few registers compute together, half of the lanes at a time.
///
/// 16 registers hold 2 rows of 32 lanes or 6 rows of 16 lanes. 2 rows are 8 chains, just enough for 2 units on which a multiply-add takes 4
/// cycles, and each word loaded serves 2 rows. 6 rows are 12 chains, and each word serves 6. (The loop alone on Zen 3: 0.84 of the peak
/// against 0.69.) NEON has 32 registers of half the width.
pub(super) const SIX: usize = 6;

/// Whether `R` rows are computed half of the lanes at a time. A branch on this constant alone leaves the other side uncompiled.
pub(super) struct Halved<W, const R: usize>(PhantomData<W>);

impl<W: Warp, const R: usize> Halved<W, R> {
    pub(super) const YES: bool = R == SIX && W::ROWS == 2;
}

/// All rows of a tile, as many together as the registers hold.
#[inline(always)]
pub(super) fn each<W: Warp>(w: W, rows: usize, most: usize, pass: &mut impl Rows) {
    let mut row = 0;
    if Halved::<W, SIX>::YES {
        while most == 2 && row + SIX <= rows {
            pass.rows::<W, SIX>(w, row);
            row += SIX;
        }
    }
    each_bundle(w, row..rows, most, pass);
}
