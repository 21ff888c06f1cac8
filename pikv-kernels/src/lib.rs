//! Device entry points of pikv: a few lines each over [`pikv_core`], and the lanes of a device.
//!
//! For `nvptx64-nvidia-cuda`; on other targets the crate is the arguments of kernels ([`args`]) and their PTX. No arithmetic is here.
//! `build-ptx.sh` compiles it to the files in `ptx`, which are committed.
#![no_std]
#![deny(missing_docs)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, stdarch_nvptx, core_float_math, link_llvm_intrinsics),
    allow(internal_features)
)]

/// Most warps in a block of a launch: kernels that attend have shared memory for as many.
pub const WARPS: usize = 4;
/// Most warps in a block of a launch of the kernels that join partial results: one block for each row.
pub const JOINING: usize = 16;

pub mod args;
#[cfg(target_arch = "nvptx64")]
pub mod attend;
#[cfg(target_arch = "nvptx64")]
pub mod factors;
#[cfg(target_arch = "nvptx64")]
pub mod gpu;
#[cfg(target_arch = "nvptx64")]
pub mod halves;
#[cfg(target_arch = "nvptx64")]
pub mod join;
#[cfg(target_arch = "nvptx64")]
pub mod pack;
#[cfg(target_arch = "nvptx64")]
pub mod packed;
#[cfg(not(target_arch = "nvptx64"))]
pub mod ptx;
#[cfg(target_arch = "nvptx64")]
pub mod route;
#[cfg(target_arch = "nvptx64")]
pub mod rows;
#[cfg(target_arch = "nvptx64")]
pub mod store;

/// A failed bounds check or assertion ends the kernel.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: a trap ends the kernel in any state.
    unsafe { core::arch::nvptx::trap() }
}
