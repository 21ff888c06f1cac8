//! The elementary functions against f64, and the dtypes over all their codes.

use half::{bf16, f16};
use pikv_core::dtype::{Bf16, Dtype, Element, F16, F32};
use pikv_core::math;
use pikv_core::portable::Portable;
use pikv_core::warp::LANES;
use std::ops::Range;

type Lanes = [f32; LANES];

/// Measured over every f32: 2^x 1.0145 ulp, e^x 0.988, ln 0.832, tanh 9.0e-8 absolute.
const EXP2_ULPS: f64 = 1.02;

/// Expected result of a function at an argument.
enum Want {
    Bits(f32),
    Nan,
    /// Within so many ulps (of the result's binade) of the result.
    Ulps(f64),
    /// Within this absolute error of the result.
    Absolute(f64),
}

/// A function, its expected results, and the documented bound on the error.
struct Function {
    name: &'static str,
    apply: fn(Lanes) -> Lanes,
    want: fn(f32) -> Option<Want>,
    bound: f64,
}

const FUNCTIONS: [Function; 5] = [
    Function {
        name: "exp2_nonpos",
        apply: |x| math::exp2_nonpos(Portable, x),
        // Arguments above 0 are not allowed; NaN has a test of its own.
        want: |x| match x {
            _ if x > 0.0 || x.is_nan() => None,
            _ if x < -126.0 => Some(Want::Bits(0.0)),
            _ => Some(Want::Ulps(f64::from(x).exp2())),
        },
        bound: EXP2_ULPS,
    },
    Function {
        name: "exp2",
        apply: |x| math::exp2(Portable, x),
        want: |x| {
            Some(match x {
                _ if x.is_nan() => Want::Nan,
                _ if x < -126.0 => Want::Bits(0.0),
                _ if x >= 128.0 => Want::Bits(f32::INFINITY),
                _ => Want::Ulps(f64::from(x).exp2()),
            })
        },
        bound: EXP2_ULPS,
    },
    Function {
        name: "exp",
        apply: |x| math::exp(Portable, x),
        want: |x| {
            Some(match f64::from(x).exp() {
                _ if x.is_nan() => Want::Nan,
                y if y < f64::from(f32::MIN_POSITIVE) => Want::Bits(0.0),
                // Results of f64 that round to inf in f32.
                y if y as f32 == f32::INFINITY => Want::Bits(f32::INFINITY),
                y => Want::Ulps(y),
            })
        },
        bound: 1.0,
    },
    Function {
        name: "ln",
        apply: |x| math::ln(Portable, x),
        want: |x| {
            Some(match x {
                _ if x.is_nan() || x < 0.0 => Want::Nan,
                0.0 => Want::Bits(f32::NEG_INFINITY),
                f32::INFINITY => Want::Bits(f32::INFINITY),
                1.0 => Want::Bits(0.0),
                _ => Want::Ulps(f64::from(x).ln()),
            })
        },
        bound: 1.0,
    },
    Function {
        name: "tanh",
        apply: |x| math::tanh(Portable, x),
        want: |x| {
            Some(match x {
                _ if x.is_nan() => Want::Nan,
                f32::INFINITY => Want::Bits(1.0),
                f32::NEG_INFINITY => Want::Bits(-1.0),
                _ => Want::Absolute(f64::from(x).tanh()),
            })
        },
        bound: 1.2e-7,
    },
];

fn function(name: &str) -> &'static Function {
    FUNCTIONS.iter().find(|f| f.name == name).unwrap()
}

/// Distance in units of the last place of an f32 in the binade of `want`.
fn ulps(got: f32, want: f64) -> f64 {
    let exponent = ((want.abs().to_bits() >> 52) as i32 - 1023).max(-126);
    (f64::from(got) - want).abs() / f64::from(exponent - 23).exp2()
}

impl Function {
    /// Asserts the documented bound at all of `x`. Returns the largest error and its argument.
    fn check(&self, x: impl Iterator<Item = f32>) -> (f64, f32) {
        let mut worst = (0.0, 0.0);
        let mut row = [1.0; LANES];
        let mut n = 0;
        let mut flush = |row: &Lanes, n: usize| {
            let y = (self.apply)(*row);
            for (x, y) in row.iter().zip(y).take(n) {
                let at = || format!("{}({x:e}, bits {:#010x}) is {y:e}", self.name, x.to_bits());
                let off = match (self.want)(*x) {
                    None => continue,
                    Some(Want::Bits(want)) => {
                        assert!(y.to_bits() == want.to_bits(), "{}, expected {want:e}", at());
                        continue;
                    }
                    Some(Want::Nan) => {
                        assert!(y.is_nan(), "{}, expected NaN", at());
                        continue;
                    }
                    Some(Want::Ulps(want)) => ulps(y, want),
                    Some(Want::Absolute(want)) => (f64::from(y) - want).abs(),
                };
                assert!(y.is_finite() && off <= self.bound, "{}: off by {off}", at());
                if off > worst.0 {
                    worst = (off, *x);
                }
            }
        };
        for x in x {
            row[n] = x;
            n += 1;
            if n == LANES {
                flush(&row, n);
                n = 0;
            }
        }
        flush(&row, n);
        worst
    }

