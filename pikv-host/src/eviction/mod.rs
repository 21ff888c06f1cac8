//! Eviction of tokens when a head is over its budget, and observation of steps by policies.

pub mod evict;
pub mod observe;
pub mod oldest;
pub mod ranked;
