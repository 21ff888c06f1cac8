//! The kernels as PTX.

/// For compute capability 7.0 and later.
pub const SM_70: &str = include_str!("../ptx/pikv_sm_70.ptx");
/// For compute capability 8.0 and later.
pub const SM_80: &str = include_str!("../ptx/pikv_sm_80.ptx");
