//! Attention over a sequence's sinks, expert pages and ring, on all shards.
//!
//! What is read is a *forest*: for each run of pages (sinks, each expert, ring) the fixed tree over its blocks, and a
//! fixed tree over the runs. A block is a leaf; which thread computes it, and how leaves are grouped into tasks, does not
//! show in the result.

pub mod executor;
pub mod feedback;
pub mod forest;
pub mod hits;
pub mod job;
pub mod lists;
pub mod mass;
pub mod queries;
pub mod reduce;
pub mod select;
pub mod view;

use crate::attend::executor::{Asked, Executor, OnDevice, Results, Session};
use crate::attend::feedback::{Feed, Of};
use crate::attend::forest::Forest;
use crate::attend::hits::Asking;
use crate::attend::job::Job;
use crate::attend::lists::{LISTS, Lists};
use crate::attend::mass::{Wanted, together};
use crate::attend::view::View;
use crate::base::device_slice::{DeviceOutput, DeviceSlice};
use crate::base::error::Error;
use crate::base::error::length;
use crate::base::frequencies::Frequencies;
use crate::base::ids::PageId;
use crate::base::parallel::each_mut;
use crate::base::scratch::emptied;
use crate::memory::pool::Pool;
use crate::tiers::{Early, Staged};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
#[cfg(feature = "cuda")]
use {
    crate::tiers::{Stored, upload::Lifted},
    smallvec::SmallVec,
    std::sync::Arc,
};

use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Options of attention: the scale, a cap of the logits, and which pages are read.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Read};
///
/// let llama = Attend::new(128f32.powf(-0.5));                   // 1 / sqrt(head_dim)
/// let gemma = Attend::new(256f32.powf(-0.5)).softcap(50.0);
/// let sparse = llama.read(Read::Quest { pages: 16 });           // the 16 most promising full pages of each KV head
/// assert_eq!((llama.read, sparse.scale), (Read::All, llama.scale));
/// # let _ = gemma;
/// ```
///
/// What is read is a *forest*: for each run of pages (sinks, each expert, ring) a fixed tree over its blocks of 8 pages, and a fixed tree
/// over the runs. Which thread computes a block, and how blocks are grouped into tasks, does not change the result.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attend {
    /// Factor of `q . k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Logits become `softcap * tanh(logit / softcap)`, as in Gemma 2; to within 1.2e-7 of the cap.
    pub softcap: Option<f32>,
    /// Blocks of 256 tokens that a task takes, a power of two. By default chosen from the work and the threads. It bears on
    /// speed only.
    pub split: Option<u32>,
    /// Which of the pages that left the ring a row reads.
    pub read: Read,
    /// Sinks are seen as near as they would be if the tokens between them and the oldest one that is still held had never been:
    /// StreamingLLM's positions inside the cache (arXiv 2309.17453). Needs keys stored before their rotation.
    pub closed_gaps: bool,
}

/// Which of the pages that left the ring a row reads. Sinks and ring are always read.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output, Read};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).bounds(true))?;
/// let mut sequence = cache.sequence();
/// let mut out = [0.0; 512 * 2 * 4];
/// for n in [512, 1] {
///     let mut step = cache.begin([(&mut sequence, n)])?;
///     let n = n as usize;
///     step.append(0, &[0.5; 512 * 4][..n * 4], &[0.25; 512 * 4][..n * 4])?;
///     let attend = Attend::new(0.5).read(Read::Quest { pages: 2 });
///     step.attend(0, &[1.0; 512 * 8][..n * 8], &attend, Output::new(&mut out[..n * 8]))?;
///     step.commit()?;
/// }
/// assert!(out[..8].iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Read {
    /// All: the result is that of attention over everything that is held.
    #[default]
    All,
    /// Those of the experts that the row was routed to, by their home expert. The row's [`route`](crate::Step::route) must
    /// come first. Each row is then attended for itself.
    Experts,
    /// So many full pages of each KV head, those whose scores could be highest (Quest, arXiv 2406.10774), and each expert's
    /// newest page. Needs [`CacheConfig::bounds`](crate::CacheConfig::bounds). The paper reads everything in the first two
    /// layers. Of a KV head the query heads read the same pages; each row is attended for itself. Where a codec packed a page, the
    /// bounds are those of the keys before.
    Quest {
        /// Full pages.
        pages: u32,
    },
}

