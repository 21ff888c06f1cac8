//! Properties of all parts: equal bits, random histories, faults at every call, bad input.

mod bad_input;
mod budgets;
mod callbacks;
mod cuts;
mod drafts;
mod dtypes;
mod edges;
mod fast;
mod faults;
mod left_out;
mod named;
mod prefixes;
mod random_history;
mod reads;
mod rooms;
mod same_bits;
mod sharing;
mod tiles;
mod traces;
