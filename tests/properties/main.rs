//! Promises that hold of every part at once: equal bits, histories at random, faults at every call, bad input.

mod bad_input;
mod callbacks;
mod cuts;
mod dtypes;
mod edges;
mod faults;
mod named;
mod prefixes;
mod random_history;
mod same_bits;
mod tiles;
mod traces;
