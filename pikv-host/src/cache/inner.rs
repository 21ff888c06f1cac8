//! What the sequences and steps of a cache share.

use crate::attend::executor::Executor;
use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::cache::idle::Idle;
use crate::cache::parkable::Parkables;
use crate::config::shape::{CacheShape, first_heads};
use crate::eviction::ranked::Rooms;
use crate::fabric::Front;
use crate::memory::arena::Reservation;
use crate::memory::pool::Pool;
use crate::pages::filing::Layer;
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
    /// The layers of a sequence without tokens, which those share.
    pub blank: Vec<Common<Layer>>,
}

/// Layers without tokens.
pub(crate) fn blank(inner: &CacheShape) -> Vec<Common<Layer>> {
    let shapes = inner.config.layers.iter().zip(first_heads(&inner.config.layers));
    let rules = inner.stores.iter().zip(&inner.codecs).zip(&inner.rules);
    let layers = shapes.zip(rules).map(|((shape, first), ((store, codecs), rule))| {
        Common::new(Layer::new(shape, first, *store, codecs.clone(), rule.clone()))
    });
    layers.collect()
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
