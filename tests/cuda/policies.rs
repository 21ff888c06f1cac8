//! Policies: evictions and compactions are the same on both back ends, and so are later reads.

use crate::script::{Op, Options, mix};
use crate::standin::{Get, Standin};
use crate::suite::{Case, check, config, decode, same, shape};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{
    AdaKvLit, Budget, Chunks, DuoLit, Eviction, ExpectedAttention, FastVReceived, H2o, KeyNorm, Lru, LruPlus,
    SnapKv, StreamingLlm, Tova,
};
use pikv::shape::Pairs;
use pikv::{CacheConfig, Dtype, LayerShape, Rope};
use std::num::NonZeroU32;

/// Every policy, at a budget.
fn rules(budget: &Budget) -> Vec<(&'static str, Eviction)> {
    let of = |eviction: fn(Budget) -> Eviction| eviction(budget.clone());
    vec![
        ("LRU", of(|b| Eviction::new(Lru::default(), b))),
        ("LRU+", of(|b| Eviction::new(LruPlus::default(), b))),
        ("H2O", of(|b| Eviction::new(H2o, b))),
        ("SL", of(|b| Eviction::new(StreamingLlm, b))),
        ("SnapKV", of(|b| Eviction::new(SnapKv::default(), b))),
        ("TOVA", of(|b| Eviction::new(Tova, b))),
        ("key norm", of(|b| Eviction::new(KeyNorm, b))),
        // It reads keys and values to rank them.
        ("expected attention", of(|b| Eviction::new(ExpectedAttention::new(None, false), b))),
        ("AdaKV-lit", of(|b| Eviction::new(AdaKvLit::default(), b))),
        ("AdaKV", of(|b| Eviction::new(SnapKv::default(), b).adaptive(0.2))),
        ("Duo-lit", of(|b| Eviction::new(DuoLit, b))),
        ("ChunkKV", of(|b| Eviction::new(Chunks::new(H2o, NonZeroU32::new(5).unwrap()), b))),
        ("FastV", of(|b| Eviction::new(FastVReceived, b))),
        ("by page", of(|b| Eviction::new(H2o, b).by_page())),
    ]
}

fn layers(dtype: Dtype) -> Vec<LayerShape> {
    vec![shape(2, 2, 6, 5, dtype, Dtype::F32); 2]
}

#[test]
fn every_policy() {
    for (name, rule) in rules(&Budget::Tokens(40)) {
        let config =
            config(layers(Dtype::Bf16), 8, 0).sinks(2).experts(2, 1).nan_fill(true).evict(rule.batch(3));
        let mut ops = vec![Op::Feed(vec![(0, 60)]), Op::Pin(0, 30, 36), Op::Feed(vec![(0, 20)])];
        ops.extend(decode(25));
        check(name, config, ops);
    }
}

#[test]
fn thinned_pages_are_put_together() {
    let standin = Standin::new();
    for (rollback, bounds) in [(0, false), (0, true), (6, false)] {
        let config = config(layers(Dtype::F16), 5, rollback)
            .key_bounds(bounds)
            .evict(Eviction::new(H2o, Budget::Tokens(70)).batch(12));
        let ops = vec![
            Op::Feed(vec![(0, 100)]),
            Op::Feed(vec![(0, 30)]),
            Op::Fork(0),
            Op::Feed(vec![(0, 40), (1, 5)]),
            Op::Rollback(0, 4),
            Op::Feed(vec![(0, 20), (1, 60)]),
            Op::Ask(1, 1),
        ];
        let options = Options { mass: true, ..Options::default() };
        let launched = standin.get(Get::Launched);
        same("together", &standin, &Case { config, options, ops });
        assert!(standin.get(Get::Launched) > launched);
    }
}

