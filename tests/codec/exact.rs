//! Every word of a packed page compared with the oracle, on all lanes.
//!
//! Error of an integer code: half a scale. In addition, the step `(x - min) / scale` is rounded twice and the scale's own division twice,
//! each by 2^-24 of at most the group's range, and the decoded value once: together less than one ulp of the range (2^-22 of it is
//! allowed) and one of the value.
//!
//! Error of a code in blocks: a quarter of the value, by its one bit of mantissa or, under a scale that is a power of two, by clamping to
//! the largest code; or a quarter of the scale, below the least normal code. If the scale is an E4M3, in addition its own error as a
//! subnormal, half of 2^-9 times the page's scale, times the largest code.

use crate::mix;
use crate::oracle::{Shape, bits, blocked, fp8, half, integer, scaled, top};
use pikv::codec::{Code, Packed};
use pikv::lanes::Lanes;
use pikv::{Dtype, Layout, Position};
use pikv_core::warp::{Kernel, LANES, Warp};
use pikv_lanes::pack::{Channels, pack, unpack};
use proptest::prelude::*;

const WIDTHS: [usize; 15] = [1, 3, 4, 20, 32, 33, 64, 80, 96, 129, 130, 160, 200, 255, 256];

/// The words of a packed page of the first `fill` tokens of a full one.
fn close(lanes: Lanes, layout: &Layout, packed: &Packed, page: &[u32], fill: u32) -> Vec<u32> {
    let rows = |n: u32| vec![[f32::NAN; LANES]; n as usize];
    let (mut k, mut v) = (rows(layout.k_dim), rows(layout.v_dim));
    unpack(lanes, layout, page, fill, &mut k, &mut v);
    let [k, v] = [&mut k, &mut v].map(|rows| Channels { rows, map: None });
    let mut out = vec![u32::MAX; packed.words() as usize];
    pack(lanes, packed, &page[..fill as usize], k, v, &mut out);
    out
}

const KINDS: u64 = 11;

/// Channel `c` of token `t` of a page of one of several kinds; `group` is shared by its group.
fn sample(kind: u64, code: Code, salt: u64, group: usize, t: usize, c: usize) -> f32 {
    let h = mix(&[salt, t as u64, c as u64]);
    let x = (h >> 40) as f32 / 8_388_608.0 - 1.0;
    let sign = if h & 1 == 0 { 1.0 } else { -1.0 };
    match kind {
        0 => x,
        // Halfway between two codes, under a scale that is a power of two.
        1 if (t + c).is_multiple_of(9) => {
            if integer(code) {
                0.0
            } else {
                -top_of(code) / 16.0
            }
        }
        1 if (t + c) % 9 == 1 => top_of(code) / 16.0,
        1 if integer(code) => ((h >> 8) as f32 % top(code)).floor() / 16.0 + 0.5 / 16.0,
        1 => {
            let b = (h >> 8) as u32;
            let between = |b: u32, value: &dyn Fn(u32) -> f64| (value(b) + value(b + 1)) / 2.0;
            let mid = match code {
                Code::E4m3 => between(b % 0x7e, &|b| fp8(code, b).unwrap()) / 16.0,
                Code::E5m2 => between(b % 0x7b, &|b| fp8(code, b).unwrap()) / 16.0,
                _ if blocked(code) => between(b % 7, &|b| fp8(code, b).unwrap()) / 16.0,
                Code::Bf16 => between(0x3f00 + b % 0x200, &|b| f64::from(f32::from_bits(b << 16))),
                _ => between(b % 0x7bff, &half),
            };
            mid as f32 * sign
        }
        // No range.
        2 => (mix(&[salt, group as u64]) >> 40) as f32 / 1e5 - 80.0,
        3 => 0.0,
        // Huge offset, tiny range.
        4 => 61_000.0 + x * 0.02,
        5 => -61_000.0 + x * 8.0,
        // Subnormal as f16, as f32.
        6 => x * 3e-7,
        7 => f32::from_bits((h >> 32) as u32 & 0xfff) * sign,
        // Up to the limit.
        8 => {
            if h % 5 < 2 {
                65504.0 * sign
            } else {
                x * 65504.0
            }
        }
        9 => x * 2f32.powi((h % 40) as i32 - 28),
        // Past an f16's range where the code can.
        _ if code == Code::F16 || integer(code) => x * 100.0,
        _ if code == Code::Nvfp4 => x * 1.6e38,
        _ => x * 3.3e38,
    }
}

