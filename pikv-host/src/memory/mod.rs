//! Pages of the first tier: their memory, their budget, and writes of tokens.

pub mod arena;
pub mod cuda;
mod free;
pub mod ghost_bytes;
pub mod growth;
pub mod pool;
mod size_class;
pub mod writes;
