//! Errors of CUDA devices.

use thiserror::Error;

/// Why a CUDA device cannot be used, or what it answered.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// pikv was compiled without its CUDA back end.
    #[error("pikv was built without its feature `cuda`; add it in Cargo.toml: features = [\"cuda\"]")]
    NotBuilt,
    /// The driver's library cannot be opened.
    #[error("no CUDA driver, {name} cannot be opened: {reason}; PIKV_LIBCUDA names another library")]
    NoLibrary {
        /// The library.
        name: String,
        /// What the system says.
        reason: String,
    },
    /// The driver has no device.
    #[error("the CUDA driver finds no device; does CUDA_VISIBLE_DEVICES hide them?")]
    NoDevice,
    /// The driver has devices, but none of that number.
    #[error("no CUDA device {ordinal}: the driver counts {devices}, from 0")]
    Ordinal {
        /// As given.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// The device is too old.
    #[error("{device} has compute capability {major}.{minor}; the kernels need 7.0 or later")]
    Capability {
        /// Its name.
        device: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// The driver's answer to a call. Work of earlier calls may be what failed; a device that answers so once its work has
    /// failed answers so ever after, and what it held is lost.
    #[error("{call}: the CUDA driver answers {name} ({code})")]
    Driver {
        /// The call.
        call: &'static str,
        /// Its `CUresult`.
        code: u32,
        /// The code's name.
        name: String,
    },
}
