//! The closed loop compared with its stages called one by one, and every value passed between them.

mod custom;
mod hits;
mod left_out;
mod rollback;
mod saved;
mod trace;

use pikv::closed_loop::LoopError;
use pikv::metrics::Collector;
use pikv::policy::{Budget, Eviction, H2o, StreamingLlm};
use pikv::report::Place;
use pikv::router::{
    Adaptive, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, PageFeedback, Router,
    RouterState, Routes, Shape, TopK,
};
use pikv::rules::Hits;
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, Error, LayerShape, Position, ReadPages,
    Sequence, StepReport,
};
use pikv_test::numbers::noise;
use std::sync::Arc;

const EXPERTS: usize = 8;
const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 8;

fn config(top_k: u32) -> CacheConfig {
    let layer = LayerShape::new(HEADS as u32, 4, DIM as u32, Dtype::F32);
    let config = CacheConfig::new(vec![layer; LAYERS], 8 << 20).backend(pikv_test::backend::backend());
    config.ring(8).sinks(2).experts(EXPERTS as u32, top_k)
}

fn routers(id: usize, top_k: u32) -> Vec<Box<dyn Router>> {
    let shape = Shape::new(EXPERTS as u32, top_k);
    let make = |layer: usize| -> Box<dyn Router> {
        match id {
            0 => Box::new(Hashed::default().router(shape).unwrap()),
            1 => Box::new(TopK.router(shape).unwrap()),
            2 => Box::new(LoadBalanced::default().router(shape).unwrap()),
            3 => Box::new(CacheAware::default().router(shape).unwrap()),
            4 => Box::new(EntropyPenalised::default().router(shape).unwrap()),
            5 => Box::new(Adaptive::new(top_k, 3 + layer as u64).router(shape).unwrap()),
            _ => Box::new(Hierarchical::default().router(shape).unwrap()),
        }
    };
    (0..LAYERS).map(make).collect()
}

/// Rows of one step: keys, values, queries and logits of a layer.
fn rows(seed: u64, layer: usize, n: usize) -> [Vec<f32>; 4] {
    rows_of(EXPERTS, seed, layer, n)
}

/// [`rows`], with logits of some number of experts.
fn rows_of(experts: usize, seed: u64, layer: usize, n: usize) -> [Vec<f32>; 4] {
    let seed = seed * 64 + layer as u64 * 8;
    let mut logits = noise(seed + 3, n * experts);
    // Some experts are liked better.
    logits.chunks_exact_mut(experts).for_each(|row| (0..).zip(row).for_each(|(e, x)| *x -= 0.2 * e as f32));
    [noise(seed, n * HEADS * DIM), noise(seed + 1, n * HEADS * DIM), noise(seed + 2, n * 4 * DIM), logits]
}

fn states(routers: &[Box<dyn Router>]) -> Vec<RouterState> {
    routers.iter().map(|router| router.state()).collect()
}

