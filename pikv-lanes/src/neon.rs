//! 32 lanes as eight NEON registers.

use crate::gather_checked;
use core::arch::{aarch64::*, asm};
use pikv_core::warp::{ArrayShelf, LANES, ROUND, Routine, Warp};

/// 32 lanes as eight 128-bit registers; a mask is eight registers of all-ones and all-zeros lanes.
///
/// NEON is part of every aarch64 target with a standard library, so nothing is detected at run time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Neon;

/// 32 lanes in memory, four registers to a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Slot([f32; LANES]);

/// Lane `i` holds `i`.
const IDS: [u32; LANES] = {
    let mut ids = [0; LANES];
    let mut i = 0;
    while i < LANES {
        ids[i] = i as u32;
        i += 1;
    }
    ids
};

/// Lane `i` holds bit `i` alone.
const BITS: [u32; LANES] = {
    let mut bits = [0; LANES];
    let mut i = 0;
    while i < LANES {
        bits[i] = 1 << i;
        i += 1;
    }
    bits
};

/// `$e`, made of intrinsics that touch no memory.
macro_rules! regs {
    ($e:expr) => {
        // SAFETY: the intrinsics of `$e` touch no memory and need NEON alone, which every aarch64 target with a standard
        // library enables.
        unsafe { $e }
    };
}

/// `$op` on each of the eight registers.
macro_rules! eight {
    ($op:expr; $($x:expr),+) => {
        regs!([
            $op($($x[0]),+), $op($($x[1]),+), $op($($x[2]),+), $op($($x[3]),+),
            $op($($x[4]),+), $op($($x[5]),+), $op($($x[6]),+), $op($($x[7]),+),
        ])
    };
}

/// `$load` of the eight quarters of 16 bytes of the 32 words at `$p`; in an unsafe block.
macro_rules! load {
    ($load:ident, $p:expr) => {{
        let p = $p;
        [
            $load(p),
            $load(p.add(4)),
            $load(p.add(8)),
            $load(p.add(12)),
            $load(p.add(16)),
            $load(p.add(20)),
            $load(p.add(24)),
            $load(p.add(28)),
        ]
    }};
}

/// Prefetches the cache line of `address` into the first-level cache.
#[inline(always)]
pub(crate) fn fetch_line(address: *const u8) {
    // SAFETY: a prefetch is a hint on any address; it changes neither memory nor registers.
    unsafe {
        asm!("prfm pldl1keep, [{p}]", p = in(reg) address.addr(), options(nomem, nostack, preserves_flags));
    }
}

impl Warp for Neon {
    type F = [float32x4_t; 8];
    type U = [uint32x4_t; 8];
    type M = [uint32x4_t; 8];
    type Slot = Slot;
    type Shelf<const R: usize> = ArrayShelf<Self::Slot, R>;
    type Sum = [int32x4_t; 8];

