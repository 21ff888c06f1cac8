//! Hits and misses compared with a slow definition: every page's bound from all keys ever appended, and the tokens held before the step.

use crate::setup::{Kind, Row, config, mix, rope, row, shape};
use pikv::policy::{AdaKvLit, Budget, Eviction, H2o, KeyNorm, Lru, Policy, StreamingLlm};
use pikv::report::Place;
use pikv::rules::Hits;
use pikv::shape::PAGE;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, ReadPages, Sequence, StepReport};
use pikv_test::numbers::Rng;
use pikv_test::scaled;
use std::collections::BTreeSet;

/// Appends and attends rows in one step.
fn step(cache: &Cache, sequence: &mut Sequence, rows: &[Row], read: ReadPages, report: &mut StepReport) {
    let all = |of: &dyn Fn(&Row) -> Vec<f32>| rows.iter().flat_map(of).collect::<Vec<f32>>();
    let mut step = cache.begin([(sequence, rows.len() as u32)]).unwrap();
    for (l, shape) in cache.config().layers.iter().enumerate() {
        step.append(l, &all(&|r| r.k[l].clone()), &all(&|r| r.v[l].clone())).unwrap();
        let experts: Vec<u16> = rows.iter().flat_map(|r| r.experts[l].clone()).collect();
        step.route(l, &experts).unwrap();
        let mut out = vec![0.0; rows.len() * (shape.query_heads * shape.layout.v_dim) as usize];
        step.attend(l, &all(&|r| r.q[l].clone()), &Attend::new(0.5).read(read), AttendOutput::new(&mut out))
            .unwrap();
    }
    step.commit_with(report).unwrap();
}

/// The positions in pages of experts that a head holds in the first tier.
fn near(sequence: &Sequence, layer: usize, head: usize) -> BTreeSet<u32> {
    let pages = sequence.pages(layer, head).unwrap();
    let near = pages.filter(|page| page.tier == 0 && matches!(page.id.place, Place::Run(_)));
    near.flat_map(|page| sequence.positions(layer, head, page.id).unwrap().map(|(_, p)| p.0)).collect()
}

/// A number rounded away from 0 or towards it to the 8 bits of bf16, so that it is not above `x`, or not below.
fn outward(x: f64, up: bool) -> f64 {
    if x == 0.0 {
        return 0.0;
    }
    let step = 2f64.powi(x.abs().log2().floor() as i32 - 7);
    if up { (x / step).ceil() * step } else { (x / step).floor() * step }
}

/// A query's bound over the keys of a page: the stored minima and maxima, plus the margin for rounding.
fn bound(shape: &LayerShape, query: &[f32], keys: &[&[f32]]) -> f64 {
    let exact = shape.layout.k != Dtype::F32 && shape.rope.is_none();
    let turned = shape.rope.map_or(0, |rope| rope.rotary_dim as usize);
    let pair = |i: usize| shape.rope.unwrap().pair(i);
    let length =
        |x: &[f32], (a, b): (usize, usize)| f64::from(x[a]).hypot(f64::from(x[b])) * (1.0 + 2f64.powi(-20));
    let (mut sum, mut size) = (0.0, 0.0);
    let mut add = |q: f64, least: f64, most: f64| {
        let (least, most) = if exact { (least, most) } else { (outward(least, false), outward(most, true)) };
        sum += (q * least).max(q * most);
        size += (q * least).abs().max((q * most).abs());
    };
    for i in 0..turned / 2 {
        let longest = keys.iter().map(|key| length(key, pair(i))).fold(0.0, f64::max);
        add(length(query, pair(i)), -longest, longest);
    }
    for c in turned..query.len() {
        let of = || keys.iter().map(|key| f64::from(key[c]));
        add(f64::from(query[c]), of().fold(f64::INFINITY, f64::min), of().fold(f64::NEG_INFINITY, f64::max));
    }
    sum + size / 32768.0
}

