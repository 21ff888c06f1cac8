//! Attention on a CUDA device, over the page lists of [`attend`](crate::attend).

pub mod attend;
pub mod deferred;
pub mod executor;
pub mod modules;
pub mod tree;
pub mod wave;
