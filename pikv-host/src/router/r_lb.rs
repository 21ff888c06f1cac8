//! R_LB: load balance as a bias on the ranking (arXiv 2508.06526, R_LB; the bias outside the weights as in Wang et al., arXiv
//! 2408.15664).

use super::biased::Terms;
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_LB: an expert pays `alpha (mu_e - mean mu)`, with `mu_e` the moving average of its share of the choices of the filing times
/// the number of experts: 1 is balanced, and where it starts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LoadBalanced {
    /// Logits that an expert pays for each balanced share above the mean. Above 0; default 0.1.
    pub alpha: f32,
    /// How much of the average stays at each feedback. From 0, below 1; default 0.9.
    pub ema: f32,
    /// The bias is held within `±cap` logits. Default none.
    pub cap: Option<f32>,
    /// The model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
}

setters!(LoadBalanced { alpha: f32, ema: f32, model_choice: bool } optional { cap: f32 });

impl Default for LoadBalanced {
    fn default() -> Self {
        LoadBalanced { alpha: 0.1, ema: 0.9, cap: None, model_choice: false }
    }
}

impl LoadBalanced {
    /// The router.
    ///
    /// # Errors
    /// A shape that is none, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let LoadBalanced { alpha, ema, cap, model_choice } = self;
        let coefficients = Coefficients { alpha, ..Default::default() };
        let terms = Terms {
            coefficients,
            acts: Some("alpha"),
            load: Some(ema),
            cap,
            model_choice,
            ..Default::default()
        };
        Biased::new(RouterKind::LoadBalanced, shape, terms)
    }
}
