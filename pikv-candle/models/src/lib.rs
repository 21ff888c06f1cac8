//! Llama and Mixtral of candle-transformers with pikv as their KV cache: `patches` are applied to their sources by the build. Also the
//! random weights and shapes that the tests, the example and the bench share.

mod random;
mod run;

pub use random::weights;
pub use run::{Model, Shape};

// Paths that the sources of candle-transformers name from their own root.
use candle_transformers::models::{self, with_tracing};
use candle_transformers::utils;

/// Llama, patched: `Cache::kv` is a pikv cache in place of its own.
#[allow(clippy::all, rustdoc::all, dead_code, unexpected_cfgs)]
pub mod llama {
    include!(concat!(env!("OUT_DIR"), "/llama.rs"));
}

/// Mixtral, patched: `Model::set_kv_cache` sets a pikv cache in place of its own.
#[allow(clippy::all, rustdoc::all, dead_code, unexpected_cfgs, unused_doc_comments)]
pub mod mixtral {
    include!(concat!(env!("OUT_DIR"), "/mixtral.rs"));
}
