//! Attention over packed pages, compared with the oracle in f64.

use crate::mix;
use crate::model::Model;
use crate::setup::{Setup, codec, feed_all, options, shape};
use pikv::codec::{Code, Codec, Coding, Map, Packed};
use pikv::lanes::Lanes;
use pikv::shape::Pairs;
use pikv::{Attend, Dtype, LayerShape, Rope};
use pikv_core::attend::Form;
use pikv_core::codec::read::{Folded, PackedPages, PackedRef, Scratch};
use pikv_core::warp::{Kernel, LANES, Warp};
use pikv_lanes::pack::{Channels, pack};
use pikv_test::scaled;

/// Feeds `total` tokens in steps of several lengths and checks every `some`-th row.
fn run(setup: &Setup, options: &Attend, total: u32, some: usize) {
    let steps = [1, 9, 2, setup.ring, 1, 13].map(|n| n.min(setup.ring));
    run_steps(setup, options, total, some, &steps);
}

fn run_steps(setup: &Setup, options: &Attend, total: u32, some: usize, steps: &[u32]) {
    let cache = setup.cache();
    let (mut sequence, mut model) = (cache.sequence(), Model::new(setup, 0));
    for step in 0.. {
        let n = steps[step % steps.len()].min(total - model.len());
        if n == 0 {
            break;
        }
        let ids: Vec<u64> = (0..n).map(|i| u64::from(model.len() + i)).collect();
        let got =
            feed_all(setup, &cache, &mut [(&mut sequence, ids.clone())], options, step % 3 == 0).remove(0);
        let old = model.len();
        model.push(setup, &ids);
        model.check(setup, n, options, &got.out, &got.lse, some);
        if !got.mass.is_empty() {
            mass(setup, &model, options, old, &got);
        }
    }
    assert!(model.runs.iter().flatten().flatten().any(|page| page.by.is_some()), "nothing was packed");
}

/// The mass of the rows from `old` on against the oracle's weights.
fn mass(setup: &Setup, model: &Model, options: &Attend, old: u32, got: &crate::setup::Got) {
    let placed = model.placed();
    let n = model.len() as usize;
    let mut want = vec![vec![0.0; n]; setup.layer.kv_heads as usize];
    let mut off = 0.0;
    for p in old..model.len() {
        for row in model.row(setup, p, options) {
            off += (2.0 * row.lse_off).exp_m1();
            row.weights.iter().for_each(|(head, at, weight)| want[*head][*at as usize] += weight);
        }
    }
    let mut sum = vec![vec![0.0; n]; setup.layer.kv_heads as usize];
    for (i, page) in got.mass.iter().enumerate() {
        let twice =
            got.mass[..i].iter().any(|other| (other.kv_head, other.page) == (page.kv_head, page.page));
        assert!(!twice, "{:?} is listed twice", page.page);
        let own = placed.get(&(page.kv_head, page.page.place, page.page.ordinal));
        for (lane, weight) in page.tokens.iter().enumerate() {
            let at = match own {
                Some(page) => page.positions.get(lane).copied(),
                None => Some(page.page.ordinal * 32 + lane as u32).filter(|at| *at < model.len()),
            };
            match at {
                Some(at) => sum[page.kv_head][at as usize] += f64::from(*weight),
                None => assert_eq!(*weight, 0.0, "lane {lane} of {:?} has no token", page.page),
            }
        }
    }
    for (got, want) in sum.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() <= off * want + 1e-6, "mass {got}, want {want} in {setup:?}");
    }
}

#[test]
fn every_code() {
    for (i, k) in Code::ALL.into_iter().enumerate() {
        for (j, v) in Code::ALL.into_iter().enumerate().filter(|(j, _)| (i + j) % 3 != 1 || i == *j) {
            let dtype = Dtype::ALL[(i + j) % 3];
            let lanes: Vec<Lanes> = Lanes::available().collect();
            let setup = Setup {
                lanes: lanes[(i + j) % lanes.len()],
                ..Setup::new(shape(1, 4, 64, 64, dtype), 20, codec(k, v))
            };
            run(&setup, &options(&setup), 130, 5);
        }
    }
}

/// A basis that is not square, with a bias.
fn dense(wide: u32, narrow: u32, bias: bool) -> Map {
    let noise = |salt: u64, i: u32| (mix(&[salt, u64::from(i)]) >> 40) as f32 / 8_388_608.0 - 1.0;
    let n = wide * narrow;
    let scale = (wide as f32).powf(-0.5);
    let encode = (0..n).map(|i| noise(1, i) * scale).collect();
    let decode = (0..n).map(|i| noise(2, i) * scale).collect();
    Map::new(wide, narrow, encode, decode, bias.then(|| (0..wide).map(|i| noise(3, i)).collect())).unwrap()
}

