//! A batching HTTP server over pikv: one thread owns the model and the cache, handlers send requests to it over a channel.
//!
//! | module | what it does |
//! |---|---|
//! | [`model`] | a model as the server sees it: tokens of text, and logits of a batch of sequences |
//! | [`text`] | text from tokens: whole characters, stop strings |
//! | [`scheduler`] | the requests of each step: admission, chunks of prompts, parking, deadlines |
//! | [`http`] | OpenAI's endpoints, metrics, the page of memory usage |
//! | [`client`] | a small HTTP client for the tests and the load generator |
//! | [`load`] | load generator: clients that send requests, read, and disconnect |
#![allow(missing_docs, reason = "an example: what needs words has them")]

pub mod client;
pub mod http;
pub mod load;
pub mod model;
pub mod scheduler;
pub mod text;

pub use http::server::Server;

use std::path::PathBuf;
use std::time::Duration;

/// Limits and storage options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of pages of the first tier.
    pub budget: u64,
    /// Bytes of host memory for lower-tier pages, where sequences are parked; 0 for none.
    pub parking: u64,
    /// Bytes of the budget for prefixes that no request reads; 0 for no index.
    pub prefixes: u64,
    /// Folder in which answered requests are saved and from which a server starts, with at most `prefixes` bytes of files; needs an index.
    pub keep: Option<PathBuf>,
    /// Newest tokens of each sequence kept unpacked, and the most tokens that a sequence adds in a step, so that results do not depend on
    /// chunks.
    pub ring: u32,
    /// Storage of older tokens.
    pub store: Store,
    /// Most tokens of a step, over all sequences.
    pub step: usize,
    /// Most sequences of a step.
    pub batch: usize,
    /// Most open requests, including waiting ones.
    pub requests: usize,
    /// Most open connections.
    pub connections: usize,
    /// Most bytes of a request's body.
    pub body: usize,
    /// The longest time that a request may take. A connection without progress is closed after a quarter more.
    pub deadline: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            budget: 256 << 20,
            parking: 256 << 20,
            prefixes: 64 << 20,
            keep: None,
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

/// Storage of tokens that left the ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Store {
    Dtype(pikv::Dtype),
    /// In bf16 in the ring, then packed.
    Packed(pikv::codec::Code),
}
