//! 32 lanes as two AVX-512 registers.

use crate::{
    avx2::{max8, sum8},
    gather_checked,
};
use core::arch::x86_64::*;
use pikv_core::warp::{ArrayShelf, LANES, ROUND, Routine, Warp};

/// 32 lanes as two 512-bit registers.
///
/// A value proves that the machine has AVX-512 F, BW, DQ, VL, VNNI and FMA. (Machines without VNNI, of 2017 and 2018, run AVX2.)
/// The methods use F, DQ (one extract), BW (shuffles of bytes), VNNI (products of bytes), and AVX and SSE3, which F implies; VL
/// is there for the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

impl Avx512 {
    /// The lanes, if this machine has AVX-512 F, BW, DQ, VL, VNNI and FMA.
    #[inline]
    pub fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma"))
        .then_some(Self(()))
    }
}

/// 32 lanes in memory, one cache line per register.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Slot([f32; LANES]);

/// `$e`, made of intrinsics that touch no memory, in a method of [`Avx512`].
macro_rules! regs {
    ($e:expr) => {
        // SAFETY: the intrinsics of `$e` touch no memory and need only their features, of AVX-512 F, BW, DQ and VNNI; the
        // machine has them, as `self` exists only where `Avx512::new` detected them.
        unsafe { $e }
    };
}

/// `$op` on the low registers and on the high ones.
macro_rules! both {
    ($op:expr; $($x:expr),+) => { regs!([$op($($x[0]),+), $op($($x[1]),+)]) };
}

impl Warp for Avx512 {
    type F = [__m512; 2];
    type U = [__m512i; 2];
    type M = [__mmask16; 2];
    type Slot = Slot;
    type Shelf<const R: usize> = ArrayShelf<Self::Slot, R>;
    /// Sums of products with the integers' low bytes, signed, and with the rest, in units of 256.
    type Sum = [[__m512i; 2]; 2];