    fn report(&self, what: &str, (off, x): (f64, f32)) {
        println!("{} over {what}: off by {off} at {x:e}", self.name);
    }
}

/// Every `stride`th f32 from `range.start` to `range.end`, which must have the same sign.
fn dense(range: Range<f32>, stride: usize) -> impl Iterator<Item = f32> {
    let (a, b) = (range.start.to_bits(), range.end.to_bits());
    assert_eq!(a >> 31, b >> 31);
    (a.min(b)..=a.max(b)).step_by(stride).map(f32::from_bits)
}

/// `n` evenly spread values of a range.
fn even(range: Range<f64>, n: u32) -> impl Iterator<Item = f32> {
    (0..=n).map(move |i| (range.start + (range.end - range.start) * f64::from(i) / f64::from(n)) as f32)
}

const SPECIAL: [f32; 10] = [
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    -f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
];

/// Each value with some of its neighbours.
fn around(x: f32) -> impl Iterator<Item = f32> {
    let bits = x.to_bits();
    (bits.saturating_sub(200)..=bits.saturating_add(200)).map(f32::from_bits)
}

#[test]
fn functions_keep_their_bounds_at_every_exponent_and_sign() {
    const MANTISSAS: u32 = 2048;
    for f in &FUNCTIONS {
        // Evenly spaced, not all of them even; subnormals, infinities and NaNs among them.
        let x = (0..512u32).flat_map(|top| (0..MANTISSAS).map(move |i| top << 23 | i << 12 | (i * i % 4096)));
        f.report("all exponents", f.check(x.map(f32::from_bits)));
        f.check(SPECIAL.into_iter());
        // The least and the largest of each binade.
        f.check((0..512u32).flat_map(|top| around(f32::from_bits(top << 23))));
    }
}

#[test]
fn functions_keep_their_bounds_over_the_reduced_range() {
    for name in ["exp2_nonpos", "exp2"] {
        let f = function(name);
        f.report("[-1, -1/16]", f.check(dense(-1.0..-0.0625, 7)));
        f.report("[-126, 0]", f.check(even(-126.0..0.0, 1 << 20)));
    }
    let f = function("exp2");
    f.report("[1/16, 1]", f.check(dense(0.0625..1.0, 7)));
    f.report("[0, 128]", f.check(even(0.0..128.0, 1 << 20)));
    let f = function("exp");
    f.report("[-0.36, -1/16]", f.check(dense(-0.36..-0.0625, 7)));
    f.report("[1/16, 0.36]", f.check(dense(0.0625..0.36, 7)));
    f.report("[-88, 89]", f.check(even(-88.0..89.0, 1 << 22)));
    let f = function("ln");
    f.report("[0.7, 1.42]", f.check(dense(0.7..1.42, 3)));
    // Exponent and polynomial cancel most on either side of sqrt(1/2) and sqrt(2), at each exponent.
    for x in [std::f32::consts::FRAC_1_SQRT_2, std::f32::consts::SQRT_2] {
        f.check((-40..40).flat_map(|e| around(x * (e as f32).exp2())));
    }
    let f = function("tanh");
    f.report("[-12, 12]", f.check(even(-12.0..12.0, 1 << 22)));
    f.report("[2^-6, 1]", f.check(dense(0.015625..1.0, 11)));
}

#[test]
fn functions_keep_their_bounds_at_their_edges() {
    for f in &FUNCTIONS {
        for x in [-126.0, -127.0, -128.0, -149.0, 127.0, 128.0, -87.336_54, 88.722_84, -103.97, 0.5, 1.0, 2.0]
        {
            f.check(around(x));
        }
    }
    let at = |f: &str, x: f32| (function(f).apply)([x; LANES])[7];
    // Results are flushed to +0; others are normal.
    for f in ["exp2", "exp2_nonpos"] {
        assert_eq!(at(f, -126.0).to_bits(), f32::MIN_POSITIVE.to_bits());
        assert_eq!(at(f, (-126.0f32).next_down()).to_bits(), 0);
        for e in -126..=0 {
            assert_eq!(at(f, e as f32), (e as f64).exp2() as f32, "{f} of {e}");
        }
    }
    assert!(at("exp", -87.336_54).is_normal());
    assert_eq!(at("exp", (-87.336_54f32).next_down()).to_bits(), 0);
    assert!(at("exp", 88.722_84f32.next_down()).is_normal());
    assert_eq!(at("exp", 88.722_84), f32::INFINITY);
    assert_eq!(at("exp", 0.0), 1.0);
    assert_eq!(at("exp", -0.0), 1.0);
    // Subnormal arguments of ln keep their value.
    assert!(ulps(at("ln", f32::from_bits(1)), f64::from(f32::from_bits(1)).ln()) <= 1.0);
    assert_eq!(at("ln", -f32::from_bits(1)).to_bits() & 0x7fc0_0000, 0x7fc0_0000);
    assert_eq!(at("ln", -0.0), f32::NEG_INFINITY);
}

