//! Reused lists.

/// An empty list with the memory of `list`. The types differ in lifetimes only.
pub fn emptied<T, U>(mut list: Vec<T>) -> Vec<U> {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    list.clear();
    // The standard library collects in place if the layouts agree; tests/properties/allocation.rs would notice if it did not.
    list.into_iter().map(|_| unreachable!("the list is empty")).collect()
}
