//! Attention over a sequence's sinks, expert pages and ring, on all shards.
//!
//! A call reads a *forest*: for each run of pages (sinks, each expert, ring) the fixed tree over its blocks, and a
//! fixed tree over the runs. A block is a leaf. The result does not depend on which thread computes a block or on how blocks are grouped
//! into tasks.

pub mod buffers;
pub mod cpu;
pub mod executor;
pub mod feedback;
pub mod forest;
pub mod hits;
pub mod job;
pub mod list;
pub mod mass;
pub mod options;
pub mod queries;
pub mod reduce;
pub mod select;
pub mod tree;
pub mod view;

use crate::attend::buffers::{BUFFERS, Buffers};
use crate::attend::executor::Tensors;
use crate::attend::executor::{Asked, Executor, Results};
use crate::attend::feedback::together;
use crate::attend::feedback::{HeadFeedback, Of};
use crate::attend::forest::Forest;
use crate::attend::hits::Asking;
use crate::attend::job::{DeviceQueries, Job};
use crate::attend::mass::WeightSets;
use crate::attend::options::{Attend, AttendOutput, PageMass, ReadPages};
use crate::attend::view::View;
use crate::base::error::Error;
use crate::base::frequencies::Frequencies;
use crate::base::host_slice::HostSlice;
use crate::base::locks::Mutex;
use crate::base::parallel::each_mut;
use crate::base::scratch::emptied;
use crate::config::hits::Hits;
use crate::memory::pool::Pool;
use crate::policy::rule::Rule;
use crate::tiers::{Prefetched, Staged, StoredPage};
use pikv_core::plan::LayerShape;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use {
    crate::tiers::{Levels, upload::UploadedPages},
    smallvec::SmallVec,
};

/// A layer of a cache, and the executor of its attention.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub executor: &'a dyn Executor,
    pub pool: &'a Pool,
    pub layer: usize,
    pub shape: &'a LayerShape,
    /// Rows of the call's tensors.
    pub rows: usize,
}

/// Lists of a step that a call adds to.
pub(crate) struct Noted<'a> {
    /// Weights and hits for policies and routers.
    pub feeds: &'a mut Vec<HeadFeedback>,
    /// Pages that sequences read from lower tiers, if they are tracked.
    pub lower: Option<&'a mut Vec<Lower>>,
}

/// A page that a sequence read from a lower tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lower {
    /// Index of the call among the noted calls.
    pub call: u32,
    /// Address of the page's [`StoredPage`], unique while the page exists.
    pub slot: usize,
    pub sequence: usize,
    pub bytes: u64,
}

/// Attention for the rows of `sequences`; adds to `noted`. Returns the bytes of pages read from lower tiers. `ahead` has the pages that
/// were prefetched.
///
/// # Errors
/// Options, lengths or queries that are not valid; [`Error::ScoreOverflow`]; a failed tier, device or rank.
pub(crate) fn attend<'v>(
    call: Call<'_>,
    sequences: impl Iterator<Item = View<'v>>,
    tensors: Tensors<'_>,
    options: &Attend,
    noted: Option<Noted<'_>>,
    ahead: Option<Prefetched>,
) -> Result<u64, Error> {
    let mut buffers = BUFFERS.take();
    let mut views: Vec<View<'_>> = emptied(mem::take(&mut buffers.views));
    views.extend(sequences);
    let done = attend_views(call, &views, tensors, options, noted, ahead, &mut buffers);
    buffers.views = emptied(views);
    BUFFERS.set(buffers);
    done
}

