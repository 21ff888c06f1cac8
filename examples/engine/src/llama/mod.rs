//! Llama models from GGUF files.

pub mod gguf;
pub mod model;
pub mod quant;
pub mod rounding;
pub mod tensors;
pub mod tokenizer;
