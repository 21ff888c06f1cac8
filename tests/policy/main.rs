//! Policies compared with their definitions, and eviction by them.

mod back;
mod choices;
mod frequencies;
mod heads;
mod held;
mod literal;
mod model;
mod quest_window;
mod read;
mod refused;
mod setup;
mod sinks;
mod wanted;
mod wrapped;
