//! Device tensors with 16 bits an element: stored values, early and late errors. Steps with them are compared bit for bit with host
//! tensors of the same values wherever the two back ends are compared (`suite::check`).

use crate::engine::rounded;
use crate::script::{Op, Options, noise};
use crate::standin::Standin;
use crate::suite::{Case, config, decode, same, shape};
use crate::tensors::Loop;
use half::{bf16, f16};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::cuda::{DeviceOutput, DeviceSlice};
use pikv::policy::{Budget, Eviction, H2o, KeyNorm, SnapKv};
use pikv::shape::Pairs;
use pikv::{Attend, AttendOutput, CacheConfig, Dtype, Error, Rope};

const NARROW: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];

fn to_f32(bits: u16, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
}

/// [`same`] in some dtypes of keys, values, queries and outputs.
fn check(name: &str, config: CacheConfig, dtypes: [Dtype; 4], ops: Vec<Op>) {
    let options = Options { dtypes: Some(dtypes), ..Options::default() };
    same(name, &Standin::new(), &Case { config, options, ops });
}

#[test]
fn every_mixture_over_odd_widths() {
    let ops = vec![Op::Feed(vec![(0, 37)]), Op::Feed(vec![(0, 1)])];
    for (i, k) in Dtype::ALL.into_iter().enumerate() {
        for (j, v) in Dtype::ALL.into_iter().enumerate() {
            let (q, out) = (Dtype::ALL[(i + j) % 3], Dtype::ALL[(i + 2 * j) % 3]);
            let layers = vec![shape(2, 3, 33, 7, v, k), shape(1, 1, 1, 81, k, v)];
            check("mixture", config(layers, 8, 0), [k, v, q, out], ops.clone());
        }
    }
}

#[test]
fn rotations_codecs_and_policies() {
    for dtype in NARROW {
        let plain = shape(2, 2, 15, 9, Dtype::Bf16, Dtype::F16);
        let ropes = [(12, Pairs::Halves), (14, Pairs::Neighbours)]
            .map(|(rotary_dim, pairs)| Some(Rope::new(100.0, rotary_dim).pairs(pairs)));
        let layers = ropes.map(|rope| plain.rope(rope)).to_vec();
        let mut ops = vec![Op::Feed(vec![(0, 40)]), Op::Fork(0), Op::Feed(vec![(0, 1), (1, 3)])];
        ops.extend(decode(2));
        check("rotations", config(layers, 16, 8).sinks(2), [dtype; 4], ops.clone());
        // Queries are folded through each form of map.
        let matrix = |seed| noise(&[seed], 15 * 7);
        let maps = [
            None,
            Map::identity_subset(15, &[0, 3, 14, 6]).ok(),
            Map::new(15, 7, matrix(3), matrix(4), Some(noise(&[5], 15))).ok(),
        ];
        for map in maps {
            let k = map.into_iter().fold(Coding::new(Code::Int8), Coding::map);
            let codec = Codec::new(k, Coding::new(Code::F16));
            check("folded", config(vec![plain], 8, 3).compress(codec), [dtype; 4], ops.clone());
        }
        let wide = shape(1, 2, 64, 8, Dtype::Bf16, Dtype::Bf16);
        let codec =
            Codec::new(Coding::new(Code::Int8).map(Map::hadamard(64).unwrap()), Coding::new(Code::Int8));
        check("transformed", config(vec![wide], 8, 3).compress(codec), [dtype; 4], ops.clone());
        // Keys, queries and masses that policies observe are copied from the device.
        let budget = || Budget::Tokens(30);
        let rules = [
            Eviction::new(KeyNorm, budget()),
            Eviction::new(SnapKv::default(), budget()),
            Eviction::new(H2o, budget()),
        ];
        for rule in rules {
            let name = rule.policy.name().to_owned();
            let ops: Vec<Op> = [29, 1, 17, 1, 3].map(|n| Op::Feed(vec![(0, n)])).to_vec();
            check(&name, config(vec![plain], 8, 0).evict(rule.batch(2)), [dtype; 4], ops);
        }
    }
}

