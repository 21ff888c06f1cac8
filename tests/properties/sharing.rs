//! Experts that share runs of pages: bytes, places and reads, over lengths at which the number of runs changes.

use pikv::codec::{Code, Codec, Coding};
use pikv::planner::{Load, Planner};
use pikv::report::Place;
use pikv::shape::Filed;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, ReadPages, Sequence};
use pikv_core::hash::mix;
use pikv_test::backend::backend;
use pikv_test::numbers::bits;
use pikv_test::runs::run;

/// Experts of the token at `position`: `top_k` that follow one another from a random one.
fn homes(config: &CacheConfig, position: u32) -> Vec<u16> {
    let first = mix(u64::from(position)) % u64::from(config.experts);
    (0..u64::from(config.top_k)).map(|i| ((first + i) % u64::from(config.experts)) as u16).collect()
}

/// A number in [-1, 1) of a token.
fn value(position: u32, which: u64) -> f32 {
    (mix(u64::from(position) << 8 | which) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Adds tokens in one step to layer 0, whose head has 2 channels; returns the bits of the rows' outputs. With `read` of `None` nothing is
/// attended, and the outputs are 0.
fn add(cache: &Cache, sequence: &mut Sequence, n: u32, read: Option<ReadPages>) -> Vec<u32> {
    let first = sequence.next_position().0;
    let row = |which: u64| -> Vec<f32> {
        (first..first + n).flat_map(|p| [value(p, which), value(p, which + 1)]).collect()
    };
    let mut step = cache.begin([(&mut *sequence, n)]).unwrap();
    step.append(0, &row(0), &row(2)).unwrap();
    let routes: Vec<u16> = (first..first + n).flat_map(|p| homes(cache.config(), p)).collect();
    step.route(0, &routes).unwrap();
    let mut out = vec![0.0; 2 * n as usize];
    if let Some(read) = read {
        step.attend(0, &row(4), &Attend::new(1.0).read(read), AttendOutput::new(&mut out)).unwrap();
    }
    step.commit().unwrap();
    bits(&out)
}

fn config(experts: u32, top_k: u32) -> CacheConfig {
    let layer = LayerShape::new(1, 1, 2, Dtype::F32);
    CacheConfig::new(vec![layer], 64 << 20).ring(64).experts(experts, top_k).backend(backend())
}

/// Pages of 256 experts at 1,024 tokens take at most 1.25 times the bytes of one expert's, with the default ring.
#[test]
fn many_experts_take_few_more_bytes_than_one() {
    let bytes = |experts, top_k, len| {
        let cache = Cache::new(config(experts, top_k).ring(256)).unwrap();
        let mut sequence = cache.sequence();
        add(&cache, &mut sequence, len, None);
        sequence.bytes() as f64
    };
    for len in [1024, 1025, 2048, 5000, 16_384] {
        for (experts, top_k) in [(256, 8), (256, 1), (160, 8), (512, 8)] {
            let ratio = bytes(experts, top_k, len) / bytes(1, 1, len);
            assert!(ratio <= 1.25, "{top_k} of {experts} experts at {len} tokens: {ratio}");
        }
    }
}

/// Each token is in the run of its expert at its position, and the bytes are those of `bytes_at` and of the planner.
#[test]
fn tokens_are_where_their_position_and_expert_say() {
    let int8 = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
    for (experts, window, packed) in [(9, None, false), (20, None, true), (46, Some(1500), false)] {
        let mut config = config(experts, 1);
        config.layers[0].window = window;
        if packed {
            config = config.compress(int8.clone());
        }
        let cache = Cache::new(config.clone()).unwrap();
        let mut sequence = cache.sequence();
        for n in [60, 1100, 90, 700, 64, 1000] {
            add(&cache, &mut sequence, n, None);
            let len = sequence.next_position().0;
            let mut filed = vec![0; experts as usize];
            for page in sequence.pages(0, 0).unwrap() {
                let Place::Run(place) = page.id.place else { continue };
                for (_, Position(p)) in sequence.positions(0, 0, page.id).unwrap() {
                    let home = homes(&config, p)[0];
                    assert_eq!(run(experts, window, p, home), place, "token {p} of expert {home}");
                    assert_eq!(cache.run_of(0, p, home).unwrap(), place);
                    filed[usize::from(place)] += 1;
                }
            }
            let filed: Vec<Filed> = filed.into_iter().map(Filed::from).collect();
            assert_eq!(sequence.bytes(), cache.bytes_at(0, len, &filed).unwrap(), "{experts} at {len}");
            assert!(sequence.bytes() <= cache.bytes_at_most(0, len).unwrap());
        }
    }
}

/// The planner's forecast is the bytes of a cache whose tokens go to the experts in turn.
#[test]
fn the_planner_knows_shared_runs() {
    for (experts, window, rollback) in [(9, None, 0), (20, None, 30), (46, Some(1500), 0), (160, None, 3)] {
        let mut config = config(experts, 1).rollback(rollback);
        config.layers[0].window = window;
        let cache = Cache::new(config.clone()).unwrap();
        let planner = Planner::new(config).unwrap();
        let mut sequence = cache.sequence();
        for n in [300, 900, 1, 150, 1200, 700, 3000] {
            let first = sequence.next_position().0;
            let mut step = cache.begin([(&mut sequence, n)]).unwrap();
            step.append(0, &vec![0.5; 2 * n as usize], &vec![0.5; 2 * n as usize]).unwrap();
            step.route(0, &(first..first + n).map(|p| (p % experts) as u16).collect::<Vec<_>>()).unwrap();
            step.commit().unwrap();
            let forecast = planner.forecast(&Load::new(first + n)).unwrap();
            assert_eq!(forecast.bytes, sequence.bytes(), "{experts} experts at {}", first + n);
        }
    }
}

/// Outputs, with all tokens read or those of the rows' experts, do not depend on how tokens are cut into steps, on tokens that were
/// rolled back, or on a save and a restore. Reads by expert read the tokens of the row's experts.
#[test]
fn reads_depend_on_the_tokens_alone() {
    for read in [ReadPages::All, ReadPages::Experts] {
        let config = config(9, 2).rollback(40);
        let cache = Cache::new(config.clone()).unwrap();
        let (mut whole, mut cut) = (cache.sequence(), cache.sequence());
        let outs: Vec<u32> = (0..25).flat_map(|_| add(&cache, &mut whole, 60, Some(read))).collect();
        let mut same = Vec::new();
        for n in [37, 23, 1, 59, 60].into_iter().cycle().take(40) {
            let n = n.min(1500 - cut.next_position().0);
            if n == 0 {
                break;
            }
            add(&cache, &mut cut, 13, Some(read));
            cut.rollback(13).unwrap();
            same.extend(add(&cache, &mut cut, n, Some(read)));
            if n == 23 {
                let mut file = Vec::new();
                cut.save(b"", &mut file).unwrap();
                cut = cache.restore(&mut &file[..]).unwrap().sequence;
            }
        }
        let rest = 1500 - cut.next_position().0;
        same.extend(
            (0..rest.div_ceil(60)).flat_map(|i| add(&cache, &mut cut, 60.min(rest - 60 * i), Some(read))),
        );
        assert_eq!(outs, same, "{read:?}");
        for p in (100..1500).step_by(7) {
            let mine = homes(&config, p);
            let seen = (0..=p)
                .filter(|t| read == ReadPages::All || t + 64 > p || mine.contains(&homes(&config, *t)[0]));
            let (mut sum, mut out) = (0.0, [0.0; 2]);
            for t in seen {
                let score: f64 = (0..2).map(|c| f64::from(value(p, 4 + c)) * f64::from(value(t, c))).sum();
                let weight = score.exp();
                sum += weight;
                (0..2).for_each(|c| out[c] += weight * f64::from(value(t, 2 + c as u64)));
            }
            for c in 0..2 {
                let got = f64::from(f32::from_bits(outs[2 * p as usize + c]));
                assert!((got - out[c] / sum).abs() < 1e-5, "{read:?}, row {p}: {got}, want {}", out[c] / sum);
            }
        }
    }
}
