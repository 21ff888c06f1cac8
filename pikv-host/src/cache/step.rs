//! A step: tokens added to some sequences, layer by layer, all or nothing.

mod append;
pub(crate) mod bytes;
mod commit;
mod device;
mod leave;
mod reads;

use crate::attend::executor::Session;
use crate::attend::executor::Tensors;
use crate::attend::feedback::HeadFeedback;
use crate::attend::hits::Fetched;
use crate::attend::options::{Attend, AttendOutput, ReadPages};
use crate::attend::view::View;
use crate::attend::{Call, Lower, Noted, attend};
use crate::base::error::Error;
use crate::base::error::length;
use crate::base::host_slice::{HostSlice, Scalar};
use crate::base::scratch::emptied;
use crate::cache::inner::Inner;
use crate::cache::owners::Owner;
use crate::cache::sequence::Sequence;
use crate::cache::step::bytes::{end_of, sequence_needs};
use crate::memory::arena::Reservation;
use crate::pages::entry::{Away, PageState};
use crate::tiers::{Prefetched, StoredPage};
use pikv_core::page::Position;
use std::cell::Cell;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A step adds tokens to sequences while a model runs: for each layer [`append`](Step::append), [`attend`](Step::attend) and, in a model
/// with experts, [`route`](Step::route); at the end [`commit`](Step::commit).
///
/// Layers may come in any order, each once; `append` of a layer comes before its `attend`. Dropping a step without a commit leaves every
/// sequence unchanged. In every slice the rows of the sequences follow each other, in the order in which the sequences were given.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer; 2], 1 << 20))?;
/// let (mut prompt, mut answer) = (cache.sequence(), cache.sequence());
/// let mut out = [0.0; 6 * 2 * 4];
/// let mut step = cache.begin([(&mut prompt, 5), (&mut answer, 1)])?;
/// assert_eq!(step.rows(), 6);                             // 5 of `prompt`, then 1 of `answer`
/// for layer in 0..2 {
///     step.append(layer, &[0.5; 6 * 4], &[0.25; 6 * 4])?; // [rows][kv_heads][k_dim], [rows][kv_heads][v_dim]
///     step.attend(layer, &[1.0; 6 * 8], &Attend::new(0.5), AttendOutput::new(&mut out))?;
/// }
/// step.commit()?;
/// assert_eq!((prompt.next_position().0, answer.next_position().0), (5, 1));
///
/// drop(cache.begin([(&mut answer, 7)])?);                 // dropped: the sequence is unchanged
/// assert_eq!(answer.next_position().0, 1);
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Debug)]
pub struct Step<'a> {
    inner: Arc<Inner>,
    parts: Vec<Part<'a>>,
    pages: Reservation,
    layers: Vec<Done>,
    rows: usize,
    committed: bool,
    /// Prefetch of the layer likely to be attended next.
    ahead: Option<Prefetched>,
    /// Deferred results and checks of tensors on the device.
    late: Option<Box<dyn Session>>,
    /// One key and one value widened to f32, for input in 16 bits.
    room: [Vec<f32>; 2],
}

/// Buffers of a step, kept by its thread for the next step.
#[derive(Default)]
struct StepLists {
    parts: Vec<Part<'static>>,
    layers: Vec<Done>,
    room: [Vec<f32>; 2],
}

thread_local! {
    /// Taken when a step begins, put back when it is dropped.
    static STEP: Cell<StepLists> = Cell::default();
}

#[derive(Debug)]
struct Part<'a> {
    sequence: &'a mut Sequence,
    /// Tokens of the sequence after the commit; `sequence.len` is the number before it.
    len: u32,
    /// First row of the sequence in the step.
    row: usize,
    /// Whether the sequence was left out of the step.
    out: bool,
    /// Overrides of [`Attend::read`] and [`Attend::closed_gaps`] for the rows of this sequence.
    read: Option<ReadPages>,
    closed_gaps: Option<bool>,
}

