//! What is measured, for the examples that do.

pub mod results;
pub mod subject;
#[allow(dead_code, reason = "other examples use it")]
pub mod watched;
