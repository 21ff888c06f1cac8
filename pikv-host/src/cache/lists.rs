//! Lists that a step fills, kept by its thread from step to step.

use crate::cache::step::{Done, Part};
use std::cell::Cell;

/// Of a step.
#[derive(Default)]
pub struct StepLists {
    pub parts: Vec<Part<'static>>,
    pub layers: Vec<Done>,
}

thread_local! {
    /// Taken for the time of a step, and put back.
    pub static STEP: Cell<StepLists> = Cell::default();
}
