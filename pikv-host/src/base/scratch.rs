//! Lists that are filled again and again.

/// An empty list with the room of `list`. The types differ in lifetimes only.
pub fn emptied<T, U>(mut list: Vec<T>) -> Vec<U> {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    list.clear();
    // Collected in place, as the standard library does where the layouts agree; tests/allocation.rs would see it if it did not.
    list.into_iter().map(|_| unreachable!("the list is empty")).collect()
}
