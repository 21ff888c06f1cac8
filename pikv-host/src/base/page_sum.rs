//! Checksum of a page, to verify a page that is read back from a lower tier or a file.

/// Checksum of words in order. Each step is a bijection of its state, so a change of one word always changes the sum; other changes are
/// missed with a probability of about 2^-64. Files of saved sequences contain the sum, so it must not change.
pub(crate) fn sum(words: &[u32]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut lanes = [1, 2, 3, 4].map(|i: u64| i.wrapping_mul(ODD));
    let step = |lane: &mut u64, x: u64| *lane = (*lane ^ x).wrapping_mul(ODD).rotate_left(29);
    let (rows, rest) = words.as_chunks::<8>();
    for row in rows {
        for (lane, pair) in lanes.iter_mut().zip(row.as_chunks::<2>().0) {
            step(lane, u64::from(pair[0]) | u64::from(pair[1]) << 32);
        }
    }
    rest.iter().for_each(|word| step(&mut lanes[0], u64::from(*word)));
    let mut all = words.len() as u64;
    lanes.iter().for_each(|lane| step(&mut all, *lane));
    all
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn a_sum_sees_every_bit_and_the_order() {
        let words: Vec<u32> = (0..45u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let right = sum(&words);
        for i in 0..words.len() {
            for bit in 0..32 {
                let mut other = words.clone();
                other[i] ^= 1 << bit;
                assert_ne!(sum(&other), right);
            }
            let mut other = words.clone();
            other.swap(i, (i + 8) % 45);
            assert_ne!(sum(&other), right);
        }
        assert_ne!(sum(&words[..44]), right);
        assert_ne!(sum(&[0; 8]), sum(&[0; 9]));
    }

    /// Files contain the sum.
    #[test]
    fn a_sum_stays_as_it_is() {
        let words: Vec<u32> = (0..45u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        assert_eq!([sum(&words), sum(&[])], [0xfa51_cdb5_fdc3_5f36, 0x740f_eff6_9e7e_cfa8]);
    }
}
