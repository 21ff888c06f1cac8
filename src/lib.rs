#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub use pikv_core::{
    LANES,
    dtype::Dtype,
    page::{Layout, PAGE, Position, Resident},
    plan::{Filed, LayerShape, StoreShape},
    ring::Ring,
    rope::{Pairs, Rope},
    shard::{Rule, ShardError, ShardMap},
};
pub use pikv_host::{
    AgeRule, Attend, Backend, Cache, CacheConfig, ClosedLoop, CodecRule, ConfigError, CudaError,
    DeviceOutput, DeviceSlice, Error, EvictionRule, Failures, LoopError, LoopStep, Output, PageId, PageInfo,
    PageMass, Place, Read, Rows, Sequence, Step, StepReport, TierOperation, Usage, codec, fabric, lanes,
    metrics, planner, policy, router, tiers, trace,
};