impl Attend {
    /// Attention with factor `scale`.
    pub const fn new(scale: f32) -> Attend {
        Attend { scale, softcap: None, split: None, read: Read::All, closed_gaps: false }
    }

    /// Sets the cap of the logits.
    pub const fn softcap(mut self, cap: f32) -> Attend {
        self.softcap = Some(cap);
        self
    }

    /// Sets which pages are read.
    pub const fn read(mut self, read: Read) -> Attend {
        self.read = read;
        self
    }

    /// Sets whether sinks are seen across what was evicted.
    pub const fn closed_gaps(mut self, on: bool) -> Attend {
        self.closed_gaps = on;
        self
    }

    /// Sets the blocks of a task.
    pub const fn split(mut self, blocks: u32) -> Attend {
        self.split = Some(blocks);
        self
    }
}

/// Where results of attention go: the output, and if wanted log-sum-exps and the weight of every token.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20))?;
/// let mut sequence = cache.sequence();
/// let (mut out, mut lse, mut mass) = ([0.0; 3 * 2 * 4], [0.0; 3 * 2], Vec::new());
/// let mut step = cache.begin([(&mut sequence, 3)])?;
/// step.append(0, &[0.5; 3 * 4], &[0.25; 3 * 4])?;
/// step.attend(0, &[0.0; 3 * 8], &Attend::new(0.5), Output::new(&mut out).lse(&mut lse).mass(&mut mass))?;
/// step.commit()?;
/// assert!((lse[5] - 3f32.ln()).abs() < 1e-6);            // the last row weighs 3 tokens alike
/// assert!((mass[0].total() - 6.0).abs() < 1e-5);         // 3 rows of 2 query heads
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Debug)]
pub struct Output<'a> {
    out: &'a mut [f32],
    lse: Option<&'a mut [f32]>,
    mass: Option<&'a mut Vec<PageMass>>,
}

impl<'a> Output<'a> {
    /// Attention output, `[rows][query_heads][v_dim]`. A row that sees nothing gets zeros.
    pub fn new(out: &'a mut [f32]) -> Output<'a> {
        Output { out, lse: None, mass: None }
    }

    /// Also the natural log-sum-exp of the scaled logits, `[rows][query_heads]`; -inf for a row that sees nothing.
    pub fn lse(mut self, lse: &'a mut [f32]) -> Output<'a> {
        self.lse = Some(lse);
        self
    }

    /// Also the attention mass of every page read; `mass` is cleared first. The scores are kept meanwhile: 4 bytes a row, head
    /// and token.
    pub fn mass(mut self, mass: &'a mut Vec<PageMass>) -> Output<'a> {
        self.mass = Some(mass);
        self
    }
}

/// The softmax weight that the tokens of one page received.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PageMass {
    /// Index of the sequence in the call.
    pub sequence: usize,
    /// KV head.
    pub kv_head: usize,
    /// The page.
    pub page: PageId,
    /// For each lane the weights summed over the query heads of the KV head, then over the rows; 0 for lanes not seen.
    pub tokens: [f32; LANES],
}

impl PageMass {
    /// Weight of the whole page.
    pub fn total(&self) -> f32 {
        self.tokens.iter().sum()
    }
}

/// Queries, and where results go.
pub(crate) enum Tensors<'a> {
    Host(&'a [f32], Output<'a>),
    /// On the device of a session.
    Device {
        q: DeviceSlice,
        output: DeviceOutput,
        session: &'a mut dyn Session,
    },
}

impl Tensors<'_> {
    /// Elements of the queries, the output and the log-sum-exps.
    fn lens(&self) -> (usize, usize, Option<usize>) {
        match self {
            Tensors::Host(q, to) => (q.len(), to.out.len(), to.lse.as_ref().map(|lse| lse.len())),
            Tensors::Device { q, output: to, .. } => (q.len(), to.out.len(), to.lse.map(|lse| lse.len())),
        }
    }
}

