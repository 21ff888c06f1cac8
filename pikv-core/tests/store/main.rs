//! Where things lie: addresses of a page, the map to shards, the ring.

mod page;
mod ring;
mod shard;