    const NAME: &'static str = "neon";
    /// Sums of 2 rows take 16 of the 32 registers; those of 4 would leave none to load into.
    const ROWS: usize = 2;
    const FETCHES: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        regs!([vdupq_n_f32(x); 8])
    }
    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        regs!([vdupq_n_u32(x); 8])
    }
    #[inline(always)]
    fn lane_id(self) -> Self::U {
        self.load(&IDS)
    }
    #[inline(always)]
    fn load(self, row: &[u32; LANES]) -> Self::U {
        // SAFETY: NEON is enabled; the eight loads of 4 words read the 32 words of `row`.
        unsafe { load!(vld1q_u32, row.as_ptr()) }
    }
    #[inline(always)]
    fn load_part(self, row: &[u32]) -> Self::U {
        if let Some(row) = row.first_chunk() {
            return self.load(row);
        }
        let (whole, rest) = row.as_chunks::<4>();
        let mut last = [0; 4];
        for (to, word) in last.iter_mut().zip(rest) {
            *to = *word;
        }
        let mut out = self.splat_u(0);
        for (k, out) in out.iter_mut().enumerate() {
            let quarter = match whole.get(k) {
                Some(words) => words,
                None if k == whole.len() => &last,
                None => break,
            };
            // SAFETY: NEON is enabled; the load reads the 4 words of `quarter`.
            *out = unsafe { vld1q_u32(quarter.as_ptr()) };
        }
        out
    }
    #[inline(always)]
    fn load_f(self, row: &[f32; LANES]) -> Self::F {
        // SAFETY: NEON is enabled; the eight loads of 4 lanes read the 32 lanes of `row`.
        unsafe { load!(vld1q_f32, row.as_ptr()) }
    }
    #[inline(always)]
    fn gather(self, table: &[f32], index: Self::U) -> Self::F {
        let most = regs!(vmaxvq_u32(vmaxq_u32(
            vmaxq_u32(vmaxq_u32(index[0], index[1]), vmaxq_u32(index[2], index[3])),
            vmaxq_u32(vmaxq_u32(index[4], index[5]), vmaxq_u32(index[6], index[7])),
        )));
        let index = self.park(self.from_bits(index)).0.map(f32::to_bits);
        if most as usize >= table.len() {
            return self.load_f(&gather_checked(table, &index));
        }
        let mut out = [0.0; LANES];
        for (out, i) in out.iter_mut().zip(index) {
            // SAFETY: the largest index is below `table.len()`.
            *out = unsafe { *table.get_unchecked(i as usize) };
        }
        self.load_f(&out)
    }
    #[inline(always)]
    fn store(self, x: Self::F, row: &mut [f32; LANES]) {
        let (quarters, _) = row.as_chunks_mut::<4>();
        for (x, quarter) in x.iter().zip(quarters) {
            // SAFETY: NEON is enabled; the store writes the 4 lanes of `quarter`.
            unsafe { vst1q_f32(quarter.as_mut_ptr(), *x) };
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        eight!(vaddq_f32; a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        eight!(vsubq_f32; a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        eight!(vmulq_f32; a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        eight!(vdivq_f32; a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        eight!(vfmaq_f32; c, a, b)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // The instruction `fmax` returns a NaN if either is one, and +0 for zeros of both signs.
        let m: Self::M = eight!(vcgtq_f32; a, b);
        self.select(m, a, b)
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        eight!(vreinterpretq_u32_f32; a)
    }
    #[inline(always)]
    fn from_bits(self, a: Self::U) -> Self::F {
        eight!(vreinterpretq_f32_u32; a)
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        eight!(vandq_u32; a, b)
    }
    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        eight!(vorrq_u32; a, b)
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        eight!(vaddq_u32; a, b)
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        eight!(vsubq_u32; a, b)
    }
    // A shift by a register, left by its lanes, which are negative for a shift to the right; as the lanes are constants, it becomes
    // a shift by an immediate.
    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        let n = regs!([vdupq_n_s32(N as i32); 8]);
        eight!(vshlq_u32; a, n)
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        let n = regs!([vdupq_n_s32(-(N as i32)); 8]);
        eight!(vshlq_u32; a, n)
    }
    #[inline(always)]
    fn sra<const N: u32>(self, a: Self::U) -> Self::U {
        let n = regs!([vdupq_n_s32(-(N as i32)); 8]);
        let a: [int32x4_t; 8] = eight!(vreinterpretq_s32_u32; a);
        let a: [int32x4_t; 8] = eight!(vshlq_s32; a, n);
        eight!(vreinterpretq_u32_s32; a)
    }
    #[inline(always)]
    fn store_quads(self, a: Self::F, b: Self::F, row: &mut [u32; LANES]) {
        // The integers' 16 bits in order, in the first half of the row.
        let a = self.bits(self.fma(a, b, self.splat(ROUND)));
        let (eighths, _) = row.as_chunks_mut::<4>();
        for (pair, eighth) in a.chunks_exact(2).zip(eighths) {
            let low = regs!(vreinterpretq_u32_u16(halves(pair[0], pair[1])[0]));
            // SAFETY: NEON is enabled; the store writes the 4 words of `eighth`.
            unsafe { vst1q_u32(eighth.as_mut_ptr(), low) };
        }
    }
    #[inline(always)]
    fn no_sum(self) -> Self::Sum {
        regs!([vdupq_n_s32(0); 8])
    }
    #[inline(always)]
    fn dot4(self, a: Self::U, row: &[u32; LANES], quad: usize, c: Self::Sum) -> Self::Sum {
        // The remainder, which changes nothing, spares a check of the index.
        let two: &[u32] = &row[2 * quad % (LANES / 2)..][..2];
        // SAFETY: NEON is enabled; the load reads the 2 words of `two`, whose alignment is more than it needs.
        let b = unsafe { vld1_s16(two.as_ptr().cast()) };
        let [c0, c1] = dot_eight([a[0], a[1]], b, [c[0], c[1]]);
        let [c2, c3] = dot_eight([a[2], a[3]], b, [c[2], c[3]]);
        let [c4, c5] = dot_eight([a[4], a[5]], b, [c[4], c[5]]);
        let [c6, c7] = dot_eight([a[6], a[7]], b, [c[6], c[7]]);
        [c0, c1, c2, c3, c4, c5, c6, c7]
    }
    #[inline(always)]
    fn total(self, c: Self::Sum) -> Self::U {
        eight!(vreinterpretq_u32_s32; c)
    }
    #[inline(always)]
    fn to_f(self, a: Self::U) -> Self::F {
        let a: [int32x4_t; 8] = eight!(vreinterpretq_s32_u32; a);
        eight!(vcvtq_f32_s32; a)
    }
    #[inline(always)]
    fn byte(self, a: Self::U, j: usize) -> Self::F {
        // One table look-up does shift and mask: an index past 15 gives 0.
        let at = (j as u32 & 3) | 0xffff_ff00;
        let index = [at, at + 0x04, at + 0x08, at + 0x0c];
        // SAFETY: NEON is enabled; the load reads the 4 words of `index`.
        let index = unsafe { vreinterpretq_u8_u32(vld1q_u32(index.as_ptr())) };
        let a: [uint8x16_t; 8] = eight!(vreinterpretq_u8_u32; a);
        let a: [uint8x16_t; 8] = eight!(vqtbl1q_u8; a, [index; 8]);
        self.to_f(eight!(vreinterpretq_u32_u8; a))
    }
    #[inline(always)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        eight!(vcltq_f32; a, b)
    }
    #[inline(always)]
    fn ge_i(self, a: Self::U, b: Self::U) -> Self::M {
        let a: [int32x4_t; 8] = eight!(vreinterpretq_s32_u32; a);
        let b: [int32x4_t; 8] = eight!(vreinterpretq_s32_u32; b);
        eight!(vcgeq_s32; a, b)
    }
    #[inline(always)]
    fn and_m(self, a: Self::M, b: Self::M) -> Self::M {
        self.and(a, b)
    }
    #[inline(always)]
    fn or_m(self, a: Self::M, b: Self::M) -> Self::M {
        self.or(a, b)
    }
    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        eight!(vbslq_f32; m, a, b)
    }
    #[inline(always)]
    fn ballot(self, m: Self::M) -> u32 {
        // Each lane narrowed to a byte, of which a bit of its own is kept; three sums of neighbours make a byte of each eight lanes.
        let weights = 0x8040_2010_0804_0201_u64;
        regs!({
            let weights = vreinterpretq_u8_u64(vdupq_n_u64(weights));
            let low = vandq_u8(bytes([m[0], m[1], m[2], m[3]]), weights);
            let high = vandq_u8(bytes([m[4], m[5], m[6], m[7]]), weights);
            let sums = vpaddq_u8(low, high);
            let sums = vpaddq_u8(sums, sums);
            vgetq_lane_u32::<0>(vreinterpretq_u32_u8(vpaddq_u8(sums, sums)))
        })
    }
    #[inline(always)]
    fn mask(self, bits: u32) -> Self::M {
        eight!(vtstq_u32; self.splat_u(bits), self.load(&BITS))
    }
    #[inline(always)]
    fn shfl_xor(self, a: Self::F, mask: u32) -> Self::F {
        let a = if mask & 16 == 0 { a } else { [a[4], a[5], a[6], a[7], a[0], a[1], a[2], a[3]] };
        let a = if mask & 8 == 0 { a } else { [a[2], a[3], a[0], a[1], a[6], a[7], a[4], a[5]] };
        let a = if mask & 4 == 0 { a } else { [a[1], a[0], a[3], a[2], a[5], a[4], a[7], a[6]] };
        let a = if mask & 2 == 0 { a } else { eight!(vextq_f32::<2>; a, a) };
        if mask & 1 == 0 { a } else { eight!(vrev64q_f32; a) }
    }
    parked_in_memory!();
    #[inline(always)]
    fn spread_row(self, row: &[f32; LANES], first: usize, width: usize) -> Self::F {
        match width {
            32 => self.splat(row[first]),
            16 => regs!({
                let (a, b) = (vdupq_n_f32(row[first]), vdupq_n_f32(row[first + 1]));
                [a, a, a, a, b, b, b, b]
            }),
            8 => {
                let s = &row[first..first + 4];
                let s = regs!([vdupq_n_f32(s[0]), vdupq_n_f32(s[1]), vdupq_n_f32(s[2]), vdupq_n_f32(s[3])]);
                [s[0], s[0], s[1], s[1], s[2], s[2], s[3], s[3]]
            }
            _ => {
                let s = &row[first..first + 8];
                eight!(vdupq_n_f32; s)
            }
        }
    }
    #[inline(never)]
    fn call<K: Routine<Self>>(self, routine: K) -> K::Out {
        routine.run(self)
    }
    #[inline(always)]
    fn prefetch(self, row: &[u32; LANES]) {
        // Into the second-level cache, as on x86-64; which level is best has not been measured on a processor with NEON.
        // SAFETY: a prefetch is a hint on any address; it changes neither memory nor registers.
        unsafe {
            asm!(
                "prfm pldl2keep, [{p}]",
                "prfm pldl2keep, [{p}, #64]",
                p = in(reg) row.as_ptr().addr(),
                options(nomem, nostack, preserves_flags),
            );
        }
    }
    // Lane 0 of the butterfly depends, at distance d, only on lanes below d, each of them op(lane i, lane i + d).
    #[inline(always)]
    fn reduce_max(self, a: Self::F) -> f32 {
        regs!({
            let x = [max4(a[0], a[4]), max4(a[1], a[5]), max4(a[2], a[6]), max4(a[3], a[7])];
            let x = max4(max4(x[0], x[2]), max4(x[1], x[3]));
            let x = max4(x, vextq_f32::<2>(x, x));
            vgetq_lane_f32::<0>(max4(x, vrev64q_f32(x)))
        })
    }
    #[inline(always)]
    fn reduce_sum(self, a: Self::F) -> f32 {
        regs!({
            let x =
                [vaddq_f32(a[0], a[4]), vaddq_f32(a[1], a[5]), vaddq_f32(a[2], a[6]), vaddq_f32(a[3], a[7])];
            let x = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            let x = vaddq_f32(x, vextq_f32::<2>(x, x));
            vgetq_lane_f32::<0>(vaddq_f32(x, vrev64q_f32(x)))
        })
    }
}

