//! Values and caches.

use pikv::fabric::{InProcess, Options};
use pikv::{Cache, CacheConfig};

pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A cache over threads with `budget` bytes each.
pub fn over(config: CacheConfig, ranks: u32, budget: u64, options: Options) -> Cache {
    let fabric = InProcess::new(&config, ranks, budget).unwrap();
    Cache::over(config, Box::new(fabric), options).unwrap()
}
