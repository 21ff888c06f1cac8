//! Work over several threads, in any order.

/// From this many pages heads are scanned in parallel: fewer take less time than waking a thread.
pub(crate) const MANY: usize = 2048;

/// A slice with disjoint parts that tasks write concurrently.
pub struct Shared<'a, T = f32> {
    start: *mut T,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the slice is borrowed mutably for 'a, its elements are `Send`, and `part` requires its callers to keep parts disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), _slice: std::marker::PhantomData }
    }

    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, at: usize, n: usize) -> &mut [T] {
        assert!(n <= self.len && at <= self.len - n);
        // SAFETY: within the slice by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), n) }
    }
}

/// Calls `f` on every item, in any order, and returns the results in the items' order.
pub fn each<I: Sync, O: Send>(items: &[I], f: impl Fn(&I) -> O + Sync + Send) -> Vec<O> {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        if items.len() > 1 && threads() > 1 {
            return items.par_iter().with_max_len(1).map(f).collect();
        }
    }
    items.iter().map(f).collect()
}

/// Calls `f` on every number below `n`, in any order.
pub fn each_index(n: usize, f: impl Fn(usize) + Sync + Send) {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        if n > 1 && threads() > 1 {
            return (0..n).into_par_iter().with_max_len(1).for_each(f);
        }
    }
    (0..n).for_each(f);
}

/// Calls `f` on every item and its index, in any order.
pub fn each_mut<I: Send>(items: &mut [I], f: impl Fn(usize, &mut I) + Sync + Send) {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        if items.len() > 1 && threads() > 1 {
            return items.par_iter_mut().enumerate().with_max_len(1).for_each(|(i, item)| f(i, item));
        }
    }
    items.iter_mut().enumerate().for_each(|(i, item)| f(i, item));
}

/// Threads of the caller's rayon pool, or of the global one; 1 without the feature `rayon`.
pub fn threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    return 1;
}
