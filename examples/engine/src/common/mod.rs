//! Code shared by the models: the cache interface, layers in f32, products with weights that stay in blocks, and sampling.

pub mod blocks;
pub mod cache;
pub mod layers;
pub mod sample;
