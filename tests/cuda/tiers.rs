//! Tiers below device memory: results do not depend on where pages lie.

use crate::script::{Op, Options, Run, mix};
use crate::standin::{Get, Set, Standin};
use crate::suite::{Case, config, same, shape};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::tiers::{Fetches, Tiers};
use pikv::{CacheConfig, Dtype, Error, LayerShape};

fn layers() -> Vec<LayerShape> {
    vec![shape(2, 2, 8, 8, Dtype::Bf16, Dtype::F32); 2]
}

fn page() -> u64 {
    layers()[0].layout.bytes()
}

/// A number of pages in the first tier, host memory for some more, and a file.
fn tiered(pages: u64, host: u64) -> CacheConfig {
    let tiers = Tiers::new().host(host * page()).file(std::env::temp_dir(), 1 << 20);
    let mut config = config(layers(), 8, 4).nan_fill(true).tiers(tiers);
    config.budget = pages * page();
    config
}

fn ops() -> Vec<Op> {
    let mut ops = vec![Op::Feed(vec![(0, 20)]); 12];
    ops.extend([
        Op::Promote(0, 3 * page()),
        Op::Feed(vec![(0, 1)]),
        Op::Demote(0, 5 * page()),
        Op::Feed(vec![(0, 3)]),
        Op::Rollback(0, 3),
        Op::Ask(0, 2),
        Op::Evict(0, 1),
        Op::Feed(vec![(0, 1)]),
    ]);
    ops
}

#[test]
fn pages_go_down_and_are_read_from_there() {
    let standin = Standin::new();
    // Into memory of the host, into files, and into both.
    for host in [100, 0, 6] {
        for options in [Options::default(), Options { mass: true, ..Options::default() }] {
            same("tiers", &standin, &Case { config: tiered(24, host), options, ops: ops() });
        }
    }
}

#[test]
fn what_is_packed_or_evicted_goes_down_as_well() {
    let standin = Standin::new();
    let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::F16));
    let with = |config: CacheConfig| {
        [
            config.clone().compress(int8.clone()),
            config.clone().evict(Eviction::new(H2o, Budget::Tokens(120)).batch(8)),
            config.key_bounds(true),
        ]
    };
    for (i, config) in with(tiered(50, 10).experts(2, 1)).into_iter().enumerate() {
        let quest = if i == 2 { 2 } else { 0 };
        let options = Options { mass: i == 1, quest, own_experts: i == 0, ..Options::default() };
        let mut ops = ops();
        // Pages shared with a fork are not demoted.
        ops.splice(9..9, [Op::Fork(0), Op::Feed(vec![(0, 1)]), Op::Drop(1)]);
        same("tiers", &standin, &Case { config, options, ops });
    }
}

/// Random moves.
#[test]
fn wherever_pages_lie() {
    let standin = Standin::new();
    for seed in 0..8u64 {
        let mut n = 0;
        let mut below = |m: u64| {
            n += 1;
            mix(&[seed, n, 3]) % m
        };
        let mut config = tiered(30 + below(20), below(20)).experts(1 + below(2) as u32, 1);
        if below(2) == 0 {
            config = config.compress_head(0, 1, Codec::new(Coding::new(Code::Int4), Coding::new(Code::E5m2)));
        }
        if below(3) == 0 {
            config = config.evict(Eviction::new(H2o, Budget::Tokens(90)).batch(9));
        }
        let mut ops = vec![Op::Feed(vec![(0, 8)])];
        for _ in 0..14 {
            ops.push(match below(7) {
                0 => Op::Demote(0, below(12) * page()),
                1 => Op::Promote(0, below(12) * page()),
                2 => Op::Rollback(0, below(4) as u32),
                3 => Op::Ask(0, 1),
                _ => Op::Feed(vec![(0, 1 + below(28) as u32)]),
            });
        }
        same(&format!("seed {seed}, {ops:?}"), &standin, &Case { config, options: Options::default(), ops });
    }
}

#[test]
fn pages_of_memory_come_up_while_the_layer_before_is_attended() {
    let standin = Standin::new();
    let mut run = Run::new(tiered(24, 100).backend(standin.backend()), Options::default()).unwrap();
    (0..10).for_each(|_| run.act(&Op::Feed(vec![(0, 20)])).unwrap());
    let (before, allocated) = (run.cache.fetches(), standin.get(Get::Allocated));
    run.act(&Op::Feed(vec![(0, 1)])).unwrap();
    let after = run.cache.fetches();
    let pages = run.sequences[0].bytes_in_tier(1) / page();
    assert!(pages > 4, "{pages}");
    let Fetches { in_place, ahead, awaited, late, .. } = before;
    assert_eq!(
        (after.in_place, after.ahead, after.awaited, after.late),
        (in_place, ahead + pages, awaited, late)
    );
    // In memory that was there.
    assert_eq!(standin.get(Get::Allocated), allocated);
}

/// Pages of later layers are uploaded to memory that an earlier layer used, but only after that layer has read it.
#[test]
fn memory_that_pages_come_up_in_is_read_before_it_is_reused() {
    let standin = Standin::new();
    standin.set(Set::Late, 1);
    let mut config = tiered(48, 100);
    config.layers = vec![layers()[0]; 4];
    let ops = [vec![Op::Feed(vec![(0, 20)]); 12], vec![Op::Feed(vec![(0, 1)]); 3]].concat();
    same("tiers", &standin, &Case { config, options: Options::default(), ops });
}

#[test]
fn memory_that_pages_come_up_in_is_bounded() {
    let standin = Standin::new();
    let tiers = Tiers::new().host(1 << 20).staging(3 * page());
    let mut config = tiered(24, 0).tiers(tiers);
    config.budget = 24 * page();
    let mut run = Run::new(config.backend(standin.backend()), Options::default()).unwrap();
    let error = (0..12).find_map(|_| run.act(&Op::Feed(vec![(0, 20)])).err()).unwrap();
    match error {
        Error::Staging { layer: 0, needed, staging } => assert!(needed > staging && staging == 3 * page()),
        other => panic!("{other:?}"),
    }
    // After the refusal a smaller step works.
    run.act(&Op::Fill(vec![(0, 1)])).unwrap();
}
