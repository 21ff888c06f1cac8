//! Packed pages give the same bits in every way of reading them and of cutting their tokens into steps.

use crate::mix;
use crate::setup::{Got, Setup, bits, codec, feed_all, options, query, shape, snapshot};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::lanes::Lanes;
use pikv::report::PageMass;
use pikv::shard::ShardMap;
use pikv::{Attend, AttendOutput, Cache, Dtype, Position, Rope, Rows, Sequence};
use pikv_test::full;

const RING: u32 = 100;
const TOTAL: u32 = 420;

fn setups() -> Vec<Setup> {
    let pca = |code, rank| Coding::block_pca(code, rank).unwrap();
    let means = |code, level| Coding::means(code, level).unwrap();
    let hadamard = |dim, code| Coding::new(code).map(Map::hadamard(dim).unwrap());
    let rope = Rope::new(10_000.0, 32);
    let many = |setup: Setup| Setup { experts: 5, sinks: 3, ..setup };
    vec![
        many(Setup::new(shape(1, 3, 64, 80, Dtype::Bf16), RING, codec(Code::Int8, Code::Int4))),
        Setup {
            codecs: vec![Some(codec(Code::E4m3, Code::Int8)), None],
            ..many(Setup::new(shape(2, 4, 33, 20, Dtype::F32), RING, codec(Code::E4m3, Code::E4m3)))
        },
        many(Setup::new(
            shape(1, 1, 128, 128, Dtype::F16).window(230),
            RING,
            Codec::new(hadamard(128, Code::Int4), hadamard(128, Code::Int8)),
        )),
        Setup::new(
            shape(1, 8, 48, 160, Dtype::F32).rope(rope),
            RING,
            Codec::new(hadamard(48, Code::Int4), Coding::new(Code::E5m2)),
        ),
        Setup::new(shape(1, 2, 64, 32, Dtype::F32), RING, codec(Code::Bf16, Code::F16)),
        Setup {
            codecs: vec![Some(codec(Code::Int2, Code::Int5)), Some(codec(Code::Int6, Code::Int3))],
            ..many(Setup::new(shape(2, 4, 33, 80, Dtype::F16), RING, codec(Code::Int2, Code::Int2)))
        },
        Setup::new(
            shape(1, 3, 48, 20, Dtype::F32).rope(rope),
            RING,
            Codec::new(hadamard(48, Code::Int3), pca(Code::Int6, 9)),
        ),
        Setup {
            codecs: vec![Some(codec(Code::Mxfp4, Code::Nvfp4)), Some(codec(Code::Nvfp4, Code::Mxfp4))],
            ..many(Setup::new(shape(2, 4, 80, 33, Dtype::Bf16), RING, codec(Code::Mxfp4, Code::Mxfp4)))
        },
        Setup::new(
            shape(1, 3, 48, 20, Dtype::F32).rope(rope),
            RING,
            Codec::new(pca(Code::Nvfp4, 20), pca(Code::Mxfp4, 9)),
        ),
        many(Setup::new(
            shape(1, 4, 64, 80, Dtype::Bf16),
            RING,
            Codec::new(pca(Code::Int8, 7), pca(Code::F16, 5)),
        )),
        many(Setup::new(
            shape(1, 3, 48, 20, Dtype::F32).rope(rope),
            RING,
            Codec::new(pca(Code::E4m3, 12), pca(Code::Int4, 9)),
        )),
        many(Setup::new(
            shape(1, 4, 64, 33, Dtype::F16).window(230),
            RING,
            Codec::new(means(Code::F16, 1), means(Code::F32, 3)),
        )),
        Setup::new(
            shape(1, 1, 33, 128, Dtype::F32).rope(rope),
            RING,
            Codec::new(means(Code::Bf16, 2), means(Code::Bf16, 1)),
        ),
        Setup {
            age: Some((60, Codec::new(hadamard(64, Code::Int4), pca(Code::Int8, 7)))),
            ..many(Setup::new(shape(1, 4, 64, 80, Dtype::Bf16), RING, codec(Code::Int8, Code::Int8)))
        },
        Setup {
            age: Some((33, codec(Code::Int4, Code::Int4))),
            ..many(Setup::new(
                shape(1, 3, 48, 20, Dtype::F32).rope(rope).window(250),
                RING,
                codec(Code::Int8, Code::E4m3),
            ))
        },
    ]
}

#[derive(Clone, Copy)]
enum Cut {
    Every(u32),
    Mixed(u64),
}

impl Cut {
    fn next(self, at: u32) -> u32 {
        match self {
            Cut::Every(n) => n,
            Cut::Mixed(salt) => 1 + (mix(&[salt, u64::from(at)]) % u64::from(RING)) as u32,
        }
    }
}

/// Bits of all rows, `[row]` of one vector.
type Bits = Vec<Vec<u32>>;

