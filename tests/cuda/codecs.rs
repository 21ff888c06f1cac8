//! Codecs: pages packed alike on both back ends, and read with equal bits.

use crate::script::{Op, Options, mix, noise};
use crate::standin::Standin;
use crate::suite::{Case, check, config, decode, same, shape};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::shape::Pairs;
use pikv::{CacheConfig, Dtype, Rope};
use pikv_test::{full, scaled};

const CODES: u64 = Code::ALL.len() as u64;

/// Some map of a width, by its number: none, the transform, a selection, a matrix, one with a bias.
fn map(kind: u64, wide: u32) -> Option<Map> {
    let narrow = (wide / 2).max(1);
    let matrix = |seed| noise(&[seed, u64::from(wide)], (wide * narrow) as usize);
    match kind % 5 {
        0 => None,
        1 => Map::hadamard(wide).ok(),
        2 => Map::identity_subset(wide, &(0..narrow).map(|c| (c * 7 + 1) % wide).collect::<Vec<_>>())
            .or_else(|_| Map::identity_subset(wide, &[wide - 1]))
            .ok(),
        3 => Map::new(wide, narrow, matrix(1), matrix(2), None).ok(),
        _ => Map::new(wide, narrow, matrix(3), matrix(4), Some(noise(&[5], wide as usize))).ok(),
    }
}

fn coding(code: Code, map: Option<Map>) -> Coding {
    map.into_iter().fold(Coding::new(code), Coding::map)
}

/// A codec drawn for a head.
fn codec(draw: u64, k_dim: u32, v_dim: u32) -> Codec {
    let of = |i: u64, n: u64| mix(&[draw, i]) % n;
    let code = |i| Code::ALL[of(i, CODES) as usize];
    Codec::new(coding(code(0), map(of(2, 5), k_dim)), coding(code(1), map(of(3, 5), v_dim)))
}

fn means(code: Code, level: u32) -> Coding {
    Coding::means(code, level).unwrap()
}

fn pca(code: Code, rank: u32) -> Coding {
    Coding::block_pca(code, rank).unwrap()
}

/// The same, of which K or V may be means or in a basis of its page's own.
fn factored(draw: u64, k_dim: u32, v_dim: u32) -> Codec {
    let of = |i: u64, n: u64| mix(&[draw, i, 5]) % n;
    let factors = |i: u64, other: Coding| match of(i, 5) {
        0 | 1 => means(Code::ALL[of(i + 1, 3) as usize], 1 + of(i + 2, 3) as u32),
        2 | 3 => pca(Code::ALL[of(i + 1, CODES) as usize], 1 + of(i + 2, 31) as u32),
        _ => other,
    };
    let Codec { k, v, .. } = codec(draw, k_dim, v_dim);
    Codec::new(factors(0, k), factors(3, v))
}

#[test]
fn every_code() {
    for (i, code) in Code::ALL.into_iter().enumerate() {
        let other = Code::ALL[(i + 3) % Code::ALL.len()];
        let layers = vec![shape(1, 3, 40, 24, Dtype::Bf16, Dtype::F16)];
        let codec = Codec::new(Coding::new(code), Coding::new(other));
        let mut ops = vec![Op::Fill(vec![(0, 70)]), Op::Feed(vec![(0, 40)])];
        ops.extend(decode(3));
        check(code.name(), config(layers, 16, 0).compress(codec), ops);
    }
}

#[test]
fn every_map() {
    for rope in [None, Some(Rope::new(100.0, 12))] {
        for kind in 0..5 {
            let layers = vec![shape(2, 2, 24, 48, Dtype::F32, Dtype::Bf16).rope(rope)];
            let k = coding(Code::Int8, map(kind, 24));
            let codec = Codec::new(k, coding(Code::F16, map(kind + 1, 48)));
            let ops = vec![Op::Fill(vec![(0, 40)]), Op::Feed(vec![(0, 41)]), Op::Feed(vec![(0, 1)])];
            check("map", config(layers, 8, 3).compress(codec).sinks(2).experts(2, 1), ops);
        }
    }
}

#[test]
fn wide_heads_and_long_runs() {
    // Several groups of 32 channels, three blocks of packed pages of one expert.
    let layers = vec![shape(1, 1, 256, 160, Dtype::F32, Dtype::F32)];
    let codec = Codec::new(Coding::new(Code::Int4), coding(Code::Int4, Map::hadamard(160).ok()));
    let ops = vec![Op::Fill(vec![(0, 600)]), Op::Feed(vec![(0, 1)])];
    check("wide", config(layers, 8, 0).compress(codec), ops);
}

