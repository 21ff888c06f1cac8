//! Reads after evictions: every form of reading compared with attention in f64, and bit for bit across lanes, threads, shards and splits.

use crate::model::Def;
use crate::setup::{Kind, Row, attention, bits, close, config, eviction, held, rope, row, run, turned};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::lanes::Lanes;
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, StreamingLlm};
use pikv::report::{PageId, Place};
use pikv::shape::PAGE;
use pikv::shard::ShardMap;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ReadPages, Sequence};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn rows(config: &CacheConfig, from: u32, n: u32) -> Vec<Row> {
    (from..from + n).map(|p| row(config, Kind::Noise, u64::from(p))).collect()
}

/// Feeds steps of these lengths; all rows, and the outputs of the last step.
fn fill(
    cache: &Cache,
    sequence: &mut Sequence,
    steps: &[u32],
    options: &Attend,
) -> (Vec<Row>, Vec<Vec<f32>>) {
    let (mut all, mut outs) = (Vec::new(), Vec::new());
    for n in steps {
        let new = rows(cache.config(), all.len() as u32, *n);
        outs.clear();
        run(cache, sequence, &new, |step, l, q, size| {
            let mut out = vec![0.0; size];
            step.attend(l, q, options, AttendOutput::new(&mut out)).unwrap();
            outs.push(out);
        });
        all.extend(new);
    }
    (all, outs)
}

/// Attention in f64 of the row at `p`, one query head, over tokens at `seen`, with keys rotated to the positions from `at`.
fn oracle(
    config: &CacheConfig,
    all: &[Row],
    l: usize,
    p: u32,
    head: usize,
    seen: &[u32],
    at: impl Fn(u32) -> f64,
) -> Vec<f64> {
    let shape = &config.layers[l];
    let h = head / shape.group() as usize;
    let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
    let token = |t: &u32| {
        let row = &all[*t as usize];
        let value = row.v[l][h * v_dim..][..v_dim].iter().map(|x| f64::from(*x)).collect();
        (turned(&row.k[l][h * k_dim..][..k_dim], shape.rope.as_ref(), at(*t)), value)
    };
    let tokens: Vec<(Vec<f64>, Vec<f64>)> = seen.iter().map(token).collect();
    let query = &all[p as usize].q[l][head * k_dim..][..k_dim];
    attention(&turned(query, shape.rope.as_ref(), at(p)), &tokens, 0.5).0
}

/// Attention of one more row over every layer, outside a step.
fn ask(cache: &Cache, sequence: &Sequence, options: &Attend) -> Vec<u32> {
    let p = sequence.next_position();
    let mut all = Vec::new();
    for l in 0..cache.config().layers.len() {
        let q = row(cache.config(), Kind::Noise, 1 << 40).q[l].clone();
        let (mut out, mut mass) = (vec![0.0; 12], Vec::new());
        let rows = [pikv::Rows::new(sequence, p, 1)];
        cache.attend(l, &rows, &q, options, AttendOutput::new(&mut out).mass(&mut mass)).unwrap();
        all.extend(bits(&out));
        all.extend(mass.iter().flat_map(|page| bits(&page.tokens)));
    }
    all
}

/// A store with all kinds of pages: expert pages thinned out and put together, packed ones, turned ones.
fn mixed(def: Def, lanes: Lanes, shards: u32) -> Cache {
    let mut config = config(3).ring(8).experts(4, 2).rollback(3).key_bounds(true).lanes(lanes);
    config.layers[1].rope = Some(rope(2));
    config.layers[2].window = Some(120);
    let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4));
    config = config.compress_head(0, 1, int8).compress_head(
        1,
        0,
        Codec::new(Coding::new(Code::Int8).map(Map::hadamard(4).unwrap()), Coding::new(Code::Int8)),
    );
    if shards > 1 {
        config = config.shards(ShardMap::sum(shards).unwrap());
    }
    Cache::new(config.evict(eviction(def.policy(), Budget::Tokens(150)))).unwrap()
}

