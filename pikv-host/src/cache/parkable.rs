//! Sequences that a cache may park by itself to free memory.

mod group;

use crate::base::error::Error;
use crate::cache::Cache;
use crate::cache::parkables::{MadeRoom, ParkableSlot, ParkingTurn};
use crate::cache::save::Parked;
use crate::cache::sequence::Sequence;
use crate::memory::pool::Pool;
use group::Group;
use pikv_core::page::Position;
use std::any::Any;
use std::fmt;
use std::iter;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// State of a parkable sequence.
#[derive(Debug)]
enum State {
    Awake(Box<Sequence>),
    Parked(Parked),
    /// Taken out of the handle for good.
    Gone,
}

#[derive(Debug)]
struct Slot {
    id: u64,
    priority: AtomicI32,
    state: Mutex<State>,
}

impl Slot {
    /// Locks the state. After a panic the sequence itself knows whether it is poisoned.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn_in(&self, state: &State, pool: &Pool) -> Option<ParkingTurn> {
        match state {
            State::Awake(sequence) if may_go(sequence, pool) => Some(ParkingTurn {
                priority: self.priority.load(Ordering::Relaxed),
                stepped: sequence.stepped,
                id: self.id,
            }),
            _ => None,
        }
    }

    /// Locks the state unless it is in use by a step or by another thread that makes room.
    fn idle(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl ParkableSlot for Slot {
    fn turn(&self, pool: &Pool) -> Option<ParkingTurn> {
        self.turn_in(&*self.idle()?, pool)
    }

    fn lock(&self, pool: &Pool) -> Option<(ParkingTurn, Box<dyn DerefMut<Target = Sequence> + '_>)> {
        let state = self.idle()?;
        let turn = self.turn_in(&state, pool)?;
        Some((turn, Box::new(Awake { state })))
    }

    fn lower(
        &self,
        next: &[Arc<dyn ParkableSlot>],
        pool: &Pool,
        missing: u64,
        made: &mut MadeRoom,
    ) -> Result<usize, Error> {
        let next = next.iter().filter_map(|slot| (&**slot as &dyn Any).downcast_ref());
        let slots: Vec<&Slot> = iter::once(self).chain(next).collect();
        let mut group = Group::new(&slots, pool, missing);
        while let Err(error) = group.park(made) {
            match error {
                Error::TierFull { .. } if group.len() > 1 => group.keep(group.len() / 2),
                Error::TierFull { .. } => return group.demote(missing, made).map(|()| group.seen - 1),
                error => return Err(error),
            }
        }
        Ok(group.seen - 1)
    }
}

/// Whether a sequence is in the cache of these pages and is not poisoned.
fn may_go(sequence: &Sequence, pool: &Pool) -> bool {
    std::ptr::eq(&sequence.inner.pool, pool) && sequence.sound().is_ok()
}

/// A handle on a sequence that its cache may park: a [`Step`](crate::Step) or [`Cache::make_room`] that lacks memory moves whole parkable
/// sequences to a lower tier, lowest [priority](Parkable::set_priority) first, among equals the least recently stepped first. A server
/// keeps its requests in such handles, and takes a sequence out for the time of a step.
///
/// Sequences are parked only for handles of equal or higher priority, when these wake or are in a step. Otherwise the step is refused with
/// [`Error::OutOfBudget`], and the server can begin it without the sequence. For sequences without a handle, and for [`Cache::make_room`],
/// any parkable sequence may be parked.
///
/// A sequence is not parked while an [awake](Parkable::awake) guard exists, as during a step. Other threads skip it without waiting, so
/// they cannot deadlock. If a thread panics with a guard, the handle stays usable; its sequence may be [poisoned](Error::Poisoned).
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::save::Parkable;
/// use pikv::tiers::Tiers;
/// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
///
/// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 8 << 10);
/// let cache = Cache::new(config.tiers(Tiers::new().host(1 << 20)))?;
/// let mut chats: Vec<Parkable> = (0..3).map(|_| Parkable::new(cache.sequence())).collect();
/// for chat in &mut chats {
///     let mut chat = chat.awake()?;
///     let mut step = cache.begin([(&mut *chat, 100)])?;       // the third finds no room, and the first is parked for it
///     step.append(0, &[0.5; 100 * 4], &[0.25; 100 * 4])?;
///     step.commit()?;
/// }
/// assert!(chats[0].is_parked() && !chats[2].is_parked());
/// assert_eq!(chats[0].awake()?.next_position().0, 100);       // it wakes, and the second makes room
/// assert!(chats[1].is_parked());
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Debug)]
pub struct Parkable {
    slot: Arc<Slot>,
}

