//! Which tokens go when a head is over its budget, what policies are told, and which pages move between tiers.

pub mod evict;
pub mod observe;
pub mod oldest;
pub mod ranked;
