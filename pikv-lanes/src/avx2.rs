//! 32 lanes as four AVX2 registers.

use crate::gather_checked;
use core::arch::x86_64::*;
use pikv_core::warp::{ArrayShelf, LANES, ROUND, Routine, Warp};

/// 32 lanes as four 256-bit registers; a mask is four registers of all-ones and all-zeros lanes.
///
/// A value proves that the machine has AVX2 and FMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The lanes, if this machine has AVX2 and FMA.
    #[inline]
    pub fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

/// 32 lanes in memory, two registers to a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub struct Slot([f32; LANES]);

/// `$e`, made of intrinsics that touch no memory, in a method of [`Avx2`].
macro_rules! regs {
    ($e:expr) => {
        // SAFETY: the intrinsics of `$e` touch no memory and need only their features, AVX2 and FMA or features that those
        // imply; the machine has them, as `self` exists only where `Avx2::new` detected them.
        unsafe { $e }
    };
}

/// `$op` on each of the four registers.
macro_rules! four {
    ($op:expr; $($x:expr),+) => {
        regs!([$op($($x[0]),+), $op($($x[1]),+), $op($($x[2]),+), $op($($x[3]),+)])
    };
}

/// `$shift` by the constant `$n`; the count register becomes an immediate.
macro_rules! shift {
    ($shift:expr, $n:expr; $a:expr) => {{
        let n = regs!(_mm_cvtsi32_si128($n as i32));
        four!($shift; $a, [n; 4])
    }};
}

impl Warp for Avx2 {
    type F = [__m256; 4];
    type U = [__m256i; 4];
    type M = [__m256; 4];
    type Slot = Slot;
    type Shelf<const R: usize> = ArrayShelf<Self::Slot, R>;
    type Sum = [__m256i; 4];

