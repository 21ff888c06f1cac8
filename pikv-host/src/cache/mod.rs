//! The cache: configuration, page memory, and the way in to sequences and steps.

pub mod cut;
#[cfg(test)]
mod growth_tests;
pub mod held;
pub mod idle;
pub mod inner;
pub mod map;
pub mod over;
pub mod parkable;
pub mod parkables;
pub mod rates;
pub mod save;
pub mod sequence;
pub mod step;
pub mod tiering;

use crate::attend::cpu::Cpu;
use crate::attend::executor::Executor;
use crate::attend::executor::Tensors;
use crate::attend::hits::Fetched;
use crate::attend::options::{Attend, Output};
use crate::attend::view::View;
use crate::attend::{Call, attend};
use crate::attend_cuda::executor::Cuda;
use crate::backend::Kind;
use crate::base::error::Error;
use crate::base::failures::Failures;
use crate::base::host_slice::{HostSlice, Scalar};
use crate::base::text::{Bytes, Share, Table};
use crate::cache::idle::Idle;
use crate::cache::inner::{Inner, blank};
use crate::cache::sequence::{Sequence, SequenceOptions};
use crate::cache::step::Step;
use crate::cache::step::bytes::StepBytes;
use crate::codec::HeadCodec;
use crate::config::CacheConfig;
use crate::config::shape::CacheShape;
use crate::eviction::ranked::Rooms;
use crate::fabric::Front;
use crate::memory::pool::Pool;
use crate::pages::ghosts;
use crate::tiers::{Fetches, Levels, TierUsage};
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::{Filed, StoreShape};
use std::fmt;
use std::sync::Arc;

/// Bytes of pages in use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// On each shard.
    pub shards: Vec<u64>,
    /// In use or set aside for a step under way.
    pub taken: u64,
    /// The budget.
    pub budget: u64,
    /// Pages in the tiers beneath it; bytes of sequences that share a page count once.
    pub tiers: Vec<TierUsage>,
    /// Bytes of host memory in which the extremes of the keys of known pages lie, held or not ([`Hits`](crate::rules::Hits)); bytes that sequences
    /// share count once. They are beside the budget. 0 where nobody asks for hits.
    pub ghosts: u64,
}

impl fmt::Display for Usage {
    /// A table: bytes in use and at most, of the first tier, of its shards where there is more than one, and of the tiers beneath.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        table.row([&"", &"in use", &"at most", &"share"]);
        table.row([
            &"pages",
            &Bytes(self.taken),
            &Bytes(self.budget),
            &Share(self.taken as f64, self.budget as f64),
        ]);
        if self.shards.len() > 1 {
            for (shard, bytes) in self.shards.iter().enumerate() {
                table.row([&format_args!("  shard {shard}"), &Bytes(*bytes)]);
            }
        }
        for tier in &self.tiers {
            table.row([
                &tier.name,
                &Bytes(tier.bytes),
                &Bytes(tier.capacity),
                &Share(tier.bytes as f64, tier.capacity as f64),
            ]);
        }
        if self.ghosts > 0 {
            table.row([&"extremes of keys", &Bytes(self.ghosts)]);
        }
        table.fmt(f)
    }
}

/// Query rows of one sequence, at consecutive positions from `first`, for [`Cache::attend`].
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output, Position, Rows};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let mut step = cache.begin([(&mut sequence, 3)])?;
/// step.append(0, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
/// step.commit()?;
///
/// // One more look from the last position, which adds nothing to the sequence.
/// let rows = [Rows::new(&sequence, Position(2), 1)];
/// let mut out = [0.0; 2 * 4];
/// cache.attend(0, &rows, &[1.0; 2 * 4], &Attend::new(0.5), Output::new(&mut out))?;
/// assert_eq!(out, [0.25; 8]);
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rows<'a> {
    /// The sequence.
    pub sequence: &'a Sequence,
    /// Position of the first row. A row sees positions up to its own.
    pub first: Position,
    /// Rows.
    pub rows: u32,
}

