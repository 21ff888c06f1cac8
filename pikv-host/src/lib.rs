//! Host runtime of pikv: the page store, sequences and their steps, attention over shards, policies, routers, tiers, ranks.
//!
//! Start at [`Cache`]. Every type is `Send + Sync`; there is no global state. Work runs in the caller's rayon pool, or in rayon's global
//! one; a rank of a fabric uses its own pool ([`fabric::RankStore::parallel`]).
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "a device alone reads some fields and calls some methods")
)]

#[macro_use]
mod setters;
#[macro_use]
mod spans;

mod attend;
#[cfg_attr(not(feature = "cuda"), path = "attend_cuda/absent.rs")]
mod attend_cuda;
mod backend;
mod base;
mod cache;
pub mod closed_loop;
pub mod codec;
mod config;
#[cfg_attr(not(feature = "cuda"), path = "device/absent.rs")]
mod device;
mod eviction;
pub mod fabric;
mod memory;
pub mod metrics;
mod pages;
pub mod planner;
pub mod policy;
pub mod prefix;
#[cfg(feature = "cuda")]
mod route_cuda;
pub mod router;
pub mod tiers;
pub mod trace;

pub use attend::options::{Attend, AttendOutput, ReadPages};
pub use backend::Backend;
pub use base::error::{ConfigError, Error};
pub use base::host_slice::Scalar;
pub use cache::sequence::{Sequence, SequenceOptions};
pub use cache::step::Step;
pub use cache::{Cache, Rows};
pub use closed_loop::ClosedLoop;
pub use config::CacheConfig;
pub use metrics::report::StepReport;

/// Core types that `pikv` exports at its root, so that examples here read as in a crate that uses pikv.
#[doc(hidden)]
pub use pikv_core::{
    dtype::Dtype,
    page::{Layout, Position},
    plan::LayerShape,
    rope::Rope,
};

/// The processor's instruction set, for [`CacheConfig::lanes`]: results have the same bits on all.
pub mod lanes {
    pub use pikv_lanes::{Lanes, LanesError};
}

/// Details of a model's attention and of how its tokens are stored, beside [`LayerShape`], [`Layout`] and [`Rope`].
///
/// [`Frequencies::scaled`](shape::Frequencies::scaled) computes RoPE frequencies from the values of `config.json`.
/// [`StoreShape`](shape::StoreShape) and [`Ring`](shape::Ring) count pages and bytes without a cache.
pub mod shape {
    pub use crate::base::frequencies::{Frequencies, FrequencyError, Scaling};
    pub use pikv_core::{
        LANES,
        page::{PAGE, Resident},
        plan::{Filed, StoreShape},
        ring::Ring,
        rope::Pairs,
    };
}

/// How pages are spread over the shards of a cache, for [`CacheConfig::shards`].
pub mod shard {
    pub use pikv_core::shard::{Rule, ShardError, ShardMap};
}

/// State of a cache: bytes in use, pages, attention weights, and failures that returned no error. [`StepReport`] describes one step.
pub mod report {
    pub use crate::attend::options::PageMass;
    pub use crate::base::failures::Failures;
    pub use crate::base::ids::{PageId, Place};
    pub use crate::cache::Usage;
    pub use crate::cache::held::PageInfo;
    pub use crate::cache::map::{SequenceMap, StorageForm};
    pub use crate::cache::step::bytes::StepBytes;
}

/// Parts of a [`CacheConfig`]: the codec and eviction rules of layers and heads, and the definition of a hit.
pub mod rules {
    pub use crate::config::hits::Hits;
    pub use crate::config::{AgeRule, CodecRule, EvictionRule};
}

/// Saved, parked and parkable sequences, and the errors of saving and restoring.
pub mod save {
    pub use crate::base::error::{SaveError, SaveOperation};
    pub use crate::cache::parkable::{Awake, Parkable};
    pub use crate::cache::parkables::MadeRoom;
    pub use crate::cache::save::{Parked, Restored};
}

/// Tensors on a CUDA device, and errors of the CUDA driver. [`Backend::cuda`] opens a device.
pub mod cuda {
    pub use crate::base::device_slice::{DeviceExperts, DeviceOutput, DeviceRoutes, DeviceSlice};
    pub use crate::base::error::CudaError;
}
