//! The data with which a device routes in a router's place.

use super::{Coefficients, Misses};
use pikv_core::score::Groups;
use pikv_core::warp::LANES;

/// The options and learnt averages of a router, with which a device chooses and learns in its place
/// ([`LoopStep::route_device`](crate::closed_loop::LoopStep::route_device)). Made by pikv's routers; a router that wraps one forwards it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DevicePlan<'a> {
    pub(crate) choice: DeviceChoice,
    /// Experts of a row to fetch.
    pub(crate) fetch: u32,
    /// Whether the model's choice is the filing's.
    pub(crate) same: bool,
    pub(crate) averages: Averages<'a>,
}

/// The input of the choice.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceChoice {
    /// The row's logits.
    HeadRanking { biased: bool, cap: Option<f32>, groups: Option<Groups> },
    /// The row's position, or its hash.
    Placed { hashed: bool, stride: u32 },
}

/// Learnt averages. Lists are `[experts]`, or empty for an average that is not kept.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Averages<'a> {
    pub coefficients: Coefficients,
    /// Bias subtracted from the logits; empty without one.
    pub fixed: &'a [[f32; LANES]],
    pub load: &'a [f32],
    pub miss: &'a [f32],
    pub entropy: &'a [f32],
    pub entropy_next: &'a [f32],
    pub counts: &'a [u64],
    /// Factor of each average.
    pub keep_load: f32,
    pub keep_miss: (Misses, f32),
    pub keep_entropy: f32,
}

impl Averages<'_> {
    /// Whether a step changes any of it.
    pub fn learn(&self) -> bool {
        !(self.load.is_empty() && self.miss.is_empty() && self.entropy.is_empty())
    }
}
