//! Errors of planning, each with the rejected value.

use pikv_core::page::Position;
use thiserror::Error;

/// An error of planning.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The configuration is invalid, or the measured cache failed.
    #[error(transparent)]
    Cache(#[from] crate::Error),
    /// A sequence above the largest length.
    #[error("a sequence of {len} tokens; at most {max}", max = Position::MAX.0)]
    Length {
        /// Tokens of the sequence.
        len: u32,
    },
    /// Fewer resident tokens than ring and sinks hold.
    #[error("{asked} resident tokens; ring and sinks alone hold {least}")]
    Resident {
        /// Resident tokens.
        asked: u32,
        /// Smallest accepted number.
        least: u32,
    },
    /// The load does not fit in the budget.
    #[error(
        "{sequences} x {len} tokens take {needed} bytes, the budget is {budget}: {sequences} x {fits} tokens fit"
    )]
    Budget {
        /// Number of sequences.
        sequences: u32,
        /// Tokens of each.
        len: u32,
        /// Bytes that the load takes.
        needed: u64,
        /// Bytes of the budget.
        budget: u64,
        /// Largest length that fits, in tokens.
        fits: u32,
    },
    /// `top_k` is 0 or above `experts`.
    #[error("{top_k} of {experts} experts a token; it must be 1..=experts")]
    TopK {
        /// Experts a token.
        top_k: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// Too few samples to fit.
    #[error("{got} samples; three constants want at least 3")]
    Samples {
        /// Number of samples.
        got: usize,
    },
    /// A sample without calls, or with a time that is not finite and above 0.
    #[error(
        "sample {index}: {calls} calls in {seconds} s; there must be at least 1, the time finite and above 0"
    )]
    Sample {
        /// Index of the sample.
        index: usize,
        /// Calls of the sample.
        calls: u64,
        /// Seconds of the sample.
        seconds: f64,
    },
    /// A setting of a measurement is 0.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// Name of the setting.
        name: &'static str,
    },
}

impl From<crate::ConfigError> for PlanError {
    fn from(error: crate::ConfigError) -> PlanError {
        PlanError::Cache(error.into())
    }
}
