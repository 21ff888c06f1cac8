//! The least of many utilities.

use super::worth;

/// Bits that order as the worths of utilities do.
pub(crate) fn order_bits(utility: f32) -> u32 {
    let bits = worth(utility).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Bits that are counted at once: their counts fit the first cache.
const DIGITS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];

/// Calls `take` with the indices of the `n` least, ascending; of equals the first go.
///
/// Counts digits instead of moving indices about: a few walks through `utility`, and nothing beside it, so that many cost each
/// what few do.
pub(crate) fn worst(utility: &[f32], n: usize, mut take: impl FnMut(usize)) {
    if n >= utility.len() {
        return (0..utility.len()).for_each(take);
    }
    if n == 0 {
        return;
    }
    let (limit, mut equals) = nth(utility, n);
    for (i, u) in utility.iter().enumerate() {
        let bits = order_bits(*u);
        if bits < limit {
            take(i);
        } else if bits == limit && equals > 0 {
            equals -= 1;
            take(i);
        }
    }
}

/// The `n`th least, as its [`order_bits`], and how many such are among the `n`; there are at least `n`, and `n` is not 0.
fn nth(utility: &[f32], n: usize) -> (u32, usize) {
    let bits = || utility.iter().map(|u| order_bits(*u));
    let (least, most) = bits().fold((u32::MAX, 0), |(least, most), x| (least.min(x), most.max(x)));
    if least == most {
        return (least, n);
    }
    let (mut known, mut left) = (0, n as u64);
    for (shift, width) in DIGITS {
        let mut counts = [0u64; 1 << 11];
        for x in bits().filter(|x| u64::from(*x) >> (shift + width) == known) {
            counts[(x >> shift & ((1 << width) - 1)) as usize] += 1;
        }
        let mut digit = 0;
        while counts[digit] < left {
            left -= counts[digit];
            digit += 1;
        }
        known = known << width | digit as u64;
    }
    (known as u32, left as usize)
}

#[cfg(test)]
mod tests {
    use super::{super::worth, worst};

    /// By sorting.
    fn slow(utility: &[f32], n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..utility.len()).collect();
        order.sort_by(|i, j| worth(utility[*i]).total_cmp(&worth(utility[*j])));
        order.truncate(n);
        order.sort_unstable();
        order
    }

    #[test]
    fn as_by_sorting() {
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed
        };
        for len in [0usize, 1, 2, 5, 40, 700] {
            for kind in 0..5 {
                let draw = |x: u32| match kind {
                    // Any bits: infinities and what is not a number among them.
                    0 => f32::from_bits(x),
                    1 => (x >> 28) as f32 - 8.0,
                    2 => [0.0, -0.0, f32::NAN, f32::NEG_INFINITY, 1.0][x as usize % 5],
                    3 => -((x >> 12) as f32),
                    _ => 3.5,
                };
                let utility: Vec<f32> = (0..len).map(|_| draw(next())).collect();
                for n in [0, 1, 2, len / 3, len.saturating_sub(1), len, len + 1] {
                    let mut got = Vec::new();
                    worst(&utility, n, |i| got.push(i));
                    assert_eq!(got, slow(&utility, n), "{n} of {utility:?}");
                }
            }
        }
    }
}
