//! What a device is given to choose in a router's place.

use super::{Coefficients, Misses};
use pikv_core::score::Groups;
use pikv_core::warp::LANES;

/// How a router chooses, and all that it has learnt: what a device needs to choose in its place and to learn as it does
/// ([`LoopStep::route_device`](crate::closed_loop::LoopStep::route_device)). pikv's own routers give it; one that wraps them passes it on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DevicePlan<'a> {
    pub(crate) choice: DeviceChoice,
    /// Experts of a row that are fetched.
    pub(crate) fetch: u32,
    /// The model's choice is the filing's.
    pub(crate) same: bool,
    pub(crate) averages: Averages<'a>,
}

/// What a row's experts follow from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceChoice {
    /// Its logits.
    Ranked { biased: bool, cap: Option<f32>, groups: Option<Groups> },
    /// Its position, or a hash of it.
    Placed { hashed: bool, stride: u32 },
}

/// What was learnt. Lists are `[experts]`, or empty where the average is not kept.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Averages<'a> {
    pub coefficients: Coefficients,
    /// What is taken from all logits; empty where nothing is.
    pub fixed: &'a [[f32; LANES]],
    pub load: &'a [f32],
    pub miss: &'a [f32],
    pub entropy: &'a [f32],
    pub entropy_next: &'a [f32],
    pub counts: &'a [u64],
    /// How much of each average stays.
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
