//! R_LB: load balance by a bias on the ranking (arXiv 2508.06526, R_LB; the bias does not enter the weights, as in Wang et al., arXiv
//! 2408.15664).

use super::biased::Terms;
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_LB: subtracts `alpha (mu_e - mean mu)` from an expert's logit, with `mu_e` the moving average of its share of the filing's choices
/// times the number of experts; balanced experts have 1, the initial value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LoadBalanced {
    /// Penalty for each unit of `mu_e` above the mean, in logits. Above 0; default 0.1.
    pub alpha: f32,
    /// Factor of the average at each feedback. At least 0 and below 1; default 0.9.
    pub ema: f32,
    /// Bound of the bias, in logits: it is held within `±cap`. Default none.
    pub cap: Option<f32>,
    /// Whether the model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
}

setters!(LoadBalanced { alpha: f32, ema: f32, model_choice: bool } optional { cap: f32 });

impl Default for LoadBalanced {
    fn default() -> Self {
        LoadBalanced { alpha: 0.1, ema: 0.9, cap: None, model_choice: false }
    }
}

impl LoadBalanced {
    /// Builds the router.
    ///
    /// # Errors
    /// An invalid shape, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let LoadBalanced { alpha, ema, cap, model_choice } = self;
        let coefficients = Coefficients::new(alpha, 0.0, 0.0);
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
