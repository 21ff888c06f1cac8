//! The parkable sequences of a cache, and the order in which they are parked.

use crate::base::error::Error;
use crate::cache::sequence::Sequence;
use crate::memory::pool::Pool;
use std::any::Any;
use std::fmt::Debug;
use std::ops::DerefMut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// Order of parking: lowest priority first, among equals the least recently stepped first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ParkingTurn {
    pub priority: i32,
    pub stepped: u64,
    pub id: u64,
}

/// A sequence that may be parked.
pub(crate) trait ParkableSlot: Any + Debug + Send + Sync {
    /// Place in the order; `None` if the sequence is taken out of its handle, is parked or poisoned, or is not in `pool`.
    fn turn(&self, pool: &Pool) -> Option<ParkingTurn>;

    /// The sequence and its turn, if it has one; the sequence is locked as long as the guard lives.
    fn lock(&self, pool: &Pool) -> Option<(ParkingTurn, Box<dyn DerefMut<Target = Sequence> + '_>)>;

    /// Parks the sequence, and then sequences of `next` in order, until pages of `missing` bytes are free; all in one call, so that a page
    /// which they share is written once. If no tier has room for the sequence alone, demotes `missing` bytes of its pages. Skips sequences
    /// without a [turn](ParkableSlot::turn), and those that share all their pages. Returns how many of `next` were parked or skipped.
    ///
    /// # Errors
    /// [`Error::Tier`] or [`Error::Device`]. The sequences are unchanged then.
    fn lower(
        &self,
        next: &[Arc<dyn ParkableSlot>],
        pool: &Pool,
        missing: u64,
        made: &mut MadeRoom,
    ) -> Result<usize, Error>;
}

/// The parkable sequences of a cache.
#[derive(Debug, Default)]
pub(crate) struct Parkables {
    slots: RwLock<Vec<Weak<dyn ParkableSlot>>>,
    next: AtomicU64,
}

impl Parkables {
    /// A number unique in this cache.
    pub fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a sequence, which may be parked as long as its handle lives.
    pub fn add(&self, slot: Arc<dyn ParkableSlot>) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if slots.len() == slots.capacity() {
            // Drop dead handles whenever the list would grow: its length stays in proportion to the live ones.
            slots.retain(|slot| slot.strong_count() > 0);
        }
        slots.push(Arc::downgrade(&slot));
    }

    /// All handles that live.
    pub fn all(&self) -> Vec<Arc<dyn ParkableSlot>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().filter_map(Weak::upgrade).collect()
    }

    /// Sequences that may be parked, of priority at most `most`, in order.
    pub fn in_turn(&self, pool: &Pool, most: Option<i32>) -> Vec<Arc<dyn ParkableSlot>> {
        let mut turns: Vec<_> =
            self.all().into_iter().filter_map(|slot| Some((slot.turn(pool)?, slot))).collect();
        turns.retain(|(turn, _)| most.is_none_or(|most| turn.priority <= most));
        turns.sort_unstable_by_key(|(turn, _)| *turn);
        turns.into_iter().map(|(_, slot)| slot).collect()
    }
}

/// Result of [`Cache::make_room`](crate::Cache::make_room).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MadeRoom {
    /// Bytes freed in the first tier.
    pub freed: u64,
    /// Bytes left of the budget afterwards; less than requested if nothing more can be freed. Other threads may take some at any time.
    pub available: u64,
    /// [`Parkable::id`](crate::save::Parkable::id) of the parked sequences, in order.
    pub parked: Vec<u64>,
    /// [`Parkable::id`](crate::save::Parkable::id) of sequences with full pages that were demoted: no tier had room for the whole sequence, or
    /// its pages are shared with other sequences that can be parked.
    pub demoted: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nobody;

    impl ParkableSlot for Nobody {
        fn turn(&self, _: &Pool) -> Option<ParkingTurn> {
            None
        }

        fn lock(&self, _: &Pool) -> Option<(ParkingTurn, Box<dyn DerefMut<Target = Sequence> + '_>)> {
            None
        }

        fn lower(
            &self,
            _: &[Arc<dyn ParkableSlot>],
            _: &Pool,
            _: u64,
            _: &mut MadeRoom,
        ) -> Result<usize, Error> {
            Ok(0)
        }
    }

    /// The list does not keep dropped handles: its length stays in proportion to the live ones.
    #[test]
    fn the_list_does_not_grow_with_handles_that_went() {
        let all = Parkables::default();
        let held: Vec<Arc<dyn ParkableSlot>> =
            (0..3).map(|_| Arc::new(Nobody) as Arc<dyn ParkableSlot>).collect();
        for i in 0..10_000 {
            all.add(Arc::new(Nobody));
            if i % 4000 == 0 {
                all.add(held[i / 4000].clone());
            }
        }
        let slots = all.slots.read().unwrap();
        assert!(slots.capacity() <= 16, "{}", slots.capacity());
        assert_eq!(slots.iter().filter(|slot| slot.strong_count() > 0).count(), 3);
    }
}
