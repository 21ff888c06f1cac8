//! Tiers: memory and files beneath the budget, where older pages of a sequence wait until attention reads them.
//!
//! The first tier is [`CacheConfig::budget`](crate::CacheConfig::budget). What lies beneath is named by [`Tiers`], fastest first:
//! memory of the host, files, or a [`Store`] of your own. A page goes down when a step would pass the budget
//! ([`Cache::begin`](crate::Cache::begin)), or when [`Sequence::demote`](crate::Sequence::demote) or
//! [`Sequence::arrange`](crate::Sequence::arrange) say so, and comes back bit for bit: where pages lie never shows in a result.
//! Only full pages go that no rollback reaches and no fork reads; sinks, ring, pages that still fill up, what policies keep of tokens,
//! and the extremes of keys stay in the first tier.
//!
//! Attention reads pages of host memory where they lie, on a CPU. Those of files come up into a *staging* area first, as many as one call
//! reads: while a step attends a layer with [`Read::All`](crate::attend::options::Read::All), a thread of the cache brings up the next one's. With
//! [`Read::Experts`](crate::attend::options::Read::Experts) and [`Read::Quest`](crate::attend::options::Read::Quest), where nobody knows what will be read, selected pages are
//! read when they are asked for, and no others.
//!
//! On a CUDA device all of them must come up, also those of host memory: into memory of the device apart from the budget, as large as
//! the staging area at most. Those of host memory do so while the layer before is attended, those of files once they are in the host's.
//!
//! A store that fails is an [`Error::Tier`](crate::Error::Tier): a page that could not be written stays where it was, a page that could
//! not be read fails the call, which can be made again. What comes back is checked against a sum, so that a store that returns other
//! bytes is an error too.
//!
//! How many pages should lie where says `planner::flexgen`, from rates that
//! [`Cache::tier_rates`](crate::Cache::tier_rates) measures.

pub(crate) mod ahead;
pub(crate) mod level;
mod rate;
pub(crate) mod replica;
mod store;
#[cfg_attr(not(feature = "cuda"), path = "upload_absent.rs")]
pub(crate) mod upload;

pub use crate::base::error::TierOperation;
pub(crate) use ahead::{Early, Levels, Staged};
pub(crate) use level::{Level, Stored};
pub use rate::TierRate;
pub use store::Store;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Opens a store.
type Open = dyn Fn() -> io::Result<Box<dyn Store>> + Send + Sync;

/// The tiers of a cache beneath its budget, fastest first.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::tiers::Tiers;
/// let tiers = Tiers::new().host(1 << 30).file(std::env::temp_dir(), 16 << 30).staging(256 << 20);
/// ```
#[derive(Clone, Debug)]
pub struct Tiers {
    pub(crate) specs: Vec<Spec>,
    pub(crate) staging: u64,
}

/// One of them.
#[derive(Clone)]
pub(crate) struct Spec {
    pub name: String,
    pub capacity: u64,
    /// Pages lie in memory where there is none.
    pub open: Option<Arc<Open>>,
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spec")
            .field("name", &self.name)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl Default for Tiers {
    fn default() -> Tiers {
        Tiers::new()
    }
}

impl Tiers {
    /// No tiers yet, and a staging area of 64 MiB.
    pub fn new() -> Tiers {
        Tiers { specs: Vec::new(), staging: 64 << 20 }
    }

    fn push(mut self, name: String, capacity: u64, open: Option<Arc<Open>>) -> Tiers {
        self.specs.push(Spec { name, capacity, open });
        self
    }

    /// `bytes` of pages in memory of the host, named `host`. Attention on a CPU reads them where they lie.
    pub fn host(self, bytes: u64) -> Tiers {
        self.push("host".to_owned(), bytes, None)
    }

    /// `bytes` of pages in a file of its own in the directory `dir`, named by it. It is read and written through the system's page cache.
    ///
    /// The file has no name, so nothing is left of it when the process ends, however it does; only its owner can read it (mode 0600).
    /// On file systems that cannot make files without a name (on Linux nearly all can) it has a random one for an instant: give such a
    /// tier a directory that nobody else can write to, as they could move the file to another name then and it would stay. Nothing is
    /// encrypted: who reads the disk, or is root, reads what prompts left there, and what a file system overwrites may stay on the
    /// medium. [`CacheConfig::wipe`](crate::CacheConfig::wipe) overwrites pages that are given back.
    ///
    /// A write that would pass the size that the process may give a file (`RLIMIT_FSIZE`) is an [`Error::Tier`](crate::Error::Tier) of
    /// kind [`FileTooLarge`](io::ErrorKind::FileTooLarge); the signal that the system would raise, `SIGXFSZ`, is not risked.
    pub fn file(self, dir: impl Into<PathBuf>, bytes: u64) -> Tiers {
        let dir = dir.into();
        let name = format!("file in {}", dir.display());
        self.push(name, bytes, Some(Arc::new(move || store::open(&dir))))
    }

    /// `bytes` of pages in a store that `open` makes, once for each cache that is built.
    pub fn store(
        self,
        name: impl Into<String>,
        bytes: u64,
        open: impl Fn() -> io::Result<Box<dyn Store>> + Send + Sync + 'static,
    ) -> Tiers {
        self.push(name.into(), bytes, Some(Arc::new(open)))
    }

    /// Sets the bytes of memory that a call's pages of files (on a device all pages of lower tiers) come up into: each step under way and each call of
    /// [`Cache::attend`](crate::Cache::attend) takes as many at most, apart from the budget. A call must find room there for what it
    /// reads of one layer; the next layer's pages come up early as far as there is room beside it. The cache keeps as many bytes of buffers
    /// between calls.
    pub fn staging(mut self, bytes: u64) -> Tiers {
        self.staging = bytes;
        self
    }
}

/// Pages in a tier beneath the first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierUsage {
    /// Its name.
    pub name: String,
    /// Bytes of pages in it; those that forks share count once.
    pub bytes: u64,
    /// Bytes that it may hold.
    pub capacity: u64,
}

/// Pages that attention read from tiers beneath the first, since the cache was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fetches {
    /// Where they lay, in memory of the host; none on a device.
    pub in_place: u64,
    /// Brought up before they were asked for.
    pub ahead: u64,
    /// On their way when they were asked for.
    pub awaited: u64,
    /// Not yet on their way.
    pub late: u64,
}
