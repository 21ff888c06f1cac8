//! The next token from logits.

use pikv_engine::common::sample::{SplitMix, greedy};

/// How a request's tokens are chosen. The same seed gives the same tokens, whoever else is served.
pub struct Sampler {
    /// 0 takes the most likely token.
    temperature: f32,
    /// Only the most likely tokens are drawn from that have this much probability together.
    top_p: f64,
    random: SplitMix,
}

impl Sampler {
    pub fn new(temperature: f32, top_p: f64, seed: u64) -> Sampler {
        Sampler { temperature, top_p, random: SplitMix(seed) }
    }

    /// A token. `logits` has one at least.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        if self.temperature == 0.0 {
            return greedy(logits) as u32;
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |token: &usize| f64::from((logits[*token] - max) / self.temperature).exp();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        if self.top_p < 1.0 {
            // A stable order: of equals the first comes first.
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
