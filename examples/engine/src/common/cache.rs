//! The cache interface of the models, dense or mixture of experts.

use std::error::Error;

/// Stores keys and values of a model, and computes attention over them.
pub trait Cache {
    type Error: Error + 'static;
    type Step<'a>: Step<Error = Self::Error>
    where
        Self: 'a;
    /// Starts a step of `n` tokens after those already stored.
    fn begin(&mut self, n: usize) -> Result<Self::Step<'_>, Self::Error>;
    /// Tokens stored: the position of the next token.
    fn len(&self) -> usize;
    /// Position of row `row` of the next step. Rows of one sequence are consecutive, rows of a batch need not be.
    fn position(&self, row: usize) -> usize {
        self.len() + row
    }
    /// Removes all tokens.
    fn clear(&mut self);
}

/// New tokens in a forward pass.
pub trait Step {
    type Error;
    /// `q`: `[n][query_heads][head_dim]`, `k`, `v`: `[n][kv_heads][head_dim]`, rotated or not as [`Keys`] says. Writes `out`, shaped like
    /// `q`.
    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Self::Error>;
    /// Whether [`gates`](Step::gates) does anything.
    const GATES: bool = false;
    /// Passes the logits of the layer's gate before attention, `[n][experts]`: a prediction of the router's logits, early enough to fetch
    /// pages.
    fn gates(&mut self, _layer: usize, _logits: &[f32]) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Passes the experts chosen by the router, `[n][top_k]`, first choice first. A dense model does not call it.
    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Self::Error>;
    /// Commits the step; all layers must be written.
    fn commit(self) -> Result<(), Self::Error>;
}

/// Form of queries and keys that the model passes to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// After RoPE.
    Rotated,
    /// Before RoPE, for a cache that rotates keys when it reads them.
    Unrotated,
}
