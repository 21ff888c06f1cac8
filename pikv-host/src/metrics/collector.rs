//! A sink that adds up its numbers.

use super::{Evicted, Histogram, Reused, Sink, StepMetrics};
use crate::base::failures::Failures;
use crate::fabric::Traffic;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Sums of a [`Collector`]; integers saturate.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Totals {
    /// Number of committed steps.
    pub steps: u64,
    /// Tokens that the steps added.
    pub rows: u64,
    /// Bytes of pages after the last step.
    pub resident_bytes: u64,
    /// Largest `resident_bytes` after a step.
    pub peak_resident_bytes: u64,
    /// Bytes that the same tokens would take with nothing evicted, packed or shared, after the last step.
    pub logical_bytes: u64,
    /// For each expert, wanted pages that were in the first tier.
    pub hits: Vec<f64>,
    /// For each expert, wanted pages that were not in the first tier.
    pub misses: Vec<f64>,
    /// Tokens of the rows' experts that were held, summed over steps, rows, layers and KV heads.
    pub held_tokens: u64,
    /// Tokens of the rows' experts that were not held, summed likewise.
    pub lost_tokens: u64,
    /// Pages with evicted tokens.
    pub evicted_pages: u64,
    /// Evicted tokens.
    pub evicted_tokens: u64,
    /// Bytes freed by evictions.
    pub evicted_bytes: u64,
    /// Age of evicted pages, in tokens: how much older than its sequence's newest token.
    pub age: Histogram,
    /// Tokens of its sequence between two uses of a page.
    pub gap: Histogram,
    /// The fabric's traffic, as last reported by the cache.
    pub traffic: Traffic,
    /// Failures that did not fail a call, as last reported by the cache.
    pub failures: Failures,
}

impl Totals {
    /// Hits divided by wanted pages, for one expert; `None` for no wanted pages or no such expert.
    pub fn hit_rate(&self, expert: usize) -> Option<f64> {
        let (hits, misses) = (*self.hits.get(expert)?, *self.misses.get(expert)?);
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    /// Hits divided by wanted pages, over all experts; `None` for no wanted pages.
    pub fn hit_rate_of_all(&self) -> Option<f64> {
        let [hits, misses]: [f64; 2] = [&self.hits, &self.misses].map(|of| of.iter().sum());
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    /// Share of the tokens of the rows' experts that was held; `None` for no tokens. Unlike a hit rate it does not depend on which pages
    /// were wanted.
    pub fn residency(&self) -> Option<f64> {
        let all = self.held_tokens as f64 + self.lost_tokens as f64;
        (all > 0.0).then(|| self.held_tokens as f64 / all)
    }
}

/// Adds up the numbers in constant memory: two histograms, and two counts for each expert.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::metrics::{Collector, Evicted, Sink, StepMetrics};
/// let sink = Collector::new(2);
/// sink.step(&StepMetrics::default().resident_bytes(4096).hits(&[3.0, 0.0]).misses(&[1.0, 2.0]));
/// sink.evicted(&Evicted::default().kv_head(1).tokens(32).bytes(2048).age(700));
/// let totals = sink.totals();
/// assert_eq!((totals.hit_rate(0), totals.hit_rate(1)), (Some(0.75), Some(0.0)));
/// assert_eq!(totals.age.max(), Some(700));
/// ```
#[derive(Debug)]
pub struct Collector {
    totals: Mutex<Totals>,
}

impl Collector {
    /// A collector for a cache of `experts` experts. Counts of higher experts are dropped.
    pub fn new(experts: usize) -> Collector {
        let counts = vec![0.0; experts];
        Collector { totals: Mutex::new(Totals { hits: counts.clone(), misses: counts, ..Totals::default() }) }
    }

    /// The sums so far.
    pub fn totals(&self) -> Totals {
        self.lock().clone()
    }

    /// Returns the sums and resets them; `resident_bytes` is kept, and is the new peak.
    pub fn take(&self) -> Totals {
        let mut totals = self.lock();
        let counts = vec![0.0; totals.hits.len()];
        let fresh = Totals {
            resident_bytes: totals.resident_bytes,
            peak_resident_bytes: totals.resident_bytes,
            logical_bytes: totals.logical_bytes,
            traffic: totals.traffic,
            failures: totals.failures,
            hits: counts.clone(),
            misses: counts,
            ..Totals::default()
        };
        std::mem::replace(&mut totals, fresh)
    }

    fn lock(&self) -> MutexGuard<'_, Totals> {
        // A panic while adding leaves the sums valid.
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(sum: &mut u64, n: u64) {
    *sum = sum.saturating_add(n);
}

impl Sink for Collector {
    fn step(&self, step: &StepMetrics<'_>) {
        let mut totals = self.lock();
        add(&mut totals.steps, 1);
        add(&mut totals.rows, step.rows);
        totals.resident_bytes = step.resident_bytes;
        totals.peak_resident_bytes = totals.peak_resident_bytes.max(step.resident_bytes);
        totals.logical_bytes = step.logical_bytes;
        totals.hits.iter_mut().zip(step.hits).for_each(|(sum, n)| *sum += n);
        totals.misses.iter_mut().zip(step.misses).for_each(|(sum, n)| *sum += n);
        add(&mut totals.held_tokens, step.held_tokens);
        add(&mut totals.lost_tokens, step.lost_tokens);
    }

    fn evicted(&self, page: &Evicted) {
        let mut totals = self.lock();
        add(&mut totals.evicted_pages, 1);
        add(&mut totals.evicted_tokens, page.tokens.into());
        add(&mut totals.evicted_bytes, page.bytes);
        totals.age.record(page.age.into());
    }

    fn reused(&self, page: &Reused) {
        self.lock().gap.record(page.gap.into());
    }

    fn traffic(&self, sums: &Traffic) {
        self.lock().traffic = *sums;
    }

    fn failures(&self, sums: &Failures) {
        self.lock().failures = *sums;
    }
}
