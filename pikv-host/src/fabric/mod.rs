//! Fabric: shards that live apart, each with a rank of its own.
//!
//! A cache over a fabric ([`Cache::over`](crate::Cache::over)) has one *front*, the process whose engine calls it, and *stores*. The
//! front holds the ring, the sinks, pages that are not full and what is known about all pages; a page that is full, and that no
//! rollback reaches, goes to the rank of its shard, and is never brought back to be read. Attention sends the rows' queries to the
//! ranks that hold wanted blocks of 8 pages, which run the same routine over them and answer with the blocks' partial results; these
//! enter the same tree at their places, so that results have the bits of one process. Tokens of a page that still fills up are sent
//! once the block has full pages, so that a block is read in one place.
//!
//! Forms: [`InProcess`], a thread for each shard with its pages in the host's memory or on a CUDA device ([`InProcess::on`]), and the
//! crate `pikv-mpi`, a process each. [`Fabric`] is the trait to add one.
//!
//! What a rank that fails does to the others is in [`FabricError`]: every wait ends after [`Options::timeout`] without an answer.

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
pub use store::Store;
pub use workers::InProcess;

use std::time::{Duration, Instant};

/// A way to the ranks that hold a cache's pages: messages of words go out, answers come back.
///
/// Messages to one rank arrive in the order in which they were sent. Nobody but the cache looks into them. A rank answers each with
/// [`Store::answer`], on whatever thread, that of [`receive`](Fabric::receive) included.
///
/// One thread at a time is in a fabric, and others wait for it to come out. So no method may wait for work of a rayon pool: a thread of
/// the pool that waits takes other work meanwhile, which may be a call that waits for the fabric.
pub trait Fabric: Send {
    /// Ranks that hold pages, numbered from 0.
    fn ranks(&self) -> u32;

    /// Sends a message to a rank, without waiting until it arrives.
    ///
    /// # Errors
    /// If it is known that the rank will never get it.
    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError>;

    /// The next message from any rank, and the rank; `None` if there is none until `until`.
    ///
    /// # Errors
    /// If there will never be one again.
    fn receive(&mut self, until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError>;

    /// Whether messages to a rank leave the process, and count as [`Traffic`].
    fn is_wired(&self, _rank: u32) -> bool {
        true
    }

    /// Told once of a rank that was given up.
    fn lost(&mut self, _rank: u32) {}

    /// Whether ranks must hear of the front now and then, or take it for dead.
    fn wants_beat(&self) -> bool {
        false
    }
}

/// How a cache uses its fabric.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How long a call waits for the next answer before the ranks that owe one are lost. It must cover the time that a rank computes.
    pub timeout: Duration,
    /// Whether each rank merges what it reads of a row and head into one partial result, in its own order; see [`Options::fast`].
    pub fast: bool,
}

impl Default for Options {
    /// 30 seconds, and the bits of one process.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(30), fast: false }
    }
}

impl Options {
    /// Sets the time after which a rank that owes an answer is lost.
    pub fn timeout(mut self, timeout: Duration) -> Options {
        self.timeout = timeout;
        self
    }

    /// Has each rank answer with one partial result a row, head and form of page in place of one a block: a hundredth of the
    /// bytes where contexts are long, and other bits. With `n` blocks read in all and `r` ranks, every term of the two sums
    /// behind an output goes through at most `ceil(log2 n) + runs + r` additions more than none, so, with `u = 2^-24` and `d`
    /// that number, an output is off by at most `4 d u / (1 - d u)` times the largest |value| of its channel from what one
    /// process returns, and the log-sum-exp by `2 d u / (1 - d u)`. (After a codec with a map of V, times the sum of |entries|
    /// of the map's row.) Calls whose attention mass is wanted, by their caller or by a policy, are exact all the same.
    pub fn fast(mut self, on: bool) -> Options {
        self.fast = on;
        self
    }
}
