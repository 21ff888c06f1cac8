//! Policies against their definitions, and the store that evicts by them.

mod back;
mod held;
mod model;
mod read;
mod setup;
