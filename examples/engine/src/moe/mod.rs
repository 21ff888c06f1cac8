//! A Mixtral-layout byte model, and the caches that it runs over.

pub mod batch;
pub mod model;
pub mod paged;
pub mod plain;
