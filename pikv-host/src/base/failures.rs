//! Counts of failures that return no error.

use std::sync::atomic::{AtomicU64, Ordering};

/// Work that failed because memory, a tier or a device refused it, without an error for the caller; counted since the cache was built. It
/// affects no result: bytes stay in use that would have been freed, or readable that would have been overwritten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failures {
    /// Failed compactions: pages of a KV head that lost tokens could not be merged, so no memory was freed. Each is tried again
    /// at the next step that compacts, and counted again if it fails again.
    pub uncompacted: u64,
    /// Pages that were freed without being overwritten in spite of [`CacheConfig::wipe`](crate::CacheConfig::wipe).
    pub unwiped: u64,
}

/// The counters of [`Failures`].
#[derive(Debug, Default)]
pub(crate) struct Counts {
    uncompacted: AtomicU64,
    unwiped: AtomicU64,
}

impl Counts {
    /// Counts a run that could not be compacted.
    pub fn uncompacted(&self) {
        self.uncompacted.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a page that could not be overwritten.
    pub fn unwiped(&self) {
        self.unwiped.fetch_add(1, Ordering::Relaxed);
    }

    /// The present counts.
    pub fn read(&self) -> Failures {
        let Counts { uncompacted, unwiped } = self;
        let [uncompacted, unwiped] = [uncompacted, unwiped].map(|count| count.load(Ordering::Relaxed));
        Failures { uncompacted, unwiped }
    }
}
