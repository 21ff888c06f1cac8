//! Which tokens are evicted when a head is over its budget, and what policies observe.

pub mod evict;
pub mod observe;
pub mod oldest;
pub mod ranked;
