//! Shards that live apart: the bits of one process, and what failing ranks do to the others.

mod bytes;
mod failures;
#[allow(dead_code, reason = "shared by tests that each use a part")]
#[path = "../numbers/mod.rs"]
mod numbers;
mod same;
mod setup;
#[path = "../twins/mod.rs"]
mod twins;
