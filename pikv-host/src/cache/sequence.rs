//! A sequence: a ring of its newest tokens, and pages of older ones filed by expert.

use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::base::ids::{PageId, Place};
use crate::cache::inner::Inner;
use crate::eviction::evict::enforce;
use crate::memory::arena::{Lease, Page};
use crate::pages::entry::{Entry, Held};
use crate::pages::filing::Layer;
use crate::pages::head::Head;
use crate::router::learnt::Tickets;
use pikv_core::page::{Position, Resident};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The keys and values of one sequence: a ring of its newest tokens, and pages of older ones filed by expert. Its pages are freed when
/// it is dropped.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::report::Place;
/// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).rollback(4))?;
/// let add = |sequence: &mut Sequence, n: usize| -> Result<(), Error> {
///     let mut step = cache.begin([(sequence, n as u32)])?;
///     step.append(0, &vec![0.5; n * 4], &vec![0.25; n * 4])?;
///     step.commit()
/// };
/// let mut sequence = cache.sequence();
/// sequence.pin(0..10);                                    // no policy evicts these positions
/// add(&mut sequence, 100)?;
/// sequence.rollback(3)?;                                  // the newest 3 tokens were never there
/// let mut fork = sequence.fork();                         // the same 97 tokens, in the same pages
/// add(&mut fork, 1)?;
/// assert_eq!((sequence.next_position().0, fork.next_position().0), (97, 98));
///
/// // Of layer 0, KV head 0: the oldest page outside the ring, evicted by hand.
/// let oldest = fork.pages(0, 0)?.find(|page| page.id.place != Place::Ring).expect("66 tokens have left the ring");
/// assert_eq!((oldest.tokens, oldest.first.0), (32, 0));
/// fork.evict(0, 0, oldest.id)?;
/// assert_eq!((fork.resident(0, 0)?.0, sequence.resident(0, 0)?.0), (66, 97));
/// # Ok::<(), Error>(())
/// ```
///
/// In a cache with [tiers](crate::tiers), [`demote`](Sequence::demote) and [`promote`](Sequence::promote) move pages.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) inner: Arc<Inner>,
    /// A fork has them in common until one of both changes.
    pub(crate) layers: Vec<Common<Layer>>,
    pub(crate) len: u32,
    /// First position that every ring still holds.
    pub(crate) kept: u32,
    /// The fewest tokens that it can be taken back to under a policy, whose versions reach no farther.
    pub(crate) floor: u32,
    /// Positions that no policy evicts, in ascending ranges that do not touch.
    pub(crate) pins: Vec<Range<u32>>,
    /// Whether it is being changed while code of the user's runs; it stays so if that panics.
    pub(crate) poisoned: bool,
    /// Whether a step goes on with it, or was leaked.
    pub(crate) stepping: bool,
    /// What is left of the reservation of that step, if the sequence is its first.
    pub(crate) lease: Lease,
    /// Tokens that a rollback reaches and that routers learnt of.
    pub(crate) tickets: Tickets,
    /// Lengths at which steps ended, as far as a rollback reaches.
    pub(crate) ends: VecDeque<u32>,
    /// The sequence as it was at shorter lengths, ascending.
    pub(crate) checkpoints: Vec<Arc<Sequence>>,
    /// By which a prefix index sees that its pages are read.
    pub(crate) lease_of_prefix: Option<Arc<()>>,
    /// Whether it may hold other tokens than one that was given the same tokens and no more: pages were evicted by hand, or tokens pinned
    /// that a policy would have evicted.
    pub(crate) altered: bool,
    /// When it was in a step last, or made, by the cache's clock.
    pub(crate) stepped: u64,
    /// Tokens that a head may hold, where that is less than what the configuration lets it.
    pub(crate) budget: Option<u32>,
    /// That of the [handle](crate::save::Parkable) that it was taken out of, as long as it is: nobody of a higher one is parked for it.
    pub(crate) priority: Option<i32>,
}

/// What one sequence has of its own, for [`Cache::sequence_with`](crate::Cache::sequence_with).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceOptions {
    /// Tokens that each KV head of a layer that evicts may hold, sinks, ring and pages together: what is over it goes as the layer's policy
    /// says. It acts beside the configuration's [`Budget`](crate::policy::Budget): the lesser counts, in heads too that keep all by that.
    /// Sinks and ring stay even if they are more.
    pub budget: Option<u32>,
}

impl SequenceOptions {
    /// Nothing of its own.
    pub fn new() -> SequenceOptions {
        SequenceOptions::default()
    }
}

