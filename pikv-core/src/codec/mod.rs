//! Packed pages: tokens that left the ring, compressed 32 at a time and read in packed form.
//!
//! * [`code`]: codes of channels, from f32 to 2 bits;
//! * [`packed`]: layout of a packed page;
//! * [`pack`]: packs 32 tokens of a full page;
//! * [`read`]: attention over packed pages;
//! * [`factors`]: attention over pages of means, or of coefficients in a basis of their own;
//! * [`back`]: maps its result to the head's channels;
//! * [`fold`](mod@fold): maps a query to stored channels.

pub mod back;
pub mod code;
mod encode;
pub mod factors;
pub mod fold;
pub mod pack;
pub mod packed;
pub mod read;
mod unpacked;