impl<'a> Rows<'a> {
    /// `rows` query rows over `sequence`, the first of them at position `first`.
    pub fn new(sequence: &'a Sequence, first: Position, rows: u32) -> Rows<'a> {
        Rows { sequence, first, rows }
    }
}

/// A KV cache: the memory and the rules of all sequences that one model decodes.
///
/// Cloning gives another handle on the same cache. Sequences keep their cache alive.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer; 2], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let mut out = vec![0.0; 3 * 2 * 4];
/// let mut step = cache.begin([(&mut sequence, 3)])?;
/// for layer in 0..2 {
///     step.append(layer, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
///     step.attend(layer, &[1.0; 3 * 2 * 4], &Attend::new(0.5), Output::new(&mut out))?;
/// }
/// step.commit()?;
/// assert_eq!(out, [0.25; 24]);
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cache {
    pub(crate) inner: Arc<Inner>,
}

impl Cache {
    /// Builds a cache. No page memory is taken before a step needs it.
    ///
    /// # Errors
    /// What is wrong with the configuration; [`Error::Tier`] for a tier that could not be opened.
    pub fn new(config: CacheConfig) -> Result<Cache, Error> {
        Cache::with(config, None)
    }

    pub(crate) fn with(config: CacheConfig, fabric: Option<Arc<Front>>) -> Result<Cache, Error> {
        let shape = Arc::new(CacheShape::new(config, fabric.is_some())?);
        let pool = Pool::new(&shape)?;
        let executor: Arc<dyn Executor> = match (&shape.config.backend.0, &fabric) {
            (Kind::Cpu, None) => Arc::new(Cpu),
            (Kind::Cpu, Some(front)) => front.clone(),
            (Kind::Cuda(device), _) => Arc::new(Cuda(device.clone())),
        };
        let (rooms, idle) = (Rooms::default(), Idle::default());
        let (parkables, clock) = Default::default();
        let blank = blank(&shape);
        let inner = Inner { shape, pool, executor, rooms, fabric, idle, parkables, clock, blank };
        Ok(Cache { inner: Arc::new(inner) })
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.inner.shape.config
    }

    /// Bytes of the tables of rotations, which no budget bounds: `4 * rotary_dim` a position, up to the longest sequence so far, rounded up
    /// to a power of two, for each rotation that differs.
    pub fn table_bytes(&self) -> u64 {
        self.inner.pool.tables.bytes()
    }

    /// Has the tables of rotations of keys that are stored before them ([`LayerShape::rope`](pikv_core::plan::LayerShape::rope)) reach
    /// `positions` tokens, so that no step up to there waits for them. Each rotation takes `4 * rotary_dim` bytes a position, rounded up to a power of
    /// two, beside the budget ([`Cache::table_bytes`]), and about a microsecond for 20 pairs.
    ///
    /// # Errors
    /// [`Error::PositionOverflow`] past the last position, [`Error::OutOfMemory`].
    pub fn reserve_positions(&self, positions: u32) -> Result<(), Error> {
        if positions > Position::MAX.0 {
            return Err(Error::PositionOverflow { position: u64::from(positions) });
        }
        (0..self.inner.shape.config.layers.len())
            .try_for_each(|layer| self.inner.pool.tables.grow(layer, positions))
    }

    /// The rules by which sequences take pages in a layer, to plan with.
    ///
    /// # Errors
    /// No such layer.
    pub fn store(&self, layer: usize) -> Result<&StoreShape, Error> {
        self.inner
            .shape
            .stores
            .get(layer)
            .ok_or(Error::Layer { layer, layers: self.inner.shape.stores.len() })
    }

    /// Bytes of one layer at `len` tokens of which `filed[e]` lie in the pages of expert `e`; [`StoreShape::head_bytes_at`] of
    /// each head. Pages that a second codec packed again ([`CacheConfig::age`]) count as the first left them. Where hits are counted
    /// ([`Hits`](crate::rules::Hits)), with [`Cache::ghost_bytes_at`].
    ///
    /// # Errors
    /// No such layer.
    pub fn bytes_at(&self, layer: usize, len: u32, filed: &[Filed]) -> Result<u64, Error> {
        let (shape, store) = (self.inner.shape.layer(layer)?, self.store(layer)?);
        let pages: u64 = self
            .inner
            .shape
            .packed(layer)
            .map(|packed| store.head_bytes_at(shape, packed, len, filed.iter().copied()))
            .sum();
        Ok(pages + self.ghost_bytes_at(layer, len)?)
    }