setters!(SequenceOptions {} optional { budget: u32 });

impl Sequence {
    pub(crate) fn new(inner: Arc<Inner>) -> Sequence {
        let (layers, lease) = (inner.blank.clone(), Lease::new(&inner.pool.arenas));
        let (pins, poisoned, stepping, tickets) = (Vec::new(), false, false, Tickets::default());
        let (ends, checkpoints) = (VecDeque::new(), Vec::new());
        let stepped = inner.clock.load(Ordering::Relaxed);
        Sequence {
            layers,
            inner,
            len: 0,
            kept: 0,
            floor: 0,
            pins,
            poisoned,
            stepping,
            lease,
            tickets,
            ends,
            checkpoints,
            lease_of_prefix: None,
            altered: false,
            stepped,
            budget: None,
            priority: None,
        }
    }

    /// Tokens appended so far, which is the next token's position, whatever was evicted.
    pub fn next_position(&self) -> Position {
        Position(self.len)
    }

    /// Tokens of the ring.
    pub fn in_ring(&self) -> Resident {
        self.inner.shape.store.ring.resident(self.len)
    }

    /// Tokens that a layer's KV head still holds, ring and pages together.
    ///
    /// # Errors
    /// No such layer or KV head.
    pub fn resident(&self, layer: usize, kv_head: usize) -> Result<Resident, Error> {
        if self.stepping {
            return self.repaired().resident(layer, kv_head);
        }
        let head = self.head(layer, kv_head)?;
        Ok(Resident(self.in_ring().0 + head.chains.iter().map(|(_, chain)| chain.live).sum::<u32>()))
    }

    /// The experts that a token was filed by, first choice first; `None` once they are forgotten, and where the cache has one
    /// expert.
    ///
    /// # Errors
    /// No such layer.
    pub fn experts(
        &self,
        layer: usize,
        position: Position,
    ) -> Result<Option<impl Iterator<Item = u16>>, Error> {
        let state = self.layer(layer)?;
        let from = state.known_from(&self.inner.shape, &self.inner.shape.config.layers[layer], self.len);
        let known = self.inner.shape.config.experts > 1 && (from..self.len).contains(&position.0);
        Ok(known.then(|| state.experts(&self.inner.shape, position.0)))
    }

    /// As it is once what a leaked step wrote is undone. O(pages).
    pub(crate) fn repaired(&self) -> Sequence {
        let mut whole = self.copied();
        whole.repair();
        whole
    }

    /// Undoes what a step wrote that was leaked instead of dropped, and gives back what it had reserved.
    pub(crate) fn repair(&mut self) {
        self.lease.give_back();
        if std::mem::take(&mut self.stepping) {
            let inner = self.inner.clone();
            for (layer, shape) in self.layers.iter_mut().zip(&inner.shape.config.layers) {
                layer.abort(&inner.shape, shape, self.len);
            }
        }
    }

    pub(crate) fn copied(&self) -> Sequence {
        let Sequence { inner, layers, pins, tickets, ends, checkpoints, .. } = self;
        let (inner, lease, ends) = (inner.clone(), Lease::new(&inner.pool.arenas), ends.clone());
        let (layers, pins, tickets) = (layers.clone(), pins.clone(), tickets.clone());
        let (checkpoints, lease_of_prefix) = (checkpoints.clone(), self.lease_of_prefix.clone());
        let priority = None;
        Sequence {
            inner,
            layers,
            pins,
            lease,
            tickets,
            ends,
            checkpoints,
            lease_of_prefix,
            priority,
            ..*self
        }
    }

    /// Bytes of pages of the first tier that the sequence refers to ([`Sequence::bytes_in_tier`] for others), those included that only a
    /// rollback would read, those of its [checkpoints](Sequence::checkpoint), and those that were [sealed](Sequence::seal); shared ones
    /// count for each of their sequences. O(pages).
    pub fn bytes(&self) -> u64 {
        if !self.checkpoints.is_empty() || self.layers.iter().any(|layer| layer.sealed.is_some()) {
            return self.distinct_bytes();
        }
        let heads = self.layers.iter().flat_map(|layer| &layer.heads);
        let bytes = |head: &Head| {
            let filed = head.chains.iter().flat_map(|(_, c)| &c.entries).map(Entry::bytes);
            head.ring.iter().map(Page::bytes).chain(filed).sum::<u64>()
        };
        self.past_bytes() + heads.map(bytes).sum::<u64>()
    }