#[test]
fn forks_rollbacks_and_abandoned_steps_of_packed_pages() {
    let ops = vec![
        Op::Feed(vec![(0, 70)]),
        Op::Fork(0),
        Op::Feed(vec![(0, 9), (1, 30)]),
        Op::Rollback(0, 8),
        Op::Abandon(vec![(0, 40), (1, 1)], 1),
        Op::Rollback(1, 20),
        Op::Feed(vec![(0, 5), (1, 25)]),
        Op::Ask(1, 6),
        Op::Drop(0),
        Op::Feed(vec![(1, 1)]),
    ];
    let layers = vec![shape(2, 2, 16, 32, Dtype::F16, Dtype::F16); 2];
    let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
    let config =
        config(layers, 10, 20).experts(2, 1).compress_head(0, 1, int8.clone()).compress_layer(1, int8);
    check("back", config, ops);
}

#[test]
fn the_mass_of_packed_pages() {
    // Steps that pack pages, so that some rows read them packed and others unpacked.
    for (group, experts) in [(1, 1), (3, 9), (12, 2)] {
        let layers = vec![shape(1, group, 16, 16, Dtype::Bf16, Dtype::Bf16)];
        let int4 = Codec::new(Coding::new(Code::Int4), Coding::new(Code::Int8));
        let config = config(layers, 6, 4).experts(experts, 1).compress(int4);
        let ops = vec![Op::Feed(vec![(0, 90)]), Op::Feed(vec![(0, 66)]), Op::Feed(vec![(0, 1)])];
        let options = Options { mass: true, ..Options::default() };
        same("mass", &Standin::new(), &Case { config, options, ops });
    }
}

#[test]
fn means_and_bases_of_every_code() {
    for (i, code) in Code::ALL.into_iter().enumerate() {
        let other = Code::ALL[(i + 2) % Code::ALL.len()];
        let (plain, rank) = (Code::ALL[i % 3], i as u32 % 7);
        let layers = vec![shape(1, [3, 4][i % 2], 40, 24, Dtype::Bf16, Dtype::F16)];
        let mut ops = vec![Op::Fill(vec![(0, 70)]), Op::Feed(vec![(0, 40)])];
        ops.extend(decode(2));
        let codecs = [
            Codec::new(pca(code, 7), pca(other, 5)),
            Codec::new(pca(code, 3 + 4 * rank), Coding::new(other)),
            Codec::new(means(plain, 1 + i as u32 % 3), pca(other, 1 + 5 * rank)),
            Codec::new(Coding::new(code), means(plain, 1 + i as u32 % 3)),
        ];
        // Quick: each code in one of the four, each of the four with some code.
        for (_, codec) in codecs.into_iter().enumerate().filter(|(j, _)| full() || i % 4 == *j) {
            check(code.name(), config(layers.clone(), 16, 0).compress(codec), ops.clone());
        }
    }
}

#[test]
fn means_and_bases_of_wide_heads_and_of_keys_before_their_rotation() {
    let rope = Some(Rope::new(100.0, 12));
    let ops = vec![Op::Fill(vec![(0, 90)]), Op::Feed(vec![(0, 20)]), Op::Feed(vec![(0, 1)])];
    for (i, (k_dim, v_dim, rope)) in
        [(256, 160, None), (24, 256, rope), (48, 33, rope)].into_iter().enumerate()
    {
        let layers = vec![shape(1, 2, k_dim, v_dim, Dtype::F32, Dtype::Bf16).rope(rope)];
        let codecs = [
            Codec::new(pca(Code::Int8, 31), pca(Code::E5m2, 31)),
            Codec::new(means(Code::F16, 1), means(Code::F32, 3)),
            Codec::new(means(Code::Bf16, 3), means(Code::Bf16, 1)),
            Codec::new(coding(Code::Int4, map(4, k_dim)), means(Code::F16, 2)),
        ];
        for (_, codec) in codecs.into_iter().enumerate().filter(|(j, _)| full() || (i + j) % 2 == 0) {
            check("wide", config(layers.clone(), 8, 3).compress(codec).sinks(2), ops.clone());
        }
    }
}

/// Second codecs that take less than the first ones.
fn ages(k_dim: u32, v_dim: u32) -> Vec<[Codec; 2]> {
    let both = |coding: Coding| Codec::new(coding.clone(), coding);
    let matrix = Codec::new(coding(Code::F16, map(4, k_dim)), coding(Code::Int8, map(3, v_dim)));
    vec![
        [both(Coding::new(Code::Int8)), both(Coding::new(Code::Int4))],
        [both(Coding::new(Code::F32)), matrix.clone()],
        [matrix, both(means(Code::Bf16, 3))],
        [both(means(Code::F16, 1)), both(means(Code::F16, 3))],
        [both(Coding::new(Code::Bf16)), Codec::new(Coding::new(Code::Int8), pca(Code::Int8, 3))],
        [
            Codec::new(pca(Code::F16, 7), Coding::new(Code::F32)),
            Codec::new(pca(Code::Int8, 3), means(Code::F16, 2)),
        ],
    ]
}

