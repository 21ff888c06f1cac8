//! Caches over ranks on devices: the bits of one process on the CPU, pages in device memory only, and the effects of a device that
//! refuses or is lost.

use crate::script::{Op, Options, Run, mix};
use crate::standin::{Get, Set, Standin};
use crate::suite::{config, decode, shape};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::fabric::{self, FabricError, InProcess};
use pikv::policy::{Budget, Eviction, ExpectedAttention, H2o, KeyNorm, SnapKv, StreamingLlm};
use pikv::shape::Pairs;
use pikv::shard::ShardMap;
use pikv::{Backend, Cache, CacheConfig, Dtype, Error, LayerShape, Rope};
use pikv_test::scaled;

const BUDGET: u64 = 1 << 28;

/// A cache over a rank for each back end.
fn over(config: &CacheConfig, backends: &[Backend], fast: bool) -> Cache {
    let ranks = InProcess::on(config, backends, BUDGET).unwrap();
    Cache::over(config.clone(), Box::new(ranks), fabric::Options::default().fast(fast)).unwrap()
}

fn record(mut run: Run, ops: &[Op], what: &str) -> Vec<u32> {
    for (i, op) in ops.iter().enumerate() {
        run.act(op).unwrap_or_else(|e| panic!("{what}, {i}, {op:?}: {e}"));
    }
    run.look().unwrap_or_else(|e| panic!("{what}: {e}"));
    run.record
}

fn one(config: &CacheConfig, options: Options, ops: &[Op]) -> Vec<u32> {
    record(Run::new(config.clone(), options).unwrap(), ops, "one process")
}

/// Runs a case in one process and over devices; pages must have been sent to each of these.
fn check(name: &str, config: CacheConfig, options: Options, ops: Vec<Op>, devices: &[u32]) {
    let options = Options { anywhere: true, ..options };
    let want = one(&config, options, &ops);
    for n in devices {
        let standin = Standin::with_devices(*n);
        let map = ShardMap::sum(*n).unwrap();
        let cache = over(&config.clone().shards(map), &standin.backends(), false);
        let launched: Vec<u64> = (0..*n).map(|i| standin.get_on(i, Get::Launched)).collect();
        let got = record(Run::of(cache, options), &ops, name);
        let at = want.iter().zip(&got).position(|(a, b)| a != b);
        assert!(
            at.is_none() && want.len() == got.len(),
            "{name} over {n} devices: value {at:?} of {} differs",
            want.len()
        );
        for i in 0..*n {
            assert!(
                standin.get_on(i, Get::Launched) > launched[i as usize],
                "{name}: nothing was asked of device {i} of {n}"
            );
            assert_eq!(
                standin.get_on(i, Get::Live),
                0,
                "{name}: device {i} of {n} has something that was not given back"
            );
        }
    }
}

fn layers(dtype: Dtype) -> Vec<LayerShape> {
    vec![shape(2, 3, 8, 12, dtype, dtype); 2]
}

fn plain() -> Options {
    Options::default()
}

fn code(code: Code) -> Coding {
    Coding::new(code)
}

#[test]
fn decode_and_prompts_in_chunks() {
    let mut ops: Vec<Op> = [70, 1, 33, 64].map(|n| Op::Feed(vec![(0, n)])).to_vec();
    ops.extend(decode(6));
    ops.push(Op::Ask(0, 1));
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let config = config(layers(dtype), 16, 0).experts(4, 2).sinks(2);
        check("decode", config, plain(), ops.clone(), &[1, 2, 4]);
    }
    // Rows of more than one bundle and of more than one item; several blocks of one expert, of which each device has some.
    let config = config(vec![shape(1, 13, 4, 4, Dtype::F16, Dtype::F16)], 8, 0).experts(1, 1);
    let ops = vec![Op::Fill(vec![(0, 800)]), Op::Feed(vec![(0, 7)]), Op::Feed(vec![(0, 1)])];
    check("blocks", config, plain(), ops, &[3]);
}

