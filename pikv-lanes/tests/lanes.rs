//! Every operation of all lanes of this machine against the portable lanes, by bits.

use pikv_core::warp::{Kernel, LANES, Routine, Warp};
use pikv_lanes::{Lanes, LanesError};
use proptest::{array::uniform32, prelude::*};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Words = [u32; LANES];

/// Results of an operation: its name, and its words.
type Results = Vec<(String, Vec<u32>)>;

/// Collects results over `w`.
struct Log<W> {
    w: W,
    out: Results,
}

impl<W: Warp> Log<W> {
    fn words(&mut self, op: impl Into<String>, words: &[u32]) {
        self.out.push((op.into(), words.to_vec()));
    }
    /// Lanes compared bit by bit.
    fn exact(&mut self, op: impl Into<String>, x: W::F) {
        let mut row = [f32::NAN; LANES];
        self.w.store(x, &mut row);
        self.words(op, &row.map(f32::to_bits));
    }
    fn u(&mut self, op: impl Into<String>, x: W::U) {
        self.exact(op, self.w.from_bits(x));
    }
    /// Lanes whose NaNs are all the same.
    fn f(&mut self, op: impl Into<String>, x: W::F) {
        let mut row = [f32::NAN; LANES];
        self.w.store(x, &mut row);
        self.words(op, &row.map(one_nan));
    }
    fn m(&mut self, op: impl Into<String>, m: W::M) {
        self.words(op, &[self.w.ballot(m)]);
    }
}

/// An integer in the range of `store_quads`, from the low half of a word.
fn integer(word: u32) -> f32 {
    f32::from((word as i16).min(32639))
}

fn one_nan(x: f32) -> u32 {
    if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
}

macro_rules! shifts {
    ($log:ident, $x:ident: $($n:literal)*) => {$(
        $log.u(concat!("shl ", $n), $log.w.shl::<$n>($x));
        $log.u(concat!("shr ", $n), $log.w.shr::<$n>($x));
        $log.u(concat!("sra ", $n), $log.w.sra::<$n>($x));
    )*};
}

#[derive(Clone, Copy)]
struct EveryOp<'a> {
    a: &'a Words,
    b: &'a Words,
    c: &'a Words,
    bits: [u32; 2],
    table: &'a [f32],
}

