//! Device entry points of pikv: a few lines each over [`pikv_core`], and the lanes of a device.
//!
//! For `nvptx64-nvidia-cuda` only; elsewhere the crate is empty. No arithmetic lives here. CI compiles it; nothing runs it
//! yet.
#![no_std]
#![deny(missing_docs)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, core_float_math, link_llvm_intrinsics),
    allow(internal_features)
)]

#[cfg(target_arch = "nvptx64")]
mod attend;
#[cfg(target_arch = "nvptx64")]
pub mod gpu;

/// A bound or an index that does not hold ends the kernel.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel, whatever its state.
    unsafe { core::arch::nvptx::trap() }
}
