//! Lanes as plain arrays: they run everywhere, and are the reference for the other lanes.

use crate::warp::{ArrayShelf, LANES, ROUND, Routine, Warp};
use core::array::from_fn;

/// 32 lanes as `[f32; 32]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Portable;

/// `a * b + c` rounded once. Both implementations give the same bits.
#[inline(always)]
pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(feature = "std")]
    return a.mul_add(b, c);
    #[cfg(not(feature = "std"))]
    return libm::fmaf(a, b, c);
}

/// `a * b + c` of each lane, rounded once.
fn fma_lanes(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: `fma_x86` needs the feature `fma`, which the line above found on this processor.
        return unsafe { fma_x86(a, b, c) };
    }
    from_fn(|i| fma(a[i], b[i], c[i]))
}

/// [`fma_lanes`] with the processor's instruction. Without it each lane is a call to the C library, which gives the same bits.
#[cfg(all(feature = "std", target_arch = "x86_64"))]
#[target_feature(enable = "fma")]
fn fma_x86(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = a[i].mul_add(b[i], c[i]);
    }
    out
}

// Operations are functions of their own: inlined, the 32 lanes of each would be unrolled into every kernel, and take most of the
// kernels' build time.
impl Warp for Portable {
    type F = [f32; LANES];
    type U = [u32; LANES];
    type M = u32;
    type Slot = [f32; LANES];
    type Shelf<const R: usize> = ArrayShelf<Self::Slot, R>;
    type Sum = [u32; LANES];

    const NAME: &'static str = "portable";
    const ROWS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        [x; LANES]
    }
    #[inline(always)]
    fn lane_id(self) -> Self::U {
        from_fn(|i| i as u32)
    }
    #[inline(always)]
    fn load(self, row: &[u32; LANES]) -> Self::U {
        *row
    }
    #[inline(never)]
    fn load_part(self, row: &[u32]) -> Self::U {
        from_fn(|i| row.get(i).copied().unwrap_or(0))
    }
    #[inline(always)]
    fn load_f(self, row: &[f32; LANES]) -> Self::F {
        *row
    }
    #[inline(never)]
    fn gather(self, table: &[f32], index: Self::U) -> Self::F {
        from_fn(|i| table[index[i] as usize])
    }
    #[inline(always)]
    fn store(self, x: Self::F, row: &mut [f32; LANES]) {
        *row = x;
    }
    #[inline(never)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(never)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(never)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(never)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(never)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        fma_lanes(&a, &b, &c)
    }
    #[inline(never)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        bytemuck::cast(a)
    }
    #[inline(always)]
    fn from_bits(self, a: Self::U) -> Self::F {
        bytemuck::cast(a)
    }
    #[inline(never)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        from_fn(|i| a[i] & b[i])
    }
    #[inline(never)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        from_fn(|i| a[i] | b[i])
    }
    #[inline(never)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(never)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        from_fn(|i| a[i].wrapping_sub(b[i]))
    }
    #[inline(never)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        a.map(|x| x << N)
    }
    #[inline(never)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        a.map(|x| x >> N)
    }
    #[inline(never)]
    fn sra<const N: u32>(self, a: Self::U) -> Self::U {
        a.map(|x| (x as i32 >> N) as u32)
    }
    #[inline(never)]
    fn store_quads(self, a: Self::F, b: Self::F, row: &mut [u32; LANES]) {
        *row = self.bits(self.fma(a, b, [ROUND; LANES]));
    }
    #[inline(always)]
    fn no_sum(self) -> Self::Sum {
        [0; LANES]
    }
    #[inline(never)]
    fn dot4(self, a: Self::U, row: &[u32; LANES], quad: usize, c: Self::Sum) -> Self::Sum {
        let b: [i32; 4] = from_fn(|j| i32::from(row[4 * quad + j] as i16));
        from_fn(|i| {
            let product = |j: usize| ((a[i] >> (8 * j) & 0xff) as i32 * b[j]) as u32;
            (0..4).fold(c[i], |sum, j| sum.wrapping_add(product(j)))
        })
    }
    #[inline(always)]
    fn total(self, c: Self::Sum) -> Self::U {
        c
    }
    #[inline(never)]
    fn to_f(self, a: Self::U) -> Self::F {
        a.map(|x| x as i32 as f32)
    }
    #[inline(never)]
    fn lt(self, a: Self::F, b: Self::F) -> Self::M {
        (0..LANES).fold(0, |m, i| m | (u32::from(a[i] < b[i]) << i))
    }
    #[inline(never)]
    fn ge_i(self, a: Self::U, b: Self::U) -> Self::M {
        (0..LANES).fold(0, |m, i| m | (u32::from(a[i] as i32 >= b[i] as i32) << i))
    }
    #[inline(always)]
    fn and_m(self, a: Self::M, b: Self::M) -> Self::M {
        a & b
    }
    #[inline(always)]
    fn or_m(self, a: Self::M, b: Self::M) -> Self::M {
        a | b
    }
    #[inline(never)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if m >> i & 1 == 1 { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn ballot(self, m: Self::M) -> u32 {
        m
    }
    #[inline(always)]
    fn mask(self, bits: u32) -> Self::M {
        bits
    }
    #[inline(never)]
    fn shfl_xor(self, a: Self::F, mask: u32) -> Self::F {
        from_fn(|i| a[(i ^ mask as usize) % LANES])
    }
    #[inline(always)]
    fn lane(self, a: Self::F, i: usize) -> f32 {
        a[i]
    }
    #[inline(always)]
    fn park(self, a: Self::F) -> Self::Slot {
        a
    }
    #[inline(always)]
    fn unpark(self, s: &Self::Slot) -> Self::F {
        *s
    }
    #[inline(always)]
    fn bcast(self, s: &Self::Slot, i: usize) -> Self::F {
        [s[i]; LANES]
    }
    #[inline(never)]
    fn spread(self, s: &Self::Slot, first: usize, width: usize) -> Self::F {
        self.spread_row(s, first, width)
    }
    #[inline(never)]
    fn spread_row(self, row: &[f32; LANES], first: usize, width: usize) -> Self::F {
        from_fn(|i| row[first + i / width])
    }
    #[inline(never)]
    fn call<K: Routine<Self>>(self, routine: K) -> K::Out {
        routine.run(self)
    }
}