/// One step of the loop; the outputs.
fn turn(pikv: &mut ClosedLoop, sequence: &mut Sequence, n: usize, seed: u64, read: ReadPages) -> Vec<f32> {
    let mut all = Vec::new();
    let experts = pikv.cache().config().experts as usize;
    let mut step = pikv.begin([(sequence, n as u32)]).unwrap();
    for layer in 0..LAYERS {
        let [k, v, q, logits] = rows_of(experts, seed, layer, n);
        let mut out = vec![0.0; n * 4 * DIM];
        step.route(layer, &logits).unwrap();
        step.append(layer, &k, &v).unwrap();
        step.attend(layer, &q, &Attend::new(1.0).read(read), AttendOutput::new(&mut out)).unwrap();
        all.extend(out);
    }
    step.commit().unwrap();
    all
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Tokens that a head holds in the pages of an expert, and how many were ever filed there, by the sequence's own word.
fn held(sequence: &Sequence, layer: usize, head: usize, expert: usize) -> u64 {
    let pages = sequence.pages(layer, head).unwrap();
    pages.filter(|page| page.id.place == Place::Run(expert as u16)).map(|page| u64::from(page.tokens)).sum()
}

#[test]
fn the_loop_is_its_stages_one_after_the_other() {
    for id in 0..7 {
        for read in [ReadPages::All, ReadPages::Experts] {
            let config = config(2).evict(Eviction::new(H2o, Budget::Tokens(40)).batch(4));
            let config = config.hits(Hits::new().pages(3).every(2));
            let cache = Cache::new(config.clone()).unwrap();
            let sink = Arc::new(Collector::new(EXPERTS));
            let mut pikv = ClosedLoop::new(cache.clone(), routers(id, 2)).unwrap().sink(sink.clone());
            let mut sequence = cache.sequence();

            // The same by hand, over a cache of its own; residency is counted from what the sequence lists.
            let by_hand = Cache::new(config).unwrap();
            let mut other = by_hand.sequence();
            let mut own = routers(id, 2);
            let mut filed = vec![vec![0u64; EXPERTS]; LAYERS];
            let mut homes: Vec<Vec<u16>> = vec![Vec::new(); LAYERS];
            let (mut all_hits, mut all_misses) = (vec![0.0; EXPERTS], vec![0.0; EXPERTS]);
            let (mut report, mut residency) = (StepReport::default(), [0, 0]);
            for seed in 0..60 {
                let n = if seed % 7 == 3 {
                    5
                } else if seed < 4 {
                    100
                } else {
                    1
                };
                let got = turn(&mut pikv, &mut sequence, n, seed, read);

                let mut want = Vec::new();
                let mut routes: Vec<Routes> = (0..LAYERS).map(|_| Routes::default()).collect();
                let mut step = by_hand.begin([(&mut other, n as u32)]).unwrap();
                let first = homes[0].len();
                for layer in 0..LAYERS {
                    let [k, v, q, logits] = rows(seed, layer, n);
                    let mut out = vec![0.0; n * 4 * DIM];
                    own[layer].route(Position(first as u32), &logits, &mut routes[layer]).unwrap();
                    step.route(layer, &routes[layer].filing().experts).unwrap();
                    step.append(layer, &k, &v).unwrap();
                    // What R_A fetches is the loop's to say: without it every expert of the row is read.
                    step.attend(layer, &q, &Attend::new(1.0).read(read), AttendOutput::new(&mut out))
                        .unwrap();
                    want.extend(out);
                    homes[layer].extend(routes[layer].filing().experts.chunks_exact(2).map(|row| row[0]));
                }
                step.commit_with(&mut report).unwrap();
                if id != 5 || read == ReadPages::All {
                    assert_eq!(bits(&got), bits(&want), "router {id}, {read:?}, step {seed}");
                }
                // What is held is as it was before this step's eviction, so it is checked by what was evicted in it.
                let evicted = pikv.report().evicted.clone();
                for layer in 0..LAYERS {
                    let left = homes[layer].len().saturating_sub(8);
                    // The first two are sinks.
                    let filing = first.saturating_sub(8)..left;
                    for position in filing.filter(|position| *position >= 2) {
                        filed[layer][usize::from(homes[layer][position])] += HEADS as u64;
                    }
                    // Rows that chose an expert.
                    let mut times = [0u64; EXPERTS];
                    routes[layer].filing().experts.iter().for_each(|e| times[usize::from(*e)] += 1);
                    let gone: u64 =
                        evicted.iter().filter(|e| e.layer == layer as u32).map(|e| u64::from(e.tokens)).sum();
                    let now: u64 = (0..HEADS)
                        .flat_map(|head| (0..EXPERTS).map(move |e| (head, e)))
                        .map(|(head, e)| held(&sequence, layer, head, e))
                        .sum();
                    let all_filed: u64 = filed[layer].iter().sum();
                    let (hits, misses) =
                        (pikv.report().hits(layer).to_vec(), pikv.report().misses(layer).to_vec());
                    let (held, lost) = (pikv.report().held_tokens(layer), pikv.report().lost_tokens(layer));
                    for e in 0..EXPERTS {
                        assert_eq!(
                            held[e] + lost[e],
                            times[e] * filed[layer][e],
                            "layer {layer}, expert {e}"
                        );
                        all_hits[e] += hits[e];
                        all_misses[e] += misses[e];
                        residency = [residency[0] + held[e], residency[1] + lost[e]];
                    }
                    assert!(now + gone <= all_filed);
                    let (wanted, missed): (Vec<u32>, Vec<u32>) = hits
                        .iter()
                        .zip(&misses)
                        .map(|(h, m)| (((h + m) * 32.0) as u32, (m * 32.0) as u32))
                        .unzip();
                    own[layer].observe(&PageFeedback::new(&wanted, &missed).of_page(32)).unwrap();
                    // Of R_A's rows that fetch less, what is wanted is the same, and less of it is there.
                    let less = id == 5 && read == ReadPages::Experts && routes[layer].fetch() == 1;
                    if id != 5 || read == ReadPages::All {
                        assert_eq!((report.hits(layer), report.misses(layer)), (&hits[..], &misses[..]));
                    } else if less && states(pikv.routers()) == states(&own) {
                        assert!(report.hits(layer).iter().sum::<f64>() >= hits.iter().sum::<f64>());
                    }
                }
                if id != 5 || read == ReadPages::All {
                    assert_eq!(states(pikv.routers()), states(&own), "router {id}, step {seed}");
                }
            }
            let totals = sink.totals();
            assert_eq!((totals.steps, totals.rows), (60, homes[0].len() as u64));
            assert!(all_hits.iter().sum::<f64>() > 0.0 && all_misses.iter().sum::<f64>() > 0.0);
            assert_eq!([totals.held_tokens, totals.lost_tokens], residency);
            assert_eq!((totals.hits, totals.misses), (all_hits, all_misses));
            assert!(totals.evicted_tokens > 0 && totals.age.max().is_some_and(|age| age >= 8));
            assert_eq!(totals.resident_bytes, cache.usage().shards.iter().sum::<u64>());
            let tokens = homes[0].len() as u64;
            assert_eq!(totals.logical_bytes, tokens * (LAYERS * HEADS * 2 * DIM * 4) as u64);
        }
    }
}

#[test]
fn experts_whose_tokens_are_gone_are_avoided() {
    // With k = 1 and equal logits R_P goes where the misses are not.
    let config = config(1).evict(Eviction::new(StreamingLlm, Budget::Tokens(12)).batch(1));
    let config = config.hits(Hits::new().pages(1).every(1));
    let cache = Cache::new(config).unwrap();
    let router = || -> Vec<Box<dyn Router>> {
        let options = CacheAware::default().lambda(2.0);
        (0..LAYERS).map(|_| Box::new(options.router(Shape::new(8, 1)).unwrap()) as Box<dyn Router>).collect()
    };
    let mut pikv = ClosedLoop::new(cache.clone(), router()).unwrap();
    let mut sequence = cache.sequence();
    let mut chosen = Vec::new();
    for seed in 0..160 {
        let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
        for layer in 0..LAYERS {
            let [k, v, q, _] = rows(seed, layer, 1);
            // Experts 0 and 1 are liked best, and nearly alike.
            let routes = step.route(layer, &[1.0, 0.99, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
            assert_eq!(routes.model().experts, [0], "the model's own choice is left alone");
            chosen.push(routes.filing().experts[0]);
            step.append(layer, &k, &v).unwrap();
            step.attend(layer, &q, &Attend::new(1.0), AttendOutput::new(&mut [0.0; 4 * DIM])).unwrap();
        }
        step.commit().unwrap();
    }
    assert!(chosen[..8].iter().all(|e| *e == 0), "at first nothing misses: {chosen:?}");
    assert!(chosen.contains(&1), "then expert 0 has lost tokens, and 1 has not: {chosen:?}");
    assert!(chosen.iter().all(|e| *e < 2));
}

/// Every router files tokens in other runs. Read as a whole they give the same: dense attention, with the same bits on any number of
/// shards.
#[test]
fn exact_with_every_router_on_any_shards() {
    for id in 0..7 {
        let run = |shards: ShardMap| {
            let cache = Cache::new(config(2).shards(shards)).unwrap();
            let mut pikv = ClosedLoop::new(cache.clone(), routers(id, 2)).unwrap();
            let mut sequence = cache.sequence();
            let steps = (0..60).map(|seed| {
                let n = 1 + seed as usize % 3;
                turn(&mut pikv, &mut sequence, n, seed, ReadPages::All)
            });
            let out = steps.collect::<Vec<_>>();
            let filed = (0..EXPERTS).filter(|e| held(&sequence, 0, 0, *e) > 0).count();
            assert!(filed > 1, "router {id} filed by {filed} experts");
            out
        };
        let one = run(ShardMap::sum(1).unwrap());
        for shards in [2, 4, 8] {
            let many = run(ShardMap::sum(shards).unwrap());
            assert!(one.iter().flatten().map(|x| x.to_bits()).eq(many.iter().flatten().map(|x| x.to_bits())));
        }
        // Scores and sums in f64, over all tokens up to the row's own.
        let (mut keys, mut values): ([Vec<f32>; LAYERS], [Vec<f32>; LAYERS]) = Default::default();
        for (seed, out) in (0..).zip(&one) {
            let n = 1 + seed as usize % 3;
            for (layer, out) in out.chunks_exact(n * 4 * DIM).enumerate() {
                let [k, v, q, _] = rows(seed, layer, n);
                let before = keys[layer].len() / (HEADS * DIM);
                keys[layer].extend(k);
                values[layer].extend(v);
                for (i, (q, out)) in q.chunks_exact(DIM).zip(out.chunks_exact(DIM)).enumerate() {
                    let (row, head) = (i / 4, i % 4 / (4 / HEADS));
                    let of = |all: &[f32], t: usize| -> Vec<f64> {
                        all[(t * HEADS + head) * DIM..][..DIM].iter().map(|x| f64::from(*x)).collect()
                    };
                    let score = |t: usize| {
                        let key = of(&keys[layer], t);
                        q.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum::<f64>().exp()
                    };
                    let weights: Vec<f64> = (0..=before + row).map(score).collect();
                    let total: f64 = weights.iter().sum();
                    for (c, out) in out.iter().enumerate() {
                        let at = |(t, w): (usize, &f64)| w * of(&values[layer], t)[c];
                        let want = weights.iter().enumerate().map(at).sum::<f64>() / total;
                        let error = (f64::from(*out) - want).abs();
                        // Written so that NaN fails.
                        assert!(error <= 1e-5, "router {id}, step {seed}: {out}, not {want}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_step_that_is_dropped_never_happened_for_the_routers_either() {
    for id in 0..7 {
        let cache = Cache::new(config(2).evict(Eviction::new(H2o, Budget::Tokens(24)).batch(1))).unwrap();
        let mut pikv = ClosedLoop::new(cache.clone(), routers(id, 2)).unwrap();
        let mut twin = ClosedLoop::new(cache.clone(), routers(id, 2)).unwrap();
        let (mut sequence, mut other) = (cache.sequence(), cache.sequence());
        for seed in 0..30 {
            let mut step = pikv.begin([(&mut sequence, 3)]).unwrap();
            let [k, v, _, logits] = rows(seed + 1000, 0, 3);
            step.route(0, &logits).unwrap();
            if seed % 2 == 0 {
                step.append(0, &k, &v).unwrap();
            }
            drop(step);
            assert_eq!(states(pikv.routers()), states(twin.routers()));
            let a = turn(&mut pikv, &mut sequence, 1, seed, ReadPages::Experts);
            let b = turn(&mut twin, &mut other, 1, seed, ReadPages::Experts);
            assert_eq!(bits(&a), bits(&b), "router {id}, step {seed}");
        }
        // A commit that fails is undone as well.
        let before = states(pikv.routers());
        let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
        step.route(0, &rows(5, 0, 1)[3]).unwrap();
        assert_eq!(step.commit(), Err(LoopError::Cache(Error::Incomplete { layer: 0, what: "appended" })));
        assert_eq!(states(pikv.routers()), before);
    }
}

#[test]
fn refusals_name_what_was_wrong() {
    let cache = Cache::new(config(2)).unwrap();
    let one = || routers(1, 2).into_iter().take(1).collect::<Vec<_>>();
    assert_eq!(ClosedLoop::new(cache.clone(), one()).err(), Some(LoopError::Routers { got: 1, layers: 2 }));
    let wrong = ClosedLoop::new(cache.clone(), routers(1, 3)).err();
    let (experts, top_k, cache_experts, cache_top_k) = (8, 3, 8, 2);
    assert_eq!(wrong, Some(LoopError::Shape { layer: 0, experts, top_k, cache_experts, cache_top_k }));

    let mut pikv = ClosedLoop::new(cache.clone(), routers(1, 2)).unwrap();
    let mut sequence = cache.sequence();
    let before = states(pikv.routers());
    let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
    assert_eq!(step.route(2, &[0.0; 8]).err(), Some(LoopError::Cache(Error::Layer { layer: 2, layers: 2 })));
    let short =
        LoopError::Cache(Error::Length { what: "logits", got: 7, expected: 8, shape: "rows * experts" });
    assert_eq!(step.route(0, &[0.0; 7]).err(), Some(short));
    let mut bad = [0.0; 8];
    bad[3] = f32::NAN;
    assert!(matches!(step.route(0, &bad).err(), Some(LoopError::Route { layer: 0, .. })));
    step.route(0, &[0.0; 8]).unwrap();
    let twice = LoopError::Cache(Error::Twice { layer: 0, what: "routed" });
    assert_eq!(step.route(0, &[0.0; 8]).err(), Some(twice));
    drop(step);
    assert_eq!(states(pikv.routers()), before);
}
