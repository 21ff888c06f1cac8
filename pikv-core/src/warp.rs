//! The lane trait: 32 lanes in lock-step, on a CPU or a device.

use core::borrow::Borrow;

/// Lanes of a warp, and tokens of a page.
pub const LANES: usize = 32;

/// Pages of a block, which attention reads together.
pub const BLOCK: usize = 8;

/// `a << by`, `by` below 32.
#[inline(always)]
pub(crate) fn shifted_left<W: Warp>(w: W, mut a: W::U, by: u32) -> W::U {
    for _ in 0..by {
        a = w.shl::<1>(a);
    }
    a
}

/// `a >> by`, `by` below 32: shifts by constants, if `by` is known at compile time.
#[inline(always)]
pub(crate) fn shifted_right<W: Warp>(w: W, a: W::U, by: u32) -> W::U {
    let a = w.shr_nibbles(a, by as usize / 4);
    match by % 4 {
        0 => a,
        1 => w.shr::<1>(a),
        2 => w.shr::<2>(a),
        _ => w.shr::<3>(a),
    }
}

/// 32 lanes that execute together.
///
/// A value of the type proves that the lanes can run here: the vector forms are built only after the
/// instruction set was detected. Control flow is uniform over a warp; differences between lanes are masks.
///
/// All arithmetic is IEEE 754 binary32, round to nearest even, subnormals kept. [`Warp::fma`] is fused;
/// [`Warp::mul`] and [`Warp::add`] are never contracted. Every implementation returns the same bits for the same
/// operands, except for the payload and the sign of a NaN.
///
/// ```
/// use pikv_core::{portable::Portable, warp::Warp};
/// let w = Portable;
/// let x = w.mul(w.splat(3.0), w.splat(0.5));
/// assert_eq!(w.reduce_sum(x), 48.0);
/// ```
pub trait Warp: Copy {
    /// 32 lanes of f32.
    type F: Copy;
    /// 32 lanes of u32, the *words* that pages are made of.
    type U: Copy;
    /// 32 lanes of bool.
    type M: Copy;
    /// A parked [`Warp::F`] from which any lane can be broadcast: memory on a CPU, a register on a device.
    type Slot: Copy;
    /// Storage for tokens seen and values of a block's pages.
    type Shelf<const R: usize>: Shelf<Self, R>;
    /// 32 lanes of sums of [`Warp::dot4`], in the form to which these lanes add fastest.
    type Sum: Copy;

    /// Name of these lanes in tests and reports.
    const NAME: &'static str;
    /// Query rows whose scores fit the registers together. It affects speed, never the bits of a result.
    const ROWS: usize;
    /// Whether [`Warp::prefetch`] does anything; if not, callers need not work out what to fetch.
    const FETCHES: bool = false;
    /// Whether full pages are read in bursts: many words are loaded before the first is used. For a device, whose threads wait at the
    /// first use of a word; a CPU finds later loads by itself.
    const BURSTS: bool = false;

    /// The same value in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// The same word in every lane.
    fn splat_u(self, x: u32) -> Self::U;
    /// Lane `i` holds `i`.
    fn lane_id(self) -> Self::U;

    /// Lane `i` reads `row[i]`.
    fn load(self, row: &[u32; LANES]) -> Self::U;
    /// Lane `i` reads `row[i]` if it exists, else 0. Nothing past the end of `row` is read.
    fn load_part(self, row: &[u32]) -> Self::U;
    /// `N` rows of `width` words, `stride` words apart in `words`: lane `i` reads word `i` of each if it exists, else 0.
    ///
    /// # Panics
    /// If `words` ends before the last row does (a trap on a device).
    #[inline(always)]
    fn load_rows<const N: usize>(self, words: &[u32], stride: usize, width: usize) -> [Self::U; N] {
        let mut out = [self.splat_u(0); N];
        for (row, out) in out.iter_mut().enumerate() {
            *out = self.load_part(&words[row * stride..row * stride + width]);
        }
        out
    }
    /// Lane `i` reads `row[i]`.
    fn load_f(self, row: &[f32; LANES]) -> Self::F;
    /// Lane `i` reads `table[index[i]]`.
    ///
    /// # Panics
    /// If an index lies outside `table` (a trap on a device).
    fn gather(self, table: &[f32], index: Self::U) -> Self::F;
    /// Lane `i` writes `row[i]`.
    fn store(self, x: Self::F, row: &mut [f32; LANES]);

