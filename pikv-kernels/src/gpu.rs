//! The lanes of a device: one thread each. Names follow cuda_std.

use crate::WARPS;
use core::arch::asm;
use core::borrow::Borrow;
use pikv_core::attend::BLOCK;
use pikv_core::warp::{LANES, ROUND, Shelf, Warp};

/// Indices of the thread in the launch.
pub mod thread {
    use core::arch::nvptx;

    /// Index of the thread's warp in the launch; blocks are whole warps.
    #[inline(always)]
    pub fn warp_index() -> u32 {
        // SAFETY: special registers, readable by any thread.
        unsafe {
            (nvptx::_block_idx_x() as u32 * nvptx::_block_dim_x() as u32 + nvptx::_thread_idx_x() as u32) / 32
        }
    }

    /// Index of the thread's block in the launch.
    #[inline(always)]
    pub fn block_index() -> u32 {
        // SAFETY: a special register, readable by any thread.
        unsafe { nvptx::_block_idx_x() as u32 }
    }

    /// Warps of a block; blocks are whole warps.
    #[inline(always)]
    pub fn warps_of_block() -> u32 {
        // SAFETY: a special register, readable by any thread.
        unsafe { nvptx::_block_dim_x() as u32 / 32 }
    }

    /// Waits for all threads of the block, and makes their writes visible to each other.
    ///
    /// # Safety
    /// All threads of the block must call it together.
    #[inline(always)]
    pub unsafe fn sync_threads() {
        // SAFETY: the caller's promise.
        unsafe { nvptx::_syncthreads() }
    }

    /// Index of the thread's warp in its block.
    #[inline(always)]
    pub fn warp_of_block() -> u32 {
        // SAFETY: a special register, readable by any thread.
        unsafe { nvptx::_thread_idx_x() as u32 / 32 }
    }

    /// Index of the thread in its warp.
    #[inline(always)]
    pub fn lane_index() -> u32 {
        // SAFETY: a special register, readable by any thread.
        unsafe { nvptx::_thread_idx_x() as u32 % 32 }
    }
}

/// Operations of a whole warp. LLVM's own intrinsics are used, because it knows them to be convergent; inline assembly is not marked so.
pub mod warp {
    /// All lanes.
    const FULL: u32 = u32::MAX;

    unsafe extern "C" {
        #[link_name = "llvm.nvvm.shfl.sync.bfly.f32"]
        fn bfly(mask: u32, x: f32, lanes: u32, clamp: u32) -> f32;
        #[link_name = "llvm.nvvm.shfl.sync.idx.f32"]
        fn idx(mask: u32, x: f32, lane: u32, clamp: u32) -> f32;
        #[link_name = "llvm.nvvm.vote.ballot.sync"]
        fn vote(mask: u32, p: bool) -> u32;
        #[link_name = "llvm.nvvm.bar.warp.sync"]
        fn bar(mask: u32);
    }

    /// The value of lane `lane ^ mask`.
    #[inline(always)]
    pub fn shfl_xor(x: f32, mask: u32) -> f32 {
        // SAFETY: pikv's control flow is uniform over a warp, so all 32 lanes arrive together.
        unsafe { bfly(FULL, x, mask, 31) }
    }

    /// The value of lane `lane`.
    #[inline(always)]
    pub fn shfl_idx(x: f32, lane: u32) -> f32 {
        // SAFETY: as in `shfl_xor`.
        unsafe { idx(FULL, x, lane, 31) }
    }

    /// Waits for all lanes, and makes their writes visible to each other.
    #[inline(always)]
    pub fn sync_warp() {
        // SAFETY: as in `shfl_xor`.
        unsafe { bar(FULL) }
    }

    /// Bit `i` is lane `i`'s `p`.
    #[inline(always)]
    pub fn ballot(p: bool) -> u32 {
        // SAFETY: as in `shfl_xor`.
        unsafe { vote(FULL, p) }
    }
}

