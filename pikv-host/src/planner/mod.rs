//! Planning before allocation: bytes of a cache, time of a step, and placement of pages in tiers.
//!
//! * [`Planner`]: the exact bytes of a configuration, shard by shard, by the allocator's own functions.
//! * [`StepTime`]: the time of a decode step, with constants that [`calibrate`] measures on the machine.
//! * [`paper`]: the formulas of arXiv 2508.06526 as printed, for comparison.
//! * [`Geometry`]: models to plan for.
//! * `flexgen` (feature `plan`): the share of pages that each tier holds, by a linear program.

mod error;
#[cfg(feature = "plan")]
pub mod flexgen;
mod forecast;
mod geometry;
pub mod paper;
mod step_time;

pub use error::PlanError;
pub use forecast::{Forecast, Load, Planner, Work, shared_experts};
pub use geometry::{DEEPSEEK_MOE_16B, Geometry, MIXTRAL_8X7B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B, QWEN3_30B_A3B};
pub use step_time::{Calibration, Probe, Sample, StepTime, calibrate};