    /// Lane `i` reads `table[index[i]]` into the low half of its word. For tensors in device memory; slow on a CPU.
    ///
    /// # Panics
    /// If an index lies outside `table` (a trap on a device).
    #[inline(always)]
    fn gather_half(self, table: &[u16], index: Self::U) -> Self::U {
        let mut at = [0.0; LANES];
        self.store(self.from_bits(index), &mut at);
        self.load(&at.map(|at| u32::from(table[at.to_bits() as usize])))
    }

    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;

    /// The bits of `a`.
    fn bits(self, a: Self::F) -> Self::U;
    /// The value with bits `a`.
    #[allow(clippy::wrong_self_convention)] // The value is the lanes' capability, not what is converted.
    fn from_bits(self, a: Self::U) -> Self::F;
    /// `a & b`
    fn and(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a | b`
    fn or(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a + b`, wrapping.
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a - b`, wrapping.
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a << N`
    fn shl<const N: u32>(self, a: Self::U) -> Self::U;
    /// `a >> N`, zeros shifted in.
    fn shr<const N: u32>(self, a: Self::U) -> Self::U;
    /// `a >> N`, the sign bit shifted in.
    fn sra<const N: u32>(self, a: Self::U) -> Self::U;
    /// Stores to `row`, for [`Warp::dot4`], the integers nearest to `a * b`, half to even: products must lie from -32,768 to 32,639.
    /// The words of `row` have a format of these lanes' own.
    fn store_quads(self, a: Self::F, b: Self::F, row: &mut [u32; LANES]);
    /// Sums of 0.
    fn no_sum(self) -> Self::Sum;
    /// Adds to each lane its word's four bytes (0 to 255) times integers `4 quad..4 quad + 4` of the 32 that [`Warp::store_quads`] put
    /// in `row`, the low byte times the first; `quad` is below 8. Exact, wrapping.
    fn dot4(self, a: Self::U, row: &[u32; LANES], quad: usize, c: Self::Sum) -> Self::Sum;
    /// The sums as words, wrapping.
    fn total(self, c: Self::Sum) -> Self::U;
    /// The signed integer `a` as f32, rounded to nearest even.
    fn to_f(self, a: Self::U) -> Self::F;

    /// Byte `j` of each word, as a number; `j` is below 4.
    #[inline(always)]
    fn byte(self, a: Self::U, j: usize) -> Self::F {
        self.to_f(self.and(self.shr_nibbles(a, 2 * j), self.splat_u(0xff)))
    }
    /// Bits `4 j..4 j + 4` of each word, as a number; `j` is below 8.
    #[inline(always)]
    fn nibble(self, a: Self::U, j: usize) -> Self::F {
        self.to_f(self.and(self.shr_nibbles(a, j), self.splat_u(0xf)))
    }
    /// `a >> 4 n`, `n` below 8: shifts by constants, if `n` is known at compile time.
    #[inline(always)]
    fn shr_nibbles(self, a: Self::U, n: usize) -> Self::U {
        match n {
            0 => a,
            1 => self.shr::<4>(a),
            2 => self.shr::<8>(a),
            3 => self.shr::<12>(a),
            4 => self.shr::<16>(a),
            5 => self.shr::<20>(a),
            6 => self.shr::<24>(a),
            _ => self.shr::<28>(a),
        }
    }

    /// `a < b`; false with a NaN.
    fn lt(self, a: Self::F, b: Self::F) -> Self::M;
    /// `a >= b` as signed integers.
    fn ge_i(self, a: Self::U, b: Self::U) -> Self::M;
    /// Lanes set in both.
    fn and_m(self, a: Self::M, b: Self::M) -> Self::M;
    /// Lanes set in either.
    fn or_m(self, a: Self::M, b: Self::M) -> Self::M;
    /// `if m { a } else { b }`, lane by lane.
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;
    /// Bit `i` is lane `i` of `m`; the same in all lanes.
    fn ballot(self, m: Self::M) -> u32;
    /// Lane `i` set where bit `i` is.
    fn mask(self, bits: u32) -> Self::M;

    /// Lane `i` gets lane `i ^ mask` of `a`; `mask` below 32.
    fn shfl_xor(self, a: Self::F, mask: u32) -> Self::F;
    /// Lane `i` of `a`; the same in all lanes.
    fn lane(self, a: Self::F, i: usize) -> f32;

    /// Row `r` of `rows`; `r` is the same in all lanes. On a device it is a chain of comparisons, because registers have no index.
    ///
    /// # Panics
    /// If there is no such row; a device returns row 0.
    #[inline(always)]
    fn pick<const R: usize>(self, rows: &[Self::F; R], r: usize) -> Self::F {
        rows[r]
    }

    /// Sets bit `i` of rows of 32 bits, or clears it; `i` is the same in all lanes.
    ///
    /// # Panics
    /// If there is no such bit; a device leaves all bits unchanged.
    #[inline(always)]
    fn put_bit<const R: usize>(self, bits: &mut [u32; R], i: usize, on: bool) {
        let bit = 1 << (i % LANES);
        if on {
            bits[i / LANES] |= bit;
        } else {
            bits[i / LANES] &= !bit;
        }
    }

    /// Lane `i` writes `row[i]` if it exists.
    #[inline(always)]
    fn store_part(self, x: Self::F, row: &mut [f32]) {
        let mut all = [0.0; LANES];
        self.store(x, &mut all);
        let n = row.len().min(LANES);
        row[..n].copy_from_slice(&all[..n]);
    }

    /// Parks `a`.
    fn park(self, a: Self::F) -> Self::Slot;
    /// The value that was parked.
    fn unpark(self, s: &Self::Slot) -> Self::F;
    /// Lane `i` of the parked value, in every lane.
    fn bcast(self, s: &Self::Slot, i: usize) -> Self::F;
    /// Lane `i` gets lane `first + i / width` of the parked value; `width` is 4, 8, 16 or 32, and `first + 31 / width` is
    /// below 32.
    fn spread(self, s: &Self::Slot, first: usize, width: usize) -> Self::F;
    /// [`Warp::spread`] of `row`.
    fn spread_row(self, row: &[f32; LANES], first: usize, width: usize) -> Self::F;

    /// Lane `i` writes `out[start + i * step]`, if it exists.
    #[inline(always)]
    fn scatter(self, x: Self::F, out: &mut [f32], start: usize, step: usize) {
        let mut row = [0.0; LANES];
        self.store(x, &mut row);
        for (i, x) in row.iter().enumerate() {
            if let Some(out) = out.get_mut(start + i * step) {
                *out = *x;
            }
        }
    }

    /// [`Warp::scatter`] of the low half of each word; slow on a CPU.
    #[inline(always)]
    fn scatter_half(self, x: Self::U, out: &mut [u16], start: usize, step: usize) {
        let mut row = [0.0; LANES];
        self.store(self.from_bits(x), &mut row);
        for (i, x) in row.iter().enumerate() {
            if let Some(out) = out.get_mut(start + i * step) {
                *out = x.to_bits() as u16;
            }
        }
    }

    /// Waits for all lanes: each then sees what the others wrote before. On a CPU lanes are always in step.
    #[inline(always)]
    fn sync(self) {}

    /// Hints that `row` will be read soon.
    #[inline(always)]
    fn prefetch(self, row: &[u32; LANES]) {
        let _ = row;
    }

    /// Runs `routine` as a function of its own, with these lanes' instruction set. For large bodies and bodies with many
    /// callers, which would make one function too large for the compiler. A device inlines it.
    #[inline(always)]
    fn call<K: Routine<Self>>(self, routine: K) -> K::Out {
        routine.run(self)
    }

    /// Largest lane, by a butterfly of [`Warp::max`] over distances 16, 8, 4, 2, 1.
    #[inline(always)]
    fn reduce_max(self, a: Self::F) -> f32 {
        let a = self.max(a, self.shfl_xor(a, 16));
        let a = self.max(a, self.shfl_xor(a, 8));
        let a = self.max(a, self.shfl_xor(a, 4));
        let a = self.max(a, self.shfl_xor(a, 2));
        self.lane(self.max(a, self.shfl_xor(a, 1)), 0)
    }

    /// Sum of the lanes, by a butterfly of [`Warp::add`] over distances 16, 8, 4, 2, 1.
    #[inline(always)]
    fn reduce_sum(self, a: Self::F) -> f32 {
        let a = self.add(a, self.shfl_xor(a, 16));
        let a = self.add(a, self.shfl_xor(a, 8));
        let a = self.add(a, self.shfl_xor(a, 4));
        let a = self.add(a, self.shfl_xor(a, 2));
        self.lane(self.add(a, self.shfl_xor(a, 1)), 0)
    }
}

/// Storage for each page of a block and `R` query rows: the tokens that they see, and a value for each row and lane.
pub trait Shelf<W: Warp, const R: usize> {
    /// An empty shelf; a kernel has one at a time.
    fn new(w: W) -> Self;
    /// Stores the tokens of page `i` that the rows see.
    fn see(&mut self, i: usize, seen: [u32; R]);
    /// Tokens of page `i` that the rows see, as stored.
    fn seen(&self, i: usize) -> [u32; R];
    /// Stores row `r`'s values of page `i`.
    fn put(&mut self, w: W, i: usize, r: usize, x: W::F);
    /// Row `r`'s values of page `i`, as stored.
    fn get(&self, w: W, i: usize, r: usize) -> W::F;
    /// All rows' values of page `i`, as stored.
    fn rows(&self, w: W, i: usize) -> impl Borrow<[W::Slot; R]>;
}

/// The shelf of a CPU.
#[derive(Clone, Copy, Debug)]
pub struct ArrayShelf<S, const R: usize> {
    seen: [[u32; R]; BLOCK],
    slots: [[S; R]; BLOCK],
}

impl<W: Warp, const R: usize> Shelf<W, R> for ArrayShelf<W::Slot, R> {
    #[inline(always)]
    fn new(w: W) -> Self {
        ArrayShelf { seen: [[0; R]; BLOCK], slots: [[w.park(w.splat(0.0)); R]; BLOCK] }
    }
    #[inline(always)]
    fn see(&mut self, i: usize, seen: [u32; R]) {
        self.seen[i] = seen;
    }
    #[inline(always)]
    fn seen(&self, i: usize) -> [u32; R] {
        self.seen[i]
    }
    #[inline(always)]
    fn put(&mut self, w: W, i: usize, r: usize, x: W::F) {
        self.slots[i][r] = w.park(x);
    }
    #[inline(always)]
    fn get(&self, w: W, i: usize, r: usize) -> W::F {
        w.unpark(&self.slots[i][r])
    }
    #[inline(always)]
    fn rows(&self, _: W, i: usize) -> impl Borrow<[W::Slot; R]> {
        &self.slots[i]
    }
}

/// Whether the registers of lanes `W` hold `N` rows of lanes at once, by [`Warp::ROWS`].
///
/// A branch on this constant alone (`if Holds::<W, 8>::YES`, with no other condition) is decided before code is generated: the
/// other side is not compiled.
pub struct Holds<W, const N: usize>(core::marker::PhantomData<W>);

impl<W: Warp, const N: usize> Holds<W, N> {
    /// `N <= W::ROWS`
    pub const YES: bool = N <= W::ROWS;
}

/// 1.5 * 2^23: a number below 2^22 added to it is rounded to the nearest integer, half to even, in the low bits.
pub const ROUND: f32 = 12_582_912.0;

/// A routine over any lanes; a runtime picks the lanes once and calls [`Kernel::run`].
///
/// `run` must be `#[inline(always)]`, so that it is compiled with the instruction set of its caller.
pub trait Kernel {
    /// Result of the routine.
    type Out;
    /// Runs the routine over `w`.
    fn run<W: Warp>(self, w: W) -> Self::Out;
}

/// A routine over given lanes, for [`Warp::call`].
///
/// `run` must be `#[inline(always)]`, like that of a [`Kernel`].
pub trait Routine<W: Warp> {
    /// Result of the routine.
    type Out;
    /// Runs the routine over `w`.
    fn run(self, w: W) -> Self::Out;
}
