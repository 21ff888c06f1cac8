//! What the sequences and steps of a cache share.

use crate::attend::executor::Executor;
use crate::base::error::Error;
use crate::cache::idle::Idle;
use crate::cache::parkable::Parkables;
use crate::config::shape::CacheShape;
use crate::eviction::ranked::Rooms;
use crate::fabric::Front;
use crate::memory::arena::Reservation;
use crate::memory::pool::Pool;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// What sequences of a cache share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub shape: Arc<CacheShape>,
    pub pool: Pool,
    /// What computes attention.
    pub executor: Arc<dyn Executor>,
    /// Where rankings are done.
    pub rooms: Rooms,
    /// The ranks that keep full pages.
    pub fabric: Option<Arc<Front>>,
    /// Who gives pages back when a step would pass the budget.
    pub idle: Idle,
    /// Sequences that may be parked then.
    pub parkables: Parkables,
    /// Steps that were begun.
    pub clock: AtomicU64,
}

impl Inner {
    /// Sets page memory aside. Where it would else pass the budget, what nobody reads goes first, then parkable sequences.
    ///
    /// # Errors
    /// [`Error::OutOfBudget`]; of a tier or a device that sequences could not go to.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, Error> {
        loop {
            match self.pool.arenas.reserve(bytes) {
                // Again, as others may have taken what came free.
                Err(Error::OutOfBudget { needed, .. })
                    if needed <= self.pool.arenas.budget() && self.make_room(needed)?.freed > 0 => {}
                reserved => return reserved,
            }
        }
    }
}
