//! Prefix cache: finds sequences by their first tokens ([`PrefixIndex`]).

mod evict;
mod leaves;
#[cfg(test)]
mod tests;
mod tree;

use crate::base::error::Error;
use crate::cache::Cache;
use crate::cache::idle::Spare;
use crate::cache::sequence::{Sequence, SequenceOptions};
use crate::metrics::PrefixUsage;
use crate::prefix::tree::{Boundary, Bytes, Published, Tree};
use pikv_core::page::PAGE;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Instant;

/// Name of a boundary: a keyed hash of the scope and of all tokens before it.
pub(crate) type Key = [u8; 32];

/// Number of parts of the map, each with a lock.
const PARTS: usize = 64;

/// Scope of a prefix: who may find it, and the adapter that computed it. It is part of the name of a prefix, beside the tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixScope<'a> {
    /// Bytes that must be equal to find a prefix, such as a tenant, a salt or the model's revision.
    pub scope: &'a [u8],
    /// Name of the adapter that computed keys and values; empty for none.
    pub adapter: &'a str,
    /// Version of the adapter; change it with the adapter's weights.
    pub version: u64,
    /// [Budget](Sequence::budget) of the sequences to find; `None` by default. A published sequence is filed under its own budget, and
    /// found only with an equal one.
    pub budget: Option<u32>,
}

impl<'a> PrefixScope<'a> {
    /// A scope of these bytes, without an adapter or a budget.
    pub fn new(scope: &'a [u8]) -> PrefixScope<'a> {
        PrefixScope { scope, ..PrefixScope::default() }
    }

    /// Bytes to hash: each field preceded by its length, and the budget of the sequence.
    fn encoded(&self, budget: Option<u32>) -> Arc<[u8]> {
        let mut bytes = b"pikv prefix 1".to_vec();
        for field in [self.scope, self.adapter.as_bytes()] {
            bytes.extend((field.len() as u64).to_le_bytes());
            bytes.extend(field);
        }
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(budget.into_iter().flat_map(u32::to_le_bytes));
        bytes.into()
    }
}

setters!(PrefixScope<'a> {
    scope: &'a [u8],
    adapter: &'a str,
    version: u64,
} optional { budget: u32 });

/// Finds the longest prefix of a request's tokens that was computed before, and returns a fork of it.
///
/// An index belongs to one cache, so all prefixes have the shapes, dtypes, codecs and policies of its configuration. Clones are handles to
/// the same index. Calls from several threads do not block each other, except that a look-up waits while an entry of its part of the map is
/// written or its sequence is being evicted, and calls that publish wait for each other.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::prefix::{PrefixIndex, PrefixScope};
/// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 64, Dtype::Bf16);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 4 << 20).ring(64))?;
/// let index = PrefixIndex::new(&cache, 1 << 20);          // at most 1 MiB of pages that no sequence reads
/// let tenant = PrefixScope::new(b"tenant 7, model revision 3");
/// let prompt: Vec<u32> = (0..200).collect();
///
/// for known in [0, 192] {
///     let mut sequence = index.find(&tenant, &prompt)?;
///     assert_eq!(sequence.next_position().0, known);      // what is known need not be computed
///     let rest = &prompt[known as usize..];
///     let mut step = cache.begin([(&mut sequence, rest.len() as u32)])?;
///     step.append(0, &vec![0.5; rest.len() * 64], &vec![0.25; rest.len() * 64])?;
///     step.commit()?;
///     index.publish(&tenant, &prompt, &mut sequence)?;
/// }
/// assert_eq!(index.find(&PrefixScope::new(b"tenant 8"), &prompt)?.next_position().0, 0);
/// assert_eq!(index.usage().hit_tokens, 192);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixIndex {
    shared: Arc<Shared>,
}