#[derive(Debug, Default)]
pub(crate) struct Done {
    appended: bool,
    routed: bool,
    /// Number of first choices of a row whose pages it reads; all pages if `None`.
    fetch: Option<u32>,
    /// Further experts that each row may read, and the number of them that each row does read.
    more: (Vec<u16>, Vec<u8>),
    /// Feedback for the layer's policy, by sequence and head. If `told`, it is from the last `attend` of this step, else from an earlier
    /// step.
    feeds: Vec<HeadFeedback>,
    told: bool,
    /// Bytes read from lower tiers.
    remote: u64,
    /// In a step of several sequences: the reads from lower tiers, with sequence and call.
    lower: Vec<Lower>,
}

impl Done {
    /// Resets to the state before a step, keeping the memory of the lists.
    fn clear(&mut self) {
        let Done { feeds, mut lower, .. } = mem::take(self);
        lower.clear();
        *self = Done { feeds, lower, ..Done::default() };
    }
}

impl<'a> Step<'a> {
    pub(crate) fn begin(
        inner: Arc<Inner>,
        parts: impl IntoIterator<Item = (&'a mut Sequence, u32)>,
    ) -> Result<Step<'a>, Error> {
        span!("begin");
        let StepLists { parts: taken, mut layers, room } = STEP.take();
        let mut taken: Vec<Part<'a>> = emptied(taken);
        let (mut rows, mut needed) = (0, 0u64);
        for (index, (sequence, n)) in parts.into_iter().enumerate() {
            let len = end_of(&inner, index, sequence, n)?;
            sequence.repair();
            sequence.poisoned = true;
            needed = sequence_needs(&inner, sequence, len).saturating_add(needed);
            sequence.poisoned = false;
            taken.push(Part { sequence, len, row: rows, out: false, read: None, closed_gaps: None });
            rows += n as usize;
        }
        if taken.is_empty() {
            return Err(Error::NoSequences);
        }
        let priority = taken.iter().filter_map(|part| part.sequence.priority).min();
        let mut pages = loop {
            match inner.reserve(needed, priority) {
                Err(Error::OutOfBudget { needed, available })
                    if inner.pool.tiers.is_some() && needed <= inner.pool.arenas.budget() =>
                {
                    let sequences = taken.iter_mut().map(|part: &mut Part<'_>| &mut *part.sequence);
                    let mut owners: Vec<Owner<'_>> = sequences.map(Owner::first).collect();
                    let missing = needed - available;
                    // Retry: other threads may have taken the freed bytes.
                    if inner.lower(&mut owners, missing, true).done(missing)? < missing {
                        return Err(Error::OutOfBudget { needed, available });
                    }
                }
                reserved => break reserved?,
            }
        };
        event!(
            "begun",
            sequences = taken.len(),
            rows = rows,
            layers = inner.shape.config.layers.len(),
            bytes = needed
        );
        pages.lend(&taken[0].sequence.lease);
        let now = inner.clock.fetch_add(1, Ordering::Relaxed) + 1;
        for part in &mut taken {
            (part.sequence.stepping, part.sequence.stepped) = (true, now);
        }
        layers.resize_with(inner.shape.config.layers.len(), Done::default);
        let mut step = Step {
            inner,
            parts: taken,
            pages,
            layers,
            rows,
            committed: false,
            ahead: None,
            late: None,
            room,
        };
        if step.inner.pool.tiers.is_some() {
            step.look_ahead(0, 0);
        }
        Ok(step)
    }

    /// Prefetches the pages of a layer from lower tiers if the latest call of `attend` read all pages; `used` bytes of staging are in use.
    fn look_ahead(&mut self, layer: usize, used: u64) {
        if self.ahead.as_ref().is_some_and(|ahead| ahead.layer == layer) {
            return;
        }
        // Drops an unused prefetch, to free its memory first.
        self.ahead = None;
        let inner = self.inner.clone();
        let tiers = inner.pool.tiers.as_ref().filter(|tiers| tiers.reads_all.load(Ordering::Relaxed));
        if let Some(tiers) = tiers.filter(|_| layer < self.layers.len()) {
            let ahead = tiers.ahead(self.away(layer), used);
            let lifted = inner.shape.config.backend.device().and_then(|device| {
                let files = self.away(layer).filter(|slot| slot.level.staged()).map(|slot| slot.bytes());
                tiers.lift(device, self.away(layer), used + files.sum::<u64>())
            });
            self.ahead = Some(Prefetched { layer, ahead, lifted });
        }
    }

    /// Pages of a layer in lower tiers that hold visible tokens.
    fn away(&self, layer: usize) -> impl Iterator<Item = &Arc<StoredPage>> {
        let heads = self.live().flat_map(move |part| &part.sequence.layers[layer].heads);
        let entries = heads.flat_map(|head| head.runs.iter()).flat_map(|(_, run)| &run.entries);
        entries.filter(|entry| entry.live != 0).filter_map(|entry| match &entry.held {
            PageState::Away(Away { slot, .. }) => Some(slot),
            _ => None,
        })
    }

    /// The sequences that were not left out.
    fn live(&self) -> impl Iterator<Item = &Part<'a>> {
        self.parts.iter().filter(|part| !part.out)
    }

