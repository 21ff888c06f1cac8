//! Forecast of a cache's bytes, before it is allocated.

use super::error::PlanError;
use crate::base::ids::Place;
use crate::base::text::{Bytes, Rate, Table};
use crate::cache::Cache;
use crate::codec::HeadCodec;
use crate::config::CacheConfig;
use crate::config::shape::first_heads;
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::{Filed, LayerShape, StoreShape};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Range;

/// The load of a cache: a number of equal sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Load {
    /// Number of sequences.
    pub sequences: u32,
    /// Tokens of each sequence.
    pub len: u32,
    /// Resident tokens of each sequence in every KV head, including ring and sinks. `None`: all tokens that a window shows. Whole pages are
    /// evicted, so a few tokens less may be resident.
    pub resident: Option<u32>,
}

impl Load {
    /// One sequence of `len` tokens, all resident.
    pub const fn new(len: u32) -> Load {
        Load { sequences: 1, len, resident: None }
    }

    /// Sets the number of sequences.
    pub const fn sequences(mut self, sequences: u32) -> Load {
        self.sequences = sequences;
        self
    }

    /// Sets the resident tokens.
    pub const fn resident(mut self, tokens: u32) -> Load {
        self.resident = Some(tokens);
        self
    }
}

/// Calls, bytes and operations of a decode step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Work {
    /// Calls of attend: one a layer.
    pub calls: u64,
    /// Bytes of pages read; pages are read whole.
    pub bytes: u64,
    /// Floating-point operations of `q . k` and of the weighted sum over whole pages, a multiply-add counted as 2. Folding queries and
    /// decoding outputs, which do not depend on the number of tokens, are not included.
    pub flops: u64,
}

impl Work {
    /// `calls` calls, which read `bytes` and do `flops` operations in total.
    pub const fn new(calls: u64, bytes: u64, flops: u64) -> Work {
        Work { calls, bytes, flops }
    }
}

setters!(Work { calls: u64, bytes: u64, flops: u64 });

/// The forecast of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Forecast {
    /// Bytes of pages over all shards: the value of [`Usage::taken`](crate::report::Usage::taken) between two steps.
    pub bytes: u64,
    /// Bytes on each shard, as in [`Usage::shards`](crate::report::Usage::shards).
    pub shards: Vec<u64>,
    /// Resident tokens of each sequence, in the layer with the most.
    pub resident: u32,
    /// A decode step of all sequences that reads all resident tokens.
    pub work: Work,
}

impl fmt::Display for Forecast {
    /// A table: bytes of pages, of each shard if there are several, resident tokens, and the work of a decode step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        table.row([&"pages", &Bytes(self.bytes)]);
        if self.shards.len() > 1 {
            for (shard, bytes) in self.shards.iter().enumerate() {
                table.row([&format_args!("  shard {shard}"), &Bytes(*bytes)]);
            }
        }
        table.row([&"tokens resident of a sequence", &self.resident]);
        table.row([&"a decode step: calls", &self.work.calls]);
        table.row([&"  reads", &Bytes(self.work.bytes)]);
        table.row([&"  computes", &Rate(self.work.flops as f64, "flop")]);
        table.fmt(f)
    }
}

