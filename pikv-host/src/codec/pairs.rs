//! Selection of channels, with rotation pairs kept whole.

use super::{FitError, Map};
use pikv_core::page::MAX_DIM;
use pikv_core::rope::Rope;

/// The kept channels of a head's rows, and the score of the dropped ones.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Crop {
    /// Stores the kept channels alone.
    pub map: Map,
    /// The kept channels, rising.
    pub channels: Vec<u32>,
    /// The sum of the dropped channels' scores. For [`crop`](super::crop) it equals `sum |x - x~|^2` over the rows of the energies.
    pub tail: f64,
}

/// A channel or a rotation pair, kept or dropped as one.
struct Unit {
    first: u32,
    second: Option<u32>,
    score: f64,
}

/// Keeps `keep` of the channels, with the pairs of `rope` whole: those of the best `score` (of a channel or a pair), or the first ones.
/// Exact: tries every number of pairs, with the best pairs and the best single channels; on a tie fewer pairs and lower channels.
///
/// # Errors
/// A width outside 1..=256, a rotary width that is odd, 0 or above `wide`, or a `keep` that pairs and single channels cannot make up.
pub(super) fn choose(
    wide: usize,
    rope: Option<Rope>,
    keep: u32,
    by_score: bool,
    score: impl Fn(usize, Option<usize>) -> f64,
) -> Result<Crop, FitError> {
    let (mut pairs, mut singles) = units(wide, rope, score)?;
    if by_score {
        // Stable: of equal scores the lower channel stays in front.
        pairs.sort_by(|a, b| b.score.total_cmp(&a.score));
        singles.sort_by(|a, b| b.score.total_cmp(&a.score));
    }
    let (p, s) = (pairs.len() as u32, singles.len() as u32);
    let possible = |keep: u32| {
        let least = keep.saturating_sub(s).div_ceil(2);
        (keep > 0 && least <= p.min(keep / 2)).then(|| least..=p.min(keep / 2))
    };
    let Some(counts) = possible(keep) else {
        let wide = wide as u32;
        let below = (1..keep.min(wide + 1)).rev().find(|k| possible(*k).is_some()).unwrap_or(0);
        let above = (keep.saturating_add(1)..=wide).find(|k| possible(*k).is_some()).unwrap_or(0);
        return Err(FitError::Keep { keep, pairs: p, singles: s, below, above });
    };
    let dropped = |pairs_kept: u32| {
        let tail = pairs[pairs_kept as usize..].iter().chain(&singles[(keep - 2 * pairs_kept) as usize..]);
        tail.map(|u| u.score).sum::<f64>()
    };
    let best = |a: u32, b: u32| if dropped(b) < dropped(a) { b } else { a };
    let kept = if by_score { counts.clone().fold(*counts.start(), best) } else { *counts.end() };
    let units = pairs[..kept as usize].iter().chain(&singles[..(keep - 2 * kept) as usize]);
    let mut channels: Vec<u32> = units.flat_map(|u| [Some(u.first), u.second]).flatten().collect();
    channels.sort_unstable();
    Ok(Crop { map: Map::identity_subset(wide as u32, &channels)?, tail: dropped(kept), channels })
}

fn units(
    wide: usize,
    rope: Option<Rope>,
    score: impl Fn(usize, Option<usize>) -> f64,
) -> Result<(Vec<Unit>, Vec<Unit>), FitError> {
    if !(1..=MAX_DIM as usize).contains(&wide) {
        return Err(FitError::Setting { name: "channels", value: wide as f64, range: "1..=256" });
    }
    let unit = |a: usize, b: Option<usize>| Unit {
        first: a as u32,
        second: b.map(|b| b as u32),
        score: score(a, b),
    };
    let turning = rope.map_or(0, |r| r.rotary_dim) as usize;
    if rope.is_some() && (turning < 2 || turning > wide || !turning.is_multiple_of(2)) {
        return Err(FitError::Rotary { rotary_dim: turning as u32, wide: wide as u32 });
    }
    let pair = |rope: Rope, i| {
        let (a, b) = rope.pair(i);
        unit(a, Some(b))
    };
    let pairs = rope.iter().flat_map(|r| (0..turning / 2).map(|i| pair(*r, i))).collect();
    Ok((pairs, (turning..wide).map(|c| unit(c, None)).collect()))
}

/// # Errors
/// The first value that is negative or not finite.
pub(super) fn energies(what: &'static str, values: &[f64]) -> Result<(), FitError> {
    match values.iter().position(|x| !(x.is_finite() && *x >= 0.0)) {
        Some(index) => Err(FitError::Energy { what, index, value: values[index] }),
        None => Ok(()),
    }
}