#[test]
fn the_same_bits_on_all_lanes_threads_shards_and_splits() {
    for def in [Def::H2o, Def::KeyNorm, Def::Lru] {
        let steps = [90, 40, 1, 30, 7, 50, 1, 1, 8, 8, 60];
        let reads = [ReadPages::All, ReadPages::Quest { pages: 2 }];
        let play = |cache: &Cache, options: &dyn Fn(Attend) -> Attend| {
            let mut got = Vec::new();
            for read in reads {
                let mut sequence = cache.sequence();
                let options = options(Attend::new(0.5).read(read));
                let (_, outs) = fill(cache, &mut sequence, &steps, &options);
                got.extend(outs.iter().flat_map(|out| bits(out)));
                got.extend(ask(cache, &sequence, &options));
                for (l, h) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                    got.extend(held(&sequence, l, h));
                }
            }
            got
        };
        let want = play(&mixed(def, Lanes::Portable, 1), &|o| o);
        for lanes in Lanes::available() {
            for shards in [1, 2, 4] {
                let cache = mixed(def, lanes, shards);
                assert_eq!(play(&cache, &|o| o), want, "{def:?} {lanes:?} {shards}");
                assert_eq!(play(&cache, &|o| o.split(1)), want);
            }
        }
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        for n in [1, 3] {
            assert_eq!(pool(n).install(|| play(&mixed(def, Lanes::detect(), 2), &|o| o)), want);
        }
    }
}

#[test]
fn attention_after_eviction_is_that_over_what_is_held() {
    let codec = |code| Codec::new(Coding::new(code), Coding::new(code));
    for (i, def) in crate::model::ALL.into_iter().enumerate() {
        for packed in [false, true] {
            for by_page in [false, true] {
                let mut config = config(2).ring(8).experts(1 + i as u32 % 3, 1);
                config.layers[1].rope = Some(rope([2, 4][i % 2]));
                config.layers[0].window = Some(70);
                if packed {
                    config = config.compress(codec(Code::Int8));
                }
                let mut rule = eviction(def.policy(), Budget::Tokens(80));
                rule.by_page = by_page;
                let cache = Cache::new(config.evict(rule)).unwrap();
                let mut sequence = cache.sequence();
                let options = Attend::new(0.5);
                let (mut all, _) = fill(&cache, &mut sequence, &[60, 40, 1, 7, 30], &options);
                for _ in 0..12 {
                    let p = all.len() as u32;
                    let kept: Vec<Vec<BTreeSet<u32>>> =
                        (0..2).map(|l| (0..2).map(|h| held(&sequence, l, h)).collect()).collect();
                    all.extend(rows(cache.config(), p, 1));
                    let one = [all[p as usize].clone()];
                    run(&cache, &mut sequence, &one, |step, l, q, size| {
                        let mut out = vec![0.0; size];
                        step.attend(l, q, &options, AttendOutput::new(&mut out)).unwrap();
                        for head in 0..4 {
                            let window =
                                cache.config().layers[l].window.map_or(0, |w| (p + 1).saturating_sub(w));
                            let mut seen: Vec<u32> = kept[l][head / 2].iter().copied().collect();
                            seen.retain(|t| *t >= window || *t < 2);
                            seen.push(p);
                            let want = oracle(cache.config(), &all, l, p, head, &seen, f64::from);
                            close(&out[head * 3..][..3], &want, if packed { 0.02 } else { 1e-5 });
                        }
                    });
                }
            }
        }
    }
}

