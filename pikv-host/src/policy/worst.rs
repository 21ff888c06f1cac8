//! Selection of the lowest utilities.

use super::worth;
use smallvec::SmallVec;

/// Bits whose unsigned order is that of [`worth`].
pub(crate) fn order_bits(utility: f32) -> u32 {
    let bits = worth(utility).to_bits();
    // Without a branch, so that the compiler can vectorise it.
    bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)
}

/// Bits of the number of parts that a range of [`order_bits`] is cut into: the counts fit in the first-level cache.
const PARTS: u32 = 11;

/// Up to this number of values are sorted.
const FEW: usize = 512;

/// Calls `take` with the indices of the `n` lowest utilities; of equals the lowest indices.
///
/// Moves no data: the range between lowest and highest is cut into parts, and the part with the `n`th lowest is cut again until it holds
/// few values. Each round is one pass over `utility`; mostly the first suffices.
pub(crate) fn worst(utility: &[f32], n: usize, mut take: impl FnMut(usize)) {
    if n >= utility.len() {
        return (0..utility.len()).for_each(take);
    }
    if n == 0 {
        return;
    }
    let bits = utility.iter().map(|u| order_bits(*u));
    let (mut least, mut most) = (bits.clone().fold(u32::MAX, u32::min), bits.fold(0, u32::max));
    // The number to take, and to choose from, with bits in `least..=most`.
    let (mut left, mut among) = (n, utility.len());
    while least < most && among > FEW {
        let shift = (32 - (most - least).leading_zeros()).saturating_sub(PARTS);
        let counts = counted(utility, least, most, shift);
        let mut part = 0;
        while (counts[part] as usize) < left {
            left -= counts[part] as usize;
            part += 1;
        }
        among = counts[part] as usize;
        least += (part as u32) << shift;
        most = most.min(least + ((1 << shift) - 1));
    }
    let mut edge: SmallVec<[(u32, u32); FEW]> = SmallVec::new();
    for (i, u) in utility.iter().enumerate() {
        let bits = order_bits(*u);
        if bits > most {
            continue;
        }
        if bits < least {
            take(i);
        } else if least < most {
            edge.push((bits, i as u32));
        } else if left > 0 {
            left -= 1;
            take(i);
        }
    }
    edge.sort_unstable();
    edge.iter().take(left).for_each(|(_, i)| take(*i as usize));
}

/// The number of values in each part of `least..=most`, parts of `2^shift`.
fn counted(utility: &[f32], least: u32, most: u32, shift: u32) -> [u32; 1 << PARTS] {
    // Two tables: neighbouring values are often equal, and reading a count that was just written stalls.
    let mut counts = [[0u32; 1 << PARTS]; 2];
    let mut count = |u: &f32, to: usize| {
        let part = order_bits(*u).wrapping_sub(least);
        if part <= most - least {
            counts[to][(part >> shift) as usize] += 1;
        }
    };
    let (pairs, rest) = utility.as_chunks::<2>();
    for [a, b] in pairs {
        count(a, 0);
        count(b, 1);
    }
    rest.iter().for_each(|u| count(u, 0));
    let [mut all, others] = counts;
    all.iter_mut().zip(others).for_each(|(all, other)| *all += other);
    all
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
        for len in [0usize, 1, 2, 5, 40, 700, 5000] {
            for kind in 0..5 {
                let draw = |x: u32| match kind {
                    // Any bits, including infinities and NaN.
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
                    got.sort_unstable();
                    assert_eq!(got, slow(&utility, n), "{n} of {utility:?}");
                }
            }
        }
    }
}
