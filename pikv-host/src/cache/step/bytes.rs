//! Bytes of page memory that a step reserves: an upper bound for any choice of experts.

use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::pages::filing::LayerPages;
use pikv_core::codec::packed::Packed;
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::{LayerShape, StoreShape};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Bytes of page memory for a step: [`Cache::step_bytes`](crate::Cache::step_bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepBytes {
    /// Bytes that [`Cache::begin`](crate::Cache::begin) would reserve: the most that the step can take, for any choice of experts.
    pub needed: u64,
    /// Bytes left of the budget.
    pub available: u64,
}

impl StepBytes {
    /// Whether the step fits into the budget as it is. [`Cache::begin`](crate::Cache::begin) can also make room: it frees prefixes that no
    /// sequence reads, and in a cache with tiers it parks sequences and moves pages down.
    pub fn fits(&self) -> bool {
        self.needed <= self.available
    }
}

/// Tokens of a sequence after a step of `n` tokens; `index` is its place in the step.
///
/// # Errors
/// [`Error::ForeignSequence`], [`Error::Poisoned`], [`Error::NoTokens`], [`Error::PositionOverflow`].
pub(super) fn end_of(inner: &Arc<Inner>, index: usize, sequence: &Sequence, n: u32) -> Result<u32, Error> {
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

/// The most bytes that a sequence takes to grow to `len` tokens.
pub(super) fn sequence_needs(inner: &Inner, sequence: &Sequence, len: u32) -> u64 {
    let layers = sequence.layers.iter().zip(&inner.shape.config.layers);
    layers.fold(0, |sum, (layer, shape)| {
        bytes_needed(inner, shape, layer, sequence.len, len).saturating_add(sum)
    })
}

/// Implements [`Cache::step_bytes`](crate::Cache::step_bytes).
pub(crate) fn step_bytes<'s>(
    inner: &Arc<Inner>,
    parts: impl IntoIterator<Item = (&'s Sequence, u32)>,
) -> Result<StepBytes, Error> {
    let (arenas, mut some) = (&inner.pool.arenas, false);
    let mut bytes = StepBytes { needed: 0, available: arenas.budget().saturating_sub(arenas.taken()) };
    for (index, (sequence, n)) in parts.into_iter().enumerate() {
        some = true;
        let len = end_of(inner, index, sequence, n)?;
        // The next step undoes a leaked one and gets its reservation.
        bytes.available += sequence.lease.left();
        let needed = match sequence.stepping {
            true => sequence_needs(inner, &sequence.repaired(), len),
            false => sequence_needs(inner, sequence, len),
        };
        bytes.needed = needed.saturating_add(bytes.needed);
    }
    if some { Ok(bytes) } else { Err(Error::NoSequences) }
}

/// The most bytes that one layer of a sequence takes to grow from `old` to `new` tokens.
fn bytes_needed(inner: &Inner, shape: &LayerShape, layer: &Common<LayerPages>, old: u32, new: u32) -> u64 {
    let (store, experts) = (&layer.store, inner.shape.config.experts);
    let in_common = layer.is_shared();
    let left = store.ring.left(new);
    // Tokens that leave the ring and whose experts are known, counted by run.
    let mut known: SmallVec<[u32; 32]> = smallvec![0; experts as usize + 1];
    for position in layer.filed..left.min(old) {
        if let Some(run) = layer.run_at(&inner.shape, shape, position) {
            known[run] += 1;
        }
    }
    // Tokens of this step: each may have a run of its own, with a last page that is shared, or full after one token.
    let fresh = layer.filed.max(old).min(left);
    let runs = layer.sharing(&inner.shape, shape).most(layer.filed, left);
    let sinks = left.min(store.sinks).saturating_sub(fresh);
    let filed = if store.files(shape, u32::MAX) { left - fresh - sinks } else { 0 };
    let mut unknown = u64::from(2 * filed.min(runs)) + u64::from(filed / PAGE);
    // Each page that may become full is packed in addition.
    let unknown_closed = u64::from(filed.min(runs)) + u64::from(filed / PAGE);
    // Within 65,536 positions each run packs at most one page early, and starts another.
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
        let mut early = u64::from(runs) * rounds;
        for (c, &n) in known.iter().enumerate().filter(|(_, n)| **n > 0) {
            let run = &head.runs[c];
            let fill = run.room().map_or(0, |(_, fill)| fill);
            // A page filled ahead takes the place of an open page, and is shared.
            let taken = in_common || layer.sealed.is_some();
            let shared = run.room().is_some_and(|_| taken || run.shares_room());
            pages += StoreShape::run_pages(n, if fill > 0 { PAGE - fill } else { 0 }) + u64::from(shared);
            closed += u64::from((fill + n) / PAGE);
            early += u64::from(run.room().is_some_and(|(page, _)| !Packed::spans(page.words()[0], left)));
        }
        if codec.is_some() {
            pages += early;
            closed += early;
        }
        bytes += pages * shape.layout.bytes();
        bytes += codec.as_ref().map_or(0, |codec| closed * codec.packed.bytes());
        if let Some((codec, aged)) = codec.as_ref().and_then(|codec| Some((codec, codec.aged.as_ref()?))) {
            let due: u64 = head.runs.experts().map(|(_, run)| run.due(codec, left)).sum();
            // Pages that the step itself packs, if it is long enough to pack them twice.
            let within = if left.saturating_sub(layer.filed) > aged.after { closed } else { 0 };
            bytes += (due + within) * aged.codec.packed.bytes();
        }
    }
    bytes
}