/// Capped logits stay below what the scores can be.
const MAX_SOFTCAP: f32 = 8_388_608.0;

/// Returns the bytes of pages that were read from lower tiers, of which those in `ahead` were asked for before.
#[allow(clippy::too_many_arguments)]
pub(crate) fn attend<'v>(
    executor: &dyn Executor,
    pool: &Pool,
    layer: usize,
    shape: &LayerShape,
    sequences: impl Iterator<Item = View<'v>>,
    tensors: Tensors<'_>,
    options: &Attend,
    feeds: Option<&mut Vec<Feed>>,
    ahead: Option<Early>,
) -> Result<u64, Error> {
    let mut lists = LISTS.take();
    let mut views: Vec<View<'_>> = emptied(mem::take(&mut lists.views));
    views.extend(sequences);
    let done = attend_views(executor, pool, layer, shape, &views, tensors, options, feeds, ahead, &mut lists);
    lists.views = emptied(views);
    LISTS.set(lists);
    done
}

#[allow(clippy::too_many_arguments)]
fn attend_views(
    executor: &dyn Executor,
    pool: &Pool,
    layer: usize,
    shape: &LayerShape,
    sequences: &[View<'_>],
    mut tensors: Tensors<'_>,
    options: &Attend,
    feeds: Option<&mut Vec<Feed>>,
    ahead: Option<Early>,
    lists: &mut Lists,
) -> Result<u64, Error> {
    let Attend { scale, softcap, split, read, closed_gaps } = *options;
    if !(scale.is_finite() && scale > 0.0) {
        return Err(Error::Scale(scale));
    }
    if let Some(cap) = softcap.filter(|cap| !(*cap > 0.0 && *cap < MAX_SOFTCAP)) {
        return Err(Error::Softcap(cap));
    }
    if let Some(split) = split.filter(|split| !split.is_power_of_two()) {
        return Err(Error::Split(split));
    }
    let factor = softcap.map_or(scale * std::f32::consts::LOG2_E, |cap| scale / cap);
    if !(factor.is_finite() && factor > 0.0) {
        return Err(Error::Scale(scale));
    }
    if matches!(read, Read::Quest { .. }) && !pool.shape.config.bounds {
        return Err(Error::NoBounds);
    }
    if closed_gaps && shape.rope.is_none() {
        return Err(Error::NoRotation { layer });
    }
    let mut single: Vec<View<'_>> = emptied(mem::take(&mut lists.single));
    let views = match read {
        Read::All => sequences,
        // What is read differs from row to row.
        Read::Experts | Read::Quest { .. } => {
            single.extend(sequences.iter().flat_map(View::rows));
            &single[..]
        }
    };
    if read == Read::Experts
        && let Some(row) = views.iter().position(|view| !view.routed(&pool.shape))
    {
        return Err(Error::NotRouted { layer, row });
    }
    let mut starts = mem::take(&mut lists.starts);
    starts.clear();
    let mut rows = 0;
    for view in views {
        starts.push(rows);
        rows += view.rows as usize;
    }
    let heads = shape.query_heads as usize;
    let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
    let (q_len, out_len, lse_len) = tensors.lens();
    length("q", q_len, rows * heads * k_dim, "rows * query_heads * k_dim")?;
    length("out", out_len, rows * heads * v_dim, "rows * query_heads * v_dim")?;
    if let Some(lse_len) = lse_len {
        length("lse", lse_len, rows * heads, "rows * query_heads")?;
    }
    let q = match &tensors {
        Tensors::Host(q, _) => *q,
        Tensors::Device { .. } => &[],
    };
    if let Some(at) = q.iter().position(|x| !x.is_finite()) {
        let (row, head, channel) = (at / (heads * k_dim), at / k_dim % heads, at % k_dim);
        return Err(Error::Query { layer, row, head, channel, value: q[at] });
    }
    let table = pool.tables.get(layer);
    let mut job = Job {
        executor,
        inner: &pool.shape,
        layer,
        shape,
        views,
        starts: &starts,
        q,
        on_device: match &tensors {
            Tensors::Host(..) => None,
            Tensors::Device { q, session, .. } => Some(OnDevice { q: *q, fault: session.fault(layer, 2) }),
        },
        scale,
        split,
        factor,
        softcap: softcap.map(|cap| cap * std::f32::consts::LOG2_E),
        table,
        read,
        closed_gaps,
        stretch: pool.shape.frequencies[layer].as_ref().map_or(1.0, Frequencies::stretch),
        remote: None,
        overflow: AtomicUsize::new(usize::MAX),
    };
    let kv_heads = shape.kv_heads as usize;
    let staged: Staged;
    #[cfg(feature = "cuda")]
    let mut lifted: SmallVec<[Lifted; 2]> = SmallVec::new();
    let mut remote = 0;
    let mut forests: Vec<Forest<'_>> = emptied(mem::take(&mut lists.forests));
    for (view, head) in (0..views.len()).flat_map(|view| (0..kv_heads).map(move |head| (view, head))) {
        if views[view].rows > 0 {
            forests.push(Forest { view, head, ..lists.felled.pop().unwrap_or_default() });
        }
    }
    job.grow(&mut forests);
    if let Some(tiers) = &pool.tiers {
        let early = ahead.unwrap_or_default();
        #[cfg(feature = "cuda")]
        let (ahead, early) = (early.ahead, early.lifted);
        #[cfg(not(feature = "cuda"))]
        let ahead = early.ahead;
        (staged, remote) = tiers.gather(layer, forests.iter().flat_map(Forest::away), ahead)?;
        forests.iter_mut().for_each(|forest| forest.stage(&staged));
        #[cfg(feature = "cuda")]
        if let Some(device) = pool.shape.config.backend.device() {
            lifted.extend(early);
            let known = |slot: &Arc<Stored>| lifted.iter().find_map(|lifted| lifted.address(slot));
            let all = forests.iter().flat_map(Forest::away_words);
            let late = device.lift(all.filter(|(slot, _)| known(slot).is_none()))?;
            tiers.count_lifted(forests.iter().flat_map(Forest::away), &late);
            lifted.push(late);
            for pages in &lifted {
                pages.before()?;
                forests.iter_mut().for_each(|forest| forest.lift(|slot| pages.address(slot)));
            }
        }
    }
    let rule = pool.shape.rules[layer].as_deref().filter(|rule| feeds.is_some() && rule.keeps());
    let all = matches!(&tensors, Tensors::Host(_, to) if to.mass.is_some());
    let mut wanted = mem::take(&mut lists.wanted);
    wanted.clear();
    wanted.extend(views.iter().map(|view| {
        let rows = |cut: Range<u32>| {
            let at = |row: u32| row.saturating_sub(view.row).min(view.rows);
            at(cut.start)..at(cut.end)
        };
        Wanted { all, cuts: sequences[view.sequence].cuts(rule).map(rows).collect() }
    }));
    let some = wanted.iter().any(|wanted| all || !wanted.cuts.is_empty());
    let hits = pool.hits().filter(|_| feeds.is_some());
    let mut seen = mem::take(&mut lists.seen);
    if some || rule.is_some() || hits.is_some() {
        seen.resize_with(forests.len(), Feed::default);
        for (feed, forest) in seen.iter_mut().zip(&forests) {
            feed.start(views[forest.view].sequence, forest.head);
        }
    }
    let (wanted_some, queries) = (some.then_some(&wanted[..]), rule.is_some_and(|rule| rule.head_words > 0));
    let of = |sequence: usize| {
        let (view, first) = (&sequences[sequence], views.iter().position(|view| view.sequence == sequence));
        Of { filed: view.layer.filed, first: first.map_or(0, |view| starts[view]), rows: view.rows as usize }
    };
    let mut no_lse = mem::take(&mut lists.lse);
    let mass = match &mut tensors {
        Tensors::Host(_, Output { out, lse, mass }) => {
            let lse = match lse {
                Some(lse) => &mut **lse,
                None => {
                    no_lse.resize(no_lse.len().max(rows * heads), 0.0);
                    &mut no_lse[..rows * heads]
                }
            };
            let results = Results { out, lse, seen: &mut seen };
            executor.run(&mut job, &forests, wanted_some, results, &mut lists.cut)?;
            mass.take()
        }
        Tensors::Device { output, session, .. } => {
            // Lists of an older call are nobody's.
            let (mut none, told) = (Vec::new(), some || rule.is_some() || hits.is_some());
            let seen = if told { &mut seen } else { &mut none };
            // What is said of each sequence once the host has its masses.
            let sequences = (0..sequences.len()).map(of).collect();
            let asked = Asked { sequences, read, queries: queries || hits.is_some() };
            session.attend(&job, &forests, wanted_some, *output, seen, asked)?;
            None
        }
    };
    if let at @ 0..usize::MAX = job.overflow.load(Ordering::Relaxed) {
        return Err(Error::ScoreOverflow { layer, row: at / heads, head: at % heads, scale });
    }
    let here = matches!(tensors, Tensors::Host(..));
    if here && read != Read::All && (some || rule.is_some() || hits.is_some()) {
        // Rows that were attended one by one are one call all the same.
        together(&mut seen);
    }
    if let Some(mass) = mass {
        mass.clear();
        // Without rows nothing was seen, and the list is an older call's.
        for Feed { sequence, head, weighed, .. } in seen.iter().filter(|_| some) {
            let (sequence, kv_head) = (*sequence, *head);
            let of = |(i, &(page, _))| PageMass { sequence, kv_head, page, tokens: *weighed.all(i) };
            mass.extend(weighed.pages.iter().enumerate().map(of));
        }
    }
    if here && (rule.is_some() || hits.is_some()) {
        for feed in &mut seen {
            feed.belongs(&of(feed.sequence), shape, queries.then_some(q));
        }
        if let Some(hits) = hits {
            let (k_dim, group) = (k_dim, shape.group() as usize);
            let stretch = job.stretch;
            let meet = |feed: &mut Feed| {
                let view = &sequences[feed.sequence];
                let (rows, fetched) = (view.first..view.first + view.rows, view.fetched);
                let inner = &*pool.shape;
                let asking = Asking { inner, hits, shape, stretch, layer: view.layer, rows, read, fetched };
                let first = of(feed.sequence).first;
                let h = feed.head;
                let queries = |row: usize| &q[((first + row) * heads + h * group) * k_dim..][..group * k_dim];
                feed.far = asking.meet(h, view.of_step, queries, &mut feed.met);
            };
            each_mut(&mut seen, |_, feed| meet(feed));
        }
        if let Some(feeds) = feeds {
            mem::swap(feeds, &mut seen);
        }
    }
    lists.seen = seen;
    lists.felled.extend(forests.drain(..).map(Forest::felled));
    lists.forests = emptied(forests);
    (lists.single, lists.starts) = (emptied(single), starts);
    (lists.wanted, lists.lse) = (wanted, no_lse);
    Ok(remote)
}
