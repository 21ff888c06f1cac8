//! LRU: evicts the tokens of the page whose last use is oldest.

use super::{Candidates, MassFeedback, Policy, Seen};
use pikv_core::warp::LANES;

/// `u = -(now - last use)`. Rows use a page if they give it at least `share` times the attention of an equal spread over all tokens;
/// attention reads every page, so a read alone is not a use. Appending a token counts as a use.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Lru {
    /// Multiple of an equal share from which a page is used; 1 by default. With 0, any weight is a use.
    pub share: f32,
}

setters!(Lru { share: f32 });

impl Default for Lru {
    fn default() -> Lru {
        Lru { share: 1.0 }
    }
}

/// A position as the bits of a state word; as an f32 number it would be exact up to 2^24 only.
pub(super) fn stored(position: u32) -> f32 {
    f32::from_bits(position)
}

/// Tokens since the position in `stored`.
pub(super) fn age(now: u32, stored: f32) -> f32 {
    now.saturating_sub(stored.to_bits()) as f32
}

impl Policy for Lru {
    fn name(&self) -> &str {
        "LRU"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        to(&self.share.to_le_bytes());
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::All
    }

    fn words(&self) -> usize {
        1
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn born(&self, token: &super::Token<'_>, state: &mut [f32]) {
        state[0] = stored(token.position.0);
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        if seen.used(self.share) {
            let now = stored(seen.first.0 + seen.rows - 1);
            seen.update(&mut state[0], |_, _| now);
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for (u, last) in utility.iter_mut().zip(tokens.states(0)) {
            *u = -age(tokens.now(), last);
        }
    }
}
