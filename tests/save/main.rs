//! Sequences that were saved and restored: they go on as if nothing had been, or are refused, and say why.

mod files;
mod parked;
mod part;
mod refused;
mod same;
mod setup;
