//! R_T: top-k softmax (Shazeer et al., arXiv 1701.06538; arXiv 2508.06526, R_T).

use super::biased::Terms;
use super::{Biased, RouteError, RouterKind, Shape};

/// R_T: the model's own experts, those of the `top_k` largest logits. It has no options and learns nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TopK;

impl TopK {
    /// Builds the router.
    ///
    /// # Errors
    /// [`RouteError::Experts`] or [`RouteError::TopK`] for an invalid shape.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        Biased::new(RouterKind::TopK, shape, Terms::default())
    }
}
