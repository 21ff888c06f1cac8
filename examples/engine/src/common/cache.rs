//! What a model asks of the cache that it runs over. A dense model and a mixture of experts ask for the same.

use std::error::Error;

/// Where a model puts its keys and values, and reads attention from.
pub trait Cache {
    type Error: Error + 'static;
    type Step<'a>: Step<Error = Self::Error>
    where
        Self: 'a;
    /// `n` new tokens follow the ones already there.
    fn begin(&mut self, n: usize) -> Result<Self::Step<'_>, Self::Error>;
    /// Tokens so far: the next token's position.
    fn len(&self) -> usize;
    /// Position of row `row` of the next tokens: those of one sequence follow each other, those of a batch do not.
    fn position(&self, row: usize) -> usize {
        self.len() + row
    }
    /// Forgets everything.
    fn clear(&mut self);
}

/// New tokens on their way through the layers.
pub trait Step {
    type Error;
    /// `q`: `[n][query_heads][head_dim]`, `k`, `v`: `[n][kv_heads][head_dim]`; keys and queries come as the model's
    /// [`Keys`] says. Writes `out`, shaped as `q`.
    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Self::Error>;
    /// Whether [`gates`](Step::gates) is of use.
    const GATES: bool = false;
    /// What the layer's gate says of the tokens before they have attended, `[n][experts]`: a guess at its router's logits, made in
    /// time to fetch by.
    fn gates(&mut self, _layer: usize, _logits: &[f32]) -> Result<(), Self::Error> {
        Ok(())
    }
    /// The experts that the router chose, `[n][top_k]`, first choice first. A dense model has none to name.
    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Self::Error>;
    /// All layers are written.
    fn commit(self) -> Result<(), Self::Error>;
}

/// How queries and keys go from the model to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Rotated to their positions.
    Rotated,
    /// As they leave their projections, for a cache that rotates keys when it reads them.
    Unrotated,
}