    /// Bytes of pages of the first tier that only a rollback would read.
    pub(crate) fn past_bytes(&self) -> u64 {
        self.layers.iter().flat_map(|layer| layer.past.pages()).map(Held::bytes).sum()
    }

    /// KV heads of each layer.
    pub(crate) fn layer_heads(&self) -> impl Iterator<Item = usize> {
        self.layers.iter().map(|layer| layer.heads.len())
    }

    /// Bytes of host memory that the sequence takes beside its pages, which no budget bounds: lists of pages with what policies keep
    /// of their tokens, of the experts of tokens, and of what a rollback would bring back. From the capacities of the lists; without
    /// what the allocator adds. Where a policy evicts, or a window slides, it is in proportion to what is held, however many tokens
    /// there were. Lists that a fork has in common count for each of their sequences: of a fork that was not added to, all but a pointer a
    /// layer. A layer without tokens takes no more than that. O(experts and pages).
    pub fn table_bytes(&self) -> u64 {
        let lists = self.layers.capacity() * size_of::<Common<Layer>>()
            + self.pins.capacity() * size_of::<Range<u32>>();
        let own = self.layers.iter().zip(&self.inner.blank).filter(|(layer, blank)| !layer.is(blank));
        let layers: u64 = own.map(|(layer, _)| size_of::<Layer>() as u64 + layer.table_bytes()).sum();
        let ends = self.ends.capacity() * size_of::<u32>()
            + self.checkpoints.capacity() * size_of::<Arc<Sequence>>();
        let kept: u64 = self.checkpoints.iter().map(|kept| kept.table_bytes()).sum();
        (lists + ends) as u64 + kept + self.tickets.bytes() + layers
    }

    /// The most tokens that can be taken back now: after a step at least the configured rollback (less what was taken back
    /// since), or all while nothing left the ring for good.
    pub fn rollback_limit(&self) -> u32 {
        let ring = self.inner.shape.store.ring;
        match self.kept {
            0 if self.inner.shape.evicts() => self.len.saturating_sub(self.floor),
            0 => self.len,
            kept => self.len.saturating_sub(kept + ring.window()),
        }
    }

    /// Takes the newest `n` tokens back. What is seen, filed, tagged and counted from then on is as if they had never been
    /// appended, to the bit; what they pushed out of the ring's slack or a window stays gone, which no row can tell. Where policies evict,
    /// back inside a step is as if the step had ended there (to the bit if it was no longer than the configured rollback).
    /// O(n) a layer and head, and what policies evicted and put together since.
    ///
    /// # Errors
    /// [`Error::RollbackTooFar`] past [`Sequence::rollback_limit`], [`Error::Poisoned`]; [`Error::OutOfBudget`] where a policy put pages
    /// together since, a fork shares them by now, and there is no memory for pages of its own. Nothing changes then. A device or a
    /// lower tier that fails leaves the sequence [poisoned](Error::Poisoned).
    pub fn rollback(&mut self, n: u32) -> Result<(), Error> {
        span!("rollback", tokens = n, from = self.len);
        self.sound()?;
        self.repair();
        let limit = self.rollback_limit();
        if n > limit {
            return Err(Error::RollbackTooFar { asked: n, limit });
        }
        if n == 0 {
            return Ok(());
        }
        let len = self.len - n;
        let inner = self.inner.clone();
        // Taken out of what a fork shares first, so that pages count for all who hold them.
        let layers = self.layers.iter_mut().zip(&inner.shape.config.layers);
        let needed = layers.map(|(layer, shape)| Common::own(layer).rewind_bytes(shape, len)).sum();
        let mut pages = inner.pool.arenas.reserve(needed)?;
        self.poisoned = true;
        for (layer, shape) in self.layers.iter_mut().zip(&inner.shape.config.layers) {
            layer.rewind(&inner.pool, shape, len, &mut pages)?;
            layer.truncate(&inner.shape, shape, len);
        }
        self.len = len;
        self.checkpoints.retain(|kept| kept.len <= len);
        self.tickets.cut(len);
        while self.ends.back().is_some_and(|end| *end > len) {
            self.ends.pop_back();
        }
        // A step that had ended here would have evicted and tidied up here; one that did has.
        if inner.shape.evicts() && len > 0 && self.ends.back() != Some(&len) {
            enforce(&mut self.layers, &inner.shape, &inner.rooms, (len, self.budget), &self.pins, None);
            for (layer, shape) in self.layers.iter_mut().zip(&inner.shape.config.layers) {
                if layer.rule.is_some() {
                    layer.tidy(&inner.pool, shape, len);
                }
            }
            self.ends.push_back(len);
        }
        self.poisoned = false;
        if let Some(front) = &inner.fabric {
            front.set_aside_thinned(&inner.pool, &[&self.layers]);
        }
        Ok(())
    }