/// State shared by the clones of an index.
#[derive(Debug)]
struct Shared {
    cache: Cache,
    budget: u64,
    key: Key,
    parts: Vec<RwLock<HashMap<Key, Arc<Boundary>>>>,
    tree: Mutex<Tree>,
    since: Instant,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    bytes: AtomicU64,
    lower: AtomicU64,
    boundaries: AtomicU64,
    lookups: AtomicU64,
    asked_tokens: AtomicU64,
    hits: AtomicU64,
    hit_tokens: AtomicU64,
    hit_age: AtomicU64,
    evictions: AtomicU64,
    evicted_tokens: AtomicU64,
    evicted_age: AtomicU64,
    unequal: AtomicU64,
}

impl Counts {
    fn hold(&self, bytes: Bytes) {
        add(&self.bytes, bytes.all);
        add(&self.lower, bytes.lower);
    }

    fn let_go(&self, bytes: Bytes) {
        self.bytes.fetch_sub(bytes.all, Relaxed);
        self.lower.fetch_sub(bytes.lower, Relaxed);
    }
}

fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Relaxed);
}

impl PrefixIndex {
    /// An empty index of sequences of `cache`, which holds at most `budget` bytes of pages, in all tiers. Its pages in the first tier also
    /// count in the cache's budget: before a step is refused, it takes pages of prefixes that no sequence reads. In a cache with
    /// [tiers](crate::tiers) full pages of such prefixes are first moved down, the least recently used first; prefixes are evicted if that
    /// is not enough. With a budget of 0 the index stays empty.
    pub fn new(cache: &Cache, budget: u64) -> PrefixIndex {
        let mut seed = Vec::new();
        // Each `RandomState` has random keys from the system.
        (0..8).for_each(|i: u64| seed.extend(RandomState::new().hash_one(i).to_le_bytes()));
        let shared = Arc::new(Shared {
            cache: cache.clone(),
            budget,
            key: blake3::derive_key("pikv prefix index 2025 random key", &seed),
            parts: (0..PARTS).map(|_| RwLock::default()).collect(),
            tree: Mutex::default(),
            since: Instant::now(),
            counts: Counts::default(),
        });
        let spare: Arc<dyn Spare> = shared.clone();
        cache.inner.idle.add(&spare);
        PrefixIndex { shared }
    }

    /// Returns a fork of the longest known prefix of `tokens` in the scope, or an empty sequence; [`Sequence::next_position`] is its
    /// length. As long as the fork lives, the prefix is not evicted.
    ///
    /// Prefixes are found at every 32 tokens if [`Sequence::fork_at`] can fork at any length, else at checkpoints. At least one of `tokens`
    /// is left to compute. The tokens themselves are compared, not only their hashes. O(tokens found).
    ///
    /// # Errors
    /// [`Error::Tier`], [`Error::Device`] if pages cannot be read; [`Error::SequenceBudget`] for a budget that would have no effect.
    /// Without memory for the pages of the ring, a prefix counts as not found.
    pub fn find(&self, scope: &PrefixScope<'_>, tokens: &[u32]) -> Result<Sequence, Error> {
        let shared = &*self.shared;
        let counts = &shared.counts;
        add(&counts.lookups, 1);
        add(&counts.asked_tokens, tokens.len() as u64);
        let root = scope.encoded(scope.budget);
        let mut found = shared.longest(&root, tokens);
        while let Some(boundary) = found {
            if let Some(sequence) = shared.fork(&root, tokens, &boundary)? {
                let now = shared.now();
                add(&counts.hits, 1);
                add(&counts.hit_tokens, u64::from(boundary.len));
                add(&counts.hit_age, now.saturating_sub(boundary.used.swap(now, Relaxed)));
                return Ok(sequence);
            }
            found = boundary.parent();
        }
        let options = SequenceOptions { budget: scope.budget };
        shared.cache.sequence_with(options)
    }