fn top_of(code: Code) -> f32 {
    if scaled(code) || blocked(code) { top(code) } else { 1.0 }
}

/// One page, all lanes; the packed words.
fn check(shape: Shape, kind: u64, salt: u64, fill: usize) -> Result<Vec<u32>, TestCaseError> {
    let Shape { k_dim, v_dim, k: k_code, v: v_code } = shape;
    let layout = Layout::new(k_dim as u32, Dtype::F32).values(v_dim as u32, Dtype::F32);
    let packed = Packed::new(layout.k_dim, layout.v_dim, k_code, v_code);
    prop_assert_eq!(packed.words() as usize, shape.words());
    let rows = |code: Code, salt: u64, dim: usize, key: bool| -> Vec<Vec<f32>> {
        let row =
            |t: usize| (0..dim).map(|c| sample(kind, code, salt, if key { c } else { t }, t, c)).collect();
        (0..fill).map(row).collect()
    };
    let (k, v) = (rows(k_code, salt, k_dim, true), rows(v_code, salt ^ 1, v_dim, false));
    // Far beyond 2^16, and with gaps.
    let positions: Vec<u32> = (0..fill as u32).map(|t| 500_000 + t * 2000 + salt as u32 % 7).collect();
    let mut page = vec![u32::MAX; layout.words() as usize];
    for t in 0..fill {
        layout.write(&mut page, t as u32, Position(positions[t]), &k[t], &v[t]).unwrap();
    }
    let want = shape.pack(&positions, &k, &v);
    let mut first: Option<Vec<u32>> = None;
    for lanes in Lanes::available() {
        let got = close(lanes, &layout, &packed, &page, fill as u32);
        prop_assert_eq!(
            shape.clean(&got),
            shape.clean(&want),
            "{:?} kind {} on {}",
            shape,
            kind,
            lanes.name()
        );
        prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
    }
    let got = first.unwrap();
    let (mut key, mut value) = (vec![0.0; k_dim], vec![0.0; v_dim]);
    for t in 0..32 {
        let from = t.min(fill - 1);
        let at = packed.position(&got, t as u32, positions[fill - 1]);
        prop_assert_eq!(at.0, positions[from]);
        packed.read_key(&got, t as u32, &mut key);
        packed.read_value(&got, t as u32, &mut value);
        for c in 0..k_dim {
            let range = match blocked(k_code) {
                true => shape.k_page(&got),
                false => k.iter().fold(0f64, |m, row| m.max(f64::from(row[c]))),
            };
            loss(k_code, shape.key(&got, t, c), key[c], k[from][c], shape.k_scale(&got, t, c), range)?;
        }
        for c in 0..v_dim {
            let range = match blocked(v_code) {
                true => shape.v_page(&got),
                false => v[from].iter().fold(0f64, |m, x| m.max(f64::from(*x))),
            };
            loss(v_code, shape.value(&got, t, c), value[c], v[from][c], shape.v_scale(&got, t, c), range)?;
        }
    }
    Ok(got)
}