/// Forecasts the bytes of a cache, by the cache's own functions.
///
/// Assumes an even use of experts: the home expert of the token at position `p` is `p % experts`. If fewer tokens are resident, the oldest
/// pages are evicted, in turn over the runs of the experts. Exact to the byte under both assumptions, with up to 2048 experts (with more,
/// 32 tokens of a run span over 65,536 positions, and packed pages may close early). For other distributions see [`Cache::bytes_at`] and
/// [`Cache::bytes_at_most`].
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::planner::{Load, MIXTRAL_8X7B, PlanError, Planner};
/// use pikv::Dtype::Bf16;
/// let planner = Planner::new(MIXTRAL_8X7B.config(Bf16, Bf16, 8 << 30))?;
/// let all = planner.forecast(&Load::new(32768))?;
/// // 4 GiB of keys and values; the rest is positions, and the 8 experts' last pages.
/// assert_eq!(MIXTRAL_8X7B.raw_bytes(32768, 16), 4 << 30);
/// assert!(all.bytes > 4 << 30 && all.bytes < (4 << 30) * 102 / 100);
/// // Two of them do not fit beside their positions, and the error says what does.
/// let error = planner.check(&Load::new(32768).sequences(2)).unwrap_err();
/// let PlanError::Budget { fits, .. } = error else { panic!("{error}") };
/// assert!(32_000 < fits && fits < 32_768);
/// planner.check(&Load::new(fits).sequences(2))?;
/// # Ok::<(), pikv::planner::PlanError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Planner {
    cache: Cache,
}

/// The pages of one layer, the same in all its KV heads.
struct PageCounts {
    /// The runs of experts.
    runs: Vec<RunForecast>,
    sinks: u32,
    resident: u32,
}

/// The pages of a run.
#[derive(Clone, Debug)]
struct RunForecast {
    /// The tokens of the run, a part for each number of runs, by ascending position.
    parts: SmallVec<[RunPart; 2]>,
    /// Tokens filed so far.
    tokens: u32,
    /// Evicted pages, from the first on.
    gone: u32,
    /// Tokens that can be rolled back.
    recent: u32,
}

/// Tokens of a run while the number of runs is the same.
#[derive(Clone, Copy, Debug)]
struct RunPart {
    /// Tokens of the run before the part.
    before: u32,
    /// Tokens that the run would have before the part with that number of runs from position 0 on.
    skipped: u32,
    even: Even,
}

/// The positions `p` with `p % experts % runs == run`.
#[derive(Clone, Copy, Debug)]
struct Even {
    experts: u32,
    runs: u32,
    run: u32,
}

impl Even {
    /// Number of the positions below `end`.
    fn below(&self, end: u32) -> u32 {
        let Even { experts, runs, run } = *self;
        let among = |first: u32| first.saturating_sub(run).div_ceil(runs);
        end / experts * among(experts) + among(end % experts)
    }

    /// The position with `n` of them before it.
    fn nth(&self, n: u32) -> u32 {
        let Even { experts, runs, run } = *self;
        let each = (experts - run).div_ceil(runs);
        n / each * experts + run + n % each * runs
    }
}

impl RunForecast {
    fn pages(&self) -> u32 {
        self.tokens.div_ceil(PAGE)
    }

    fn fill(&self, page: u32) -> u32 {
        PAGE.min(self.tokens - page * PAGE)
    }

    /// Position of the last token of a page.
    fn last(&self, page: u32) -> u32 {
        let n = page * PAGE + self.fill(page) - 1;
        let part = self.parts.iter().rfind(|part| part.before <= n);
        part.map_or(0, |part| part.even.nth(n - part.before + part.skipped))
    }

    fn held(&self) -> u32 {
        self.tokens - (self.gone * PAGE).min(self.tokens)
    }

    fn filed(&self) -> Filed {
        Filed::from(self.held()).recent(self.recent.min(self.held()))
    }
}

impl Planner {
    /// A planner for caches of `config`. Takes no page memory.
    ///
    /// # Errors
    /// [`PlanError::Cache`] for an invalid configuration.
    pub fn new(config: CacheConfig) -> Result<Planner, PlanError> {
        Ok(Planner { cache: Cache::new(config)? })
    }

