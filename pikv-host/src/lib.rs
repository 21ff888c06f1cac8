//! Host runtime of pikv: lanes of x86-64, the page store, sequences and their transactions, attention over shards.
//!
//! Start at [`Cache`]. Everything is `Send + Sync`; nothing is global; threads are those of the rayon pool that
//! the caller is in, or rayon's global one.
#![deny(missing_docs)]

mod arena;
mod attend;
mod backend;
mod block;
mod cache;
pub mod codec;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod filing;
mod forest;
mod job;
pub mod lanes;
mod mass;
mod reduce;
mod rope;
pub mod router;
mod sequence;
mod step;
mod writes;

pub use attend::{Attend, Output, PageMass};
pub use backend::{Backend, CudaError};
pub use cache::{Cache, Rows, Usage};
pub use config::{CacheConfig, CodecRule};
pub use error::{ConfigError, Error};
pub use sequence::{PageId, PageInfo, Place, Sequence};
pub use step::Step;
