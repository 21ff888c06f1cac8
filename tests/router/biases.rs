//! The effect of each bias, and its limits.

use crate::{SHAPES, all};
use pikv::Position;
use pikv::router::{
    CacheAware, EntropyPenalised, LoadBalanced, Misses, PageFeedback, Router, RouterKind, Routes, Shape,
};

fn one_row(router: &mut dyn Router, x: &[f32]) -> (Vec<u16>, Vec<u16>) {
    let mut routes = Routes::default();
    router.route(Position(0), x, &mut routes).unwrap();
    (routes.filing().experts.clone(), routes.model().experts.clone())
}

#[test]
fn a_missing_expert_is_ranked_lower_and_comes_back() {
    let x = [1.0, 0.98, 0.97, 0.0];
    for misses in [Misses::Rate, Misses::Count] {
        let mut router = CacheAware::default().misses(misses).router(Shape::new(4, 2)).unwrap();
        assert_eq!(one_row(&mut router, &x).0, [0, 1]);
        for _ in 0..10 {
            router.observe(&PageFeedback::new(&[4; 4], &[0, 4, 0, 0])).unwrap();
        }
        assert_eq!(one_row(&mut router, &x), (vec![0, 2], vec![0, 1]));
        for _ in 0..100 {
            router.observe(&PageFeedback::new(&[4; 4], &[0; 4])).unwrap();
        }
        assert_eq!(one_row(&mut router, &x).0, [0, 1]);
    }
    // The rate does not know how many pages there are, nor changes while nothing is wanted; the count does.
    let run = |misses, wanted: [u32; 2], missed: [u32; 2]| {
        let mut router = CacheAware::default().misses(misses).router(Shape::new(2, 1)).unwrap();
        router.observe(&PageFeedback::new(&wanted, &missed)).unwrap();
        router.observe(&PageFeedback::new(&[0, 0], &[0, 0])).unwrap();
        router.miss().to_vec()
    };
    let rate = run(Misses::Rate, [1000, 10], [500, 5]);
    assert!(rate[0] == rate[1] && (rate[0] - 0.05).abs() < 1e-6);
    let count = run(Misses::Count, [1000, 10], [500, 5]);
    assert!((count[0] - 450.0).abs() < 1e-3 && (count[1] - 4.5).abs() < 1e-5);
}

#[test]
fn an_overloaded_expert_is_ranked_lower() {
    let mut router = LoadBalanced::default().router(Shape::new(4, 1)).unwrap();
    let x = [1.0, 0.98, 0.96, 0.94];
    let mut chosen = vec![];
    for _ in 0..400 {
        chosen.extend(one_row(&mut router, &x).0);
        router.observe(&PageFeedback::new(&[0; 4], &[0; 4])).unwrap();
    }
    assert_eq!(chosen[0], 0);
    // At rest the biased scores are equal, so loads differ by the logits over alpha: 1.3, 1.1, 0.9, 0.7 times 50 of 200.
    for (e, want) in [65, 55, 45, 35].into_iter().enumerate() {
        let n = chosen[200..].iter().filter(|c| usize::from(**c) == e).count();
        assert!(n.abs_diff(want) <= 10, "expert {e} chosen {n} times, expected {want}");
    }
    assert!((router.load().iter().sum::<f32>() - 4.0).abs() < 1e-3);
}

#[test]
fn an_expert_that_the_gate_stays_undecided_about_is_ranked_lower() {
    // p is .5, .25, .25 in the first rows, so h is 1, .81, .81 in the end; the last row has nearly equal logits.
    let (undecided, near) = ([0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()], [1.0, 0.995, 0.5]);
    let mut router = EntropyPenalised::default().router(Shape::new(3, 1)).unwrap();
    assert_eq!(router.entropy(), [0.5; 3]);
    assert_eq!(one_row(&mut router, &near).0, [0]);
    router.discard();
    let mut routes = Routes::default();
    router.route(Position(0), &undecided.repeat(50), &mut routes).unwrap();
    // Rows of the step itself do not count yet.
    assert_eq!(router.entropy(), [0.5; 3]);
    assert_eq!(one_row(&mut router, &near).0, [0]);
    router.discard();
    assert_eq!(router.state().entropy_next, [0.5; 3]);
    router.route(Position(0), &undecided.repeat(50), &mut Routes::default()).unwrap();
    router.observe(&PageFeedback::new(&[0; 3], &[0; 3])).unwrap();
    let h = router.entropy();
    assert!((h[0] - 1.0).abs() < 0.01 && (h[1] - 0.8113).abs() < 0.01 && h[1] == h[2], "{h:?}");
    assert_eq!(one_row(&mut router, &near), (vec![1], vec![0]));
}

