#![doc = include_str!("../README.md")]
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
    Sequence, Step, Usage, lanes, router,
};