fn split_rows(setup: &Setup, got: &Got, into: &mut Bits) {
    let heads = setup.layer.query_heads as usize;
    let v_dim = setup.layer.layout.v_dim as usize;
    let rows = got.out.chunks(heads * v_dim).zip(got.lse.chunks(heads));
    into.extend(rows.map(|(out, lse)| bits(&[out, lse].concat())));
}

fn run(setup: &Setup, cut: Cut, options: &Attend) -> (Bits, Sequence) {
    let cache = setup.cache();
    let (mut sequence, mut all) = (cache.sequence(), vec![]);
    while sequence.next_position().0 < TOTAL {
        let at = sequence.next_position().0;
        let ids = (at..TOTAL.min(at + cut.next(at))).map(u64::from).collect();
        let got = feed_all(setup, &cache, &mut [(&mut sequence, ids)], options, false);
        split_rows(setup, &got[0], &mut all);
    }
    (all, sequence)
}

#[track_caller]
fn same(want: &Bits, got: &Bits, what: &str) {
    assert_eq!(want.len(), got.len());
    for (p, (want, got)) in want.iter().zip(got).enumerate() {
        assert_eq!(want, got, "{what}: row {p}");
    }
}

fn lanes() -> Vec<Lanes> {
    Lanes::available().collect()
}

#[test]
fn however_tokens_are_cut_into_steps() {
    for (s, setup) in setups().into_iter().enumerate() {
        let options = options(&setup);
        let (want, whole) = run(&setup, Cut::Every(1), &options);
        let cuts = [Cut::Every(7), Cut::Every(32), Cut::Every(33), Cut::Every(RING), Cut::Mixed(5)];
        for (i, cut) in cuts.into_iter().enumerate() {
            for (j, slack) in [0, 1, 45].into_iter().enumerate() {
                // Quick: each cut with one of the three, each of them with some cut.
                if !full() && (s + i + j) % 3 != 0 {
                    continue;
                }
                let lanes = lanes();
                let lanes = lanes[(i + slack as usize) % lanes.len()];
                let setup = Setup { rollback: slack, lanes, ..setup.clone() };
                let (got, sequence) = run(&setup, cut, &options);
                same(&want, &got, &format!("setup {s}, cut {i}, slack {slack}, {}", lanes.name()));
                let read = |sequence: &Sequence| -> Vec<_> {
                    let all = snapshot(&setup, sequence).into_iter();
                    all.filter(|(page, _)| page.packed)
                        .map(|(page, tokens)| (page.id, page.bytes, tokens))
                        .collect()
                };
                if slack == 0 {
                    assert_eq!(read(&whole), read(&sequence));
                }
            }
        }
    }
}

#[test]
fn lanes_threads_splits_and_shards() {
    for (s, setup) in setups().into_iter().enumerate() {
        let setup = Setup { lanes: Lanes::Portable, ..setup };
        let plain = options(&setup);
        let (want, _) = run(&setup, Cut::Mixed(1), &plain);
        for (i, lanes) in lanes().into_iter().enumerate() {
            for (j, shards) in [1, 2, 4, 8].into_iter().enumerate() {
                let setup = Setup {
                    lanes,
                    shards: ShardMap::sum(shards).unwrap(),
                    rollback: 20 * (j as u32 % 2),
                    ..setup.clone()
                };
                let options = match (i + j) % 3 {
                    0 => plain,
                    split => plain.split(split as u32),
                };
                let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + j % 2).build().unwrap();
                let (got, _) = pool.install(|| run(&setup, Cut::Mixed(2 + j as u64), &options));
                same(&want, &got, &format!("setup {s}, {shards} shards, {}", lanes.name()));
            }
        }
    }
}

#[test]
fn batches_of_sequences() {
    for setup in setups() {
        let setup = Setup { rollback: 10, ..setup };
        let (options, cache) = (options(&setup), setup.cache());
        let (want, _) = run(&setup, Cut::Every(1), &options);
        // The same tokens in three sequences at different speeds, one of them a fork.
        let (mut a, mut b) = (cache.sequence(), cache.sequence());
        let mut c: Option<Sequence> = None;
        let mut rows: [Bits; 3] = Default::default();
        for i in 0.. {
            let ids = |s: &Sequence, n: u32| {
                (s.next_position().0..TOTAL.min(s.next_position().0 + n)).map(u64::from).collect::<Vec<_>>()
            };
            let c_ids = c.as_ref().map(|c| ids(c, 61));
            let mut parts = vec![(ids(&a, 13), 0, &mut a), (ids(&b, 1 + i % 70), 1, &mut b)];
            if let (Some(c), Some(ids)) = (c.as_mut(), c_ids) {
                parts.push((ids, 2, c));
            }
            parts.retain(|(ids, ..)| !ids.is_empty());
            if parts.is_empty() {
                break;
            }
            let order: Vec<(usize, usize)> = parts.iter().map(|(ids, i, _)| (ids.len(), *i)).collect();
            let mut parts: Vec<_> = parts.into_iter().map(|(ids, _, s)| (s, ids)).collect();
            let got = feed_all(&setup, &cache, &mut parts, &options, false);
            let mut all = vec![];
            split_rows(&setup, &got[0], &mut all);
            for (n, i) in order {
                rows[i].extend(all.drain(..n));
            }
            if c.is_none() && a.next_position().0 > 150 {
                rows[2] = rows[0].clone();
                c = Some(a.fork());
            }
        }
        rows.iter().for_each(|rows| same(&want, rows, "a batch"));
    }
}

