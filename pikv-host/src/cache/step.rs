//! A step: tokens added to some sequences, layer by layer, all or nothing.

mod append;
mod device;
mod leave;
mod reads;

use crate::attend::executor::Session;
use crate::attend::executor::Tensors;
use crate::attend::feedback::Feed;
use crate::attend::hits::Fetched;
use crate::attend::options::{Attend, Output, Read};
use crate::attend::view::View;
use crate::attend::{Call, Lower, Noted, attend};
use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::base::error::length;
use crate::base::host_slice::{HostSlice, Scalar};
use crate::base::scratch::emptied;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::cache::tiering::make_room;
use crate::eviction::evict::enforce;
use crate::fabric::Sent;
use crate::memory::arena::Reservation;
use crate::metrics::report::StepReport;
use crate::pages::entry::{Away, Held};
use crate::pages::filing::Layer;
use crate::tiers::{Early, Stored};
use pikv_core::codec::packed::Packed;
use pikv_core::page::{Layout, PAGE, Position};
use pikv_core::plan::{LayerShape, StoreShape};
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Adds tokens to sequences, as a model runs: for each layer [`append`](Step::append), [`attend`](Step::attend) and, in a model with
/// experts, [`route`](Step::route); at the end [`commit`](Step::commit).
///
/// Layers may come in any order, each once; `append` of a layer comes before its `attend`. Dropped without a commit, a step leaves every
/// sequence as it was. Rows of all sequences lie one after the other in every slice, in the order that the sequences were given.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer; 2], 1 << 20))?;
/// let (mut prompt, mut answer) = (cache.sequence(), cache.sequence());
/// let mut out = [0.0; 6 * 2 * 4];
/// let mut step = cache.begin([(&mut prompt, 5), (&mut answer, 1)])?;
/// assert_eq!(step.rows(), 6);                             // 5 of `prompt`, then 1 of `answer`
/// for layer in 0..2 {
///     step.append(layer, &[0.5; 6 * 4], &[0.25; 6 * 4])?; // [rows][kv_heads][k_dim], [rows][kv_heads][v_dim]
///     step.attend(layer, &[1.0; 6 * 8], &Attend::new(0.5), Output::new(&mut out))?;
/// }
/// step.commit()?;
/// assert_eq!((prompt.next_position().0, answer.next_position().0), (5, 1));
///
/// drop(cache.begin([(&mut answer, 7)])?);                 // never happened
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
    /// Pages of the layer that is likely to be attended next, on their way up.
    ahead: Option<Early>,
    /// What the host is told later of tensors that lie on the device.
    late: Option<Box<dyn Session>>,
    /// A key and a value in f32, where they come in 16 bits.
    room: [Vec<f32>; 2],
}

/// Bytes of page memory for a step: [`Cache::step_bytes`](crate::Cache::step_bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepBytes {
    /// What [`Cache::begin`](crate::Cache::begin) sets aside: the most that the step can take, wherever its tokens are filed.
    pub needed: u64,
    /// What the budget has left.
    pub available: u64,
}

impl StepBytes {
    /// Whether [`Cache::begin`](crate::Cache::begin) would find the memory as it is. It also makes room: of prefixes that nobody reads, and in a
    /// cache with tiers by parking sequences and moving pages down.
    pub fn fits(&self) -> bool {
        self.needed <= self.available
    }
}

/// Lists that a step fills, kept by its thread from step to step.
#[derive(Default)]
struct StepLists {
    parts: Vec<Part<'static>>,
    layers: Vec<Done>,
    room: [Vec<f32>; 2],
}

thread_local! {
    /// Taken for the time of a step, and put back.
    static STEP: Cell<StepLists> = Cell::default();
}

#[derive(Debug)]
struct Part<'a> {
    sequence: &'a mut Sequence,
    /// Tokens once the step is committed; `sequence.len` is still the old number.
    len: u32,
    /// Its first row of the step.
    row: usize,
    /// Whether it was left out since the step began.
    out: bool,
    /// What its rows read, and whether they close gaps, whatever the options of a call say.
    read: Option<Read>,
    closed_gaps: Option<bool>,
}

#[derive(Debug, Default)]
pub(crate) struct Done {
    appended: bool,
    routed: bool,
    /// Experts of a row whose pages it reads, from the first on; all if `None`.
    fetch: Option<u32>,
    /// Further experts of each row that it may read, and how many of them it does.
    more: (Vec<u16>, Vec<u8>),
    /// What the layer's policy will be told, head by head: what the last call left, if it was in this step.
    feeds: Vec<Feed>,
    told: bool,
    /// Bytes that were read from lower tiers.
    remote: u64,
    /// Which sequences read them, call by call, in a step of several.
    lower: Vec<Lower>,
}

