//! Host runtime of pikv: lanes of x86-64, the page store, sequences and their transactions, attention over shards.
//!
//! Start at [`Cache`]. Everything is `Send + Sync`; nothing is global; threads are those of the rayon pool that
//! the caller is in, or rayon's global one, and of a rank of a fabric its own ([`fabric::Store::parallel`]).
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use]
mod setters;

mod attend;
#[cfg(feature = "cuda")]
mod attend_cuda;
mod backend;
mod base;
mod cache;
mod closed_loop;
pub mod codec;
mod config;
#[cfg(feature = "cuda")]
mod device;
mod eviction;
pub mod fabric;
mod memory;
pub mod metrics;
mod pages;
pub mod planner;
pub mod policy;
pub mod router;
pub mod tiers;
pub mod trace;

pub use attend::options::{Attend, Output, PageMass, Read};
pub use backend::Backend;
pub use base::device_slice::{DeviceOutput, DeviceSlice};
pub use base::error::{ConfigError, CudaError, Error, TierOperation};
pub use base::failures::Failures;
pub use base::frequencies::{Frequencies, FrequencyError, Scaling};
pub use base::ids::{PageId, Place};
pub use cache::sequence::{PageInfo, Sequence};
pub use cache::step::{Step, StepBytes};
pub use cache::{Cache, Rows, Usage};
pub use closed_loop::{ClosedLoop, LoopError, LoopStep};
pub use config::hits::Hits;
pub use config::{AgeRule, CacheConfig, CodecRule, EvictionRule};
pub use metrics::report::StepReport;
pub use pikv_lanes as lanes;

/// What pikv re-exports of its core, so that examples here read as in a crate that uses pikv.
#[doc(hidden)]
pub use pikv_core::{
    LANES,
    dtype::Dtype,
    page::{Layout, PAGE, Position, Resident},
    plan::{Filed, LayerShape, StoreShape},
    ring::Ring,
    rope::{Pairs, Rope},
    shard::{Rule, ShardError, ShardMap},
};