    /// The planned cache, without pages.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Bytes and work of `load`, ignoring the budget. O(pages).
    ///
    /// # Errors
    /// [`PlanError::Length`] for a sequence above the largest length, [`PlanError::Resident`] for fewer resident tokens than ring and sinks
    /// hold.
    pub fn forecast(&self, load: &Load) -> Result<Forecast, PlanError> {
        if load.len > Position::MAX.0 {
            return Err(PlanError::Length { len: load.len });
        }
        let inner = &self.cache.inner;
        let (ring, len) = (inner.shape.store.ring, load.len);
        let mut all = Forecast {
            bytes: 0,
            shards: vec![0; inner.shape.config.shards.shards() as usize],
            resident: 0,
            work: Work::default(),
        };
        let layers = inner.shape.config.layers.iter().zip(first_heads(&inner.shape.config.layers));
        for (layer, (shape, first_head)) in layers.enumerate() {
            let pages = self.pages_of(shape, &inner.shape.stores[layer], load)?;
            let filed: Vec<Filed> = pages.runs.iter().map(RunForecast::filed).collect();
            all.bytes += self.cache.bytes_at(layer, len, &filed)?;
            all.resident = all.resident.max(pages.resident);
            all.work.calls += 1;
            let seen = shape.window.map_or(0, |window| len.saturating_sub(window));
            for (head, codec) in (first_head..).zip(inner.shape.codecs[layer].iter()) {
                let mut tally = Tally { shape, codec: codec.as_ref(), all: &mut all };
                for page in 0..StoreShape::run_pages(pages.sinks, 0) as u32 {
                    tally.add(inner.shape.shard_of(Place::Sinks, page, head), PageForm::Open, true);
                }
                let in_ring = seen.max(ring.left(len));
                for tile in ring.tiles(len, len) {
                    let read = (tile + 1) * PAGE > in_ring;
                    tally.add(inner.shape.shard_of(Place::Ring, tile, head), PageForm::Open, read);
                }
                for (expert, run) in (0u16..).zip(&pages.runs) {
                    for page in run.gone..run.pages() {
                        let last = run.last(page);
                        let held = match (run.fill(page) == PAGE, last >= ring.kept_from(len)) {
                            (false, _) => PageForm::Open,
                            (true, kept) => PageForm::Closed { original: kept },
                        };
                        tally.add(inner.shape.shard_of(Place::Run(expert), page, head), held, last >= seen);
                    }
                }
            }
        }
        let sequences = u64::from(load.sequences);
        all.shards.iter_mut().for_each(|bytes| *bytes *= sequences);
        all.bytes *= sequences;
        all.work.bytes *= sequences;
        all.work.flops *= sequences;
        Ok(all)
    }

    /// [`Planner::forecast`], if it is within the cache's budget. During a step more is taken than after it, up to
    /// [`Cache::bytes_at_most`]: pages are filled before others are evicted.
    ///
    /// # Errors
    /// The errors of [`Planner::forecast`]; [`PlanError::Budget`] with a length that fits, other things being equal.
    pub fn check(&self, load: &Load) -> Result<Forecast, PlanError> {
        let budget = self.cache.inner.shape.config.budget;
        let forecast = self.forecast(load)?;
        if forecast.bytes <= budget {
            return Ok(forecast);
        }
        // Bytes can fall from one length to the next (32 tokens take less once packed), so the length found fits and the next does not,
        // but longer ones may.
        let (mut fits, mut over) = (0, load.len);
        while over - fits > 1 {
            let len = fits + (over - fits) / 2;
            if self.forecast(&Load { len, ..*load })?.bytes <= budget { fits = len } else { over = len }
        }
        let Load { sequences, len, .. } = *load;
        Err(PlanError::Budget { sequences, len, needed: forecast.bytes, budget, fits })
    }