#[test]
fn pages_chosen_by_their_bounds() {
    for rope in [None, Some(Rope::new(100.0, 4).pairs(Pairs::Neighbours))] {
        for codec in [None, Some(Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4)))] {
            let layers = vec![shape(2, 3, 40, 8, Dtype::Bf16, Dtype::Bf16).rope(rope)];
            let config = config(layers, 8, 3).key_bounds(true).experts(2, 1);
            let config = codec.into_iter().fold(config, CacheConfig::compress);
            let ops = vec![
                Op::Feed(vec![(0, 130)]),
                Op::Feed(vec![(0, 3)]),
                Op::Rollback(0, 3),
                Op::Feed(vec![(0, 40)]),
                Op::Ask(0, 2),
            ];
            for quest in [1, 2] {
                let options = Options { quest, mass: quest == 1, ..Options::default() };
                same("quest", &Standin::new(), &Case { config: config.clone(), options, ops: ops.clone() });
            }
        }
    }
}

#[test]
fn policies_over_factors_and_old_pages() {
    let plain = |code| Codec::new(Coding::new(code), Coding::new(code));
    let pca = || Coding::block_pca(Code::Int8, 3).unwrap();
    let means = |level| Coding::means(Code::F16, level).unwrap();
    let codecs = [
        (true, plain(Code::F32), Codec::new(Coding::new(Code::Int8), pca())),
        (true, plain(Code::Int8), plain(Code::Int4)),
        (false, Codec::new(means(1), means(1)), Codec::new(means(2), means(3))),
    ];
    for (single, first, second) in codecs {
        for (name, rule) in rules(&Budget::Tokens(60)) {
            // Policies that read the tokens they rank, policies that observe masses, and whole pages.
            let all = ["key norm", "expected attention", "H2O", "by page"].contains(&name);
            if !all || !single && name != "by page" {
                continue;
            }
            let config = config(vec![shape(2, 2, 16, 24, Dtype::Bf16, Dtype::F32)], 8, 5)
                .experts(2, 1)
                .nan_fill(true)
                .compress(first.clone())
                .age(24, second.clone())
                .evict(rule.batch(3));
            let ops = vec![
                Op::Feed(vec![(0, 90)]),
                Op::Feed(vec![(0, 40)]),
                Op::Rollback(0, 5),
                Op::Feed(vec![(0, 30)]),
                Op::Feed(vec![(0, 1)]),
            ];
            check(name, config, ops);
        }
    }
}

/// Random rules over random caches.
#[test]
fn whatever_goes() {
    let standin = Standin::new();
    for seed in 0..16u64 {
        let mut n = 0;
        let mut below = |m: u64| {
            n += 1;
            mix(&[seed, n, 7]) % m
        };
        let dtype = Dtype::ALL[below(3) as usize];
        let window = (below(4) == 0).then(|| 20 + below(60) as u32);
        let layer = shape(1 + below(2) as u32, 1 + below(3) as u32, 6, 9, dtype, dtype).window(window);
        let mut of = rules(&Budget::Tokens(30 + below(30) as u32));
        let (name, rule) = of.swap_remove(below(14) as usize);
        let mut config = config(vec![layer; 2], 1 + below(12) as u32, below(8) as u32)
            .sinks(below(3) as u32)
            .experts(1 + below(3) as u32, 1)
            .key_bounds(below(2) == 0)
            .nan_fill(true)
            .evict(rule);
        if below(2) == 0 {
            config = config.compress_layer(1, Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8)));
        }
        let mut ops = vec![Op::Feed(vec![(0, 40 + below(60) as u32)])];
        for _ in 0..8 {
            ops.push(match below(6) {
                0 => Op::Rollback(0, below(8) as u32),
                1 => Op::Abandon(vec![(0, 1 + below(30) as u32)], below(3) as usize),
                2 => Op::Pin(0, below(40) as u32, below(80) as u32),
                _ => Op::Feed(vec![(0, 1 + below(30) as u32)]),
            });
        }
        let options = Options { mass: below(3) == 0, ..Options::default() };
        same(&format!("{name}, seed {seed}, {ops:?}"), &standin, &Case { config, options, ops });
    }
}
