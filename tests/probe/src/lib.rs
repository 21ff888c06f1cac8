//! One shuffle between two branches on the same condition, which differs between lanes. A compiler that threads the first branch to the
//! second duplicates the shuffle, and the lanes no longer meet in one.
#![no_std]
#![feature(abi_ptx, stdarch_nvptx, link_llvm_intrinsics)]
#![allow(internal_features)]

unsafe extern "C" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.f32"]
    fn bfly(mask: u32, x: f32, lanes: u32, clamp: u32) -> f32;
}

/// # Safety
/// `x` and `out` must have an f32 for every thread, `out` one more.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn probe(x: *const f32, out: *mut f32, limit: f32) {
    // SAFETY: by the caller's promise; all lanes of a warp come to the shuffle.
    unsafe {
        let i = core::arch::nvptx::_thread_idx_x() as usize;
        let large = *x.add(i) > limit;
        let mine = if large { *out.add(i) } else { 7.0 };
        let other = bfly(u32::MAX, mine, 1, 31);
        if large {
            *out.add(i) = other * 3.0;
        } else {
            *out.add(i + 1) = other - 5.0;
        }
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel, whatever its state.
    unsafe { core::arch::nvptx::trap() }
}