/// Error bound for `x`, decoded to `decoded` exactly and `got` in f32, in a group with values up to `high`, or a page with that scale.
fn loss(
    code: Code,
    decoded: f64,
    got: f32,
    x: f32,
    (scale, min): (f64, f64),
    high: f64,
) -> Result<(), TestCaseError> {
    prop_assert!(got.is_finite());
    prop_assert_eq!(got, decoded as f32, "{} read", code.name());
    let (m, x) = (f64::from(x.abs()), f64::from(x));
    let bound = match code {
        Code::F32 => 0.0,
        Code::F16 => m.max(2f64.powi(-14)) * 2f64.powi(-11),
        Code::Bf16 => m.max(2f64.powi(-126)) * 2f64.powi(-8),
        // A scale that is no normal f32 has lost too many bits for any bound.
        Code::E4m3 | Code::E5m2 if scale < 1.2e-38 => f64::MAX,
        Code::E4m3 => (m * 2f64.powi(-4)).max(scale * 2f64.powi(-10)) * (1.0 + 1e-6),
        Code::E5m2 => (m * 2f64.powi(-3)).max(scale * 2f64.powi(-17)) * (1.0 + 1e-6),
        Code::Mxfp4 => (m / 4.0).max(scale / 4.0),
        Code::Nvfp4 => (m / 4.0).max(scale / 4.0) + 6.0 * 2f64.powi(-10) * high,
        // And of a range that is no normal f32, the division may lose one of its least steps for each code.
        _ => scale / 2.0 + (high - min).max(0.0) * 2f64.powi(-22) + f64::from(top(code)) * 2f64.powi(-149),
    };
    prop_assert!((decoded - x).abs() <= bound, "{}: {x} became {decoded}, bound {bound}", code.name());
    Ok(())
}

#[test]
fn every_word() {
    for (i, k_dim) in WIDTHS.into_iter().enumerate() {
        for (j, k) in Code::ALL.into_iter().enumerate() {
            // Every code of V at every width too.
            let (v_dim, v) = (WIDTHS[(i + j) % WIDTHS.len()], Code::ALL[(j + i) % Code::ALL.len()]);
            for kind in 0..KINDS {
                let fill = if kind % 4 == 0 { 1 + (i * 7 + j) % 32 } else { 32 };
                check(Shape { k_dim, v_dim, k, v }, kind, (i * 7 + j) as u64, fill).unwrap();
                if k_dim != v_dim {
                    check(Shape { k_dim: v_dim, v_dim: k_dim, k: v, v: k }, kind, 99 + j as u64, fill)
                        .unwrap();
                }
            }
        }
    }
}

