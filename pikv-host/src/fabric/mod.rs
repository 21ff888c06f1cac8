//! Fabric: shards on ranks, which are other threads, devices or processes.
//!
//! A cache over a fabric ([`Cache::over`](crate::Cache::over)) has one *front*, the process with the engine, and *stores* on ranks. The
//! front holds the ring, the sinks, pages that are not full, and metadata of all pages. A full page that no rollback reaches is sent to
//! the rank of its shard, and is not copied back to be read. Attention sends the rows' queries to the ranks with wanted blocks of 8
//! pages; the ranks run the same kernel over these blocks and answer with their partial results. The front joins them at the same places
//! of the reduction tree as a single process does, so results have the same bits. Once a block has full pages on a rank, tokens of its page
//! that is not full are sent there too, so that a block is read in one place.
//!
//! Implementations: [`InProcess`], a thread for each shard with its pages in host memory or on a CUDA device ([`InProcess::on`]), and the
//! crate `pikv-mpi`, a process for each. Implement the trait [`Fabric`] to add one.
//!
//! [`FabricError`] lists the effects of a failed rank; every wait ends after [`Options::timeout`] without an answer.

mod ask;
mod attend;
mod file;
mod front;
mod link;
#[cfg_attr(not(feature = "cuda"), path = "node_absent.rs")]
mod node_cuda;
mod rebalance;
mod schedule;
mod store;
mod wire;
mod workers;

pub use crate::base::error::FabricError;
pub use crate::metrics::Traffic;
pub(crate) use file::Sent;
pub(crate) use front::Front;
pub use front::RankUsage;
pub use rebalance::{Moves, Skew};
pub use schedule::{RankPlan, Schedule, Wire};
pub use store::RankStore;
pub use workers::InProcess;

use std::time::{Duration, Instant};

/// The transport to the ranks that hold a cache's pages: sends messages of words, and receives answers.
///
/// Messages to one rank must arrive in the order in which they were sent; only the cache interprets them. A rank answers each by
/// [`RankStore::answer`], on any thread, including that of [`receive`](Fabric::receive).
///
/// One thread at a time uses a fabric, and others wait for it. So no method may wait for work of a rayon pool: a thread of the pool that
/// waits takes other work, which may be a call that waits for the fabric.
pub trait Fabric: Send {
    /// Number of ranks that hold pages; ranks are numbered from 0.
    fn ranks(&self) -> u32;

    /// Sends a message to a rank, without waiting for its arrival.
    ///
    /// # Errors
    /// The message can never arrive.
    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError>;

    /// The next message from any rank, and the rank; `None` if none arrives before `until`.
    ///
    /// # Errors
    /// No message can ever arrive again.
    fn receive(&mut self, until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError>;

    /// Whether a rank is apart from the front: in another process, on another device, or on a thread with memory of its own. Messages to it
    /// then count as [`Traffic`], and wanted pages that it alone holds as misses.
    fn is_remote(&self, _rank: u32) -> bool {
        true
    }

    /// Called once for a rank that is lost.
    fn lost(&mut self, _rank: u32) {}

    /// Whether ranks need regular messages from the front, and otherwise assume that it is dead.
    fn wants_beat(&self) -> bool {
        false
    }
}

/// Options of a cache's fabric.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Longest wait for the next answer, after which the ranks that owe one are lost. It must exceed the time that a rank computes.
    pub timeout: Duration,
    /// Whether each rank merges its results for a row and head into one, in an order of its own; see [`Options::fast`].
    pub fast: bool,
}

impl Default for Options {
    /// A timeout of 30 seconds; same bits as one process.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(30), fast: false }
    }
}

impl Options {
    /// Sets the longest wait for an answer, after which the rank is lost.
    pub fn timeout(mut self, timeout: Duration) -> Options {
        self.timeout = timeout;
        self
    }

    /// Makes each rank answer with one partial result a row, head and form of page in place of one a block: a hundredth of the bytes
    /// for long contexts, and other bits. With `n` blocks read in all and `r` ranks, each term of the two sums of an output takes part in
    /// at most `d = ceil(log2 n) + runs + r` more additions. With `u = 2^-24`, an output differs from that of one process by at most
    /// `4 d u / (1 - d u)` times the largest magnitude of a value in its channel (with a codec that maps V, times the sum of magnitudes in
    /// the map's row), and the log-sum-exp by at most `2 d u / (1 - d u)`. Calls that need attention mass, for the caller or a policy, are exact
    /// regardless.
    pub fn fast(mut self, on: bool) -> Options {
        self.fast = on;
        self
    }
}
