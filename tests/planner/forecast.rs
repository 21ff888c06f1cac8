//! The planner compared with the paper's figures, with filled caches, and with samples of known constants.

use pikv::codec::{Code, Codec, Coding, Map};
use pikv::planner::paper::{self, Latency, Memory};
use pikv::planner::{
    DEEPSEEK_MOE_16B, Forecast, Geometry, Load, MIXTRAL_8X7B, OLMOE_1B_7B, PlanError, Planner, Probe,
    QWEN1_5_MOE_A2_7B, QWEN3_30B_A3B, Sample, StepTime, Work, calibrate, shared_experts,
};
use pikv::report::{PageId, Place};
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ConfigError, Dtype, Error, LayerShape, Layout, ReadPages,
    Sequence,
};
use proptest::prelude::*;

const SETTING: Memory = Memory { width: 128.0, ratio: 1.0, tokens: 131_072.0, devices: 8.0, pages: 16.0 };

#[test]
fn the_papers_memory() {
    assert_eq!(paper::s_star(&SETTING), 32.0);
    assert_eq!(paper::summaries(&SETTING, 32.0), 512.0);
    let owned = SETTING.tokens / SETTING.devices;
    let resident = SETTING.pages * 32.0;
    assert_eq!((owned, resident), (16_384.0, 512.0));
    assert_eq!((resident / owned * 1000.0).round(), 31.0, "3.1 %");
    assert_eq!(paper::m_total(&SETTING, 32.0), 2.0 * 128.0 * 1024.0);
    // The minimum lies at `s_star`, for all settings.
    for (ratio, tokens, devices, pages) in
        [(1.0, 131_072.0, 8.0, 16.0), (3.5, 4096.0, 1.0, 7.0), (2.0, 1e6, 5.0, 64.0)]
    {
        let memory = Memory { width: 64.0, ratio, tokens, devices, pages };
        let (page, least) = (paper::s_star(&memory), paper::m_star(&memory));
        assert!((paper::m_total(&memory, page) / least - 1.0).abs() < 1e-12);
        for factor in [0.5, 0.9, 1.1, 2.0] {
            assert!(paper::m_total(&memory, page * factor) > least * 1.001);
        }
    }
}

#[test]
fn the_papers_worked_example() {
    let rows = paper::rows(131_072.0, 8.0, 16.0);
    assert_eq!(rows, 24_576.0);
    assert_eq!(1.0 - rows / 131_072.0, 0.8125);
    assert_eq!(((1.0 - rows / (16.0 * 131_072.0)) * 1000.0).round(), 988.0, "98.8 % less than 16 copies");
    assert_eq!(QWEN1_5_MOE_A2_7B.layers(24).raw_bytes(131_072, 16), 24 << 30);
}

/// If rows are stored once, a device of 8 holds an eighth: 16,384 of 131,072 rows.
#[test]
fn rows_on_a_device() {
    let layout = Layout::new(128, Dtype::F16);
    let layer = LayerShape::with_layout(1, 1, layout);
    let config = CacheConfig::new(vec![layer], 1 << 40)
        .ring(512)
        .experts(16, 2)
        .shards(ShardMap::xor(16, 16, 8).unwrap());
    let all = Planner::new(config).unwrap().forecast(&Load::new(131_072)).unwrap();
    assert_eq!(all.shards.len(), 8);
    for bytes in all.shards {
        // A page holds positions beside its rows.
        let rows = bytes as f64 / layout.bytes() as f64 * 32.0;
        assert!((rows / 16_384.0 - 1.0).abs() < 0.02, "{rows} rows");
    }
}

#[test]
fn the_papers_latency() {
    let latency =
        Latency { width: 128.0, top_k: 2.0, batch: 4.0, ratio: 2.0, beta: 1e9, eta: 3.0, gamma: 1e10 };
    let expected = 512.0 * (2e-9 + 3e-10);
    assert!((paper::t_step(&latency) / expected - 1.0).abs() < 1e-12);
}

