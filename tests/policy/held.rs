//! Tokens held by heads after every step, compared with the slow model.

use crate::model::{ALL, Def, Model};
use crate::setup::{Kind, Row, config, eviction, held, row, run};
use pikv::policy::{Budget, Candidates, Policy, StreamingLlm};
use pikv::shape::PAGE;
use pikv::shard::ShardMap;
use pikv::{Cache, Dtype, Layout};
use proptest::prelude::*;
use std::collections::BTreeSet;

const KINDS: [Kind; 4] = [Kind::Noise, Kind::Equal, Kind::Hot, Kind::HotExpert];

#[test]
fn sixteen_slots_and_forty_tokens() {
    for def in ALL {
        for kind in KINDS {
            let mut model = Model::new(config(2), def, Budget::Tokens(16), |e| e.batch(1));
            for _ in 0..40 {
                model.step(1, kind, 1);
            }
            let kept = crate::setup::held(&model.sequence, 1, 0);
            assert_eq!(kept.len(), 16);
            let always: BTreeSet<u32> = (0..2).chain(36..40).collect();
            assert!(kept.is_superset(&always));
            if def == Def::Streaming {
                assert_eq!(kept, (0..2).chain(26..40).collect());
            }
        }
    }
}

#[test]
fn heavy_hitters_by_hand() {
    // Two layers of scores would hide a slip: one head, one query head, victims by sums written out.
    use crate::setup::{Row, attention, held, run, shape};
    use pikv::policy::{Eviction, H2o};
    use pikv::{Attend, AttendOutput, Cache, CacheConfig};
    let config =
        CacheConfig::new(vec![shape(1, 1, 2, 2)], 1 << 20).backend(pikv_test::backend::backend()).ring(2);
    let cache = Cache::new(config.evict(Eviction::new(H2o, Budget::Tokens(5)).batch(1))).unwrap();
    let mut sequence = cache.sequence();
    let (mut mass, mut kept) = ([0.0f64; 40], Vec::<u32>::new());
    let keys: Vec<Vec<f32>> = (0..40).map(|p| crate::setup::noise(p, 2)).collect();
    let mut victims = Vec::new();
    for p in 0..40u32 {
        let q = crate::setup::noise(1000 + u64::from(p), 2);
        let row = Row {
            k: vec![keys[p as usize].clone()],
            v: vec![vec![1.0; 2]],
            q: vec![q.clone()],
            experts: vec![vec![0]],
        };
        run(&cache, &mut sequence, &[row], |step, l, q, size| {
            step.attend(l, q, &Attend::new(6.0), AttendOutput::new(&mut vec![0.0; size])).unwrap();
        });
        kept.push(p);
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let tokens: Vec<(Vec<f64>, Vec<f64>)> =
            kept.iter().map(|p| (wide(&keys[*p as usize]), vec![1.0])).collect();
        let (_, weights) = attention(&wide(&q), &tokens, 6.0);
        kept.iter().zip(weights).for_each(|(p, w)| mass[*p as usize] += w);
        if kept.len() > 5 {
            let least = (0..kept.len() - 2)
                .min_by(|a, b| mass[kept[*a] as usize].total_cmp(&mass[kept[*b] as usize]));
            victims.push(kept.remove(least.unwrap()));
        }
        assert_eq!(held(&sequence, 0, 0), kept.iter().copied().collect());
    }
    assert_eq!(victims.len(), 35);
    assert_ne!(victims, (0..35).collect::<Vec<u32>>(), "not by age alone");
}