    const NAME: &'static str = "avx2";
    const ROWS: usize = 2;
    const FETCHES: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        regs!([_mm256_set1_ps(x); 4])
    }
    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        regs!([_mm256_set1_epi32(x as i32); 4])
    }
    #[inline(always)]
    fn lane_id(self) -> Self::U {
        regs!([
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
            _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15),
            _mm256_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23),
            _mm256_setr_epi32(24, 25, 26, 27, 28, 29, 30, 31),
        ])
    }
    #[inline(always)]
    fn load(self, row: &[u32; LANES]) -> Self::U {
        let p: *const __m256i = row.as_ptr().cast();
        // SAFETY: `self` proves AVX; the four unaligned loads of 8 words read the 32 words of `row`.
        unsafe {
            [
                _mm256_loadu_si256(p),
                _mm256_loadu_si256(p.add(1)),
                _mm256_loadu_si256(p.add(2)),
                _mm256_loadu_si256(p.add(3)),
            ]
        }
    }
    #[inline(always)]
    fn load_part(self, row: &[u32]) -> Self::U {
        if let Some(row) = row.first_chunk() {
            return self.load(row);
        }
        let p: *const i32 = row.as_ptr().cast();
        let n = self.splat_u(row.len() as u32);
        let m: Self::U = four!(_mm256_cmpgt_epi32; n, self.lane_id());
        // SAFETY: `self` proves AVX2; lane `i` of `m` is set only if `i < row.len()`, and a masked load neither reads
        // nor faults on a lane that is clear. The later addresses may lie past `row`, hence the wrapping adds, but
        // then their masks are empty.
        unsafe {
            [
                _mm256_maskload_epi32(p, m[0]),
                _mm256_maskload_epi32(p.wrapping_add(8), m[1]),
                _mm256_maskload_epi32(p.wrapping_add(16), m[2]),
                _mm256_maskload_epi32(p.wrapping_add(24), m[3]),
            ]
        }
    }
    #[inline(always)]
    fn load_f(self, row: &[f32; LANES]) -> Self::F {
        let p = row.as_ptr();
        // SAFETY: `self` proves AVX; the four unaligned loads of 8 lanes read the 32 lanes of `row`.
        unsafe {
            [
                _mm256_loadu_ps(p),
                _mm256_loadu_ps(p.add(8)),
                _mm256_loadu_ps(p.add(16)),
                _mm256_loadu_ps(p.add(24)),
            ]
        }
    }
    #[inline(always)]
    fn gather(self, table: &[f32], index: Self::U) -> Self::F {
        if !table.is_empty() && table.len() <= i32::MAX as usize {
            let last = self.splat_u(table.len() as u32 - 1);
            let low: Self::U = four!(_mm256_min_epu32; index, last);
            let inside: Self::U = four!(_mm256_cmpeq_epi32; index, low);
            if self.ballot(self.from_bits(inside)) == u32::MAX {
                let p = table.as_ptr();
                // SAFETY: `self` proves AVX2; every index is below `table.len()`, which is at most `i32::MAX`, so as
                // signed 32-bit offsets in elements of 4 bytes they all fall inside `table`.
                return unsafe {
                    [
                        _mm256_i32gather_ps::<4>(p, index[0]),
                        _mm256_i32gather_ps::<4>(p, index[1]),
                        _mm256_i32gather_ps::<4>(p, index[2]),
                        _mm256_i32gather_ps::<4>(p, index[3]),
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
        // SAFETY: `self` proves AVX; the four unaligned stores of 8 lanes write the 32 lanes of `row`.
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
            _mm256_storeu_ps(p.add(16), x[2]);
            _mm256_storeu_ps(p.add(24), x[3]);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        four!(_mm256_add_ps; a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        four!(_mm256_sub_ps; a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        four!(_mm256_mul_ps; a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        four!(_mm256_div_ps; a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        four!(_mm256_fmadd_ps; a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        four!(_mm256_max_ps; a, b)
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        four!(_mm256_castps_si256; a)
    }
    #[inline(always)]
    fn from_bits(self, a: Self::U) -> Self::F {
        four!(_mm256_castsi256_ps; a)
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        four!(_mm256_and_si256; a, b)
    }
    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        four!(_mm256_or_si256; a, b)
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        four!(_mm256_add_epi32; a, b)
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        four!(_mm256_sub_epi32; a, b)
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        shift!(_mm256_sll_epi32, N; a)
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        shift!(_mm256_srl_epi32, N; a)
    }
    #[inline(always)]
    fn sra<const N: u32>(self, a: Self::U) -> Self::U {
        shift!(_mm256_sra_epi32, N; a)
    }
    #[inline(always)]
    fn store_quads(self, a: Self::F, b: Self::F, row: &mut [u32; LANES]) {
        let a = self.bits(self.fma(a, b, self.splat(ROUND)));
        // The first and third of each four integers in one word, the second and fourth in the next: `dot4` reads them in that order.
        let index = regs!(_mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 1, 8, 9, 4, 5, 12, 13, 0, 1, 8, 9, 4, 5, 12, 13
        )));
        let pairs: Self::U = four!(_mm256_shuffle_epi8; a, [index; 4]);
        self.store(self.from_bits(pairs), bytemuck::cast_mut(row));
    }
    #[inline(always)]
    fn no_sum(self) -> Self::Sum {
        self.splat_u(0)
    }
    #[inline(always)]
    fn dot4(self, a: Self::U, row: &[u32; LANES], quad: usize, c: Self::Sum) -> Self::Sum {
        let at = 4 * quad % LANES;
        let (even, odd) = (self.splat_u(row[at]), self.splat_u(row[at + 1]));
        let even: Self::U = four!(_mm256_madd_epi16; self.and(a, self.splat_u(0x00ff_00ff)), even);
        let high: Self::U = regs!([
            _mm256_srli_epi16::<8>(a[0]),
            _mm256_srli_epi16::<8>(a[1]),
            _mm256_srli_epi16::<8>(a[2]),
            _mm256_srli_epi16::<8>(a[3]),
        ]);
        let odd: Self::U = four!(_mm256_madd_epi16; high, odd);
        self.add_u(self.add_u(c, even), odd)
    }
    #[inline(always)]
    fn total(self, c: Self::Sum) -> Self::U {
        c
    }
    #[inline(always)]
    fn to_f(self, a: Self::U) -> Self::F {
        four!(_mm256_cvtepi32_ps; a)
    }
    #[inline(always)]
    fn byte(self, a: Self::U, j: usize) -> Self::F {
        // One shuffle does shift and mask.
        let at = (j as u32 & 3) | 0x8080_8000;
        let (a0, a1, a2, a3) = (at as i32, (at + 0x04) as i32, (at + 0x08) as i32, (at + 0x0c) as i32);
        let index = regs!(_mm256_setr_epi32(a0, a1, a2, a3, a0, a1, a2, a3));
        self.to_f(four!(_mm256_shuffle_epi8; a, [index; 4]))
    }
    #[inline(always)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        four!(_mm256_cmp_ps::<_CMP_LT_OQ>; a, b)
    }
    #[inline(always)]
    fn ge_i(self, a: Self::U, b: Self::U) -> Self::M {
        let high: Self::U = four!(_mm256_max_epi32; a, b);
        let m: Self::U = four!(_mm256_cmpeq_epi32; a, high);
        self.from_bits(m)
    }
    #[inline(always)]
    fn and_m(self, a: Self::M, b: Self::M) -> Self::M {
        four!(_mm256_and_ps; a, b)
    }
    #[inline(always)]
    fn or_m(self, a: Self::M, b: Self::M) -> Self::M {
        four!(_mm256_or_ps; a, b)
    }
    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        four!(_mm256_blendv_ps; b, a, m)
    }
    #[inline(always)]
    fn ballot(self, m: Self::M) -> u32 {
        let m: [i32; 4] = four!(_mm256_movemask_ps; m);
        (m[0] | m[1] << 8 | m[2] << 16 | m[3] << 24) as u32
    }
    #[inline(always)]
    fn mask(self, bits: u32) -> Self::M {
        let bit: Self::U = four!(_mm256_sllv_epi32; self.splat_u(1), self.lane_id());
        let m: Self::U = four!(_mm256_cmpeq_epi32; self.and(self.splat_u(bits), bit), bit);
        self.from_bits(m)
    }
    #[inline(always)]
    fn shfl_xor(self, a: Self::F, mask: u32) -> Self::F {
        let a = if mask & 16 == 0 { a } else { [a[2], a[3], a[0], a[1]] };
        let a = if mask & 8 == 0 { a } else { [a[1], a[0], a[3], a[2]] };
        let index = regs!([_mm256_xor_si256(self.lane_id()[0], _mm256_set1_epi32((mask & 7) as i32)); 4]);
        four!(_mm256_permutevar8x32_ps; a, index)
    }
    parked_in_memory!();
    #[inline(always)]
    fn spread_row(self, row: &[f32; LANES], first: usize, width: usize) -> Self::F {
        match width {
            32 => self.splat(row[first]),
            16 => regs!({
                let (a, b) = (_mm256_set1_ps(row[first]), _mm256_set1_ps(row[first + 1]));
                [a, a, b, b]
            }),
            8 => regs!([
                _mm256_set1_ps(row[first]),
                _mm256_set1_ps(row[first + 1]),
                _mm256_set1_ps(row[first + 2]),
                _mm256_set1_ps(row[first + 3]),
            ]),
            _ => {
                let s = &row[first..first + 8];
                regs!([
                    _mm256_set_m128(_mm_set1_ps(s[1]), _mm_set1_ps(s[0])),
                    _mm256_set_m128(_mm_set1_ps(s[3]), _mm_set1_ps(s[2])),
                    _mm256_set_m128(_mm_set1_ps(s[5]), _mm_set1_ps(s[4])),
                    _mm256_set_m128(_mm_set1_ps(s[7]), _mm_set1_ps(s[6])),
                ])
            }
        }
    }
    #[inline(always)]
    fn call<K: Routine<Self>>(self, routine: K) -> K::Out {
        // SAFETY: `self` exists only where `Avx2::new` detected every feature that `call` enables.
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
        regs!(max8(_mm256_max_ps(_mm256_max_ps(a[0], a[2]), _mm256_max_ps(a[1], a[3]))))
    }
    #[inline(always)]
    fn reduce_sum(self, a: Self::F) -> f32 {
        regs!(sum8(_mm256_add_ps(_mm256_add_ps(a[0], a[2]), _mm256_add_ps(a[1], a[3]))))
    }
}

/// Lane 0 of the butterfly of `max` over distances 4, 2, 1.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
pub(super) unsafe fn max8(a: __m256) -> f32 {
    // SAFETY: the caller guarantees AVX, which implies SSE3; no memory is touched.
    unsafe {
        let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}

/// Lane 0 of the butterfly of `add` over distances 4, 2, 1.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
pub(super) unsafe fn sum8(a: __m256) -> f32 {
    // SAFETY: the caller guarantees AVX, which implies SSE3; no memory is touched.
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn call<K: Routine<Avx2>>(w: Avx2, routine: K) -> K::Out {
    routine.run(w)
}