/// The forecast share of the filed tokens that rows of uniform experts read, against a cache.
#[test]
fn a_row_reads_the_pages_of_its_experts() {
    let layer = LayerShape::new(1, 1, 1, Dtype::F32);
    for (experts, top_k, share) in [(16, 2, 0.125), (8, 2, 0.25), (64, 4, 0.0625), (4, 4, 1.0), (1, 1, 1.0)] {
        assert_eq!(shared_experts(experts, top_k), Ok(share));
        let config = CacheConfig::new(vec![layer], 64 << 20).ring(32).experts(experts, top_k);
        let cache = Cache::new(config.backend(pikv_test::backend::backend())).unwrap();
        let mut sequence = cache.sequence();
        // `top_k` experts that follow one another from a random one: each is as often the first.
        let row = |t: u32| {
            let first = pikv_core::hash::mix(u64::from(t)) % u64::from(experts);
            (0..top_k).map(move |j| ((first + u64::from(j)) % u64::from(experts)) as u16)
        };
        let len = 16_384;
        let mut step = cache.begin([(&mut sequence, len)]).unwrap();
        step.append(0, &vec![0.0; len as usize], &vec![0.5; len as usize]).unwrap();
        step.route(0, &(0..len).flat_map(row).collect::<Vec<_>>()).unwrap();
        step.commit().unwrap();
        // All keys are 0, so a row's log-sum-exp is the logarithm of the tokens that it reads.
        let rows = 512;
        let mut mean = 0.0;
        for t in len..len + rows {
            let (mut out, mut lse) = ([0.0], [0.0]);
            let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
            step.append(0, &[0.0], &[0.5]).unwrap();
            step.route(0, &row(t).collect::<Vec<_>>()).unwrap();
            let read = Attend::new(1.0).read(ReadPages::Experts);
            step.attend(0, &[1.0], &read, AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
            step.commit().unwrap();
            mean += (f64::from(lse[0]).exp() - 32.0) / f64::from(t + 1 - 32) / f64::from(rows);
        }
        assert!((mean / share - 1.0).abs() < 0.02, "{top_k} of {experts}: {mean}");
    }
    assert_eq!(shared_experts(4, 5), Err(PlanError::TopK { top_k: 5, experts: 4 }));
    assert_eq!(shared_experts(0, 0), Err(PlanError::TopK { top_k: 0, experts: 0 }));
}

#[test]
fn geometries() {
    // Bytes a token in bf16, by hand.
    let per_token = [
        (MIXTRAL_8X7B, 131_072),
        (QWEN1_5_MOE_A2_7B, 196_608),
        (OLMOE_1B_7B, 131_072),
        (DEEPSEEK_MOE_16B, 229_376),
        (QWEN3_30B_A3B, 98_304),
    ];
    assert_eq!(Geometry::ALL.map(|g| (g, g.raw_bytes(1, 16))), per_token);
    for geometry in Geometry::ALL {
        let planner = Planner::new(geometry.config(Dtype::Bf16, Dtype::F16, 1 << 40)).unwrap();
        let all = planner.forecast(&Load::new(geometry.max_context)).unwrap();
        assert!(all.bytes > geometry.raw_bytes(geometry.max_context, 16));
        assert_eq!(all.work.calls, u64::from(geometry.layers));
    }
}

/// Adds `n` tokens; the one at position `p` is filed by expert `p % experts`.
fn feed(cache: &Cache, sequence: &mut Sequence, n: u32) {
    let config = cache.config();
    let first = sequence.next_position().0;
    let mut step = cache.begin([(sequence, n)]).unwrap();
    for (l, layer) in config.layers.iter().enumerate() {
        let heads = (n * layer.kv_heads) as usize;
        let row = |len: usize| (0..len).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect::<Vec<f32>>();
        let layout = layer.layout;
        step.append(l, &row(heads * layout.k_dim as usize), &row(heads * layout.v_dim as usize)).unwrap();
        let experts = (first..first + n)
            .flat_map(|p| (0..config.top_k).map(move |i| ((p + i) % config.experts) as u16))
            .collect::<Vec<_>>();
        step.route(l, &experts).unwrap();
    }
    step.commit().unwrap();
}

/// The oldest pages leave each head, in turns over the experts, until no more than `resident` tokens are left.
fn evict(cache: &Cache, sequence: &mut Sequence, resident: u32) {
    for l in 0..cache.config().layers.len() {
        for h in 0..cache.config().layers[l].kv_heads as usize {
            let pages = sequence.pages(l, h).unwrap().map(|page| page.id);
            let mut pages: Vec<PageId> = pages.filter(|page| matches!(page.place, Place::Run(_))).collect();
            pages.sort_by_key(|page| (page.ordinal, page.place));
            let mut pages = pages.into_iter();
            while sequence.resident(l, h).unwrap().0 > resident {
                sequence.evict(l, h, pages.next().unwrap()).unwrap();
            }
        }
    }
}

/// Bytes and flops that a decode step reads, page by page as the sequence lists them.
fn work(cache: &Cache, sequence: &Sequence) -> Work {
    let config = cache.config();
    let len = sequence.next_position().0;
    let mut work = Work::default().calls(config.layers.len() as u64);
    for (l, layer) in config.layers.iter().enumerate() {
        let layout = layer.layout;
        let seen = len.saturating_sub(layer.window.unwrap_or(u32::MAX));
        for h in 0..layer.kv_heads as usize {
            let codec = config
                .codecs
                .iter()
                .rfind(|r| r.layer.is_none_or(|at| at == l) && r.kv_head.is_none_or(|at| at == h));
            for page in sequence.pages(l, h).unwrap() {
                let from = match page.id.place {
                    Place::Sinks => 0,
                    Place::Run(_) => seen,
                    Place::Ring => seen.max(len.saturating_sub(config.ring)),
                    other => panic!("{other}"),
                };
                if page.last.0 < from {
                    continue;
                }
                let (bytes, channels) = match codec.filter(|_| page.packed) {
                    Some(rule) => {
                        let packed = rule.codec.packed(layout.k_dim, layout.v_dim);
                        (packed.bytes(), packed.k_dim + packed.v_dim)
                    }
                    None => (layout.bytes(), layout.k_dim + layout.v_dim),
                };
                work.bytes += bytes;
                let pairs = 32 * layer.query_heads / layer.kv_heads;
                work.flops += u64::from(2 * pairs * channels);
            }
        }
    }
    work
}

fn holds(cache: &Cache, sequence: &Sequence, forecast: &Forecast) {
    let usage = cache.usage();
    assert_eq!((forecast.bytes, &forecast.shards), (usage.taken, &usage.shards));
    assert_eq!(forecast.shards.iter().sum::<u64>(), forecast.bytes);
    assert_eq!(forecast.work, work(cache, sequence));
    let resident = (0..cache.config().layers.len()).map(|l| sequence.resident(l, 0).unwrap().0).max();
    assert_eq!(Some(forecast.resident), resident);
}

fn codecs() -> Vec<Option<Codec>> {
    let codec = |k, v| Some(Codec::new(Coding::new(k), Coding::new(v)));
    let narrow = Map::identity_subset(20, &[0, 2, 4, 5, 11]).unwrap();
    vec![
        None,
        codec(Code::Int8, Code::Int8),
        codec(Code::Int4, Code::E4m3),
        codec(Code::F16, Code::Int4),
        codec(Code::Int3, Code::Int2),
        codec(Code::Mxfp4, Code::Nvfp4),
        Some(Codec::new(Coding::new(Code::E5m2).map(narrow), Coding::new(Code::Int8))),
    ]
}

fn configs() -> impl Strategy<Value = CacheConfig> {
    let dtype = || prop::sample::select(&Dtype::ALL[..]);
    let shards = prop::sample::select(vec![
        ShardMap::ONE,
        ShardMap::xor(8, 8, 4).unwrap(),
        ShardMap::xor(1, 8, 8).unwrap(),
        ShardMap::sum(3).unwrap(),
    ]);
    let shape = (1u32..4, 1u32..4, prop::sample::select(vec![20u32, 33]), dtype(), dtype());
    let policy = (1u32..90, 0u32..70, 0u32..50, prop::sample::select(vec![1u32, 2, 3, 8]));
    let windows = prop::option::of(1u32..300);
    let picks = (prop::sample::select(codecs()), prop::sample::select(codecs()), windows);
    (shape, policy, shards, picks).prop_map(|(shape, policy, shards, (all, second, window))| {
        let (kv_heads, group, v_dim, k, v) = shape;
        let layer = LayerShape::new(kv_heads, kv_heads * group, 20, k).values(v_dim, v);
        let (ring, rollback, sinks, experts) = policy;
        let mut config = CacheConfig::new(vec![layer, layer.window(window)], 1 << 26)
            .ring(ring)
            .rollback(rollback)
            .sinks(sinks)
            .experts(experts, experts.min(2))
            .shards(shards);
        if let Some(codec) = all {
            config = config.compress(codec);
        }
        if let Some(codec) = second {
            config = config.compress_head(1, 0, codec);
        }
        config
    })
}

proptest! {
    #![proptest_config(pikv_test::cases(48, 48))]

    /// The forecast is exact to the byte and the shard, at every length, for any configuration.
    #[test]
    fn bytes_are_the_allocators(config in configs(), steps in prop::collection::vec(1u32..40, 1..30)) {
        let planner = Planner::new(config.clone()).unwrap();
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        holds(&cache, &sequence, &planner.forecast(&Load::new(0)).unwrap());
        for n in steps {
            feed(&cache, &mut sequence, n);
            holds(&cache, &sequence, &planner.forecast(&Load::new(sequence.next_position().0)).unwrap());
        }
    }

    /// The forecast is exact too with the oldest pages evicted, and for several sequences.
    #[test]
    fn bytes_of_what_stays(config in configs(), len in 1u32..700, share in 0.0f64..1.2) {
        let planner = Planner::new(config.clone()).unwrap();
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, len);
        let asked = (f64::from(len) * share) as u32;
        let load = Load::new(len).resident(asked);
        match planner.forecast(&load) {
            Err(error) => {
                let least = len.min(cache.config().ring)
                    + len.saturating_sub(cache.config().ring).min(cache.store(0).unwrap().sinks);
                prop_assert_eq!(error, PlanError::Resident { asked, least });
                prop_assert!(asked < least);
                prop_assert!(planner.forecast(&load.resident(least)).is_ok());
            }
            Ok(forecast) => {
                evict(&cache, &mut sequence, asked);
                holds(&cache, &sequence, &forecast);
                let three = planner.forecast(&load.sequences(3)).unwrap();
                prop_assert_eq!(three.bytes, 3 * forecast.bytes);
                prop_assert_eq!(three.work.bytes, 3 * forecast.work.bytes);
                prop_assert_eq!(three.work.calls, forecast.work.calls);
            }
        }
    }
}

