//! A sink that adds up.

use super::{Evicted, Histogram, Reused, Sink, StepMetrics};
use crate::base::failures::Failures;
use crate::fabric::Traffic;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Sums of a [`Collector`]. They stop at their largest value.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Tokens that they added.
    pub rows: u64,
    /// Bytes of pages after the last step.
    pub resident_bytes: u64,
    /// The most that they were after a step.
    pub peak_resident_bytes: u64,
    /// Bytes that the same tokens would take, after the last step.
    pub logical_bytes: u64,
    /// Of each expert, pages that were wanted and there.
    pub hits: Vec<f64>,
    /// Of each expert, pages that were wanted and not there.
    pub misses: Vec<f64>,
    /// Tokens of the rows' experts that were held, summed over steps, rows, layers and KV heads.
    pub held_tokens: u64,
    /// Tokens of the rows' experts that were not held, summed alike.
    pub lost_tokens: u64,
    /// Pages evicted.
    pub evicted_pages: u64,
    /// Tokens in them.
    pub evicted_tokens: u64,
    /// Bytes of them.
    pub evicted_bytes: u64,
    /// Tokens by which an evicted page was older than the newest.
    pub age: Histogram,
    /// Tokens of its sequence between two uses of a page.
    pub gap: Histogram,
    /// The cache's last report of its fabric's traffic.
    pub traffic: Traffic,
    /// The cache's last report of work that failed without failing a call.
    pub failures: Failures,
}

impl Totals {
    /// Hits over all wanted pages, of one expert; `None` if none was wanted, or there is no such expert.
    pub fn hit_rate(&self, expert: usize) -> Option<f64> {
        let (hits, misses) = (*self.hits.get(expert)?, *self.misses.get(expert)?);
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    /// Hits over all wanted pages, of all experts; `None` if none was wanted.
    pub fn hit_rate_of_all(&self) -> Option<f64> {
        let [hits, misses]: [f64; 2] = [&self.hits, &self.misses].map(|of| of.iter().sum());
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    /// The share of the tokens of the rows' experts that was held; `None` if there were none. Unlike a hit rate it says nothing of what is
    /// wanted.
    pub fn residency(&self) -> Option<f64> {
        let all = self.held_tokens as f64 + self.lost_tokens as f64;
        (all > 0.0).then(|| self.held_tokens as f64 / all)
    }
}

/// Adds up what it hears, in memory that does not grow: two histograms and two counts an expert.
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
    /// A collector for a cache of `experts` experts. Counts of experts past these are dropped.
    pub fn new(experts: usize) -> Collector {
        let counts = vec![0.0; experts];
        Collector { totals: Mutex::new(Totals { hits: counts.clone(), misses: counts, ..Totals::default() }) }
    }

    /// The sums so far.
    pub fn totals(&self) -> Totals {
        self.lock().clone()
    }

    /// The sums so far, which it then resets; bytes after the last step stay, and are the peak to begin with.
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
        // A thread that panicked while it added leaves sums that are sums all the same.
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
