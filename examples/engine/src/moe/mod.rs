//! A byte-level MoE with the layout of Mixtral, and its caches.

pub mod batch;
pub mod model;
pub mod paged;
pub mod plain;
