//! C_F: tokens that few attend to go after an early layer, FastV (arXiv 2403.06764).

use super::SelectError;
use super::c_ch::{check, falling};

/// From one layer on, the share of the tokens that receive least attention is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct FastV {
    /// `R`: share that is dropped of the tokens that may be, from 0 and below 1. The paper's choice is 0.5.
    pub ratio: f64,
    /// `K`: the first layer that drops; the ones before keep all. The paper's choice is 2.
    pub from: u32,
    /// First tokens that stay.
    pub sinks: u32,
    /// Newest tokens that stay.
    pub window: u32,
}

setters!(FastV { from: u32, sinks: u32, window: u32 });

impl FastV {
    /// Drops `ratio` from layer 2 on, with 4 sinks and a window of 32.
    pub fn new(ratio: f64) -> FastV {
        FastV { ratio, from: 2, sinks: 4, window: 32 }
    }

    /// Which tokens stay in `layer`, oldest first. `received` is the mean attention that each token received in the layer before
    /// [`FastV::from`], over the heads and rows that could see it. Of the `n` tokens that are neither sinks nor in the window,
    /// `floor(ratio n)` go, the least attended first; of equal ones the newer. O(n log n).
    ///
    /// # Errors
    /// A ratio out of range, attention that is not finite.
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
