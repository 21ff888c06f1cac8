//! Host runtime of pikv: lanes of x86-64, the page store, sequences and their transactions, attention over shards.
//!
//! Start at [`Cache`]. Everything is `Send + Sync`; nothing is global; threads are those of the rayon pool that
//! the caller is in, or rayon's global one, and of a rank of a fabric its own ([`fabric::Store::parallel`]).
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod arena;
mod attend;
mod backend;
mod cache;
mod chain;
mod closed_loop;
pub mod codec;
mod compact;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod evict;
pub mod fabric;
mod failures;
mod files;
mod filing;
mod forest;
mod frequencies;
mod ghosts;
mod hits;
mod huge;
mod job;
mod kept;
mod learnt;
mod lists;
mod mass;
pub mod metrics;
mod observe;
mod oldest;
mod past;
pub mod planner;
pub mod policy;
mod queries;
mod ranked;
mod reduce;
mod report;
mod rope;
pub mod router;
mod select;
mod sequence;
mod step;
pub mod tiers;
pub mod trace;
mod view;
mod writes;

pub use attend::{Attend, Output, PageMass, Read};
pub use backend::{Backend, CudaError};
pub use cache::{Cache, Rows, Usage};
pub use closed_loop::{ClosedLoop, LoopError, LoopStep};
pub use config::{AgeRule, CacheConfig, CodecRule, EvictionRule};
pub use device::{DeviceOutput, DeviceSlice};
pub use error::{ConfigError, Error, TierOperation};
pub use failures::Failures;
pub use frequencies::{Frequencies, FrequencyError, Scaling};
pub use ghosts::Hits;
pub use pikv_lanes as lanes;
pub use report::StepReport;
pub use sequence::{PageId, PageInfo, Place, Sequence};
pub use step::Step;

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
