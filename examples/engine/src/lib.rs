//! Two small engines over pikv, for its examples and tests: a byte-level Mixtral-layout MoE and, with the feature `llama`, a dense Llama
//! from a GGUF file. Each runs over a plain contiguous cache and over pikv.
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

/// Threads of the products of matrices.
pub use gemm_common::Parallelism;
use std::path::PathBuf;

/// The file or directory `path` of the repository's folder `examples`.
pub fn example(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}
