//! Whom a cache may park when room is wanted, and in which order.

use crate::base::error::Error;
use crate::memory::pool::Pool;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// Orders parkable sequences: of the lowest priority first, of equals the one first that was stepped least recently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    pub priority: i32,
    pub stepped: u64,
    pub id: u64,
}

/// A sequence that may be parked.
pub(crate) trait ParkableSlot: Debug + Send + Sync {
    /// When it goes; `None` if somebody has it, or if it is parked, half changed or not in `pool`.
    fn turn(&self, pool: &Pool) -> Option<Turn>;

    /// Parks it, or demotes `missing` bytes of its pages where it finds no room; nothing if it has no [turn](ParkableSlot::turn) by now.
    ///
    /// # Errors
    /// Of a tier or a device. It is as before then.
    fn lower(&self, pool: &Pool, missing: u64, made: &mut MadeRoom) -> Result<(), Error>;
}

/// The parkable sequences of a cache.
#[derive(Debug, Default)]
pub(crate) struct Parkables {
    slots: RwLock<Vec<Weak<dyn ParkableSlot>>>,
    next: AtomicU64,
}

impl Parkables {
    /// A number that no other has or had.
    pub fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Has one parked when room is wanted, for as long as it lives.
    pub fn add(&self, slot: Arc<dyn ParkableSlot>) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if slots.len() == slots.capacity() {
            // As often as the list grows, so that it is in proportion to those that are there.
            slots.retain(|slot| slot.strong_count() > 0);
        }
        slots.push(Arc::downgrade(&slot));
    }

    /// Those that nobody has, of at most this priority, in their order.
    pub fn in_turn(&self, pool: &Pool, most: Option<i32>) -> Vec<Arc<dyn ParkableSlot>> {
        let slots: Vec<Arc<dyn ParkableSlot>> = {
            let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
            slots.iter().filter_map(Weak::upgrade).collect()
        };
        let mut turns: Vec<_> = slots.into_iter().filter_map(|slot| Some((slot.turn(pool)?, slot))).collect();
        turns.retain(|(turn, _)| most.is_none_or(|most| turn.priority <= most));
        turns.sort_unstable_by_key(|(turn, _)| *turn);
        turns.into_iter().map(|(_, slot)| slot).collect()
    }
}

/// What [`Cache::make_room`](crate::Cache::make_room) did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MadeRoom {
    /// Bytes of the first tier that came free by it.
    pub freed: u64,
    /// What the budget has left afterwards, as far as other threads took none meanwhile: less than was asked for where nothing more can go.
    pub available: u64,
    /// [`Parkable::id`](crate::save::Parkable::id) of the sequences that were parked, in order.
    pub parked: Vec<u64>,
    /// Of those whose full pages went down, as no tier had room for the whole.
    pub demoted: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nobody;

    impl ParkableSlot for Nobody {
        fn turn(&self, _: &Pool) -> Option<Turn> {
            None
        }

        fn lower(&self, _: &Pool, _: u64, _: &mut MadeRoom) -> Result<(), Error> {
            Ok(())
        }
    }

    /// Handles that came and went leave nothing: the list is as long as some that are there.
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
