//! Pages in the memory of a CUDA device.

pub mod compact;
pub mod pending;
