//! Measurement code shared by examples.

pub mod results;
pub mod subject;
#[allow(dead_code, reason = "other examples use it")]
pub mod watched;
