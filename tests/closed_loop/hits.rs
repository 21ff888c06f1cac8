//! When hits are counted, and how routers use them.

use super::{DIM, EXPERTS, LAYERS, config, routers, rows, turn};
use pikv::metrics::Collector;
use pikv::policy::{Budget, Eviction, StreamingLlm};
use pikv::report::Place;
use pikv::router::{Adaptive, Arm, CacheAware, Coefficients, EntropyPenalised, Router, Shape, TopK};
use pikv::rules::Hits;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, ReadPages};
use pikv_test::numbers::noise;
use std::collections::BTreeSet;
use std::sync::Arc;

fn evicting() -> CacheConfig {
    config(2).evict(Eviction::new(StreamingLlm, Budget::Tokens(80)).batch(1))
}

/// Hits are counted if a router or a sink reads them; otherwise nothing is kept for them.
#[test]
fn routers_and_sinks_ask() {
    for (router, sink, asks) in
        [(1, false, false), (2, false, false), (3, false, true), (5, false, true), (1, true, true)]
    {
        let cache = Cache::new(evicting()).unwrap();
        let mut pikv = ClosedLoop::new(cache.clone(), routers(router, 2)).unwrap();
        let collector = Arc::new(Collector::new(EXPERTS));
        if sink {
            pikv = pikv.sink(collector.clone());
        }
        let mut sequence = cache.sequence();
        for seed in 0..5 {
            turn(&mut pikv, &mut sequence, 101, seed, ReadPages::All);
        }
        assert_eq!(cache.usage().ghosts > 0, asks, "router {router}, sink {sink}");
        assert_eq!(pikv.report().hit_rate().is_some(), asks, "router {router}, sink {sink}");
        assert_eq!(collector.totals().hit_rate_of_all().is_some(), sink);
        assert!(pikv.report().residency() < 1.0);
    }
}

/// Rates of a loop with such routers over 40 steps after a prompt: pages wanted, and found.
fn counted(router: impl Fn() -> Box<dyn Router>, config: CacheConfig) -> (f64, f64) {
    let cache = Cache::new(config.hits(Hits::new().pages(3).every(1))).unwrap();
    let mut pikv = ClosedLoop::new(cache.clone(), (0..LAYERS).map(|_| router()).collect()).unwrap();
    let (mut sequence, mut wanted, mut hits) = (cache.sequence(), 0.0, 0.0);
    for seed in 0..44 {
        turn(&mut pikv, &mut sequence, if seed < 4 { 120 } else { 1 }, seed, ReadPages::Experts);
        for layer in 0..LAYERS {
            let found: f64 = pikv.report().hits(layer).iter().sum();
            wanted += found + pikv.report().misses(layer).iter().sum::<f64>();
            hits += found;
        }
    }
    (wanted, hits)
}

/// An arm that fetches half of the experts wants as many pages and finds fewer of them, so its reward is smaller.
#[test]
fn fetching_less_lowers_the_hits_and_not_what_is_wanted() {
    let arm = |fetch| {
        move || -> Box<dyn Router> {
            let options =
                Adaptive::new(2, 1).arms(vec![Arm::new(Coefficients::default(), fetch)]).imbalance_cost(0.0);
            Box::new(options.router(Shape::new(EXPERTS as u32, 2)).unwrap())
        }
    };
    let ((wanted, all), (as_many, half)) = (counted(arm(2), config(2)), counted(arm(1), config(2)));
    assert!(wanted > 100.0 && all == wanted, "{all} of {wanted} where nothing is evicted");
    assert_eq!(wanted, as_many);
    assert!(half < 0.9 * all && half > 0.0, "{half} beside {all}");
}

/// The bandit learns to fetch the wanted pages: with no evictions and free bytes, those of all experts.
#[test]
fn the_bandit_learns_to_fetch_what_is_wanted() {
    let cache = Cache::new(config(2).hits(Hits::new().pages(3).every(1))).unwrap();
    let none = Coefficients::default();
    let arms = vec![Arm::new(none, 1), Arm::new(none, 2)];
    let shape = Shape::new(EXPERTS as u32, 2);
    let options = |seed| Adaptive::new(2, seed).arms(arms.clone()).imbalance_cost(0.0);
    let make = |layer: usize| Box::new(options(layer as u64).router(shape).unwrap()) as Box<dyn Router>;
    let mut pikv = ClosedLoop::new(cache.clone(), (0..LAYERS).map(make).collect()).unwrap();
    let (mut sequence, mut all) = (cache.sequence(), 0);
    for seed in 0..240 {
        turn(&mut pikv, &mut sequence, if seed < 4 { 120 } else { 1 }, seed, ReadPages::Experts);
        let arms = pikv.routers().iter().map(|router| router.state().bandit.unwrap().arm);
        all += if seed >= 140 { arms.filter(|arm| *arm == 1).count() } else { 0 };
    }
    assert!(all >= 150, "all experts were fetched {all} of 200 times");
}

