//! R_P: cache-aware routing (arXiv 2508.06526, R_P), with its miss count mended to a miss rate.

use super::biased::{Misses, Terms};
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_P: an expert pays `lambda ln(1 + m_e)` for pages that were not there when they were fetched. `m_e` starts at 0.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CacheAware {
    /// Logits that an expert pays for each unit of `ln(1 + m_e)`. Above 0; default 0.05.
    pub lambda: f32,
    /// What `m_e` is. Default the rate.
    pub misses: Misses,
    /// How much of `m_e` stays at each feedback. From 0, below 1; default 0.9.
    pub ema: f32,
    /// The bias is held within `±cap` logits. Default 1.
    pub cap: Option<f32>,
    /// The model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
}

setters!(CacheAware { lambda: f32, misses: Misses, ema: f32, model_choice: bool } optional { cap: f32 });

impl Default for CacheAware {
    fn default() -> Self {
        CacheAware { lambda: 0.05, misses: Misses::Rate, ema: 0.9, cap: Some(1.0), model_choice: false }
    }
}

impl CacheAware {
    /// The router.
    ///
    /// # Errors
    /// A shape that is none, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let CacheAware { lambda, misses, ema, cap, model_choice } = self;
        let coefficients = Coefficients { lambda, ..Default::default() };
        let miss = Some((misses, ema));
        let acts = Some("lambda");
        let terms = Terms { coefficients, acts, miss, cap, model_choice, ..Default::default() };
        Biased::new(RouterKind::CacheAware, shape, terms)
    }
}
