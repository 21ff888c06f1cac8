//! Commits a step: its tokens become part of their sequences.

use super::{Part, Step};
use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::eviction::evict::enforce;
use crate::fabric::Sent;
use crate::metrics::report::StepReport;
use crate::pages::filing::LayerPages;
use pikv_core::page::Layout;
use pikv_core::plan::LayerShape;
use smallvec::SmallVec;
use std::sync::Arc;

impl Step<'_> {
    /// Makes the tokens part of their sequences, and evicts tokens over the budgets of the policies.
    ///
    /// # Errors
    /// [`Error::Incomplete`] for a layer that was not appended or not routed; [`Error::OutOfMemory`], [`Error::Device`], [`Error::Fabric`];
    /// the errors of [`Step::check`], if a policy needs results from the device. The step is over then, and the sequences are unchanged.
    ///
    /// # Panics
    /// If a policy panics. The step's sequences are then committed or [poisoned](Error::Poisoned); other sequences are not affected.
    pub fn commit(self) -> Result<(), Error> {
        self.finish(None)
    }

    /// Commits as [`Step::commit`], and fills `report` with counts of the step.
    ///
    /// # Errors
    /// The errors of [`Step::commit`].
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
        self.take_late_results()?;
        let mut sent = self.file_rest()?.into_iter();
        self.committed = true;
        // If a policy panics from here on, its state may be half updated.
        self.parts.iter_mut().filter(|part| !part.out).for_each(|part| part.sequence.poisoned = true);
        self.observe(report.as_deref_mut());
        for part in &mut self.parts {
            if part.out {
                // Tickets are indexed by the place in the step.
                let by_part = report.as_deref_mut().and_then(|report| report.by_part.as_mut());
                by_part.into_iter().for_each(|by_part| by_part.tickets.push(Arc::default()));
                continue;
            }
            part.commit(&inner, report.as_deref_mut(), sent.next());
        }
        if let Some(front) = &inner.fabric {
            let layers: SmallVec<[&[Common<LayerPages>]; 8]> =
                self.live().map(|part| &part.sequence.layers[..]).collect();
            front.set_aside_thinned(&inner.pool, &layers);
        }
        inner.pool.arenas.grow_ahead(sequences as u64, rows as u64);
        Ok(())
    }

    /// Checks that every layer was appended and routed.
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

    /// Files the tokens that left the ring, and sends full pages to the ranks of a fabric; returns the sent pages of each sequence.
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

    /// Passes feedback of the step's rows to the policies, layer by layer, and counts hits into `report`.
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
    /// Makes the step's tokens part of the sequence: evicts tokens over the budgets, frees pages that no row can see, and replaces pages
    /// `sent` to ranks by references to them.
    pub(super) fn commit(
        &mut self,
        inner: &Inner,
        mut report: Option<&mut StepReport>,
        sent: Option<Vec<Sent>>,
    ) {
        let (len, ring) = (self.len, inner.shape.store.ring);
        let Sequence { layers, pins, budget, .. } = &mut *self.sequence;
        let evicted = report.as_deref_mut().map(|report| &mut report.evicted);
        enforce(layers, &inner.shape, &inner.rooms, (len, *budget), pins, evicted);
        if let Some(report) = &mut report {
            let bits: u64 = inner.shape.config.layers.iter().map(logical_bits).sum();
            report.logical_bytes += bits * u64::from(len) / 8;
        }
        for (layer, shape) in layers.iter_mut().zip(&inner.shape.config.layers) {
            layer.undo.forget();
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

/// Bits of a token's keys and values in one layer, in the stored dtypes.
fn logical_bits(shape: &LayerShape) -> u64 {
    let Layout { k_dim, v_dim, k, v, .. } = shape.layout;
    let head = u64::from(k_dim) * u64::from(k.bits()) + u64::from(v_dim) * u64::from(v.bits());
    u64::from(shape.kv_heads) * head
}