    /// Rows of the step over all its sequences, including those [left out](Step::leave_out).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Attends the step's rows over their sequences: `q` is `[rows][query_heads][k_dim]`, in f32, f16 or bf16 ([`Scalar`]). Row `i` of a
    /// sequence sees the tokens up to its own position, through the layer's window.
    ///
    /// Splitting the same tokens into other steps does not change a row's result, as long as no step is longer than the ring and nothing is
    /// evicted in between. (In a longer step, tokens that leave the ring in the same step are read before they are filed, in another
    /// order.)
    ///
    /// Feedback for the layer's policy is taken from the last call for a layer.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::NotAppended`], [`Error::Length`]; [`Error::Query`] for a query that is not finite; options out of range
    /// or that the cache does not support ([`Error::Scale`], [`Error::Softcap`], [`Error::Split`], [`Error::NoBounds`],
    /// [`Error::NoRotation`], [`Error::NotRouted`]); [`Error::ScoreOverflow`]; [`Error::Output`] for results that the dtype of `out` cannot
    /// hold; [`Error::Tier`] or [`Error::Staging`] for pages of lower tiers; [`Error::Device`]. After an error `out` is undefined.
    pub fn attend(
        &mut self,
        layer: usize,
        q: &[impl Scalar],
        options: &Attend,
        out: AttendOutput<'_>,
    ) -> Result<(), Error> {
        self.attend_tensors(layer, options, Tensors::Host(HostSlice::of(q), out))
    }

    fn attend_tensors(&mut self, layer: usize, options: &Attend, tensors: Tensors<'_>) -> Result<(), Error> {
        span!("attend", layer = layer, rows = self.rows);
        let inner = self.inner.clone();
        let shape = inner.shape.layer(layer)?;
        if !self.layers[layer].appended {
            return Err(Error::NotAppended { layer });
        }
        let ahead = self.ahead.take_if(|ahead| ahead.layer == layer);
        if let Some(tiers) = &inner.pool.tiers {
            let all = self.reads_of(options).all(|read| read == ReadPages::All);
            tiers.reads_all.store(all, Ordering::Relaxed);
            let used = if all { self.away(layer).map(|slot| tiers.staged(slot)).sum() } else { 0 };
            self.look_ahead(layer + 1, used);
        }
        let (first, (more, counts)) = (self.layers[layer].fetch, mem::take(&mut self.layers[layer].more));
        let fetched = Fetched { first, more: &more, counts: &counts };
        let views = self.parts.iter().enumerate().map(|(sequence, part)| View {
            sequence,
            row: 0,
            layer: &part.sequence.layers[layer],
            first: part.sequence.len,
            // A sequence that was left out attends nothing; its rows in the tensors are skipped.
            rows: if part.out { 0 } else { part.rows() as u32 },
            len: part.len,
            fetched,
            start: part.row,
            read: part.read.unwrap_or(options.read),
            closed_gaps: part.closed_gaps.unwrap_or(options.closed_gaps),
        });
        if let (Tensors::Host(..), Some(late)) = (&tensors, &mut self.late) {
            late.forget(layer);
        }
        let done = &mut self.layers[layer];
        let call = Call { executor: &*inner.executor, pool: &inner.pool, layer, shape, rows: self.rows };
        let known = done.lower.len();
        let lower = (self.parts.len() > 1).then_some(&mut done.lower);
        let noted = Noted { feeds: &mut done.feeds, lower };
        let attended = attend(call, views, tensors, options, Some(noted), ahead);
        done.more = (more, counts);
        if attended.is_err() {
            done.lower.truncate(known);
        }
        done.remote += attended?;
        done.told = true;
        Ok(())
    }

