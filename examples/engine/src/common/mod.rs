//! What the examples' models share: the cache that they run over, layers in f32, and what is done with logits.

pub mod cache;
pub mod layers;
pub mod sample;
