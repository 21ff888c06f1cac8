//! Llama and Mixtral of candle-transformers with pikv as their KV cache: `patches` applied to its sources as they are built, and what
//! tests, the example and the bench share, random weights and shapes.

mod random;
mod run;

pub use random::weights;
pub use run::{Model, Shape};

// What the sources of candle-transformers name from their own root.
use candle_transformers::models::{self, with_tracing};
use candle_transformers::utils;

/// Llama, patched: `Cache::kv` is the cache in the place of its own.
#[allow(clippy::all, rustdoc::all, dead_code, unexpected_cfgs)]
pub mod llama {
    include!(concat!(env!("OUT_DIR"), "/llama.rs"));
}

/// Mixtral, patched: `Model::set_kv_cache` gives it the cache in the place of its own.
#[allow(clippy::all, rustdoc::all, dead_code, unexpected_cfgs, unused_doc_comments)]
pub mod mixtral {
    include!(concat!(env!("OUT_DIR"), "/mixtral.rs"));
}
