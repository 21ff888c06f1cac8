//! Bytes in which the extremes of the keys of known pages lie: host memory beside the budget.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of all sheets of a cache, those that forks share once.
#[derive(Debug, Default)]
pub(crate) struct Total {
    bytes: AtomicU64,
    /// Whether what is given back is overwritten.
    pub wipe: bool,
}

impl Total {
    pub fn new(wipe: bool) -> Total {
        Total { bytes: AtomicU64::new(0), wipe }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// A sheet of so many bytes came.
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A sheet went.
    pub fn take(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
