//! R_A on small problems with a known best arm.

use crate::{logits, mix};
use pikv::Position;
use pikv::router::{Adaptive, Arm, Coefficients, PageFeedback, Router, Routes, Shape};

/// Two arms, of which `good` misses fewer pages; the arms that were in use.
fn toy(seed: u64, steps: u64, memory: f32, good: impl Fn(u64) -> usize) -> Vec<usize> {
    let lambda = Coefficients::new(0.0, 0.2, 0.0);
    let arms = vec![Arm::new(Coefficients::default(), 2), Arm::new(lambda, 1)];
    let options = Adaptive::new(2, seed).arms(arms).memory(memory);
    let mut router = options.router(Shape::new(8, 2)).unwrap();
    let mut used = vec![];
    for step in 0..steps {
        let arm = router.arm();
        used.push(arm);
        let mut routes = Routes::default();
        router.route(Position(0), &logits(0, step, 4, 8), &mut routes).unwrap();
        assert_eq!(routes.fetch(), [2, 1][arm]);
        let noise = (mix(step) % 21) as u32;
        let missed = if arm == good(step) { 10 + noise } else { 50 + noise };
        router.observe(&PageFeedback::new(&[100; 8], &[missed; 8])).unwrap();
    }
    used
}

#[test]
fn the_bandit_finds_the_better_arm() {
    for good in [0, 1] {
        for seed in 0..8 {
            let used = toy(seed, 500, 0.999, |_| good);
            let hits = used[200..].iter().filter(|arm| **arm == good).count();
            assert!(hits >= 270, "seed {seed}: {hits} of 300");
        }
    }
}

#[test]
fn the_bandit_changes_its_mind() {
    for seed in 0..4 {
        let used = toy(seed, 1200, 0.98, |step| usize::from(step >= 400));
        let hits = used[900..].iter().filter(|arm| **arm == 1).count();
        assert!(hits >= 240, "seed {seed}: {hits} of 300");
    }
}

#[test]
fn the_bandit_is_its_seeds() {
    let run = |seed| toy(seed, 100, 0.999, |_| 1);
    assert_eq!(run(3), run(3));
    assert!((0..8).any(|seed| run(seed) != run(3)));
}

#[test]
fn remote_bytes_and_imbalance_cost_reward() {
    // The first arm fetches twice the bytes, or files all on one expert; all else is equal.
    for (remote, alpha) in [(true, 0.0), (false, 2.0)] {
        let second = Coefficients::new(alpha, 0.0, 0.0);
        let arms = vec![Arm::new(Coefficients::default(), 2), Arm::new(second, if remote { 1 } else { 2 })];
        let options = Adaptive::new(2, 1).arms(arms).remote_cost(0.05).imbalance_cost(0.5);
        let mut router = options.router(Shape::new(8, 2)).unwrap();
        let mut used = vec![];
        for step in 0..400 {
            used.push(router.arm());
            let x: Vec<f32> = logits(0, step, 16, 8)
                .iter()
                .enumerate()
                .map(|(i, x)| x / 3.0 - (i % 8) as f32 / 8.0)
                .collect();
            router.route(Position(0), &x, &mut Routes::default()).unwrap();
            let bytes = if remote { 10 - 8 * router.arm() as u64 } else { 0 };
            router.observe(&PageFeedback::new(&[10; 8], &[1; 8]).remote_bytes(bytes << 20)).unwrap();
        }
        let hits = used[200..].iter().filter(|arm| **arm == 1).count();
        assert!(hits >= 150, "{hits} of 200, remote {remote}");
    }
}

#[test]
fn old_sums_are_forgotten_step_by_step() {
    // One arm, with context [1, 0, 0]: no misses and an even load. All numbers are exact in binary.
    let arms = vec![Arm::new(Coefficients::default(), 2)];
    let options = Adaptive::new(2, 1).arms(arms).memory(0.5).imbalance_cost(0.0);
    let mut router = options.router(Shape::new(2, 2)).unwrap();
    let mut want = (0.0, 0.0);
    for step in 0..20u32 {
        router.route(Position(step), &[1.0, 0.0], &mut Routes::default()).unwrap();
        // Half of the hits, then all of them: the reward of step i is 1 or 1/2.
        let missed = 2 * (step % 2);
        router.observe(&PageFeedback::new(&[4; 2], &[missed; 2])).unwrap();
        let reward = 1.0 - f64::from(missed) / 4.0;
        let arm = router.state().bandit.unwrap().arms[0];
        want = (0.5 * want.0 + 1.0, 0.5 * want.1 + reward);
        assert_eq!((arm.gram[0], arm.reward[0]), want, "step {step}");
    }
    assert!(want.0 < 2.0);
}

/// After a step without wanted pages the arm stays and gets no reward, while averages are updated.
#[test]
fn an_arm_waits_for_a_step_that_wants_something() {
    let mut router = Adaptive::new(2, 5).router(Shape::new(8, 2)).unwrap();
    let before = router.state();
    for step in 0..50 {
        router.route(Position(0), &logits(0, step, 4, 8), &mut Routes::default()).unwrap();
        router.observe(&PageFeedback::new(&[0; 8], &[0; 8])).unwrap();
    }
    assert_eq!(router.state().bandit, before.bandit);
    assert_ne!(router.state().load, before.load);
    router.route(Position(0), &logits(0, 50, 4, 8), &mut Routes::default()).unwrap();
    router.observe(&PageFeedback::new(&[4; 8], &[1; 8])).unwrap();
    assert_ne!(router.state().bandit, before.bandit);
}
