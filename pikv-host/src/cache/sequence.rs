//! A sequence: a ring of its newest tokens, and pages of older ones filed by expert.

use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::base::ids::{PageId, Place};
use crate::cache::inner::Inner;
use crate::eviction::evict::enforce;
use crate::memory::arena::{Lease, Page};
use crate::pages::entry::{Entry, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::head::HeadPages;
use crate::router::tickets::Tickets;
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
/// sequence.rollback(3)?;                                  // removes the newest 3 tokens
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
    /// Shared with a fork until one of the two changes.
    pub(crate) layers: Vec<Common<LayerPages>>,
    pub(crate) len: u32,
    /// First position that the rings of all layers still hold.
    pub(crate) kept: u32,
    /// With a policy: the smallest length that a rollback can reach, limited by the versions kept of policy state.
    pub(crate) floor: u32,
    /// Positions that no policy evicts, in ascending ranges that do not touch.
    pub(crate) pins: Vec<Range<u32>>,
    /// Whether it is being changed while user code runs; stays set if that panics.
    pub(crate) poisoned: bool,
    /// Whether it is in a step, or was in one that was leaked.
    pub(crate) stepping: bool,
    /// Unused part of the step's reservation, if the sequence is the first of the step.
    pub(crate) lease: Lease,
    /// Tokens that routers learnt from and that a rollback can reach.
    pub(crate) tickets: Tickets,
    /// Lengths at which steps ended, within reach of a rollback.
    pub(crate) ends: VecDeque<u32>,
    /// The sequence at earlier lengths, ascending.
    pub(crate) checkpoints: Vec<Arc<Sequence>>,
    /// Held while pages of a prefix index are in use.
    pub(crate) lease_of_prefix: Option<Arc<()>>,
    /// Whether it may hold other tokens than a fresh sequence given the same tokens: pages were evicted by hand, or pins kept tokens that a
    /// policy would have evicted.
    pub(crate) altered: bool,
    /// Time of its last step or of its creation, by the cache's clock.
    pub(crate) stepped: u64,
    /// Most tokens of a head, if less than the configuration allows.
    pub(crate) budget: Option<u32>,
    /// Priority of the [handle](crate::save::Parkable) it was taken out of, while it is: no sequence of higher priority is parked for it.
    pub(crate) priority: Option<i32>,
}

/// Options of one sequence, for [`Cache::sequence_with`](crate::Cache::sequence_with).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceOptions {
    /// Most tokens of each KV head in a layer that evicts, with sinks, ring and pages: the layer's policy evicts tokens over it. The lesser
    /// of this and the configuration's [`Budget`](crate::policy::Budget) applies, also in heads that keep all tokens by that. Sinks and
    /// ring stay even if they have more tokens.
    pub budget: Option<u32>,
}

impl SequenceOptions {
    /// No options.
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

    /// Tokens appended so far, evicted or not; equals the position of the next token.
    pub fn next_position(&self) -> Position {
        Position(self.len)
    }

    /// Number of tokens in the ring.
    pub fn in_ring(&self) -> Resident {
        self.inner.shape.store.ring.resident(self.len)
    }

    /// Tokens that a layer's KV head holds, in ring and pages.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::KvHead`].
    pub fn resident(&self, layer: usize, kv_head: usize) -> Result<Resident, Error> {
        if self.stepping {
            return self.repaired().resident(layer, kv_head);
        }
        let head = self.head(layer, kv_head)?;
        Ok(Resident(self.in_ring().0 + head.runs.iter().map(|(_, run)| run.live()).sum::<u32>()))
    }

    /// Experts of the token at `position`, first choice first; `None` once they are forgotten, or if the cache has one expert.
    ///
    /// # Errors
    /// [`Error::Layer`].
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

    /// A copy without the writes of a leaked step. O(pages).
    pub(crate) fn repaired(&self) -> Sequence {
        let mut whole = self.copied();
        whole.repair();
        whole
    }