    /// Adds the prefixes of a sequence, given with its first tokens, for others to find; returns the length of the longest that can be
    /// found afterwards. Pages of a prefix that is already known are shared, not stored twice.
    ///
    /// Prefixes are added at every 32 tokens if [`Sequence::fork_at`] can fork the sequence at any length. Otherwise they are added at its
    /// [checkpoints](Sequence::checkpoint) and at its length, at those that are multiples of 32, and not where [`Sequence::evict`] or
    /// [`Sequence::pin`] changed which tokens are held. A found prefix has no pins. The published prefix is not evicted while the sequence
    /// lives. O(tokens, and pages of the prefix).
    ///
    /// # Errors
    /// [`Error::ForeignSequence`], [`Error::Poisoned`]; [`Error::Tier`], [`Error::Device`] if pages cannot be read. A prefix that does not
    /// fit is not added, without an error.
    pub fn publish(
        &self,
        scope: &PrefixScope<'_>,
        tokens: &[u32],
        sequence: &mut Sequence,
    ) -> Result<u32, Error> {
        self.shared.publish(scope, tokens, sequence)
    }

    /// Counts of look-ups since the index was built, and bytes held.
    pub fn usage(&self) -> PrefixUsage {
        let counts = &self.shared.counts;
        let of = |count: &AtomicU64| count.load(Relaxed);
        PrefixUsage {
            bytes: of(&counts.bytes),
            lower: of(&counts.lower),
            boundaries: of(&counts.boundaries),
            lookups: of(&counts.lookups),
            asked_tokens: of(&counts.asked_tokens),
            hits: of(&counts.hits),
            hit_tokens: of(&counts.hit_tokens),
            hit_age: std::time::Duration::from_nanos(of(&counts.hit_age)),
            evictions: of(&counts.evictions),
            evicted_tokens: of(&counts.evicted_tokens),
            evicted_age: std::time::Duration::from_nanos(of(&counts.evicted_age)),
            unequal: of(&counts.unequal),
        }
    }

    /// Drops all prefixes except those that living sequences were found by or published to.
    pub fn clear(&self) {
        self.shared.evict_until(&mut self.shared.tree(), &|| false);
    }
}