#[test]
fn rollbacks_forks_and_pages_that_go() {
    let ops = vec![
        Op::Fill(vec![(0, 150)]),
        Op::Feed(vec![(0, 90)]),
        Op::Rollback(0, 9),
        Op::Fork(0),
        Op::Feed(vec![(0, 5), (1, 40)]),
        Op::Abandon(vec![(0, 40)], 1),
        Op::Evict(0, 1),
        Op::Feed(vec![(0, 30)]),
        Op::Rollback(1, 12),
        Op::Ask(1, 4),
        Op::Evict(1, 0),
        Op::Drop(0),
        Op::Feed(vec![(1, 20), (0, 70)]),
    ];
    let config = config(layers(Dtype::Bf16), 20, 12).experts(4, 1).nan_fill(true);
    check("back", config, Options { mass: true, ..plain() }, ops, &[1, 2, 4]);
}

#[test]
fn pages_that_move_between_devices() {
    let ops = vec![
        Op::Fill(vec![(0, 300)]),
        Op::Feed(vec![(0, 20)]),
        Op::Rebalance(0, 1),
        Op::Feed(vec![(0, 40)]),
        Op::Replicate(1, 2, 2),
        Op::Rebalance(1, 2),
        Op::Ask(0, 1),
        Op::Fork(0),
        Op::Rebalance(0, 3),
        Op::Feed(vec![(0, 40), (1, 1)]),
        Op::Replicate(0, 1, 4),
        Op::Replicate(1, 0, 3),
        Op::Feed(vec![(0, 1), (1, 30)]),
        Op::Replicate(0, 1, 1),
        Op::Feed(vec![(0, 1)]),
    ];
    check("moves", config(layers(Dtype::F16), 16, 0).experts(4, 1), plain(), ops.clone(), &[2, 4]);
    let int8 = Codec::new(code(Code::Int8), code(Code::Int8));
    let packed = config(layers(Dtype::F16), 16, 0).experts(4, 1).compress_layer(0, int8);
    check("moves of packed pages", packed, plain(), ops, &[2]);
}

#[test]
fn policies() {
    let budget = || Budget::Tokens(90);
    for (name, rule) in [
        ("H2O", Eviction::new(H2o, budget())),
        ("SnapKV", Eviction::new(SnapKv::default(), budget()).adaptive(0.2)),
        ("key norm", Eviction::new(KeyNorm, budget())),
        // It reads keys and values to rank them.
        ("expected attention", Eviction::new(ExpectedAttention::new(None, false), budget())),
        ("SL", Eviction::new(StreamingLlm, budget()).by_page()),
    ] {
        let config =
            config(layers(Dtype::Bf16), 8, 4).sinks(2).experts(2, 1).nan_fill(true).evict(rule.batch(3));
        let mut ops = vec![Op::Fill(vec![(0, 130)]), Op::Feed(vec![(0, 20)]), Op::Rollback(0, 3)];
        ops.extend(decode(12));
        check(name, config, plain(), ops, &[2]);
    }
}

#[test]
fn packed_pages() {
    let rope = Some(Rope::new(100.0, 8));
    let codecs = [
        Codec::new(code(Code::Int8), code(Code::Int4)),
        Codec::new(code(Code::Int2), code(Code::Int5)),
        Codec::new(code(Code::Nvfp4), code(Code::Mxfp4)),
        Codec::new(code(Code::Int4).map(Map::hadamard(8).unwrap()), code(Code::E4m3)),
        Codec::new(code(Code::F16).map(Map::identity_subset(8, &[1, 2, 5]).unwrap()), code(Code::Int8)),
        Codec::new(Coding::block_pca(Code::Int8, 3).unwrap(), code(Code::Int4)),
        Codec::new(Coding::means(Code::Bf16, 2).unwrap(), Coding::means(Code::F16, 1).unwrap()),
    ];
    for (i, codec) in codecs.into_iter().enumerate() {
        for rope in [None, rope] {
            let layers = vec![shape(2, 3, 8, 12, Dtype::Bf16, Dtype::Bf16).rope(rope); 2];
            let config = config(layers, 10, 6)
                .experts(2, 1)
                .compress_head(0, 0, codec.clone())
                .compress_layer(1, codec.clone());
            let ops = vec![
                Op::Feed(vec![(0, 110)]),
                Op::Rollback(0, 5),
                Op::Feed(vec![(0, 70)]),
                Op::Fork(0),
                Op::Feed(vec![(0, 1), (1, 33)]),
            ];
            let options = Options { mass: i == 0, softcap: (i == 1).then_some(3.0), ..plain() };
            check("packed", config, options, ops, &[2]);
        }
    }
}

