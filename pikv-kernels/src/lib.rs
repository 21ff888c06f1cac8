//! Device entry points of pikv: a few lines each over [`pikv_core`], and the lanes of a device.
//!
//! For `nvptx64-nvidia-cuda`; elsewhere the crate is what kernels are given ([`args`]) and their PTX. No arithmetic lives here.
//! `build-ptx.sh` compiles it to the files in `ptx`, which are committed.
#![no_std]
#![deny(missing_docs)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, stdarch_nvptx, core_float_math, link_llvm_intrinsics),
    allow(internal_features)
)]

/// Warps of a block of a launch, at most: kernels that attend have shared memory for as many.
pub const WARPS: usize = 4;

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

/// A bound or an index that does not hold ends the kernel.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel, whatever its state.
    unsafe { core::arch::nvptx::trap() }
}
