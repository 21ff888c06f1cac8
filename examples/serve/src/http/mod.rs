//! OpenAI's endpoints, metrics, and the page that shows where bytes are.

pub mod answer;
pub mod ask;
pub mod connection;
pub mod error;
pub mod routes;
pub mod server;
pub mod show;