/// Every second pair of a rotation over the whole width.
fn pairs(wide: u32, of: Pairs) -> Map {
    let half = wide / 2;
    let channels: Vec<u32> = (0..half)
        .step_by(2)
        .flat_map(|i| if of == Pairs::Halves { [i, i + half] } else { [2 * i, 2 * i + 1] })
        .collect();
    Map::identity_subset(wide, &channels).unwrap()
}

fn mapped(kind: u64, code: Code, wide: u32, of: Pairs) -> Coding {
    let coding = Coding::new(code);
    match kind {
        _ if wide < 3 => coding,
        0 => coding.map(Map::hadamard(wide).unwrap()),
        1 => coding.map(pairs(wide, of)),
        2 => coding.map(dense(wide, wide.div_ceil(3), true)),
        3 => coding.map(dense(wide, wide.div_ceil(2), false)),
        4 | 5 => Coding::block_pca(code, (1 + wide / 7).min(31)).unwrap(),
        6 => Coding::means(Code::ALL[code.index() as usize % 3], 1 + wide % 3).unwrap(),
        _ => coding,
    }
}

/// A setup with every knob turned somewhere.
fn any(i: u64) -> (Setup, Attend) {
    let pick = |salt: u64, n: usize| (mix(&[i, salt]) % n as u64) as usize;
    let (k_dim, v_dim) =
        [(32, 32), (64, 80), (80, 64), (128, 128), (256, 96), (96, 256), (33, 20), (3, 1), (160, 129)]
            [pick(0, 9)];
    let group = [1, 3, 4, 8][pick(1, 4)];
    let (k, v) = (Code::ALL[pick(2, Code::ALL.len())], Code::ALL[pick(3, Code::ALL.len())]);
    let of = [Pairs::Halves, Pairs::Neighbours][pick(4, 2)];
    let whole = k_dim - k_dim % 2;
    let rotary_dim = [whole, (whole / 4).max(1) * 2][pick(5, 2)];
    let rope = [None, Some(Rope::new(1000.0, rotary_dim).pairs(of))][pick(6, 2)];
    let coding =
        Codec::new(mapped(pick(7, 9) as u64, k, k_dim, of), mapped(pick(8, 11) as u64, v, v_dim, of));
    let window = [None, None, Some(5), Some(40), Some(70)][pick(11, 5)];
    let layer = LayerShape::new(2, 2 * group, k_dim, Dtype::ALL[pick(9, 3)])
        .values(v_dim, Dtype::ALL[pick(10, 3)])
        .window(window)
        .rope(rope);
    let lanes: Vec<Lanes> = Lanes::available().collect();
    // The second head is packed another way, or not at all.
    let other = [None, Some(codec(v, k))][pick(12, 2)].clone();
    let setup = Setup {
        experts: [1, 4][pick(13, 2)],
        sinks: [0, 3][pick(14, 2)],
        rollback: [0, 40][pick(15, 2)],
        codecs: vec![Some(coding.clone()), other],
        lanes: lanes[pick(16, lanes.len())],
        ..Setup::new(layer, [7, 20, 33][pick(17, 3)], coding)
    };
    let second =
        Codec::new(mapped(pick(20, 9) as u64, v, k_dim, of), mapped(pick(21, 11) as u64, k, v_dim, of));
    let bytes = |codec: &Codec| codec.packed(k_dim, v_dim).bytes();
    let least = setup.codecs.iter().flatten().map(bytes).min();
    let age = (least > Some(bytes(&second)) && pick(19, 3) > 0).then_some((1 + pick(22, 70) as u32, second));
    let setup = Setup { age, ..setup };
    let options = options(&setup);
    (setup, [options, options.softcap(3.0), options.split(1)][pick(18, 3)])
}

#[test]
fn every_knob() {
    for i in 0..scaled(40, 120) {
        let (mut setup, options) = any(i);
        // A window within the ring files no tokens.
        if setup.layer.window.is_some_and(|w| w <= setup.ring) {
            setup.layer.window = Some(setup.ring + 17);
        }
        run(&setup, &options, 140, 9);
    }
}

#[test]
fn steps_longer_than_the_ring() {
    for i in 100..115 {
        let (mut setup, options) = any(i);
        setup.layer.window = None;
        run_steps(&setup, &options, 260, 7, &[3 * setup.ring + 5, 1, 64, setup.ring]);
    }
}

