//! Statistics that the fitter gathers.

use super::*;

pub const SHAPE: FitShape = FitShape::new(2, 2, 4, 6).v_dim(5);

pub fn filled(calls: usize, tokens: usize) -> Fitter {
    let mut fitter = Fitter::new(SHAPE).unwrap().sample(3, 8, 1);
    for call in 0..calls as u64 {
        for layer in 0..2 {
            let s = call * 10 + u64::from(layer);
            let (q, k, v) =
                (noise(s, tokens * 24), noise(s + 1000, tokens * 12), noise(s + 2000, tokens * 10));
            fitter.observe(layer, &q, &k, &v).unwrap();
        }
    }
    fitter
}

#[test]
fn the_fitter_gathers_each_head_apart() {
    let (q, k, v) = (noise(1, 10 * 24), noise(2, 10 * 12), noise(3, 10 * 10));
    let mut fitter = Fitter::new(SHAPE).unwrap();
    fitter.observe(1, &q[..4 * 24], &k[..4 * 12], &v[..4 * 10]).unwrap();
    fitter.observe(1, &q[4 * 24..], &k[4 * 12..], &v[4 * 10..]).unwrap();
    for head in 0..2usize {
        let of = |values: &[f32], d: usize| -> Vec<f32> {
            values.chunks(d).skip(head).step_by(2).flatten().copied().collect()
        };
        let h = head as u32;
        for (found, rows, d) in [
            (fitter.k(1, h).unwrap(), of(&k, 6), 6),
            (fitter.v(1, h).unwrap(), of(&v, 5), 5),
            // Query heads 2 h and 2 h + 1 read KV head h.
            (fitter.q(1, h).unwrap(), of(&q, 12), 6),
        ] {
            assert_eq!(found.rows() as usize, rows.len() / d);
            let zero = vec![0.0; d];
            let oracle = second(&rows, d, &zero);
            let apart =
                |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart(&found.second(None).unwrap(), &oracle) < 1e-12);
            let energy: Vec<f64> = (0..d).map(|c| oracle[c * d + c]).collect();
            assert!(apart(&found.energy(), &energy) < 1e-12);
            let mean = found.mean();
            assert!(apart(&found.second(Some(&mean)).unwrap(), &second(&rows, d, &mean)) < 1e-12);
            assert!(
                apart(
                    &found.mean_squares(),
                    &energy.iter().map(|e| e / found.rows() as f64).collect::<Vec<_>>()
                ) < 1e-12
            );
        }
        assert_eq!(fitter.k(0, h).unwrap().rows(), 0);
        let kept = fitter.segments(1, h).unwrap();
        assert_eq!(kept.len(), 2);
        assert_eq!([&kept[0].k[..], &kept[1].k[..]].concat(), of(&k, 6));
        assert_eq!([&kept[0].v[..], &kept[1].v[..]].concat(), of(&v, 5));
        assert_eq!([&kept[0].q[..], &kept[1].q[..]].concat(), of(&q, 12));
    }
}

#[test]
fn the_sample_is_bounded_and_follows_the_seed() {
    let a = filled(20, 20);
    let kept = a.segments(0, 0).unwrap();
    assert!(kept.len() == 3 && kept.iter().all(|s| s.k.len() <= 8 * 6 && s.q.len() == 2 * s.k.len()));
    assert_eq!(kept, filled(20, 20).segments(0, 0).unwrap());
    assert_ne!(kept, filled(1, 20).segments(0, 0).unwrap());
    // Every part of the offer is kept about as often: 60 pieces, 3 kept, 400 seeds.
    let mut early = 0;
    for seed in 0..400 {
        let mut fitter = Fitter::new(FitShape::new(1, 1, 1, 1)).unwrap().sample(3, 1, seed);
        for t in 0..60 {
            fitter.observe(0, &[0.0], &[t as f32], &[0.0]).unwrap();
        }
        early += fitter.segments(0, 0).unwrap().iter().filter(|s| s.k[0] < 30.0).count();
    }
    assert!((500..700).contains(&early), "{early} of 1200");
    let none = Fitter::new(SHAPE).unwrap().sample(0, 8, 1);
    let mut none = none;
    none.observe(0, &[0.5; 24], &[0.5; 12], &[0.5; 10]).unwrap();
    assert!(none.segments(0, 1).unwrap().is_empty());
}

#[test]
fn the_fitter_refuses_and_stays_as_it_was() {
    let shape =
        |layers, query_heads, kv_heads, k_dim| FitShape::new(layers, kv_heads, query_heads, k_dim).v_dim(5);
    for bad in [
        shape(0, 4, 2, 6),
        shape(2, 3, 2, 6),
        shape(2, 0, 2, 6),
        shape(2, 4, 0, 6),
        shape(2, 4, 2, 0),
        shape(2, 4, 2, 257),
    ] {
        assert!(Fitter::new(bad).is_err(), "{bad:?}");
    }
    let mut fitter = filled(1, 3);
    let before = format!("{fitter:?}");
    let (q, k, v) = (vec![0.5; 48], vec![0.5; 24], vec![0.5; 20]);
    let mut refused = |layer, q: &[f32], k: &[f32], v: &[f32]| fitter.observe(layer, q, k, v).unwrap_err();
    assert!(matches!(refused(2, &q, &k, &v), FitError::Head { layer: 2, .. }));
    assert!(matches!(refused(0, &q[1..], &k, &v), FitError::Rows { what: "q", .. }));
    assert!(matches!(refused(0, &q, &k[1..], &v), FitError::Rows { .. }));
    assert!(matches!(refused(0, &q, &k, &v[..10]), FitError::Rows { what: "v", .. }));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut v = v.clone();
        v[19] = bad;
        assert!(matches!(refused(0, &q, &k, &v), FitError::NotFinite { what: "v", index: 19, .. }));
    }
    assert_eq!(format!("{fitter:?}"), before);
    assert!(
        fitter.k(2, 0).is_err()
            && fitter.v(0, 2).is_err()
            && fitter.q(9, 9).is_err()
            && fitter.segments(0, 2).is_err()
    );
    let mut m = Moments::new(3).unwrap();
    assert!(m.observe(&[1.0; 4]).is_err() && m.observe(&[1.0, f32::NAN, 1.0]).is_err() && m.rows() == 0);
    assert!(m.residual(&Map::hadamard(4).unwrap()).is_err() && m.second(Some(&[0.0; 2])).is_err());
}
