//! Packed pages: tokens that left the ring, compressed 32 at a time and read as they lie.
//!
//! * [`code`]: how a channel is coded, from f32 to 4 bits;
//! * [`packed`]: where everything lies in a packed page;
//! * [`pack`]: 32 tokens of a full page into a packed one;
//! * [`read`]: attention over packed pages;
//! * [`factors`]: attention over those that are means, or coefficients in a basis of their own;
//! * [`back`]: its result in the head's channels;
//! * [`fold`](mod@fold): what it leaves of a query.

pub mod back;
pub mod code;
mod encode;
pub mod factors;
pub mod fold;
pub mod pack;
pub mod packed;
pub mod read;
mod unpacked;
