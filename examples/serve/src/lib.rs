//! A batching HTTP server over pikv: one thread owns the model and the cache, handlers send requests to it over a channel.
//!
//! | module | what it does |
//! |---|---|
//! | [`model`] | a model as the server sees it: tokens of text, and logits of a batch of sequences |
//! | [`text`] | text out of tokens: whole characters, stop strings |
//! | [`scheduler`] | who is in the next step: admission, chunks of prompts, parking, deadlines |
//! | [`http`] | OpenAI's endpoints, metrics, the page that shows where bytes are |
//! | [`client`] | an HTTP client of a few lines, for the tests and the load |
//! | [`load`] | clients that come, read, and hang up |
#![allow(missing_docs, reason = "an example: what needs words has them")]

pub mod client;
pub mod http;
pub mod load;
pub mod model;
pub mod scheduler;
pub mod text;

pub use http::server::Server;

use std::time::Duration;

/// Limits and stores of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of pages of the first tier.
    pub budget: u64,
    /// Bytes of host memory for pages beneath it, where sequences are parked; 0 for none.
    pub parking: u64,
    /// Bytes of the budget that prefixes may hold which no request reads; 0 for no index.
    pub prefixes: u64,
    /// Newest tokens of each sequence, and the most tokens that a sequence adds in a step: results do not depend on chunks up to there.
    pub ring: u32,
    /// How older tokens are stored.
    pub store: Store,
    /// Tokens of a step, over all sequences.
    pub step: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Requests that are open at once, those that wait for their turn included.
    pub requests: usize,
    /// Connections that are open at once.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body: usize,
    /// The longest time that a request may take. A connection on which nothing moves for longer is closed.
    pub deadline: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            budget: 256 << 20,
            parking: 256 << 20,
            prefixes: 64 << 20,
            ring: 128,
            store: Store::Dtype(pikv::Dtype::Bf16),
            step: 256,
            batch: 64,
            requests: 256,
            connections: 512,
            body: 256 << 10,
            deadline: Duration::from_secs(60),
        }
    }
}

/// How tokens that left the ring are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Store {
    Dtype(pikv::Dtype),
    /// In bf16 as long as they are in the ring, then packed.
    Packed(pikv::codec::Code),
}