fn attend_views(
    call: Call<'_>,
    sequences: &[View<'_>],
    mut tensors: Tensors<'_>,
    options: &Attend,
    noted: Option<Noted<'_>>,
    ahead: Option<Prefetched>,
    buffers: &mut Buffers,
) -> Result<u64, Error> {
    let Call { executor, pool, layer, shape, rows } = call;
    let (feeds, lower) = noted.map_or((None, None), |noted| (Some(noted.feeds), noted.lower));
    let factor = check_options(&call, sequences, options)?;
    let mut single: Vec<View<'_>> = emptied(mem::take(&mut buffers.single));
    let views = cut_by_reads(sequences, &mut single);
    let by_experts = |view: &&View<'_>| view.read == ReadPages::Experts;
    if let Some(view) = views.iter().filter(by_experts).find(|view| !view.routed(&pool.shape)) {
        return Err(Error::NotRouted { layer, row: view.start });
    }
    let q = tensors.check(layer, shape, rows, sequences)?;
    let mut job = start_job(&call, options, factor, views, (q, tensors.on_device(layer)));
    let staged: Staged;
    // Held until the results are computed.
    let _lifted;
    let mut remote = 0;
    let mut forests: Vec<Forest<'_>> = emptied(mem::take(&mut buffers.forests));
    start_forests(&job, &mut forests, &mut buffers.felled);
    job.grow(&mut forests);
    if let Some(tiers) = &pool.tiers {
        let prefetched = ahead.unwrap_or_default();
        (staged, remote) = tiers.gather(layer, forests.iter().flat_map(Forest::away), prefetched.ahead)?;
        forests.iter_mut().for_each(|forest| forest.stage(&staged));
        lower.into_iter().for_each(|lower| note_lower(&job, &forests, lower));
        _lifted = lift(pool, tiers, prefetched.lifted, &mut forests)?;
    }
    let mut wanted = mem::take(&mut buffers.wanted);
    let wants = Wants::new(pool, &job, sequences, &tensors, feeds.is_some(), &mut wanted);
    let mut seen = mem::take(&mut buffers.seen);
    if wants.told() {
        seen.resize_with(forests.len(), HeadFeedback::default);
        for (feed, forest) in seen.iter_mut().zip(&forests) {
            feed.start(views[forest.view].sequence, forest.head);
        }
    }
    let computed = Computed { job: &mut job, forests: &forests, sequences, wants: &wants };
    let mass = computed.compute(executor, &mut tensors, &mut seen, buffers)?;
    check_results(&job, &tensors)?;
    if matches!(tensors, Tensors::Host(..)) {
        hand_back(&job, sequences, &wants, mass, &mut seen);
        if let Some(feeds) = feeds.filter(|_| wants.rule.is_some() || wants.hits.is_some()) {
            mem::swap(feeds, &mut seen);
        }
    }
    buffers.seen = seen;
    buffers.felled.extend(forests.drain(..).map(Forest::felled));
    buffers.forests = emptied(forests);
    buffers.wanted = wanted;
    buffers.single = emptied(single);
    Ok(remote)
}

/// Checks the options of the call and of each sequence that has its own; returns the factor of the queries.
fn check_options(call: &Call<'_>, sequences: &[View<'_>], options: &Attend) -> Result<f32, Error> {
    let Call { pool, layer, shape, .. } = *call;
    let bounds = pool.shape.config.key_bounds;
    let factor = options.check(layer, shape, bounds)?;
    for View { rows, read, closed_gaps, .. } in sequences.iter().copied() {
        let own = Attend { read, closed_gaps, ..*options };
        if rows > 0 && own != *options {
            own.check(layer, shape, bounds)?;
        }
    }
    Ok(factor)
}

/// The rows of the call as views: a view for each sequence, or, where its rows do not all read the same pages, for each row. `single` is
/// the list of the latter.
fn cut_by_reads<'a, 'v>(sequences: &'a [View<'v>], single: &'a mut Vec<View<'v>>) -> &'a [View<'v>] {
    if sequences.iter().all(|view| view.read == ReadPages::All) {
        return sequences;
    }
    for view in sequences {
        match view.read {
            ReadPages::All => single.push(*view),
            ReadPages::Experts | ReadPages::Quest { .. } => single.extend(view.rows()),
        }
    }
    single
}

/// The error of a call whose scores overflowed, or whose results the output's dtype cannot hold.
fn check_results(job: &Job<'_>, tensors: &Tensors<'_>) -> Result<(), Error> {
    let Job { layer, shape, scale, .. } = *job;
    let heads = shape.query_heads as usize;
    if let at @ 0..usize::MAX = job.overflow.load(Ordering::Relaxed) {
        return Err(Error::ScoreOverflow { layer, row: at / heads, head: at % heads, scale });
    }
    if let (Some((at, value)), Tensors::Host(_, to)) = (job.found_beyond(), tensors) {
        let v_dim = shape.layout.v_dim as usize;
        let (row, head, channel) = (at / (heads * v_dim), at / v_dim % heads, at % v_dim);
        return Err(Error::Output { layer, row, head, channel, value, dtype: to.out.dtype().name() });
    }
    Ok(())
}

