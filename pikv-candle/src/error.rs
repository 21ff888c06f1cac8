//! Errors of calls with tensors.

use candle_core::DType;
use std::sync::Arc;

/// Why a call failed. In a model it becomes a [`candle_core::Error`]; [`Error::of`] finds it in there.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Error of the cache.
    #[error(transparent)]
    Cache(#[from] pikv::Error),
    /// Error of candle.
    #[error(transparent)]
    Candle(Arc<candle_core::Error>),
    /// A tensor has another shape than the layer or the other tensors of the pass need.
    #[error("{what} has the shape {got:?}; the layer and the pass need {expected:?}")]
    Shape {
        /// Name of the tensor.
        what: &'static str,
        /// Dimensions of the tensor.
        got: Vec<usize>,
        /// Dimensions that the layer and the pass need.
        expected: Vec<usize>,
    },
    /// A tensor has a dtype other than F32, F16 and BF16.
    #[error("{what} is of {got:?}; F32, F16 and BF16 would do (Tensor::to_dtype)")]
    Dtype {
        /// Name of the tensor.
        what: &'static str,
        /// Dtype of the tensor.
        got: DType,
    },
    /// A tensor is not in host memory.
    #[error("{what} is not on the CPU, and its place is all that is read (Tensor::to_device)")]
    Device {
        /// Name of the tensor.
        what: &'static str,
    },
    /// The tensors of a pass have another number of sequences than the batch.
    #[error("tensors of {got} sequences for a batch of {held}; KvCache::reset begins a new one")]
    Batch {
        /// First dimension of the tensors.
        got: usize,
        /// Sequences of the batch.
        held: usize,
    },
    /// `route` for a layer that was not attended in this pass, or that is routed already.
    #[error("layer {layer} is routed once in a pass, after its attend")]
    NotAttended {
        /// Index of the layer.
        layer: usize,
    },
}

impl Error {
    /// The error of this crate inside one of candle's, as a model's pass returns it; `None` if there is none.
    ///
    /// ```
    /// use pikv_candle::{Error, pikv};
    ///
    /// fn is_full(error: &candle_core::Error) -> bool {
    ///     matches!(Error::of(error), Some(Error::Cache(pikv::Error::OutOfBudget { .. })))
    /// }
    ///
    /// let full = Error::Cache(pikv::Error::OutOfBudget { needed: 4096, available: 0 });
    /// assert!(is_full(&candle_core::Error::from(full).context("layer 3")));
    /// assert!(!is_full(&candle_core::Error::msg("something else")));
    /// ```
    pub fn of(error: &candle_core::Error) -> Option<&Error> {
        use candle_core::Error as Candle;
        match error {
            Candle::WrappedContext { wrapped, .. } => wrapped.downcast_ref(),
            Candle::Context { inner, .. }
            | Candle::WithPath { inner, .. }
            | Candle::WithBacktrace { inner, .. } => Error::of(inner),
            _ => None,
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Error {
        match Error::of(&error) {
            Some(own) => own.clone(),
            None => Error::Candle(Arc::new(error)),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        let context = error.to_string();
        candle_core::Error::WrappedContext { wrapped: Box::new(error), context }.bt()
    }
}
