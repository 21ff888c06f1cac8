//! Which tokens go when a head is over its budget, and what policies are told.

pub mod evict;
pub mod observe;
pub mod oldest;
pub mod ranked;
