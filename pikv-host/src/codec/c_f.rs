//! C_F: drops tokens of low attention after an early layer, FastV (arXiv 2403.06764).

use super::SelectError;
use super::c_ch::{check, falling};

/// Drops a share of the tokens, those that receive the least attention, from one layer on.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct FastV {
    /// `R`: share to drop of the tokens that are neither sinks nor in the window, at least 0 and below 1. The paper's choice is 0.5.
    pub ratio: f64,
    /// `K`: the first layer that drops tokens; earlier layers keep all. The paper's choice is 2.
    pub from: u32,
    /// First tokens to keep.
    pub sinks: u32,
    /// Newest tokens to keep.
    pub window: u32,
}

setters!(FastV { from: u32, sinks: u32, window: u32 });

impl FastV {
    /// Drops `ratio` from layer 2 on, with 4 sinks and a window of 32.
    pub fn new(ratio: f64) -> FastV {
        FastV { ratio, from: 2, sinks: 4, window: 32 }
    }

    /// One flag a token of `layer`, oldest first: true for the tokens to keep. `received` is the mean attention that each token received
    /// in the layer before [`FastV::from`], over the heads and rows that could see it. Of the `n` tokens that are neither sinks nor in the
    /// window, the `floor(ratio n)` least attended are dropped; of equal ones the newer. O(n log n).
    ///
    /// # Errors
    /// [`SelectError::Setting`] for a ratio out of range, [`SelectError::Score`] for attention that is not finite.
    pub fn keep(&self, layer: u32, received: &[f32]) -> Result<Vec<bool>, SelectError> {
        if !(0.0..1.0).contains(&self.ratio) {
            return Err(SelectError::Setting {
                name: "ratio",
                value: self.ratio,
                range: "at least 0 and below 1",
            });
        }
        check(received)?;
        let mut keep = vec![true; received.len()];
        let first = received.len().min(self.sinks as usize);
        let last = received.len().saturating_sub(self.window as usize);
        if layer >= self.from && first < last {
            let order = falling(&received[first..last]);
            let drop = (self.ratio * order.len() as f64).floor() as usize;
            for at in order.into_iter().rev().take(drop) {
                keep[first + at] = false;
            }
        }
        Ok(keep)
    }
}
