//! Tiers: host memory and files below the budget, for older pages of sequences.
//!
//! The first tier is [`CacheConfig::budget`](crate::CacheConfig::budget). [`Tiers`] lists the lower ones, fastest first: host memory,
//! files, or a [`PageStore`] of your own. A page is demoted when a step would exceed the budget ([`Cache::begin`](crate::Cache::begin)), or
//! by [`Sequence::demote`](crate::Sequence::demote) or [`Sequence::arrange`](crate::Sequence::arrange). It is read back bit for bit:
//! results do not depend on where pages lie. Only full pages that no rollback reaches and no fork reads are demoted. Sinks, ring, pages
//! that are not full, the state of policies, and the extremes of keys stay in the first tier.
//!
//! On a CPU, attention reads pages of host memory without a copy. Pages of files are first read into a *staging* area, which must hold
//! the pages that one call reads. With [`ReadPages::All`](crate::attend::options::ReadPages::All), a thread of the cache prefetches the next
//! layer's pages while a step attends a layer. With [`ReadPages::Experts`](crate::attend::options::ReadPages::Experts) and
//! [`ReadPages::Quest`](crate::attend::options::ReadPages::Quest) pages cannot be known in advance: selected pages alone are read, on request.
//!
//! On a CUDA device all pages of lower tiers are copied to device memory, apart from the budget, up to the size of the staging area.
//! Pages of host memory are copied while the previous layer is attended, those of files once they are in host memory.
//!
//! An error of a store is an [`Error::Tier`](crate::Error::Tier). A page that could not be written stays where it was; a page that could
//! not be read fails the call, which can be repeated. Pages are checked against a checksum on read, so a store that returns other bytes
//! gives an error too.
//!
//! `planner::flexgen` computes how many pages each tier should hold, from rates that
//! [`Cache::tier_rates`](crate::Cache::tier_rates) measures.

pub(crate) mod ahead;
pub(crate) mod level;
mod rate;
pub(crate) mod replica;
mod store;
#[cfg_attr(not(feature = "cuda"), path = "upload_absent.rs")]
pub(crate) mod upload;

pub use crate::base::error::TierOperation;
pub(crate) use ahead::{Levels, Prefetched, Staged};
pub(crate) use level::{Level, StoredPage};
pub use rate::TierRate;
pub use store::PageStore;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Opens a tier's store.
type Open = dyn Fn() -> io::Result<Box<dyn PageStore>> + Send + Sync;

/// The tiers of a cache below its budget, fastest first.
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

/// One tier.
#[derive(Clone)]
pub(crate) struct Spec {
    pub name: String,
    pub capacity: u64,
    /// Opens the store; `None` for a tier in host memory.
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
    /// No lower tiers, and a staging area of 64 MiB.
    pub fn new() -> Tiers {
        Tiers { specs: Vec::new(), staging: 64 << 20 }
    }

    fn push(mut self, name: String, capacity: u64, open: Option<Arc<Open>>) -> Tiers {
        self.specs.push(Spec { name, capacity, open });
        self
    }

    /// Adds `bytes` of pages in host memory, named `host`. Attention on a CPU reads them without a copy.
    pub fn host(self, bytes: u64) -> Tiers {
        self.push("host".to_owned(), bytes, None)
    }

    /// Adds `bytes` of pages in a file in the directory `dir`, named after it. The file is accessed through the system's page cache.
    ///
    /// The file has no name, so it vanishes when the process ends in any way; only its owner can read it (mode 0600). File systems that
    /// cannot make files without a name (on Linux nearly all can) give it a random name for an instant. There, use a directory that
    /// nobody else can write to: others could rename the file in that instant, and it would stay. Nothing is encrypted: root, and anyone
    /// who reads the disk, can read keys and values of prompts, and overwritten data may stay on the medium.
    /// [`CacheConfig::wipe`](crate::CacheConfig::wipe) overwrites freed pages.
    ///
    /// A write above the process's file size limit (`RLIMIT_FSIZE`) is refused with an [`Error::Tier`](crate::Error::Tier) of kind
    /// [`FileTooLarge`](io::ErrorKind::FileTooLarge), before the system raises `SIGXFSZ`.
    pub fn file(self, dir: impl Into<PathBuf>, bytes: u64) -> Tiers {
        let dir = dir.into();
        let name = format!("file in {}", dir.display());
        self.push(name, bytes, Some(Arc::new(move || store::open(&dir))))
    }

    /// Adds `bytes` of pages in a store from `open`, which is called once for each cache that is built.
    pub fn store(
        self,
        name: impl Into<String>,
        bytes: u64,
        open: impl Fn() -> io::Result<Box<dyn PageStore>> + Send + Sync + 'static,
    ) -> Tiers {
        self.push(name.into(), bytes, Some(Arc::new(open)))
    }

    /// Sets the bytes of the staging area, which holds the pages that a call reads from files (on a device: from all lower tiers). Each
    /// step in progress and each call of [`Cache::attend`](crate::Cache::attend) takes at most this much, apart from the budget. It must
    /// hold the pages that a call reads of one layer; the next layer's pages are prefetched into the rest. The cache keeps at most as
    /// many bytes of buffers between calls.
    pub fn staging(mut self, bytes: u64) -> Tiers {
        self.staging = bytes;
        self
    }
}

/// Space used in a lower tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierUsage {
    /// Name of the tier.
    pub name: String,
    /// Bytes of pages in it; pages shared by forks count once.
    pub bytes: u64,
    /// Bytes that it can hold.
    pub capacity: u64,
}

/// Pages that attention read from lower tiers since the cache was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fetches {
    /// Pages read in host memory without a copy; always 0 on a device.
    pub in_place: u64,
    /// Pages prefetched before they were requested.
    pub ahead: u64,
    /// Pages whose prefetch was in progress when they were requested.
    pub awaited: u64,
    /// Pages whose read had not begun when they were requested.
    pub late: u64,
}
