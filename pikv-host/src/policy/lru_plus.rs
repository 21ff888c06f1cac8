//! LRU+: recency and decayed frequency.

use super::lru::{age, stored};
use super::{Candidates, MassFeedback, OptionError, Policy, Seen};
use pikv_core::warp::LANES;

/// `u = -(now - last use) + lambda * frequency`, where `frequency` counts uses, each multiplied by `decay` for every token since, up to the
/// last use. A use is that of [`Lru`](super::Lru).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LruPlus {
    /// Tokens of age that one use compensates; 16 by default.
    pub lambda: f32,
    /// Factor a token, above 0 and at most 1; 0.99 by default.
    pub decay: f32,
    /// See [`Lru`](super::Lru).
    pub share: f32,
}

setters!(LruPlus { lambda: f32, decay: f32, share: f32 });

impl Default for LruPlus {
    fn default() -> LruPlus {
        LruPlus { lambda: 16.0, decay: 0.99, share: 1.0 }
    }
}

impl Policy for LruPlus {
    fn name(&self) -> &str {
        "LRU+"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        [self.lambda, self.decay, self.share].iter().for_each(|x| to(&x.to_le_bytes()));
    }

    fn check(&self) -> Result<(), OptionError> {
        if self.decay > 0.0 && self.decay <= 1.0 {
            return Ok(());
        }
        Err(OptionError::new("decay", self.decay.into(), "above 0 and at most 1"))
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::All
    }

    fn words(&self) -> usize {
        2
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn born(&self, token: &super::Token<'_>, state: &mut [f32]) {
        state[0] = stored(token.position.0);
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        if seen.used(self.share) {
            let now = seen.first.0 + seen.rows - 1;
            // Most tokens of a page have the same last use.
            let mut known = (0.0, 1.0);
            for t in seen.lanes() {
                let age = age(now, state[0][t]);
                if age != known.0 {
                    known = (age, libm::powf(self.decay, age));
                }
                let faded = known.1;
                (state[0][t], state[1][t]) = (stored(now), state[1][t] * faded + 1.0);
            }
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for ((u, last), uses) in utility.iter_mut().zip(tokens.states(0)).zip(tokens.states(1)) {
            *u = -age(tokens.now(), last) + self.lambda * uses;
        }
    }
}