    /// A second sequence with the same tokens. It shares all pages, and the lists of them; whoever writes to a shared page first copies it.
    /// O(layers), no page is taken. Who goes on first copies what a layer has in its ring, and of each run of pages the list of the
    /// newest 16 and a pointer for each 16 others. A fork of a [poisoned](Error::Poisoned) sequence is poisoned.
    pub fn fork(&self) -> Sequence {
        if self.stepping { self.repaired() } else { self.copied() }
    }

    /// Frees one page of a layer's KV head, between steps. Its tokens are no longer attended to; positions go on as before.
    /// Its bytes are free for other pages unless a fork still reads it; the system gets memory back by whole chunks.
    ///
    /// # Errors
    /// No such layer, head or page, or a page of the ring.
    pub fn evict(&mut self, layer: usize, kv_head: usize, page: PageId) -> Result<(), Error> {
        self.repair();
        self.head(layer, kv_head)?;
        let chain = match page.place {
            Place::Ring => return Err(Error::Pinned { page }),
            Place::Sinks => 0,
            Place::Expert(e) => usize::from(e) + 1,
        };
        let missing = Error::NoPage { layer, kv_head, page };
        let state = &mut self.layers[layer];
        let run = state.heads[kv_head].chains.made_mut(chain).ok_or_else(|| missing.clone())?;
        if !run.evict(page.ordinal, self.kept) {
            return Err(missing);
        }
        state.past.lose(kv_head, chain, page.ordinal);
        self.altered = true;
        Ok(())
    }

    /// Frees every page outside the ring, sinks included.
    pub fn evict_all(&mut self) {
        self.repair();
        self.altered = true;
        for layer in self.layers.iter_mut().map(Common::own) {
            for (h, head) in layer.heads.iter_mut().enumerate() {
                for (c, chain) in head.chains.iter_mut() {
                    chain.evict_all();
                    layer.past.lose_all(h, c);
                }
            }
        }
    }

    /// Keeps the tokens at `positions` from being evicted by a policy, whatever it thinks of them: a system prompt, say. They
    /// may be yet to come. They count in the budget. Ranges that overlap or touch become one, so pinning tokens again takes no memory.
    /// O(ranges).
    pub fn pin(&mut self, positions: Range<u32>) {
        if positions.is_empty() {
            return;
        }
        self.altered |= self.inner.shape.evicts();
        let from = self.pins.partition_point(|pin| pin.end < positions.start);
        let to = self.pins.partition_point(|pin| pin.start <= positions.end);
        match self.pins.get(from..to) {
            Some([first, .., last]) => self.pins[from] = joined(&joined(first, last), &positions),
            Some([only]) => self.pins[from] = joined(only, &positions),
            _ => return self.pins.insert(from, positions),
        }
        self.pins.drain(from + 1..to);
    }

    /// Undoes every [`Sequence::pin`].
    pub fn unpin(&mut self) {
        self.pins.clear();
    }

    /// Forgets everything but its [budget](Sequence::budget); the next position is 0 again.
    pub fn clear(&mut self) {
        let (budget, priority) = (self.budget, self.priority);
        *self = Sequence::new(self.inner.clone());
        (self.budget, self.priority) = (budget, priority);
    }

    /// Tokens that each KV head of it may hold, where that is less than the configuration's: [`SequenceOptions::budget`]. Forks, checkpoints,
    /// parked and saved sequences have the same.
    pub fn budget(&self) -> Option<u32> {
        self.budget
    }

    /// An error if a panic left it half changed.
    pub(crate) fn sound(&self) -> Result<(), Error> {
        if self.poisoned { Err(Error::Poisoned) } else { Ok(()) }
    }

    pub(crate) fn layer(&self, layer: usize) -> Result<&Layer, Error> {
        self.sound()?;
        let found = self.layers.get(layer).map(|layer| &**layer);
        found.ok_or(Error::Layer { layer, layers: self.layers.len() })
    }

    pub(crate) fn head(&self, layer: usize, kv_head: usize) -> Result<&Head, Error> {
        let heads = &self.layer(layer)?.heads;
        heads.get(kv_head).ok_or(Error::KvHead { layer, kv_head, kv_heads: heads.len() as u32 })
    }
}

/// The least range that holds both.
fn joined(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.min(b.start)..a.end.max(b.end)
}
