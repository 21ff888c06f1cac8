//! What the sequences and steps of a cache share.

use crate::attend::executor::Executor;
use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::cache::idle::Idle;
use crate::cache::parkables::{MadeRoom, Parkables};
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
    /// Sets page memory aside. Where it would else pass the budget, what nobody reads goes first, then parkable sequences, none of a higher
    /// `priority` than this.
    ///
    /// # Errors
    /// [`Error::OutOfBudget`]; of a tier or a device that sequences could not go to.
    pub fn reserve(&self, bytes: u64, priority: Option<i32>) -> Result<Reservation, Error> {
        loop {
            match self.pool.arenas.reserve(bytes) {
                // Again, as others may have taken what came free.
                Err(Error::OutOfBudget { needed, .. })
                    if needed <= self.pool.arenas.budget() && self.make_room(needed, priority)?.freed > 0 => {
                }
                reserved => return reserved,
            }
        }
    }

    /// [`Cache::make_room`](crate::Cache::make_room), by sequences of at most this priority; without tiers only prefixes can go.
    pub(crate) fn make_room(&self, bytes: u64, priority: Option<i32>) -> Result<MadeRoom, Error> {
        let arenas = &self.pool.arenas;
        let available = || arenas.budget().saturating_sub(arenas.taken());
        let (mut made, mut failed) = (MadeRoom::default(), None);
        let mut turns = None;
        loop {
            let missing = bytes.saturating_sub(available());
            if missing == 0 {
                break;
            }
            // Again after each that was parked: what it shared with prefixes may be idle then.
            let came = self.idle.give_back(missing);
            made.freed += came;
            if came > 0 {
                continue;
            }
            let turns = turns.get_or_insert_with(|| match self.pool.tiers.is_some() {
                true => self.parkables.in_turn(&self.pool, priority).into_iter(),
                false => Vec::new().into_iter(),
            });
            let Some(slot) = turns.next() else { break };
            if let Err(error) = slot.lower(&self.pool, missing, &mut made) {
                failed = failed.or(Some(error));
            }
        }
        made.available = available();
        event!("made room", bytes = made.freed, parked = made.parked.len());
        match failed {
            Some(error) if made.available < bytes => Err(error),
            _ => Ok(made),
        }
    }
}
