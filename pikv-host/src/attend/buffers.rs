//! Buffers of a call that its thread keeps between calls: a step of a size that the thread has seen allocates nothing.

use crate::attend::executor::TaskLists;
use crate::attend::feedback::HeadFeedback;
use crate::attend::forest::Forest;
use crate::attend::mass::WeightSets;
use crate::attend::view::View;
use std::cell::Cell;

/// Buffers of attention.
#[derive(Default)]
pub struct Buffers {
    pub views: Vec<View<'static>>,
    /// Views of one row each.
    pub single: Vec<View<'static>>,
    pub forests: Vec<Forest<'static>>,
    /// Unused forests, kept for the next call.
    pub felled: Vec<Forest<'static>>,
    pub wanted: Vec<WeightSets>,
    pub lse: Vec<f32>,
    /// Unused feeds, kept for the next call.
    pub seen: Vec<HeadFeedback>,
    pub cut: TaskLists,
}

thread_local! {
    /// Buffers of a thread. A call takes them and puts them back; a call that fails drops those in use, and they grow again.
    pub static BUFFERS: Cell<Buffers> = Cell::default();
}
