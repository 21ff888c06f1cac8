//! Limits and budgets: rows that they refuse do not fit, rows that they accept do, and budgets are met.

use pikv::codec::{Code, Codec, Coding, Map};
use pikv::policy::Duo;
use pikv::report::{PageId, Place};
use pikv::shape::PAGE;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape};

use pikv_test::numbers::Rng;

/// A cache of one head with keys packed by `coding` after a ring of one token.
fn packing(coding: &Coding, dim: u32, dtype: Dtype) -> Cache {
    let layer = LayerShape::new(1, 1, dim, dtype).values(8, Dtype::F32);
    let codec = Codec::new(coding.clone(), Coding::new(Code::F32));
    Cache::new(CacheConfig::new(vec![layer], 1 << 22).ring(1).compress(codec)).unwrap()
}

/// Appends `keys`, one a step; then reads the first page back, and attends to it.
fn packed(cache: &Cache, keys: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, Error> {
    let dim = keys[0].len();
    let mut sequence = cache.sequence();
    for key in keys {
        let mut step = cache.begin([(&mut sequence, 1)])?;
        step.append(0, key, &[0.5; 8])?;
        step.commit()?;
    }
    let (mut out, mut rows) = ([0.0; 8], Vec::new());
    let at = pikv::Rows::new(&sequence, pikv::Position(keys.len() as u32), 1);
    cache.attend(0, &[at], &vec![1e-6; dim], &Attend::new(1.0), AttendOutput::new(&mut out))?;
    assert!(out.iter().all(|x| x.is_finite()), "{out:?}");
    let id = PageId { place: Place::Run(0), ordinal: 0 };
    for lane in 0..PAGE {
        let mut key = vec![0.0; dim];
        sequence.read(0, 0, id, lane, &mut key, &mut [0.0; 8])?;
        rows.push(key);
    }
    Ok(rows)
}

/// A key with one large channel, as real models have them, is stored by a transform that spreads it.
#[test]
fn an_outlier_of_one_channel_fits_a_transform() {
    for (code, step) in
        [(Code::Int8, 1.0 / 255.0), (Code::Int4, 1.0 / 15.0), (Code::F16, 1e-3), (Code::E4m3, 0.07)]
    {
        let coding = Coding::new(code).map(Map::hadamard(128).unwrap());
        let cache = packing(&coding, 128, Dtype::F32);
        let mut rng = Rng(1);
        let keys: Vec<Vec<f32>> = (0..34)
            .map(|_| {
                let mut key = rng.values(128, 2.0);
                key[37] = 6_000.0;
                key
            })
            .collect();
        let back = packed(&cache, &keys).unwrap();
        for (key, back) in keys.iter().zip(&back) {
            // Each stored channel is off by a step of its value, some 530 and 40, and a row by the root of the sum of the squares.
            let off: f32 = key.iter().zip(back).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
            assert!(off < 2.0 * step * 600.0 * 12.0, "{}: {off}", code.name());
        }
    }
}

/// A token must fit the second codec, which packs its page later, as well as the first.
#[test]
fn what_ages_fits_both_codes() {
    let layer = LayerShape::new(1, 1, 8, Dtype::F32);
    for (k, v) in [(Code::Int8, Code::F32), (Code::F32, Code::Int8)] {
        let (first, second) = (Coding::new(Code::F32), Codec::new(Coding::new(k), Coding::new(v)));
        let config = CacheConfig::new(vec![layer], 1 << 22).ring(1);
        let config = config.compress(Codec::new(first.clone(), first)).age(32, second);
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        let large = [0.5, 0.5, 0.5, 100_000.0, 0.5, 0.5, 0.5, 0.5];
        let (key, value) = if k == Code::Int8 { (large, [0.5; 8]) } else { ([0.5; 8], large) };
        match step.append(0, &key, &value) {
            Err(Error::Unstorable { what, channel: 3, value: 100_000.0, .. }) => {
                assert_eq!(what, if k == Code::Int8 { "k" } else { "v" });
            }
            other => panic!("{k:?} {v:?}: {other:?}"),
        }
        step.append(0, &value, &key).unwrap();
        step.commit().unwrap();
    }
}

/// The limits of block PCA depend on the width of the rows.
#[test]
fn block_pca_takes_what_its_width_allows() {
    for dim in [8, 32, 64, 256] {
        let coding = Coding::block_pca(Code::Int8, 7).unwrap();
        let cache = packing(&coding, dim, Dtype::F32);
        // Half of the value that may give a coefficient of 65,504.
        let x = 0.5 * 0.99 * 65_504.0 / (dim as f32).sqrt();
        let keys: Vec<Vec<f32>> =
            (0..34).map(|i| vec![if i % 2 == 0 { x } else { -x }; dim as usize]).collect();
        let back = packed(&cache, &keys).unwrap();
        for (key, back) in keys.iter().zip(&back) {
            assert!(key.iter().zip(back).all(|(a, b)| (a - b).abs() < 0.02 * x), "{dim}: {x} {back:?}");
        }
    }
}

/// The gates of DuoAttention's published patterns, which training leaves slightly outside 0..=1.
#[test]
fn published_patterns_are_read() {
    let line = "9.062500000000000000e-01\t-9.584426879882812500e-05\t0.000000000000000000e+00\n";
    let more = "-1.403808593750000000e-03\t1.000976562500000000e+00\t-0.000000000000000000e+00\r\n";
    let duo = Duo::parse(&[line, more].concat(), 384).unwrap();
    assert_eq!(duo.gates, [[0.90625, 0.0, 0.0], [0.0, 1.0, 0.0]]);
    assert!(duo.gates.iter().flatten().all(|gate| gate.is_sign_positive()));
    for bad in ["0.5\tnan", "0.5\tinf", "-inf\t0.5", "0.5\t1e39", "0.5\tx"] {
        let refused = Duo::parse(&["1\t1\n", bad].concat(), 384).unwrap_err();
        assert!(refused.to_string().starts_with("line 2: "), "{refused}");
    }
}