impl Done {
    /// As before the step, with the room of its lists.
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
                    let mut sequences: Vec<&mut Sequence> =
                        taken.iter_mut().map(|part: &mut Part<'_>| &mut *part.sequence).collect();
                    // Again, as others may have taken what came free.
                    if !make_room(&inner, &mut sequences, needed - available)? {
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

    /// Has the pages of a layer brought up that will be read, if the calls so far read all, beside `used` bytes of staged ones.
    fn look_ahead(&mut self, layer: usize, used: u64) {
        if self.ahead.as_ref().is_some_and(|ahead| ahead.layer == layer) {
            return;
        }
        // What nobody asked for makes room first.
        self.ahead = None;
        let inner = self.inner.clone();
        let tiers = inner.pool.tiers.as_ref().filter(|tiers| tiers.reads_all.load(Ordering::Relaxed));
        if let Some(tiers) = tiers.filter(|_| layer < self.layers.len()) {
            let ahead = tiers.ahead(self.away(layer), used);
            #[cfg(feature = "cuda")]
            let lifted = inner.shape.config.backend.device().and_then(|device| {
                let files = self.away(layer).filter(|slot| slot.level.staged()).map(|slot| slot.bytes());
                tiers.lift(device, self.away(layer), used + files.sum::<u64>())
            });
            self.ahead = Some(Early {
                layer,
                ahead,
                #[cfg(feature = "cuda")]
                lifted,
            });
        }
    }

    /// Pages of a layer that are read from lower tiers.
    fn away(&self, layer: usize) -> impl Iterator<Item = &Arc<Stored>> {
        let heads = self.live().flat_map(move |part| &part.sequence.layers[layer].heads);
        let entries = heads.flat_map(|head| head.chains.iter()).flat_map(|(_, chain)| &chain.entries);
        entries.filter(|entry| entry.live != 0).filter_map(|entry| match &entry.held {
            Held::Away(Away { slot, .. }) => Some(slot),
            _ => None,
        })
    }

    /// The sequences that were not left out.
    fn live(&self) -> impl Iterator<Item = &Part<'a>> {
        self.parts.iter().filter(|part| !part.out)
    }

    /// Rows of the step, over all its sequences, those that were [left out](Step::leave_out) included.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Attends the step's rows over their sequences: `q` is `[rows][query_heads][k_dim]`, in f32, f16 or bf16 ([`Scalar`]). Row `i` of a
    /// sequence sees the tokens up to its own position, through the layer's window.
    ///
    /// A row's result does not depend on how the tokens were cut into steps, as long as no step is longer than the ring
    /// (tokens that leave the ring in the step that brings them are read before they are filed, in another order), and nothing is
    /// evicted in between.
    ///
    /// What a layer's policy wants to know is noted; of several calls for a layer, the last counts.
    ///
    /// # Errors
    /// No such layer, one that was not yet appended, slices of the wrong length, a query that is not finite, options out of
    /// range, scores that overflow, or results that the dtype of `out` cannot hold; `out` is then undefined.
    pub fn attend(
        &mut self,
        layer: usize,
        q: &[impl Scalar],
        options: &Attend,
        out: Output<'_>,
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
            let all = self.reads_of(options).all(|read| read == Read::All);
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
            // Of one that was left out nothing is attended, and its rows stay in the tensors.
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

    /// The experts that the layer's router chose: `[rows][top_k]`, first choice first. A token is filed by its first choice.
    /// Not needed where the cache has one expert.
    ///
    /// # Errors
    /// No such layer or expert, an expert twice for one token, a layer that was already routed, or a slice of the wrong
    /// length.
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
                part.sequence.layers[layer].tags.extend_from_slice(own);
            }
        }
        self.layers[layer].routed = true;
        Ok(())
    }

    /// The sequences' first positions and rows, those that were left out included.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (Position, usize)> {
        self.parts.iter().map(|part| (Position(part.sequence.len), part.rows()))
    }

    pub(crate) fn routed(&self, layer: usize) -> bool {
        self.layers.get(layer).is_some_and(|done| done.routed)
    }

    /// How many of a row's experts are read, the first ones; and of each row the further ones that it may read, and how many it does.
    pub(crate) fn fetch(&mut self, layer: usize, experts: u32, more: &[u16], counts: &[u8]) {
        let done = &mut self.layers[layer];
        done.fetch = Some(experts);
        done.more.0.clear();
        done.more.0.extend_from_slice(more);
        done.more.1.clear();
        done.more.1.extend_from_slice(counts);
    }

    /// Makes the tokens part of their sequences, and evicts what is over the budgets.
    ///
    /// # Errors
    /// A layer that was not appended or not routed, no memory from the system, or a device that fails; what [`Step::check`] finds, if a
    /// policy has to be told of tensors of the device. The step is over, and the sequences are as before it.
    ///
    /// # Panics
    /// If a policy does. The step's sequences are committed then, or [poisoned](Error::Poisoned); others go on.
    pub fn commit(self) -> Result<(), Error> {
        self.finish(None)
    }

    /// As [`Step::commit`], and says what the step met.
    ///
    /// # Errors
    /// Those of [`Step::commit`].
    pub fn commit_with(self, report: &mut StepReport) -> Result<(), Error> {
        report.clear(self.layers.len(), self.inner.shape.config.experts as usize);
        self.finish(Some(report))
    }

    fn finish(mut self, mut report: Option<&mut StepReport>) -> Result<(), Error> {
        let (sequences, rows) = (self.live().count(), self.live_rows());
        span!("commit", sequences = sequences, rows = rows);
        if sequences == 0 {
            return Ok(());
        }
        let inner = self.inner.clone();
        self.check_complete()?;
        self.settle()?;
        let mut sent = self.file_rest()?.into_iter();
        self.committed = true;
        // From here on a policy that panics leaves what was told it, and what was not, in between.
        self.parts.iter_mut().filter(|part| !part.out).for_each(|part| part.sequence.poisoned = true);
        self.observe(report.as_deref_mut());
        for part in &mut self.parts {
            if part.out {
                // Tickets are by the place in the step.
                let by_part = report.as_deref_mut().and_then(|report| report.by_part.as_mut());
                by_part.into_iter().for_each(|by_part| by_part.tickets.push(Arc::default()));
                continue;
            }
            part.commit(&inner, report.as_deref_mut(), sent.next());
        }
        if let Some(front) = &inner.fabric {
            let layers: SmallVec<[&[Common<Layer>]; 8]> =
                self.live().map(|part| &part.sequence.layers[..]).collect();
            front.set_aside_thinned(&inner.pool, &layers);
        }
        inner.pool.arenas.grow_ahead(sequences as u64, rows as u64);
        Ok(())
    }

    /// That every layer was appended and routed.
    fn check_complete(&self) -> Result<(), Error> {
        for (layer, done) in self.layers.iter().enumerate() {
            if !done.appended {
                return Err(Error::Incomplete { layer, what: "appended" });
            }
            if !done.routed && self.inner.shape.config.experts > 1 {
                return Err(Error::Incomplete { layer, what: "routed" });
            }
        }
        Ok(())
    }

    /// Files the tokens that have left the ring since, and sends full pages to the ranks of a fabric: of each sequence those that were sent.
    fn file_rest(&mut self) -> Result<Vec<Vec<Sent>>, Error> {
        let inner = self.inner.clone();
        for part in self.parts.iter_mut().filter(|part| !part.out) {
            let left = inner.shape.store.ring.left(part.len);
            for (layer, shape) in part.sequence.layers.iter_mut().zip(&inner.shape.config.layers) {
                layer.file(&inner.shape, shape, left, &mut self.pages)?;
            }
        }
        self.pages.flush_copies()?;
        for part in self.parts.iter_mut().filter(|part| !part.out) {
            for (layer, shape) in part.sequence.layers.iter_mut().zip(&inner.shape.config.layers) {
                layer.bound(&inner.shape, shape)?;
            }
        }
        let Some(front) = &inner.fabric else { return Ok(Vec::new()) };
        let kept = |part: &Part<'_>| part.sequence.kept.max(inner.shape.store.ring.kept_from(part.len));
        front.send(&inner.shape, self.live().map(|part| (&part.sequence.layers[..], kept(part))))
    }

    /// Tells policies what the step's rows saw, layer by layer, and counts what they wanted.
    fn observe(&mut self, mut report: Option<&mut StepReport>) {
        let inner = &*self.inner;
        for (l, done) in self.layers.iter_mut().enumerate() {
            if inner.shape.rules[l].is_none() && report.is_none() {
                continue;
            }
            if let Some(report) = &mut report {
                report.remote.push(done.remote);
            }
            let feeds = if done.told { &mut done.feeds[..] } else { &mut [] };
            for (i, part) in self.parts.iter_mut().enumerate().filter(|(_, part)| !part.out) {
                let own = feeds.partition_point(|feed| feed.sequence < i);
                let own = own..feeds.partition_point(|feed| feed.sequence <= i);
                let Sequence { layers, len, .. } = &mut *part.sequence;
                let (layer, shape) = (&mut layers[l], &inner.shape.config.layers[l]);
                let asked = report.as_deref_mut().filter(|report| !report.unasked);
                let reused = asked.map(|report| &mut report.reused);
                layer.observe(&inner.shape, shape, *len, part.len, &mut feeds[own.clone()], reused);
                if let Some(report) = &mut report {
                    layer.count_into(&inner.pool, l, i, *len..part.len, &feeds[own], report);
                }
            }
        }
    }
}