/// [`Warp::max`] of 4 lanes.
#[inline(always)]
fn max4(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    regs!(vbslq_f32(vcgtq_f32(a, b), a, b))
}

/// The low halves of the words of 8 lanes, and the high ones.
#[inline(always)]
fn halves(a: uint32x4_t, b: uint32x4_t) -> [uint16x8_t; 2] {
    regs!({
        let (a, b) = (vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
        [vuzp1q_u16(a, b), vuzp2q_u16(a, b)]
    })
}

/// The low bytes of the words of 16 lanes.
#[inline(always)]
fn bytes(a: [uint32x4_t; 4]) -> uint8x16_t {
    let (low, high) = (halves(a[0], a[1])[0], halves(a[2], a[3])[0]);
    regs!(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)))
}

/// Adds 16-bit `$a` times lane `$i` of `$b` to the 32-bit sums `$near` and `$far`.
///
/// Written as instructions because the compiler, which sees that `$a` are bytes, would multiply 32-bit words instead: that takes a shift
/// and a mask for every byte of every register.
macro_rules! add_products {
    ($near:ident, $far:ident, $a:expr, $b:ident, $i:literal) => {
        // SAFETY: the instructions need NEON alone, and change only the registers named.
        unsafe {
            asm!(
                concat!("smlal {near:v}.4s, {a:v}.4h, {b:v}.h[", $i, "]"),
                concat!("smlal2 {far:v}.4s, {a:v}.8h, {b:v}.h[", $i, "]"),
                near = inout(vreg) $near,
                far = inout(vreg) $far,
                a = in(vreg) $a,
                b = in(vreg_low16) $b,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
    };
}

/// Adds to each of 8 lanes its word's four bytes times the integers of `b`, the low byte times the first.
///
/// A product of 16-bit numbers is exact in 32 bits. The products of bytes that newer processors have (`sdot`) would need two sums for
/// each row, of the integers' low and high bytes: those of 2 rows would take all registers.
#[inline(always)]
fn dot_eight(a: [uint32x4_t; 2], b: int16x4_t, c: [int32x4_t; 2]) -> [int32x4_t; 2] {
    let [low, high] = halves(a[0], a[1]);
    let [mut near, mut far] = c;
    let last = |x: uint16x8_t| regs!(vandq_u16(x, vdupq_n_u16(0xff)));
    let first = |x: uint16x8_t| regs!(vshrq_n_u16::<8>(x));
    add_products!(near, far, last(low), b, "0");
    add_products!(near, far, first(low), b, "1");
    add_products!(near, far, last(high), b, "2");
    add_products!(near, far, first(high), b, "3");
    [near, far]
}
