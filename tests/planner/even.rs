//! Balance of the shard maps over many shards.

use pikv::Dtype;
use pikv::fabric::Schedule;
use pikv::planner::{Geometry, Load, MIXTRAL_8X7B, Planner};
use pikv::shard::ShardMap;

const RING: u32 = 256;

/// The largest of `bytes`, divided by their mean.
fn of_mean(bytes: impl Iterator<Item = u64> + Clone) -> f64 {
    let (most, sum, n) = (bytes.clone().max().unwrap(), bytes.clone().sum::<u64>(), bytes.count());
    most as f64 * n as f64 / sum as f64
}

/// Bytes of the fullest shard divided by the mean: of a cache, whose shards hold all pages, and of a fabric, whose ranks hold the full
/// pages; `None` for a fabric without full pages.
fn fullest(model: &Geometry, len: u32, map: ShardMap) -> (f64, Option<f64>) {
    let config = model.config(Dtype::Bf16, Dtype::Bf16, 1 << 40).ring(RING).sinks(4).shards(map);
    let filed = len - RING - 4;
    let even = |e: u32| filed / model.experts + u32::from(e < filed % model.experts);
    let filed: Vec<u32> = (0..model.experts).map(even).collect();
    let of = |t: u32, e: u16, head: u32| map.shard(u64::from(t), u32::from(e), head);
    let ranks = Schedule::new(&config, map.shards(), &filed, of).unwrap().ranks;
    let forecast = Planner::new(config).unwrap().forecast(&Load::new(len)).unwrap();
    let full = ranks.iter().any(|rank| rank.bytes > 0);
    (of_mean(forecast.shards.into_iter()), full.then(|| of_mean(ranks.iter().map(|rank| rank.bytes))))
}

#[test]
fn the_spread_loads_many_shards_evenly() {
    for model in Geometry::ALL {
        for (len, bar, shards) in [
            (4 << 10, 1.2, &[2, 8, 16, 24, 32, 64][..]),
            (128 << 10, 1.1, &[2, 8, 16, 32, 48, 64, 128, 256, 512, 1000, 1024]),
        ] {
            for &n in shards {
                let (all, full) = fullest(&model, len, ShardMap::spread(n).unwrap());
                assert!(all <= bar, "{} at {len} on {n}: {all}", model.name);
                assert!(full.is_none_or(|full| full <= bar), "{} at {len} on {n}: {full:?}", model.name);
            }
        }
    }
}

#[test]
fn the_sum_loads_as_many_shards_as_it_reaches() {
    // 64 blocks of an expert, 8 experts and 256 heads reach 326 shards.
    let of = |n| fullest(&MIXTRAL_8X7B, 128 << 10, ShardMap::sum(n).unwrap()).0;
    for n in [8, 64, 256] {
        assert!(of(n) <= 1.1, "{n}: {}", of(n));
    }
    assert!(
        of(1024) > 3.0,
        "the bound of Rule::Sum is not the one that its documentation gives: {}",
        of(1024)
    );
}
