//! What is done with a row of logits.

/// What the next token costs under a row of logits: its negative log-probability.
pub fn nats(logits: &[f32], next: usize) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[next])
}

/// The most likely token; the first of equals.
pub fn greedy(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// A token drawn from the softmax of `logits / temperature`.
pub fn sample(logits: &[f32], temperature: f32, random: &mut SplitMix) -> usize {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: f32| f64::from((x - max) / temperature).exp();
    let mut left = random.unit() * logits.iter().map(|&x| weight(x)).sum::<f64>();
    for (i, &x) in logits.iter().enumerate() {
        left -= weight(x);
        if left < 0.0 {
            return i;
        }
    }
    greedy(logits)
}

/// SplitMix64.
pub struct SplitMix(pub u64);

impl SplitMix {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// In `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
