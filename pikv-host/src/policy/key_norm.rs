//! Key norm: keeps keys of small norm (arXiv 2406.11430).

use super::{Candidates, Policy, Token};

/// `u = -||k||`, of the key as appended. Does not need attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyNorm;

impl Policy for KeyNorm {
    fn name(&self) -> &str {
        "key norm"
    }

    fn words(&self) -> usize {
        1
    }

    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        let square: f64 = token.key.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        state[0] = square.sqrt() as f32;
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        utility.iter_mut().zip(tokens.states(0)).for_each(|(u, norm)| *u = -norm);
    }
}