impl Parkable {
    /// Wraps a sequence, so that its cache may park it. O(1).
    pub fn new(sequence: Sequence) -> Parkable {
        let inner = sequence.inner.clone();
        let (id, priority) = (inner.parkables.id(), AtomicI32::new(0));
        let slot = Arc::new(Slot { id, priority, state: Mutex::new(State::Awake(Box::new(sequence))) });
        inner.parkables.add(slot.clone());
        Parkable { slot }
    }

    /// Number of the handle, unique in its cache; [`MadeRoom`] refers to it.
    pub fn id(&self) -> u64 {
        self.slot.id
    }

    /// Priority, 0 by default: sequences of lower priority are parked first, and a sequence is not parked for one of lower priority.
    pub fn priority(&self) -> i32 {
        self.slot.priority.load(Ordering::Relaxed)
    }

    /// Sets [`priority`](Parkable::priority).
    pub fn set_priority(&self, priority: i32) {
        self.slot.priority.store(priority, Ordering::Relaxed);
    }

    /// The sequence, which is not parked while the guard exists. If it is parked, this wakes it, and parks others of at most its priority
    /// if needed. O(1) if it is awake, else as [`Parked::wake`].
    ///
    /// # Errors
    /// The errors of [`Parked::wake`]; the sequence stays parked then.
    pub fn awake(&mut self) -> Result<Awake<'_>, Error> {
        let priority = Some(self.priority());
        let mut state = self.slot.state();
        if let State::Parked(parked) = &*state {
            *state = State::Awake(Box::new(parked.wake_for(priority)?));
        }
        Ok(Awake::new(state, priority))
    }

    /// The sequence if it is not parked, as [`Parkable::awake`].
    pub fn if_awake(&mut self) -> Option<Awake<'_>> {
        let (priority, state) = (Some(self.priority()), self.slot.state());
        matches!(&*state, State::Awake(_)).then(|| Awake::new(state, priority))
    }

    /// Whether it is parked.
    pub fn is_parked(&self) -> bool {
        matches!(&*self.slot.state(), State::Parked(_))
    }

    /// Tokens of the sequence, parked or not; equals the position of the next token.
    pub fn next_position(&self) -> Position {
        match &*self.slot.state() {
            State::Awake(sequence) => sequence.next_position(),
            State::Parked(parked) => parked.next_position(),
            State::Gone => Position(0),
        }
    }

    /// Bytes of its pages in all tiers.
    pub fn bytes(&self) -> u64 {
        match &*self.slot.state() {
            State::Awake(sequence) => {
                let tiers = sequence.inner.pool.tiers.as_ref().map_or(0, |tiers| tiers.levels.len());
                sequence.bytes() + (1..=tiers).map(|tier| sequence.bytes_in_tier(tier)).sum::<u64>()
            }
            State::Parked(parked) => parked.bytes(),
            State::Gone => 0,
        }
    }

    /// Bytes of the first tier that waking takes; 0 if it is awake. Pages that were in a lower tier before it was parked stay there.
    pub fn bytes_to_wake(&self) -> u64 {
        match &*self.slot.state() {
            State::Parked(parked) => parked.bytes_to_wake(),
            _ => 0,
        }
    }

    /// Parks the sequence now, as [`Sequence::park`]; does nothing if it is parked.
    ///
    /// # Errors
    /// The errors of [`Sequence::park`]; the sequence stays awake then.
    pub fn park(&mut self, tier: usize) -> Result<(), Error> {
        let mut state = self.slot.state();
        if let State::Awake(sequence) = &mut *state {
            let parked = sequence.park(tier)?;
            *state = State::Parked(parked);
        }
        Ok(())
    }

    /// Takes the sequence out of the handle; the cache does not park it any more.
    ///
    /// # Errors
    /// The parked sequence, if it is parked; it can be woken and saved.
    pub fn into_inner(self) -> Result<Sequence, Parked> {
        match mem::replace(&mut *self.slot.state(), State::Gone) {
            State::Awake(mut sequence) => {
                sequence.priority = None;
                Ok(*sequence)
            }
            State::Parked(parked) => Err(parked),
            State::Gone => unreachable!("only this call takes it out, and ends the handle"),
        }
    }
}

