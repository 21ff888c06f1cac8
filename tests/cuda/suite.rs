//! The same script on the CPU and on the stand-in, with equal bits.

use crate::script::{Op, Options, Run, mix};
use crate::standin::{Get, Set, Standin};
use pikv::cuda::CudaError;
use pikv::shape::Pairs;
use pikv::shard::ShardMap;
use pikv::{Backend, CacheConfig, Dtype, LayerShape, Rope};
use pikv_test::scaled;

/// A cache and a script.
pub struct Case {
    pub config: CacheConfig,
    pub options: Options,
    pub ops: Vec<Op>,
}

pub fn shape(kv_heads: u32, group: u32, k_dim: u32, v_dim: u32, k: Dtype, v: Dtype) -> LayerShape {
    LayerShape::new(kv_heads, kv_heads * group, k_dim, k).values(v_dim, v)
}

pub fn config(layers: Vec<LayerShape>, ring: u32, rollback: u32) -> CacheConfig {
    CacheConfig::new(layers, 1 << 28).ring(ring).rollback(rollback)
}

/// `n` steps of one token.
pub fn decode(n: usize) -> Vec<Op> {
    vec![Op::Feed(vec![(0, 1)]); n]
}

/// Runs a case and records its results. Kernels are loaded when the cache is built, and never later.
fn record(case: &Case, standin: &Standin, backend: &Backend, options: Options) -> Vec<u32> {
    let mut run = Run::new(case.config.clone().backend(backend.clone()), options).unwrap();
    let compiled = standin.get(Get::Compiled);
    for (i, op) in case.ops.iter().enumerate() {
        run.act(op).unwrap_or_else(|e| panic!("{}, {i}, {op:?}: {e}", backend.name()));
    }
    run.look().unwrap_or_else(|e| panic!("{}: {e}", backend.name()));
    assert_eq!(standin.get(Get::Compiled), compiled, "kernels are loaded after the cache was built");
    run.record
}

/// Runs a case on both back ends; on the device with host tensors and, where possible, with device tensors, also in f32 if the case has
/// other dtypes.
pub fn same(name: &str, standin: &Standin, case: &Case) {
    let Options { mass, quest, dtypes, .. } = case.options;
    let goes = !mass && quest == 0 && !case.config.key_bounds;
    alike(
        name,
        standin,
        case,
        Options { dtypes: None, ..case.options },
        if goes { &[false, true] } else { &[false] },
    );
    if goes && dtypes.is_some() {
        alike(name, standin, case, case.options, &[true]);
    }
}

/// Runs a case on the CPU, and on the device with tensors of the host or of its own.
fn alike(name: &str, standin: &Standin, case: &Case, options: Options, forms: &[bool]) {
    let live = standin.get(Get::Live);
    let cpu = record(case, standin, &Backend::CPU, options);
    for &in_place in forms {
        let cuda = record(case, standin, &standin.backend(), Options { in_place, ..options });
        assert_eq!(cpu.len(), cuda.len(), "{name}");
        if let Some(at) = cpu.iter().zip(&cuda).position(|(a, b)| a != b) {
            panic!(
                "{name}: value {at} of {} is {:#x} on the CPU and {:#x} on CUDA, its tensors there: {in_place}",
                cpu.len(),
                cpu[at],
                cuda[at]
            );
        }
        assert_eq!(standin.get(Get::Live), live, "{name}: something was not given back");
    }
}

/// [`same`], its tensors in other dtypes too, which the case draws.
pub fn check(name: &str, config: CacheConfig, ops: Vec<Op>) {
    let shapes = config.layers.iter().map(|of| u64::from(of.layout.k_dim * 256 + of.layout.v_dim));
    let seed: Vec<u64> = shapes.chain(name.bytes().map(u64::from)).chain([ops.len() as u64]).collect();
    let dtypes = [0, 1, 2, 3].map(|i| Dtype::ALL[mix(&[mix(&seed), i]) as usize % 3]);
    let options = Options { dtypes: Some(dtypes), ..Options::default() };
    same(name, &Standin::new(), &Case { config, options, ops });
}

use Dtype::{Bf16, F16, F32};

#[test]
fn decodes_in_every_dtype() {
    for (k, v) in [(F32, F32), (F16, Bf16), (Bf16, F16), (F32, F16)] {
        check("decode", config(vec![shape(2, 2, 16, 16, k, v); 2], 16, 0), decode(70));
    }
}

#[test]
fn takes_prompts_in_chunks() {
    let ops = [40, 1, 33, 64, 1, 1].map(|n| Op::Feed(vec![(0, n)])).to_vec();
    check("chunks", config(vec![shape(2, 3, 24, 40, F16, Bf16)], 64, 0), ops);
    // Longer than the ring.
    check(
        "long",
        config(vec![shape(1, 1, 8, 8, F32, F32)], 5, 0),
        vec![Op::Feed(vec![(0, 90)]), Op::Ask(0, 1)],
    );
}

