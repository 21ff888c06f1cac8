//! A router that wraps another, as a user's own would.

use pikv::Position;
use pikv::router::{PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One of pikv's routers behind another type: it has no plan for a device, and refuses rows while `refuses` is set.
#[derive(Debug)]
pub struct Wrapped {
    pub router: Box<dyn Router>,
    pub refuses: Arc<AtomicBool>,
}

impl Wrapped {
    /// One that refuses nothing.
    pub fn new(router: Box<dyn Router>) -> Wrapped {
        Wrapped { router, refuses: Arc::default() }
    }
}

impl Router for Wrapped {
    fn kind(&self) -> RouterKind {
        self.router.kind()
    }
    fn shape(&self) -> Shape {
        self.router.shape()
    }
    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        match self.refuses.load(Ordering::SeqCst) {
            true => Err(RouteError::Experts(77)),
            false => self.router.route(first, logits, out),
        }
    }
    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        self.router.observe(feedback)
    }
    fn wants_hits(&self) -> bool {
        self.router.wants_hits()
    }
    fn saves(&self) -> Result<(), RouteError> {
        self.router.saves()
    }
    fn discard(&mut self) {
        self.router.discard();
    }
    fn state(&self) -> RouterState {
        self.router.state()
    }
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        self.router.restore(state)
    }
}
