//! C_F: tokens that get little attention go after an early layer, FastV (arXiv 2403.06764).

use super::{Candidates, Feedback, Policy, Seen};
use pikv_core::warp::LANES;

/// `u` = mean attention received: the mass so far over the rows that could see the token. FastV drops a share of the tokens
/// from layer 2 on: give those layers [`Budget::Share`](super::Budget::Share), and the first two no policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastVReceived;

impl Policy for FastVReceived {
    fn name(&self) -> &str {
        "FastV"
    }

    fn feedback(&self) -> Feedback {
        Feedback::Mass
    }

    fn words(&self) -> usize {
        2
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.add(&mut state[0]);
        for t in seen.lanes() {
            state[1][t] += (seen.rows_of(t) * seen.group) as f32;
        }
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for ((u, sum), rows) in utility.iter_mut().zip(tokens.states(0)).zip(tokens.states(1)) {
            *u = if rows > 0.0 { sum / rows } else { 0.0 };
        }
    }
}
