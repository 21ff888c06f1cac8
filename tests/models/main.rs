//! The examples' engines: the models, the GGUF reader and its codes, and their results over pikv.

mod blocks;
mod gguf;
mod llama;
