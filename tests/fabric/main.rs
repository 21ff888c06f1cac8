//! Shards on ranks: the bits of one process, and the effects of failed ranks on the others.

mod bytes;
mod failures;
mod full;
mod pools;
mod same;
mod setup;