/// R_P ranks experts lower whose wanted pages were evicted. With as many tokens held and no page missed, it does not.
#[test]
fn misses_of_wanted_pages_steer_r_p() {
    let penalties = |config: CacheConfig| {
        let cache = Cache::new(config.hits(Hits::new().pages(3).every(1))).unwrap();
        let shape = Shape::new(EXPERTS as u32, 2);
        let make = |_| Box::new(CacheAware::default().router(shape).unwrap()) as Box<dyn Router>;
        let mut pikv = ClosedLoop::new(cache.clone(), (0..LAYERS).map(make).collect()).unwrap();
        let mut sequence = cache.sequence();
        for seed in 0..24 {
            turn(&mut pikv, &mut sequence, if seed < 4 { 120 } else { 1 }, seed, ReadPages::All);
        }
        pikv.routers()[0].state().miss.iter().copied().fold(0.0, f32::max)
    };
    assert_eq!(penalties(config(2)), 0.0);
    assert!(penalties(evicting()) > 0.5);
}

/// Where its gate is undecided, R_E makes rows read the pages of more experts, and those pages are among the wanted.
#[test]
fn an_undecided_gate_reads_more_experts() {
    for more in [0, 2] {
        let cache = Cache::new(config(2).hits(Hits::new().pages(64).every(1))).unwrap();
        let shape = Shape::new(EXPERTS as u32, 2);
        let make = |_| -> Box<dyn Router> {
            Box::new(EntropyPenalised::default().more(more).router(shape).unwrap())
        };
        let mut pikv = ClosedLoop::new(cache.clone(), (0..LAYERS).map(make).collect()).unwrap();
        let mut sequence = cache.sequence();
        for seed in 0..16 {
            // Gates that like all experts alike.
            let mut step = pikv.begin([(&mut sequence, 120)]).unwrap();
            for layer in 0..LAYERS {
                let [k, v, ..] = rows(seed, layer, 120);
                step.route(layer, &noise(1000 * seed + layer as u64, 120 * EXPERTS)).unwrap();
                step.append(layer, &k, &v).unwrap();
            }
            step.commit().unwrap();
        }
        for (logits, extra) in
            [([0.0; EXPERTS], more as usize), ([9.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 0)]
        {
            let mut step = pikv.begin([(&mut sequence, 1)]).unwrap();
            let mut fetched: Vec<BTreeSet<u16>> = Vec::new();
            for layer in 0..LAYERS {
                let [k, v, q, _] = rows(99, layer, 1);
                fetched.push(step.route(layer, &logits).unwrap().fetched(0).collect());
                assert_eq!(fetched[layer].len(), 2 + extra);
                step.append(layer, &k, &v).unwrap();
                let (mut out, mut mass) = ([0.0; 4 * DIM], Vec::new());
                let to = AttendOutput::new(&mut out).mass(&mut mass);
                step.attend(layer, &q, &Attend::new(1.0).read(ReadPages::Experts), to).unwrap();
                let read = mass.iter().filter_map(|page| match page.page.place {
                    Place::Run(e) => Some(e),
                    _ => None,
                });
                assert_eq!(read.collect::<BTreeSet<u16>>(), fetched[layer], "{more} more");
            }
            step.commit().unwrap();
            for (layer, fetched) in fetched.iter().enumerate() {
                let hits = pikv.report().hits(layer);
                let of =
                    (0..EXPERTS as u16).filter(|e| hits[usize::from(*e)] > 0.0).collect::<BTreeSet<u16>>();
                assert_eq!(&of, fetched);
                assert_eq!(pikv.report().misses(layer), [0.0; EXPERTS]);
            }
        }
    }
    assert!(!TopK.router(Shape::new(8, 2)).unwrap().wants_hits());
}
