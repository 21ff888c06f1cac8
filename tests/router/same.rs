//! Equal bits on all lanes, in any batches, and after a restore.

use crate::{SHAPES, all, logits, session};
use pikv::lanes::Lanes;
use pikv::router::{RouterState, Routes, Shape};
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Position};

#[test]
fn every_lanes_and_every_batch_give_the_same_bits() {
    for (experts, top_k) in SHAPES {
        let portable = Shape::new(experts, top_k).lanes(Lanes::Portable);
        for (i, mut reference) in all(portable).into_iter().enumerate() {
            let want = session(&mut *reference, 0..8, 6);
            for lanes in Lanes::available() {
                for piece in [1, 4, 6] {
                    let mut router = all(Shape::new(experts, top_k).lanes(lanes)).swap_remove(i);
                    let got = session(&mut *router, 0..8, piece);
                    let what =
                        format!("{} of {experts}, {} lanes, pieces of {piece}", router.kind(), lanes.name());
                    assert!(got == want, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_restored_router_goes_on_exactly() {
    for (experts, top_k) in SHAPES {
        for (i, mut first) in all(Shape::new(experts, top_k)).into_iter().enumerate() {
            session(&mut *first, 0..5, 6);
            // In the middle of a step: its choices are part of the state.
            let mut routes = Routes::default();
            first.route(Position(30), &logits(0, 77, 3, experts as usize), &mut routes).unwrap();
            let bytes = first.state().to_bytes();
            let state = RouterState::from_bytes(&bytes).unwrap();
            assert_eq!(state, first.state());
            let mut second = all(Shape::new(experts, top_k)).swap_remove(i);
            second.restore(&state).unwrap();
            assert_eq!(second.state().to_bytes(), bytes);
            assert!(session(&mut *first, 5..10, 6) == session(&mut *second, 5..10, 2), "{}", first.kind());
        }
    }
}

#[test]
fn discarded_choices_never_happened() {
    let shape = Shape::new(33, 4);
    for (i, mut first) in all(shape).into_iter().enumerate() {
        let mut second = all(shape).swap_remove(i);
        session(&mut *first, 0..3, 6);
        session(&mut *second, 0..3, 6);
        second.route(Position(0), &logits(2, 5, 9, 33), &mut Routes::default()).unwrap();
        second.discard();
        assert!(session(&mut *first, 3..6, 6) == session(&mut *second, 3..6, 6), "{}", first.kind());
    }
}

#[test]
fn routers_are_send_and_sync_and_a_step_takes_their_filing() {
    fn check<T: Send + Sync>(_: &T) {}
    let layer = LayerShape::new(1, 1, 4, Dtype::F32);
    for mut router in all(Shape::new(8, 2)) {
        check(&router);
        let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(8).experts(8, 2)).unwrap();
        let (mut a, mut b) = (cache.sequence(), cache.sequence());
        let mut step = cache.begin([(&mut a, 40), (&mut b, 3)]).unwrap();
        step.append(0, &[0.5; 43 * 4], &[0.5; 43 * 4]).unwrap();
        let mut routes = Routes::default();
        router.route(Position(0), &logits(0, 1, 40, 8), &mut routes).unwrap();
        router.route(Position(0), &logits(0, 2, 3, 8), &mut routes).unwrap();
        step.route(0, &routes.filing().experts).unwrap();
        step.commit().unwrap();
    }
}