#[test]
fn sequences_add_up() {
    let codec = codecs().remove(2).unwrap();
    let layer = LayerShape::new(2, 4, 64, Dtype::Bf16).values(64, Dtype::F32);
    let config = CacheConfig::new(vec![layer; 3], 1 << 26)
        .ring(64)
        .experts(4, 2)
        .shards(ShardMap::sum(2).unwrap())
        .compress(codec);
    let cache = Cache::new(config.clone()).unwrap();
    let mut sequences = [cache.sequence(), cache.sequence(), cache.sequence()];
    sequences.iter_mut().for_each(|sequence| feed(&cache, sequence, 555));
    let all = Planner::new(config).unwrap().forecast(&Load::new(555).sequences(3)).unwrap();
    assert_eq!((all.bytes, all.shards), (cache.usage().taken, cache.usage().shards));
}

#[test]
fn what_does_not_fit() {
    let layer = OLMOE_1B_7B.layer(Dtype::Bf16, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer; 2], 8 << 20).ring(64).experts(4, 2);
    let planner = Planner::new(config.clone()).unwrap();
    let load = Load::new(4096).sequences(2);
    let error = planner.check(&load).unwrap_err();
    let PlanError::Budget { sequences: 2, len: 4096, needed, budget, fits } = error else {
        panic!("{error}");
    };
    assert_eq!((needed, budget), (planner.forecast(&load).unwrap().bytes, 8 << 20));
    assert!(fits > 0);
    planner.check(&Load::new(fits).sequences(load.sequences)).unwrap();
    assert!(planner.forecast(&Load::new(fits + 1).sequences(load.sequences)).unwrap().bytes > budget);
    assert!(error.to_string().contains(&format!("2 x {fits} tokens fit")), "{error}");
    // And it fits in a cache, with room for pages taken during steps.
    let mut roomy = config;
    roomy.budget += 16 << 20;
    let cache = Cache::new(roomy).unwrap();
    let mut two = [cache.sequence(), cache.sequence()];
    for sequence in &mut two {
        (0..fits).step_by(32).for_each(|first| feed(&cache, sequence, 32.min(fits - first)));
    }
    assert!(cache.usage().taken <= budget);

    let len = u32::MAX;
    assert_eq!(planner.forecast(&Load::new(len)), Err(PlanError::Length { len }));
    let empty = Planner::new(CacheConfig::new(Vec::new(), 1)).unwrap_err();
    assert_eq!(empty, PlanError::Cache(Error::Config(ConfigError::NoLayers)));
}

