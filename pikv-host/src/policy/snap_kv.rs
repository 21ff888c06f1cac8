//! SnapKV: what the last queries look at stays (arXiv 2404.14469).

use super::{Candidates, Feedback, Policy, Seen};
use pikv_core::warp::LANES;

/// `u` = mean attention from the last `window` rows, averaged over `pool` neighbours by position, so that what stands beside an
/// important token stays with it (at the ends fewer neighbours count, over the same divisor, as the paper's code has it).
///
/// Rows that come together replace their share of the mean, so a step of at least `window` rows, as a prompt is, starts it anew.
/// Rows that can be taken back come one by one, each replacing `1 / window`: with a rollback a prompt's mean weighs its last rows
/// by up to `(1 - 1 / window)^rollback` less, and keeps as little of what was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapKv {
    /// Rows; 32 by default.
    pub window: u32,
    /// Odd; 5 by default, 1 for no pooling.
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

    fn feedback(&self) -> Feedback {
        Feedback::LastMass(self.window)
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
