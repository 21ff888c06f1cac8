//! Errors of CUDA devices.

use thiserror::Error;

/// Why a CUDA device cannot be used, or why a call of the driver failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// pikv was compiled without the feature `cuda`.
    #[error("pikv was built without its feature `cuda`; add it in Cargo.toml: features = [\"cuda\"]")]
    NotBuilt,
    /// The driver's library cannot be opened.
    #[error("no CUDA driver, {name} cannot be opened: {reason}; PIKV_LIBCUDA names another library")]
    NoLibrary {
        /// Name of the library.
        name: String,
        /// Reason of the system.
        reason: String,
    },
    /// The driver has no device.
    #[error("the CUDA driver finds no device; does CUDA_VISIBLE_DEVICES hide them?")]
    NoDevice,
    /// The driver has devices, but none with that number.
    #[error("no CUDA device {ordinal}: the driver counts {devices}, from 0")]
    Ordinal {
        /// Number given.
        ordinal: u32,
        /// Number of devices.
        devices: u32,
    },
    /// The device is too old.
    #[error("{device} has compute capability {major}.{minor}; the kernels need 7.0 or later")]
    Capability {
        /// Name of the device.
        device: String,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// The driver does not load a module of kernels, whose PTX it compiles unless its cache has the result. If it does not compile, the
    /// device returns this error again without another attempt.
    #[error("the kernels {module} do not load: the CUDA driver answers {name} ({code}){}", after(log))]
    Module {
        /// Name of the module.
        module: &'static str,
        /// `CUresult` code.
        code: u32,
        /// Name of the code.
        name: String,
        /// The log of the driver's compiler, at most its first 8 KiB; empty if it wrote none.
        log: String,
    },
    /// A call of the driver failed. The cause may be earlier asynchronous work; if such work failed, every later call on that device fails
    /// too, and its memory is lost.
    #[error("{call}: the CUDA driver answers {name} ({code})")]
    Driver {
        /// Name of the call.
        call: &'static str,
        /// `CUresult` code.
        code: u32,
        /// Name of the code.
        name: String,
    },
}

/// A log as the end of a message.
fn after(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; its compiler: {log}") }
}
