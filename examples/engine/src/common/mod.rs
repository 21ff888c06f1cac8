//! Code shared by the models: the cache interface, layers in f32, and sampling.

pub mod cache;
pub mod layers;
pub mod sample;