fn samples(constants: [f64; 3], works: &[[u64; 3]]) -> Vec<Sample> {
    let sample = |&[calls, bytes, flops]: &[u64; 3]| {
        let terms = [calls, bytes, flops].into_iter().zip(constants);
        Sample::new(Work::new(calls, bytes, flops), terms.map(|(n, c)| n as f64 * c).sum())
    };
    works.iter().map(sample).collect()
}

const WORKS: [[u64; 3]; 5] = [
    [32, 128 << 20, 400_000_000],
    [4, 130 << 20, 3_000_000_000],
    [1, 134 << 20, 500_000_000],
    [30, 100 << 20, 50_000_000],
    [8, 1 << 20, 9_000_000],
];

fn near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

#[test]
fn constants_are_found() {
    let fit = StepTime::fit(&samples([3e-6, 1e-10, 2e-11], &WORKS)).unwrap();
    assert!(near(fit.t0, 3e-6) && near(fit.beta, 1e10) && near(fit.flops, 5e10), "{fit:?}");
    assert!(fit.residual < 1e-9 && fit.worst < 1e-9, "{fit:?}");
    let work = Work::new(10, 1 << 30, 1 << 31);
    let seconds = 3e-5 + 1e-10 * (1u64 << 30) as f64 + 2e-11 * (1u64 << 31) as f64;
    assert!(near(fit.seconds(&work), seconds));
    // A missing term costs nothing.
    let fit = StepTime::fit(&samples([0.0, 1e-10, 0.0], &WORKS)).unwrap();
    assert!(fit.t0.abs() < 1e-15 && near(fit.beta, 1e10), "{fit:?}");
    assert!(near(fit.seconds(&work), 1e-10 * (1u64 << 30) as f64));
    // Bytes and flops that are proportional: one of them takes it all, and the times are right.
    let works = [[1, 1000, 4000], [2, 3000, 12000], [5, 1000, 4000], [1, 9000, 36000]];
    let fit = StepTime::fit(&samples([1e-6, 1e-9, 1e-10], &works)).unwrap();
    assert!(near(fit.t0, 1e-6) && fit.residual < 1e-9, "{fit:?}");
    assert!(fit.beta.is_infinite() != fit.flops.is_infinite(), "{fit:?}");
}

