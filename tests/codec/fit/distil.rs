//! Distillation compared with its definitions, one query at a time.

use super::*;
use pikv_core::rope::Rope;

const GROUP: usize = 2;

/// Segments with the strongest keys in directions of small queries, so that the best basis for attention differs from that of energy.
fn segments(n: usize, tokens: usize, d: usize, v: usize) -> Vec<Segment> {
    let sized = |seed: u64, rows: usize, size: &dyn Fn(usize) -> f32| -> Vec<f32> {
        noise(seed, rows * d).iter().enumerate().map(|(i, x)| x * size(i % d)).collect()
    };
    // Values hold a loud channel that changes its sign from token to token: attention averages it away.
    let mut values = rows(3000, n * tokens, v, 0.5);
    values.iter_mut().step_by(v).enumerate().for_each(|(t, x)| *x += if t % 2 == 0 { 4.0 } else { -4.0 });
    let one = |seed: u64| {
        Segment::new(
            sized(2000 + seed, tokens * GROUP, &|c| {
                if c < d / 4 { 0.1 } else { 6.0 * 0.7f32.powi((c - d / 4) as i32) }
            }),
            sized(1000 + seed, tokens, &|c| if c < d / 4 { 3.0 } else { 1.5 }),
            values[seed as usize * tokens * v..][..tokens * v].to_vec(),
        )
    };
    (0..n as u64).map(one).collect()
}

/// The losses of [`Measured`](pikv::codec::Measured), in f64.
#[derive(Debug)]
struct Oracle {
    kl: f64,
    skew_kl: f64,
    output: f64,
}