#[test]
fn widths_that_are_odd_and_apart() {
    for (k_dim, v_dim) in [(1, 1), (33, 5), (7, 80), (64, 256), (256, 3)] {
        check("widths", config(vec![shape(1, 2, k_dim, v_dim, Bf16, F16)], 8, 0), {
            vec![Op::Feed(vec![(0, 37)]), Op::Feed(vec![(0, 1)])]
        });
    }
}

#[test]
fn bundles_of_every_width() {
    let ops = vec![Op::Feed(vec![(0, 3)]), Op::Feed(vec![(0, 1)]), Op::Ask(0, 1)];
    for group in [1, 2, 3, 5, 8, 15] {
        check("group", config(vec![shape(1, group, 16, 16, F32, F32)], 8, 0), ops.clone());
    }
}

#[test]
fn windows_and_sinks() {
    let layers = [None, Some(7), Some(40)].map(|window| shape(1, 2, 8, 8, Bf16, Bf16).window(window));
    let mut ops = vec![Op::Feed(vec![(0, 50)])];
    ops.extend(decode(40));
    check("windows", config(layers.to_vec(), 16, 4).sinks(3), ops);
}

#[test]
fn experts_over_shards() {
    let layers = vec![shape(2, 2, 16, 16, Bf16, Bf16); 2];
    let config = config(layers, 16, 0).experts(4, 2).shards(ShardMap::xor(4, 4, 2).unwrap()).sinks(2);
    let mut ops = vec![Op::Feed(vec![(0, 60)])];
    ops.extend(decode(30));
    ops.extend([Op::Feed(vec![(0, 70)]), Op::Ask(0, 1)]);
    check("experts", config, ops);
}

#[test]
fn long_runs_of_blocks() {
    // Three blocks of 8 pages filed, and as many in the ring of another layer.
    let layers = vec![shape(1, 1, 4, 4, F32, F32), shape(1, 9, 4, 4, F16, F16)];
    check("blocks", config(layers.clone(), 32, 0), vec![Op::Fill(vec![(0, 800)]), Op::Feed(vec![(0, 1)])]);
    check("ring", config(layers.clone(), 1024, 0), vec![Op::Fill(vec![(0, 800)]), Op::Feed(vec![(0, 1)])]);
    // 37 blocks, more than a row has warps that join them, in the runs of two experts.
    let ops = vec![Op::Fill(vec![(0, 9300)]), Op::Feed(vec![(0, 1)])];
    check("levels", config(layers[..1].to_vec(), 32, 0).experts(2, 1), ops);
}

#[test]
fn rollback_and_abandoned_steps() {
    let ops = vec![
        Op::Feed(vec![(0, 45)]),
        Op::Rollback(0, 9),
        Op::Feed(vec![(0, 5)]),
        Op::Abandon(vec![(0, 20)], 1),
        Op::Abandon(vec![(0, 3)], 2),
        Op::Feed(vec![(0, 3)]),
        Op::Ask(0, 4),
        Op::Rollback(0, 12),
        Op::Feed(vec![(0, 1)]),
    ];
    check("rollback", config(vec![shape(2, 1, 8, 8, F16, F16); 2], 20, 12).experts(3, 1), ops);
}

#[test]
fn forks_write_apart() {
    // A ring shorter than a tile: tokens leave a tile that the same step copied.
    for ring in [1, 7, 40] {
        let ops = vec![
            Op::Feed(vec![(0, 43)]),
            Op::Fork(0),
            Op::Feed(vec![(0, 1), (1, 2)]),
            Op::Fork(1),
            Op::Abandon(vec![(2, 4), (0, 1)], 1),
            Op::Feed(vec![(2, 9), (0, 1)]),
            Op::Drop(1),
            Op::Feed(vec![(2, 1), (0, 30), (1, 3)]),
            Op::Ask(2, 1),
        ];
        check("fork", config(vec![shape(1, 2, 8, 12, Bf16, F32); 2], ring, 3).experts(2, 1), ops);
    }
}

#[test]
fn evicted_pages() {
    let ops = vec![
        Op::Feed(vec![(0, 120)]),
        Op::Evict(0, 1),
        Op::Feed(vec![(0, 1)]),
        Op::Evict(0, 0),
        Op::Feed(vec![(0, 40)]),
    ];
    check("evict", config(vec![shape(1, 1, 8, 8, F32, F32)], 16, 0), ops);
}

#[test]
fn keys_before_their_rotation() {
    for (pairs, rotary_dim) in [(Pairs::Halves, 16), (Pairs::Neighbours, 16), (Pairs::Halves, 10)] {
        let rope = Some(Rope::new(10_000.0, rotary_dim).pairs(pairs));
        let layers = vec![shape(1, 2, 16, 16, Bf16, Bf16).rope(rope); 2];
        let mut ops = decode(40);
        // Past the first table.
        ops.extend([Op::Feed(vec![(0, 240)]), Op::Feed(vec![(0, 1)])]);
        check("rope", config(layers, 32, 0), ops);
    }
}

