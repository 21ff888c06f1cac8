//! Every router with default options ranks differently from R_T, and no two of R_A's arms rank alike.

use crate::{logits, mix};
use pikv::Position;
use pikv::router::{
    Adaptive, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, PageFeedback, Router,
    RouterKind, Routes, Shape, TopK,
};

const TOKENS: u64 = 4000;

/// A router's ranking of a stream of single tokens: the gate prefers the first experts, and every third expert's pages miss.
fn ranked(router: &mut dyn Router) -> Vec<Vec<u16>> {
    let experts = router.shape().experts as usize;
    let wanted = vec![8; experts];
    let missed: Vec<u32> = (0..experts).map(|e| if e % 3 == 1 { 7 } else { 1 }).collect();
    let token = |t| {
        let mut x = logits(0, t, 1, experts);
        x.iter_mut().enumerate().for_each(|(e, x)| *x -= e as f32 / experts as f32);
        let mut routes = Routes::default();
        router.route(Position(t as u32), &x, &mut routes).unwrap();
        router.observe(&PageFeedback::new(&wanted, &missed)).unwrap();
        routes.filing().experts.clone()
    };
    (0..TOKENS).map(token).collect()
}

/// Share of the tokens that two routers rank otherwise.
fn differing(a: &[Vec<u16>], b: &[Vec<u16>]) -> f64 {
    let n = a.iter().zip(b).filter(|(a, b)| a != b).count();
    n as f64 / a.len() as f64
}

#[test]
fn every_router_acts_at_its_defaults() {
    for (experts, top_k) in [(8, 2), (64, 6), (16, 2)] {
        let shape = Shape::new(experts, top_k);
        let plain = ranked(&mut TopK.router(shape).unwrap());
        let routers: [Box<dyn Router>; 6] = [
            Box::new(Hashed::default().router(shape).unwrap()),
            Box::new(LoadBalanced::default().router(shape).unwrap()),
            Box::new(CacheAware::default().router(shape).unwrap()),
            Box::new(EntropyPenalised::default().router(shape).unwrap()),
            Box::new(Adaptive::new(top_k, mix(1)).router(shape).unwrap()),
            Box::new(Hierarchical::default().router(shape).unwrap()),
        ];
        for mut router in routers {
            let share = differing(&ranked(&mut *router), &plain);
            // The biases are small beside the logits; a hash and groups are not.
            let least = match router.kind() {
                RouterKind::Hash => 0.9,
                RouterKind::Hierarchical => 0.02,
                _ => 0.005,
            };
            assert!(share >= least, "{} of {experts}: {share}", router.kind());
        }
    }
}

#[test]
fn no_two_arms_rank_alike() {
    for (experts, top_k) in [(8, 2), (64, 6), (8, 1)] {
        let arms = Adaptive::default_arms(top_k);
        let of = |arm| Adaptive::new(top_k, 1).arms(vec![arm]).router(Shape::new(experts, top_k));
        let ranked: Vec<_> = arms.iter().map(|arm| ranked(&mut of(*arm).unwrap())).collect();
        for a in 0..arms.len() {
            for b in 0..a {
                let share = differing(&ranked[a], &ranked[b]);
                assert!(share > 0.0, "{:?} and {:?}, {top_k} of {experts}", arms[a], arms[b]);
            }
        }
    }
}
