//! What is measured, for the examples that do.

pub mod subject;
