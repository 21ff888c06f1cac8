//! Pages in lower tiers: the same bits as without, and nothing lost when a store fails.

mod ahead;
mod faults;
#[cfg(unix)]
mod files;
mod moves;
mod same;
mod setup;
