//! Shards that live apart: the bits of one process, and what failing ranks do to the others.

mod bytes;
mod failures;
mod full;
mod pools;
mod same;
mod setup;