#[test]
fn partial_pages() {
    for fill in 1..=32 {
        let codes = [
            (Code::Int8, Code::Int4),
            (Code::Int4, Code::E4m3),
            (Code::E5m2, Code::Bf16),
            (Code::Int3, Code::Int6),
            (Code::Int5, Code::Int2),
            (Code::Nvfp4, Code::Mxfp4),
            (Code::Mxfp4, Code::Nvfp4),
        ];
        for (k, v) in codes {
            check(Shape { k_dim: 20, v_dim: 33, k, v }, fill % KINDS, fill, fill as usize).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(pikv_test::cases(32, 64))]
    #[test]
    fn any_page(k_dim in 1usize..=256, v_dim in 1usize..=256, k in 0..Code::ALL.len(), v in 0..Code::ALL.len(), kind in 0..KINDS,
        salt: u32, fill in 1usize..=32) {
        check(Shape { k_dim, v_dim, k: Code::ALL[k], v: Code::ALL[v] }, kind, u64::from(salt), fill)?;
    }
}

struct Parts(Code, u32);

impl Kernel for Parts {
    type Out = Vec<f32>;
    /// The 4 (or 8) parts of a word.
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> Vec<f32> {
        let word = w.splat_u(self.1);
        let mut out = vec![];
        for part in 0..32 / bits(self.0) {
            out.push(w.lane(self.0.part(w, word, part), 7));
        }
        out
    }
}

#[test]
fn all_codes_decode() {
    for code in [Code::E4m3, Code::E5m2] {
        assert_eq!(
            (0..256).filter(|b| fp8(code, *b).is_none()).count(),
            if code == Code::E4m3 { 2 } else { 8 }
        );
        for b in 0..256u32 {
            let Some(want) = fp8(code, b) else { continue };
            let want = (want as f32).to_bits();
            assert_eq!(code.decode(b).to_bits(), want, "{} {b:#x}", code.name());
            for lanes in Lanes::available() {
                let got = lanes.run(Parts(code, b * 0x0101_0101));
                assert!(got.iter().all(|x| x.to_bits() == want), "{} {b:#x} {got:?}", code.name());
            }
        }
    }
    for code in [Code::Mxfp4, Code::Nvfp4] {
        for b in 0..16u32 {
            let want = (fp8(code, b).unwrap() as f32).to_bits();
            assert_eq!(code.decode(b).to_bits(), want, "{} {b:#x}", code.name());
            for lanes in Lanes::available() {
                let got = lanes.run(Parts(code, b * 0x1111_1111));
                assert!(got.iter().all(|x| x.to_bits() == want), "{} {b:#x} {got:?}", code.name());
            }
        }
    }
    for lanes in Lanes::available() {
        let each = lanes.run(Parts(Code::Mxfp4, 0xf876_5321));
        assert_eq!(each, [0.5, 1.0, 1.5, 3.0, 4.0, 6.0, -0.0, -6.0]);
        assert_eq!(lanes.run(Parts(Code::Int8, 0xff01_80fe)), [254., 128., 1., 255.]);
        let int4 = lanes.run(Parts(Code::Int4, 0xf021_8e97));
        assert_eq!(int4, [7., 9., 14., 8., 1., 2., 0., 15.]);
        let int2 = lanes.run(Parts(Code::Int2, 0xe4e4_1b1b));
        assert_eq!(int2, [3., 3., 0., 0., 2., 2., 1., 1., 1., 1., 2., 2., 0., 0., 3., 3.]);
    }
}

/// Under scale 1 each code that is a number becomes itself.
#[test]
fn all_codes_encode_to_themselves() {
    for code in [Code::E4m3, Code::E5m2, Code::Mxfp4, Code::Nvfp4] {
        let last = u32::MAX >> (32 - bits(code));
        let numbers: Vec<(u32, f64)> = (0..=last).filter_map(|b| Some((b, fp8(code, b)?))).collect();
        let pages: Vec<Vec<(u32, f64)>> = numbers.chunks(31).map(<[_]>::to_vec).collect();
        let (k_dim, v_dim) = (pages.len() as u32, 32);
        let layout = Layout::new(k_dim, Dtype::F32).values(v_dim, Dtype::F32);
        let shape = Shape { k_dim: pages.len(), v_dim: 32, k: code, v: code };
        let packed = Packed::new(k_dim, v_dim, code, code);
        // Key channel c has the numbers of page c over the tokens; so has the value of token c over its channels.
        let of = |c: usize, i: usize| pages[c % pages.len()].get(i).map_or(top(code), |x| x.1 as f32);
        let mut page = vec![u32::MAX; layout.words() as usize];
        for t in 0..32 {
            let key: Vec<f32> = (0..pages.len()).map(|c| of(c, t)).collect();
            let value: Vec<f32> = (0..32).map(|c| of(t, c)).collect();
            layout.write(&mut page, t as u32, Position(t as u32), &key, &value).unwrap();
        }
        for lanes in Lanes::available() {
            let got = close(lanes, &layout, &packed, &page, 32);
            for (c, page) in pages.iter().enumerate() {
                assert_eq!((shape.k_scale(&got, 0, c), shape.v_scale(&got, c, 0)), ((1.0, 0.0), (1.0, 0.0)));
                for (i, (b, _)) in page.iter().enumerate() {
                    for (word, shift) in [shape.k_at(i, c), shape.v_at(c, i)] {
                        assert_eq!(got[word] >> shift & last, *b, "{} on {}", code.name(), lanes.name());
                    }
                }
            }
        }
    }
}
