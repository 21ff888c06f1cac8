//! Errors of calls with tensors.

use candle_core::DType;
use std::sync::Arc;

/// Why a call was refused. In a model it becomes a [`candle_core::Error`]; [`Error::of`] finds it there again.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] pikv::Error),
    /// candle did.
    #[error(transparent)]
    Candle(Arc<candle_core::Error>),
    /// A tensor of another shape than the layer's, or than the other tensors of the pass.
    #[error("{what} has the shape {got:?}; the layer and the pass need {expected:?}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// Dimensions of the tensor.
        got: Vec<usize>,
        /// Dimensions that the layer and the pass need.
        expected: Vec<usize>,
    },
    /// A tensor of other numbers.
    #[error("{what} is of {got:?}; F32, F16 and BF16 would do (Tensor::to_dtype)")]
    Dtype {
        /// Which tensor.
        what: &'static str,
        /// Dtype of the tensor.
        got: DType,
    },
    /// A tensor on a device.
    #[error("{what} is not on the CPU, and its place is all that is read (Tensor::to_device)")]
    Device {
        /// Which tensor.
        what: &'static str,
    },
    /// A pass over another number of sequences than the batch has.
    #[error("tensors of {got} sequences for a batch of {held}; KvCache::reset begins a new one")]
    Batch {
        /// The first dimension of the tensors.
        got: usize,
        /// Sequences of the batch.
        held: usize,
    },
    /// Experts of a layer that was not attended in this pass, or that has some already.
    #[error("layer {layer} is routed once in a pass, after its attend")]
    NotAttended {
        /// The layer.
        layer: usize,
    },
}

impl Error {
    /// The error of this crate behind one of candle's, as a model's pass returns it.
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
