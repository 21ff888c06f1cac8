//! The CUDA back end, run by a stand-in for the driver over the interpreter of `tests/interpreter`: one machine has no device, and an
//! interpreter finds what a device would not.

mod closed_loop;
mod codecs;
mod devices;
mod engine;
mod faults;
mod halves;
mod policies;
mod ranks;
mod route;
mod save;
mod script;
mod standin;
mod suite;
mod tensors;
mod tiers;
