//! SnapKV: keeps the tokens that the last queries attend to (arXiv 2404.14469).

use super::{Candidates, MassFeedback, OptionError, Policy, Seen};
use pikv_core::warp::LANES;

/// `u` = mean attention from the last `window` rows, averaged over `pool` neighbours by position: neighbours of an important token are kept
/// with it. Near the ends fewer neighbours are added, with the same divisor, as in the paper's code.
///
/// Rows of one step replace their share of the mean, so a step of at least `window` rows, such as a prompt, resets it. Rows that can be
/// rolled back are observed one by one, each replacing `1 / window`. With a rollback, a prompt's earlier rows
/// therefore weigh `(1 - 1 / window)^rollback` of their share at least, and a small part of the mean before the prompt remains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapKv {
    /// Rows of the mean, at least 1; 32 by default.
    pub window: u32,
    /// Neighbours to average over, odd; 5 by default, 1 for no pooling.
    pub pool: u32,
}

setters!(SnapKv { window: u32, pool: u32 });

impl Default for SnapKv {
    fn default() -> SnapKv {
        SnapKv { window: 32, pool: 5 }
    }
}

impl Policy for SnapKv {
    fn name(&self) -> &str {
        "SnapKV"
    }

    fn parameters(&self, to: &mut dyn FnMut(&[u8])) {
        to(&self.window.to_le_bytes());
        to(&self.pool.to_le_bytes());
    }

    fn check(&self) -> Result<(), OptionError> {
        if self.window == 0 {
            return Err(OptionError::new("window", 0.0, "at least 1"));
        }
        if self.pool.is_multiple_of(2) {
            return Err(OptionError::new("pool", self.pool.into(), "odd"));
        }
        Ok(())
    }

    fn feedback(&self) -> MassFeedback {
        MassFeedback::LastRows(self.window)
    }

    fn words(&self) -> usize {
        1
    }

    fn reads_tokens(&self) -> bool {
        false
    }

    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        let share = seen.rows.min(self.window) as f32 / self.window as f32;
        let (stays, window) = (1.0 - share, self.window as f32);
        seen.update(&mut state[0], |mean, mass| mean * stays + mass / window);
    }

    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        let reach = self.pool as usize / 2;
        let means: Vec<f32> = tokens.states(0).collect();
        for (i, u) in utility.iter_mut().enumerate() {
            let near = &means[i.saturating_sub(reach)..means.len().min(i + reach + 1)];
            *u = near.iter().sum::<f32>() / (2 * reach + 1) as f32;
        }
    }
}
