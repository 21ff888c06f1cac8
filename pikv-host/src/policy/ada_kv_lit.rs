//! AdaKV-lit: a weighted sum of features with an adaptive threshold (PiKV, arXiv 2508.06526).

use super::lru::{age, stored};
use super::{Candidates, HeadSeen, MassFeedback, OptionError, Policy, Seen, Token};
use pikv_core::warp::LANES;

/// `u = sum alpha_j phi_j` of three features in 0..=1; tokens with `u < theta` are evicted even within the budget:
///
/// * recency, `2^(-age / half_life)`;
/// * mass, `m / (1 + m)`, `m` the mean attention received divided by an equal share over all tokens;
/// * frequency, `f / (1 + f)`, `f` the number of times that the token received at least an equal share, halved every `half_life` tokens.
///
/// After every observed row, `theta <- clamp(theta - gamma (target - eta), 0, sum alpha)` for each KV head, with `eta` the moving mean
/// of its hit rate: the share of the pages wanted by the row that were held ([`Hits`](crate::rules::Hits)). A head that misses evicts
/// fewer tokens; tokens evicted earlier are not restored, and `eta` recovers as new tokens come. The paper has the opposite sign: a head
/// that misses then evicts more, misses more, and ends empty, while one without misses never evicts. A `gamma` below 0 gives that form.
///
/// Where the budget is the tighter limit, `theta` stays at 0. The heads of a layer then share the sum of their budgets: heads that miss
/// gain tokens from heads that do not. With `lean <- lean + gamma (8 (target - eta) - lean)` a head keeps a part in proportion to
/// `2^lean` ([`Policy::lean`]), which is twice that of a head with a hit rate better by an eighth.
///
/// (The method of arXiv 2407.11550 itself is [`Eviction::adaptive`](super::Eviction::adaptive).)
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdaKvLit {
    /// Weights of recency, mass and frequency, 1/3 each by default; at least 0, and one of them above 0.
    pub alpha: [f32; 3],
    /// Hit rate to reach, in 0..=1; 0.9 by default. It does not affect the parts of a shared budget.
    pub target: f32,
    /// Step of the threshold, 0.01 by default; not 0, and below 0 for the paper's sign.
    pub gamma: f32,
    /// Weight of the newest observed row in the mean hit rate, above 0 and at most 1; 0.1 by default.
    pub rate: f32,
    /// Half-life of recency and frequency, in tokens; 64 by default.
    pub half_life: f32,
}

setters!(AdaKvLit { alpha: [f32; 3], target: f32, gamma: f32, rate: f32, half_life: f32 });

impl Default for AdaKvLit {
    fn default() -> AdaKvLit {
        AdaKvLit { alpha: [1.0 / 3.0; 3], target: 0.9, gamma: 0.01, rate: 0.1, half_life: 64.0 }
    }
}

/// State of a head: the threshold, the mean hit rate, whether it has a value yet, and the lean of its part of a shared budget.
const THETA: usize = 0;
const ETA: usize = 1;
const STARTED: usize = 2;
const LEAN: usize = 3;

/// Lean that a part converges to, for each unit between target and hit rate.
const GAIN: f32 = 8.0;

impl AdaKvLit {
    fn faded(&self, age: f32) -> f32 {
        libm::exp2f(-age / self.half_life)
    }
}

impl Policy for AdaKvLit {
    fn name(&self) -> &str {
        "AdaKV-lit"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        let [recency, mass, frequency] = self.alpha;
        let AdaKvLit { target, gamma, rate, half_life, .. } = *self;
        [recency, mass, frequency, target, gamma, rate, half_life].iter().for_each(|x| to(&x.to_le_bytes()));
    }

    fn check(&self) -> Result<(), OptionError> {
        let AdaKvLit { alpha, target, gamma, rate, half_life, .. } = *self;
        let any = alpha.iter().any(|weight| *weight > 0.0);
        let alpha = alpha.map(|weight| {
            let fits = any && (0.0..=f32::MAX).contains(&weight);
            ("alpha", weight, fits, "at least 0 and finite, and one of the three above 0")
        });
        let others = [
            ("target", target, (0.0..=1.0).contains(&target), "in 0..=1"),
            ("gamma", gamma, gamma.is_finite() && gamma != 0.0, "finite and not 0"),
            ("rate", rate, rate > 0.0 && rate <= 1.0, "above 0 and at most 1"),
            ("half_life", half_life, half_life > 0.0 && half_life.is_finite(), "above 0 and finite"),
        ];
        let wrong = alpha.into_iter().chain(others).find(|(_, _, fits, _)| !fits);
        wrong.map_or(Ok(()), |(name, value, _, range)| Err(OptionError::new(name, value.into(), range)))
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::All
    }

    /// State of a token: shares received, the rows that gave them, uses, and the position of the last use.
    fn words(&self) -> usize {
        4
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn head_words(&self, _k_dim: usize, _group: usize) -> usize {
        4
    }

    fn wants_hits(&self) -> bool {
        true
    }

    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        state[3] = stored(token.position.0);
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        let now = seen.first.0 + seen.rows - 1;
        for t in seen.lanes() {
            let share = seen.mass[t] * seen.resident as f32;
            let rows = (seen.rows_of(t) * seen.group) as f32;
            state[0][t] += share;
            state[1][t] += rows;
            if rows > 0.0 && share >= rows {
                state[2][t] = state[2][t] * self.faded(age(now, state[3][t])) + 1.0;
                state[3][t] = stored(now);
            }
        }
    }

    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        let wanted = seen.hits + seen.misses;
        if wanted == 0.0 {
            return;
        }
        let hit = seen.hits / wanted;
        for _ in 0..seen.asked {
            let rate = if state[STARTED] == 0.0 { 1.0 } else { self.rate };
            state[STARTED] = 1.0;
            state[ETA] += rate * (hit - state[ETA]);
            let most: f32 = self.alpha.iter().sum();
            let short = self.target - state[ETA];
            state[THETA] = (state[THETA] - self.gamma * short).max(0.0).min(most);
            state[LEAN] += self.gamma.abs().min(1.0) * (GAIN * short - state[LEAN]);
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for (i, u) in utility.iter_mut().enumerate() {
            let of = |word| tokens.state(i, word);
            let recency = self.faded((tokens.now() - tokens.position(i)) as f32);
            let share = if of(1) > 0.0 { of(0) / of(1) } else { 0.0 };
            let uses = of(2) * self.faded(age(tokens.now(), of(3)));
            let features = [recency, share / (1.0 + share), uses / (1.0 + uses)];
            *u = self.alpha.iter().zip(features).map(|(alpha, phi)| alpha * phi).sum();
        }
    }

    fn lean(&self, head: &[f32]) -> Option<f32> {
        Some(head[LEAN])
    }

    fn threshold(&self, head: &[f32]) -> Option<f32> {
        Some(head[THETA])
    }
}