impl Kernel for EveryOp<'_> {
    type Out = Results;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> Results {
        let mut log = Log { w, out: Vec::new() };
        let (ua, ub) = (w.load(self.a), w.load(self.b));
        let (a, b) = (w.from_bits(ua), w.from_bits(ub));
        let row = self.c.map(f32::from_bits);
        let c = w.load_f(&row);
        w.prefetch(self.a);

        log.u("load", ua);
        log.exact("load_f", c);
        log.exact("splat", w.splat(row[0]));
        log.u("splat_u", w.splat_u(self.a[0]));
        log.u("lane_id", w.lane_id());
        log.u("bits", w.bits(c));

        log.f("add", w.add(a, b));
        log.f("sub", w.sub(a, b));
        log.f("mul", w.mul(a, b));
        log.f("div", w.div(a, b));
        log.f("fma", w.fma(a, b, c));
        log.f("fma of a product that cancels", w.fma(a, b, w.sub(w.splat(0.0), w.mul(a, b))));
        log.f("mul then add", w.add(w.mul(a, b), c));
        log.f("max", w.max(a, b));
        log.f("max of itself", w.max(c, c));

        log.u("and", w.and(ua, ub));
        log.u("or", w.or(ua, ub));
        log.u("add_u", w.add_u(ua, ub));
        log.u("sub_u", w.sub_u(ua, ub));
        log.exact("to_f", w.to_f(ua));
        shifts!(log, ua: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);

        let (p, q) = (w.mask(self.bits[0]), w.mask(self.bits[1]));
        log.m("mask", p);
        log.m("lt", w.lt(a, b));
        log.m("lt of itself", w.lt(a, a));
        log.m("ge_i", w.ge_i(ua, ub));
        log.m("ge_i of itself", w.ge_i(ua, ua));
        log.m("and_m", w.and_m(p, q));
        log.m("or_m", w.or_m(p, q));
        log.m("and_m of lt and ge_i", w.and_m(w.lt(a, b), w.ge_i(ua, ub)));
        log.exact("select by mask", w.select(p, a, b));
        log.exact("select by lt", w.select(w.lt(a, b), a, b));
        log.exact("select by ge_i", w.select(w.ge_i(ua, ub), a, b));

        for d in 0..LANES as u32 {
            log.exact(format!("shfl_xor {d}"), w.shfl_xor(a, d));
        }
        log.exact("shfl_xor constant 1", w.shfl_xor(a, 1));
        log.exact("shfl_xor constant 6", w.shfl_xor(a, 6));
        log.exact("shfl_xor constant 8", w.shfl_xor(a, 8));
        log.exact("shfl_xor constant 16", w.shfl_xor(a, 16));
        log.exact("shfl_xor constant 29", w.shfl_xor(a, 29));

        let s = w.park(a);
        log.exact("unpark", w.unpark(&s));
        for i in 0..LANES {
            log.exact(format!("bcast {i}"), w.bcast(&s, i));
            log.words(format!("lane {i}"), &[w.lane(a, i).to_bits()]);
        }
        log.words("reduce_max", &[one_nan(w.reduce_max(a))]);
        log.words("reduce_sum", &[one_nan(w.reduce_sum(a))]);

        for (width, last) in [(4, 24), (8, 28), (16, 30), (32, 31)] {
            for first in 0..=last {
                log.exact(format!("spread {first} {width}"), w.spread(&s, first, width));
            }
        }
        let mut quads = [0; LANES];
        let integers = w.load_f(&self.b.map(integer));
        w.store_quads(integers, w.splat(0.627), &mut quads);
        log.u("dot4 of rounded", w.total(w.dot4(ua, &quads, 3, w.no_sum())));
        w.store_quads(integers, w.splat(0.5), &mut quads);
        log.u("dot4 of halves", w.total(w.dot4(ua, &quads, 5, w.no_sum())));
        w.store_quads(integers, w.splat(1.0), &mut quads);
        let (mut all, mut twice) = (w.no_sum(), w.no_sum());
        log.u("no_sum", w.total(all));
        for quad in 0..8 {
            log.u(format!("dot4 {quad}"), w.total(w.dot4(ua, &quads, quad, w.no_sum())));
            all = w.dot4(ua, &quads, quad, all);
            twice = w.dot4(ub, &quads, quad, w.dot4(ua, &quads, quad, twice));
        }
        log.u("dot4 of all", w.total(all));
        log.u("dot4 of all, twice", w.total(twice));
        for j in 0..4 {
            log.exact(format!("byte {j}"), w.byte(ua, j));
        }
        for j in 0..8 {
            log.exact(format!("nibble {j}"), w.nibble(ua, j));
        }
        log.exact("call", w.call(Twice(a)));

        let index = self.b.map(|i| i % self.table.len() as u32);
        log.exact("gather", w.gather(self.table, w.load(&index)));
        log.out
    }
}

/// For `call`.
struct Twice<F>(F);

impl<W: Warp> Routine<W> for Twice<W::F> {
    type Out = W::F;
    #[inline(always)]
    fn run(self, w: W) -> W::F {
        w.select(w.mask(0x0f0f_3355), self.0, w.shfl_xor(self.0, 5))
    }
}

