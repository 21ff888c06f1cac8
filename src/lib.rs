//! KV cache management for Mixture-of-Experts inference.
//!
//! This is the facade: the types that an engine uses, from [`pikv_host`] and [`pikv_core`].
#![deny(missing_docs)]

pub use pikv_core::{
    dtype::Dtype,
    page::{Layout, Position, Resident},
    plan::{LayerShape, StoreShape},
    rope::{Pairs, Rope},
    shard::{ShardError, ShardMap},
};
pub use pikv_host::{
    Attend, Cache, CacheConfig, ConfigError, Error, Output, PageId, PageInfo, PageMass, Place, Rows,
    Sequence, Step, Usage, lanes,
};