    /// The most bytes of one layer at `len` tokens in which the extremes of the keys of known pages lie, held or evicted; 0 where nobody
    /// asks for hits. They are beside the budget: [`Usage::ghosts`]. Whole sheets of 8 pages count, a page being 32 tokens of an expert. A sequence that was taken back
    /// keeps those of its greatest length.
    ///
    /// # Errors
    /// No such layer.
    pub fn ghost_bytes_at(&self, layer: usize, len: u32) -> Result<u64, Error> {
        let (shape, store) = (self.inner.shape.layer(layer)?, self.store(layer)?);
        let Some(hits) = self.inner.pool.hits().filter(|_| store.files(shape, u32::MAX)) else {
            return Ok(0);
        };
        // Those that a rollback could ask for are known beside the newest.
        let slack = store.ring.slack();
        let pages = u64::from(self.inner.shape.known_before(len).saturating_sub(store.sinks) / PAGE);
        let beside = u64::from(slack.div_ceil(PAGE) * store.experts.min(PAGE)) + ghosts::SHEET as u64;
        let seen = shape.window.map_or(u64::MAX, |window| {
            // Pages of an expert that is rare can hold one token that is seen.
            u64::from(window.saturating_add(slack)).div_ceil(u64::from(PAGE))
                + u64::from(store.experts)
                + beside
        });
        let most = pages.min(u64::from(hits.known) + beside).min(seen);
        Ok(u64::from(shape.kv_heads) * ghosts::bytes(&shape.layout, most))
    }

    /// The most bytes of one layer at `len` tokens, whatever the router chose; [`StoreShape::head_bytes_at_most`] of each head,
    /// what pages take that are held as both of its codecs left them, since a rollback could ask for either, and
    /// [`Cache::ghost_bytes_at`].
    ///
    /// # Errors
    /// No such layer.
    pub fn bytes_at_most(&self, layer: usize, len: u32) -> Result<u64, Error> {
        let (shape, store) = (self.inner.shape.layer(layer)?, self.store(layer)?);
        let slack = store.ring.slack();
        let twice = u64::from(slack.min(len / PAGE + slack.min(store.experts)));
        let head = |codec: &Option<HeadCodec>| {
            let aged = codec.as_ref().and_then(|codec| codec.aged.as_ref());
            let packed = codec.as_ref().map(|codec| &codec.packed);
            store.head_bytes_at_most(shape, packed, len)
                + aged.map_or(0, |aged| twice * aged.codec.packed.bytes())
        };
        Ok(self.inner.shape.codecs[layer].iter().map(head).sum::<u64>() + self.ghost_bytes_at(layer, len)?)
    }

    /// An empty sequence.
    pub fn sequence(&self) -> Sequence {
        Sequence::new(self.inner.clone())
    }

    /// An empty sequence with options of its own: a request that may hold less than others, say.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::policy::{Budget, Eviction, StreamingLlm};
    /// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, SequenceOptions};
    ///
    /// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
    /// let config = CacheConfig::new(vec![layer], 1 << 20).ring(32);
    /// let cache = Cache::new(config.evict(Eviction::new(StreamingLlm, Budget::Tokens(400))))?;
    /// let mut small = cache.sequence_with(SequenceOptions::new().budget(100))?;
    /// let mut large = cache.sequence();
    /// let mut step = cache.begin([(&mut small, 600), (&mut large, 600)])?;
    /// step.append(0, &[0.5; 1200 * 4], &[0.25; 1200 * 4])?;
    /// step.commit()?;
    /// assert!(small.resident(0, 0)?.0 <= 100 && large.resident(0, 0)?.0 > 300);
    /// assert!(matches!(cache.sequence_with(SequenceOptions::new().budget(500)), Err(Error::SequenceBudget { .. })));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::SequenceBudget`] for a budget that could not act.
    pub fn sequence_with(&self, options: SequenceOptions) -> Result<Sequence, Error> {
        let mut sequence = self.sequence();
        if let Some(tokens) = options.budget {
            self.inner.shape.check_budget(tokens)?;
        }
        sequence.budget = options.budget;
        Ok(sequence)
    }

    /// Bytes of pages in use.
    pub fn usage(&self) -> Usage {
        let arenas = &self.inner.pool.arenas;
        let tiers = self.inner.pool.tiers.as_ref().map_or_else(Vec::new, Levels::usage);
        let shards = arenas.bytes_by_shard().collect();
        let ghosts = self.inner.pool.ghosts.bytes();
        Usage { shards, taken: arenas.taken(), budget: arenas.budget(), tiers, ghosts }
    }

    /// Counts of work that failed without failing a call, since the cache was built.
    pub fn failures(&self) -> Failures {
        self.inner.pool.failures.read()
    }

    /// Pages that attention read from lower tiers so far.
    pub fn fetches(&self) -> Fetches {
        self.inner.pool.tiers.as_ref().map_or_else(Fetches::default, Levels::fetches)
    }

