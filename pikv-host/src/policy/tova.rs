//! TOVA: evicts the token that the newest query weighs least (arXiv 2401.06104).

use super::{Candidates, MassFeedback, Policy, Scope, Seen};
use pikv_core::warp::LANES;

/// `u` = attention of the last row, added over the heads of the layer, which evict the same tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tova;

impl Policy for Tova {
    fn name(&self) -> &str {
        "TOVA"
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::LastRows(1)
    }

    fn words(&self) -> usize {
        1
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn scope(&self) -> Scope {
        Scope::Layer
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.update(&mut state[0], |_, mass| mass);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(u, x)| *u = x);
    }
}
