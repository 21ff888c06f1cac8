//! The examples' engines: the models, the GGUF reader and its codes, and what they give over pikv.

mod gguf;
mod llama;