    /// Starts a step that adds tokens to sequences: `parts` are pairs of a sequence and its number of new tokens. Pages are reserved
    /// for all layers, or none. If the step would else pass the budget, prefixes that a [`PrefixIndex`](crate::prefix::PrefixIndex) holds and
    /// no sequence reads make room; in a cache with [tiers](crate::tiers), [`Parkable`](crate::save::Parkable) sequences are parked then
    /// ([`Cache::make_room`]), and after those older pages of these sequences move down.
    ///
    /// # Errors
    /// [`Error::OutOfBudget`] with the bytes needed and available; a sequence of another cache, [poisoned](Error::Poisoned), with no
    /// tokens to add, or at the end of positions; [`Error::Tier`] or a device if pages could not go down. Nothing changes then, but that pages which went down
    /// stay there.
    pub fn begin<'a>(
        &self,
        parts: impl IntoIterator<Item = (&'a mut Sequence, u32)>,
    ) -> Result<Step<'a>, Error> {
        Step::begin(self.inner.clone(), parts)
    }

    /// Bytes that [`Cache::begin`] would set aside for a step of these sequences and numbers of new tokens, and what the budget has left.
    /// Takes nothing, so a scheduler can ask before it admits a request. O(layers, heads and experts).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let layer = LayerShape::new(1, 2, 64, Dtype::Bf16);
    /// let cache = Cache::new(CacheConfig::new(vec![layer], 64 << 10))?;
    /// let (sequence, mut other) = (cache.sequence(), cache.sequence());
    /// assert!(cache.step_bytes([(&sequence, 100)])?.fits());
    /// assert!(!cache.step_bytes([(&sequence, 100), (&other, 200)])?.fits());
    /// assert!(cache.begin([(&mut other, 200)]).is_ok());
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Cache::begin`], but for the budget: no sequences, one of another cache, [poisoned](Error::Poisoned), with no tokens to add, or
    /// at the end of positions.
    pub fn step_bytes<'s>(
        &self,
        parts: impl IntoIterator<Item = (&'s Sequence, u32)>,
    ) -> Result<StepBytes, Error> {
        step::bytes::step_bytes(&self.inner, parts)
    }

    /// Attends query rows over what sequences hold, outside a step; [`Rows`] has an example. `q` is `[rows][query_heads][k_dim]`, in
    /// f32, f16 or bf16 ([`Scalar`]), the rows of all sequences one after the other.
    ///
    /// # Errors
    /// As [`Step::attend`]; a sequence of another cache, or a [poisoned](Error::Poisoned) one; and rows at positions that a sequence has not reached, or that lie before its ring.
    pub fn attend(
        &self,
        layer: usize,
        rows: &[Rows<'_>],
        q: &[impl Scalar],
        options: &Attend,
        out: Output<'_>,
    ) -> Result<(), Error> {
        for (index, part) in rows.iter().enumerate() {
            if !Arc::ptr_eq(&part.sequence.inner, &self.inner) {
                return Err(Error::ForeignSequence { index });
            }
            part.sequence.sound()?;
            let (len, first) = (part.sequence.len, u64::from(part.first.0));
            let end = first + u64::from(part.rows);
            // An older row would look for tokens in the ring that are in pages only by now.
            let oldest = len - part.sequence.rollback_limit().min(len.saturating_sub(1)) - len.min(1);
            if first < u64::from(oldest) || end > u64::from(len) + 1 {
                return Err(Error::QueryPosition { first, end, oldest, len });
            }
        }
        let all = rows.iter().map(|part| part.rows as usize).sum();
        span!("attend", layer = layer, rows = all);
        let shape = self.inner.shape.layer(layer)?;
        // What a leaked step wrote is not seen.
        let mut repaired: Vec<Option<Sequence>> = Vec::new();
        if rows.iter().any(|part| part.sequence.stepping) {
            repaired.extend(rows.iter().map(|part| part.sequence.stepping.then(|| part.sequence.repaired())));
        }
        let whole = |i: usize| repaired.get(i).and_then(Option::as_ref).unwrap_or(rows[i].sequence);
        let starts = rows.iter().scan(0, |sum, part| {
            *sum += part.rows as usize;
            Some(*sum - part.rows as usize)
        });
        let views = rows.iter().zip(starts).enumerate().map(|(sequence, (part, start))| View {
            sequence,
            row: 0,
            layer: &whole(sequence).layers[layer],
            first: part.first.0,
            rows: part.rows,
            len: part.sequence.len,
            fetched: Fetched::default(),
            start,
            read: options.read,
            closed_gaps: options.closed_gaps,
        });
        let call = Call { executor: &*self.inner.executor, pool: &self.inner.pool, layer, shape, rows: all };
        attend(call, views, Tensors::Host(HostSlice::of(q), out), options, None, None).map(|_| ())
    }
}
