//! Errors between ranks.

use std::time::Duration;
use thiserror::Error;

/// Why a call over a fabric failed. What the other ranks hold is as it was; a rank that is lost is asked nothing any more.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A rank died, hangs, or was lost before. Its pages are lost.
    #[error(
        "rank {rank} is lost: no answer within {waited:?}; the other ranks go on, without the pages that it held"
    )]
    Lost {
        /// The rank.
        rank: u32,
        /// How long it was waited for, when it was lost.
        waited: Duration,
    },
    /// A rank speaks another version, or not this protocol at all.
    #[error(
        "rank {rank} answers with version {theirs}, this is version {ours}; it is asked nothing any more"
    )]
    Version {
        /// The rank.
        rank: u32,
        /// What it said.
        theirs: u32,
        /// The version of this build.
        ours: u32,
    },
    /// A rank was built from another configuration (layers, codecs, rows of the lanes).
    #[error(
        "rank {rank} has another configuration: its fingerprint is {theirs:016x}, here it is {ours:016x}"
    )]
    Configuration {
        /// The rank.
        rank: u32,
        /// Its fingerprint.
        theirs: u64,
        /// The fingerprint here.
        ours: u64,
    },
    /// A rank answered something that cannot be, or was asked it.
    #[error("rank {rank}: a message that is none ({what})")]
    Malformed {
        /// The rank.
        rank: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A rank's own budget is spent.
    #[error("rank {rank} is out of budget: a page needs {needed} bytes, {available} are left")]
    Budget {
        /// The rank.
        rank: u32,
        /// Bytes of the page.
        needed: u64,
        /// Bytes left there.
        available: u64,
    },
    /// The system of a rank has no memory for pages that its budget would allow.
    #[error("rank {rank}: the system refused {bytes} bytes for pages")]
    Memory {
        /// The rank.
        rank: u32,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The driver of a rank's device refused. One that is lost is asked nothing any more, and what it held is gone; of another the call
    /// can be made again.
    #[error("rank {rank}: its CUDA driver answers {code}{}", if *lost { "; the device is lost, with the pages that it held" } else { "" })]
    Device {
        /// The rank.
        rank: u32,
        /// Its `CUresult`.
        code: u32,
        /// Whether it answers so to every call.
        lost: bool,
    },
    /// A rank does not hold a page that it should. No other page is given in its place.
    #[error("rank {rank} does not hold page {page}")]
    Missing {
        /// The rank.
        rank: u32,
        /// The page's number, which no other page ever has.
        page: u64,
    },
    /// No rank is left.
    #[error("no rank is left that could hold pages")]
    Nobody,
    /// More or fewer ranks than there is something for.
    #[error("{got} {what}; there must be {wanted}")]
    Count {
        /// Of what.
        what: &'static str,
        /// As given.
        got: usize,
        /// How many there must be.
        wanted: usize,
    },
    /// A placement of experts that does not fit.
    #[error(transparent)]
    Placement(#[from] crate::router::EplbError),
    /// A call for caches over a fabric.
    #[error("the cache is not over a fabric; build it with Cache::over")]
    None,
    /// The transport itself.
    #[error("the transport failed: {0}")]
    Transport(String),
}