/// For any payload: a device makes other NaNs than a CPU.
#[test]
fn exp2_nonpos_keeps_every_nan() {
    let f = function("exp2_nonpos");
    for low in (1..0x80_0000u32).step_by(97).chain([1, 0x7f_ffff, 0x40_0000, 0x40_0001]) {
        for sign in [0, 1 << 31] {
            let x = f32::from_bits(sign | 0x7f80_0000 | low);
            let y = (f.apply)([x; LANES])[0];
            assert!(y.is_nan(), "exp2_nonpos(NaN, bits {:#010x}) is {y:e}", x.to_bits());
        }
    }
}

#[test]
fn tanh_is_odd_and_stays_inside() {
    let f = function("tanh");
    for x in even(0.0..30.0, 1 << 18).chain(dense(1e-30..1.0, 10_007)).filter(|x| *x > 0.0) {
        let y = (f.apply)([x, -x].repeat(16).try_into().unwrap());
        assert_eq!(y[0].to_bits(), (-y[1]).to_bits() ^ if y[1] == 0.0 { 1 << 31 } else { 0 }, "at {x:e}");
        assert!((0.0..=1.0).contains(&y[0]), "at {x:e}");
    }
}

#[test]
fn lanes_do_not_mix() {
    for f in &FUNCTIONS {
        let row: Lanes = std::array::from_fn(|i| SPECIAL[i % 10] * 0.5 - i as f32 * 0.37);
        let all = (f.apply)(row);
        for i in 0..LANES {
            let one = (f.apply)([row[i]; LANES])[0];
            assert!(
                all[i].to_bits() == one.to_bits() || all[i].is_nan() && one.is_nan(),
                "{} lane {i}",
                f.name
            );
        }
    }
}

/// Takes minutes: run it when a polynomial changes.
#[test]
#[ignore = "every f32 there is"]
fn functions_keep_their_bounds_everywhere() {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()) as u64;
    for f in &FUNCTIONS {
        let worst = std::thread::scope(|s| {
            let part =
                |i: u64| ((i << 32) / threads..((i + 1) << 32) / threads).map(|x| f32::from_bits(x as u32));
            let all: Vec<_> = (0..threads).map(|i| s.spawn(move || f.check(part(i)))).collect();
            all.into_iter().map(|t| t.join().unwrap()).fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
        });
        f.report("every f32", worst);
    }
}

#[test]
fn ceil_is_the_least_integer_not_below() {
    let exact = |x: f32| {
        let want = f64::from(x).ceil() as f32 + 0.0;
        assert_eq!(math::ceil(x).to_bits(), want.to_bits(), "ceil({x:e})");
    };
    for top in 0..512u32 {
        for i in 0..2048u32 {
            let x = f32::from_bits(top << 23 | i << 12 | (i * i % 4096));
            if x.abs() < 2_147_483_648.0 {
                exact(x);
            }
        }
    }
    for i in -70_000..70_000 {
        let x = i as f32 / 16.0;
        [x, x.next_up(), x.next_down()].into_iter().for_each(exact);
    }
    for x in [0.0, -0.0, -0.5, -0.999_999_94, -f32::MIN_POSITIVE] {
        assert_eq!(math::ceil(x).to_bits(), 0, "ceil({x:e}) is +0");
    }
}

#[test]
fn exp2i_is_exact() {
    for d in -400..=0 {
        let want = if d < -126 { 0.0 } else { f64::from(d).exp2() as f32 };
        assert_eq!(math::exp2i(d as f32).to_bits(), want.to_bits(), "2^{d}");
    }
    for d in [f32::NEG_INFINITY, f32::MIN, -1e30, -2_147_483_648.0, -16_777_216.0] {
        assert_eq!(math::exp2i(d).to_bits(), 0);
    }
    assert_eq!(math::exp2i(-0.0), 1.0);
}

#[test]
fn ln1_is_ln() {
    for top in 0..256u32 {
        for i in 0..64u32 {
            let x = f32::from_bits(top << 23 | i << 17 | i);
            let want = math::ln(Portable, [x; LANES])[31];
            assert!(math::ln1(x).to_bits() == want.to_bits() || x.is_nan() && math::ln1(x).is_nan());
        }
    }
}