#[test]
fn every_element_is_stored_bit_for_bit() {
    let standin = Standin::new();
    for dtype in NARROW {
        // All that are finite, 8 keys and as many values of 256 a step, in 32-bit pages too.
        for stored in [dtype, Dtype::F32] {
            let config = config(vec![shape(8, 8, 256, 256, stored, stored)], 64, 0);
            let mut run = Loop::of(config, &standin.backend(), 1, [dtype; 4]);
            let [k, v, ..] = run.tensors[0];
            let finite: Vec<f32> =
                (0..=u16::MAX).map(|bits| to_f32(bits, dtype)).filter(|x| x.is_finite()).collect();
            for values in finite.chunks(4096) {
                let of = |half: &[f32]| (0..2048).map(|i| half[i % half.len()]).collect::<Vec<f32>>();
                let [keys, values] = [of(values), of(&values[values.len() / 2..])];
                run.engine.write(k, keys.clone());
                run.engine.write(v, values.clone());
                let mut step = run.cache.begin([(&mut run.sequence, 1)]).unwrap();
                step.append_device(0, k, v).unwrap();
                step.check().unwrap();
                step.route(0, &[0]).unwrap();
                step.commit().unwrap();
                let last = run.sequence.next_position().0 - 1;
                for head in 0..8 {
                    let (mut key, mut value) = ([0.0; 256], [0.0; 256]);
                    let page = run.sequence.pages(0, head).unwrap().find(|page| page.last.0 == last).unwrap();
                    let lane = page.tokens - 1;
                    run.sequence.read(0, head, page.id, lane, &mut key, &mut value).unwrap();
                    let same = |got: &[f32], want: &[f32]| {
                        got.iter().zip(&want[256 * head..]).all(|(a, b)| a.to_bits() == b.to_bits())
                    };
                    assert!(same(&key, &keys) && same(&value, &values), "{dtype:?}, {last}, {head}");
                }
            }
        }
    }
}

#[test]
fn values_that_do_not_fit_are_found_later_and_named_as_on_the_host() {
    let standin = Standin::new();
    let layers =
        || vec![shape(2, 2, 7, 5, Dtype::F16, Dtype::F16), shape(2, 1, 3, 4, Dtype::F32, Dtype::F32)];
    for (dtype, layer, tensor, at, value) in [
        (Dtype::Bf16, 0, 0, 17, 1e38),
        (Dtype::Bf16, 0, 0, 3, f32::NAN),
        (Dtype::Bf16, 0, 1, 19, -65_536.0),
        (Dtype::Bf16, 1, 1, 9, f32::NEG_INFINITY),
        (Dtype::Bf16, 1, 2, 2, f32::NAN),
        (Dtype::F16, 0, 0, 0, f32::INFINITY),
        (Dtype::F16, 1, 0, 7, f32::INFINITY),
        (Dtype::F16, 1, 1, 15, f32::NAN),
        (Dtype::F16, 0, 2, 55, f32::NEG_INFINITY),
    ] {
        let mut run = Loop::of(config(layers(), 20, 4), &standin.backend(), 2, [dtype; 4]);
        let mut want = None;
        let mut step = run.cache.begin([(&mut run.sequence, 2)]).unwrap();
        for (l, of) in layers().iter().enumerate() {
            let mut tensors: [Vec<f32>; 3] = [0, 1, 2].map(|kind: usize| {
                let values = noise(&[kind as u64], run.tensors[l][kind].len());
                values.into_iter().map(|x| rounded(x, dtype)).collect()
            });
            if l == layer {
                tensors[tensor][at] = rounded(value, dtype);
                run.engine.write(run.tensors[l][tensor], tensors[tensor].clone());
            }
            let mut out = vec![0.0; 2 * (of.query_heads * of.layout.v_dim) as usize];
            let [k, v, q] = &tensors;
            let done = step.append(l, k, v);
            let done = done.and_then(|()| step.attend(l, q, &Attend::new(0.3), AttendOutput::new(&mut out)));
            want = want.or(done.err());
            if want.is_some() {
                break;
            }
        }
        drop(step);
        let want = want.expect("the host refuses it").to_string();
        let mut step = run.step().unwrap();
        assert_eq!(step.check().unwrap_err().to_string(), want);
    }
}

