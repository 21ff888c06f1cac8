//! Pages that no sequence reads, which can be freed for a step.

use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// A holder of pages that it can free on request.
pub(crate) trait Spare: Debug + Send + Sync {
    /// Frees at least `bytes` of the first tier if it can; returns the bytes freed.
    fn give_back(&self, bytes: u64) -> u64;
}

/// The holders to ask before a step is refused.
#[derive(Debug, Default)]
pub(crate) struct Idle(RwLock<Vec<Weak<dyn Spare>>>);

impl Idle {
    /// Adds a holder. It is asked as long as it lives.
    pub fn add(&self, spare: &Arc<dyn Spare>) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|spare| spare.strong_count() > 0);
        known.push(Arc::downgrade(spare));
    }

    /// Asks the holders in turn for `bytes`; returns the bytes freed.
    pub fn give_back(&self, bytes: u64) -> u64 {
        let known: Vec<Arc<dyn Spare>> = {
            let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
            known.iter().filter_map(Weak::upgrade).collect()
        };
        let mut came = 0;
        for spare in known {
            if came < bytes {
                came += spare.give_back(bytes - came);
            }
        }
        came
    }
}
