//! Rows, options and states that are refused, which change nothing.

use crate::{all, session};
use pikv::Position;
use pikv::router::{
    Adaptive, Arm, CacheAware, EntropyPenalised, Hashed, Hierarchical, LoadBalanced, PageFeedback,
    RouteError, Router, RouterKind, RouterState, Routes, Shape, StateError, TopK,
};

#[test]
fn bad_rows_are_refused_and_change_nothing() {
    for mut router in all(Shape::new(8, 2)) {
        session(&mut *router, 0..2, 6);
        let mut routes = Routes::default();
        router.route(Position(0), &[0.5; 8], &mut routes).unwrap();
        let before = (router.state(), routes.clone());
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [0.0; 24];
            x[13] = value;
            let err = router.route(Position(0), &x, &mut routes).unwrap_err();
            assert!(matches!(err, RouteError::Logit { row: 1, expert: 5, .. }), "{err}");
        }
        let err = router.route(Position(0), &[0.0; 23], &mut routes).unwrap_err();
        assert!(matches!(err, RouteError::Length { what: "logits", got: 23, expected: 16, .. }));
        let err = router.route(Position::MAX, &[0.0; 16], &mut routes).unwrap_err();
        assert_eq!(err, RouteError::Position { position: u64::from(Position::MAX.0) + 1 });
        let err = router.observe(&PageFeedback::new(&[0; 8], &[0; 7])).unwrap_err();
        assert!(matches!(err, RouteError::Length { what: "missed", got: 7, expected: 8, .. }));
        let err = router.observe(&PageFeedback::new(&[0; 9], &[0; 8])).unwrap_err();
        assert!(matches!(err, RouteError::Length { what: "wanted", .. }));
        let err = router.observe(&PageFeedback::new(&[2; 8], &[0, 0, 0, 3, 0, 0, 0, 0])).unwrap_err();
        assert_eq!(err, RouteError::Feedback { expert: 3, missed: 3, wanted: 2 });
        assert_eq!((router.state(), routes.clone()), before);
        // Rows of another width need other routes.
        let mut other = TopK.router(Shape::new(8, 3)).unwrap();
        let err = other.route(Position(0), &[0.0; 8], &mut routes).unwrap_err();
        assert!(matches!(err, RouteError::Routes { held: 2, top_k: 3, .. }));
        routes.clear();
        other.route(Position(0), &[0.0; 8], &mut routes).unwrap();
        assert_eq!(routes.rows(), 1);
        // No rows are no rows.
        router.route(Position::MAX, &[], &mut Routes::default()).unwrap();
    }
}