#[test]
fn soft_caps() {
    let ops = vec![Op::Feed(vec![(0, 40)]), Op::Feed(vec![(0, 1)])];
    let config = config(vec![shape(2, 2, 16, 16, Bf16, Bf16)], 16, 0);
    same(
        "softcap",
        &Standin::new(),
        &Case { config, options: Options { softcap: Some(5.0), ..Options::default() }, ops },
    );
}

#[test]
fn attention_mass() {
    // Groups that bundles cut across, rows of more than one item, blocks of more than one page.
    for group in [1, 3, 12] {
        let layers = vec![shape(2, group, 8, 8, Bf16, F32)];
        let config = config(layers, 16, 0).experts(2, 1).sinks(3);
        let ops = vec![Op::Feed(vec![(0, 30)]), Op::Feed(vec![(0, 1)]), Op::Feed(vec![(0, 70)]), Op::Fork(0)];
        let ops = [ops, vec![Op::Feed(vec![(0, 2), (1, 1)])]].concat();
        let options = Options { mass: true, ..Options::default() };
        same("mass", &Standin::new(), &Case { config, options, ops });
    }
}

#[test]
fn pages_filled_with_nan_on_an_older_device() {
    let standin = Standin::new();
    standin.set(Set::Capability, 75);
    let mut ops = vec![Op::Feed(vec![(0, 50)]), Op::Fork(0)];
    ops.extend(decode(5));
    ops.extend([Op::Drop(1), Op::Feed(vec![(0, 40), (1, 40)])]);
    let config = config(vec![shape(2, 2, 16, 16, Bf16, F16)], 16, 0).nan_fill(true).experts(2, 1);
    same("sm_70", &standin, &Case { config, options: Options::default(), ops });
    standin.set(Set::Capability, 61);
    match Backend::cuda() {
        Err(CudaError::Capability { major: 6, minor: 1, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn closed_gaps_and_chosen_experts() {
    let rope = Some(Rope::new(10_000.0, 8));
    let layers = vec![shape(1, 2, 8, 8, Bf16, Bf16).rope(rope).window(40)];
    let config = config(layers, 16, 0).sinks(4).experts(3, 2);
    let mut ops = vec![Op::Feed(vec![(0, 70)])];
    ops.extend(decode(4));
    for (closed_gaps, own_experts) in [(true, false), (false, true), (true, true)] {
        let options = Options { closed_gaps, own_experts, ..Options::default() };
        same(
            "gaps and experts",
            &Standin::new(),
            &Case { config: config.clone(), options, ops: ops.clone() },
        );
    }
}

/// Random caches and random acts.
#[test]
fn whatever_is_done() {
    let standin = Standin::new();
    for seed in 0..scaled(14, 40u64) {
        let mut n = 0;
        let mut below = |m: u64| {
            n += 1;
            mix(&[seed, n]) % m
        };
        let layers: Vec<LayerShape> = (0..1 + below(2))
            .map(|_| {
                let dtypes = [below(3), below(3)].map(|i| Dtype::ALL[i as usize]);
                let (k_dim, v_dim) = (2 + below(30) as u32, 1 + below(40) as u32);
                let window = (below(3) == 0).then(|| 1 + below(60) as u32);
                let rope = (below(3) == 0).then(|| {
                    let rotary_dim = 2 * (1 + below(u64::from(k_dim / 2)) as u32);
                    Rope::new(100.0, rotary_dim).pairs([Pairs::Halves, Pairs::Neighbours][below(2) as usize])
                });
                let heads = (1 + below(2) as u32, 1 + below(4) as u32);
                shape(heads.0, heads.1, k_dim, v_dim, dtypes[0], dtypes[1]).window(window).rope(rope)
            })
            .collect();
        let experts = 1 + below(3) as u32;
        let config = config(layers, 1 + below(50) as u32, below(20) as u32)
            .sinks(below(6) as u32)
            .experts(experts, 1)
            .shards(ShardMap::sum(1 + below(2) as u32).unwrap())
            .nan_fill(below(2) == 0);
        let mut sequences = 1;
        let mut ops = vec![Op::Feed(vec![(0, 1 + below(60) as u32)])];
        for _ in 0..10 {
            let at = below(sequences) as usize;
            ops.push(match below(10) {
                0 if sequences < 3 => {
                    sequences += 1;
                    Op::Fork(at)
                }
                1 => Op::Rollback(at, below(12) as u32),
                2 => Op::Evict(at, below(5) as usize),
                3 => Op::Ask(at, 1 + below(3) as u32),
                4 => Op::Abandon(vec![(at, 1 + below(30) as u32)], below(3) as usize),
                5 => Op::Drop(at),
                _ => {
                    let drawn = (0..sequences as usize).map(|s| (s, below(2), 1 + below(25) as u32));
                    Op::Feed(drawn.filter(|d| d.1 == 0 || d.0 == at).map(|d| (d.0, d.2)).collect())
                }
            });
        }
        let options = Options::drawn(&mut below);
        same(&format!("seed {seed}, {ops:?}, {config:?}"), &standin, &Case { config, options, ops });
    }
    let (launched, executed) = (standin.get(Get::Launched), standin.get(Get::Executed));
    println!("{launched} launches, {executed} instructions");
}