/// The KLs of a key map and the output error of a value map by the definitions, a query at a time.
fn measure(segments: &[Segment], k: &Map, v: &Map, options: &Distil) -> Oracle {
    let (d, w) = (k.wide() as usize, v.wide() as usize);
    let scale = options.scale.unwrap_or(1.0 / (d as f64).sqrt());
    let rotated = |x: Vec<f64>, t: usize| {
        let mut out = x.clone();
        if let Some(rope) = options.rope {
            for i in 0..rope.rotary_dim as usize / 2 {
                let (a, b) = rope.pair(i);
                let angle = t as f64 * rope.theta.powf(-2.0 * i as f64 / f64::from(rope.rotary_dim));
                out[a] = x[a] * angle.cos() - x[b] * angle.sin();
                out[b] = x[b] * angle.cos() + x[a] * angle.sin();
            }
        }
        out
    };
    let through = |map: &Map, row: &[f32]| -> Vec<f64> {
        let n = map.narrow() as usize;
        let bias = map.bias().map_or(vec![0.0; row.len()], <[f32]>::to_vec);
        let (e, dec) = (map.encode(), map.decode());
        let s: Vec<f64> = (0..n)
            .map(|i| {
                (0..row.len())
                    .map(|c| f64::from(e[i * row.len() + c]) * (f64::from(row[c]) - f64::from(bias[c])))
                    .sum()
            })
            .collect();
        (0..row.len())
            .map(|c| f64::from(bias[c]) + (0..n).map(|i| f64::from(dec[c * n + i]) * s[i]).sum::<f64>())
            .collect()
    };
    let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (mut kl, mut skew, mut count, mut lost, mut energy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for segment in segments {
        let keys: Vec<Vec<f64>> = segment.k.chunks(d).enumerate().map(|(t, k)| rotated(wide(k), t)).collect();
        let students: Vec<Vec<f64>> =
            segment.k.chunks(d).enumerate().map(|(t, row)| rotated(through(k, row), t)).collect();
        let coded: Vec<Vec<f64>> = segment.v.chunks(w).map(|row| through(v, row)).collect();
        for (i, q) in segment.q.chunks(d).enumerate() {
            let t = i / GROUP;
            let q = rotated(wide(q), t);
            let softmax = |keys: &[Vec<f64>]| {
                let logits: Vec<f64> = keys[..=t]
                    .iter()
                    .map(|k| scale * k.iter().zip(&q).map(|(a, b)| a * b).sum::<f64>())
                    .collect();
                let sum: f64 = logits.iter().map(|l| l.exp()).sum();
                logits.iter().map(|l| l.exp() / sum).collect::<Vec<f64>>()
            };
            let (p, s) = (softmax(&keys), softmax(&students));
            kl += p.iter().zip(&s).map(|(p, s)| p * (p / s).ln()).sum::<f64>();
            let mix = |p: f64, s: f64| options.skew * p + (1.0 - options.skew) * s;
            skew += p.iter().zip(&s).map(|(p, s)| p * (p / mix(*p, *s)).ln()).sum::<f64>();
            count += 1.0;
            for c in 0..w {
                let o: f64 = (0..=t).map(|j| p[j] * f64::from(segment.v[j * w + c])).sum();
                let coded: f64 = (0..=t).map(|j| p[j] * coded[j][c]).sum();
                lost += (o - coded).powi(2);
                energy += o * o;
            }
        }
    }
    Oracle { kl: kl / count, skew_kl: skew / count, output: lost / energy }
}

#[test]
fn distillation_gets_nearer_to_the_teacher() {
    let (d, w) = (16usize, 12usize);
    let all = segments(12, 32, d, w);
    let (fitted, fresh) = all.split_at(10);
    let gather = |of: fn(&Segment) -> &Vec<f32>, d| {
        let mut m = Moments::new(d as u32).unwrap();
        fitted.iter().for_each(|s| m.observe(of(s)).unwrap());
        m
    };
    let (mk, mv) = (gather(|s| &s.k, d), gather(|s| &s.v, w));
    let rope = Rope::new(100.0, 12);
    let starts = [svd(&mk, 6).unwrap().map, fit_lora_plus(&mk, 6).unwrap().map];
    for (rope, start_k, start_v) in [
        (None, &starts[0], svd(&mv, 4).unwrap().map),
        (Some(rope), &starts[1], fit_lora_plus(&mv, 4).unwrap().map),
    ] {
        let options = Distil::default().rope(rope);
        let mut steps = vec![];
        let clock = std::time::Instant::now();
        let found =
            distil(fitted, start_k, &start_v, &options, |step, loss| steps.push((step, loss))).unwrap();
        let Distilled { before, after, .. } = found;
        println!("rope {}: {before:?} -> {after:?}, {:?}", rope.is_some(), clock.elapsed());
        assert!(steps.iter().map(|s| s.0).eq(1..=300) && steps.iter().all(|s| s.1.is_finite() && s.1 >= 0.0));
        let held = &fitted[7..];
        for (said, k, v) in [(before, start_k, &start_v), (after, &found.k, &found.v)] {
            let oracle = measure(held, k, v, &options);
            assert!(
                near(said.kl, oracle.kl, 1e-6) && near(said.skew_kl, oracle.skew_kl, 1e-6),
                "{said:?} {oracle:?}"
            );
            assert!((said.output - oracle.output).abs() < 1e-6, "{said:?} {oracle:?}");
        }
        assert!(after.kl < 0.5 * before.kl && after.skew_kl < 0.5 * before.skew_kl);
        // With the rotation these weights are too sharp for means, and the initial map stays.
        let least = if rope.is_none() { 0.95 } else { 1.0 };
        assert!(after.output <= least * before.output);
        // On rows that had no part in any of it.
        let (was, is) =
            (measure(fresh, start_k, &start_v, &options), measure(fresh, &found.k, &found.v, &options));
        println!("  fresh: {was:?} -> {is:?}");
        assert!(is.kl < 0.5 * was.kl && is.output <= least * was.output);
        assert_eq!((found.k.narrow(), found.v.narrow()), (6, 4));
        assert_eq!((found.k.bias(), found.v.bias()), (start_k.bias(), start_v.bias()));
        let again = distil(fitted, start_k, &start_v, &options, |_, _| {}).unwrap();
        assert_eq!(again, found);
    }
    // Without steps the initial maps are returned.
    let none = Distil::default().steps(0);
    let same = distil(fitted, &starts[0], &svd(&mv, 4).unwrap().map, &none, |_, _| {}).unwrap();
    assert_eq!((same.k, same.after.kl), (starts[0].clone(), same.before.kl));
    // A start that loses nothing cannot be made worse.
    let whole = svd(&mk, d as u32).unwrap().map;
    let kept =
        distil(fitted, &whole, &svd(&mv, w as u32).unwrap().map, &Distil::default().rate(1.0), |_, _| {})
            .unwrap();
    assert!(kept.after.kl <= kept.before.kl && kept.after.skew_kl <= kept.before.skew_kl);
}

#[test]
fn distillation_refuses_what_it_cannot_use() {
    let good = segments(3, 8, 4, 4);
    let map = Map::identity_subset(4, &[0, 1]).unwrap();
    let go = |segments: &[Segment], options: Distil| distil(segments, &map, &map, &options, |_, _| {});
    let few = |r: Result<Distilled, FitError>| matches!(r, Err(FitError::TooFew { least: 2, .. }));
    assert!(few(go(&good[..1], Distil::default())) && few(go(&[], Distil::default())));
    let setting = |options: Distil| matches!(go(&good, options), Err(FitError::Setting { .. }));
    for bad in [0.0, 1.0, -0.1, f64::NAN] {
        assert!(setting(Distil::default().skew(bad)));
        assert!(setting(Distil::default().held(bad)));
    }
    for bad in [0.0, -1.0, 1.5, f64::NAN] {
        assert!(setting(Distil::default().rate(bad)));
    }
    assert!(setting(Distil::default().scale(f64::NAN)));
    let rope = |theta, rotary_dim| Some(Rope::new(theta, rotary_dim));
    assert!(setting(Distil::default().rope(rope(f64::NAN, 4))));
    for rotary in [0, 3, 6] {
        let r = go(&good, Distil::default().rope(rope(1e4, rotary)));
        assert!(matches!(r, Err(FitError::Rotary { .. })));
    }
    for (what, at) in ["q", "k", "v"].into_iter().zip(0..) {
        for nan in [true, false] {
            let mut bad = good.clone();
            let Segment { q, k, v, .. } = &mut bad[2];
            let part = [q, k, v].into_iter().nth(at).unwrap();
            if nan {
                part[5] = f32::NAN
            } else {
                part.pop().unwrap();
            }
            match go(&bad, Distil::default()).unwrap_err() {
                FitError::NotFinite { what: said, index: 5, .. } if nan => assert_eq!(said, what),
                FitError::Rows { .. } if !nan => {}
                other => panic!("{other}"),
            }
        }
    }
    let mut empty = good.clone();
    empty[0] = Segment::default();
    assert!(matches!(go(&empty, Distil::default()), Err(FitError::Rows { .. })));
}