#[test]
fn wide_heads() {
    for (k_dim, v_dim, k, v) in [
        (256, 256, Code::Int8, Code::Int4),
        (255, 256, Code::Int4, Code::Int8),
        (256, 255, Code::E4m3, Code::E5m2),
        (255, 256, Code::Int3, Code::Int2),
        (256, 255, Code::Int6, Code::Int5),
        (256, 255, Code::Nvfp4, Code::Mxfp4),
        (255, 256, Code::Mxfp4, Code::Nvfp4),
    ] {
        for group in [1, 3, 8] {
            let setup = Setup {
                experts: 4,
                ..Setup::new(shape(1, group, k_dim, v_dim, Dtype::F32), 16, codec(k, v))
            };
            run(&setup, &options(&setup), 150, 11);
        }
    }
}

/// The scores of one page of integer keys.
struct Scores<'a>(&'a Packed, &'a [u32], &'a [[f32; LANES]]);

impl Kernel for Scores<'_> {
    type Out = [f32; LANES];
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> [f32; LANES] {
        let Scores(packed, words, rows) = self;
        let pages = [PackedRef { words, live: u32::MAX, last: 31, by: 31 }];
        let folded = Folded::<1> { rows, start: [0.0], whole: None };
        let mut scratch = Scratch::default();
        let mut form = PackedPages::new(packed, &pages, &[], folded, &mut scratch, &mut []);
        let mut out = [0.0; LANES];
        let [scores] = form.scores(w, 0);
        w.store(scores, &mut out);
        out
    }
}

/// Packs 32 tokens; channels that are not given are 0.
fn pack_page(lanes: Lanes, packed: &Packed, k: &[[f32; LANES]], v: &[[f32; LANES]], words: &mut [u32]) {
    let positions: Vec<u32> = (0..32).collect();
    let (mut k, mut v) = (k.to_vec(), v.to_vec());
    k.resize(packed.k_dim as usize, [0.0; LANES]);
    v.resize(packed.v_dim as usize, [0.0; LANES]);
    let [k, v] = [&mut k, &mut v].map(|rows| Channels { rows, map: None });
    pack(lanes, packed, &positions, k, v, words);
}

/// Integer codes, and the largest of each.
const INTEGERS: [(Code, f32); 6] = [
    (Code::Int8, 255.0),
    (Code::Int6, 63.0),
    (Code::Int5, 31.0),
    (Code::Int4, 15.0),
    (Code::Int3, 7.0),
    (Code::Int2, 3.0),
];

/// The error of rounding a query to 16 bits is below the stated bound, `top / 65278 sum_c max |q scale|`. It is near the bound in the
/// worst case: every channel half a step off, in one direction, under the largest code.
#[test]
fn the_bound_of_integer_scores_is_honest() {
    for (code, top) in INTEGERS {
        for k_dim in [2u32, 64, 200, 256] {
            for kind in 0..4u64 {
                let packed = Packed::new(k_dim, 1, code, Code::F32);
                let n = k_dim as usize;
                let x =
                    |c: usize, t: usize| (mix(&[kind, c as u64, t as u64]) >> 40) as f32 / 8_388_608.0 - 1.0;
                // Kind 0: scale 1, minimum 0, all tokens but the first at the top.
                let k: Vec<[f32; LANES]> = (0..n)
                    .map(|c| {
                        std::array::from_fn(
                            |t| if kind == 0 { if t == 0 { 0.0 } else { top } } else { x(c, t) },
                        )
                    })
                    .collect();
                let mut words = vec![0; packed.words() as usize];
                let mut rows = vec![[0.0; LANES]; packed.query_cols() as usize];
                for c in 0..n {
                    let worst = if c == 0 { 32639.0 } else { (c % 100 * 2) as f32 + 0.5 };
                    rows[c / 32][c % 32] = if kind == 0 { worst } else { x(c, 99) };
                }
                let shape = crate::oracle::Shape { k_dim: n, v_dim: 1, k: code, v: Code::F32 };
                for lanes in Lanes::available() {
                    pack_page(lanes, &packed, &k, &[], &mut words);
                    let got = lanes.run(Scores(&packed, &words, &rows));
                    let q = |c: usize| f64::from(rows[c / 32][c % 32]);
                    let scale = |c: usize| shape.k_scale(&words, 0, c).0;
                    let largest = (0..n).fold(0f64, |m, c| m.max((q(c) * scale(c)).abs()));
                    let bound = largest * n as f64 * f64::from(top) / 65278.0;
                    let most: f64 = (0..n)
                        .map(|c| {
                            (q(c) * (shape.k_scale(&words, 0, c).1.abs() + f64::from(top) * scale(c))).abs()
                        })
                        .sum();
                    let worst = (0..32).fold(0f64, |m, t| {
                        let want: f64 = (0..n).map(|c| q(c) * shape.key(&words, t, c)).sum();
                        m.max((f64::from(got[t]) - want).abs())
                    });
                    assert!(
                        worst <= bound + most * 4.0 / 16_777_216.0,
                        "{} {k_dim} {kind}: off {worst}, bound {bound}",
                        code.name()
                    );
                    if kind == 0 && k_dim > 2 {
                        assert!(worst >= 0.9 * bound, "{} {k_dim}: off {worst}, bound {bound}", code.name());
                    }
                }
            }
        }
    }
}