    fn pages_of(&self, shape: &LayerShape, store: &StoreShape, load: &Load) -> Result<PageCounts, PlanError> {
        let ring = store.ring;
        let left = ring.left(load.len);
        let sinks = left.min(store.sinks);
        let filed = if store.files(shape, u32::MAX) { sinks..left } else { sinks..sinks };
        let kept = ring.kept_from(load.len).max(sinks);
        let mut runs = self.runs(shape, filed, kept);
        if let Some(window) = shape.window {
            let seen = load.len.saturating_sub(window.saturating_add(ring.slack()));
            for run in &mut runs {
                while run.gone < run.tokens / PAGE && run.last(run.gone) < seen {
                    run.gone += 1;
                }
            }
        }
        let fixed = ring.resident(load.len).0 + sinks;
        let mut resident = fixed + runs.iter().map(RunForecast::held).sum::<u32>();
        if let Some(asked) = load.resident {
            if asked < fixed {
                return Err(PlanError::Resident { asked, least: fixed });
            }
            let mut page = 0;
            while resident > asked {
                for run in runs.iter_mut().filter(|run| run.gone == page && page < run.pages()) {
                    if resident <= asked {
                        break;
                    }
                    run.gone += 1;
                    resident -= run.fill(page);
                }
                page += 1;
            }
        }
        Ok(PageCounts { runs, sinks, resident })
    }

    /// The runs with the tokens at positions `filed`; a rollback reaches those from `kept` on.
    fn runs(&self, shape: &LayerShape, filed: Range<u32>, kept: u32) -> Vec<RunForecast> {
        let inner = &self.cache.inner.shape;
        let (experts, sharing) = (inner.config.experts, inner.sharing(shape, 0));
        let none = RunForecast { parts: SmallVec::new(), tokens: 0, gone: 0, recent: 0 };
        let mut all = vec![none; sharing.most(filed.start, filed.end) as usize];
        let mut from = filed.start;
        while from < filed.end {
            let runs = sharing.runs(from);
            let until = sharing.next_change(from).min(filed.end);
            for (run, of) in (0..runs).zip(&mut all) {
                let even = Even { experts, runs, run };
                let skipped = even.below(from);
                of.parts.push(RunPart { before: of.tokens, skipped, even });
                of.tokens += even.below(until) - skipped;
                of.recent += even.below(until) - even.below(kept.clamp(from, until));
            }
            from = until;
        }
        all
    }
}

/// Form of a page.
enum PageForm {
    Open,
    Closed { original: bool },
}

/// Adds up the pages of one KV head.
struct Tally<'a> {
    shape: &'a LayerShape,
    codec: Option<&'a HeadCodec>,
    all: &'a mut Forecast,
}

impl Tally<'_> {
    fn add(&mut self, shard: u32, held: PageForm, read: bool) {
        let layout = &self.shape.layout;
        let full = (layout.bytes(), layout.k_dim + layout.v_dim);
        let ((bytes, channels), beside) = match (held, self.codec) {
            (PageForm::Closed { original }, Some(HeadCodec { packed, .. })) => {
                let beside = if original { full.0 } else { 0 };
                ((packed.bytes(), packed.products()), beside)
            }
            _ => (full, 0),
        };
        self.all.shards[shard as usize] += bytes + beside;
        if read {
            self.all.work.bytes += bytes;
            self.all.work.flops += u64::from(2 * PAGE * self.shape.group()) * u64::from(channels);
        }
    }
}

/// Share of the tokens in experts' pages that a row reads with [`ReadPages::Experts`](crate::attend::options::ReadPages::Experts) under uniform
/// routing: `top_k / experts`. A token is filed once, under its home expert, and a row reads the pages of its `top_k` experts. Sinks and
/// ring, which every row reads, are not included.
///
/// # Errors
/// [`PlanError::TopK`] for a `top_k` outside `1..=experts`.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::planner::shared_experts;
/// assert_eq!(shared_experts(16, 2)?, 0.125);
/// assert_eq!(shared_experts(8, 2)?, 0.25);
/// # Ok::<(), pikv::planner::PlanError>(())
/// ```
pub fn shared_experts(experts: u32, top_k: u32) -> Result<f64, PlanError> {
    if top_k == 0 || top_k > experts {
        return Err(PlanError::TopK { top_k, experts });
    }
    Ok(f64::from(top_k) / f64::from(experts))
}