/// With noise that gives a plain solution constants below 0, no grid of constants beats the fit.
#[test]
fn constants_are_the_best_of_those_that_can_be() {
    let mut state = 7u64;
    let mut unit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    for _ in 0..40 {
        let mut noisy = samples([2e-5 * unit(), 1e-10 * unit(), 1e-11 * unit()], &WORKS);
        noisy.iter_mut().for_each(|s| s.seconds = s.seconds.max(1e-5) * (0.5 + unit()));
        let fit = StepTime::fit(&noisy).unwrap();
        let loss = |t: &StepTime| {
            let square = |s: &Sample| ((t.seconds(&s.work) - s.seconds) / s.seconds).powi(2);
            (noisy.iter().map(square).sum::<f64>() / noisy.len() as f64).sqrt()
        };
        assert!((loss(&fit) - fit.residual).abs() < 1e-9);
        let worst = noisy.iter().map(|s| ((fit.seconds(&s.work) - s.seconds) / s.seconds).abs());
        assert!((worst.fold(0.0, f64::max) - fit.worst).abs() < 1e-9);
        assert!(fit.t0 >= 0.0 && fit.beta > 0.0 && fit.flops > 0.0, "{fit:?}");
        let around =
            |x: f64, least: f64| [0.0, 0.3, 0.9, 0.99, 1.0, 1.01, 1.1, 3.0].map(|f| x.max(least) * f);
        for t0 in around(fit.t0, 1e-6) {
            for slow in around(fit.beta.recip(), 1e-12) {
                for work in around(fit.flops.recip(), 1e-13) {
                    let mut other = fit;
                    (other.t0, other.beta, other.flops) = (t0, slow.recip(), work.recip());
                    assert!(loss(&other) >= fit.residual - 1e-9, "{other:?} beats {fit:?}");
                }
            }
        }
    }
}

