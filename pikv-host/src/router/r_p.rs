//! R_P: cache-aware routing (arXiv 2508.06526, R_P), by default with a miss rate in place of the paper's miss count.

use super::biased::{Misses, Terms};
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_P: subtracts `lambda ln(1 + m_e)` from the logit of an expert whose wanted pages missed. `m_e` is initially 0.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CacheAware {
    /// Penalty for each unit of `ln(1 + m_e)`, in logits. Above 0; default 0.05.
    pub lambda: f32,
    /// Definition of `m_e`. Default the rate.
    pub misses: Misses,
    /// Factor of `m_e` at each feedback. At least 0 and below 1; default 0.9.
    pub ema: f32,
    /// Bound of the bias, in logits: it is held within `±cap`. Default 1.
    pub cap: Option<f32>,
    /// Whether the model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
}

setters!(CacheAware { lambda: f32, misses: Misses, ema: f32, model_choice: bool } optional { cap: f32 });

impl Default for CacheAware {
    fn default() -> Self {
        CacheAware { lambda: 0.05, misses: Misses::Rate, ema: 0.9, cap: Some(1.0), model_choice: false }
    }
}

impl CacheAware {
    /// Builds the router.
    ///
    /// # Errors
    /// An invalid shape, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let CacheAware { lambda, misses, ema, cap, model_choice } = self;
        let coefficients = Coefficients::new(0.0, lambda, 0.0);
        let miss = Some((misses, ema));
        let acts = Some("lambda");
        let terms = Terms { coefficients, acts, miss, cap, model_choice, ..Default::default() };
        Biased::new(RouterKind::CacheAware, shape, terms)
    }
}
