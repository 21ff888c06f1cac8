//! Pages in lower tiers: the same bits as without them, and no loss when a store fails.

mod ahead;
mod faults;
#[cfg(unix)]
mod files;
mod forks;
mod moves;
mod same;
mod setup;