/// A job for the rows of `views`, with queries on the host or on a device.
fn start_job<'a>(
    call: &Call<'a>,
    options: &Attend,
    factor: f32,
    views: &'a [View<'a>],
    (q, on_device): (HostSlice<'a>, Option<DeviceQueries>),
) -> Job<'a> {
    let Call { executor, pool, layer, shape, .. } = *call;
    let Attend { scale, softcap, split, fast, .. } = *options;
    Job {
        widest: executor.widest(),
        inner: &pool.shape,
        layer,
        shape,
        views,
        q,
        on_device,
        scale,
        split,
        factor,
        softcap: softcap.map(|cap| cap * std::f32::consts::LOG2_E),
        fast: fast && executor.rounds(),
        table: pool.tables.get(layer),
        stretch: pool.shape.frequencies[layer].as_ref().map_or(1.0, Frequencies::stretch),
        remote: None,
        overflow: AtomicUsize::new(usize::MAX),
        beyond: Mutex::new(None),
    }
}

/// Records the pages of lower tiers that each sequence reads, in order.
fn note_lower(job: &Job<'_>, forests: &[Forest<'_>], lower: &mut Vec<Lower>) {
    let (from, call) = (lower.len(), lower.last().map_or(0, |last| last.call + 1));
    for forest in forests {
        let sequence = job.views[forest.view].sequence;
        let slot = |slot: &Arc<StoredPage>| (Arc::as_ptr(slot) as usize, slot.bytes());
        let read = forest.away().map(slot);
        lower.extend(read.map(|(slot, bytes)| Lower { call, slot, sequence, bytes }));
    }
    lower[from..].sort_unstable();
    lower.dedup();
}

/// Pushes an empty forest for each KV head of each view with rows, from those in `spare`.
fn start_forests<'a>(job: &Job<'a>, forests: &mut Vec<Forest<'a>>, spare: &mut Vec<Forest<'static>>) {
    for (view, _) in job.views.iter().enumerate().filter(|(_, of)| of.rows > 0) {
        for head in 0..job.shape.kv_heads as usize {
            forests.push(Forest { view, head, ..spare.pop().unwrap_or_default() });
        }
    }
}

/// Copies pages of lower tiers to the device, if there is one, so that it reads them there.
fn lift(
    pool: &Pool,
    tiers: &Levels,
    prefetched: Option<UploadedPages>,
    forests: &mut [Forest<'_>],
) -> Result<SmallVec<[UploadedPages; 2]>, Error> {
    let mut lifted: SmallVec<[UploadedPages; 2]> = SmallVec::new();
    let Some(device) = pool.shape.config.backend.device() else { return Ok(lifted) };
    lifted.extend(prefetched);
    let known = |slot: &Arc<StoredPage>| lifted.iter().find_map(|lifted| lifted.address(slot));
    let all = forests.iter().flat_map(Forest::away_words);
    let late = device.lift(all.filter(|(slot, _)| known(slot).is_none()))?;
    tiers.count_lifted(forests.iter().flat_map(Forest::away), &late);
    lifted.push(late);
    for pages in &lifted {
        pages.before()?;
        forests.iter_mut().for_each(|forest| forest.lift(|slot| pages.address(slot)));
    }
    Ok(lifted)
}

/// Weights and hits that a call computes beside its output.
struct Wants<'a> {
    /// The layer's policy, if it keeps state from attention.
    rule: Option<&'a Rule>,
    /// Hit counting, if it is on.
    hits: Option<Hits>,
    /// For each view, the rows whose weights are computed; `None` if no weights are.
    weights: Option<&'a [WeightSets]>,
    /// Whether the policy needs queries.
    queries: bool,
}

impl<'a> Wants<'a> {
    /// `fed`: whether feeds are collected; `wanted`: a list to fill.
    fn new(
        pool: &'a Pool,
        job: &Job<'_>,
        sequences: &[View<'_>],
        tensors: &Tensors<'_>,
        fed: bool,
        wanted: &'a mut Vec<WeightSets>,
    ) -> Wants<'a> {
        let rule = pool.shape.rules[job.layer].as_deref().filter(|rule| fed && rule.keeps());
        let all = matches!(tensors, Tensors::Host(_, to) if to.mass.is_some());
        wanted.clear();
        wanted.extend(job.views.iter().map(|view| {
            let rows = |cut: Range<u32>| {
                let at = |row: u32| row.saturating_sub(view.row).min(view.rows);
                at(cut.start)..at(cut.end)
            };
            WeightSets { all, cuts: sequences[view.sequence].cuts(rule).map(rows).collect() }
        }));
        let some = wanted.iter().any(|wanted| all || !wanted.cuts.is_empty());
        let queries = rule.is_some_and(|rule| rule.head_words > 0);
        Wants { rule, hits: pool.hits().filter(|_| fed), weights: some.then_some(&wanted[..]), queries }
    }

