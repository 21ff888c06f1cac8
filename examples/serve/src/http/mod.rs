//! OpenAI's endpoints, metrics, and the page of memory usage.

pub mod answer;
pub mod ask;
pub mod connection;
pub mod error;
pub mod routes;
pub mod server;
pub mod show;