/// The portable lanes' own operations on parts of words, against plain arithmetic.
#[test]
fn parts_of_words_are_what_their_names_say() {
    struct Parts;
    impl Kernel for Parts {
        type Out = ();
        #[inline(always)]
        fn run<W: Warp>(self, w: W) {
            let words: Words = std::array::from_fn(|i| 0x9e37_79b9u32.wrapping_mul(i as u32 + 1));
            let x = w.load(&words);
            let mut row = [0.0; LANES];
            for j in 0..8u32 {
                w.store(w.nibble(x, j as usize), &mut row);
                assert!(row.iter().zip(words).all(|(x, word)| *x == (word >> (4 * j) & 15) as f32));
            }
            for j in 0..4u32 {
                w.store(w.byte(x, j as usize), &mut row);
                assert!(row.iter().zip(words).all(|(x, word)| *x == (word >> (8 * j) & 255) as f32));
            }
            // The extremes of the integers of `store_quads`, and of a byte.
            let other: [f32; LANES] = std::array::from_fn(|i| match i {
                0 | 5 => 32639.0,
                1 | 6 => -32768.0,
                2 => 127.0,
                3 => 128.0,
                4 => -129.0,
                7 => -128.0,
                _ => integer(words[i].rotate_left(7)),
            });
            let mut quads = [0; LANES];
            w.store_quads(w.load_f(&other), w.splat(1.0), &mut quads);
            let full = w.splat_u(u32::MAX);
            for (word, lanes) in
                [(words, x), ([u32::MAX; LANES], full), ([0x0102_0304; LANES], w.splat_u(0x0102_0304))]
            {
                let mut sum = w.no_sum();
                for quad in 0..8 {
                    sum = w.dot4(lanes, &quads, quad, sum);
                    w.store(w.from_bits(w.total(sum)), &mut row);
                    for i in 0..LANES {
                        let product = |t: usize| i64::from(word[i] >> (t % 4 * 8) & 255) * other[t] as i64;
                        assert_eq!(
                            row[i].to_bits() as i32,
                            (0..4 * quad + 4).map(product).sum::<i64>() as i32
                        );
                    }
                }
            }
            let s = w.park(w.from_bits(x));
            w.store(w.spread(&s, 3, 8), &mut row);
            assert!(row.iter().enumerate().all(|(i, x)| x.to_bits() == words[3 + i / 8]));
        }
    }
    Lanes::available().for_each(|lanes| lanes.run(Parts));
}

/// The default butterflies, spelled out.
struct Butterflies<'a>(&'a Words);

impl Kernel for Butterflies<'_> {
    type Out = [u32; 2];
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> [u32; 2] {
        let (mut m, mut s) = (w.from_bits(w.load(self.0)), w.from_bits(w.load(self.0)));
        for d in [16, 8, 4, 2, 1] {
            m = w.max(m, w.shfl_xor(m, d));
            s = w.add(s, w.shfl_xor(s, d));
        }
        assert_eq!(one_nan(w.lane(m, 0)), one_nan(w.reduce_max(w.from_bits(w.load(self.0)))));
        assert_eq!(one_nan(w.lane(s, 0)), one_nan(w.reduce_sum(w.from_bits(w.load(self.0)))));
        [one_nan(w.lane(m, 0)), one_nan(w.lane(s, 0))]
    }
}

struct LoadPart<'a>(&'a [u32]);

impl Kernel for LoadPart<'_> {
    type Out = Words;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> Words {
        let mut row = [f32::NAN; LANES];
        w.store(w.from_bits(w.load_part(self.0)), &mut row);
        row.map(f32::to_bits)
    }
}

struct Gather<'a>(&'a [f32], Words);

impl Kernel for Gather<'_> {
    type Out = Words;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> Words {
        let mut row = [f32::NAN; LANES];
        w.store(w.gather(self.0, w.load(&self.1)), &mut row);
        row.map(f32::to_bits)
    }
}

/// Bits of f32 at which implementations may differ.
const EDGES: [u32; 20] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007f_ffff,
    0x807f_ffff,
    0x0080_0000,
    0x8080_0000,
    0x3f80_0000,
    0xbf80_0000,
    0x3f80_0001,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xffc0_1234,
    0x7f80_0001,
    0x7fff_ffff,
    0xffff_ffff,
];

