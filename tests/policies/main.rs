//! Policies against their definitions, and the store that evicts by them.

mod back;
#[path = "../backend/mod.rs"]
mod backend;
mod heads;
mod held;
mod literal;
mod model;
mod read;
mod refused;
mod setup;
