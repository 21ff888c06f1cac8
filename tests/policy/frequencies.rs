//! Scaled rotations: frequencies compared with the models' own formulas, and attention with f64.

use pikv::policy::{Budget, Eviction, ExpectedAttention};
use pikv::shape::{Frequencies, FrequencyError, Scaling};
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ConfigError, Dtype, Error, LayerShape, ReadPages, Rope,
};
use pikv_test::numbers::{bits, noise};
use std::f64::consts::PI;

const DIM: usize = 16;

fn rope(theta: f64, rotary_dim: u32) -> Rope {
    Rope::new(theta, rotary_dim)
}

fn layer(rope: Option<Rope>) -> LayerShape {
    LayerShape::new(1, 2, DIM as u32, Dtype::F32).values(8, Dtype::F32).rope(rope)
}

/// The kinds of `config.json`, each with a model's values, and its frequencies and factor by transcriptions of transformers'
/// `modeling_rope_utils`, with the base and the rotary width as inputs.
fn kinds(theta: f64, dim: usize) -> Vec<(Scaling, Vec<f64>, f64)> {
    let half = dim / 2;
    let base = |theta: f64| -> Vec<f64> {
        (0..half).map(|i| 1.0 / theta.powf((2 * i) as f64 / dim as f64)).collect()
    };
    let linear = base(theta).iter().map(|x| x / 4.0).collect();
    let dynamic = {
        let (factor, max, len) = (2.0f64, 64.0, 300.0);
        base(theta * ((factor * len / max) - (factor - 1.0)).powf(dim as f64 / (dim as f64 - 2.0)))
    };
    let llama3 = {
        let (factor, low, high, old) = (8.0, 1.0, 4.0, 128.0);
        let each = |inv: f64| {
            let wavelen = 2.0 * PI / inv;
            let scaled = if wavelen > old / low { inv / factor } else { inv };
            let smooth = (old / wavelen - low) / (high - low);
            let smoothed = (1.0 - smooth) * scaled / factor + smooth * scaled;
            let medium = wavelen >= old / high && wavelen <= old / low;
            if medium { smoothed } else { scaled }
        };
        base(theta).into_iter().map(each).collect()
    };
    let yarn = |fast: f64, slow: f64, truncate: bool| -> Vec<f64> {
        let (factor, old) = (16.0, 64.0f64);
        let find = |rotations: f64| (dim as f64 * (old / (rotations * 2.0 * PI)).ln()) / (2.0 * theta.ln());
        let (mut low, mut high) = (find(fast), find(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        let ramp = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        let each = |(i, inv): (usize, f64)| inv / factor * ramp(i) + inv * (1.0 - ramp(i));
        base(theta).into_iter().enumerate().map(each).collect()
    };
    let long: Vec<f64> = (0..half).map(|i| 1.0 + i as f64 * 0.75).collect();
    let longrope = base(theta).iter().zip(&long).map(|(x, f)| x / f).collect();
    let proportional = {
        let turned = (0.5 * dim as f64 / 2.0) as usize;
        base(theta).iter().enumerate().map(|(i, x)| if i < turned { x / 2.0 } else { 0.0 }).collect()
    };
    let yarn_of = |fast, slow, truncate, attention| Scaling::Yarn {
        factor: 16.0,
        original: 64,
        fast,
        slow,
        truncate,
        attention,
    };
    let deepseek = Scaling::mscale(16.0, 1.0) / Scaling::mscale(16.0, 0.7);
    vec![
        (Scaling::Linear { factor: 4.0 }, linear, 1.0),
        (Scaling::Dynamic { factor: 2.0, original: 64, len: 300 }, dynamic, 1.0),
        (Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 128 }, llama3, 1.0),
        (yarn_of(32.0, 1.0, true, None), yarn(32.0, 1.0, true), 0.1 * 16f64.ln() + 1.0),
        (
            yarn_of(8.0, 0.5, false, Some(deepseek)),
            yarn(8.0, 0.5, false),
            (0.1 * 16f64.ln() + 1.0) / (0.07 * 16f64.ln() + 1.0),
        ),
        (
            Scaling::LongRope { factors: long, factor: 8.0, original: 64, attention: None },
            longrope,
            (1.0 + 8f64.ln() / 64f64.ln()).sqrt(),
        ),
        (Scaling::Proportional { share: 0.5, factor: 2.0 }, proportional, 1.0),
    ]
}

#[test]
fn frequencies_are_those_of_the_models() {
    for (theta, dim) in [(10_000.0, DIM), (500_000.0, 128), (1_000_000.0, 64)] {
        for (scaling, inverse, factor) in kinds(theta, dim) {
            let got = Frequencies::scaled(theta, dim as u32, &scaling).unwrap();
            assert!((got.factor() - factor).abs() <= 1e-12, "{scaling:?}: {} and {factor}", got.factor());
            assert_eq!(got.inverse().len(), inverse.len());
            for (got, want) in got.inverse().iter().zip(&inverse) {
                assert!((got - want).abs() <= 1e-12 * want.abs(), "{scaling:?}: {got} and {want}");
            }
        }
    }
    // Without scaling: the layer's own.
    let plain = Frequencies::plain(10_000.0, 8).unwrap();
    assert_eq!((plain.inverse()[0], plain.factor()), (1.0, 1.0));
}

/// Keys, values and queries of the token at `p`.
fn token(p: u32, seed: u64) -> [Vec<f32>; 3] {
    let seed = seed * 10_000 + u64::from(p) * 3;
    [noise(seed, DIM), noise(seed + 1, 8), noise(seed + 2, 2 * DIM)]
}

/// Appends `n` tokens one by one; the outputs of all rows.
fn run(cache: &Cache, n: u32, read: ReadPages) -> Vec<f32> {
    let mut sequence = cache.sequence();
    let mut all = Vec::new();
    for p in 0..n {
        let [k, v, q] = token(p, 1);
        let mut out = [0.0; 16];
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        step.append(0, &k, &v).unwrap();
        step.attend(0, &q, &Attend::new(0.7).read(read), AttendOutput::new(&mut out)).unwrap();
        step.commit().unwrap();
        all.extend(out);
    }
    all
}

fn turned(row: &[f32], inverse: &[f64], factor: f64, position: u32) -> Vec<f64> {
    let mut out: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
    let half = inverse.len();
    for (i, inv) in inverse.iter().enumerate() {
        let angle = f64::from(position) * inv;
        let (x, y) = (out[i], out[i + half]);
        out[i] = factor * (x * angle.cos() - y * angle.sin());
        out[i + half] = factor * (y * angle.cos() + x * angle.sin());
    }
    out
}

#[test]
fn attention_turns_by_them() {
    let rotary = 12;
    let mut seen: Vec<Vec<u32>> = Vec::new();
    for (scaling, inverse, factor) in kinds(10_000.0, rotary) {
        let frequencies = Frequencies::scaled(10_000.0, rotary as u32, &scaling).unwrap();
        let config = |shards| {
            let config = CacheConfig::new(vec![layer(Some(rope(10_000.0, rotary as u32)))], 1 << 22).ring(40);
            config
                .frequencies(0..1, frequencies.clone())
                .key_bounds(true)
                .shards(pikv::shard::ShardMap::sum(shards).unwrap())
        };
        let cache = Cache::new(config(1)).unwrap();
        let got = run(&cache, 200, ReadPages::All);
        assert_eq!(bits(&got), bits(&run(&Cache::new(config(3)).unwrap(), 200, ReadPages::All)));
        // Pages enough for all: the same, so bounds are taken.
        assert_eq!(bits(&got), bits(&run(&cache, 200, ReadPages::Quest { pages: 100 })));
        for (row, out) in got.chunks_exact(16).enumerate() {
            let query = token(row as u32, 1)[2].clone();
            for (head, out) in out.chunks_exact(8).enumerate() {
                let q = turned(&query[head * DIM..][..DIM], &inverse, factor, row as u32);
                let score = |p: u32| {
                    let k = turned(&token(p, 1)[0], &inverse, factor, p);
                    0.7 * q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>()
                };
                let scores: Vec<f64> = (0..=row as u32).map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|x| (x - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (c, out) in out.iter().enumerate() {
                    let want: f64 =
                        (0u32..).zip(&weights).map(|(p, w)| w * f64::from(token(p, 1)[1][c])).sum();
                    let off = (f64::from(*out) - want / total).abs();
                    assert!(off <= 2e-5, "{scaling:?}, row {row}: {out} and {}", want / total);
                }
            }
        }
        // Each kind acts.
        assert!(!seen.contains(&bits(&got)), "{scaling:?}");
        seen.push(bits(&got));
    }
    let plain = CacheConfig::new(vec![layer(Some(rope(10_000.0, rotary as u32)))], 1 << 22).ring(40);
    let same = Frequencies::plain(10_000.0, rotary as u32).unwrap();
    let own = run(&Cache::new(plain.clone()).unwrap(), 200, ReadPages::All);
    assert_eq!(
        bits(&own),
        bits(&run(&Cache::new(plain.frequencies(0..1, same)).unwrap(), 200, ReadPages::All))
    );
    assert!(!seen.contains(&bits(&own)));
}

/// Positions held when the engine rotates keys and when the cache does. They are equal if the policy has the layer's frequencies, and
/// differ if it has the plain base.
#[test]
fn expected_attention_takes_the_layers_frequencies() {
    let rope = rope(10_000.0, DIM as u32);
    let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 128 };
    let frequencies = Frequencies::scaled(rope.theta, DIM as u32, &scaling).unwrap();
    let held = |rotated: bool, told: bool| {
        let policy = ExpectedAttention::new(Some(rope), rotated).ahead(64).memory(64);
        let shape = layer((!rotated).then_some(rope));
        let mut config =
            CacheConfig::new(vec![shape], 1 << 22).ring(16).evict(Eviction::new(policy, Budget::Tokens(60)));
        if told {
            config = config.frequencies(0..1, frequencies.clone());
        }
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        for p in 0..220 {
            let [k, v, mut q] = token(p, 2);
            // Queries that look one way, so that it matters how keys are turned.
            q.iter_mut().for_each(|x| *x += 1.5);
            let (mut k, mut q) = (k.map_turned(rotated, &frequencies, p), q);
            if rotated {
                let turned = |row: &[f32]| row.to_vec().map_turned(true, &frequencies, p);
                q = q.chunks_exact(DIM).flat_map(turned).collect();
            }
            k.truncate(DIM);
            let mut out = [0.0; 16];
            let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
            step.append(0, &k, &v).unwrap();
            step.attend(0, &q, &Attend::new(0.25), AttendOutput::new(&mut out)).unwrap();
            step.commit().unwrap();
        }
        let pages = sequence.pages(0, 0).unwrap().filter(|page| page.id.place != pikv::report::Place::Ring);
        let mut held: Vec<u32> =
            pages.flat_map(|page| sequence.positions(0, 0, page.id).unwrap().map(|(_, p)| p.0)).collect();
        held.sort_unstable();
        held
    };
    let common = |a: &[u32], b: &[u32]| a.iter().filter(|p| b.contains(p)).count();
    let (own, engine, plain) = (held(false, true), held(true, true), held(true, false));
    // In f32 and in f64 the last ranks may change places.
    assert!(common(&own, &engine) + 2 >= own.len(), "{own:?}\n{engine:?}");
    assert!(common(&own, &plain) + 4 < own.len(), "the plain base ranks as the layer's frequencies do");
}

trait Turned {
    fn map_turned(self, on: bool, by: &Frequencies, position: u32) -> Vec<f32>;
}

impl Turned for Vec<f32> {
    fn map_turned(self, on: bool, by: &Frequencies, position: u32) -> Vec<f32> {
        match on {
            false => self,
            true => turned(&self, by.inverse(), by.factor(), position).iter().map(|x| *x as f32).collect(),
        }
    }
}

#[test]
fn what_cannot_act_or_is_out_of_range_is_refused() {
    let (rope, other) = (rope(10_000.0, 8), rope(100.0, 8));
    let eight = Frequencies::plain(10_000.0, 8).unwrap();
    let new = |shape, frequencies: &Frequencies, layers| {
        let config = CacheConfig::new(vec![shape], 1 << 20).frequencies(layers, frequencies.clone());
        Cache::new(config).map(drop)
    };
    let refused = |error: ConfigError| Err(Error::from(error));
    assert_eq!(new(layer(Some(rope)), &eight, 0..1), Ok(()));
    assert_eq!(
        new(layer(Some(rope)), &eight, 0..2),
        refused(ConfigError::FrequencyLayer { layer: 1, layers: 1 })
    );
    assert_eq!(
        new(layer(None), &eight, 0..1),
        refused(ConfigError::Frequencies { layer: 0, got: 4, pairs: 0 })
    );
    let wide = Frequencies::plain(10_000.0, 16).unwrap();
    assert_eq!(
        new(layer(Some(rope)), &wide, 0..1),
        refused(ConfigError::Frequencies { layer: 0, got: 8, pairs: 4 })
    );
    let evict = Eviction::new(ExpectedAttention::new(Some(other), false), Budget::Tokens(64));
    let config = CacheConfig::new(vec![layer(Some(rope))], 1 << 20).evict(evict);
    let policy = "expected attention".to_owned();
    assert_eq!(Cache::new(config).map(drop), refused(ConfigError::PolicyRope { layer: 0, policy }));

    let value = |name, value, range| Err(FrequencyError::Value { name, value, range });
    assert_eq!(Frequencies::plain(0.5, 8).map(drop), value("theta", 0.5, "finite and at least 1"));
    assert!(matches!(
        Frequencies::new(&[f64::NAN], 1.0),
        Err(FrequencyError::Value { name: "an angle", .. })
    ));
    assert_eq!(Frequencies::new(&[7.0], 1.0).map(drop), value("an angle", 7.0, "in 0..=2 pi"));
    let wrong = "the factor on turned channels";
    assert_eq!(Frequencies::new(&[1.0], 0.0).map(drop), value(wrong, 0.0, "in 2^-10..=2^10"));
    let long = Scaling::LongRope { factors: vec![1.0; 3], factor: 2.0, original: 64, attention: None };
    assert_eq!(Frequencies::scaled(1e4, 8, &long).map(drop), Err(FrequencyError::Count { got: 3, pairs: 4 }));
    let of = |scaling| Frequencies::scaled(1e4, 8, &scaling).map(drop);
    assert_eq!(of(Scaling::Linear { factor: 0.0 }), value("factor", 0.0, "finite and at least 1"));
    let bands = Scaling::Llama3 { factor: 8.0, low: 4.0, high: 4.0, original: 64 };
    assert_eq!(of(bands), value("high", 4.0, "above low"));
    let dynamic = Scaling::Dynamic { factor: 2.0, original: 0, len: 9 };
    assert_eq!(of(dynamic), value("original", 0.0, "finite and at least 1"));
}

/// Tables of rotations are built up to the reserved position; a step up to there builds no more.
#[test]
fn positions_are_reserved() {
    let cache = Cache::new(CacheConfig::new(vec![layer(Some(rope(10_000.0, 8)))], 1 << 22)).unwrap();
    assert!(cache.table_bytes() < 100);
    cache.reserve_positions(5000).unwrap();
    let bytes = cache.table_bytes();
    assert_eq!(bytes, 8192 * 8 * 4);
    run(&cache, 300, ReadPages::All);
    assert_eq!(cache.table_bytes(), bytes);
    let most = pikv::Position::MAX.0;
    assert_eq!(
        cache.reserve_positions(most + 1),
        Err(Error::PositionOverflow { position: u64::from(most) + 1 })
    );
}