#[test]
fn bad_options_are_refused() {
    use RouteError as E;
    let s = Shape::new;
    let shape = s(8, 2);
    assert_eq!(TopK.router(s(0, 0)).unwrap_err(), E::Experts(0));
    assert_eq!(TopK.router(s(1025, 2)).unwrap_err(), E::Experts(1025));
    assert!(TopK.router(s(1024, 1024)).is_ok());
    assert_eq!(TopK.router(s(8, 9)).unwrap_err(), E::TopK { top_k: 9, experts: 8 });
    assert_eq!(TopK.router(s(8, 0)).unwrap_err(), E::TopK { top_k: 0, experts: 8 });
    assert_eq!(Hashed::default().router(s(0, 1)).unwrap_err(), E::Experts(0));
    let err = Hashed::default().stride(4).router(s(8, 3)).unwrap_err();
    assert_eq!(err, E::Stride { stride: 4, experts: 8, distinct: 2, top_k: 3 });

    for alpha in [0.0, -1.0, f32::NAN, f32::INFINITY, 2e6] {
        let err = LoadBalanced::default().alpha(alpha).router(shape).unwrap_err();
        assert!(matches!(err, E::Coefficient { name: "alpha", .. }));
        let err = CacheAware::default().lambda(alpha).router(shape).unwrap_err();
        assert!(matches!(err, E::Coefficient { name: "lambda", .. }));
        let err = EntropyPenalised::default().beta(alpha).router(shape).unwrap_err();
        assert!(matches!(err, E::Coefficient { name: "beta", .. }));
    }
    for ema in [1.0, -0.1, f32::NAN] {
        let err = LoadBalanced::default().ema(ema).router(shape).unwrap_err();
        assert!(matches!(err, E::Decay { name: "load average", .. }));
        let err = CacheAware::default().ema(ema).router(shape).unwrap_err();
        assert!(matches!(err, E::Decay { name: "miss average", .. }));
        let err = EntropyPenalised::default().ema(ema).router(shape).unwrap_err();
        assert!(matches!(err, E::Decay { name: "entropy average", .. }));
    }
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let err = CacheAware::default().cap(cap).router(shape).unwrap_err();
        assert!(matches!(err, E::Cap(_)));
    }
    let err = LoadBalanced::default().model_choice(true).router(shape).unwrap_err();
    assert_eq!(err, E::Uncapped);
    assert!(LoadBalanced::default().model_choice(true).cap(1.0).router(shape).is_ok());

    let groups = |groups, kept, best, shape| {
        Hierarchical::default().groups(groups).kept(kept).best(best).router(shape).unwrap_err()
    };
    assert_eq!(groups(3, 1, 1, shape), E::Groups { groups: 3, experts: 8 });
    assert_eq!(groups(0, 1, 1, shape), E::Groups { groups: 0, experts: 8 });
    assert_eq!(groups(64, 1, 1, s(64, 1)), E::Groups { groups: 64, experts: 64 });
    assert_eq!(groups(4, 5, 1, shape), E::Kept { kept: 5, groups: 4, size: 2, top_k: 2 });
    assert_eq!(groups(8, 1, 1, shape), E::Kept { kept: 1, groups: 8, size: 1, top_k: 2 });
    assert_eq!(groups(4, 2, 3, shape), E::Best { best: 3, size: 2 });
    assert_eq!(groups(4, 2, 0, shape), E::Best { best: 0, size: 2 });
    // Settings that always rank as R_T are refused, and their neighbours are accepted.
    assert_eq!(groups(4, 2, 1, shape), E::Idle { groups: 4, kept: 2, best: 1, top_k: 2 });
    assert_eq!(groups(4, 4, 2, shape), E::Idle { groups: 4, kept: 4, best: 2, top_k: 2 });
    assert!(groups(4, 4, 2, shape).to_string().contains("always ranks as R_T"));
    for (kept, best) in [(1, 1), (1, 2), (2, 2), (3, 2)] {
        Hierarchical::default().kept(kept).best(best).router(shape).unwrap();
    }
    for (experts, top_k) in [(1, 1), (2, 1), (3, 1), (5, 2), (7, 1), (8, 7), (64, 64)] {
        assert!(
            Hierarchical::fitting(experts, top_k).router(s(experts, top_k)).is_err(),
            "{top_k} of {experts}"
        );
    }
    for (experts, top_k) in
        [(4, 1), (4, 2), (6, 2), (8, 2), (8, 6), (9, 2), (60, 4), (64, 8), (128, 8), (1000, 3)]
    {
        Hierarchical::fitting(experts, top_k).router(s(experts, top_k)).unwrap();
    }

    let adaptive = || Adaptive::new(2, 0);
    assert_eq!(adaptive().arms(vec![]).router(shape).unwrap_err(), E::NoArms);
    let arms = [Adaptive::default_arms(2), vec![Adaptive::default_arms(2)[2]]].concat();
    let err = adaptive().arms(arms).router(shape).unwrap_err();
    assert_eq!(err, E::SameArms { first: 2, second: 7 });
    let fetch = |fetch| adaptive().arms(vec![Arm::new(Default::default(), fetch)]);
    for n in [0, 3] {
        assert_eq!(fetch(n).router(shape).unwrap_err(), E::Fetch { arm: 0, fetch: n, top_k: 2 });
    }
    let err = adaptive().width(0.0).router(shape).unwrap_err();
    assert!(matches!(err, E::Coefficient { name: "width", .. }));
    let err = adaptive().memory(1.0).router(shape).unwrap_err();
    assert!(matches!(err, E::Decay { name: "memory", .. }));
    let err = adaptive().model_choice(true).cap(None).router(shape).unwrap_err();
    assert_eq!(err, E::Uncapped);
}

