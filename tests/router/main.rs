//! Routers compared with independent oracles, on all lanes, in any batches, saved and restored.

mod acts;
mod bandit;
mod biases;
mod oracles;
mod placement;
mod refused;
mod same;

use pikv::Position;
use pikv::router::{
    Adaptive, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, Misses, PageFeedback,
    RouteError, Router, Routes, Shape, Start, TopK,
};

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Logits `[rows][experts]` of one of several kinds.
fn logits(kind: usize, salt: u64, rows: usize, experts: usize) -> Vec<f32> {
    let unit = |i: usize| (mix(salt << 32 | i as u64) >> 40) as f32 / 8_388_608.0 - 1.0;
    let one = |i: usize| match kind {
        0 => unit(i) * 3.0,
        1 => 0.0,
        // One hot expert.
        2 => unit(i) + if i % experts == experts / 3 { 20.0 } else { 0.0 },
        // Many ties.
        3 => (unit(i) * 2.0).round(),
        _ => unit(i) * 1e6,
    };
    (0..rows * experts).map(one).collect()
}

const KINDS: usize = 5;

/// Pages wanted and missed by each expert.
fn pages(salt: u64, experts: usize) -> (Vec<u32>, Vec<u32>) {
    let wanted: Vec<u32> = (0..experts).map(|e| (mix(salt ^ (e as u64) << 20) % 5) as u32 * 3).collect();
    let missed = wanted.iter().enumerate().map(|(e, w)| if e % 3 == 1 { *w } else { w / 4 }).collect();
    (wanted, missed)
}

/// (experts, top_k) that break careless code.
const SHAPES: [(u32, u32); 10] =
    [(1, 1), (2, 2), (4, 1), (8, 2), (33, 4), (64, 6), (64, 64), (256, 8), (270, 5), (1000, 3)];

/// Every router, with strong coefficients so that the bias decides often.
fn all(shape: Shape) -> Vec<Box<dyn Router>> {
    let follow = |model_choice| CacheAware::default().lambda(2.0).model_choice(model_choice);
    let mut all: Vec<Box<dyn Router>> = vec![
        Box::new(Hashed::default().router(shape).unwrap()),
        Box::new(Hashed::default().start(Start::RoundRobin).router(shape).unwrap()),
        Box::new(TopK.router(shape).unwrap()),
        Box::new(LoadBalanced::default().alpha(0.5).router(shape).unwrap()),
        Box::new(follow(false).router(shape).unwrap()),
        Box::new(follow(true).router(shape).unwrap()),
        Box::new(CacheAware::default().misses(Misses::Count).router(shape).unwrap()),
        Box::new(EntropyPenalised::default().beta(3.0).router(shape).unwrap()),
        Box::new(Adaptive::new(shape.top_k, 5).router(shape).unwrap()),
    ];
    // With few experts no setting of groups acts.
    match Hierarchical::fitting(shape.experts, shape.top_k).router(shape) {
        Ok(router) => all.push(Box::new(router)),
        Err(error) => assert!(matches!(error, RouteError::Idle { .. } | RouteError::Best { .. }), "{error}"),
    }
    all
}

/// All of some routes, to compare by bits.
type Bits = (Vec<u16>, Vec<u32>, Vec<u16>, Vec<u32>, usize);

fn bits(routes: &Routes) -> Bits {
    let w = |w: &[f32]| w.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let (m, f) = (routes.model(), routes.filing());
    (m.experts.clone(), w(&m.weights), f.experts.clone(), w(&f.weights), routes.fetch())
}

/// Routes `rows` tokens a step in pieces of `piece`, for some steps from `from`; returns the choices, and the last state's bytes.
fn session(router: &mut dyn Router, steps: std::ops::Range<u64>, piece: usize) -> (Vec<Bits>, Vec<u8>) {
    let experts = router.shape().experts as usize;
    let rows = 6;
    let mut log = vec![];
    for step in steps {
        let x = logits(step as usize % KINDS, step, rows, experts);
        let mut routes = Routes::default();
        for (i, x) in x.chunks(piece * experts).enumerate() {
            let first = Position((step as usize * rows + i * piece) as u32);
            router.route(first, x, &mut routes).unwrap();
        }
        assert_eq!(routes.rows(), rows);
        log.push(bits(&routes));
        let (wanted, missed) = pages(step, experts);
        router.observe(&PageFeedback::new(&wanted, &missed).remote_bytes(step << 20)).unwrap();
    }
    (log, router.state().to_bytes())
}

/// The plain top-k of a row.
fn plain(x: &[f32], k: usize) -> Vec<u16> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].partial_cmp(&x[*a]).unwrap().then(a.cmp(b)));
    order[..k].iter().map(|e| *e as u16).collect()
}

#[track_caller]
fn check_weights(x: &[f32], chosen: &[u16], weights: &[f32]) {
    let at = |e: &u16| f64::from(x[usize::from(*e)]);
    let top = chosen.iter().map(at).fold(f64::MIN, f64::max);
    let sum: f64 = chosen.iter().map(|e| (at(e) - top).exp()).sum();
    for (e, got) in chosen.iter().zip(weights) {
        let want = (at(e) - top).exp() / sum;
        assert!((f64::from(*got) - want).abs() < 1e-6, "weight of {e} is {got}, expected {want}");
    }
}
