//! R_E: entropy-penalised routing (arXiv 2508.06526, R_E).

use super::biased::Terms;
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_E: an expert pays `beta h_e`, with `h_e = -p_e ln p_e` its term of the entropy of the token's softmax, at most 1/e. (The
/// token's entropy itself is the same for all experts and would change nothing.) It learns nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EntropyPenalised {
    /// Logits that an expert pays for each nat. Above 0; default 0.1.
    pub beta: f32,
    /// The bias is held within `±cap` logits. Default none.
    pub cap: Option<f32>,
    /// The model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
}

impl Default for EntropyPenalised {
    fn default() -> Self {
        EntropyPenalised { beta: 0.1, cap: None, model_choice: false }
    }
}

impl EntropyPenalised {
    /// The router.
    ///
    /// # Errors
    /// A shape that is none, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let EntropyPenalised { beta, cap, model_choice } = self;
        let coefficients = Coefficients { beta, ..Default::default() };
        let terms = Terms { coefficients, acts: Some("beta"), cap, model_choice, ..Default::default() };
        Biased::new(RouterKind::Entropy, shape, terms)
    }
}