    /// Undoes the writes of a leaked step, and frees its reservation.
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

    /// Bytes of the sequence's pages in the first tier ([`Sequence::bytes_in_tier`] for others), including pages kept only for a rollback,
    /// pages of its [checkpoints](Sequence::checkpoint), and [sealed](Sequence::seal) ones; a page shared with other sequences counts in
    /// full. O(pages).
    pub fn bytes(&self) -> u64 {
        if !self.checkpoints.is_empty() || self.layers.iter().any(|layer| layer.sealed.is_some()) {
            return self.distinct_bytes();
        }
        let heads = self.layers.iter().flat_map(|layer| &layer.heads);
        let bytes = |head: &HeadPages| {
            let filed = head.runs.iter().flat_map(|(_, c)| &c.entries).map(Entry::bytes);
            head.ring.iter().map(Page::bytes).chain(filed).sum::<u64>()
        };
        self.past_bytes() + heads.map(bytes).sum::<u64>()
    }

    /// Bytes of pages in the first tier kept only for a rollback.
    pub(crate) fn past_bytes(&self) -> u64 {
        self.layers.iter().flat_map(|layer| layer.past.pages()).map(PageState::bytes).sum()
    }

    /// KV heads of each layer.
    pub(crate) fn layer_heads(&self) -> impl Iterator<Item = usize> {
        self.layers.iter().map(|layer| layer.heads.len())
    }

    /// Bytes of host memory besides pages, not limited by a budget: lists of pages with the policies' state of their tokens, experts of
    /// tokens, and data for a rollback. Counts the capacities of the lists, without the allocator's overhead. With a policy that evicts or
    /// a sliding window it is in proportion to the tokens held, not to those seen. Lists shared with a fork count in full in each sequence:
    /// for an unchanged fork, everything except a pointer a layer. An empty layer takes only that pointer. O(experts and pages).
    pub fn table_bytes(&self) -> u64 {
        let lists = self.layers.capacity() * size_of::<Common<LayerPages>>()
            + self.pins.capacity() * size_of::<Range<u32>>();
        let own = self.layers.iter().zip(&self.inner.blank).filter(|(layer, blank)| !layer.is(blank));
        let layers: u64 = own.map(|(layer, _)| size_of::<LayerPages>() as u64 + layer.table_bytes()).sum();
        let ends = self.ends.capacity() * size_of::<u32>()
            + self.checkpoints.capacity() * size_of::<Arc<Sequence>>();
        let kept: u64 = self.checkpoints.iter().map(|kept| kept.table_bytes()).sum();
        (lists + ends) as u64 + kept + self.tickets.bytes() + layers
    }

    /// Most tokens that [`Sequence::rollback`] can remove: after a step at least the configured rollback (less tokens already rolled back),
    /// or all tokens while none has been dropped for good.
    pub fn rollback_limit(&self) -> u32 {
        let ring = self.inner.shape.store.ring;
        match self.kept {
            0 if self.inner.shape.evicts() => self.len.saturating_sub(self.floor),
            0 => self.len,
            kept => self.len.saturating_sub(kept + ring.window()),
        }
    }

    /// Removes the newest `n` tokens. All later results, evictions and counts have the bits of a sequence to which they had never been
    /// appended. (Tokens that they pushed out of reach of the ring or a window stay dropped, but no row can see those.)
    ///
    /// With a policy that evicts, a rollback into the middle of a step gives the sequence that the step would have left if it had ended
    /// there; with the same bits if the step was no longer than the configured rollback.
    ///
    /// O(n) a layer and head, plus evictions and merges to undo.
    ///
    /// # Errors
    /// [`Error::RollbackTooFar`] past [`Sequence::rollback_limit`], [`Error::Poisoned`]; [`Error::OutOfBudget`] if a merge of pages must be
    /// undone, a fork shares the pages, and there is no memory for copies. Nothing changes then. [`Error::Device`] or [`Error::Tier`] leave
    /// the sequence [poisoned](Error::Poisoned).
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
        // Un-share the lists first, so that the count of holders of each page is right.
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
        // Evictions and merges are made where a step ends. Inside a step none was made, so it is made now.
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

