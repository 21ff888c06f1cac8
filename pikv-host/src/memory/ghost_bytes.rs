//! Bytes of the bounds that are kept for hits: host memory outside the budget.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of all sheets of a cache; a sheet that forks share counts once.
#[derive(Debug, Default)]
pub(crate) struct Total {
    bytes: AtomicU64,
    /// Whether freed sheets are overwritten.
    pub wipe: bool,
}

impl Total {
    pub fn new(wipe: bool) -> Total {
        Total { bytes: AtomicU64::new(0), wipe }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Adds the bytes of a new sheet.
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts the bytes of a freed sheet.
    pub fn take(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
