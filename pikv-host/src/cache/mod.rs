//! The cache: configuration, page memory, and constructors of sequences and steps.

pub mod cut;
#[cfg(test)]
mod growth_tests;
pub mod held;
pub mod idle;
pub mod inner;
pub mod map;
pub mod over;
pub mod owners;
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
use crate::attend::options::{Attend, AttendOutput};
use crate::attend::view::View;
use crate::attend::{Call, attend};
use crate::attend_cuda::executor::Cuda;
use crate::attend_cuda::modules;
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
    /// Bytes in use on each shard.
    pub shards: Vec<u64>,
    /// Bytes in use, or reserved for a step under way.
    pub taken: u64,
    /// Budget, in bytes.
    pub budget: u64,
    /// Usage of the lower tiers; a page that sequences share counts once.
    pub tiers: Vec<TierUsage>,
    /// Host memory for the least and largest key values of pages, held or evicted ([`Hits`](crate::rules::Hits)), in bytes; a page that
    /// sequences share counts once. It is not part of the budget. 0 where hits are not counted.
    pub ghosts: u64,
}

impl fmt::Display for Usage {
    /// A table of bytes in use and their limit: the first tier, its shards if there are several, and the lower tiers.
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
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, Rows};
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
/// cache.attend(0, &rows, &[1.0; 2 * 4], &Attend::new(0.5), AttendOutput::new(&mut out))?;
/// assert_eq!(out, [0.25; 8]);
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rows<'a> {
    /// Sequence that the rows attend to.
    pub sequence: &'a Sequence,
    /// Position of the first row. A row sees positions up to its own.
    pub first: Position,
    /// Number of rows.
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
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer; 2], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let mut out = vec![0.0; 3 * 2 * 4];
/// let mut step = cache.begin([(&mut sequence, 3)])?;
/// for layer in 0..2 {
///     step.append(layer, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
///     step.attend(layer, &[1.0; 3 * 2 * 4], &Attend::new(0.5), AttendOutput::new(&mut out))?;
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
    /// Builds a cache. It takes no page memory until a step needs it. On a device it loads the kernels that its codecs and groups of heads
    /// need, which takes seconds each where the driver's cache does not have them; no step does.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid configuration; [`Error::Tier`] if a tier could not be opened; [`Error::Device`] if kernels do not
    /// load.
    pub fn new(config: CacheConfig) -> Result<Cache, Error> {
        Cache::with(config, None)
    }

    pub(crate) fn with(config: CacheConfig, fabric: Option<Arc<Front>>) -> Result<Cache, Error> {
        let shape = Arc::new(CacheShape::new(config, fabric.is_some())?);
        let pool = Pool::new(&shape)?;
        if let Some(device) = shape.config.backend.device() {
            modules::load(device, &shape)?;
        }
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

    /// Bytes of the RoPE tables, which are not part of the budget: for each distinct RoPE `4 * rotary_dim` a position, up to the longest
    /// sequence so far, rounded up to a power of two.
    pub fn table_bytes(&self) -> u64 {
        self.inner.pool.tables.bytes()
    }

    /// Extends the RoPE tables of layers that store keys before their rotation ([`LayerShape::rope`](pikv_core::plan::LayerShape::rope)) to
    /// `positions` tokens, so that no step below that length has to do it. Each distinct RoPE takes `4 * rotary_dim` bytes a position,
    /// rounded up to a power of two, outside the budget ([`Cache::table_bytes`]); 20 pairs take about a microsecond.
    ///
    /// # Errors
    /// [`Error::PositionOverflow`] if `positions` exceeds the largest position, [`Error::OutOfMemory`].
    pub fn reserve_positions(&self, positions: u32) -> Result<(), Error> {
        if positions > Position::MAX.0 {
            return Err(Error::PositionOverflow { position: u64::from(positions) });
        }
        (0..self.inner.shape.config.layers.len())
            .try_for_each(|layer| self.inner.pool.tables.grow(layer, positions))
    }

    /// Rules for the number of pages of a sequence in a layer, for planning.
    ///
    /// # Errors
    /// [`Error::Layer`].
    pub fn store(&self, layer: usize) -> Result<&StoreShape, Error> {
        self.inner
            .shape
            .stores
            .get(layer)
            .ok_or(Error::Layer { layer, layers: self.inner.shape.stores.len() })
    }

    /// The run of pages in which a layer files the token at `position` with home expert `expert`: pages of
    /// [`Place::Run`](crate::report::Place::Run) with this number. It is `expert` itself if the model has at most 8 experts, and in a layer
    /// that holds at least 128 tokens for each expert; before that experts share runs.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let config = CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20).experts(256, 8);
    /// let cache = Cache::new(config)?;
    /// assert_eq!(cache.run_of(0, 100, 77)?, 77 % 8);
    /// assert_eq!(cache.run_of(0, 5000, 77)?, 77 % 32);
    /// assert_eq!(cache.run_of(0, 40_000, 77)?, 77);
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::Expert`] with row 0.
    pub fn run_of(&self, layer: usize, position: u32, expert: u16) -> Result<u16, Error> {
        let (shape, experts) = (self.inner.shape.layer(layer)?, self.config().experts);
        if u32::from(expert) >= experts {
            return Err(Error::Expert { layer, row: 0, expert, experts });
        }
        Ok(self.inner.shape.sharing(shape, 0).run(expert, position))
    }

    /// Bytes of one layer at `len` tokens, `filed[r]` of them in run `r` of the experts ([`Cache::run_of`]): the sum of
    /// [`StoreShape::head_bytes_at`] over heads and, where hits are counted ([`Hits`](crate::rules::Hits)), [`Cache::ghost_bytes_at`].
    /// Pages that a second codec packed again ([`CacheConfig::age`]) count with the size of the first codec.
    ///
    /// # Errors
    /// [`Error::Layer`].
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

    /// The most bytes that the least and largest key values of the pages of one layer, held or evicted, take at `len` tokens; 0 where hits
    /// are not counted. They are not part of the budget: [`Usage::ghosts`]. A page is 32 tokens of an expert, and memory is taken for 8
    /// pages at a time. A rollback does not free them.
    ///
    /// # Errors
    /// [`Error::Layer`].
    pub fn ghost_bytes_at(&self, layer: usize, len: u32) -> Result<u64, Error> {
        let (shape, store) = (self.inner.shape.layer(layer)?, self.store(layer)?);
        let Some(hits) = self.inner.pool.hits().filter(|_| store.files(shape, u32::MAX)) else {
            return Ok(0);
        };
        // Beside the newest pages, those that a rollback could need.
        let slack = store.ring.slack();
        let pages = u64::from(self.inner.shape.known_before(len).saturating_sub(store.sinks) / PAGE);
        let beside = u64::from(slack.div_ceil(PAGE) * store.experts.min(PAGE)) + ghosts::SHEET as u64;
        let seen = shape.window.map_or(u64::MAX, |window| {
            // A page of a rare expert may hold a single visible token.
            u64::from(window.saturating_add(slack)).div_ceil(u64::from(PAGE))
                + u64::from(store.experts)
                + beside
        });
        let most = pages.min(u64::from(hits.known) + beside).min(seen);
        Ok(u64::from(shape.kv_heads) * ghosts::bytes(&shape.layout, most))
    }

    /// The most bytes of one layer at `len` tokens, for any choice of the router: the sum over heads of
    /// [`StoreShape::head_bytes_at_most`] and of pages held in both codecs because a rollback could need either, and
    /// [`Cache::ghost_bytes_at`]. A sequence restored from a file of version 3 or less with more than 8 experts may take more, as each of
    /// its experts has a run.
    ///
    /// # Errors
    /// [`Error::Layer`].
    pub fn bytes_at_most(&self, layer: usize, len: u32) -> Result<u64, Error> {
        let shape = self.inner.shape.layer(layer)?;
        let store = self.inner.shape.store_at(layer, len);
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

    /// An empty sequence with options, such as a smaller token budget.
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
    /// [`Error::SequenceBudget`] for a budget that would have no effect.
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

    /// Counts, since the cache was built, of failures that no call returned as an error.
    pub fn failures(&self) -> Failures {
        self.inner.pool.failures.read()
    }

    /// Counts of pages that attention read from lower tiers.
    pub fn fetches(&self) -> Fetches {
        self.inner.pool.tiers.as_ref().map_or_else(Fetches::default, Levels::fetches)
    }

    /// Starts a step that adds tokens to sequences: `parts` are pairs of a sequence and its number of new tokens. Pages are reserved for
    /// all layers, or for none. If the budget does not suffice, the step first frees prefixes of a
    /// [`PrefixIndex`](crate::prefix::PrefixIndex) that no sequence reads; in a cache with [tiers](crate::tiers) it then parks
    /// [`Parkable`](crate::save::Parkable) sequences ([`Cache::make_room`]), and last moves older pages of these sequences to lower tiers.
    ///
    /// # Errors
    /// [`Error::OutOfBudget`] with the bytes needed and available; [`Error::NoSequences`], [`Error::NoTokens`], [`Error::ForeignSequence`],
    /// [`Error::Poisoned`], [`Error::PositionOverflow`]; [`Error::Tier`] or [`Error::Device`] if pages could not be moved. The sequences
    /// are unchanged then, except that pages already moved to a lower tier stay there.
    pub fn begin<'a>(
        &self,
        parts: impl IntoIterator<Item = (&'a mut Sequence, u32)>,
    ) -> Result<Step<'a>, Error> {
        Step::begin(self.inner.clone(), parts)
    }

    /// Bytes that [`Cache::begin`] would reserve for a step of these sequences and numbers of new tokens, and bytes left of the budget. It
    /// reserves nothing, so a scheduler can ask before it admits a request. O(layers, heads and experts).
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
    /// [`Error::NoSequences`], [`Error::NoTokens`], [`Error::ForeignSequence`], [`Error::Poisoned`] and [`Error::PositionOverflow`], as
    /// [`Cache::begin`].
    pub fn step_bytes<'s>(
        &self,
        parts: impl IntoIterator<Item = (&'s Sequence, u32)>,
    ) -> Result<StepBytes, Error> {
        step::bytes::step_bytes(&self.inner, parts)
    }

    /// Attends query rows over tokens of sequences, outside a step; [`Rows`] has an example. `q` is `[rows][query_heads][k_dim]`, in f32,
    /// f16 or bf16 ([`Scalar`]), the rows of all sequences one after the other.
    ///
    /// # Errors
    /// The errors of [`Step::attend`]; [`Error::ForeignSequence`], [`Error::Poisoned`]; [`Error::QueryPosition`] for rows past the end of a
    /// sequence, or older than [`Sequence::rollback_limit`] allows.
    pub fn attend(
        &self,
        layer: usize,
        rows: &[Rows<'_>],
        q: &[impl Scalar],
        options: &Attend,
        out: AttendOutput<'_>,
    ) -> Result<(), Error> {
        for (index, part) in rows.iter().enumerate() {
            if !Arc::ptr_eq(&part.sequence.inner, &self.inner) {
                return Err(Error::ForeignSequence { index });
            }
            part.sequence.sound()?;
            let (len, first) = (part.sequence.len, u64::from(part.first.0));
            let end = first + u64::from(part.rows);
            // For an older row, tokens that were in the ring have moved to pages.
            let oldest = len - part.sequence.rollback_limit().min(len.saturating_sub(1)) - len.min(1);
            if first < u64::from(oldest) || end > u64::from(len) + 1 {
                return Err(Error::QueryPosition { first, end, oldest, len });
            }
        }
        let all = rows.iter().map(|part| part.rows as usize).sum();
        span!("attend", layer = layer, rows = all);
        let shape = self.inner.shape.layer(layer)?;
        // Tokens of a leaked step are not visible.
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
