//! Pages that nobody needs at the moment, which steps may have.

use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// Holds pages that it can do without.
pub(crate) trait Spare: Debug + Send + Sync {
    /// Gives up to `bytes` of the first tier back, or a little more; returns how many came free.
    fn give_back(&self, bytes: u64) -> u64;
}

/// Those who are asked before a step is refused.
#[derive(Debug, Default)]
pub(crate) struct Idle(RwLock<Vec<Weak<dyn Spare>>>);

impl Idle {
    /// Has one asked, for as long as it lives.
    pub fn add(&self, spare: &Arc<dyn Spare>) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|spare| spare.strong_count() > 0);
        known.push(Arc::downgrade(spare));
    }

    /// Asks for `bytes`; returns how many came.
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