/// The pages of each expert of a layer that the rows of a step want and find; `None` where bounds in f64 do not decide which are wanted.
fn expected(
    cache: &Cache,
    (history, old): (&[Row], u32),
    l: usize,
    near: &[BTreeSet<u32>],
    read: ReadPages,
) -> Option<(Vec<f64>, Vec<f64>)> {
    let config = cache.config();
    let (shape, hits) = (&config.layers[l], config.hits.unwrap());
    let experts = config.experts as usize;
    let (mut hit, mut missed) = (vec![0.0; experts], vec![0.0; experts]);
    let sinks = cache.store(l).unwrap().sinks;
    let firm = old.saturating_sub(config.ring + config.rollback) / PAGE * PAGE;
    let files = shape.window.is_none_or(|window| window > config.ring);
    // Positions of full pages, by expert.
    let mut pages: Vec<(u16, Vec<u32>)> = Vec::new();
    let mut open: Vec<Vec<u32>> = vec![Vec::new(); experts];
    for p in (sinks..firm).filter(|_| files) {
        let home = history[p as usize].experts[l][0];
        open[usize::from(home)].push(p);
        if open[usize::from(home)].len() == PAGE as usize {
            pages.push((home, std::mem::take(&mut open[usize::from(home)])));
        }
    }
    pages.drain(..pages.len().saturating_sub(hits.known as usize));
    let (group, k_dim) = (shape.group() as usize, shape.layout.k_dim as usize);
    for p in (old..history.len() as u32).filter(|p| p.is_multiple_of(hits.every)) {
        let row = &history[p as usize];
        let lo = shape.window.map_or(0, |window| (p + 1).saturating_sub(window));
        let candidates: Vec<&(u16, Vec<u32>)> = pages
            .iter()
            .filter(|(e, page)| page[31] >= lo && (read != ReadPages::Experts || row.experts[l].contains(e)))
            .collect();
        for (h, near) in near.iter().enumerate().take(shape.kv_heads as usize) {
            let key = |p: u32| &history[p as usize].k[l][h * k_dim..][..k_dim];
            let of = |(_, page): &&(u16, Vec<u32>)| {
                let keys: Vec<&[f32]> = page.iter().map(|p| key(*p)).collect();
                let queries = (h * group..(h + 1) * group).map(|q| &row.q[l][q * k_dim..][..k_dim]);
                queries.map(|q| bound(shape, q, &keys)).fold(f64::NEG_INFINITY, f64::max)
            };
            let bounds: Vec<f64> = candidates.iter().map(of).collect();
            let mut order: Vec<usize> = (0..bounds.len()).collect();
            order.sort_by(|a, b| bounds[*b].total_cmp(&bounds[*a]));
            if let Some(next) = order.get(hits.pages as usize) {
                let last = bounds[order[hits.pages as usize - 1]];
                let gap = last - bounds[*next];
                if gap > 0.0 && gap < 1e-4 * (1.0 + last.abs()) {
                    return None;
                }
            }
            for at in order.into_iter().take(hits.pages as usize) {
                let (e, page) = candidates[at];
                let held = page.iter().filter(|p| near.contains(p)).count() as f64 / 32.0;
                hit[usize::from(*e)] += held;
                missed[usize::from(*e)] += 1.0 - held;
            }
        }
    }
    Some((hit, missed))
}

/// A random cache.
fn drawn(rng: &mut Rng, policy: usize) -> CacheConfig {
    let experts = rng.of(&[1, 3]);
    let mut config = config(2)
        .experts(experts, experts.min(2))
        .rollback(rng.of(&[0, 0, 3, 40]))
        .sinks(rng.of(&[0, 2]))
        .ring(rng.of(&[4, 20]))
        .hits(Hits::new().pages(1 + rng.below(4)).every(1 + rng.below(3)).known(rng.of(&[4096, 6])));
    config.layers[1].window = rng.of(&[None, Some(90)]);
    for layer in &mut config.layers {
        layer.layout.k = rng.of(&Dtype::ALL);
        layer.rope = rng.of(&[None, None, Some(rope(4)), Some(rope(2))]);
    }
    // More channels than fit a row of lanes.
    if rng.one_in(2) {
        let mut wide = shape(2, 2, 40, 3);
        wide.layout.k = config.layers[0].layout.k;
        config.layers[0] = wide;
    }
    let budget = Budget::Tokens(rng.of(&[40, 90]));
    let policies: [Option<Box<dyn Policy>>; 5] = [
        None,
        Some(Box::new(H2o)),
        Some(Box::new(KeyNorm)),
        Some(Box::new(Lru::default())),
        Some(Box::new(StreamingLlm)),
    ];
    match policies.into_iter().nth(policy).flatten() {
        Some(policy) => config.evict(crate::setup::eviction(policy, budget)),
        None => config.tiers(Tiers::new().host(1 << 20)),
    }
}