    /// A second sequence with the same tokens. Both share all pages and page lists (copy on write). O(layers); takes no page. The first of
    /// the two that is written to copies, of each layer, the list of the ring's pages and, of each run, the list of the newest 16 pages and
    /// a pointer for every 16 others. A fork of a [poisoned](Error::Poisoned) sequence is poisoned.
    pub fn fork(&self) -> Sequence {
        if self.stepping { self.repaired() } else { self.copied() }
    }

    /// Evicts one page of a layer's KV head, between steps. Its tokens are not attended to afterwards; positions continue as before. Its
    /// bytes are free for other pages unless a fork still reads it; memory returns to the system in whole chunks.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::KvHead`], [`Error::NoPage`]; [`Error::Pinned`] for a page of the ring.
    pub fn evict(&mut self, layer: usize, kv_head: usize, page: PageId) -> Result<(), Error> {
        self.repair();
        self.head(layer, kv_head)?;
        let c = match page.place {
            Place::Ring => return Err(Error::Pinned { page }),
            Place::Sinks => 0,
            Place::Run(e) => usize::from(e) + 1,
        };
        let missing = Error::NoPage { layer, kv_head, page };
        let state = &mut self.layers[layer];
        let run = state.heads[kv_head].runs.made_mut(c).ok_or_else(|| missing.clone())?;
        if !run.evict(page.ordinal, self.kept) {
            return Err(missing);
        }
        state.past.lose(kv_head, c, page.ordinal);
        self.altered = true;
        Ok(())
    }

    /// Evicts every page outside the ring, including sinks.
    pub fn evict_all(&mut self) {
        self.repair();
        self.altered = true;
        for layer in self.layers.iter_mut().map(Common::own) {
            for (h, head) in layer.heads.iter_mut().enumerate() {
                for (c, run) in head.runs.iter_mut() {
                    run.evict_all();
                    layer.past.lose_all(h, c);
                }
            }
        }
    }

    /// Protects the tokens at `positions`, such as a system prompt, from eviction by policies. Positions may be past the end. Pinned tokens
    /// count in the budget. Overlapping or adjacent ranges are joined, so pinning tokens again takes no memory. O(ranges).
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

    /// Removes all tokens, pins and checkpoints; keeps the [budget](Sequence::budget). The next position is 0.
    pub fn clear(&mut self) {
        let (budget, priority) = (self.budget, self.priority);
        *self = Sequence::new(self.inner.clone());
        (self.budget, self.priority) = (budget, priority);
    }

    /// Most tokens of each KV head, if less than the configuration's: [`SequenceOptions::budget`]. Forks, checkpoints, parked and saved
    /// sequences keep it.
    pub fn budget(&self) -> Option<u32> {
        self.budget
    }

    /// [`Error::Poisoned`] if a panic left it half changed.
    pub(crate) fn sound(&self) -> Result<(), Error> {
        if self.poisoned { Err(Error::Poisoned) } else { Ok(()) }
    }

    pub(crate) fn layer(&self, layer: usize) -> Result<&LayerPages, Error> {
        self.sound()?;
        let found = self.layers.get(layer).map(|layer| &**layer);
        found.ok_or(Error::Layer { layer, layers: self.layers.len() })
    }

    pub(crate) fn head(&self, layer: usize, kv_head: usize) -> Result<&HeadPages, Error> {
        let heads = &self.layer(layer)?.heads;
        heads.get(kv_head).ok_or(Error::KvHead { layer, kv_head, kv_heads: heads.len() as u32 })
    }
}

/// The smallest range that contains both.
fn joined(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.min(b.start)..a.end.max(b.end)
}
