//! Where tokens and experts go: hashes, the ring, maps of shards. The host and the kernels compile the same functions of `pikv-core`.

use criterion::{BenchmarkId, Criterion, Throughput};
use pikv::shard::ShardMap;
use pikv_core::hash;
use pikv_core::ring::Ring;
use std::hint::black_box;

/// Calls of one measurement.
const CALLS: u32 = 1024;

/// Experts by a hash of a token's position: 8 experts of 256 for each token.
pub fn hashing(c: &mut Criterion) {
    // The steps of SplitMix64 in wider numbers, whose wraps are visible.
    let slow = |x: u64| {
        let wrap = |x: u128| x & u128::from(u64::MAX);
        let x = wrap(u128::from(x) + 0x9e37_79b9_7f4a_7c15);
        let x = wrap((x ^ (x >> 30)) * 0xbf58_476d_1ce4_e5b9);
        let x = wrap((x ^ (x >> 27)) * 0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) as u64
    };
    assert!((0..u64::from(CALLS)).all(|t| hash::mix(t) == slow(t)), "a hash differs");
    let mut group = c.benchmark_group("hash");
    group.throughput(Throughput::Elements(u64::from(CALLS)));
    group.bench_function("8 of 256 experts", |b| {
        b.iter(|| {
            let mut sum = 0u32;
            for t in 0..CALLS {
                let start = hash::mix(u64::from(black_box(t)));
                for j in 0..8 {
                    sum = sum.wrapping_add(u32::from(hash::expert(start, j, 1, 256)));
                }
            }
            sum
        });
    });
}

/// The tiles that a step of one token adds to a ring and takes from it.
pub fn ring(c: &mut Criterion) {
    let ring = Ring::new(256, 32).expect("a ring of 256 tokens");
    for len in 0..CALLS {
        // A tile is held if any of its 32 positions is among the newest 256 + 32.
        let held = (0..=len / 32).filter(|tile| (tile * 32..len.min(tile * 32 + 32)).any(|p| p + 288 >= len));
        assert_eq!(ring.pages(len), held.count() as u32, "tiles of {len} tokens");
    }
    let mut group = c.benchmark_group("ring");
    group.throughput(Throughput::Elements(u64::from(CALLS)));
    group.bench_function("tiles of a step", |b| {
        b.iter(|| {
            let mut sum = 0u32;
            for len in 0..CALLS {
                let tiles = ring.tiles(black_box(len), len + 1);
                sum = sum.wrapping_add(tiles.end - tiles.start + ring.left(len + 1));
            }
            sum
        });
    });
}

/// The shard of a token's page, by each rule.
pub fn shards(c: &mut Criterion) {
    let mut group = c.benchmark_group("shard");
    group.throughput(Throughput::Elements(u64::from(CALLS)));
    for (name, map) in [
        ("xor", ShardMap::xor(65_536, 256, 64)),
        ("sum", ShardMap::sum(64)),
        ("spread", ShardMap::spread(64)),
    ] {
        let map = map.expect("a map of 64 shards");
        // Tokens, experts and heads that do not go together.
        let place = |i: u32| (hash::mix(u64::from(i)) % 65_536, i % 256, i / 256 % 8);
        let mut of = [0u32; 64];
        (0..64 * CALLS).map(place).for_each(|(t, expert, head)| of[map.shard(t, expert, head) as usize] += 1);
        assert!(of.iter().all(|n| *n > 0), "{name}: a shard without a page: {of:?}");
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                (0..CALLS)
                    .fold(0u32, |sum, t| sum.wrapping_add(map.shard(u64::from(black_box(t)), t % 256, t % 8)))
            });
        });
    }
}