#[test]
fn long_runs_are_put_together_and_read_back() {
    for (def, experts) in
        [(Def::H2o, 1), (Def::H2o, 3), (Def::KeyNorm, 4), (Def::Streaming, 2), (Def::Lru, 3), (Def::H2o, 20)]
    {
        let mut config = config(1).experts(experts, experts.min(2)).shards(ShardMap::sum(2).unwrap());
        if experts > 1 {
            config.layers[0].layout = Layout::new(5, Dtype::Bf16).values(3, Dtype::F16);
        }
        let mut model = Model::new(config, def, Budget::Tokens(100), |e| e);
        for i in 0..30 {
            model.step(1 + i * 7 % 19, Kind::Noise, 3);
            model.check_contents();
            let pages = model.sequence.pages(0, 0).unwrap().count() as u32;
            // 96 tokens in pages that are full to 4/5 and one part page, and one more page that a run need not put together.
            assert!(pages <= 96 * 5 / (4 * PAGE) + 2 + 2 * experts.min(8), "{def:?}: {pages} pages");
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    def: Def,
    kind: Kind,
    experts: (u32, u32),
    slack: u32,
    budget: Budget,
    batch: Option<u32>,
    by_page: bool,
    adaptive: Option<f32>,
    pins: Vec<(u32, u32)>,
    steps: Vec<(u32, u32)>,
    salt: u64,
}

fn budget() -> impl Strategy<Value = Budget> {
    prop_oneof![
        (3u32..90).prop_map(Budget::Tokens),
        (3u32..90, 3u32..90).prop_map(|(a, b)| Budget::Layers([a, b].into())),
        proptest::array::uniform4(prop_oneof![3u32..90, Just(Budget::ALL)])
            .prop_map(|[a, b, c, d]| Budget::Heads([vec![a, b], vec![c, d]].into())),
        (1u32..=100).prop_map(|n| Budget::Share(n as f32 / 100.0)),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let first = (
        prop::sample::select(&ALL[..]),
        prop::sample::select(&KINDS[..]),
        prop::sample::select(&[(1, 1), (3, 2), (2, 2), (20, 2)][..]),
        prop::sample::select(&[0u32, 1, 4, 8][..]),
    );
    let rule = (
        budget(),
        prop::option::of(1u32..20),
        any::<bool>(),
        prop::option::of(0f32..=1.0),
        prop::collection::vec((0u32..60, 1u32..6), 0..2),
    );
    let steps = prop::collection::vec((1u32..12, 0u32..9), 3..20);
    (first, rule, steps, 0u64..1000).prop_map(|((def, kind, experts, slack), rule, steps, salt)| {
        let (budget, batch, by_page, adaptive, pins) = rule;
        let adaptive = adaptive.filter(|_| !by_page);
        Case { def, kind, experts, slack, budget, batch, by_page, adaptive, pins, steps, salt }
    })
}

fn play(case: &Case) {
    let config = config(2).experts(case.experts.0, case.experts.1).rollback(case.slack);
    let mut model = Model::new(config, case.def, case.budget.clone(), |mut e| {
        e.batch = case.batch;
        e.by_page = case.by_page;
        e.adaptive = case.adaptive;
        e
    });
    case.pins.iter().for_each(|(from, n)| model.pin(*from..from + n));
    for (i, (n, back)) in case.steps.iter().enumerate() {
        model.step(*n, case.kind, case.salt + i as u64);
        model.rollback((*back).min(case.slack).min(*n));
    }
    model.check_contents();
    let cache = model.cache.clone();
    let mut fork = model.fork();
    fork.step(5, case.kind, 7);
    model.step(3, case.kind, 8);
    fork.step(9, case.kind, 9);
    fork.check_contents();
    drop(fork);
    model.step(2, case.kind, 10);
    model.check_contents();
    drop(model);
    assert_eq!(cache.usage().shards.iter().sum::<u64>(), 0);
}

/// StreamingLLM by a ranking of all tokens.
#[derive(Debug)]
struct RankedByAge;

impl Policy for RankedByAge {
    fn name(&self) -> &str {
        "StreamingLLM, ranked"
    }

    fn sinks(&self) -> u32 {
        4
    }

    fn rank(&self, _: &Candidates<'_>, utility: &mut [f32]) {
        utility.fill(0.0);
    }
}

/// Streams so long that whole pages are the oldest tokens, of one run and of several, with pinned tokens within a page and over its end:
/// what the ranking of all tokens evicts.
#[test]
fn whole_pages_of_the_oldest_tokens() {
    type Pins = &'static [(u32, u32)];
    let cases: [((u32, u32), Pins); 5] = [
        ((1, 1), &[]),
        ((1, 1), &[(50, 40), (120, 2)]),
        ((3, 1), &[]),
        ((3, 2), &[(70, 200)]),
        ((20, 1), &[]),
    ];
    for ((experts, top_k), pins) in cases {
        for batch in [1, 37, 150] {
            let with = |policy: Box<dyn Policy>| {
                let config = config(1).experts(experts, top_k);
                let cache =
                    Cache::new(config.evict(eviction(policy, Budget::Tokens(300)).batch(batch))).unwrap();
                let mut sequence = cache.sequence();
                pins.iter().for_each(|(from, n)| sequence.pin(*from..from + n));
                let rows =
                    |at: u64| (20 * at..20 * at + 20).map(|p| row(cache.config(), Kind::Noise, p)).collect();
                let after = |at: u64| {
                    let rows: Vec<Row> = rows(at);
                    run(&cache, &mut sequence, &rows, |_, _, _, _| ());
                    [0, 1].map(|h| held(&sequence, 0, h))
                };
                (0..45).map(after).collect::<Vec<_>>()
            };
            let expected = with(Box::new(RankedByAge));
            assert!(expected.last().unwrap().iter().all(|held| held.len() <= 300));
            assert_eq!(with(Box::new(StreamingLlm)), expected, "{experts} experts, pins {pins:?}, {batch}");
        }
    }
}

proptest! {
    #![proptest_config(pikv_test::cases(96, 96))]
    #[test]
    fn random_runs(case in case()) {
        play(&case);
    }
}
