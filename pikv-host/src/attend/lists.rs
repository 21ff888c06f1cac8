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
    pub forests: Vec<Forest<'static>>,
    /// Forests that are not in use, kept for the next call.
    pub felled: Vec<Forest<'static>>,
    pub wanted: Vec<Wanted>,
    pub lse: Vec<f32>,
    /// Lists of feeds that are not in use, kept for the next call.
    pub seen: Vec<Feed>,
    pub cut: Cut,
}

thread_local! {
    /// A thread's buffers. A call takes them and puts them back; those in use when a call fails are dropped, and grow again.
    pub static LISTS: Cell<Lists> = Cell::default();
}
