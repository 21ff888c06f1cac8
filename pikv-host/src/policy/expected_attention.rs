//! Expected attention: keeps the tokens that future queries are expected to attend to (arXiv 2510.00636).

use super::{Candidates, HeadSeen, OptionError, Policy};
use crate::base::frequencies::{Frequencies, turn};
use pikv_core::rope::Rope;

/// `u = (p + epsilon) ||v||`, with `p` the attention that a token is expected to receive from queries of the next positions.
///
/// Queries before rotation are assumed normal, with the mean and variances of those seen so far. The paper's covariance matrix is reduced
/// to its diagonal, which takes `k_dim` numbers a query head in place of `k_dim^2`. With `R` the mean rotation over the next positions,
/// the expected logit of a key is `scale k.R mu + scale^2 / 2 k.R S R'.k`. `p` is the softmax of these logits over the tokens that may
/// be evicted, averaged over the query heads of the KV head.
///
/// It does not use attention scores, so it can rank tokens that no query has attended to. A ranking reads every key and value:
/// O(tokens * (group * k_dim + v_dim)).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ExpectedAttention {
    /// Rotation of queries and keys; `None` if they are not rotated. If [`LayerShape::rope`](pikv_core::plan::LayerShape::rope) is set,
    /// it must be the same. Scaled frequencies (Llama 3.1, YaRN, ...) are taken from
    /// [`CacheConfig::frequencies`](crate::CacheConfig::frequencies), also for keys that come rotated; without them the plain base is
    /// used.
    pub rope: Option<Rope>,
    /// Whether queries and keys come rotated; `false` if [`LayerShape::rope`](pikv_core::plan::LayerShape::rope) is set.
    pub rotated: bool,
    /// Number of next positions that `p` averages over, at least 1; 512 by default.
    pub ahead: u32,
    /// First positions whose queries are ignored, since they differ from all others; 4 by default.
    pub skip: u32,
    /// Queries that mean and variance are taken over, at least 1; beyond that number older ones fade. 512 by default.
    pub memory: u32,
    /// Added to `p`; 0 by default.
    pub epsilon: f32,
    /// Factor of the logits; `1 / sqrt(k_dim)` by default.
    pub scale: Option<f32>,
}

setters!(ExpectedAttention { rotated: bool, ahead: u32, skip: u32, memory: u32, epsilon: f32 } optional { scale: f32, rope: Rope });

impl ExpectedAttention {
    /// For queries and keys rotated by `rope`, either before they come (`rotated`) or on read.
    pub fn new(rope: Option<Rope>, rotated: bool) -> ExpectedAttention {
        ExpectedAttention { rope, rotated, ahead: 512, skip: 4, memory: 512, epsilon: 0.0, scale: None }
    }

    /// Rotates `row` pair by pair; `turn(i)` is cosine and sine of pair `i`.
    fn turn(&self, row: &mut [f64], turn: impl Fn(usize) -> (f64, f64)) {
        let Some(rope) = &self.rope else { return };
        for i in 0..(rope.rotary_dim as usize).min(row.len()) / 2 {
            let (a, b) = rope.pair(i);
            let ((cos, sin), (x, y)) = (turn(i), (row[a], row[b]));
            (row[a], row[b]) = (x * cos - y * sin, y * cos + x * sin);
        }
    }

    /// Angle of each pair per position; the layer's scaled frequencies, if there are any.
    fn angles(&self, scaled: Option<&Frequencies>) -> Vec<f64> {
        let Some(rope) = self.rope else { return Vec::new() };
        let pairs = rope.rotary_dim / 2;
        match scaled {
            Some(scaled) => scaled.inverse().to_vec(),
            None => (0..pairs).map(|i| turn(rope.theta, rope.rotary_dim, i)).collect(),
        }
    }

    fn turn_by(&self, row: &mut [f64], angles: &[f64], positions: f64) {
        self.turn(row, |i| (libm::cos(positions * angles[i]), libm::sin(positions * angles[i])));
    }

    /// Means of cosine and sine of each pair over positions `now..now + ahead`.
    fn mean_turns(&self, angles: &[f64], now: u32) -> Vec<(f64, f64)> {
        let n = f64::from(self.ahead);
        let mean = |angle: &f64| {
            // A geometric sum of unit vectors: the middle one, times a factor.
            let part = libm::sin(0.5 * angle);
            let length = if part == 0.0 { 1.0 } else { libm::sin(0.5 * n * angle) / (n * part) };
            let middle = (f64::from(now) + 0.5 * (n - 1.0)) * angle;
            (length * libm::cos(middle), length * libm::sin(middle))
        };
        angles.iter().map(mean).collect()
    }
}