#[test]
fn bad_states_are_refused_and_change_nothing() {
    let shape = Shape::new(8, 2);
    let states: Vec<RouterState> = all(shape)
        .into_iter()
        .map(|mut router| {
            session(&mut *router, 0..4, 6);
            router.state()
        })
        .collect();
    for (i, state) in states.iter().enumerate() {
        let bytes = state.to_bytes();
        for n in 0..bytes.len() {
            let err = RouterState::from_bytes(&bytes[..n]).unwrap_err();
            assert!(matches!(err, StateError::Bytes { .. }), "{n}: {err}");
        }
        let long = [&bytes[..], &[0]].concat();
        assert!(matches!(RouterState::from_bytes(&long), Err(StateError::Bytes { .. })));
        let at = |i: usize, x: u8| {
            let mut bytes = bytes.clone();
            bytes[i] = x;
            RouterState::from_bytes(&bytes)
        };
        assert_eq!(at(0, b'X'), Err(StateError::Magic));
        assert_eq!(at(4, 9), Err(StateError::Version(9)));
        assert_eq!(at(7, 2), Err(StateError::Kind(u16::from(bytes[6]) | 512)));
        assert_eq!(RouterState::from_bytes(b"nonsense").unwrap_err(), StateError::Magic);

        // The state of another router or shape.
        let mut router = all(shape).swap_remove(i);
        let before = router.state();
        for other in states.iter().filter(|s| s.router != state.router) {
            let err = router.restore(other).unwrap_err();
            assert!(matches!(err, RouteError::State(StateError::Router { .. })));
        }
        let wide = all(Shape::new(9, 2)).swap_remove(i).state();
        let err = router.restore(&wide).unwrap_err();
        assert!(matches!(err, RouteError::State(StateError::Shape { what: "experts", got: 9, expected: 8 })));
        for value in [f32::NAN, -1.0, f32::INFINITY] {
            let averages: [fn(&mut RouterState) -> &mut Vec<f32>; 4] =
                [|s| &mut s.load, |s| &mut s.miss, |s| &mut s.entropy, |s| &mut s.entropy_next];
            for average in averages {
                let mut bad = state.clone();
                let Some(x) = average(&mut bad).last_mut() else { continue };
                *x = value;
                let err = router.restore(&bad).unwrap_err();
                assert!(matches!(err, RouteError::State(StateError::Value { index: 7, .. })));
                assert!(matches!(RouterState::from_bytes(&bad.to_bytes()), Err(StateError::Value { .. })));
            }
        }
        assert_eq!(router.state(), before);

        // Whatever one byte is changed to: refused, or a router that still works.
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            if let Ok(state) = RouterState::from_bytes(&bytes)
                && router.restore(&state).is_ok()
            {
                session(&mut *router, 0..2, 6);
            }
        }
    }
    // An entropy is at most 1, and there is one a expert or none.
    let kept = states.iter().find(|s| s.router == RouterKind::Entropy).unwrap();
    let mut router = EntropyPenalised::default().router(shape).unwrap();
    let mut bad = kept.clone();
    bad.entropy[3] = 1.0001;
    let err = router.restore(&bad).unwrap_err();
    assert!(matches!(err, RouteError::State(StateError::Value { what: "entropy", index: 3, .. })), "{err}");
    let mut bad = kept.clone();
    bad.entropy_next.clear();
    let err = router.restore(&bad).unwrap_err();
    assert!(matches!(err, RouteError::State(StateError::Shape { what: "next entropies", .. })), "{err}");

    let mut bad = states.iter().find(|s| s.bandit.is_some()).unwrap().clone();
    let mut router = Adaptive::new(2, 5).router(shape).unwrap();
    let bandit = bad.bandit.as_mut().unwrap();
    bandit.arms[1].gram[1] = 1e9;
    let err = router.restore(&bad).unwrap_err();
    assert!(matches!(err, RouteError::State(StateError::Value { what: "gram matrix of arm", index: 1, .. })));
    bad.bandit.as_mut().unwrap().arms.pop();
    let err = router.restore(&bad).unwrap_err();
    assert!(matches!(err, RouteError::State(StateError::Shape { what: "arms", .. })));
}
