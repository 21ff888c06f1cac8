//! Sampling from a row of logits.

/// Negative log-probability of token `next`, in nats.
pub fn nats(logits: &[f32], next: usize) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[next])
}

/// The most likely token, the first among equals.
pub fn greedy(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Draws a token from the softmax of `logits / temperature`.
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

/// Samples the tokens of one text. The same seed gives the same tokens.
pub struct Sampler {
    temperature: f32,
    top_p: f64,
    random: SplitMix,
}

impl Sampler {
    /// With temperature 0 it takes the most likely token; with `top_p` below 1 it draws only from the most likely tokens that together have
    /// this probability.
    pub fn new(temperature: f32, top_p: f64, seed: u64) -> Sampler {
        Sampler { temperature, top_p, random: SplitMix(seed) }
    }

    /// Samples a token. `logits` must not be empty.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        if self.temperature == 0.0 {
            return greedy(logits) as u32;
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |token: &usize| f64::from((logits[*token] - max) / self.temperature).exp();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        if self.top_p < 1.0 {
            // A stable order: the first among equals comes first.
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let all: f64 = order.iter().map(weight).sum();
            let mut sum = 0.0;
            let kept = order.iter().take_while(|token| {
                let more = sum < self.top_p * all;
                sum += weight(token);
                more
            });
            let kept = kept.count().max(1);
            order.truncate(kept);
        }
        let mut left = self.random.unit() * order.iter().map(weight).sum::<f64>();
        for token in &order {
            left -= weight(token);
            if left < 0.0 {
                return *token as u32;
            }
        }
        greedy(logits) as u32
    }
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

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
