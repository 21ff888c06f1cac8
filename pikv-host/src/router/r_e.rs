//! R_E: entropy-penalised routing (arXiv 2508.06526, R_E).

use super::biased::Terms;
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_E: an expert pays `beta h_e`, with `h_e` the moving average over tokens of the gate's binary entropy about the expert,
/// `H2(p_e) / ln 2` with `H2(p) = -p ln p - (1 - p) ln(1 - p)` and `p_e` the expert's share of the token's softmax. It is in [0, 1] and
/// starts at 0.5: experts about which the gate keeps being undecided rank lower. Tokens count in the order in which they were routed,
/// and rank from the next feedback on.
///
/// Two other readings of the paper's term change no ranking: the token's own entropy is the same for all experts, and `-p_e ln p_e`
/// of the token that is ranked leaves the order of its logits as it is for all beta below 7.3.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct EntropyPenalised {
    /// Logits that an expert pays for an average entropy of 1. Above 0; default 0.1.
    pub beta: f32,
    /// How much of the average stays at each token. From 0, below 1; default 0.9.
    pub ema: f32,
    /// The bias is held within `±cap` logits. Default none.
    pub cap: Option<f32>,
    /// The model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
    /// Experts beside its own `top_k` whose pages a token fetches at most, the next ones of the ranking, at most 255: none where the gate is
    /// sure, all where its entropy over all experts is near that of a uniform gate ([`Routes::fetched`](super::Routes::fetched)). 0 by
    /// default; the paper's other reading is 2. It acts where rows read the pages of their experts ([`Read::Experts`](crate::Read::Experts)),
    /// in a [`ClosedLoop`](crate::ClosedLoop).
    pub more: u32,
}

setters!(EntropyPenalised { beta: f32, ema: f32, model_choice: bool, more: u32 } optional { cap: f32 });

impl Default for EntropyPenalised {
    fn default() -> Self {
        EntropyPenalised { beta: 0.1, ema: 0.9, cap: None, model_choice: false, more: 0 }
    }
}

impl EntropyPenalised {
    /// The router.
    ///
    /// # Errors
    /// A shape that is none, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let EntropyPenalised { beta, ema, cap, model_choice, more } = self;
        let coefficients = Coefficients { beta, ..Default::default() };
        let terms = Terms {
            coefficients,
            acts: Some("beta"),
            entropy: Some(ema),
            cap,
            model_choice,
            more: more.min(u8::MAX.into()),
            ..Default::default()
        };
        Biased::new(RouterKind::Entropy, shape, terms)
    }
}