impl Part<'_> {
    /// Its rows of the step, until that is committed.
    fn rows(&self) -> usize {
        (self.len - self.sequence.len) as usize
    }

    /// Undoes what the step wrote, as if it had not been in it.
    fn abort(&mut self, inner: &Inner) {
        let len = self.sequence.len;
        for (layer, shape) in self.sequence.layers.iter_mut().zip(&inner.shape.config.layers) {
            layer.abort(&inner.shape, shape, len);
        }
        self.sequence.stepping = false;
    }

    /// Makes the step's tokens the sequence's: evicts what is over the budgets, frees what nobody sees any more, and has pages that were
    /// `sent` to ranks take the place of those here.
    fn commit(&mut self, inner: &Inner, mut report: Option<&mut StepReport>, sent: Option<Vec<Sent>>) {
        let (len, ring) = (self.len, inner.shape.store.ring);
        let Sequence { layers, pins, budget, .. } = &mut *self.sequence;
        let evicted = report.as_deref_mut().map(|report| &mut report.evicted);
        enforce(layers, &inner.shape, &inner.rooms, (len, *budget), pins, evicted);
        if let Some(report) = &mut report {
            let bits: u64 = inner.shape.config.layers.iter().map(logical_bits).sum();
            report.logical_bytes += bits * u64::from(len) / 8;
        }
        for (layer, shape) in layers.iter_mut().zip(&inner.shape.config.layers) {
            layer.undo.clear();
            layer.remember(&inner.pool, shape, len);
            layer.release(&inner.pool, shape, len);
        }
        let floor = len.saturating_sub(ring.slack());
        let sequence = &mut *self.sequence;
        if let Some(by_part) = report.and_then(|report| report.by_part.as_mut()) {
            by_part.tickets.push(sequence.tickets.add(sequence.len, len, floor));
        }
        sequence.len = len;
        if ring.slack() > 0 && inner.shape.evicts() {
            while sequence.ends.front().is_some_and(|end| *end < floor) {
                sequence.ends.pop_front();
            }
            sequence.ends.push_back(len);
        }
        sequence.floor = sequence.floor.max(floor);
        sequence.kept = sequence.kept.max(ring.kept_from(len));
        if let (Some(front), Some(sent)) = (&inner.fabric, sent) {
            front.place(&mut sequence.layers, sent, sequence.kept);
        }
        (sequence.poisoned, sequence.stepping) = (false, false);
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

/// Bits of a token's keys and values in one layer, as they came.
fn logical_bits(shape: &LayerShape) -> u64 {
    let Layout { k_dim, v_dim, k, v, .. } = shape.layout;
    let head = u64::from(k_dim) * u64::from(k.bits()) + u64::from(v_dim) * u64::from(v.bits());
    u64::from(shape.kv_heads) * head
}

/// Tokens of a sequence once a step of `n` more is committed; `index` is its place in the step.
///
/// # Errors
/// What keeps it from being in a step.
fn end_of(inner: &Arc<Inner>, index: usize, sequence: &Sequence, n: u32) -> Result<u32, Error> {
    if !Arc::ptr_eq(&sequence.inner, inner) {
        return Err(Error::ForeignSequence { index });
    }
    sequence.sound()?;
    if n == 0 {
        return Err(Error::NoTokens { index });
    }
    let end = u64::from(sequence.len) + u64::from(n);
    if end > u64::from(Position::MAX.0) {
        return Err(Error::PositionOverflow { position: end });
    }
    Ok(end as u32)
}

/// The most bytes that a sequence takes on the way to `len` tokens.
fn sequence_needs(inner: &Inner, sequence: &Sequence, len: u32) -> u64 {
    let layers = sequence.layers.iter().zip(&inner.shape.config.layers);
    layers.fold(0, |sum, (layer, shape)| {
        bytes_needed(inner, shape, layer, sequence.len, len).saturating_add(sum)
    })
}

/// What [`Cache::step_bytes`](crate::Cache::step_bytes) returns.
pub(crate) fn step_bytes<'s>(
    inner: &Arc<Inner>,
    parts: impl IntoIterator<Item = (&'s Sequence, u32)>,
) -> Result<StepBytes, Error> {
    let (arenas, mut some) = (&inner.pool.arenas, false);
    let mut bytes = StepBytes { needed: 0, available: arenas.budget().saturating_sub(arenas.taken()) };
    for (index, (sequence, n)) in parts.into_iter().enumerate() {
        some = true;
        let len = end_of(inner, index, sequence, n)?;
        // A step that was leaked is undone by the next one.
        bytes.available += sequence.lease.left();
        let needed = match sequence.stepping {
            true => sequence_needs(inner, &sequence.repaired(), len),
            false => sequence_needs(inner, sequence, len),
        };
        bytes.needed = needed.saturating_add(bytes.needed);
    }
    if some { Ok(bytes) } else { Err(Error::NoSequences) }
}

/// The most bytes that one layer of a sequence takes on the way from `old` to `new` tokens.
fn bytes_needed(inner: &Inner, shape: &LayerShape, layer: &Common<Layer>, old: u32, new: u32) -> u64 {
    let (store, experts) = (&layer.store, inner.shape.config.experts);
    let in_common = layer.is_shared();
    let left = store.ring.left(new);
    // Tokens that leave the ring and whose experts are known, counted by chain.
    let mut known: SmallVec<[u32; 32]> = smallvec![0; experts as usize + 1];
    for position in layer.filed..left.min(old) {
        if let Some(chain) = layer.chain_of(&inner.shape, shape, position) {
            known[chain] += 1;
        }
    }
    // Those of this step: each may go to an expert of its own, whose last page may be shared and full after one token.
    let fresh = layer.filed.max(old).min(left);
    let sinks = left.min(store.sinks).saturating_sub(fresh);
    let filed = if store.files(shape, u32::MAX) { left - fresh - sinks } else { 0 };
    let mut unknown = u64::from(2 * filed.min(experts)) + u64::from(filed / PAGE);
    // Each page that may be full by then is packed besides.
    let unknown_closed = u64::from(filed.min(experts)) + u64::from(filed / PAGE);
    // Within this many positions each expert packs a page early at most, and starts another in its place.
    let rounds = u64::from((left - layer.filed.min(left)) >> 16);
    if sinks > 0 {
        unknown += StoreShape::run_pages(sinks, 0) + 1;
    }
    let mut bytes = 0;
    for (head, codec) in layer.heads.iter().zip(layer.codecs.iter()) {
        let tiles = layer.first_tile + head.ring.len() as u32;
        let mut pages = u64::from(new.div_ceil(PAGE) - tiles) + unknown;
        let mut closed = unknown_closed;
        let partial =
            !old.is_multiple_of(PAGE) && head.ring.back().is_some_and(|page| in_common || page.is_shared());
        pages += u64::from(partial);
        let mut early = u64::from(experts) * rounds;
        for (c, &n) in known.iter().enumerate().filter(|(_, n)| **n > 0) {
            let chain = &head.chains[c];
            let fill = chain.room().map_or(0, |(_, fill)| fill);
            // A page that was filled ahead takes the place of an open one, and is shared.
            let taken = in_common || layer.sealed.is_some();
            let shared = chain.room().is_some_and(|_| taken || chain.shares_room());
            pages += StoreShape::run_pages(n, if fill > 0 { PAGE - fill } else { 0 }) + u64::from(shared);
            closed += u64::from((fill + n) / PAGE);
            early += u64::from(chain.room().is_some_and(|(page, _)| !Packed::spans(page.words()[0], left)));
        }
        if codec.is_some() {
            pages += early;
            closed += early;
        }
        bytes += pages * shape.layout.bytes();
        bytes += codec.as_ref().map_or(0, |codec| closed * codec.packed.bytes());
        if let Some((codec, aged)) = codec.as_ref().and_then(|codec| Some((codec, codec.aged.as_ref()?))) {
            let due: u64 = head.chains.experts().map(|(_, chain)| chain.due(codec, left)).sum();
            // Those that the step itself packs, if it is that long.
            let within = if left.saturating_sub(layer.filed) > aged.after { closed } else { 0 };
            bytes += (due + within) * aged.codec.packed.bytes();
        }
    }
    bytes
}
