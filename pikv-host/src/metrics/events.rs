//! A sink for the `tracing` crate.

use super::{Evicted, PrefixUsage, Reused, Sink, StepMetrics};
use crate::base::failures::Failures;
use crate::fabric::Traffic;
use tracing::{debug, trace, warn};

/// Emits every number as fields of an event with target `pikv`: steps at level debug, pages at level trace, failures, if there are
/// any, at level warn. Hits and misses are summed over the experts.
///
/// Needs the feature `tracing`.
#[derive(Clone, Copy, Debug, Default)]
#[cfg(feature = "tracing")]
pub struct TracingSink;

impl Sink for TracingSink {
    fn step(&self, step: &StepMetrics<'_>) {
        let StepMetrics { rows, resident_bytes, logical_bytes, hits, misses, held_tokens, lost_tokens } =
            *step;
        let [hit_pages, missed_pages]: [f64; 2] = [hits, misses].map(|of| of.iter().sum::<f64>() + 0.0);
        debug!(
            target: "pikv",
            rows, resident_bytes, logical_bytes, hit_pages, missed_pages, held_tokens, lost_tokens, "step"
        );
    }

    fn evicted(&self, page: &Evicted) {
        let Evicted { layer, kv_head, tokens, bytes, age } = *page;
        trace!(target: "pikv", layer, kv_head, tokens, bytes, age, "evicted");
    }

    fn reused(&self, page: &Reused) {
        let Reused { layer, kv_head, gap } = *page;
        trace!(target: "pikv", layer, kv_head, gap, "reused");
    }

    fn traffic(&self, sums: &Traffic) {
        let Traffic { sent, received, messages, rounds, moved, replicated, .. } = *sums;
        debug!(target: "pikv", sent, received, messages, rounds, moved, replicated, "traffic");
    }

    fn failures(&self, sums: &Failures) {
        let Failures { uncompacted, unwiped } = *sums;
        if *sums != Failures::default() {
            warn!(target: "pikv", uncompacted, unwiped, "failures");
        }
    }
    fn prefixes(&self, sums: &PrefixUsage) {
        let PrefixUsage { bytes, lower, boundaries, lookups, asked_tokens, hits, hit_tokens, .. } = *sums;
        let PrefixUsage { evictions, evicted_tokens, unequal, .. } = *sums;
        let (hit_age, evicted_age) = (sums.hit_age.as_secs_f64(), sums.evicted_age.as_secs_f64());
        debug!(
            target: "pikv", bytes, lower, boundaries, lookups, asked_tokens, hits, hit_tokens, hit_age, evictions, evicted_tokens,
            evicted_age, unequal, "prefixes"
        );
    }
}
