//! R_B: hash and round-robin routing (arXiv 2508.06526, R_B; hash layers, Roller et al., arXiv 2106.04426).

use super::on_device::{Averages, DeviceChoice, DevicePlan};
use super::{PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape, positions};
use pikv_core::hash;
use pikv_core::page::Position;

/// The first expert of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Start {
    /// A hash of the position.
    #[default]
    Hash,
    /// The position.
    RoundRobin,
}

/// R_B: the experts of the token at position t are `(start(t) + j stride) mod experts` for j below `top_k`, independent of its
/// logits. It learns nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hashed {
    /// First expert of a token. Default the hash.
    pub start: Start,
    /// Step from one expert of a token to its next; must not repeat an expert within `top_k`. 1 never does. Default 1.
    pub stride: u32,
    /// Whether the model follows the choice, for models trained with it. Default false.
    pub model_choice: bool,
}

setters!(Hashed { start: Start, stride: u32, model_choice: bool });

impl Default for Hashed {
    fn default() -> Self {
        Hashed { start: Start::Hash, stride: 1, model_choice: false }
    }
}

impl Hashed {
    /// Builds the router.
    ///
    /// # Errors
    /// An invalid shape, or [`RouteError::Stride`] for a stride that repeats an expert within `top_k`.
    pub fn router(self, shape: Shape) -> Result<HashRouter, RouteError> {
        let shape = shape.check()?;
        let Shape { experts, top_k, .. } = shape;
        let (mut a, mut b) = (experts, self.stride % experts);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        let distinct = experts / a;
        if distinct < top_k {
            return Err(RouteError::Stride { stride: self.stride, experts, distinct, top_k });
        }
        Ok(HashRouter { options: self, shape })
    }
}

/// The router of [`Hashed`].
#[derive(Clone, Debug)]
pub struct HashRouter {
    options: Hashed,
    shape: Shape,
}

impl HashRouter {
    /// Expert `j` of the token at `t`.
    fn expert(&self, t: u32, j: u32) -> u16 {
        let start = match self.options.start {
            Start::Hash => hash::mix(t.into()),
            Start::RoundRobin => t.into(),
        };
        hash::expert(start, j, self.options.stride, self.shape.experts)
    }
}

impl Router for HashRouter {
    fn wants_hits(&self) -> bool {
        false
    }

    fn kind(&self) -> RouterKind {
        RouterKind::Hash
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        let rows = self.shape.rows(logits)?;
        positions(first, rows)?;
        let top_k = self.shape.top_k;
        let expert = |i: usize| self.expert(first.0 + i as u32 / top_k, i as u32 % top_k);
        out.place(&self.shape, logits, rows, expert, self.options.model_choice)
    }

    fn device_plan(&self) -> Result<DevicePlan<'_>, RouteError> {
        let Hashed { start, stride, model_choice } = self.options;
        let choice = DeviceChoice::Placed { hashed: start == Start::Hash, stride };
        let fetch = self.shape.top_k;
        Ok(DevicePlan { choice, fetch, same: model_choice, averages: Averages::default() })
    }

    fn routed(&mut self, chosen: &[u16], _: &[f32]) -> Result<(), RouteError> {
        self.shape.check_chosen(chosen)
    }

    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        feedback.check(&self.shape)
    }

    fn discard(&mut self) {}

    fn state(&self) -> RouterState {
        RouterState::new(RouterKind::Hash, self.shape.experts)
    }

    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        Ok(state.check_as(&self.state())?)
    }
}