/// Bits of an f32: any, or one of [`EDGES`].
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        2 => any::<u32>(),
        2 => prop::sample::select(&EDGES[..]),
        3 => (-100.0f32..100.0).prop_map(f32::to_bits),
        1 => (0u32..0x0100_0000, any::<bool>()).prop_map(|(m, s)| m | u32::from(s) << 31),
    ]
}

/// Lanes of any values, or lanes that are all finite and of similar size, so that sums are meaningful.
fn words() -> impl Strategy<Value = Words> {
    prop_oneof![uniform32(word()), uniform32((-100.0f32..100.0).prop_map(f32::to_bits))]
}

/// Asserts that every operation gives the bits of the portable lanes.
fn same_on_all_lanes(k: EveryOp<'_>) {
    let want = Lanes::Portable.run(k);
    for lanes in Lanes::available() {
        let got = lanes.run(k);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got, want, "on {}", lanes.name());
        }
    }
}

/// Zeros of both signs, subnormals, infinities and NaNs, each with each.
#[test]
fn every_op_gives_the_bits_of_portable_at_all_pairs_of_edges() {
    let pairs: Vec<[u32; 2]> = EDGES.iter().flat_map(|a| EDGES.map(|b| [*a, b])).collect();
    for (pairs, c) in pairs.chunks(LANES).zip(EDGES) {
        let [a, b] = [0, 1].map(|side| std::array::from_fn(|i| pairs[i % pairs.len()][side]));
        let k = EveryOp { a: &a, b: &b, c: &[c; LANES], bits: [a[0], b[1]], table: &[1.0] };
        same_on_all_lanes(k);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_op_gives_the_bits_of_portable(
        a in words(),
        b in words(),
        c in words(),
        bits in any::<[u32; 2]>(),
        table in prop::collection::vec(word().prop_map(f32::from_bits), 1..200),
    ) {
        same_on_all_lanes(EveryOp { a: &a, b: &b, c: &c, bits, table: &table });
    }

    #[test]
    fn reductions_are_the_butterflies(a in words()) {
        let want = Lanes::Portable.run(Butterflies(&a));
        for lanes in Lanes::available() {
            prop_assert_eq!(lanes.run(Butterflies(&a)), want, "on {}", lanes.name());
        }
    }
}

#[test]
fn reduce_max_keeps_the_operand_order_of_nans_and_zeros() {
    for bits in [0x8000_0000u32, 0x7fc0_0000, 0xff80_0000] {
        for i in 0..LANES {
            for j in 0..LANES {
                let mut a = [0u32; LANES];
                a[i] = bits;
                a[j] = 0x3f80_0000;
                let want = Lanes::Portable.run(Butterflies(&a));
                for lanes in Lanes::available() {
                    assert_eq!(
                        lanes.run(Butterflies(&a)),
                        want,
                        "on {}: {bits:#x} at {i}, 1 at {j}",
                        lanes.name()
                    );
                }
            }
        }
    }
}

#[test]
fn load_part_reads_what_is_there() {
    for lanes in Lanes::available() {
        for n in 0..=40 {
            let row: Box<[u32]> = (0..n as u32).map(|i| i.wrapping_mul(0x9e37_79b9) | 1).collect();
            let want: Words = std::array::from_fn(|i| row.get(i).copied().unwrap_or(0));
            assert_eq!(lanes.run(LoadPart(&row)), want, "on {}: {n} words", lanes.name());
        }
    }
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[test]
fn load_part_touches_nothing_past_the_end() {
    use std::ffi::{c_int, c_long, c_void};
    unsafe extern "C" {
        fn mmap(
            at: *mut c_void,
            len: usize,
            prot: c_int,
            flags: c_int,
            fd: c_int,
            off: c_long,
        ) -> *mut c_void;
        fn mprotect(at: *mut c_void, len: usize, prot: c_int) -> c_int;
        fn munmap(at: *mut c_void, len: usize) -> c_int;
    }
    // A multiple of the system's page size, which is up to 64 KiB.
    const PAGE: usize = 1 << 16;
    const READ_WRITE: c_int = 3;
    const PRIVATE_ANONYMOUS: c_int = 0x22;

    // SAFETY: a fresh private mapping of two pages, at an address that the kernel chooses.
    let base = unsafe { mmap(std::ptr::null_mut(), 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0) };
    assert_ne!(base as isize, -1, "mmap");
    // SAFETY: the second page of the mapping above, which nothing refers to.
    assert_eq!(unsafe { mprotect(base.byte_add(PAGE), PAGE, 0) }, 0, "mprotect");
    // SAFETY: the first page is mapped, zeroed, aligned, and only this slice refers to it until it is unmapped.
    let page = unsafe { std::slice::from_raw_parts_mut(base.cast::<u32>(), PAGE / 4) };
    for (i, x) in page.iter_mut().enumerate() {
        *x = i as u32 + 1;
    }
    for lanes in Lanes::available() {
        for n in 0..=40 {
            let row = &page[page.len() - n..];
            let want: Words = std::array::from_fn(|i| row.get(i).copied().unwrap_or(0));
            assert_eq!(lanes.run(LoadPart(row)), want, "on {}: {n} words", lanes.name());
        }
    }
    // SAFETY: the whole mapping from above; `page` is not used after this.
    assert_eq!(unsafe { munmap(base, 2 * PAGE) }, 0, "munmap");
}

#[test]
fn gather_refuses_an_index_outside_the_table() {
    let table = [1.0f32; 70];
    for lanes in Lanes::available() {
        for at in 0..LANES {
            for bad in [70, 71, 0x4000_0000, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
                let mut index: Words = std::array::from_fn(|i| 69 - i as u32);
                assert_eq!(lanes.run(Gather(&table, index)), [1f32.to_bits(); LANES]);
                index[at] = bad;
                let got = catch_unwind(AssertUnwindSafe(|| lanes.run(Gather(&table, index))));
                assert!(got.is_err(), "on {}: {bad} at {at}", lanes.name());
            }
        }
        let got = catch_unwind(AssertUnwindSafe(|| lanes.run(Gather(&[], [0; LANES]))));
        assert!(got.is_err(), "on {}: empty table", lanes.name());
    }
}

#[test]
#[ignore = "maps 8 GiB, of which it touches a few pages"]
fn gather_spans_tables_past_signed_indices() {
    let n = i32::MAX as usize + 100;
    let mut table = vec![0.0f32; n];
    let index: Words = std::array::from_fn(|i| if i % 2 == 0 { (n - 1 - i) as u32 } else { i as u32 });
    for (i, x) in index.iter().enumerate() {
        table[*x as usize] = i as f32 + 1.0;
    }
    for lanes in Lanes::available() {
        let want: Words = std::array::from_fn(|i| (i as f32 + 1.0).to_bits());
        assert_eq!(lanes.run(Gather(&table, index)), want, "on {}", lanes.name());
    }
}

#[test]
fn names_find_their_lanes() {
    assert!(Lanes::available().any(|l| l == Lanes::Portable));
    assert_eq!(Lanes::available().next(), Some(Lanes::detect()));
    for lanes in Lanes::available() {
        assert_eq!(Lanes::by_name(lanes.name()), Ok(lanes));
    }
}

#[test]
fn an_unknown_name_is_refused_with_what_there_is() {
    for asked in ["", "neon9", "AVX2", "portable "] {
        let e = Lanes::by_name(asked).unwrap_err();
        let text = e.to_string();
        assert!(text.contains(&format!("{asked:?}")), "{text}");
        for lanes in Lanes::available() {
            assert!(text.contains(lanes.name()), "{text}");
        }
        assert!(matches!(e, LanesError::Unavailable { asked: a, .. } if a == asked));
    }
}