#[test]
fn streaming_with_positions_inside_the_cache() {
    for (window, rotary, n) in [(None, 4, 1), (None, 2, 3), (Some(12), 4, 1), (Some(9), 2, 2)] {
        let mut config = config(1).ring(6).sinks(3);
        config.layers[0].rope = Some(rope(rotary));
        config.layers[0].window = window;
        let rule = Eviction::new(StreamingLlm, Budget::Tokens(20)).batch(1);
        let cache = Cache::new(config.evict(rule)).unwrap();
        let mut sequence = cache.sequence();
        let options = Attend::new(0.5).closed_gaps(true);
        let mut all: Vec<Row> = Vec::new();
        for _ in 0..60 / n {
            let (p, kept) = (all.len() as u32, held(&sequence, 0, 0));
            let new = rows(cache.config(), p, n);
            all.extend(new.clone());
            run(&cache, &mut sequence, &new, |step, l, q, size| {
                let mut out = vec![0.0; size];
                step.attend(l, q, &options, AttendOutput::new(&mut out)).unwrap();
                for (i, got) in out.chunks_exact(3).enumerate() {
                    let (row, head) = (p + i as u32 / 4, i % 4);
                    let mut seen: Vec<u32> = kept.iter().copied().chain(p..=row).collect();
                    let from = window.map_or(0, |w| (row + 1).saturating_sub(w));
                    seen.retain(|t| *t >= from || *t < 3);
                    // Positions are indices in the list of visible tokens.
                    let place = |t: u32| seen.iter().position(|s| *s == t).unwrap() as f64;
                    close(got, &oracle(cache.config(), &all, l, row, head, &seen, place), 2e-5);
                }
            });
        }
        if window.is_none() {
            assert_eq!(held(&sequence, 0, 1), (0..3).chain(43..60).collect());
        }
    }
}

#[test]
fn streaming_past_what_a_model_was_trained_on() {
    // Shifting all positions but the sinks' changes nothing where gaps are closed: 20 tokens held of 40 or of 400.
    let mut config = config(1).ring(6).sinks(3);
    config.layers[0].rope = Some(rope(4));
    let cache = Cache::new(config.evict(Eviction::new(StreamingLlm, Budget::Tokens(20)).batch(1))).unwrap();
    let options = Attend::new(0.5).closed_gaps(true);
    let last = |len: u32| {
        let mut sequence = cache.sequence();
        let mut out = Vec::new();
        for p in 0..len {
            // The same last 20 tokens and the same sinks.
            let id = if p < 3 { p } else { 1000 + len - p };
            let one = [row(cache.config(), Kind::Noise, u64::from(id))];
            run(&cache, &mut sequence, &one, |step, l, q, size| {
                out = vec![0.0; size];
                step.attend(l, q, &options, AttendOutput::new(&mut out)).unwrap();
            });
        }
        out
    };
    close(&last(400), &last(40).iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 2e-5);
}

#[test]
fn rows_read_the_pages_of_their_experts() {
    for (experts, top_k) in [(1, 1), (4, 1), (4, 2), (3, 3), (20, 2)] {
        let config = config(2).ring(6).experts(experts, top_k).rollback(2);
        let cache = Cache::new(config.evict(Eviction::new(H2o, Budget::Tokens(70)))).unwrap();
        let mut sequence = cache.sequence();
        let mut all: Vec<Row> = Vec::new();
        let mut hidden = 0;
        for n in [50, 20, 1, 1, 9, 30, 1, 4, 4, 1] {
            let p = all.len() as u32;
            let kept: Vec<Vec<BTreeSet<u32>>> =
                (0..2).map(|l| (0..2).map(|h| held(&sequence, l, h)).collect()).collect();
            let new = rows(cache.config(), p, n);
            all.extend(new.clone());
            run(&cache, &mut sequence, &new, |step, l, q, size| {
                let mut out = vec![0.0; size];
                step.attend(l, q, &Attend::new(0.5).read(ReadPages::Experts), AttendOutput::new(&mut out))
                    .unwrap();
                for (i, got) in out.chunks_exact(3).enumerate() {
                    let (row, head) = (p + i as u32 / 4, i % 4);
                    let mine = &all[row as usize].experts[l];
                    let of = |t: &u32| mine.contains(&all[*t as usize].experts[l][0]);
                    // Tokens that were not filed when the step's keys were appended are read in the ring.
                    let ring = (row + 1).saturating_sub(6).min((p + n).saturating_sub(6).min(p));
                    let mut seen: Vec<u32> = kept[l][head / 2].iter().copied().chain(p..=row).collect();
                    let before = seen.len();
                    seen.retain(|t| *t < 2 || *t >= ring || of(t));
                    hidden += before - seen.len();
                    close(got, &oracle(cache.config(), &all, l, row, head, &seen, f64::from), 1e-5);
                }
            });
        }
        assert_eq!(hidden == 0, experts == top_k);
    }
}