#[test]
fn what_rows_choose_to_read() {
    let rope = Some(Rope::new(10_000.0, 8).pairs(Pairs::Neighbours));
    let layers = vec![shape(1, 2, 8, 8, Dtype::Bf16, Dtype::Bf16).rope(rope).window(90)];
    let config = config(layers, 16, 0).sinks(4).experts(3, 2).key_bounds(true);
    let ops = vec![Op::Feed(vec![(0, 130)]), Op::Feed(vec![(0, 3)]), Op::Feed(vec![(0, 1)])];
    for options in [
        Options { quest: 2, ..plain() },
        Options { own_experts: true, mass: true, ..plain() },
        Options { closed_gaps: true, softcap: Some(2.0), ..plain() },
    ] {
        check("chosen", config.clone(), options, ops.clone(), &[2]);
    }
}

/// Partial results merged on a device have the bits of those merged on the CPU. [`fabric::Options::fast`] has other bits, which do not
/// depend on who merges.
#[test]
fn merged_on_the_devices() {
    let int8 = Codec::new(code(Code::Int8), code(Code::Int8));
    for codec in [None, Some(int8)] {
        // Up to 5 blocks of a forest on each rank.
        let config = config(vec![shape(1, 5, 4, 4, Dtype::F32, Dtype::F32)], 8, 0).experts(2, 1);
        let config = codec.into_iter().fold(config, CacheConfig::compress).shards(ShardMap::sum(2).unwrap());
        let ops = [Op::Fill(vec![(0, 2600)]), Op::Feed(vec![(0, 3)]), Op::Feed(vec![(0, 1)])];
        let options = Options { anywhere: true, ..plain() };
        let standin = Standin::with_devices(2);
        let of = |backends: &[Backend]| {
            let cache = over(&config, backends, true);
            let mut run = Run::of(cache, options);
            ops.iter().for_each(|op| run.act(op).unwrap());
            run.record
        };
        let (cpu, cuda) = (of(&[Backend::CPU, Backend::CPU]), of(&standin.backends()));
        assert!(!cpu.is_empty() && cpu == cuda);
        // Ranks of both kinds work together.
        let [_, second] = standin.backends().try_into().unwrap();
        assert!(cpu == of(&[Backend::CPU, second]));
    }
}

#[test]
fn a_device_has_the_bytes_of_its_rank() {
    let config = config(layers(Dtype::Bf16), 16, 0).experts(4, 1).shards(ShardMap::sum(4).unwrap());
    let standin = Standin::with_devices(4);
    let mut bytes = Vec::new();
    for backends in [vec![Backend::CPU; 4], standin.backends()] {
        let devices = backends.iter().any(|backend| backend.name() == "cuda");
        let before: Vec<u64> = (0..4).map(|i| standin.get_on(i, Get::Bytes)).collect();
        let cache = over(&config, &backends, false);
        let mut run = Run::of(cache.clone(), plain());
        run.act(&Op::Fill(vec![(0, 900)])).unwrap();
        let ranks = cache.ranks().unwrap();
        let page = config.layers[0].layout.bytes();
        for (i, rank) in (0..).zip(&ranks) {
            assert_eq!(rank.bytes, rank.pages * page);
            // 2 layers of 2 heads, 4 experts of 225 tokens each: a block of 7 full pages each, which another has the next of.
            assert!(rank.pages >= 20, "{ranks:?}");
            let taken = standin.get_on(i, Get::Bytes) - before[i as usize];
            assert!(
                if devices { taken >= rank.bytes } else { taken == 0 },
                "rank {i}: {taken} of {}",
                rank.bytes
            );
        }
        bytes.push(ranks.iter().map(|rank| rank.bytes).collect::<Vec<u64>>());
        run.sequences.clear();
        assert!(cache.ranks().unwrap().iter().all(|rank| (rank.bytes, rank.pages) == (0, 0)));
    }
    assert_eq!(bytes[0], bytes[1]);
    assert_eq!(standin.get(Get::Live), 0);
}

