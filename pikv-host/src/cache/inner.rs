//! State shared by the sequences and steps of a cache.

use crate::attend::executor::Executor;
use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::cache::idle::Idle;
use crate::cache::parkables::{MadeRoom, Parkables, ParkingTurn};
use crate::config::shape::{CacheShape, first_heads};
use crate::eviction::ranked::Rooms;
use crate::fabric::Front;
use crate::memory::arena::Reservation;
use crate::memory::pool::Pool;
use crate::pages::filing::LayerPages;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// State shared by the sequences of a cache.
#[derive(Debug)]
pub(crate) struct Inner {
    pub shape: Arc<CacheShape>,
    pub pool: Pool,
    /// Computes attention.
    pub executor: Arc<dyn Executor>,
    /// Scratch memory for ranking tokens.
    pub rooms: Rooms,
    /// The ranks of a fabric, if full pages lie there.
    pub fabric: Option<Arc<Front>>,
    /// Holders of pages that can be freed when a step would exceed the budget.
    pub idle: Idle,
    /// Sequences that can be parked when a step would exceed the budget.
    pub parkables: Parkables,
    /// Number of steps begun.
    pub clock: AtomicU64,
    /// Layers of an empty sequence, shared by all empty sequences.
    pub blank: Vec<Common<LayerPages>>,
}

/// Builds the layers of an empty sequence.
pub(crate) fn blank(inner: &CacheShape) -> Vec<Common<LayerPages>> {
    let shapes = inner.config.layers.iter().zip(first_heads(&inner.config.layers));
    let rules = inner.stores.iter().zip(&inner.codecs).zip(&inner.rules);
    let layers = shapes.zip(rules).map(|((shape, first), ((store, codecs), rule))| {
        Common::new(LayerPages::new(shape, first, *store, codecs.clone(), rule.clone()))
    });
    layers.collect()
}

impl Inner {
    /// Reserves page memory. If the budget does not suffice, it frees idle pages first, then parks parkable sequences, none with a priority
    /// above `priority`.
    ///
    /// # Errors
    /// [`Error::OutOfBudget`]; [`Error::Tier`] or [`Error::Device`] if sequences could not be parked.
    pub fn reserve(&self, bytes: u64, priority: Option<i32>) -> Result<Reservation, Error> {
        loop {
            match self.pool.arenas.reserve(bytes) {
                // Retry: other threads may have taken the freed bytes.
                Err(Error::OutOfBudget { needed, .. })
                    if needed <= self.pool.arenas.budget() && self.make_room(needed, priority)?.freed > 0 => {
                }
                reserved => return reserved,
            }
        }
    }

    /// [`Cache::make_room`](crate::Cache::make_room), limited to sequences of at most `priority`; without tiers only idle pages are freed.
    pub(crate) fn make_room(&self, bytes: u64, priority: Option<i32>) -> Result<MadeRoom, Error> {
        let arenas = &self.pool.arenas;
        let available = || arenas.budget().saturating_sub(arenas.taken());
        let (mut made, mut failed) = (MadeRoom::default(), None);
        let (mut turns, mut done) = (None, 0);
        loop {
            let missing = bytes.saturating_sub(available());
            if missing == 0 {
                break;
            }
            // Ask again after each parked sequence: pages that it shared with prefixes may be idle then.
            let came = self.idle.give_back(missing);
            made.freed += came;
            if came > 0 {
                continue;
            }
            let turns = turns.get_or_insert_with(|| match self.pool.tiers.is_some() {
                true => self.parkables.in_turn(&self.pool, priority),
                false => Vec::new(),
            });
            let Some((slot, next)) = turns[done..].split_first() else {
                let asked = |turn: &ParkingTurn| priority.is_none_or(|most| turn.priority <= most);
                let lowered = self.lower_with_idle(&mut [], missing, false, asked);
                made.freed += lowered.freed;
                made.demoted.extend(lowered.parkables);
                failed = failed.or(lowered.failed);
                break;
            };
            done += 1;
            match slot.lower(next, &self.pool, missing, &mut made) {
                Ok(more) => done += more,
                Err(error) => failed = failed.or(Some(error)),
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