/// The values of one page of integers under weights.
struct Weighed<'a>(&'a Packed, &'a [u32], &'a [f32; LANES]);

impl Kernel for Weighed<'_> {
    type Out = Vec<f32>;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> Vec<f32> {
        let Weighed(packed, words, p) = self;
        let pages = [PackedRef { words, live: u32::MAX, last: 31, by: 31 }];
        let folded = Folded::<1> { rows: &[], start: [0.0], whole: None };
        let mut scratch = Scratch::default();
        let mut form = PackedPages::new(packed, &pages, &[], folded, &mut scratch, &mut []);
        let mut acc = vec![[0.0; LANES]; packed.acc_rows() as usize];
        form.weigh(w, 0, &[u32::MAX], &[w.park(w.load_f(p))], &mut acc);
        form.finish(w, &mut acc);
        (0..packed.v_dim)
            .map(|c| {
                let (row, lane) = packed.acc_place(c);
                acc[row as usize][lane as usize]
            })
            .collect()
    }
}

/// The error of rounding weights is below `32 top / 65278 max p max scale` for a page. It is near that bound where 31 weights are half
/// a step above an integer, under the largest code. Weights far below those of other pages lose no more than others.
#[test]
fn the_bound_of_integer_weights_is_honest() {
    for (code, top) in INTEGERS {
        for v_dim in [2u32, 20, 64, 200, 256] {
            for kind in 0..4u64 {
                for least in [1.0, 2f32.powi(-40), 2f32.powi(-99)] {
                    let packed = Packed::new(1, v_dim, Code::F32, code);
                    let n = v_dim as usize;
                    let x = |c: usize, t: usize| {
                        (mix(&[kind, c as u64, t as u64]) >> 40) as f32 / 8_388_608.0 - 1.0
                    };
                    // Kind 0: scale 1, minimum 0, all channels but the first of each group at the top.
                    let v: Vec<[f32; LANES]> = (0..n)
                        .map(|c| {
                            std::array::from_fn(|t| match (kind, c % 32) {
                                (0, 0) => 0.0,
                                (0, _) => top,
                                _ => x(c, t),
                            })
                        })
                        .collect();
                    let p: [f32; LANES] = std::array::from_fn(|t| {
                        least
                            * match kind {
                                0 if t == 7 => 1.0,
                                0 => ((t * 977) as f32 + 0.49) / 32639.0,
                                // Some are not seen.
                                1 if t % 3 == 0 => 0.0,
                                _ => x(99, t).abs(),
                            }
                    });
                    let shape = crate::oracle::Shape { k_dim: 1, v_dim: n, k: Code::F32, v: code };
                    let mut first: Option<Vec<f32>> = None;
                    for lanes in Lanes::available() {
                        let mut words = vec![0; packed.words() as usize];
                        pack_page(lanes, &packed, &[], &v, &mut words);
                        let got = lanes.run(Weighed(&packed, &words, &p));
                        let largest = p.iter().fold(0f64, |m, p| m.max(f64::from(*p)));
                        let mut worst = 0f64;
                        for (c, got) in got.iter().enumerate() {
                            let all = || (0..32).map(|t| (f64::from(p[t]), shape.v_scale(&words, t, c)));
                            let scale = all().fold(0f64, |m, (_, (scale, _))| m.max(scale));
                            let bound = largest * scale * 32.0 * f64::from(top) / 65278.0;
                            let most: f64 =
                                all().map(|(p, (scale, min))| p * (min.abs() + f64::from(top) * scale)).sum();
                            let want: f64 =
                                (0..32).map(|t| f64::from(p[t]) * shape.value(&words, t, c)).sum();
                            let off = (f64::from(*got) - want).abs();
                            assert!(
                                off <= bound + most * 4.0 / 16_777_216.0,
                                "{} {v_dim} {kind}: off {off}, bound {bound}",
                                code.name()
                            );
                            worst = worst.max(if scale > 0.0 { off / bound } else { 0.0 });
                        }
                        assert!(kind > 0 || worst >= 0.9, "{} {v_dim}: {worst} of the bound", code.name());
                        let same = first.get_or_insert_with(|| got.clone());
                        assert!(
                            same.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()),
                            "{}",
                            lanes.name()
                        );
                    }
                }
            }
        }
    }
}
