//! The examples' engines: the models, the GGUF reader and its codes, and their results over pikv.

mod gguf;
mod llama;
