//! Scores of experts and of pages: what a router and Quest compute for each token.

use super::{CollectRows, DIM, on_all_lanes, same};
use crate::machine;
use criterion::{BenchmarkId, Criterion, Throughput};
use pikv::lanes::Lanes;
use pikv_core::bound;
use pikv_core::score::{Bias, Coefficients, Ranking};
use pikv_core::warp::LANES;
use pikv_lanes::{bounds, route};
use std::hint::black_box;

/// Tokens that are routed together.
const TOKENS: usize = 32;
/// Experts of a layer, and of a token.
const EXPERTS: [(usize, usize); 4] = [(8, 2), (64, 6), (256, 8), (512, 10)];

fn logits(experts: usize) -> Vec<f32> {
    machine::noise(experts as u64).take(TOKENS * experts).map(|x| 8.0 * x).collect()
}

/// Biased logits, the best experts and their weights.
pub fn ranking(c: &mut Criterion) {
    let mut group = c.benchmark_group("rank experts");
    group.throughput(Throughput::Elements(TOKENS as u64));
    for (experts, top_k) in EXPERTS {
        let (logits, fixed) = (logits(experts), machine::noise(4).collect_rows(experts.div_ceil(LANES)));
        let ranking = Ranking { bias: Some(Bias { fixed: &fixed, cap: Some(4.0) }), groups: None };
        let run = |lanes: Lanes, chosen: &mut [u16], weights: &mut [f32]| {
            route::rank(lanes, &logits, experts, top_k, ranking, chosen, weights);
        };
        let (mut chosen, mut weights) = (vec![0; TOKENS * top_k], vec![0.0; TOKENS * top_k]);
        run(Lanes::Portable, &mut chosen, &mut weights);
        for lanes in Lanes::available() {
            let (mut got, mut of) = (vec![0; chosen.len()], vec![0.0; weights.len()]);
            run(lanes, &mut got, &mut of);
            assert_eq!(got, chosen, "experts differ on {} lanes", lanes.name());
            same("weights of experts", &of, &weights);
            group.bench_function(BenchmarkId::new(lanes.name(), format!("{top_k} of {experts}")), |b| {
                b.iter(|| run(lanes, black_box(&mut got), &mut of));
            });
        }
    }
}

/// The bias of all experts, once a step.
pub fn penalties(c: &mut Criterion) {
    let mut group = c.benchmark_group("penalties");
    let by = Coefficients::new(0.5, 0.25, 0.125);
    for (experts, _) in EXPERTS {
        let average: Vec<f32> = machine::noise(6).take(experts).map(f32::abs).collect();
        group.throughput(Throughput::Elements(experts as u64));
        let rows = experts.div_ceil(LANES);
        on_all_lanes(&mut group, &experts.to_string(), rows, |lanes, out: &mut [[f32; LANES]]| {
            route::penalties(lanes, by, experts, &average, &average, &average, out);
        });
    }
}

/// Averages of the gate's entropy about each expert.
pub fn entropies(c: &mut Criterion) {
    let mut group = c.benchmark_group("entropies");
    group.throughput(Throughput::Elements(TOKENS as u64));
    for (experts, _) in EXPERTS {
        let logits = logits(experts);
        on_all_lanes(&mut group, &experts.to_string(), experts, |lanes, averages: &mut [f32]| {
            averages.fill(0.0);
            route::binary_entropy(lanes, &logits, 0.9, averages);
        });
    }
}

/// Upper bounds on the scores of 128 pages for 4 queries. Rates are of the bounds' bytes.
pub fn bounds(c: &mut Criterion) {
    const PAGES: usize = 128;
    let rows = bound::rows(DIM);
    let mut noise = machine::noise(8);
    let mut key = || (&mut noise).take(DIM as usize).collect::<Vec<f32>>();
    let pages: Vec<Vec<[f32; LANES]>> = (0..PAGES)
        .map(|_| {
            let mut page = [[f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]].repeat(rows);
            (0..32).for_each(|_| bound::widen(&mut page, &key(), None));
            page
        })
        .collect();
    let pages: Vec<&[[f32; LANES]]> = pages.iter().map(Vec::as_slice).collect();
    let mut queries = vec![[0.0; LANES]; 4 * rows];
    queries.chunks_exact_mut(rows).for_each(|query| bound::fold(&key(), None, query));
    let mut group = c.benchmark_group("bounds of pages");
    group.throughput(Throughput::Bytes((PAGES * 2 * rows * size_of::<[f32; LANES]>()) as u64));
    on_all_lanes(&mut group, "", PAGES, |lanes, out: &mut [f32]| {
        bounds::largest(lanes, &queries, rows, &pages, out);
    });
}