/// Rows that are attended outside a step, back to the oldest that can be, have the bits that they had in the step.
#[test]
fn older_rows_asked_again() {
    for setup in setups() {
        let setup = Setup { rollback: 50, ..setup };
        let options = options(&setup);
        let (want, _) = run(&setup, Cut::Every(33), &options);
        let cache = setup.cache();
        let mut sequence = cache.sequence();
        while sequence.next_position().0 < TOTAL {
            // One by one where the oldest row may be the first that reads a page packed.
            let at = sequence.next_position().0;
            let n = if at < 150 { 50 } else { 1 };
            feed_all(
                &setup,
                &cache,
                &mut [(&mut sequence, (at..at + n).map(u64::from).collect())],
                &options,
                false,
            );
            let (len, limit) = (at + n, sequence.rollback_limit());
            let first = (len - 1).saturating_sub(limit);
            assert!(limit == 50 || len <= 150);
            let rows = if len == TOTAL { len - first } else { 2 };
            let got = ask(&setup, &cache, &sequence, first, rows, &options);
            same(&want[first as usize..(first + rows) as usize].to_vec(), &got, &format!("asked at {len}"));
        }
    }
}

fn ask(setup: &Setup, cache: &Cache, sequence: &Sequence, first: u32, n: u32, options: &Attend) -> Bits {
    let q: Vec<f32> = (first..first + n).flat_map(|p| query(setup, 0, u64::from(p))).collect();
    let rows = (n * setup.layer.query_heads) as usize;
    let v_dim = setup.layer.layout.v_dim as usize;
    let mut got = Got { out: vec![f32::NAN; rows * v_dim], lse: vec![f32::NAN; rows], mass: vec![] };
    let all = [Rows::new(sequence, Position(first), n)];
    let output = AttendOutput::new(&mut got.out).lse(&mut got.lse).mass(&mut got.mass);
    cache.attend(0, &all, &q, options, output).unwrap();
    let mut bits = vec![];
    split_rows(setup, &got, &mut bits);
    bits
}

/// Runs steps of several lengths: the mass of each, and the sequence.
fn run_in(setup: &Setup, cache: &Cache, options: &Attend) -> (Vec<Vec<PageMass>>, Sequence) {
    let (mut sequence, mut mass) = (cache.sequence(), vec![]);
    while sequence.next_position().0 < TOTAL {
        let at = sequence.next_position().0;
        let ids = (at..TOTAL.min(at + Cut::Mixed(3).next(at))).map(u64::from).collect();
        mass.push(feed_all(setup, cache, &mut [(&mut sequence, ids)], options, true).remove(0).mass);
    }
    (mass, sequence)
}

#[test]
fn mass() {
    for setup in setups() {
        let bits = |mass: Vec<Vec<PageMass>>| -> Vec<_> {
            let one = |m: PageMass| ((m.kv_head, m.page), bits(&m.tokens));
            mass.into_iter().map(|step| step.into_iter().map(one).collect::<Vec<_>>()).collect()
        };
        let setup = Setup { lanes: Lanes::Portable, ..setup };
        let options = options(&setup);
        let want: Vec<Vec<_>> = bits(run_in(&setup, &setup.cache(), &options).0);
        for (i, lanes) in lanes().into_iter().enumerate() {
            // With slack the ring lists tokens that left it: their weight is 0.
            let setup = Setup { lanes, shards: ShardMap::sum(1 << i).unwrap(), ..setup.clone() };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + i % 2).build().unwrap();
            let got = pool.install(|| bits(run_in(&setup, &setup.cache(), &options.split(1)).0));
            assert_eq!(want, got, "{}", lanes.name());
            let slack = Setup { rollback: 37, ..setup };
            let got = bits(run_in(&slack, &slack.cache(), &options).0);
            for (want, got) in want.iter().zip(&got) {
                for page in got {
                    match want.iter().find(|w| w.0 == page.0) {
                        Some(want) => assert_eq!(want, page),
                        None => assert_eq!(page.1, [0; 32], "{:?}", page.0),
                    }
                }
            }
        }
    }
}
