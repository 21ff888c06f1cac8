//! Sequences that were saved and restored: they continue with the same bits, or are refused with a reason.

mod files;
mod parked;
mod part;
mod refused;
mod same;
mod setup;
