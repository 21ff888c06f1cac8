//! Results of the driver as errors of pikv.

use crate::base::error::{CudaError, Error};
use cust::error::CudaError as Answer;
use cust::sys;

/// Error of a call.
pub fn failure(call: &'static str, error: Answer) -> CudaError {
    CudaError::Driver { call, code: error as u32, name: format!("{error:?}") }
}

pub fn answer<T>(call: &'static str, result: Result<T, Answer>) -> Result<T, CudaError> {
    result.map_err(|error| failure(call, error))
}

/// Result of an allocation; [`Error::OutOfMemory`] if there is no memory.
pub fn granted<T>(call: &'static str, bytes: u64, result: Result<T, Answer>) -> Result<T, Error> {
    result.map_err(|error| match error {
        Answer::OutOfMemory => Error::OutOfMemory { bytes },
        other => failure(call, other).into(),
    })
}

/// [`answer`] for calls without a wrapper in cust.
pub fn bare(call: &'static str, code: sys::cudaError_enum) -> Result<(), CudaError> {
    match code {
        sys::cudaError_enum::CUDA_SUCCESS => Ok(()),
        other => Err(CudaError::Driver { call, code: other as u32, name: format!("{other:?}") }),
    }
}

/// Pointers to a kernel's parameters.
macro_rules! arguments {
    ($($x:expr),* $(,)?) => { &[$(std::ptr::from_ref(&$x).cast::<std::ffi::c_void>()),*] };
}
pub(crate) use arguments;
