//! Duo-lit: attention added over the layers, PiKV's form of DuoAttention.

use super::{Candidates, MassFeedback, Policy, Scope, Seen};
use pikv_core::warp::LANES;

/// `u` = attention that a token received so far, summed over all layers and heads; every layer and head evicts the same tokens (PiKV,
/// arXiv 2508.06526). The method of arXiv 2410.10819 itself gates heads: see [`Duo`](super::Duo) and
/// [`Budget::Heads`](super::Budget::Heads).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DuoLit;

impl Policy for DuoLit {
    fn name(&self) -> &str {
        "Duo-lit"
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

    fn scope(&self) -> Scope {
        Scope::Sequence
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.add(&mut state[0]);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(u, x)| *u = x);
    }
}
