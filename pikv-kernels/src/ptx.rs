//! The kernels as PTX.

/// The module, for compute capability 7.0 and later. For 8.0 and later the compiler writes the same instructions.
pub const TEXT: &str = include_str!("../ptx/pikv_sm_70.ptx");