impl Policy for ExpectedAttention {
    fn name(&self) -> &str {
        "expected attention"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        // The rotation is compared apart.
        let ExpectedAttention { rotated, ahead, skip, memory, epsilon, scale, .. } = *self;
        [u32::from(rotated), ahead, skip, memory].iter().for_each(|n| to(&n.to_le_bytes()));
        to(&epsilon.to_le_bytes());
        to(scale.map(f32::to_le_bytes).as_ref().map_or(&[][..], |scale| scale));
    }

    fn check(&self) -> Result<(), OptionError> {
        for (name, value) in [("ahead", self.ahead), ("memory", self.memory)] {
            if value == 0 {
                return Err(OptionError::new(name, 0.0, "at least 1"));
            }
        }
        Ok(())
    }

    fn rotation(&self) -> Option<Rope> {
        self.rope
    }

    /// State of a head: the number of queries, then mean and variance for each query head.
    fn head_words(&self, k_dim: usize, group: usize) -> usize {
        1 + 2 * k_dim * group
    }

    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        let Some((count, heads)) = state.split_first_mut() else { return };
        let width = heads.len() / 2;
        if width == 0 || seen.queries.is_empty() {
            return;
        }
        let k_dim = width / seen.group as usize;
        let angles = self.angles(seen.frequencies);
        let mut row = vec![0.0; k_dim];
        for (position, queries) in (seen.first.0..).zip(seen.queries.chunks_exact(width)) {
            if position < self.skip {
                continue;
            }
            *count = (*count + 1.0).min(self.memory as f32);
            let rate = 1.0 / f64::from(*count);
            for (query, head) in queries.chunks_exact(k_dim).zip(heads.chunks_exact_mut(2 * k_dim)) {
                row.iter_mut().zip(query).for_each(|(row, x)| *row = f64::from(*x));
                if self.rotated {
                    self.turn_by(&mut row, &angles, -f64::from(position));
                }
                let (means, variances) = head.split_at_mut(k_dim);
                for ((x, mean), variance) in row.iter().zip(means).zip(variances) {
                    let off = x - f64::from(*mean);
                    *mean = (f64::from(*mean) + rate * off) as f32;
                    *variance = ((1.0 - rate) * (f64::from(*variance) + rate * off * off)) as f32;
                }
            }
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        let (k_dim, group) = (tokens.k_dim(), tokens.group() as usize);
        let Some(heads) = tokens.head().get(1..) else { return };
        let scale = self.scale.map_or(1.0 / libm::sqrt(k_dim as f64), f64::from);
        let angles = self.angles(tokens.frequencies());
        let turns = self.mean_turns(&angles, tokens.now());
        // Queries and keys that come rotated include the factor.
        let longer = tokens.frequencies().map_or(1.0, |scaled| scaled.factor() * scaled.factor());
        let turned = self.rope.map_or(0, |rope| rope.rotary_dim as usize).min(k_dim);
        let (mut key, mut value) = (vec![0.0; k_dim], vec![0.0; tokens.v_dim()]);
        let mut row = vec![0.0; k_dim];
        // [group][tokens]
        let mut logits = vec![0.0; group * tokens.len()];
        let mut norms = Vec::with_capacity(tokens.len());
        for i in 0..tokens.len() {
            tokens.read(i, &mut key, &mut value);
            row.iter_mut().zip(&key).for_each(|(row, x)| *row = f64::from(*x));
            if !self.rotated {
                self.turn_by(&mut row, &angles, f64::from(tokens.position(i)));
                row[..turned].iter_mut().for_each(|x| *x *= longer);
            }
            // k.R mu = R'k.mu, where R' is the inverse rotation.
            self.turn(&mut row, |pair| (turns[pair].0, -turns[pair].1));
            for (h, head) in heads.chunks_exact(2 * k_dim).enumerate() {
                let (means, variances) = head.split_at(k_dim);
                let (mut mean, mut variance) = (0.0, 0.0);
                for ((x, mu), s) in row.iter().zip(means).zip(variances) {
                    mean += x * f64::from(*mu);
                    variance += x * x * f64::from(*s);
                }
                logits[h * tokens.len() + i] = scale * mean + 0.5 * scale * scale * variance;
            }
            norms.push(libm::sqrt(value.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()));
        }
        let mut mean = vec![0.0; tokens.len()];
        for logits in logits.chunks_exact(tokens.len().max(1)) {
            let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = logits.iter().map(|x| libm::exp(x - top)).collect();
            let total: f64 = weights.iter().sum();
            mean.iter_mut().zip(&weights).for_each(|(mean, w)| *mean += w / (total * group as f64));
        }
        for ((u, p), norm) in utility.iter_mut().zip(&mean).zip(&norms) {
            *u = ((p + f64::from(self.epsilon)) * norm) as f32;
        }
    }
}
