//! H2O: heavy hitters stay (arXiv 2306.14048).

use super::{Candidates, Feedback, Policy, Seen};
use pikv_core::warp::LANES;

/// `u` = attention mass since the token came, over all rows and the query heads of its KV head. The recent tokens that H2O
/// exempts are those of the ring; the paper halves the budget between both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct H2o;

impl Policy for H2o {
    fn name(&self) -> &str {
        "H2O"
    }

    fn feedback(&self) -> Feedback {
        Feedback::Mass
    }

    fn words(&self) -> usize {
        1
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.add(&mut state[0]);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(u, x)| *u = x);
    }
}