    /// Records the experts chosen by the layer's router: `[rows][top_k]`, first choice first. A token is filed under its first choice. Not
    /// needed if the cache has one expert.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::Length`], [`Error::Expert`]; [`Error::ExpertTwice`] for an expert twice in a row; [`Error::Twice`] for a
    /// layer already routed.
    pub fn route(&mut self, layer: usize, experts: &[u16]) -> Result<(), Error> {
        self.inner.shape.layer(layer)?;
        if self.layers[layer].routed {
            return Err(Error::Twice { layer, what: "routed" });
        }
        let (count, top_k) = (self.inner.shape.config.experts, self.inner.shape.config.top_k as usize);
        length("experts", experts.len(), self.rows * top_k, "rows * top_k")?;
        for row in self.live().flat_map(|part| part.row..part.row + part.rows()) {
            let chosen = &experts[row * top_k..][..top_k];
            for (i, &expert) in chosen.iter().enumerate() {
                if u32::from(expert) >= count {
                    return Err(Error::Expert { layer, row, expert, experts: count });
                }
                if chosen[..i].contains(&expert) {
                    return Err(Error::ExpertTwice { layer, row, expert });
                }
            }
        }
        if count > 1 {
            for part in self.parts.iter_mut().filter(|part| !part.out) {
                let own = &experts[part.row * top_k..][..part.rows() * top_k];
                part.sequence.layers[layer].route(own);
            }
        }
        self.layers[layer].routed = true;
        Ok(())
    }

    /// First position and number of rows of each sequence, including those left out.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (Position, usize)> {
        self.parts.iter().map(|part| (Position(part.sequence.len), part.rows()))
    }

    pub(crate) fn routed(&self, layer: usize) -> bool {
        self.layers.get(layer).is_some_and(|done| done.routed)
    }

    /// Sets how many first choices of a row are read; `more` are further experts of each row, `counts` the number of them that each row
    /// reads.
    pub(crate) fn fetch(&mut self, layer: usize, experts: u32, more: &[u16], counts: &[u8]) {
        let done = &mut self.layers[layer];
        done.fetch = Some(experts);
        done.more.0.clear();
        done.more.0.extend_from_slice(more);
        done.more.1.clear();
        done.more.1.extend_from_slice(counts);
    }
}

impl Part<'_> {
    /// Rows of the sequence in the step; 0 after the commit.
    fn rows(&self) -> usize {
        (self.len - self.sequence.len) as usize
    }

    /// Undoes all writes of the step to the sequence.
    fn abort(&mut self, inner: &Inner) {
        let len = self.sequence.len;
        for (layer, shape) in self.sequence.layers.iter_mut().zip(&inner.shape.config.layers) {
            layer.abort(&inner.shape, shape, len);
        }
        self.sequence.stepping = false;
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if !self.committed {
            let inner = &self.inner;
            self.parts.iter_mut().filter(|part| !part.out).for_each(|part| part.abort(inner));
        }
        self.layers.iter_mut().for_each(Done::clear);
        let (parts, layers) = (mem::take(&mut self.parts), mem::take(&mut self.layers));
        STEP.set(StepLists { parts: emptied(parts), layers, room: mem::take(&mut self.room) });
    }
}
