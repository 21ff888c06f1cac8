//! Methods of `VecDeque` that std has from Rust 1.93 on.

use std::collections::VecDeque;

/// Takes the first item if `is` says so.
pub fn first_if<T>(queue: &mut VecDeque<T>, is: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.front().is_some_and(is) { queue.pop_front() } else { None }
}

/// Takes the last item if `is` says so.
pub fn last_if<T>(queue: &mut VecDeque<T>, is: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.back().is_some_and(is) { queue.pop_back() } else { None }
}