#[test]
fn samples_that_say_nothing() {
    let good = samples([1e-6, 1e-10, 1e-11], &WORKS);
    assert_eq!(StepTime::fit(&good[..2]), Err(PlanError::Samples { got: 2 }));
    for (calls, seconds) in [(0, 1.0), (1, 0.0), (1, -1.0), (1, f64::INFINITY)] {
        let mut bad = good.clone();
        bad[1] = Sample::new((bad[1].work).calls(calls), seconds);
        assert_eq!(StepTime::fit(&bad), Err(PlanError::Sample { index: 1, calls, seconds }));
    }
    let mut bad = good;
    bad[0].seconds = f64::NAN;
    assert!(matches!(StepTime::fit(&bad), Err(PlanError::Sample { index: 0, .. })));
}

/// A calibration does the same work every time; only its times are the machine's.
#[test]
fn a_small_calibration() {
    let probe = || {
        let mut probe = Probe::default();
        probe.contexts = vec![100, 700];
        probe.groups = vec![1, 4];
        (probe.kv_heads, probe.head_dim) = (2, 32);
        (probe.working_set, probe.repeats) = (1 << 20, 3);
        probe.codec = codecs()[1].clone();
        probe
    };
    let [one, two] = [(); 2].map(|()| calibrate(&probe()).unwrap());
    let work = |samples: &[Sample]| samples.iter().map(|s| s.work).collect::<Vec<_>>();
    assert_eq!(work(&one.samples), work(&two.samples));
    assert_eq!(one.samples.len(), 4);
    assert!(one.samples.iter().all(|s| s.seconds > 0.0 && s.work.bytes >= 1 << 19));
    assert_eq!(one.samples[0].work.flops * 4, one.samples[1].work.flops);
    assert_eq!(one.time, StepTime::fit(&one.samples).unwrap());
    assert!(one.time.residual < 1.0 && one.threads >= 1, "{one:?}");

    let refused = |change: fn(&mut Probe)| {
        let mut probe = probe();
        change(&mut probe);
        calibrate(&probe).unwrap_err()
    };
    assert_eq!(refused(|p| p.repeats = 0), PlanError::Zero { name: "repeats" });
    assert_eq!(refused(|p| p.working_set = 0), PlanError::Zero { name: "working_set" });
    assert_eq!(refused(|p| p.contexts[1] = 0), PlanError::Zero { name: "context" });
    assert_eq!(refused(|p| p.contexts.clear()), PlanError::Samples { got: 0 });
    assert!(matches!(
        refused(|p| p.groups[0] = 0),
        PlanError::Cache(Error::Config(ConfigError::Heads { .. }))
    ));
}
