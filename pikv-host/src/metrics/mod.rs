//! Metrics of a cache: for each step, and for each page that is evicted or used again.
//!
//! A [`Sink`] receives them from [`ClosedLoop`](crate::ClosedLoop), or from your engine if it runs without a loop. The memory of pikv's
//! sinks is bounded.
//!
//! | sink | file | what it does |
//! |---|---|---|
//! | `()` | `mod.rs` | nothing |
//! | [`Collector`] | `collector.rs` | sums and histograms, to be read at any time |
//! | `TracingSink` | `events.rs` | events for the `tracing` crate (feature `tracing`) |
//! | `MetricsSink` | `recorder.rs` | gauges, counters and histograms for the `metrics` crate (feature `metrics`) |

use crate::base::failures::Failures;
use std::time::Duration;

mod collector;
#[cfg(feature = "tracing")]
mod events;
mod histogram;
#[cfg(feature = "metrics")]
mod recorder;
pub(crate) mod report;

pub use collector::{Collector, Totals};
pub use histogram::Histogram;

#[cfg(feature = "tracing")]
pub use events::TracingSink;
#[cfg(feature = "metrics")]
pub use recorder::MetricsSink;

/// Metrics of one committed step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StepMetrics<'a> {
    /// Tokens that the step added, over all its sequences.
    pub rows: u64,
    /// Bytes of pages in use after the step; pages shared by sequences count once.
    pub resident_bytes: u64,
    /// Bytes that the same tokens would take with nothing evicted, packed or shared.
    pub logical_bytes: u64,
    /// For each expert, wanted pages that were in the first tier, summed over layers, rows and KV heads:
    /// [`StepReport::hits`](crate::StepReport::hits).
    pub hits: &'a [f64],
    /// For each expert, wanted pages that were evicted, remote, in a lower tier or not fetched, summed likewise.
    pub misses: &'a [f64],
    /// Tokens in the pages of the rows' experts that the first tier holds, summed likewise:
    /// [`StepReport::held_tokens`](crate::StepReport::held_tokens).
    pub held_tokens: u64,
    /// Tokens filed in those pages that the first tier does not hold.
    pub lost_tokens: u64,
}

setters!(StepMetrics<'a> {
    rows: u64,
    resident_bytes: u64,
    logical_bytes: u64,
    hits: &'a [f64],
    misses: &'a [f64],
    held_tokens: u64,
    lost_tokens: u64,
});

/// Traffic of a fabric since the cache was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes of messages to ranks in other processes or threads.
    pub sent: u64,
    /// Bytes of their answers.
    pub received: u64,
    /// Messages to ranks; each has one answer.
    pub messages: u64,
    /// Rounds: one message each to some ranks, and their answers.
    pub rounds: u64,
    /// Time in rounds, from the first message sent to the last answer received, including the ranks' computation.
    pub waited: Duration,
    /// The part of `waited` in which the slowest rank of each round computed; the rest is communication, and work of the front.
    pub computed: Duration,
    /// Pages moved to another rank.
    pub moved: u64,
    /// Pages copied to a further rank.
    pub replicated: u64,
}

setters!(Traffic {
    sent: u64,
    received: u64,
    messages: u64,
    rounds: u64,
    waited: Duration,
    computed: Duration,
    moved: u64,
    replicated: u64,
});

/// Evicted tokens of one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evicted {
    /// Layer of the page.
    pub layer: u32,
    /// KV head of the page.
    pub kv_head: u32,
    /// Tokens evicted.
    pub tokens: u32,
    /// Bytes freed with the page's last token; 0 if tokens remain.
    pub bytes: u64,
    /// Tokens of its sequence newer than the newest of the evicted.
    pub age: u32,
}

setters!(Evicted { layer: u32, kv_head: u32, tokens: u32, bytes: u64, age: u32 });

/// A page that was used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reused {
    /// Layer of the page.
    pub layer: u32,
    /// KV head of the page.
    pub kv_head: u32,
    /// Tokens of its sequence since it was last used, or filled; 1 if the previous token used it.
    pub gap: u32,
}

setters!(Reused { layer: u32, kv_head: u32, gap: u32 });

/// Counts of a [`PrefixIndex`](crate::prefix::PrefixIndex) since it was made, and its present size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixUsage {
    /// Bytes of pages that it holds, in whatever tier, each page once; also those that sequences read.
    pub bytes: u64,
    /// Bytes in lower tiers, part of `bytes`.
    pub lower: u64,
    /// Lengths at which prefixes can be found, and those between checkpoints.
    pub boundaries: u64,
    /// Number of look-ups.
    pub lookups: u64,
    /// Tokens of the prompts looked up.
    pub asked_tokens: u64,
    /// Look-ups that found a prefix.
    pub hits: u64,
    /// Tokens of the prefixes found, which need no prefill.
    pub hit_tokens: u64,
    /// Time since the prefixes found were last used, summed over hits.
    pub hit_age: Duration,
    /// Boundaries evicted.
    pub evictions: u64,
    /// Their tokens, 32 each.
    pub evicted_tokens: u64,
    /// Time since their last use, summed.
    pub evicted_age: Duration,
    /// Hash collisions: prefixes found by hash whose tokens differ, which were not returned.
    pub unequal: u64,
}

setters!(PrefixUsage {
    bytes: u64,
    lower: u64,
    boundaries: u64,
    lookups: u64,
    asked_tokens: u64,
    hits: u64,
    hit_tokens: u64,
    hit_age: Duration,
    evictions: u64,
    evicted_tokens: u64,
    evicted_age: Duration,
    unequal: u64,
});

/// Receives metrics. All methods do nothing by default; they must not block for long, because the loop waits for them.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::metrics::{Sink, StepMetrics};
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// #[derive(Default)]
/// struct Peak(AtomicU64);
/// impl Sink for Peak {
///     fn step(&self, step: &StepMetrics<'_>) {
///         self.0.fetch_max(step.resident_bytes, Relaxed);
///     }
/// }
/// let peak = Peak::default();
/// for resident_bytes in [10, 30, 20] {
///     peak.step(&StepMetrics::default().resident_bytes(resident_bytes));
/// }
/// assert_eq!(peak.0.into_inner(), 30);
/// ```
pub trait Sink: Send + Sync {
    /// Called when a step is committed.
    fn step(&self, _step: &StepMetrics<'_>) {}

    /// Called for each page with evicted tokens.
    fn evicted(&self, _page: &Evicted) {}

    /// Called for each page that is used again.
    fn reused(&self, _page: &Reused) {}

    /// Whether to call [`reused`](Sink::reused). To find such pages, the attention mass of all pages is summed after every step, which
    /// takes about as long as a policy's observation of it.
    fn wants_reused(&self) -> bool {
        true
    }

    /// Whether it reads [`StepMetrics::hits`], which are counted only then ([`Hits`](crate::rules::Hits)).
    fn wants_hits(&self) -> bool {
        true
    }

    /// Traffic of the cache's fabric, called when a step is committed. Sums since the cache was built.
    fn traffic(&self, _sums: &Traffic) {}

    /// Counts of failures that did not fail a call, called after a committed step. Sums since the cache was built.
    fn failures(&self, _sums: &Failures) {}

    /// Counts of a prefix index ([`PrefixIndex::usage`](crate::prefix::PrefixIndex::usage)); called by your engine, at times of its
    /// choice. Sums since the index was made.
    fn prefixes(&self, _sums: &PrefixUsage) {}
}

/// Ignores everything.
impl Sink for () {
    fn wants_reused(&self) -> bool {
        false
    }

    fn wants_hits(&self) -> bool {
        false
    }
}
