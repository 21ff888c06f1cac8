//! Sequences that a cache may park by itself, when room is wanted.

use crate::base::chunks::Chunks;
use crate::base::error::Error;
use crate::cache::Cache;
use crate::cache::parkables::{MadeRoom, ParkableSlot, Turn};
use crate::cache::save::Parked;
use crate::cache::sequence::Sequence;
use crate::memory::arena::Page;
use crate::memory::pool::Pool;
use crate::pages::sealed::Sealed;
use pikv_core::page::Position;
use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Where the pages of a parkable sequence are.
#[derive(Debug)]
enum State {
    Awake(Box<Sequence>),
    Parked(Parked),
    /// The handle gave it away.
    Gone,
}

#[derive(Debug)]
struct Slot {
    id: u64,
    priority: AtomicI32,
    state: Mutex<State>,
}

impl Slot {
    /// What it is, once nobody else looks. A thread that panicked with it left a sequence that says itself whether it is whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, unless somebody has it: a step, or another thread that makes room.
    fn idle(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl ParkableSlot for Slot {
    fn turn(&self, pool: &Pool) -> Option<Turn> {
        match &*self.idle()? {
            State::Awake(sequence) if may_go(sequence, pool) => Some(Turn {
                priority: self.priority.load(Ordering::Relaxed),
                stepped: sequence.stepped,
                id: self.id,
            }),
            _ => None,
        }
    }

    fn lower(&self, pool: &Pool, missing: u64, made: &mut MadeRoom) -> Result<(), Error> {
        let Some(mut state) = self.idle() else { return Ok(()) };
        let State::Awake(sequence) = &mut *state else { return Ok(()) };
        if !may_go(sequence, pool) {
            return Ok(());
        }
        let own = sequence.own_bytes();
        if own == 0 {
            return Ok(());
        }
        match sequence.park(1) {
            Ok(parked) => {
                *state = State::Parked(parked);
                made.freed += own;
                made.parked.push(self.id);
                Ok(())
            }
            Err(Error::TierFull { .. }) => {
                let came = sequence.demote(missing)?;
                made.freed += came;
                if came > 0 {
                    made.demoted.push(self.id);
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether a sequence lies in the cache of these pages, and is whole.
fn may_go(sequence: &Sequence, pool: &Pool) -> bool {
    std::ptr::eq(&sequence.inner.pool, pool) && sequence.sound().is_ok()
}

/// A sequence that its cache may park: a [`Step`](crate::Step) or [`Cache::make_room`] that lacks memory moves whole parkable sequences to a
/// lower tier, of the lowest [priority](Parkable::set_priority) first, of equals the one first that was in a step least recently. A server
/// keeps its requests in handles like this, and takes a sequence out for the time of a step.
///
/// A priority protects: nobody is parked for a handle of a lower one that wakes, nor for a step with a sequence of such a handle; that is
/// refused with [`Error::OutOfBudget`], and a server can take the sequence out of the step. For sequences that are not in a handle, and
/// for [`Cache::make_room`], everybody may go.
///
/// Nobody parks a sequence that is [awake](Parkable::awake) as long as the guard is there, so none that is in a step; and whoever makes room
/// passes over it instead of waiting for it, so no order of threads waits for itself. A thread that panics with a guard leaves the handle
/// as usable as the sequence is.
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
    /// Has the cache of a sequence park it when room is wanted. O(1).
    pub fn new(sequence: Sequence) -> Parkable {
        let inner = sequence.inner.clone();
        let (id, priority) = (inner.parkables.id(), AtomicI32::new(0));
        let slot = Arc::new(Slot { id, priority, state: Mutex::new(State::Awake(Box::new(sequence))) });
        inner.parkables.add(slot.clone());
        Parkable { slot }
    }

    /// A number that no other handle of the cache has or had, by which [`MadeRoom`] names it.
    pub fn id(&self) -> u64 {
        self.slot.id
    }

    /// How much it matters that the sequence stays, 0 to begin with: those of a lower one are parked first, and nobody is parked for one of
    /// a lower priority than its own.
    pub fn priority(&self) -> i32 {
        self.slot.priority.load(Ordering::Relaxed)
    }

    /// Sets [`priority`](Parkable::priority).
    pub fn set_priority(&self, priority: i32) {
        self.slot.priority.store(priority, Ordering::Relaxed);
    }

    /// The sequence, which nobody parks as long as the guard is there. If it is parked it wakes, and others of at most its priority are parked
    /// for it if need be. O(1) where it is awake, else as [`Parked::wake`].
    ///
    /// # Errors
    /// Those of [`Parked::wake`]; it is parked still then.
    pub fn awake(&mut self) -> Result<Awake<'_>, Error> {
        let priority = Some(self.priority());
        let mut state = self.slot.state();
        if let State::Parked(parked) = &*state {
            *state = State::Awake(Box::new(parked.wake_for(priority)?));
        }
        Ok(Awake::new(state, priority))
    }

    /// The sequence if it is awake, as [`Parkable::awake`].
    pub fn if_awake(&mut self) -> Option<Awake<'_>> {
        let (priority, state) = (Some(self.priority()), self.slot.state());
        matches!(&*state, State::Awake(_)).then(|| Awake::new(state, priority))
    }

    /// Whether it is parked.
    pub fn is_parked(&self) -> bool {
        matches!(&*self.slot.state(), State::Parked(_))
    }

    /// Tokens of the sequence, which is the next token's position, parked or not.
    pub fn next_position(&self) -> Position {
        match &*self.slot.state() {
            State::Awake(sequence) => sequence.next_position(),
            State::Parked(parked) => parked.next_position(),
            State::Gone => Position(0),
        }
    }

    /// Bytes of its pages, those in lower tiers included.
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

    /// Bytes that waking it takes of the first tier; 0 if it is awake. Pages that lay in a lower tier before it was parked stay there.
    pub fn bytes_to_wake(&self) -> u64 {
        match &*self.slot.state() {
            State::Parked(parked) => parked.bytes_to_wake(),
            _ => 0,
        }
    }

    /// Parks it now, as [`Sequence::park`]; nothing if it is parked.
    ///
    /// # Errors
    /// Those of [`Sequence::park`]; it is awake still then.
    pub fn park(&mut self, tier: usize) -> Result<(), Error> {
        let mut state = self.slot.state();
        if let State::Awake(sequence) = &mut *state {
            let parked = sequence.park(tier)?;
            *state = State::Parked(parked);
        }
        Ok(())
    }

    /// The sequence, or what is parked of it; nobody else parks it from then on.
    ///
    /// # Errors
    /// What is parked, if it is: it can wake, and be saved.
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

/// A [`Parkable`] sequence that stays awake as long as this is there. It is used as the [`Sequence`] that it holds.
pub struct Awake<'a> {
    state: MutexGuard<'a, State>,
}

impl<'a> Awake<'a> {
    /// Of one that is awake: steps see what its handle's priority is.
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
    /// Has `bytes` of the budget be free: as long as they are not, prefixes go that an index holds and no sequence reads, then [`Parkable`]
    /// sequences are parked in the tiers beneath, of the lowest priority first, of equals the one first that was in a step least recently.
    /// It passes over those that are [awake](Parkable::awake) in somebody's hands, in a step for one, and those that share all their pages, and
    /// stops as soon as there is enough. Where no tier has room for a whole sequence, its full pages are [demoted](Sequence::demote).
    ///
    /// [`Cache::begin`], [`Parked::wake`] and [`Cache::restore`] do the same before they return [`Error::OutOfBudget`], since who registers a
    /// sequence as parkable agrees to that; a server calls this to do it at a time of its own. O(bytes moved, and pages looked at).
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
    /// [`Error::NoTiers`] in a cache without tiers, before anything goes; [`Error::Tier`] or a device, if they failed and there is less than
    /// was asked for. What moved before stays moved, and nothing is lost.
    pub fn make_room(&self, bytes: u64) -> Result<MadeRoom, Error> {
        if self.inner.pool.tiers.is_none() {
            return Err(Error::NoTiers);
        }
        self.inner.make_room(bytes, None)
    }
}

/// References to values that several may hold, by address.
struct References<T>(HashMap<usize, (usize, usize, T)>);

impl<T> References<T> {
    fn new() -> References<T> {
        References(HashMap::new())
    }

    /// One more to the value at an address, which has so many holders in all.
    fn note(&mut self, (at, holders): (usize, usize), value: T) {
        self.0.entry(at).or_insert((0, holders, value)).0 += 1;
    }

    /// The values of which all holders were noted: nobody else has them.
    fn own(self) -> impl Iterator<Item = T> {
        self.0.into_values().filter(|(noted, holders, _)| noted == holders).map(|(.., value)| value)
    }
}

impl Sequence {
    /// Bytes of pages of the first tier that nobody else refers to: neither to the page, nor to the list or the layer in which it stands.
    fn own_bytes(&self) -> u64 {
        // Forks have the same checkpoints.
        let kept = self.checkpoints.iter().filter(|kept| Arc::strong_count(kept) == 1);
        let mut layers = References::new();
        let all = self.layers.iter().chain(kept.flat_map(|kept| &kept.layers));
        all.for_each(|layer| layers.note(layer.holders(), &**layer));
        let (mut sealed, mut lists, mut pages) = (References::new(), References::new(), References::new());
        let mut note = |page: &Page| pages.note((page.key(), page.handles() as usize), page.bytes());
        for layer in layers.own() {
            for head in &layer.heads {
                head.ring.iter().for_each(&mut note);
                let parts = head.chains.iter().flat_map(|(_, chain)| chain.entries.parts());
                parts.for_each(|(holders, entries)| lists.note(holders, entries));
            }
            layer.past.pages().flat_map(|held| held.pages()).for_each(&mut note);
            layer.sealed.iter().for_each(|ahead| sealed.note(ahead.holders(), ahead));
        }
        let parts = sealed.own().flat_map(Sealed::lists).flat_map(Chunks::parts);
        parts.for_each(|(holders, entries)| lists.note(holders, entries));
        let entries = lists.own().flatten();
        entries.flat_map(|entry| entry.held.pages()).for_each(&mut note);
        pages.own().sum()
    }
}