/// `x`, hidden from the compiler: values computed from it are not kept from one page to the next, as there are more such
/// values than registers.
#[inline(always)]
pub fn afresh(mut x: u32) -> u32 {
    // SAFETY: the assembly is only a comment: no instruction.
    unsafe { asm!("// {x}", x = inout(reg32) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// [`afresh`] for a pointer: the memory behind it is read again.
#[inline(always)]
pub fn afresh_at<T>(mut p: *const T) -> *const T {
    // SAFETY: the assembly is only a comment: no instruction.
    unsafe { asm!("// {p}", p = inout(reg64) p, options(nomem, nostack, preserves_flags)) };
    p
}

/// The calling thread as a lane of its warp.
#[derive(Clone, Copy)]
pub struct Lane(u32);

impl Lane {
    /// # Safety
    /// All 32 threads of the warp must call it together, and stay together: control flow of code that uses the lane is uniform.
    #[inline(always)]
    pub unsafe fn new() -> Lane {
        Lane(thread::lane_index())
    }
}

/// Shared memory of a warp.
#[repr(C)]
pub struct Shelved<const R: usize> {
    slots: [[[f32; LANES]; R]; BLOCK],
    seen: [[u32; R]; BLOCK],
}

/// A warp's shelf, in shared memory. A shelf is indexed at run time, which registers cannot be; an array of a lane's own would be a
/// stack in local memory.
pub struct Shared<const R: usize>(*mut Shelved<R>);

impl<const R: usize> Shared<R> {
    /// Bytes for a block with the most warps.
    const BYTES: usize = WARPS * size_of::<Shelved<R>>();
}

impl<const R: usize> Shelf<Lane, R> for Shared<R> {
    #[inline(always)]
    fn new(_: Lane) -> Self {
        let all: u64;
        // SAFETY: takes the address of the kernel's own memory, and reads nothing.
        unsafe {
            asm!(
                "{{ .shared .align 128 .b8 shelf[{n}]; cvta.shared.u64 {all}, shelf; }}",
                n = const Self::BYTES,
                all = out(reg64) all,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        Shared((all as *mut Shelved<R>).wrapping_add(thread::warp_of_block() as usize))
    }
    #[inline(always)]
    fn see(&mut self, i: usize, seen: [u32; R]) {
        // SAFETY: memory of this warp, to which all lanes write the same value.
        unsafe { (*self.0).seen[i % BLOCK] = seen }
    }
    #[inline(always)]
    fn seen(&self, i: usize) -> [u32; R] {
        // SAFETY: memory of this warp; a lane reads the value that it wrote.
        unsafe { (*self.0).seen[i % BLOCK] }
    }
    #[inline(always)]
    fn put(&mut self, w: Lane, i: usize, r: usize, x: f32) {
        // SAFETY: memory of this warp, in which each lane has its own words.
        unsafe { (*self.0).slots[i % BLOCK][r][w.0 as usize % LANES] = x }
    }
    #[inline(always)]
    fn get(&self, w: Lane, i: usize, r: usize) -> f32 {
        // SAFETY: as in `put`.
        unsafe { (*self.0).slots[i % BLOCK][r][w.0 as usize % LANES] }
    }
    #[inline(always)]
    fn rows(&self, w: Lane, i: usize) -> impl Borrow<[f32; R]> {
        let mut rows = [0.0; R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = self.get(w, i, r);
        }
        rows
    }
}

impl Warp for Lane {
    type F = f32;
    type U = u32;
    type M = bool;
    type Slot = f32;
    type Shelf<const R: usize> = Shared<R>;
    type Sum = u32;

    const NAME: &'static str = "ptx";
    const ROWS: usize = 8;
    const BURSTS: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn splat_u(self, x: u32) -> u32 {
        x
    }
    #[inline(always)]
    fn lane_id(self) -> u32 {
        self.0
    }
    #[inline(always)]
    fn load(self, row: &[u32; LANES]) -> u32 {
        row[self.0 as usize % LANES]
    }
    #[inline(always)]
    fn load_part(self, row: &[u32]) -> u32 {
        match row.get(self.0 as usize) {
            Some(word) => *word,
            None => 0,
        }
    }
    #[inline(always)]
    fn load_rows<const N: usize>(self, words: &[u32], stride: usize, width: usize) -> [u32; N] {
        assert!((N - 1) * stride + width <= words.len());
        // Computed anew: the compiler would else keep the offsets of all rows from one call to the next, in two registers each.
        let stride = afresh(stride as u32) as usize;
        let mut out = [0; N];
        if (self.0 as usize) < width {
            for row in 0..N {
                // SAFETY: the last row ends within `words`, the others lie before it, and the lane is within the row's width. (A check
                // of each row would stand between the loads.)
                out[row] = unsafe { *words.get_unchecked(row * stride + self.0 as usize) };
            }
        }
        out
    }
    #[inline(always)]
    fn load_f(self, row: &[f32; LANES]) -> f32 {
        row[self.0 as usize % LANES]
    }
    #[inline(always)]
    fn gather(self, table: &[f32], index: u32) -> f32 {
        table[index as usize]
    }
    #[inline(always)]
    fn store(self, x: f32, row: &mut [f32; LANES]) {
        row[self.0 as usize % LANES] = x;
    }
    #[inline(always)]
    fn gather_half(self, table: &[u16], index: u32) -> u32 {
        u32::from(table[index as usize])
    }
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        core::f32::math::mul_add(a, b, c)
    }
    #[inline(always)]
    fn max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    fn bits(self, a: f32) -> u32 {
        a.to_bits()
    }
    #[inline(always)]
    fn from_bits(self, a: u32) -> f32 {
        f32::from_bits(a)
    }
    #[inline(always)]
    fn and(self, a: u32, b: u32) -> u32 {
        a & b
    }
    #[inline(always)]
    fn or(self, a: u32, b: u32) -> u32 {
        a | b
    }
    #[inline(always)]
    fn add_u(self, a: u32, b: u32) -> u32 {
        a.wrapping_add(b)
    }
    #[inline(always)]
    fn sub_u(self, a: u32, b: u32) -> u32 {
        a.wrapping_sub(b)
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: u32) -> u32 {
        a << N
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: u32) -> u32 {
        a >> N
    }
    #[inline(always)]
    fn sra<const N: u32>(self, a: u32) -> u32 {
        (a as i32 >> N) as u32
    }
    #[inline(always)]
    fn store_quads(self, a: f32, b: f32, row: &mut [u32; LANES]) {
        row[self.0 as usize % LANES] = self.bits(self.fma(a, b, ROUND)).wrapping_sub(self.bits(ROUND));
    }
    #[inline(always)]
    fn no_sum(self) -> u32 {
        0
    }
    #[inline(always)]
    fn dot4(self, a: u32, row: &[u32; LANES], quad: usize, mut c: u32) -> u32 {
        let first = 4 * quad % LANES;
        for j in 0..4 {
            c = c.wrapping_add((a >> (8 * j) & 0xff).wrapping_mul(row[first + j]));
        }
        c
    }
    #[inline(always)]
    fn total(self, c: u32) -> u32 {
        c
    }
    #[inline(always)]
    fn to_f(self, a: u32) -> f32 {
        a as i32 as f32
    }
    #[inline(always)]
    fn lt(self, a: f32, b: f32) -> bool {
        a < b
    }
    #[inline(always)]
    fn ge_i(self, a: u32, b: u32) -> bool {
        a as i32 >= b as i32
    }
    #[inline(always)]
    fn and_m(self, a: bool, b: bool) -> bool {
        a & b
    }
    #[inline(always)]
    fn or_m(self, a: bool, b: bool) -> bool {
        a | b
    }
    #[inline(always)]
    fn select(self, m: bool, a: f32, b: f32) -> f32 {
        if m { a } else { b }
    }
    #[inline(always)]
    fn ballot(self, m: bool) -> u32 {
        warp::ballot(m)
    }
    #[inline(always)]
    fn mask(self, bits: u32) -> bool {
        bits >> self.0 & 1 == 1
    }
    #[inline(always)]
    fn shfl_xor(self, a: f32, mask: u32) -> f32 {
        warp::shfl_xor(a, mask)
    }
    #[inline(always)]
    fn lane(self, a: f32, i: usize) -> f32 {
        warp::shfl_idx(a, i as u32)
    }
    #[inline(always)]
    fn scatter(self, x: f32, out: &mut [f32], start: usize, step: usize) {
        if let Some(out) = out.get_mut(start + self.0 as usize * step) {
            *out = x;
        }
    }
    #[inline(always)]
    fn scatter_half(self, x: u32, out: &mut [u16], start: usize, step: usize) {
        if let Some(out) = out.get_mut(start + self.0 as usize * step) {
            *out = x as u16;
        }
    }
    #[inline(always)]
    fn sync(self) {
        warp::sync_warp();
    }
    #[inline(always)]
    fn pick<const R: usize>(self, rows: &[f32; R], r: usize) -> f32 {
        let mut x = rows[0];
        for (i, row) in rows.iter().enumerate() {
            x = if i == r { *row } else { x };
        }
        x
    }
    #[inline(always)]
    fn put_bit<const R: usize>(self, bits: &mut [u32; R], i: usize, on: bool) {
        for (r, bits) in bits.iter_mut().enumerate() {
            let bit = if r == i / LANES { 1 << (i % LANES) } else { 0 };
            *bits = if on { *bits | bit } else { *bits & !bit };
        }
    }
    #[inline(always)]
    fn store_part(self, x: f32, row: &mut [f32]) {
        if let Some(word) = row.get_mut(self.0 as usize) {
            *word = x;
        }
    }
    #[inline(always)]
    fn park(self, a: f32) -> f32 {
        a
    }
    #[inline(always)]
    fn unpark(self, s: &f32) -> f32 {
        *s
    }
    #[inline(always)]
    fn bcast(self, s: &f32, i: usize) -> f32 {
        warp::shfl_idx(*s, i as u32)
    }
    #[inline(always)]
    fn spread(self, s: &f32, first: usize, width: usize) -> f32 {
        warp::shfl_idx(*s, first as u32 + self.0 / width as u32)
    }
    #[inline(always)]
    fn spread_row(self, row: &[f32; LANES], first: usize, width: usize) -> f32 {
        row[(first + self.0 as usize / width) % LANES]
    }
}
