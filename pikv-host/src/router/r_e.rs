//! R_E: entropy-penalised routing (arXiv 2508.06526, R_E).

use super::biased::Terms;
use super::{Biased, Coefficients, RouteError, RouterKind, Shape};

/// R_E: subtracts `beta h_e` from an expert's logit, with `h_e` the moving average over tokens of the gate's binary entropy about the
/// expert, `H2(p_e) / ln 2` with `H2(p) = -p ln p - (1 - p) ln(1 - p)` and `p_e` the expert's share of the token's softmax. It is in
/// [0, 1], initially 0.5; experts about which the gate stays undecided rank lower. Tokens are averaged in the order in which they were
/// routed, and affect the ranking from the next feedback on.
///
/// Two other readings of the paper's term change no ranking: the token's own entropy is the same for all experts, and `-p_e ln p_e` of
/// the ranked token keeps the order of its logits for all beta below 7.3.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct EntropyPenalised {
    /// Penalty for an average entropy of 1, in logits. Above 0; default 0.1.
    pub beta: f32,
    /// Factor of the average at each token. At least 0 and below 1; default 0.9.
    pub ema: f32,
    /// Bound of the bias, in logits: it is held within `±cap`. Default none.
    pub cap: Option<f32>,
    /// Whether the model follows the ranking; needs a cap. Default false.
    pub model_choice: bool,
    /// Most experts beyond its own `top_k` whose pages a token fetches, next in the ranking, at most 255. The number grows with the gate's
    /// entropy over all experts: none if the gate is sure, all if it is near uniform ([`Routes::fetched`](super::Routes::fetched)). Default
    /// 0; the paper's other reading is 2. Takes effect in a [`ClosedLoop`](crate::ClosedLoop) where rows read the pages of their experts
    /// ([`ReadPages::Experts`](crate::attend::options::ReadPages::Experts)).
    pub more: u32,
}

setters!(EntropyPenalised { beta: f32, ema: f32, model_choice: bool, more: u32 } optional { cap: f32 });

impl Default for EntropyPenalised {
    fn default() -> Self {
        EntropyPenalised { beta: 0.1, ema: 0.9, cap: None, model_choice: false, more: 0 }
    }
}

impl EntropyPenalised {
    /// Builds the router.
    ///
    /// # Errors
    /// An invalid shape, options out of range, or `model_choice` without a cap.
    pub fn router(self, shape: Shape) -> Result<Biased, RouteError> {
        let EntropyPenalised { beta, ema, cap, model_choice, more } = self;
        let coefficients = Coefficients::new(0.0, 0.0, beta);
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