#[test]
fn outputs_that_the_dtype_does_not_hold() {
    let standin = Standin::new();
    for (dtype, value) in [
        (Dtype::F16, 65_519.996),
        (Dtype::F16, 65_520.0),
        (Dtype::F16, -1e30),
        (Dtype::Bf16, f32::from_bits(0x7f7f_7fff)),
        (Dtype::Bf16, f32::from_bits(0xff7f_8000)),
    ] {
        // A row that sees itself alone gets its own value.
        let config = config(vec![shape(2, 2, 3, 41, Dtype::F32, Dtype::F32)], 8, 0);
        let dtypes = [Dtype::F32, Dtype::F32, Dtype::Bf16, dtype];
        let mut run = Loop::of(config, &standin.backend(), 1, dtypes);
        let [_, v, _, out, _] = run.tensors[0];
        let mut values = noise(&[1], v.len());
        (values[41 + 37], values[41 + 40]) = (value, value);
        run.engine.write(v, values);
        let mut step = run.step().unwrap();
        let told = step.check().err();
        // The step is committed without a check.
        step.commit().unwrap();
        let got = run.engine.read(out);
        let at = 2 * 41 + 37;
        assert_eq!(got[at].to_bits(), rounded(value, dtype).to_bits());
        assert!(got[..at].iter().all(|x| x.abs() <= 1.0));
        match told {
            None => assert!(value.abs() <= dtype.limit(), "{value}"),
            Some(Error::Output { layer: 0, row: 0, head: 2, channel: 37, value: x, dtype: name }) => {
                assert!(got[at].is_infinite() && x.to_bits() == value.to_bits() && name == dtype.name());
            }
            Some(e) => panic!("{e}"),
        }
    }
    // Scores overflow first, and so do values with a sum that overflows.
    let config = config(vec![shape(1, 1, 4, 4, Dtype::F32, Dtype::F32)], 8, 0);
    for (tensor, value) in [(2, 3e38), (1, f32::MAX)] {
        let dtypes = [Dtype::F32, Dtype::F32, Dtype::F32, Dtype::F16];
        let mut run = Loop::of(config.clone(), &standin.backend(), 3, dtypes);
        let of = run.tensors[0][tensor];
        run.engine.write(of, vec![value; of.len()]);
        let error = run.step().unwrap().check().unwrap_err();
        assert!(matches!(error, Error::ScoreOverflow { layer: 0, .. }), "{tensor}: {error}");
    }
}

#[test]
fn tensors_that_are_refused() {
    let standin = Standin::new();
    let config = config(vec![shape(2, 2, 8, 8, Dtype::Bf16, Dtype::F16)], 8, 0);
    for dtype in NARROW {
        let mut run = Loop::of(config.clone(), &standin.backend(), 2, [dtype; 4]);
        let [k, v, q, out, lse] = run.tensors[0];
        // SAFETY: the memory is never accessed: each call is refused.
        let at = |address, len, dtype| unsafe { DeviceSlice::new(address, len, dtype) };
        let odd = |of: DeviceSlice| at(of.address() + 1, of.len(), dtype);
        let short = |of: DeviceSlice| at(of.address(), of.len() - 1, dtype);
        let refused = |done: Result<(), Error>, what: &str, why: &str| match done {
            Err(Error::DeviceTensor { what: w, why: y, .. }) => {
                assert!(w == what && y.contains(why), "{w}: {y}")
            }
            Err(Error::Length { what: w, .. }) => assert!(w == what && why == "length", "{w}"),
            other => panic!("{what}: {other:?}"),
        };
        let attend = Attend::new(0.3);
        let to = DeviceOutput::new(out).lse(lse);
        let mut step = run.cache.begin([(&mut run.sequence, 2)]).unwrap();
        refused(step.append_device(0, odd(k), v), "k", "multiples of 2");
        refused(step.append_device(0, k, odd(v)), "v", "multiples of 2");
        refused(step.append_device(0, short(k), v), "k", "length");
        // An f32 needs an address that is a multiple of 4; 16-bit elements do not.
        let between = v.address() & !3 | 2;
        refused(step.append_device(0, k, at(between, v.len(), Dtype::F32)), "v", "multiples of 4");
        step.append_device(0, k, v).unwrap();
        refused(step.attend_device(0, odd(q), &attend, to), "q", "multiples of 2");
        refused(step.attend_device(0, q, &attend, DeviceOutput::new(odd(out))), "out", "multiples of 2");
        refused(step.attend_device(0, q, &attend, DeviceOutput::new(short(out))), "out", "length");
        let narrow = at(lse.address(), lse.len(), dtype);
        refused(step.attend_device(0, q, &attend, DeviceOutput::new(out).lse(narrow)), "lse", "f32");
        step.attend_device(0, q, &attend, to).unwrap();
        step.check().unwrap();
    }
}