/// Guard of a [`Parkable`] sequence, which is not parked while the guard exists. Dereferences to [`Sequence`].
pub struct Awake<'a> {
    state: MutexGuard<'a, State>,
}

impl<'a> Awake<'a> {
    /// `priority` is that of the handle, for steps with this sequence.
    fn new(mut state: MutexGuard<'a, State>, priority: Option<i32>) -> Awake<'a> {
        if let State::Awake(sequence) = &mut *state {
            sequence.priority = priority;
        }
        Awake { state }
    }
}

impl fmt::Debug for Awake<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Awake").field(&**self).finish()
    }
}

impl Deref for Awake<'_> {
    type Target = Sequence;

    fn deref(&self) -> &Sequence {
        let State::Awake(sequence) = &*self.state else {
            unreachable!("a guard is made of one that is awake")
        };
        sequence
    }
}

impl DerefMut for Awake<'_> {
    fn deref_mut(&mut self) -> &mut Sequence {
        let State::Awake(sequence) = &mut *self.state else {
            unreachable!("a guard is made of one that is awake")
        };
        sequence
    }
}

impl Cache {
    /// Frees memory until `bytes` of the budget are free: first prefixes of an index that no sequence reads, then [`Parkable`] sequences,
    /// parked in lower tiers, lowest priority first, among equals the least recently stepped first. Skips sequences that are
    /// [awake](Parkable::awake), such as those in a step, and those that share all their pages. Stops as soon as enough is free. Sequences
    /// that have to go at once are parked [together](Cache::park): a page that they share is written once. If no tier has room for a whole
    /// sequence, its full pages are [demoted](Sequence::demote). Last it demotes pages that such sequences share.
    ///
    /// [`Cache::begin`], [`Parked::wake`] and [`Cache::restore`] do the same before they return [`Error::OutOfBudget`]; a server calls this
    /// to do it at another time. O(bytes moved, and pages examined).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::save::Parkable;
    /// use pikv::tiers::Tiers;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20);
    /// let cache = Cache::new(config.tiers(Tiers::new().host(1 << 20)))?;
    /// let mut chats: Vec<Parkable> = (0..2).map(|_| Parkable::new(cache.sequence())).collect();
    /// for chat in &mut chats {
    ///     let mut chat = chat.awake()?;
    ///     let mut step = cache.begin([(&mut *chat, 100)])?;
    ///     step.append(0, &[0.5; 100 * 4], &[0.25; 100 * 4])?;
    ///     step.commit()?;
    /// }
    /// chats[0].set_priority(1);                                   // it is parked last
    /// let usage = cache.usage();
    /// let made = cache.make_room(usage.budget - usage.taken + 1)?; // a byte more than there is
    /// assert_eq!((made.parked, made.freed), (vec![chats[1].id()], usage.taken / 2));
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoTiers`] in a cache without tiers, before anything is freed; [`Error::Tier`] or [`Error::Device`] on a failure, if fewer
    /// than `bytes` are free. Sequences already moved stay parked; no page is lost.
    pub fn make_room(&self, bytes: u64) -> Result<MadeRoom, Error> {
        if self.inner.pool.tiers.is_none() {
            return Err(Error::NoTiers);
        }
        self.inner.make_room(bytes, None)
    }
}
