//! Code that the CPU and the GPU of pikv share.
//!
//! A hot routine is written once here, as straight-line code over [`Warp`]: 32 lanes in lock-step. A
//! device thread is one lane; on a CPU the 32 lanes are a few vectors. Both read the same page layout
//! ([`page`]), add in the same order ([`attend`], [`merge`]) and round the same way ([`math`]), so that
//! their results have the same bits.
//!
//! The crate is `no_std`, does not allocate and holds no state.
#![no_std]
#![deny(missing_docs)]

#[cfg(feature = "std")]
extern crate std;

pub mod attend;
pub mod bound;
pub mod codec;
pub mod dtype;
pub mod full;
pub mod hash;
pub mod mass;
pub mod math;
pub mod merge;
pub mod page;
pub mod plan;
pub mod portable;
pub mod ring;
pub mod rope;
pub mod rows;
pub mod score;
pub mod shard;
pub mod store;
pub mod tensor;
pub mod turned;
pub mod warp;

pub use warp::{LANES, Warp};
