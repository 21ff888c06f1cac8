//! A fixed mix of 64 bits: evenly spread, and the same on every machine.

/// The step between two states of [`next`]: 2^64 over the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's output for state `x` (Steele, Lea, Flood 2014): a bijection in which every bit of `x` reaches every bit.
///
/// ```
/// assert_eq!(pikv_core::hash::mix(0), 0xe220_a839_7b1d_cdaf);
/// ```
#[inline(always)]
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// SplitMix64: advances `state` and returns the next 64 bits.
#[inline]
pub const fn next(state: &mut u64) -> u64 {
    let bits = mix(*state);
    *state = state.wrapping_add(STEP);
    bits
}

/// Expert `j` of a token with first expert `start` and distance `stride`: `(start + j stride) mod experts`, of at most 65,536 experts.
///
/// ```
/// assert_eq!([0, 1, 2].map(|j| pikv_core::hash::expert(6, j, 3, 8)), [6, 1, 4]);
/// ```
///
/// # Panics
/// If there are no experts.
#[inline(always)]
pub const fn expert(start: u64, j: u32, stride: u32, experts: u32) -> u16 {
    let experts = experts as u64;
    ((start % experts + j as u64 * stride as u64) % experts) as u16
}
