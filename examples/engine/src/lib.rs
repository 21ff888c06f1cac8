//! Two small engines over pikv, for examples and tests: a byte-level MoE with the layout of Mixtral and, with the feature `llama`, a dense
//! Llama from a GGUF file. Each runs over a plain contiguous cache and over pikv.
#![allow(
    clippy::len_without_is_empty,
    clippy::should_implement_trait,
    reason = "nobody but examples and tests uses it"
)]

pub mod common;
#[cfg(feature = "llama")]
pub mod llama;
#[cfg(feature = "llama")]
pub mod measure;
pub mod moe;

/// Threads of matrix products.
pub use gemm_common::Parallelism;
use std::path::PathBuf;

/// Path of a file or directory in the repository's folder `examples`.
pub fn example(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}