    /// Whether the call produces feeds.
    fn told(&self) -> bool {
        self.weights.is_some() || self.rule.is_some() || self.hits.is_some()
    }
}

/// Rows of a sequence of the call.
fn info(sequences: &[View<'_>], sequence: usize) -> Of {
    let view = &sequences[sequence];
    Of { filed: view.layer.filed, first: view.start, rows: view.rows as usize, read: view.read }
}

/// A call with its lists of pages.
struct Computed<'c, 'a> {
    job: &'c mut Job<'a>,
    forests: &'c [Forest<'c>],
    sequences: &'c [View<'c>],
    wants: &'c Wants<'c>,
}

impl Computed<'_, '_> {
    /// Runs the executor; returns the caller's list of masses, if there is one.
    fn compute<'o>(
        self,
        executor: &dyn Executor,
        tensors: &mut Tensors<'o>,
        seen: &mut Vec<HeadFeedback>,
        buffers: &mut Buffers,
    ) -> Result<Option<&'o mut Vec<PageMass>>, Error> {
        let Computed { job, forests, sequences, wants } = self;
        match tensors {
            Tensors::Host(_, AttendOutput { out, lse, mass }) => {
                let Buffers { lse: no_lse, cut, .. } = buffers;
                let lse = match lse {
                    Some(lse) => &mut **lse,
                    None => {
                        let rows = out.len() / job.shape.layout.v_dim as usize;
                        no_lse.resize(no_lse.len().max(rows), 0.0);
                        &mut no_lse[..rows]
                    }
                };
                let all = out.len();
                let out = out.part(0, all);
                executor.run(job, forests, wants.weights, Results { out, lse, seen }, cut)?;
                Ok(mass.take())
            }
            Tensors::Device { output, session, .. } => {
                // The list may still hold the feeds of an earlier call.
                let mut none = Vec::new();
                let seen = if wants.told() { seen } else { &mut none };
                // Rows of each sequence, for the time when the host reads the masses.
                let of = (0..sequences.len()).map(|sequence| info(sequences, sequence)).collect();
                let queries = wants.queries || wants.hits.is_some();
                let asked = Asked { sequences: of, queries };
                session.attend(job, forests, wants.weights, *output, seen, asked)?;
                Ok(None)
            }
        }
    }
}

/// Turns sums of weights into the caller's masses and the policies' feeds.
fn hand_back(
    job: &Job<'_>,
    sequences: &[View<'_>],
    wants: &Wants<'_>,
    mass: Option<&mut Vec<PageMass>>,
    seen: &mut Vec<HeadFeedback>,
) {
    if sequences.iter().any(|view| view.read != ReadPages::All) && wants.told() {
        // Rows that were attended one by one still are one call.
        together(seen);
    }
    if let Some(mass) = mass {
        mass.clear();
        // Without rows no weights are computed, and the list holds an earlier call.
        for HeadFeedback { sequence, head, weighed, .. } in seen.iter().filter(|_| wants.weights.is_some()) {
            let (sequence, kv_head) = (*sequence, *head);
            let of = |(i, &page)| PageMass { sequence, kv_head, page, tokens: *weighed.all(i) };
            mass.extend(weighed.pages.iter().enumerate().map(of));
        }
    }
    if wants.rule.is_none() && wants.hits.is_none() {
        return;
    }
    for feed in seen.iter_mut() {
        feed.belongs(&info(sequences, feed.sequence), job.shape, wants.queries.then_some(job.q));
    }
    let Some(hits) = wants.hits else { return };
    let Job { inner, shape, stretch, q, .. } = *job;
    let (k_dim, group, heads) =
        (shape.layout.k_dim as usize, shape.group() as usize, shape.query_heads as usize);
    each_mut(seen, |_, feed| {
        let view = &sequences[feed.sequence];
        let (rows, fetched, read) = (view.first..view.first + view.rows, view.fetched, view.read);
        let asking = Asking { inner, hits, shape, stretch, layer: view.layer, rows, read, fetched };
        let (h, first) = (feed.head, view.start);
        let queries = |row: usize| q.part(((first + row) * heads + h * group) * k_dim, group * k_dim);
        feed.far = asking.meet(h, view.start, queries, &mut feed.met);
    });
}