#[test]
fn the_cap_holds_the_bias_and_the_weights_have_none() {
    let x = [1.0, 0.6, 0.0];
    let feedback = |cap| {
        let mut router = CacheAware::default().lambda(100.0).cap(cap).router(Shape::new(3, 2)).unwrap();
        for _ in 0..50 {
            router.observe(&PageFeedback::new(&[9; 3], &[9, 0, 0])).unwrap();
        }
        let mut routes = Routes::default();
        router.route(Position(0), &x, &mut routes).unwrap();
        routes
    };
    assert_eq!(feedback(None).filing().experts, [1, 2]);
    assert_eq!(feedback(Some(0.3)).filing().experts, [0, 1]);
    let routes = feedback(Some(0.5));
    assert_eq!((&routes.filing().experts[..], &routes.model().experts[..]), (&[1, 0][..], &[0, 1][..]));
    let (f, m) = (&routes.filing().weights, &routes.model().weights);
    assert_eq!([f[0].to_bits(), f[1].to_bits()], [m[1].to_bits(), m[0].to_bits()]);
}

#[test]
fn equal_scores_go_to_the_lower_index() {
    for (experts, top_k) in SHAPES {
        let want: Vec<u16> = (0..top_k as u16).collect();
        for mut router in all(Shape::new(experts, top_k)) {
            let (filing, model) = one_row(&mut *router, &vec![-7.25; experts as usize]);
            if router.kind() != RouterKind::Hash {
                assert_eq!(filing, want, "{}", router.kind());
            }
            assert_eq!(model, want);
        }
    }
}

/// The number of experts that a token fetches follows the entropy of its gate; the filing does not change.
#[test]
fn an_undecided_gate_fetches_more() {
    let shape = Shape::new(8, 2);
    let mut plain = EntropyPenalised::default().router(shape).unwrap();
    let mut more = EntropyPenalised::default().more(2).router(shape).unwrap();
    // Sure, in between, nearly undecided, undecided: entropies of 0.02, 0.50, 0.93 and 1 of that of a uniform gate. The last third of
    // entropies fetches two more.
    let rows = [
        [9.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        [3.0, 2.5, 0.9, 0.8, -2.0, -2.0, -2.0, -2.0],
        [1.5, 1.2, 0.9, 0.6, 0.0, 0.0, 0.0, 0.0],
        [0.0; 8],
    ];
    let (mut a, mut b) = (Routes::default(), Routes::default());
    for row in rows {
        plain.route(Position(0), &row, &mut a).unwrap();
        more.route(Position(0), &row, &mut b).unwrap();
    }
    assert_eq!((a.filing(), a.model(), a.fetch()), (b.filing(), b.model(), b.fetch()));
    let fetched =
        |routes: &Routes| (0..5).map(|row| routes.fetched(row).collect()).collect::<Vec<Vec<u16>>>();
    assert_eq!(fetched(&a), [vec![0, 1], vec![0, 1], vec![0, 1], vec![0, 1], vec![]]);
    assert_eq!(fetched(&b), [vec![0, 1], vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 2, 3], vec![]]);
    b.clear();
    assert_eq!(b.fetched(0).count(), 0);
    // There are no more experts than there are.
    let mut all = EntropyPenalised::default().more(9).router(Shape::new(3, 2)).unwrap();
    all.route(Position(0), &[0.0; 3], &mut b).unwrap();
    assert_eq!(b.fetched(0).collect::<Vec<_>>(), [0, 1, 2]);
}