    const NAME: &'static str = "avx512";
    const ROWS: usize = 8;
    const FETCHES: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        regs!([_mm512_set1_ps(x); 2])
    }
    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        regs!([_mm512_set1_epi32(x as i32); 2])
    }
    #[inline(always)]
    fn lane_id(self) -> Self::U {
        regs!([
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
            _mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31),
        ])
    }
    #[inline(always)]
    fn load(self, row: &[u32; LANES]) -> Self::U {
        let p = row.as_ptr();
        // SAFETY: `self` proves AVX-512 F; the two unaligned loads read words 0..16 and 16..32 of the 32 of `row`.
        unsafe { [_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(16).cast())] }
    }
    #[inline(always)]
    fn load_part(self, row: &[u32]) -> Self::U {
        if let Some(row) = row.first_chunk() {
            return self.load(row);
        }
        let p: *const i32 = row.as_ptr().cast();
        let m = (1u32 << row.len()) - 1;
        // SAFETY: `self` proves AVX-512 F; bit `i` of `m` is set only if `i < row.len()`, and a masked load neither
        // reads nor faults on a lane whose bit is clear. The second address may lie past `row`, hence the wrapping
        // add, but then its mask is empty.
        unsafe {
            [
                _mm512_maskz_loadu_epi32(m as u16, p),
                _mm512_maskz_loadu_epi32((m >> 16) as u16, p.wrapping_add(16)),
            ]
        }
    }
    #[inline(always)]
    fn load_f(self, row: &[f32; LANES]) -> Self::F {
        let p = row.as_ptr();
        // SAFETY: `self` proves AVX-512 F; the two unaligned loads read lanes 0..16 and 16..32 of the 32 of `row`.
        unsafe { [_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16))] }
    }
    #[inline(always)]
    fn gather(self, table: &[f32], index: Self::U) -> Self::F {
        if table.len() <= i32::MAX as usize {
            let n = self.splat_u(table.len() as u32);
            let inside: [u16; 2] = both!(_mm512_cmplt_epu32_mask; index, n);
            if inside[0] & inside[1] == u16::MAX {
                let p = table.as_ptr();
                // SAFETY: `self` proves AVX-512 F; every index is below `table.len()`, which is at most `i32::MAX`,
                // so as signed 32-bit offsets in elements of 4 bytes they all fall inside `table`.
                return unsafe {
                    [
                        _mm512_i32gather_ps::<4>(index[0], p.cast()),
                        _mm512_i32gather_ps::<4>(index[1], p.cast()),
                    ]
                };
            }
        }
        let index = self.park(self.from_bits(index)).0.map(f32::to_bits);
        self.load_f(&gather_checked(table, &index))
    }
    #[inline(always)]
    fn store(self, x: Self::F, row: &mut [f32; LANES]) {
        let p = row.as_mut_ptr();
        // SAFETY: `self` proves AVX-512 F; the two unaligned stores write lanes 0..16 and 16..32 of the 32 of `row`.
        unsafe {
            _mm512_storeu_ps(p, x[0]);
            _mm512_storeu_ps(p.add(16), x[1]);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm512_add_ps; a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm512_sub_ps; a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm512_mul_ps; a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm512_div_ps; a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm512_fmadd_ps; a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm512_max_ps; a, b)
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        both!(_mm512_castps_si512; a)
    }
    #[inline(always)]
    fn from_bits(self, a: Self::U) -> Self::F {
        both!(_mm512_castsi512_ps; a)
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        both!(_mm512_and_si512; a, b)
    }
    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        both!(_mm512_or_si512; a, b)
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        both!(_mm512_add_epi32; a, b)
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        both!(_mm512_sub_epi32; a, b)
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        both!(_mm512_slli_epi32::<N>; a)
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        both!(_mm512_srli_epi32::<N>; a)
    }
    #[inline(always)]
    fn sra<const N: u32>(self, a: Self::U) -> Self::U {
        both!(_mm512_srai_epi32::<N>; a)
    }
    #[inline(always)]
    fn store_quads(self, a: Self::F, b: Self::F, row: &mut [u32; LANES]) {
        // An integer is 256 high + low, both signed bytes; plus 128 it is 256 high + (low + 128), whose last byte is low except for its top
        // bit. The low bytes of each four integers are in one word, the high ones in the next: the product of bytes takes four codes as
        // they are stored, while a product of 16-bit halves would need the codes unpacked.
        let index = regs!(_mm512_set4_epi32(0, 0, 0x0d09_0501, 0x0c08_0400));
        let sign = regs!(_mm512_set4_epi32(0, 0, 0, 0x8080_8080_u32 as i32));
        let up = self.bits(self.fma(a, b, self.splat(ROUND + 128.0)));
        let bytes: Self::U = both!(_mm512_shuffle_epi8; up, [index, index]);
        let bytes: Self::U = both!(_mm512_xor_si512; bytes, [sign, sign]);
        self.store(self.from_bits(bytes), bytemuck::cast_mut(row));
    }
    #[inline(always)]
    fn no_sum(self) -> Self::Sum {
        [self.splat_u(0); 2]
    }
    #[inline(always)]
    fn dot4(self, a: Self::U, row: &[u32; LANES], quad: usize, c: Self::Sum) -> Self::Sum {
        let at = 4 * quad % LANES;
        let (low, high) = (self.splat_u(row[at]), self.splat_u(row[at + 1]));
        [both!(_mm512_dpbusd_epi32; c[0], a, low), both!(_mm512_dpbusd_epi32; c[1], a, high)]
    }
    #[inline(always)]
    fn total(self, c: Self::Sum) -> Self::U {
        self.add_u(c[0], self.shl::<8>(c[1]))
    }
    #[inline(always)]
    fn to_f(self, a: Self::U) -> Self::F {
        both!(_mm512_cvtepi32_ps; a)
    }
    #[inline(always)]
    fn byte(self, a: Self::U, j: usize) -> Self::F {
        // One shuffle does shift and mask, and leaves the shifter's port to the products.
        let at = (j as u32 & 3) | 0x8080_8000;
        let index =
            regs!(_mm512_set4_epi32((at + 0x0c) as i32, (at + 0x08) as i32, (at + 0x04) as i32, at as i32));
        self.to_f(both!(_mm512_shuffle_epi8; a, [index, index]))
    }
    #[inline(always)]
    fn nibble(self, a: Self::U, j: usize) -> Self::F {
        // The low 4 bits look up a table of the 16 numbers; the other bits are ignored.
        let a = self.shr_nibbles(a, j);
        let table = regs!(_mm512_cvtepi32_ps(self.lane_id()[0]));
        both!(_mm512_permutexvar_ps; a, [table, table])
    }
    #[inline(always)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        both!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>; a, b)
    }
    #[inline(always)]
    fn ge_i(self, a: Self::U, b: Self::U) -> Self::M {
        both!(_mm512_cmpge_epi32_mask; a, b)
    }
    #[inline(always)]
    fn and_m(self, a: Self::M, b: Self::M) -> Self::M {
        [a[0] & b[0], a[1] & b[1]]
    }
    #[inline(always)]
    fn or_m(self, a: Self::M, b: Self::M) -> Self::M {
        [a[0] | b[0], a[1] | b[1]]
    }
    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm512_mask_blend_ps; m, b, a)
    }
    #[inline(always)]
    fn ballot(self, m: Self::M) -> u32 {
        u32::from(m[0]) | u32::from(m[1]) << 16
    }
    #[inline(always)]
    fn mask(self, bits: u32) -> Self::M {
        [bits as u16, (bits >> 16) as u16]
    }
    #[inline(always)]
    fn shfl_xor(self, a: Self::F, mask: u32) -> Self::F {
        let a = if mask & 16 == 0 { a } else { [a[1], a[0]] };
        let index = regs!([_mm512_xor_si512(self.lane_id()[0], _mm512_set1_epi32((mask & 15) as i32)); 2]);
        both!(_mm512_permutexvar_ps; index, a)
    }
    parked_in_memory!();
    #[inline(always)]
    fn spread_row(self, row: &[f32; LANES], first: usize, width: usize) -> Self::F {
        match width {
            32 => self.splat(row[first]),
            16 => regs!([_mm512_set1_ps(row[first]), _mm512_set1_ps(row[first + 1])]),
            _ => {
                let at = regs!(_mm512_set1_epi32(first as i32));
                let index = self.lane_id();
                let index = if width == 8 { self.shr::<3>(index) } else { self.shr::<2>(index) };
                let index: Self::U = both!(_mm512_add_epi32; index, [at, at]);
                let x = self.load_f(row);
                both!(_mm512_permutex2var_ps; [x[0], x[0]], index, [x[1], x[1]])
            }
        }
    }
    #[inline(always)]
    fn call<K: Routine<Self>>(self, routine: K) -> K::Out {
        // SAFETY: `self` exists only where `Avx512::new` detected every feature that `call` enables.
        unsafe { call(self, routine) }
    }
    #[inline(always)]
    fn prefetch(self, row: &[u32; LANES]) {
        // Into the second-level cache: its misses are tracked separately, and hundreds of lines ahead would crowd the first. On
        // Zen 4 reads are then 1.6 to 1.9 times as fast as with T0 or without a hint.
        let p: *const i8 = row.as_ptr().cast();
        // SAFETY: a prefetch needs SSE alone, is a hint on any address, and changes nothing; byte 64 is within the
        // 128 of `row`.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(p);
            _mm_prefetch::<_MM_HINT_T1>(p.add(64));
        }
    }
    // Lane 0 of the butterfly depends, at distance d, only on lanes below d, each of them op(lane i, lane i + d).
    #[inline(always)]
    fn reduce_max(self, a: Self::F) -> f32 {
        regs!({
            let x = _mm512_max_ps(a[0], a[1]);
            max8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)))
        })
    }
    #[inline(always)]
    fn reduce_sum(self, a: Self::F) -> f32 {
        regs!({
            let x = _mm512_add_ps(a[0], a[1]);
            sum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)))
        })
    }
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
fn call<K: Routine<Avx512>>(w: Avx512, routine: K) -> K::Out {
    routine.run(w)
}
