//! A router of the user's own that ranks by itself: in a loop, rolled back, saved and restored.

use super::{EXPERTS, config, rows, turn};
use crate::saved::go_on;
use pikv::closed_loop::LoopError;
use pikv::router::{PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape, StateError};
use pikv::{Cache, ClosedLoop, Position, ReadPages};

/// Files all tokens of a step under the experts that were chosen least; where two are equal, under the first.
#[derive(Clone, Debug)]
struct Emptiest {
    number: u8,
    load: Vec<f32>,
    counts: Vec<u64>,
}

impl Emptiest {
    fn new(number: u8) -> Emptiest {
        Emptiest { number, load: vec![1.0; EXPERTS], counts: vec![0; EXPERTS] }
    }
}

impl Router for Emptiest {
    fn kind(&self) -> RouterKind {
        RouterKind::Custom(self.number)
    }
    fn shape(&self) -> Shape {
        Shape::new(EXPERTS as u32, 2)
    }
    fn route(&mut self, _: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        let mut order: Vec<u16> = (0..EXPERTS as u16).collect();
        order.sort_by(|a, b| self.load[usize::from(*a)].total_cmp(&self.load[usize::from(*b)]));
        let rows = logits.len() / EXPERTS;
        out.push(&self.shape(), logits, &order[..2].repeat(rows))?;
        order[..2].iter().for_each(|expert| self.counts[usize::from(*expert)] += rows as u64);
        Ok(())
    }
    fn observe(&mut self, _: &PageFeedback<'_>) -> Result<(), RouteError> {
        let all: u64 = self.counts.iter().sum();
        for (load, count) in self.load.iter_mut().zip(&mut self.counts) {
            *load = 0.9 * *load + 0.1 * (EXPERTS as u64 * std::mem::take(count)) as f32 / all as f32;
        }
        Ok(())
    }
    fn discard(&mut self) {
        self.counts.fill(0);
    }
    fn state(&self) -> RouterState {
        let mut state = RouterState::new(self.kind(), EXPERTS as u32);
        (state.load, state.counts) = (self.load.clone(), self.counts.clone());
        state
    }
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        state.check_as(&self.state())?;
        (self.load, self.counts) = (state.load.clone(), state.counts.clone());
        Ok(())
    }
}

fn looped(numbers: [u8; 2]) -> ClosedLoop {
    let own = numbers.map(|number| Box::new(Emptiest::new(number)) as Box<dyn Router>);
    ClosedLoop::new(Cache::new(config(2).rollback(8)).unwrap(), own.into()).unwrap()
}

#[test]
fn an_own_router_is_rolled_back_saved_and_restored() {
    let mut pikv = looped([3, 4]);
    let mut sequence = pikv.cache().sequence();
    turn(&mut pikv, &mut sequence, 100, 1, ReadPages::All);
    go_on(&mut pikv, &mut sequence, 2, 30);
    // Tokens that are taken back were never routed.
    let before: Vec<_> = pikv.routers().iter().map(|router| router.state()).collect();
    turn(&mut pikv, &mut sequence, 3, 5, ReadPages::Experts);
    assert_ne!(pikv.routers()[0].state(), before[0]);
    sequence.rollback(3).unwrap();
    assert_eq!(pikv.routers().iter().map(|router| router.state()).collect::<Vec<_>>(), before);

    let mut bytes = Vec::new();
    pikv.save(&sequence, b"", &mut bytes).unwrap();
    let mut twin = looped([3, 4]);
    let mut restored = twin.restore(&mut &bytes[..]).unwrap().sequence;
    assert_eq!(go_on(&mut twin, &mut restored, 9, 40), go_on(&mut pikv, &mut sequence, 9, 40));

    let error = looped([3, 5]).restore(&mut &bytes[..]).unwrap_err();
    let (got, expected) = (RouterKind::Custom(4), RouterKind::Custom(5));
    assert_eq!(error, LoopError::Route { layer: 1, source: StateError::Router { got, expected }.into() });
    assert_eq!(error.to_string(), "layer 1: state of custom 4, expected custom 5");
}

#[test]
fn a_kind_has_a_number_of_its_own_in_saved_states() {
    let custom = [0, 1, 255].map(RouterKind::Custom);
    let kinds: Vec<_> = RouterKind::ALL.into_iter().chain(custom).collect();
    let numbers: Vec<u16> = (0..7).chain([256, 257, 511]).collect();
    for (kind, number) in kinds.iter().zip(&numbers) {
        let state = RouterState::new(*kind, 8);
        let bytes = state.to_bytes();
        assert_eq!(bytes[6..8], number.to_le_bytes());
        assert_eq!(RouterState::from_bytes(&bytes), Ok(state));
    }
    for unknown in [7u16, 255, 512, u16::MAX] {
        let mut bytes = RouterState::new(RouterKind::TopK, 8).to_bytes();
        bytes[6..8].copy_from_slice(&unknown.to_le_bytes());
        assert_eq!(RouterState::from_bytes(&bytes), Err(StateError::Kind(unknown)));
    }
}

#[test]
fn rows_of_an_own_router_are_checked() {
    let (shape, mut routes) = (Shape::new(EXPERTS as u32, 2), Routes::default());
    let [_, _, _, logits] = rows(1, 0, 2);
    routes.push(&shape, &logits, &[7, 0, 1, 2]).unwrap();
    let before = routes.clone();
    assert_eq!((routes.rows(), &routes.filing().experts[..]), (2, &[7, 0, 1, 2][..]));
    for row in routes.filing().weights.chunks(2) {
        assert!((row[0] + row[1] - 1.0).abs() < 1e-6);
    }
    let short = routes.push(&shape, &logits, &[7, 0, 1]).unwrap_err();
    assert!(matches!(short, RouteError::Length { what: "filing", got: 3, expected: 4, .. }), "{short}");
    let past = routes.push(&shape, &logits, &[7, 0, 1, 8]).unwrap_err();
    assert_eq!(past, RouteError::Expert { row: 1, expert: 8, experts: 8 });
    let other = routes.push(&Shape::new(EXPERTS as u32, 1), &logits, &[7, 0]).unwrap_err();
    assert!(matches!(other, RouteError::Routes { held: 2, top_k: 1, .. }), "{other}");
    assert_eq!(routes, before);
}