#[test]
fn all_pages_of_quest_are_everything() {
    for (experts, packed) in [(1, false), (3, false), (3, true)] {
        let mut config = config(2).ring(6).experts(experts, 1).key_bounds(true);
        config.layers[1].rope = Some(rope(2));
        if packed {
            config = config.compress(Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8)));
        }
        let cache = Cache::new(config.evict(Eviction::new(KeyNorm, Budget::Tokens(140)))).unwrap();
        let play = |read: ReadPages| {
            let mut sequence = cache.sequence();
            let mut outs = Vec::new();
            for n in [150, 1, 1, 40, 3] {
                let new = rows(cache.config(), sequence.next_position().0, n);
                run(&cache, &mut sequence, &new, |step, l, q, size| {
                    let mut out = vec![0.0; size];
                    step.attend(l, q, &Attend::new(0.5).read(read), AttendOutput::new(&mut out)).unwrap();
                    outs.extend(bits(&out));
                });
            }
            outs
        };
        assert_eq!(play(ReadPages::Quest { pages: 1000 }), play(ReadPages::All));
        assert_ne!(play(ReadPages::Quest { pages: 1 }), play(ReadPages::All));
    }
}

/// The bound of a page of keys under a query, at least, as f64 has it: pairs that turn count with their lengths.
fn quest_bound(config: &CacheConfig, keys: &[Vec<f32>], query: &[f32]) -> f64 {
    let turn = config.layers[0].rope;
    let mut sum = 0.0;
    let mut turns = vec![false; query.len()];
    for i in 0..turn.map_or(0, |r| r.rotary_dim as usize / 2) {
        let (a, b) = turn.unwrap().pair(i);
        let long = |x: &[f32]| f64::from(x[a]).hypot(f64::from(x[b]));
        sum += long(query) * keys.iter().map(|k| long(k)).fold(0.0, f64::max);
        (turns[a], turns[b]) = (true, true);
    }
    for c in (0..query.len()).filter(|c| !turns[*c]) {
        let of = keys.iter().map(|k| f64::from(query[c]) * f64::from(k[c]));
        sum += of.fold(f64::NEG_INFINITY, f64::max);
    }
    sum
}

