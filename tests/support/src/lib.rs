//! What tests share.

pub mod backend;
pub mod gguf_writer;
pub mod numbers;
pub mod twins;
