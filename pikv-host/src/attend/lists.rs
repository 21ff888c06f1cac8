//! Lists that a call fills, kept by its thread from call to call: steps of a size that was seen before ask the system for no memory.

use crate::attend::executor::Cut;
use crate::attend::feedback::Feed;
use crate::attend::forest::Forest;
use crate::attend::mass::Wanted;
use crate::attend::view::View;
use std::cell::Cell;

/// Of attention.
#[derive(Default)]
pub struct Lists {
    pub views: Vec<View<'static>>,
    /// Rows that are attended one by one.
    pub single: Vec<View<'static>>,
    pub starts: Vec<usize>,
    pub forests: Vec<Forest<'static>>,
    /// Forests that are not in use.
    pub felled: Vec<Forest<'static>>,
    pub wanted: Vec<Wanted>,
    pub lse: Vec<f32>,
    /// What calls saw that no policy is told of, or was: the lists of the next one.
    pub seen: Vec<Feed>,
    pub cut: Cut,
}

thread_local! {
    /// Taken for the time of a call, and put back; of a call that failed, without the lists that it had in use.
    pub static LISTS: Cell<Lists> = Cell::default();
}