#[test]
fn hits_are_what_the_definition_says() {
    let (mut told, mut steps) = (0, 0);
    for seed in 0..scaled(30, 1500) {
        let mut rng = Rng(seed);
        let config = drawn(&mut rng, seed as usize % 5);
        let evicts = seed % 5 != 0;
        let cache = Cache::new(config).unwrap();
        let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
        let mut history: Vec<Row> = Vec::new();
        let kind = rng.of(&[Kind::Noise, Kind::Hot, Kind::Equal, Kind::HotExpert]);
        let reads = [ReadPages::All, ReadPages::Experts];
        while history.len() < 360 {
            let read = rng.of(&reads);
            let old = history.len() as u32;
            if old > 0 && rng.one_in(6) {
                let back = rng.below(sequence.rollback_limit().min(cache.config().rollback) + 1);
                sequence.rollback(back).unwrap();
                history.truncate((old - back) as usize);
            }
            if !evicts && rng.one_in(8) {
                let bytes = 2 * cache.config().layers[0].layout.bytes();
                if rng.one_in(2) {
                    sequence.demote(bytes).unwrap()
                } else {
                    sequence.promote(bytes).unwrap()
                };
            }
            let old = history.len() as u32;
            let n = if rng.one_in(3) { 1 + rng.below(9) } else { 1 };
            history.extend((0..n).map(|_| row(cache.config(), kind, rng.next() >> 8)));
            let held: Vec<Vec<BTreeSet<u32>>> =
                (0..2).map(|l| (0..2).map(|h| near(&sequence, l, h)).collect()).collect();
            step(&cache, &mut sequence, &history[old as usize..], read, &mut report);
            for (l, held) in held.iter().enumerate() {
                steps += 1;
                let Some((hits, misses)) = expected(&cache, (&history, old), l, held, read) else { continue };
                told += 1;
                let context =
                    format!("seed {seed}, layer {l}, {read:?} at {old}: {:?}", cache.config().layers[l]);
                assert_eq!(report.hits(l), hits, "{context}");
                assert_eq!(report.misses(l), misses, "{context}");
            }
        }
        let usage = cache.usage().ghosts;
        assert!(usage > 0);
        let most: u64 = (0..2).map(|l| cache.ghost_bytes_at(l, history.len() as u32 + 40).unwrap()).sum();
        assert!(usage <= most, "seed {seed}: {usage} of {most}");
        let fork = sequence.fork();
        assert_eq!(cache.usage().ghosts, usage, "a fork shares them");
        drop((sequence, fork));
        assert_eq!(cache.usage().ghosts, 0);
    }
    assert!(told * 10 > steps * 9, "{told} of {steps}");
}

/// Hit rate and residency after `len` tokens, every seventh of which all queries attend to.
fn rates(policy: impl Policy + 'static, len: u32) -> (f64, f64) {
    let eviction = Eviction::new(policy, Budget::Tokens(64)).batch(1);
    let config = config(1).hits(Hits::new().pages(4).every(1)).evict(eviction);
    let cache = Cache::new(config).unwrap();
    let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
    let (mut hits, mut wanted, mut residency) = (0.0, 0.0, 0.0);
    for p in 0..len {
        let mut row = row(cache.config(), Kind::Noise, u64::from(p));
        // All queries attend to the tokens of some stretches.
        let hot = p / 40 % 4 == 1;
        row.k[0].iter_mut().for_each(|x| *x = if hot { 2.0 } else { *x / 4.0 });
        row.q[0].iter_mut().for_each(|x| *x = x.abs());
        step(&cache, &mut sequence, &[row], ReadPages::All, &mut report);
        hits += report.hits(0)[0];
        wanted += report.hits(0)[0] + report.misses(0)[0];
        residency += report.residency();
    }
    (hits / wanted, residency / f64::from(len))
}

/// At one budget, policies that keep attended tokens have hits and others do not, with equally many tokens held.
#[test]
fn hits_differ_between_policies_where_residency_does_not() {
    let (heavy, heavy_held) = rates(H2o, 600);
    let (newest, newest_held) = rates(StreamingLlm, 600);
    assert!((heavy_held - newest_held).abs() < 1e-12, "{heavy_held} and {newest_held}");
    assert!(heavy > newest + 0.1, "{heavy} beside {newest}");
}

