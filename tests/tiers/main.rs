//! Pages in lower tiers: the same bits as without, and nothing lost when a store fails.

mod ahead;
#[path = "../backend/mod.rs"]
mod backend;
mod faults;
mod moves;
mod same;
mod setup;
