//! Numbers of a cache for a sink: once a step, and for every page that is evicted or used again.
//!
//! A [`Sink`] takes them. [`ClosedLoop`](crate::ClosedLoop) calls it; without a loop your engine does. What sinks keep is bounded,
//! however long they listen.
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

/// One step of a cache, once it is committed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StepMetrics<'a> {
    /// Tokens that the step added, over all its sequences.
    pub rows: u64,
    /// Bytes of pages in use after it, those that several sequences share once.
    pub resident_bytes: u64,
    /// Bytes that the same tokens would take with nothing evicted, packed or shared.
    pub logical_bytes: u64,
    /// Of each expert, wanted pages that were in the first tier, summed over layers, rows and KV heads:
    /// [`StepReport::hits`](crate::StepReport::hits).
    pub hits: &'a [f64],
    /// Of each expert, wanted pages that were evicted, remote, in a lower tier or not fetched, summed likewise.
    pub misses: &'a [f64],
    /// Tokens of the pages of the rows' experts that the first tier holds, summed likewise:
    /// [`StepReport::held_tokens`](crate::StepReport::held_tokens).
    pub held_tokens: u64,
    /// Those that it does not hold.
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
    /// Bytes of messages to ranks of other processes, or threads.
    pub sent: u64,
    /// Bytes of their answers.
    pub received: u64,
    /// Messages to ranks; as many answers come back.
    pub messages: u64,
    /// Rounds: one message to some ranks, and their answers.
    pub rounds: u64,
    /// Time in rounds, from the first message sent to the last answer received, in which ranks compute too.
    pub waited: Duration,
    /// Of that time, what the rank that took longest in each round computed; the rest is the wire's, and the front's own.
    pub computed: Duration,
    /// Pages that were moved to another rank.
    pub moved: u64,
    /// Pages that were copied to a further rank.
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

/// Tokens of a page that left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evicted {
    /// Its layer.
    pub layer: u32,
    /// Its KV head.
    pub kv_head: u32,
    /// Tokens that left.
    pub tokens: u32,
    /// Bytes that came free with the last of the page's tokens; 0 if some stay.
    pub bytes: u64,
    /// Tokens of its sequence that are newer than the newest of them.
    pub age: u32,
}

setters!(Evicted { layer: u32, kv_head: u32, tokens: u32, bytes: u64, age: u32 });

/// A page that was used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reused {
    /// Its layer.
    pub layer: u32,
    /// Its KV head.
    pub kv_head: u32,
    /// Tokens of its sequence since it was last used, or filled; 1 if that was by the token before.
    pub gap: u32,
}

setters!(Reused { layer: u32, kv_head: u32, gap: u32 });

/// What a [`PrefixIndex`](crate::prefix::PrefixIndex) was asked and found since it was made, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixUsage {
    /// Bytes of pages that it holds, in whatever tier, each page once; also those that sequences read.
    pub bytes: u64,
    /// Those of them in lower tiers.
    pub lower: u64,
    /// Lengths at which prefixes can be found, and those between checkpoints.
    pub boundaries: u64,
    /// Look-ups.
    pub lookups: u64,
    /// Tokens that they asked for.
    pub asked_tokens: u64,
    /// Look-ups that found something.
    pub hits: u64,
    /// Tokens that they found, and that need not be computed.
    pub hit_tokens: u64,
    /// Time since what they found was last used, summed over hits.
    pub hit_age: Duration,
    /// Boundaries that were evicted.
    pub evictions: u64,
    /// Their tokens, 32 each.
    pub evicted_tokens: u64,
    /// Time since they were last used, summed.
    pub evicted_age: Duration,
    /// Times that the name of a prefix was that of other tokens, which were not given.
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

/// Takes the numbers. Every method does nothing unless it is written, and must not block for long: the loop waits for it.
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
    /// A step was committed.
    fn step(&self, _step: &StepMetrics<'_>) {}

    /// A page left.
    fn evicted(&self, _page: &Evicted) {}

    /// A page was used again.
    fn reused(&self, _page: &Reused) {}

    /// Whether [`reused`](Sink::reused) is to be called: to find such pages the masses of all are summed after every step, which
    /// takes about as long as a policy does with them.
    fn wants_reused(&self) -> bool {
        true
    }

    /// Whether [`StepMetrics::hits`] are looked at: they are counted then ([`Hits`](crate::rules::Hits)).
    fn wants_hits(&self) -> bool {
        true
    }

    /// Traffic of the cache's fabric since it was built, at the commit of a step. Sums, not differences.
    fn traffic(&self, _sums: &Traffic) {}

    /// Counts of work that failed without failing a call since the cache was built, after a committed step. Sums, not differences.
    fn failures(&self, _sums: &Failures) {}

    /// What a prefix index found and holds: [`PrefixIndex::usage`](crate::prefix::PrefixIndex::usage), which your engine passes on when it
    /// likes. Sums, not differences.
    fn prefixes(&self, _sums: &PrefixUsage) {}
}

/// Takes no notice.
impl Sink for () {
    fn wants_reused(&self) -> bool {
        false
    }

    fn wants_hits(&self) -> bool {
        false
    }
}
