//! The CUDA back end over a stand-in for the driver with the interpreter of `tests/interpreter`: it needs no device, and the interpreter
//! finds faults that a device would not.

mod caches;
mod closed_loop;
mod codecs;
mod devices;
mod engine;
mod faults;
mod halves;
mod launches;
mod modules;
mod policies;
mod ranks;
mod route;
mod save;
mod script;
mod standin;
mod suite;
mod tensors;
mod tiers;
