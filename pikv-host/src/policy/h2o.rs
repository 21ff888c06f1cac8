//! H2O: keeps heavy hitters (arXiv 2306.14048).

use super::{Candidates, MassFeedback, Policy, Seen};
use pikv_core::warp::LANES;

/// `u` = attention mass received since the token was appended, over all rows and the query heads of its KV head. H2O's recent tokens are
/// those of the ring; the paper gives each of both half of the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct H2o;

impl Policy for H2o {
    fn name(&self) -> &str {
        "H2O"
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

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.add(&mut state[0]);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(u, x)| *u = x);
    }
}
