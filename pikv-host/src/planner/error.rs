//! Errors of planning, each with the value that was wrong.

use pikv_core::page::Position;
use thiserror::Error;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The configuration, or the cache that is measured.
    #[error(transparent)]
    Cache(#[from] crate::Error),
    /// A sequence that is too long.
    #[error("a sequence of {len} tokens; at most {max}", max = Position::MAX.0)]
    Length {
        /// As given.
        len: u32,
    },
    /// Fewer tokens than what cannot leave.
    #[error("{asked} resident tokens; ring and sinks alone hold {least}")]
    Resident {
        /// As given.
        asked: u32,
        /// The least that would do.
        least: u32,
    },
    /// It does not fit.
    #[error(
        "{sequences} x {len} tokens take {needed} bytes, the budget is {budget}: {sequences} x {fits} tokens fit"
    )]
    Budget {
        /// Sequences.
        sequences: u32,
        /// Tokens of each.
        len: u32,
        /// Bytes that they take.
        needed: u64,
        /// Bytes that there are.
        budget: u64,
        /// Tokens of each that do fit.
        fits: u32,
    },
    /// Experts a token.
    #[error("{top_k} of {experts} experts a token; it must be 1..=experts")]
    TopK {
        /// Experts a token.
        top_k: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// Too little to fit a line to.
    #[error("{got} samples; three constants want at least 3")]
    Samples {
        /// As given.
        got: usize,
    },
    /// A sample that says nothing.
    #[error(
        "sample {index}: {calls} calls in {seconds} s; there must be at least 1, the time finite and above 0"
    )]
    Sample {
        /// Index of it.
        index: usize,
        /// Its calls.
        calls: u64,
        /// Its seconds.
        seconds: f64,
    },
    /// A measurement of nothing.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// What is.
        name: &'static str,
    },
}

impl From<crate::ConfigError> for PlanError {
    fn from(error: crate::ConfigError) -> PlanError {
        PlanError::Cache(error.into())
    }
}
