//! Caches for these tests.

use pikv::fabric::{InProcess, Options};
use pikv::{Cache, CacheConfig};

/// A cache over threads with `budget` bytes each.
pub fn over(config: CacheConfig, ranks: u32, budget: u64, options: Options) -> Cache {
    let fabric = InProcess::new(&config, ranks, budget).unwrap();
    Cache::over(config, Box::new(fabric), options).unwrap()
}
