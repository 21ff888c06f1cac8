//! Methods of `VecDeque` that std has since Rust 1.93.

use std::collections::VecDeque;

/// Pops the first item if `is` returns true for it.
pub fn first_if<T>(queue: &mut VecDeque<T>, is: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.front().is_some_and(is) { queue.pop_front() } else { None }
}

/// Pops the last item if `is` returns true for it.
pub fn last_if<T>(queue: &mut VecDeque<T>, is: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.back().is_some_and(is) { queue.pop_back() } else { None }
}
