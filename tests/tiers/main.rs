//! Pages in lower tiers: the same bits as without, and nothing lost when a store fails.

mod ahead;
#[path = "../backend/mod.rs"]
mod backend;
mod faults;
mod moves;
#[allow(dead_code, reason = "shared by tests that each use a part")]
#[path = "../numbers/mod.rs"]
mod numbers;
mod same;
mod setup;
#[path = "../twins/mod.rs"]
mod twins;
