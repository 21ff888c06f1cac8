//! Counts of work that failed without failing a call.

use std::sync::atomic::{AtomicU64, Ordering};

/// Work that a cache put off because memory, a tier or a device refused it, counted since the cache was built. No result is wrong for
/// it: bytes stay in use that would have come free, or stay readable that would have been overwritten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failures {
    /// Times that pages of a KV head which lost tokens could not be put together, so that no memory came back. Each is tried again
    /// whenever the next step tidies up, and counted again if it fails again.
    pub uncompacted: u64,
    /// Pages that were given back as they were in spite of [`CacheConfig::wipe`](crate::CacheConfig::wipe).
    pub unwiped: u64,
}

/// [`Failures`] as they are counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    uncompacted: AtomicU64,
    unwiped: AtomicU64,
}

impl Counts {
    /// Counts a chain that was not put together.
    pub fn uncompacted(&self) {
        self.uncompacted.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a page that was not overwritten.
    pub fn unwiped(&self) {
        self.unwiped.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts as of now.
    pub fn read(&self) -> Failures {
        let Counts { uncompacted, unwiped } = self;
        let [uncompacted, unwiped] = [uncompacted, unwiped].map(|count| count.load(Ordering::Relaxed));
        Failures { uncompacted, unwiped }
    }
}
