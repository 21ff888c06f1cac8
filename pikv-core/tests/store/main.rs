//! Layout of pages, the map to shards, the ring.

mod page;
mod ring;
mod shard;