#[test]
fn pages_packed_again_by_age() {
    for rope in [None, Some(Rope::new(100.0, 12).pairs(Pairs::Neighbours))] {
        for (i, [first, second]) in ages(32, 48).into_iter().enumerate() {
            // Quick: one pair of codecs in four without a rotation, and one with it.
            if !full() && i % 4 != usize::from(rope.is_some()) {
                continue;
            }
            let layers = vec![shape(2, 3, 32, 48, Dtype::F32, Dtype::Bf16).rope(rope)];
            // Pages of both ages in one block, some packed twice by one step, some young again after a rollback, forks apart.
            let mut ops = vec![Op::Feed(vec![(0, 70)]), Op::Feed(vec![(0, 75)]), Op::Fork(0)];
            ops.extend([Op::Rollback(0, 8), Op::Feed(vec![(0, 1), (1, 3)]), Op::Feed(vec![(0, 10)])]);
            ops.extend([Op::Abandon(vec![(0, 40), (1, 9)], 1), Op::Rollback(1, 5), Op::Ask(1, 4)]);
            ops.extend([Op::Feed(vec![(1, 30)]), Op::Drop(0), Op::Feed(vec![(1, 1)])]);
            let config = config(layers, 10, 9).experts(2, 1).nan_fill(true).compress(first).age(20, second);
            check("ages", config, ops);
        }
    }
}

#[test]
fn the_mass_of_pages_packed_again() {
    for (group, experts) in [(1, 1), (3, 2)] {
        let layers = vec![shape(1, group, 16, 16, Dtype::Bf16, Dtype::Bf16)];
        for [first, second] in ages(16, 16) {
            let config = config(layers.clone(), 6, 12).experts(experts, 1).compress(first).age(30, second);
            let ops = vec![Op::Feed(vec![(0, 90)]), Op::Feed(vec![(0, 66)]), Op::Feed(vec![(0, 1)])];
            let options = Options { mass: true, ..Options::default() };
            same("mass", &Standin::new(), &Case { config, options, ops });
        }
    }
}

/// Random caches and random acts.
#[test]
fn whatever_is_packed() {
    whatever(scaled(8, 24), 99, codec, false);
}

#[test]
fn whatever_is_factored_or_old() {
    whatever(scaled(6, 24), 98, factored, true);
}

fn whatever(seeds: u64, salt: u64, codec: fn(u64, u32, u32) -> Codec, ages: bool) {
    let standin = Standin::new();
    for seed in 0..seeds {
        let mut n = 0;
        let mut below = |m: u64| {
            n += 1;
            mix(&[seed, n, salt]) % m
        };
        let dtypes = [below(3), below(3)].map(|i| Dtype::ALL[i as usize]);
        let (k_dim, v_dim) = (2 + below(40) as u32, 1 + below(60) as u32);
        let rope = (below(3) == 0).then(|| {
            Rope::new(100.0, 2 * (1 + below(u64::from(k_dim / 2)) as u32))
                .pairs([Pairs::Halves, Pairs::Neighbours][below(2) as usize])
        });
        let window = (below(4) == 0).then(|| 1 + below(90) as u32);
        let layer = shape(1 + below(2) as u32, 1 + below(4) as u32, k_dim, v_dim, dtypes[0], dtypes[1]);
        let mut config: CacheConfig =
            config(vec![layer.rope(rope).window(window)], 1 + below(40) as u32, below(20) as u32)
                .sinks(below(4) as u32)
                .experts(1 + below(3) as u32, 1)
                .nan_fill(below(2) == 0);
        for head in 0..layer.kv_heads as usize {
            if below(5) > 0 {
                let first = codec(below(1 << 30), k_dim, v_dim);
                config = config.compress_head(0, head, first.clone());
                if ages && below(3) > 0 {
                    let second = codec(below(1 << 30), k_dim, v_dim);
                    let bytes = |codec: &Codec| codec.packed(k_dim, v_dim).bytes();
                    if bytes(&second) < bytes(&first) {
                        config = config.age_head(0, head, 1 + below(50) as u32, second);
                    }
                }
            }
        }
        let mut sequences = 1;
        let mut ops = vec![Op::Feed(vec![(0, 30 + below(60) as u32)])];
        for _ in 0..7 {
            let at = below(sequences) as usize;
            ops.push(match below(9) {
                0 if sequences < 3 => {
                    sequences += 1;
                    Op::Fork(at)
                }
                1 => Op::Rollback(at, below(20) as u32),
                2 => Op::Evict(at, below(5) as usize),
                3 => Op::Ask(at, 1 + below(3) as u32),
                4 => Op::Abandon(vec![(at, 1 + below(40) as u32)], below(2) as usize),
                _ => Op::Feed(vec![(at, 1 + below(45) as u32)]),
            });
        }
        let options = Options::drawn(&mut below);
        same(&format!("seed {seed}, {ops:?}, {config:?}"), &standin, &Case { config, options, ops });
    }
}
