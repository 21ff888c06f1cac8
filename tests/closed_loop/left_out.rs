//! Routers learn nothing of a sequence that was left out of a step: a loop whose steps are left by some sequences is compared with a twin
//! whose steps never had them. Choices made before are repeated after a rollback.

use super::{DIM, EXPERTS, LAYERS, bits, config, routers, rows, states};
use pikv::closed_loop::LoopError;
use pikv::policy::{Budget, Eviction, H2o};
use pikv::router::{RouteError, Router, Shape, TopK};
use pikv::rules::Hits;
use pikv::{Attend, AttendOutput, Cache, ClosedLoop, Error, ReadPages, Sequence};
use pikv_test::numbers::Rng;
use pikv_test::routers::Wrapped;
use pikv_test::scaled;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn looped(id: usize, rollback: u32) -> (Cache, ClosedLoop) {
    let evict = Eviction::new(H2o, Budget::Tokens(40)).batch(4);
    let hits = Hits::new().pages(2).every(1);
    let cache = Cache::new(config(2).rollback(rollback).hits(hits).evict(evict)).unwrap();
    (cache.clone(), ClosedLoop::new(cache, routers(id, 2)).unwrap())
}

/// A part of a step: rows, the seed of their numbers, and after how many calls it leaves.
#[derive(Clone, Copy)]
struct Part {
    rows: usize,
    seed: u64,
    leaves: Option<usize>,
}

/// A step; for each layer the outputs and the model's experts and weights of the rows that stay.
fn step(pikv: &mut ClosedLoop, sequences: Vec<&mut Sequence>, parts: &[Part]) -> Vec<Vec<u32>> {
    let given = sequences.into_iter().zip(parts).map(|(sequence, part)| (sequence, part.rows as u32));
    let mut step = pikv.begin(given).unwrap();
    let (mut calls, mut all) = (0, Vec::new());
    let mut leave = |step: &mut pikv::closed_loop::LoopStep<'_>| {
        let due = parts.iter().enumerate().filter(|(_, part)| part.leaves == Some(calls));
        due.for_each(|(place, _)| step.leave_out(place).unwrap());
        calls += 1;
    };
    for layer in 0..LAYERS {
        let of = parts.iter().map(|part| rows(part.seed, layer, part.rows));
        let [k, v, q, logits] = of.fold([const { Vec::new() }; 4], |mut sum, own| {
            sum.iter_mut().zip(own).for_each(|(sum, own)| sum.extend(own));
            sum
        });
        let mut out = vec![0.0; q.len()];
        leave(&mut step);
        let routes = step.route(layer, &logits).unwrap();
        assert_eq!(routes.rows(), logits.len() / EXPERTS);
        let (experts, weights) = (routes.model().experts.clone(), routes.model().weights.clone());
        leave(&mut step);
        step.append(layer, &k, &v).unwrap();
        leave(&mut step);
        step.attend(layer, &q, &Attend::new(1.0).read(ReadPages::Experts), AttendOutput::new(&mut out))
            .unwrap();
        leave(&mut step);
        let mut row = 0;
        let mut kept = Vec::new();
        for part in parts {
            if part.leaves.is_none() {
                let width = 4 * DIM;
                kept.extend(bits(&out[row * width..][..part.rows * width]));
                kept.extend(experts[row * 2..][..part.rows * 2].iter().map(|e| u32::from(*e)));
                kept.extend(bits(&weights[row * 2..][..part.rows * 2]));
            }
            row += part.rows;
        }
        all.push(kept);
    }
    step.commit().unwrap();
    all
}

#[test]
fn what_leaves_was_never_routed() {
    let mut left = 0;
    for (id, rollback) in (0..7).flat_map(|id| [(id, 0), (id, 8)]) {
        for seed in 0..scaled(1, 40) {
            let mut rng = Rng(seed * 16 + id as u64);
            let ((cache, mut pikv), (other, mut twin)) = (looped(id, rollback), looped(id, rollback));
            let mut a: Vec<Sequence> = (0..3).map(|_| cache.sequence()).collect();
            let mut b: Vec<Sequence> = (0..3).map(|_| other.sequence()).collect();
            for i in 0..24 {
                let parts: Vec<Part> = (0..3)
                    .map(|part| {
                        let rows = if i < 2 { 40 + rng.below(60) } else { 1 + rng.below(4) } as usize;
                        let leaves = rng.one_in(4).then(|| rng.below(8) as usize);
                        Part { rows, seed: 1000 * (seed + 1) + 10 * i + part, leaves }
                    })
                    .collect();
                left += parts.iter().filter(|part| part.leaves.is_some()).count();
                let got = step(&mut pikv, a.iter_mut().collect(), &parts);
                let stay: Vec<Part> = parts.iter().filter(|part| part.leaves.is_none()).copied().collect();
                if !stay.is_empty() {
                    let of = b.iter_mut().zip(&parts).filter(|(_, part)| part.leaves.is_none());
                    let want = step(&mut twin, of.map(|(sequence, _)| sequence).collect(), &stay);
                    assert_eq!(got, want, "router {id}, rollback {rollback}, {seed}, step {i}");
                }
                let same = states(pikv.routers()) == states(twin.routers());
                assert!(same, "router {id}, rollback {rollback}, {seed}, step {i}");
                for sequence in 0..3 {
                    assert_eq!(a[sequence].next_position(), b[sequence].next_position());
                    let n = rng.below(4).min(rollback).min(a[sequence].rollback_limit());
                    if rng.one_in(3) && rollback > 0 {
                        a[sequence].rollback(n).unwrap();
                        b[sequence].rollback(n).unwrap();
                    }
                }
                let same = states(pikv.routers()) == states(twin.routers());
                assert!(same, "router {id}, rollback {rollback}, {seed}, step {i}: taken back");
            }
        }
    }
    assert!(left > 50);
}

#[test]
fn a_router_that_refuses_is_named_and_the_sequence_has_left() {
    let stubborn: Arc<AtomicBool> = Arc::default();
    let routers = (0..LAYERS).map(|_| -> Box<dyn Router> {
        let router = Box::new(TopK.router(Shape::new(EXPERTS as u32, 2)).unwrap());
        Box::new(Wrapped { router, refuses: Arc::clone(&stubborn) })
    });
    let cache = Cache::new(config(2)).unwrap();
    let mut pikv = ClosedLoop::new(cache.clone(), routers.collect()).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    let mut step = pikv.begin([(&mut a, 1), (&mut b, 1)]).unwrap();
    let missing = LoopError::Cache(Error::NotInStep { sequence: 2, sequences: 2 });
    assert_eq!(step.leave_out(2), Err(missing));
    for layer in 0..LAYERS {
        let [k, v, q, logits] = rows(3, layer, 2);
        step.route(layer, &logits).unwrap();
        step.append(layer, &k, &v).unwrap();
        step.attend(layer, &q, &Attend::new(1.0), AttendOutput::new(&mut vec![0.0; q.len()])).unwrap();
    }
    stubborn.store(true, Ordering::SeqCst);
    let refused = LoopError::Route { layer: 0, source: RouteError::Experts(77) };
    assert_eq!(step.leave_out(0), Err(refused));
    step.commit().unwrap();
    assert_eq!((a.next_position().0, b.next_position().0), (0, 1));
}
