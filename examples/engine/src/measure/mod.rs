//! Measurement code shared by examples.

pub mod results;
#[path = "../../../../benches/machine/results.rs"]
pub mod rows;
pub mod subject;
pub mod timed;
#[allow(dead_code, reason = "other examples use it")]
pub mod watched;