#[test]
fn quest_reads_the_pages_with_the_highest_bounds() {
    for rotary in [0, 2, 4] {
        let mut config = config(1).ring(6).experts(2, 1).key_bounds(true);
        config.layers[0].rope = (rotary > 0).then(|| rope(rotary));
        let cache = Cache::new(config.evict(Eviction::new(KeyNorm, Budget::Tokens(200)))).unwrap();
        let mut sequence = cache.sequence();
        let (all, _) = fill(&cache, &mut sequence, &[120, 100, 30, 30, 1], &Attend::new(0.5));
        for asked in 0..5 {
            let p = sequence.next_position();
            let q = row(cache.config(), Kind::Noise, (1 << 40) + asked).q[0].clone();
            let (mut out, mut mass) = (vec![0.0; 12], Vec::new());
            let rows = [pikv::Rows::new(&sequence, p, 1)];
            let options = Attend::new(0.5).read(ReadPages::Quest { pages: 2 });
            cache.attend(0, &rows, &q, &options, AttendOutput::new(&mut out).mass(&mut mass)).unwrap();
            for h in 0..2 {
                let mut bounds: Vec<(f64, PageId)> = Vec::new();
                let mut open = BTreeSet::new();
                for page in
                    sequence.pages(0, h).unwrap().filter(|page| matches!(page.id.place, Place::Run(_)))
                {
                    let tokens: Vec<(u32, u32)> =
                        sequence.positions(0, h, page.id).unwrap().map(|(lane, p)| (lane, p.0)).collect();
                    if tokens.last().unwrap().0 < PAGE - 1 {
                        open.insert(page.id);
                        continue;
                    }
                    let keys: Vec<Vec<f32>> =
                        tokens.iter().map(|(_, p)| all[*p as usize].k[0][h * 4..][..4].to_vec()).collect();
                    let most = (0..2).map(|i| quest_bound(cache.config(), &keys, &q[(h * 2 + i) * 4..][..4]));
                    bounds.push((most.fold(f64::NEG_INFINITY, f64::max), page.id));
                }
                assert!(bounds.len() > 3, "{bounds:?}");
                bounds.sort_by(|a, b| b.0.total_cmp(&a.0));
                let want: BTreeSet<PageId> = bounds[..2].iter().map(|b| b.1).chain(open).collect();
                let got: BTreeSet<PageId> = mass
                    .iter()
                    .filter(|page| page.kv_head == h && matches!(page.page.place, Place::Run(_)))
                    .map(|page| page.page)
                    .collect();
                assert_eq!(got, want);
            }
        }
    }
}

proptest! {
    #![proptest_config(pikv_test::cases(48, 48))]
    /// No score of a page passes its bound, in f64 or as attention computes it: the bound is that of pikv_core itself.
    #[test]
    fn no_score_passes_its_bound(
        seed in any::<u64>(),
        k_dim in 1u32..=70,
        rotary in 0u32..=35,
        size in -20i32..20,
        neighbours in any::<bool>(),
    ) {
        use pikv_core::{bound, portable::Portable, rope::Rope, warp::LANES};
        let rotary = (2 * rotary).min(k_dim / 2 * 2);
        let pairs = if neighbours { pikv::shape::Pairs::Neighbours } else { pikv::shape::Pairs::Halves };
        let turn = (rotary > 0).then_some(Rope::new(10_000.0, rotary).pairs(pairs));
        let n = k_dim as usize;
        let scale = 2f32.powi(size);
        let keys: Vec<Vec<f32>> = (0..32)
            .map(|i| crate::setup::noise(seed ^ i << 8, n).iter().map(|x| x * scale).collect())
            .collect();
        let query = crate::setup::noise(seed ^ 99, n);
        let rows = bound::rows(k_dim);
        // The oracle follows the documentation; the padding is cleared by the caller.
        let mut bounds: Vec<[f32; LANES]> =
            (0..2 * rows).map(|i| [if i % 2 == 0 { f32::INFINITY } else { f32::NEG_INFINITY }; LANES]).collect();
        keys.iter().for_each(|key| bound::widen(&mut bounds, key, turn.as_ref()));
        let mut folded = vec![[0.0; LANES]; rows];
        bound::fold(&query, turn.as_ref(), &mut folded);
        let most = bound::bound(Portable, &folded, &bounds);
        prop_assert!(most.is_finite());
        for (i, key) in keys.iter().enumerate() {
            for distance in [0.0, 1.0, 17.0 * i as f64, 4321.0] {
                let (k, q) = (turned(key, turn.as_ref(), 0.0), turned(&query, turn.as_ref(), distance));
                let score: f64 = k.iter().zip(&q).map(|(k, q)| k * q).sum();
                prop_assert!(f64::from(most) >= score, "{most} < {score}");
            }
            // One chain of fused multiply-adds, as unturned keys are read.
            if turn.is_none() {
                let score = key.iter().zip(&query).fold(0f32, |s, (k, q)| k.mul_add(*q, s));
                prop_assert!(most >= score);
            }
        }
    }
}