#[test]
fn a_budget_of_a_device_is_its_own() {
    let config = config(layers(Dtype::F32), 8, 0).shards(ShardMap::ONE);
    let standin = Standin::with_devices(1);
    let page = config.layers[0].layout.bytes();
    let ranks = InProcess::on(&config, &standin.backends(), 10 * page).unwrap();
    let cache = Cache::over(config, Box::new(ranks), fabric::Options::default()).unwrap();
    let mut run = Run::of(cache, plain());
    run.act(&Op::Fill(vec![(0, 40)])).unwrap();
    match run.act(&Op::Fill(vec![(0, 200)])).and_then(|()| run.act(&Op::Fill(vec![(0, 1)]))) {
        Err(Error::Fabric(FabricError::Budget { rank: 0, needed, available })) => {
            assert!(needed == page && available < page)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn steps_of_a_known_size_allocate_nothing_and_wait_once_a_layer_and_device() {
    let config = config(layers(Dtype::Bf16), 16, 0).experts(4, 1).shards(ShardMap::sum(2).unwrap());
    let standin = Standin::with_devices(2);
    let mut run = Run::of(over(&config, &standin.backends(), false), plain());
    run.act(&Op::Fill(vec![(0, 300)])).unwrap();
    decode(3).iter().for_each(|op| run.act(op).unwrap());
    let of = |get| [0, 1].map(|device| standin.get_on(device, get));
    let (allocated, waited) = (of(Get::Allocated), of(Get::Waited));
    decode(5).iter().for_each(|op| run.act(op).unwrap());
    assert_eq!(of(Get::Allocated), allocated);
    assert_eq!(of(Get::Waited), waited.map(|waited| waited + 5 * 2));
}

fn faulty() -> (CacheConfig, Vec<Op>) {
    let config = config(layers(Dtype::Bf16), 16, 4).experts(4, 1).nan_fill(true);
    let int8 = Codec::new(code(Code::Int8), code(Code::Int8));
    let ops = vec![
        Op::Fill(vec![(0, 170)]),
        Op::Feed(vec![(0, 60)]),
        Op::Fork(0),
        Op::Feed(vec![(0, 1), (1, 40)]),
        Op::Rebalance(0, 5),
        Op::Ask(1, 2),
        Op::Feed(vec![(0, 30)]),
    ];
    (config.compress_layer(1, int8).shards(ShardMap::sum(2).unwrap()), ops)
}

/// One fault at a time, the `n`th time that it can happen on the second device: the call returns an error, and succeeds when it is
/// repeated.
#[test]
fn a_device_that_refuses_once() {
    let (config, ops) = faulty();
    let options = Options { anywhere: true, ..plain() };
    let want = one(&config, options, &ops);
    for (fault, least) in [(Set::Launches, 8), (Set::Allocations, 8)] {
        for n in (0..).step_by(scaled(4, 1)) {
            let standin = Standin::with_devices(2);
            let mut run = Run::of(over(&config, &standin.backends(), false), options);
            standin.set_on(1, fault, n);
            let mut failed = 0;
            let mut again = |e: Error, what: &str| {
                match e {
                    Error::Fabric(FabricError::Device { rank: 1, code: 701, lost: false }) => {
                        assert!(matches!(fault, Set::Launches))
                    }
                    Error::Fabric(FabricError::Memory { rank: 1, bytes: 1.. }) => {
                        assert!(matches!(fault, Set::Allocations))
                    }
                    other => panic!("{n}, {what}: {other:?}"),
                }
                failed += 1;
            };
            for op in &ops {
                if let Err(e) = run.act(op) {
                    again(e, &format!("{op:?}"));
                    run.act(op).unwrap_or_else(|e| panic!("{n}, {op:?} again: {e}"));
                }
            }
            let before = run.record.len();
            if let Err(e) = run.look() {
                again(e, "look");
                run.record.truncate(before);
                run.look().unwrap();
            }
            assert!(run.record == want, "{n}: what came out after the fault differs");
            drop(run);
            let (due, live) = (standin.get_on(1, Get::Due), standin.get(Get::Live));
            assert_eq!(live, 0, "{n}");
            assert_eq!(failed, 1 - due, "{n}: a fault that did not show");
            if due > 0 {
                assert!(n > least, "{n} faults");
                break;
            }
        }
    }
}

#[test]
fn a_device_that_is_lost() {
    let (config, ops) = faulty();
    for n in [0, 3, 9] {
        let standin = Standin::with_devices(3);
        let cache = over(&config.clone().shards(ShardMap::sum(3).unwrap()), &standin.backends(), false);
        let mut run = Run::of(cache.clone(), Options { anywhere: true, ..plain() });
        standin.set_on(1, Set::Lose, n);
        let failed = ops.iter().chain(&decode(3)).find_map(|op| run.act(op).err());
        let lost = Error::Fabric(FabricError::Device { rank: 1, code: 719, lost: true });
        assert_eq!(failed, Some(lost.clone()), "{n}");
        // The loss is permanent for pages on the device; other pages are unchanged, and new ones go to the other ranks.
        assert_eq!(run.act(&Op::Feed(vec![(0, 1)])), Err(lost.clone()), "{n}");
        let ranks = cache.ranks().unwrap();
        assert_eq!(ranks[1].lost.clone().map(Error::Fabric), Some(lost), "{n}");
        assert!(ranks[0].lost.is_none() && ranks[2].lost.is_none());
        let mut fresh = Run::of(cache.clone(), Options { anywhere: true, ..plain() });
        let ops = [Op::Feed(vec![(0, 100)]), Op::Feed(vec![(0, 1)]), Op::Ask(0, 2)];
        ops.iter().for_each(|op| fresh.act(op).unwrap());
        fresh.look().unwrap();
        assert!(fresh.record == one(&config, fresh.options, &ops), "{n}");
        drop((run, fresh, cache));
        assert_eq!(standin.get(Get::Live), 0, "{n}: something was not given back");
    }
}

#[test]
fn a_device_that_is_lost_takes_no_replicated_pages_along() {
    let standin = Standin::with_devices(2);
    let config = config(layers(Dtype::F32), 16, 0).experts(2, 1).shards(ShardMap::sum(2).unwrap());
    let cache = over(&config, &standin.backends(), false);
    let mut run = Run::of(cache.clone(), Options { anywhere: true, ..plain() });
    let ops: Vec<Op> = std::iter::once(Op::Feed(vec![(0, 200)]))
        .chain((0..2).flat_map(|layer| (0..2).map(move |expert| Op::Replicate(layer, expert, 2))))
        .chain([Op::Ask(0, 1)])
        .collect();
    ops.iter().for_each(|op| run.act(op).unwrap());
    standin.set_on(1, Set::Lose, 0);
    let lost = (0..4).find_map(|_| run.act(&Op::Ask(0, 1)).err()).expect("both devices are asked");
    assert!(matches!(lost, Error::Fabric(FabricError::Device { rank: 1, lost: true, .. })), "{lost:?}");
    let all = run.record.clone();
    run.act(&Op::Ask(0, 1)).unwrap();
    let asked = 2 * 6 * (12 + 1);
    assert!(run.record[all.len()..] == all[all.len() - asked..]);
}

#[test]
fn what_does_not_go_together() {
    let standin = Standin::with_devices(1);
    let config = config(layers(Dtype::F32), 8, 0);
    let none = InProcess::on(&config, &[], BUDGET);
    assert!(matches!(none, Err(Error::Fabric(FabricError::Nobody))));
    let ranks = InProcess::on(&config, &standin.backends(), BUDGET).unwrap();
    let front =
        Cache::over(config.clone().backend(standin.backend()), Box::new(ranks), fabric::Options::default());
    let error = front.unwrap_err().to_string();
    assert!(error.contains("a front on a device") && error.contains("InProcess::on"), "{error}");
}

/// A rank that lost its device is found when it is next asked for something, not before.
#[test]
fn a_device_that_was_lost_before() {
    let standin = Standin::with_devices(1);
    let backends = standin.backends();
    let config = || config(layers(Dtype::F32), 8, 0);
    let mut other = Run::new(config().backend(backends[0].clone()), plain()).unwrap();
    standin.set(Set::Lose, 0);
    while other.act(&Op::Feed(vec![(0, 1)])).is_ok() {}
    let mut run = Run::of(over(&config(), &backends, false), plain());
    let failed = decode(60).iter().find_map(|op| run.act(op).err());
    assert_eq!(failed, Some(Error::Fabric(FabricError::Device { rank: 0, code: 719, lost: true })));
    // Without any rank left.
    assert_eq!(run.act(&Op::Feed(vec![(0, 40)])), Err(Error::Fabric(FabricError::Nobody)));
}

/// Random caches and random acts.
#[test]
fn whatever_is_done() {
    for seed in 0..12u64 {
        let mut n = 0;
        let mut below = |m: u64| {
            n += 1;
            mix(&[seed, n, 31]) % m
        };
        let dtypes = [below(3), below(3)].map(|i| Dtype::ALL[i as usize]);
        let (k_dim, v_dim) = (2 + below(20) as u32, 1 + below(40) as u32);
        let rope = (below(3) == 0).then(|| {
            Rope::new(100.0, 2 * (1 + below(u64::from(k_dim / 2)) as u32))
                .pairs([Pairs::Halves, Pairs::Neighbours][below(2) as usize])
        });
        let window = (below(4) == 0).then(|| 30 + below(90) as u32);
        let layer = shape(1 + below(2) as u32, 1 + below(4) as u32, k_dim, v_dim, dtypes[0], dtypes[1]);
        let experts = 1 + below(4) as u32;
        let mut config =
            config(vec![layer.rope(rope).window(window); 2], 1 + below(20) as u32, below(12) as u32)
                .sinks(below(4) as u32)
                .experts(experts, 1)
                .nan_fill(below(2) == 0);
        if below(2) == 0 {
            let codes = [(); 2].map(|()| below(Code::ALL.len() as u64)).map(|i| code(Code::ALL[i as usize]));
            config = config.compress_layer(1, Codec::new(codes[0].clone(), codes[1].clone()));
        }
        if below(3) == 0 {
            config = config.evict(Eviction::new(H2o, Budget::Tokens(40 + below(40) as u32)));
        }
        let mut sequences = 1;
        let mut ops = vec![Op::Fill(vec![(0, 150)]), Op::Feed(vec![(0, 1 + below(60) as u32)])];
        for _ in 0..9 {
            let at = below(sequences) as usize;
            ops.push(match below(11) {
                0 if sequences < 3 => {
                    sequences += 1;
                    Op::Fork(at)
                }
                1 => Op::Rollback(at, below(12) as u32),
                2 => Op::Evict(at, below(5) as usize),
                3 => Op::Ask(at, 1 + below(3) as u32),
                4 => Op::Abandon(vec![(at, 1 + below(40) as u32)], below(2) as usize),
                5 => Op::Rebalance(below(2) as usize, below(100)),
                6 => Op::Replicate(below(2) as usize, below(u64::from(experts)) as u16, 1 + below(4) as u32),
                _ => Op::Feed(vec![(at, 1 + below(45) as u32)]),
            });
        }
        let options = Options { anywhere: true, ..Options::drawn(&mut below) };
        let want = one(&config, options, &ops);
        let devices = 1 + below(4) as u32;
        let standin = Standin::with_devices(devices);
        let cache = over(&config.clone().shards(ShardMap::sum(devices).unwrap()), &standin.backends(), false);
        let what = format!("seed {seed} over {devices}, {ops:?}, {config:?}");
        assert!(record(Run::of(cache, options), &ops, &what) == want, "{what}");
        assert_eq!(standin.get(Get::Live), 0, "{what}");
    }
}
