//! A sink for the `metrics` crate.

use super::{Evicted, PrefixUsage, Reused, Sink, StepMetrics};
use crate::base::failures::Failures;
use crate::fabric::Traffic;
use ::metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Records every number with the `metrics` crate.
///
/// Needs the feature `metrics`.
///
/// | name | kind | of |
/// |---|---|---|
/// | `pikv_steps_total`, `pikv_rows_total` | counter | steps, and tokens added by them |
/// | `pikv_resident_bytes`, `pikv_logical_bytes` | gauge | the last step |
/// | `pikv_hit_pages_total`, `pikv_missed_pages_total` | counter | wanted pages that were in the first tier or not, over rows and KV heads, label `expert` |
/// | `pikv_held_tokens_total`, `pikv_lost_tokens_total` | counter | tokens of the rows' experts that were held or not, over rows and KV heads |
/// | `pikv_evicted_pages_total`, `pikv_evicted_tokens_total`, `pikv_evicted_bytes_total` | counter | evictions |
/// | `pikv_eviction_age_tokens` | histogram | age of evicted pages, in tokens |
/// | `pikv_reuse_gap_tokens` | histogram | tokens of the sequence since a page was last used |
/// | `pikv_wire_sent_bytes_total`, `pikv_wire_received_bytes_total`, `pikv_wire_messages_total` | counter | a fabric's messages |
/// | `pikv_moved_pages_total`, `pikv_replicated_pages_total` | counter | pages moved or copied to other ranks |
/// | `pikv_uncompacted_total`, `pikv_unwiped_pages_total` | counter | failures that did not fail a call ([`Failures`]) |
#[cfg(feature = "metrics")]
pub struct MetricsSink {
    steps: Counter,
    rows: Counter,
    resident_bytes: Gauge,
    logical_bytes: Gauge,
    hits: Vec<Counter>,
    misses: Vec<Counter>,
    /// Fractions of hits, then of misses, of each expert: counters take whole pages.
    pages: Mutex<Vec<f64>>,
    tokens: [Counter; 2],
    evicted_pages: Counter,
    evicted_tokens: Counter,
    evicted_bytes: Counter,
    age: Histogram,
    gap: Histogram,
    /// Bytes sent and received, messages, pages moved and replicated.
    traffic: [Counter; 5],
    /// Heads not compacted, pages not overwritten.
    failures: [Counter; 2],
    prefix_bytes: Gauge,
    prefixes: [Counter; 6],
}

impl MetricsSink {
    /// A sink for a cache of `experts` experts, with the recorder installed at this time. Counts of higher experts are dropped.
    pub fn new(experts: usize) -> MetricsSink {
        let each =
            |name: &'static str| (0..experts).map(|e| counter!(name, "expert" => e.to_string())).collect();
        MetricsSink {
            steps: counter!("pikv_steps_total"),
            rows: counter!("pikv_rows_total"),
            resident_bytes: gauge!("pikv_resident_bytes"),
            logical_bytes: gauge!("pikv_logical_bytes"),
            hits: each("pikv_hit_pages_total"),
            misses: each("pikv_missed_pages_total"),
            pages: Mutex::new(vec![0.0; 2 * experts]),
            tokens: [counter!("pikv_held_tokens_total"), counter!("pikv_lost_tokens_total")],
            evicted_pages: counter!("pikv_evicted_pages_total"),
            evicted_tokens: counter!("pikv_evicted_tokens_total"),
            evicted_bytes: counter!("pikv_evicted_bytes_total"),
            age: histogram!("pikv_eviction_age_tokens"),
            gap: histogram!("pikv_reuse_gap_tokens"),
            traffic: [
                counter!("pikv_wire_sent_bytes_total"),
                counter!("pikv_wire_received_bytes_total"),
                counter!("pikv_wire_messages_total"),
                counter!("pikv_moved_pages_total"),
                counter!("pikv_replicated_pages_total"),
            ],
            failures: [counter!("pikv_uncompacted_total"), counter!("pikv_unwiped_pages_total")],
            prefix_bytes: gauge!("pikv_prefix_bytes"),
            prefixes: [
                counter!("pikv_prefix_lookups_total"),
                counter!("pikv_prefix_asked_tokens_total"),
                counter!("pikv_prefix_hits_total"),
                counter!("pikv_prefix_hit_tokens_total"),
                counter!("pikv_prefix_evicted_tokens_total"),
                counter!("pikv_prefix_unequal_total"),
            ],
        }
    }
}

impl Sink for MetricsSink {
    fn step(&self, step: &StepMetrics<'_>) {
        self.steps.increment(1);
        self.rows.increment(step.rows);
        self.resident_bytes.set(step.resident_bytes as f64);
        self.logical_bytes.set(step.logical_bytes as f64);
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let (hits, misses) = pages.split_at_mut(self.hits.len());
        for (counters, sums, pages) in [(&self.hits, hits, step.hits), (&self.misses, misses, step.misses)] {
            for ((counter, sum), pages) in counters.iter().zip(sums).zip(pages) {
                let whole = *sum as u64;
                *sum += pages;
                counter.increment(*sum as u64 - whole);
            }
        }
        let tokens = [step.held_tokens, step.lost_tokens];
        self.tokens.iter().zip(tokens).for_each(|(counter, tokens)| counter.increment(tokens));
    }

    fn evicted(&self, page: &Evicted) {
        self.evicted_pages.increment(1);
        self.evicted_tokens.increment(page.tokens.into());
        self.evicted_bytes.increment(page.bytes);
        self.age.record(page.age);
    }

    fn reused(&self, page: &Reused) {
        self.gap.record(page.gap);
    }

    fn traffic(&self, sums: &Traffic) {
        let Traffic { sent, received, messages, moved, replicated, .. } = *sums;
        let sums = [sent, received, messages, moved, replicated];
        self.traffic.iter().zip(sums).for_each(|(counter, sum)| counter.absolute(sum));
    }

    fn failures(&self, sums: &Failures) {
        let sums = [sums.uncompacted, sums.unwiped];
        self.failures.iter().zip(sums).for_each(|(counter, sum)| counter.absolute(sum));
    }

    fn prefixes(&self, sums: &PrefixUsage) {
        self.prefix_bytes.set(sums.bytes as f64);
        let PrefixUsage { lookups, asked_tokens, hits, hit_tokens, evicted_tokens, unequal, .. } = *sums;
        let sums = [lookups, asked_tokens, hits, hit_tokens, evicted_tokens, unequal];
        self.prefixes.iter().zip(sums).for_each(|(counter, sum)| counter.absolute(sum));
    }
}

impl fmt::Debug for MetricsSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsSink").field("experts", &self.hits.len()).finish_non_exhaustive()
    }
}
