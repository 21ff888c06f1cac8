//! Errors of fabrics.

use std::time::Duration;
use thiserror::Error;

/// Why a call over a fabric failed. The pages of other ranks are unchanged; a lost rank receives no more requests.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A rank died, does not answer, or was lost before. Its pages are lost.
    #[error(
        "rank {rank} is lost: no answer within {waited:?}; the other ranks go on, without the pages that it held"
    )]
    Lost {
        /// The rank.
        rank: u32,
        /// Time waited for the answer when the rank was lost.
        waited: Duration,
    },
    /// A rank uses another version, or another protocol.
    #[error(
        "rank {rank} answers with version {theirs}, this is version {ours}; it is asked nothing any more"
    )]
    Version {
        /// The rank.
        rank: u32,
        /// Version of the rank.
        theirs: u32,
        /// Version of this build.
        ours: u32,
    },
    /// A rank has another configuration (layers, codecs, rows of the lanes).
    #[error(
        "rank {rank} has another configuration: its fingerprint is {theirs:016x}, here it is {ours:016x}"
    )]
    Configuration {
        /// The rank.
        rank: u32,
        /// Fingerprint of the rank.
        theirs: u64,
        /// Fingerprint of this process.
        ours: u64,
    },
    /// A rank sent or received an invalid message.
    #[error("rank {rank}: a message that is none ({what})")]
    Malformed {
        /// The rank.
        rank: u32,
        /// Reason.
        what: &'static str,
    },
    /// A rank is out of budget.
    #[error("rank {rank} is out of budget: a page needs {needed} bytes, {available} are left")]
    Budget {
        /// The rank.
        rank: u32,
        /// Bytes of the page.
        needed: u64,
        /// Bytes left on the rank.
        available: u64,
    },
    /// The system of a rank has no memory for pages within its budget.
    #[error("rank {rank}: the system refused {bytes} bytes for pages")]
    Memory {
        /// The rank.
        rank: u32,
        /// Bytes asked of the system.
        bytes: u64,
    },
    /// The CUDA driver of a rank failed. If the device is lost, its pages are lost and it receives no more requests; otherwise the call
    /// can be repeated.
    #[error("rank {rank}: its CUDA driver answers {code}{}", if *lost { "; the device is lost, with the pages that it held" } else { "" })]
    Device {
        /// The rank.
        rank: u32,
        /// `CUresult` of the driver.
        code: u32,
        /// Whether every later call fails too.
        lost: bool,
    },
    /// A rank does not hold a page that it should. No other page is returned instead.
    #[error("rank {rank} does not hold page {page}")]
    Missing {
        /// The rank.
        rank: u32,
        /// Number of the page, unique for ever.
        page: u64,
    },
    /// No rank is left to hold pages.
    #[error("no rank is left that could hold pages")]
    Nobody,
    /// A number that does not match the ranks or the experts.
    #[error("{got} {what}; there must be {wanted}")]
    Count {
        /// `loads`, `devices` or `copies`.
        what: &'static str,
        /// Number given.
        got: usize,
        /// Number needed; for copies the largest accepted.
        wanted: usize,
    },
    /// An invalid placement of experts.
    #[error(transparent)]
    Placement(#[from] crate::router::EplbError),
    /// A call that needs a cache over a fabric.
    #[error("the cache is not over a fabric; build it with Cache::over")]
    None,
    /// The pages of a rank have other bytes than its memory counts.
    #[error("the pages held take {held} bytes; the memory counts {counted} by shard and {taken} in all")]
    Counts {
        /// Bytes of the pages held.
        held: u64,
        /// Bytes counted, summed over the shards.
        counted: u64,
        /// Bytes taken of the budget.
        taken: u64,
    },
    /// A page of a rank has a second owner.
    #[error("page {page} has two owners")]
    TwoOwners {
        /// Number of the page, unique for ever.
        page: u64,
    },
    /// The transport failed.
    #[error("the transport failed: {0}")]
    Transport(String),
}