/// Known pages are limited by a bound of their own, for any tokens appended, and the tables for them do not grow.
#[test]
fn what_is_known_is_bounded() {
    for experts in [1, 3] {
        let eviction = Eviction::new(StreamingLlm, Budget::Tokens(64)).batch(1);
        let hits = Hits::new().pages(4).every(1).known(20);
        let cache = Cache::new(config(1).experts(experts, 1).rollback(5).hits(hits).evict(eviction)).unwrap();
        let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
        let (mut most, mut tables) = (0, 0);
        for p in 0..3000u32 {
            let row = row(cache.config(), Kind::Noise, u64::from(p));
            step(&cache, &mut sequence, &[row], ReadPages::All, &mut report);
            most = most.max(cache.usage().ghosts);
            if p == 1500 {
                tables = sequence.table_bytes();
            }
            assert!(cache.usage().ghosts <= cache.ghost_bytes_at(0, p + 1).unwrap(), "at {p}");
        }
        // 20 pages of 2 heads, as sheets of 8 of which the first can be of the past: of each page a word for each of 32 channels.
        assert!(most <= 2 * 5 * (8 * (128 + 12) + 128), "{most}");
        assert!(sequence.table_bytes() <= tables + 256, "{tables} to {}", sequence.table_bytes());
        assert_eq!(cache.ghost_bytes_at(0, 3000), cache.ghost_bytes_at(0, 1_000_000));
    }
}

/// Hits are neither kept nor counted if no policy, router or sink reads them.
#[test]
fn nobody_asks_and_nothing_is_computed() {
    let eviction = || Eviction::new(H2o, Budget::Tokens(64)).batch(1);
    let cache = Cache::new(config(1).evict(eviction())).unwrap();
    let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
    for p in 0..200u32 {
        let row = row(cache.config(), Kind::Noise, p.into());
        step(&cache, &mut sequence, &[row], ReadPages::All, &mut report);
        assert_eq!((report.hits(0), report.misses(0), report.hit_rate()), (&[0.0][..], &[0.0][..], None));
        assert!(report.residency() < 1.0 || p <= 64);
    }
    assert_eq!((cache.usage().ghosts, cache.ghost_bytes_at(0, 200)), (0, Ok(0)));
    // A policy that looks at them asks.
    let cache = Cache::new(config(1).evict(Eviction::new(AdaKvLit::default(), Budget::Tokens(64)))).unwrap();
    let mut sequence = cache.sequence();
    for p in 0..200u32 {
        let row = row(cache.config(), Kind::Noise, p.into());
        step(&cache, &mut sequence, &[row], ReadPages::All, &mut report);
    }
    assert!(cache.usage().ghosts > 0 && report.misses(0)[0] + report.hits(0)[0] == 0.0, "199 is not asked");
    step(&cache, &mut sequence, &[row(cache.config(), Kind::Noise, 200)], ReadPages::All, &mut report);
    assert!(report.hit_rate().is_some());
}

/// Where the budget binds, the head with more misses ends with more of the shared budget, and the sum stays the same.
#[test]
fn adakv_lit_moves_tokens_between_heads() {
    let policy = AdaKvLit::default().gamma(0.05);
    let eviction = Eviction::new(policy, Budget::Tokens(160)).batch(1);
    let cache = Cache::new(config(1).hits(Hits::new().pages(2).every(1)).evict(eviction)).unwrap();
    let (mut sequence, mut report) = (cache.sequence(), StepReport::default());
    for p in 0..900u32 {
        let mut row = row(cache.config(), Kind::Noise, mix(p.into()) >> 8);
        // Head 0 attends to the newest tokens, which have the longest keys; head 1 to changing ones.
        row.k[0][..4].fill(1.0 + p as f32 / 900.0);
        row.q[0][..8].fill(1.0);
        step(&cache, &mut sequence, &[row], ReadPages::All, &mut report);
    }
    let held: Vec<u32> = (0..2).map(|h| sequence.resident(0, h).unwrap().0).collect();
    assert_eq!(held[0] + held[1], 320, "{held:?}");
    assert!(held[1] > held[0] + 40, "{held:?}");
}