// ---- Dtypes ----------------------------------------------------------------------------------------------------

fn half_value(dtype: Dtype, code: u16) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(code).to_f32(),
        _ => bf16::from_bits(code).to_f32(),
    }
}

fn channel<E: Element>(word: u32, j: usize) -> f32 {
    E::channel(Portable, [word; LANES], j)[5]
}

#[test]
fn every_code_is_read_at_its_value() {
    for code in 0..=u16::MAX {
        let c = u32::from(code);
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let want = half_value(dtype, code);
            assert_eq!(dtype.decode(c).is_nan(), want.is_nan());
            if !want.is_finite() {
                continue;
            }
            assert_eq!(dtype.decode(c).to_bits(), want.to_bits());
            // For any content of the other half of the word.
            for other in [0, 0xffff, 0x7c00, 0x8000, 0x7f80, 0x5555, c] {
                for (j, word) in [(0, other << 16 | c), (1, c << 16 | other)] {
                    let got = match dtype {
                        Dtype::F16 => channel::<F16>(word, j),
                        _ => channel::<Bf16>(word, j),
                    };
                    assert_eq!(got.to_bits(), want.to_bits(), "{} {code:#06x}, half {j}", dtype.name());
                }
            }
            assert_eq!(dtype.encode(want), Some(c), "{} {code:#06x}", dtype.name());
        }
    }
    for top in 0..512u32 {
        for low in [0, 1, 0x2a_aaaa, 0x7f_ffff] {
            let word = top << 23 | low;
            assert_eq!(channel::<F32>(word, 0).to_bits(), word);
            assert_eq!(Dtype::F32.decode(word).to_bits(), word);
            let finite = top & 0xff != 0xff;
            assert_eq!(Dtype::F32.encode(f32::from_bits(word)), finite.then_some(word));
        }
    }
}

/// Between each pair of neighbouring codes, the tie is rounded to the even one, its neighbours to the nearer one.
#[test]
fn encode_rounds_to_nearest_even() {
    for (dtype, last) in [(Dtype::F16, 0x7bffu32), (Dtype::Bf16, 0x7f7f)] {
        for sign in [0u32, 0x8000] {
            for low in 0..last {
                let (a, b) = (sign | low, sign | (low + 1));
                let (x, y) = (dtype.decode(a), dtype.decode(b));
                // The tie is exact: one more bit than the codes have, unless they are neighbours among f32's own subnormals.
                let tie = ((f64::from(x) + f64::from(y)) / 2.0) as f32;
                assert_eq!(f64::from(tie) * 2.0, f64::from(x) + f64::from(y));
                let even = if a & 1 == 0 { a } else { b };
                let (nearer_a, nearer_b) = if sign == 0 {
                    (tie.next_down(), tie.next_up())
                } else {
                    (tie.next_up(), tie.next_down())
                };
                let name = dtype.name();
                assert_eq!(dtype.encode(tie), Some(even), "{name}: {tie:e} between {a:#06x} and {b:#06x}");
                assert_eq!(dtype.encode(nearer_a), Some(a), "{name}: {nearer_a:e} above {a:#06x}");
                assert_eq!(dtype.encode(nearer_b), Some(b), "{name}: {nearer_b:e} below {b:#06x}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_not_encoded() {
    for (dtype, last, code) in
        [(Dtype::F16, 65_520.0f32.next_down(), 0x7bff), (Dtype::Bf16, f32::from_bits(0x7f7f_7fff), 0x7f7f)]
    {
        assert_eq!(dtype.encode(last), Some(code));
        assert_eq!(dtype.encode(-last), Some(0x8000 | code));
        for x in [last.next_up(), f32::MAX] {
            assert_eq!(dtype.encode(x), None, "{} of {x:e}", dtype.name());
            assert_eq!(dtype.encode(-x), None);
        }
    }
    for dtype in Dtype::ALL {
        for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)] {
            assert_eq!(dtype.encode(x), None, "{} of {x}", dtype.name());
        }
        assert_eq!(dtype.encode(0.0), Some(0));
        assert_eq!(dtype.encode(-0.0), Some(1 << (dtype.bits() - 1)));
        // Too small values become 0 or the least subnormal, and are never rejected.
        for x in [f32::from_bits(1), 1e-40, 2e-8, 2.980_232_2e-8] {
            assert!(dtype.encode(x).is_some(), "{} of {x:e}", dtype.name());
        }
    }
    assert_eq!(Dtype::F16.encode(2.980_232_2e-8), Some(0)); // 2^-25, half the least subnormal: a tie.
    assert_eq!(Dtype::F16.encode(2.980_232_2e-8f32.next_up()), Some(1));
    assert_eq!(Dtype::F16.encode(-2.980_232_2e-8f32.next_up()), Some(0x8001));
}