impl Shared {
    fn now(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        // No user code runs while the lock is held.
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part(&self, key: &Key) -> &RwLock<HashMap<Key, Arc<Boundary>>> {
        &self.parts[usize::from(key[0]) % PARTS]
    }

    fn get(&self, key: &Key) -> Option<Arc<Boundary>> {
        self.part(key).read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Name of the empty prefix.
    fn root_key(&self, root: &[u8]) -> Key {
        *blake3::keyed_hash(&self.key, root).as_bytes()
    }

    /// Name of the boundary 32 tokens after `before`.
    fn next_key(&self, before: &Key, tokens: &[u32]) -> Key {
        let mut bytes = [0; 32 + 4 * PAGE as usize];
        bytes[..32].copy_from_slice(before);
        for (to, token) in bytes[32..].as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
            *to = token.to_le_bytes();
        }
        let key = *blake3::keyed_hash(&self.key, &bytes).as_bytes();
        #[cfg(test)]
        if tests::weak() {
            return [1; 32].map(|byte: u8| byte.wrapping_add(before[0]));
        }
        key
    }

    /// The last known boundary of `tokens`, at least one token before their end. Goes ahead by 1, 2, 4, .. blocks until one is unknown,
    /// then bisects.
    fn longest(&self, root: &[u8], tokens: &[u32]) -> Option<Arc<Boundary>> {
        let blocks = tokens.len().saturating_sub(1) / PAGE as usize;
        let mut keys = vec![self.root_key(root)];
        let mut key_of = |block: usize| {
            while keys.len() <= block {
                let from = (keys.len() - 1) * PAGE as usize;
                keys.push(self.next_key(&keys[keys.len() - 1], &tokens[from..from + PAGE as usize]));
            }
            keys[block]
        };
        let (mut low, mut found, mut step) = (0, None, 1);
        let mut high = blocks + 1;
        while low + 1 < high {
            let at = if step > 0 { (low + step).min(high - 1) } else { low.midpoint(high) };
            match self.get(&key_of(at)) {
                Some(boundary) => (low, found, step) = (at, Some(boundary), 2 * step),
                None => (high, step) = (at, 0),
            }
        }
        found
    }

    /// Forks the sequence stored at a boundary, if its tokens are equal.
    fn fork(&self, root: &[u8], tokens: &[u32], at: &Boundary) -> Result<Option<Sequence>, Error> {
        let Some(stored) = at.stored.get() else { return Ok(None) };
        // Protects it from eviction.
        let lease = at.lease.clone();
        let known = tokens.get(..at.len as usize).is_some_and(|tokens| stored.starts_with(root, tokens));
        if !known {
            add(&self.counts.unequal, 1);
            return Ok(None);
        }
        let mut again = true;
        loop {
            let sequence = stored.sequence.read().unwrap_or_else(PoisonError::into_inner);
            let forked = sequence.as_ref().map(|sequence| sequence.fork_at(at.len));
            drop(sequence);
            match forked {
                Some(Ok(mut fork)) if fork.len == at.len => {
                    fork.lease_of_prefix = Some(lease);
                    return Ok(Some(fork));
                }
                Some(Err(Error::OutOfBudget { needed, available })) if again => {
                    again = false;
                    self.cache.inner.idle.give_back(needed.saturating_sub(available));
                }
                None | Some(Ok(_) | Err(Error::OutOfBudget { .. } | Error::Cut { .. })) => return Ok(None),
                Some(Err(error)) => return Err(error),
            }
        }
    }

    fn publish(
        &self,
        scope: &PrefixScope<'_>,
        tokens: &[u32],
        sequence: &mut Sequence,
    ) -> Result<u32, Error> {
        if !Arc::ptr_eq(&sequence.inner, &self.cache.inner) {
            return Err(Error::ForeignSequence { index: 0 });
        }
        sequence.sound()?;
        sequence.repair();
        let most = sequence.len.min(tokens.len().try_into().unwrap_or(u32::MAX));
        // Lengths of the forks to store, ascending.
        let lengths: Vec<u32> = match sequence.cuts_anywhere() {
            true => vec![most - most % PAGE],
            false => {
                let own = sequence.checkpoints().filter(|len| *len != sequence.len).chain([sequence.len]);
                own.filter(|len| *len <= most && len.is_multiple_of(PAGE)).collect()
            }
        };
        let Some(&last) = lengths.last().filter(|last| **last > 0 && self.budget > 0) else { return Ok(0) };
        let root = scope.encoded(sequence.budget);
        let mut keys = vec![self.root_key(&root)];
        for block in tokens[..last as usize].chunks_exact(PAGE as usize) {
            keys.push(self.next_key(&keys[keys.len() - 1], block));
        }
        let tree = &mut *self.tree();
        let mut found = 0;
        for &len in lengths.iter().filter(|len| **len > 0) {
            match self.take_in(tree, (&root, &keys), &tokens[..len as usize], sequence)? {
                Some(boundary) => {
                    sequence.lease_of_prefix = Some(boundary.lease.clone());
                    found = len;
                }
                None => break,
            }
        }
        Ok(found)
    }

    /// Stores a fork of a sequence with exactly these tokens and returns its boundary; `None` if it does not fit, or if the boundary of
    /// other tokens has the same name.
    fn take_in(
        &self,
        tree: &mut Tree,
        (root, keys): (&Arc<[u8]>, &[Key]),
        tokens: &[u32],
        sequence: &Sequence,
    ) -> Result<Option<Arc<Boundary>>, Error> {
        let len = tokens.len() as u32;
        let blocks = (len / PAGE) as usize;
        let known: Vec<Arc<Boundary>> = keys[1..=blocks].iter().map_while(|key| self.get(key)).collect();
        let same = |boundary: &Arc<Boundary>| {
            let stored = boundary.stored.get()?;
            Some(stored.starts_with(root, &tokens[..boundary.len as usize]))
        };
        // The last stored boundary has the tokens of all earlier ones.
        if known.iter().rev().find_map(same) == Some(false) {
            add(&self.counts.unequal, 1);
            return Ok(None);
        }
        if let Some(last) = known.get(blocks - 1).filter(|last| last.stored.get().is_some()) {
            last.used.store(self.now(), Relaxed);
            return Ok(Some(last.clone()));
        }
        let anywhere = sequence.cuts_anywhere();
        let mut kept = match self.making_room(tree, || sequence.fork_at(len)) {
            // A sequence with evictions by hand, or with pins that kept tokens, may hold other tokens than a fresh one would.
            Ok(kept) if kept.len == len && !kept.altered => kept,
            Ok(_) | Err(Error::OutOfBudget { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        (kept.checkpoints, kept.lease_of_prefix) = (Vec::new(), None);
        kept.pins.clear();
        if let Some((boundary, stored)) =
            known.iter().rev().find_map(|known| Some((known, known.stored.get()?)))
            && let Some(theirs) = &*stored.sequence.read().unwrap_or_else(PoisonError::into_inner)
        {
            kept.share(theirs, boundary.len);
        }
        if self.cache.inner.fabric.is_none()
            && let Err(error) = self.making_room(tree, || kept.seal())
            && !matches!(error, Error::OutOfBudget { .. })
        {
            return Err(error);
        }
        let bytes = tree.add_pages(&kept);
        self.counts.hold(bytes);
        self.evict_until(tree, &|| self.counts.bytes.load(Relaxed) <= self.budget);
        // Making room may have evicted the boundary to append to.
        let gone = known.last().is_some_and(|last| self.get(&last.key).is_none());
        if gone || self.counts.bytes.load(Relaxed) > self.budget {
            self.counts.let_go(tree.take_pages(&kept));
            return Ok(None);
        }
        let sequence = RwLock::new(Some(kept));
        let (tokens, lowered) = (tokens.into(), AtomicBool::new(false));
        let stored = Arc::new(Published { root: root.clone(), tokens, sequence, lowered });
        let mut parent = known.last().cloned();
        if let Some(last) = known.get(blocks - 1) {
            let _ = last.stored.set(stored);
            return Ok(parent);
        }
        let since = known.len() + 1;
        for (block, &key) in (since..).zip(&keys[since..=blocks]) {
            // A sequence that can only be forked at checkpoints is stored only at the last boundary.
            let own = (anywhere || block == blocks).then(|| stored.clone());
            parent = Some(self.insert(tree, (key, block as u32 * PAGE), parent, own));
        }
        Ok(parent)
    }

    /// Inserts a boundary after `parent`, which then is not a leaf.
    fn insert(
        &self,
        tree: &mut Tree,
        (key, len): (Key, u32),
        parent: Option<Arc<Boundary>>,
        stored: Option<Arc<Published>>,
    ) -> Arc<Boundary> {
        let boundary = Arc::new(Boundary {
            key,
            len,
            parent: parent.as_ref().map_or_else(Weak::new, Arc::downgrade),
            stored: stored.map_or_else(OnceLock::new, OnceLock::from),
            used: AtomicU64::new(self.now()),
            children: AtomicU32::new(0),
            lease: Arc::default(),
        });
        if let Some(parent) = parent {
            parent.children.fetch_add(1, Relaxed);
            tree.leaves.remove(&parent.key);
        }
        let mut part = self.part(&key).write().unwrap_or_else(PoisonError::into_inner);
        part.insert(key, boundary.clone());
        drop(part);
        tree.leaves.insert(boundary.clone());
        add(&self.counts.boundaries, 1);
        boundary
    }

    /// Runs `call`; if it exceeds the budget, makes room and runs it once more.
    fn making_room<T>(
        &self,
        tree: &mut Tree,
        mut call: impl FnMut() -> Result<T, Error>,
    ) -> Result<T, Error> {
        match call() {
            Err(Error::OutOfBudget { needed, available }) => {
                self.free(tree, needed.saturating_sub(available));
                call()
            }
            done => done,
        }
    }
}
