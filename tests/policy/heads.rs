//! Heads that share budgets, heads that keep everything, layers with budgets of their own; and tokens by the definitions of papers.

use crate::model::{Def, Model};
use crate::setup::{Kind, Row, bits, config, eviction, held, row, run};
use pikv::codec::{ChunkKv, FastV, PyramidKv};
use pikv::policy::{Budget, Chunks, Duo, Eviction, H2o, KeyNorm, StreamingLlm};
use pikv::{Attend, Cache, CacheConfig, Output, Sequence};

fn rows(config: &CacheConfig, from: u32, n: u32) -> Vec<Row> {
    (from..from + n).map(|p| row(config, Kind::Noise, u64::from(p))).collect()
}

fn feed(cache: &Cache, sequence: &mut Sequence, rows: &[Row]) -> Vec<u32> {
    let mut outs = Vec::new();
    run(cache, sequence, rows, |step, l, q, size| {
        let mut out = vec![0.0; size];
        step.attend(l, q, &Attend::new(0.5), Output::new(&mut out)).unwrap();
        outs.extend(bits(&out));
    });
    outs
}

#[test]
fn heads_share_a_budget_above_their_floors() {
    for (floor, batch) in [(0.0, 1), (0.2, 1), (0.5, 12), (1.0, 1), (1.0, 20)] {
        let mut model =
            Model::new(config(1), Def::H2o, Budget::Tokens(46), |e| e.batch(batch).adaptive(floor));
        let mut apart = 0;
        for i in 0..40 {
            // Head 1 has the larger scores on top: its keys are longer.
            model.step(1 + i % 7, Kind::Hot, 1);
            let counts = [0, 1].map(|h| model.sequence.resident(0, h).unwrap().0);
            let full = model.len() > 60;
            let total: u32 = counts.iter().sum();
            assert!(total <= 92, "{counts:?}");
            if full {
                assert!(total > 92 - batch, "{counts:?}");
                let target = f64::from(81 - batch) / 80.0;
                let least = 6 + (40.0 * f64::from(floor) * target) as u32;
                assert!(counts.iter().all(|n| *n >= least), "{counts:?}, floor {floor}, batch {batch}");
                apart = apart.max(counts[0].abs_diff(counts[1]));
            }
        }
        if floor == 0.0 {
            assert!(apart > 0, "nobody gave anything up");
        }
    }
}

#[test]
fn pinned_tokens_count_in_shared_budgets_and_stay() {
    for adaptive in [None, Some(0.0), Some(0.2), Some(1.0)] {
        let mut model = Model::new(config(2).rollback(4), Def::KeyNorm, Budget::Tokens(40), |mut e| {
            e.adaptive = adaptive;
            e.batch(1)
        });
        model.pin(10..30);
        model.pin(50..51);
        for i in 0..30 {
            model.step(3, Kind::Noise, i);
            let counts = [0, 1].map(|h| model.sequence.resident(0, h).unwrap().0);
            assert!(counts.iter().sum::<u32>() <= 80);
            for h in 0..2 {
                let kept = held(&model.sequence, 1, h);
                assert!((10..30).chain(50..51).filter(|p| *p < model.len()).all(|p| kept.contains(&p)));
            }
        }
        // More is pinned than a head may hold: it keeps that, and nothing else but sinks and ring.
        model.pin(60..90);
        model.step(1, Kind::Noise, 1);
        model.sequence.unpin();
        model.pins.clear();
        model.step(1, Kind::Noise, 2);
        assert!([0, 1].map(|h| model.sequence.resident(0, h).unwrap().0).iter().sum::<u32>() <= 80);
    }
}

#[test]
fn retrieval_heads_keep_everything() {
    let pattern = "1.0\t0.2\n0.5, 0.49\n";
    let duo = Duo::parse(pattern, 20).unwrap();
    assert_eq!(duo.gates, [[1.0, 0.2], [0.5, 0.49]]);
    for (bad, line) in
        [("0.1\ninf", "line 2"), ("x 1", "line 1"), ("1\n\n0.5 -inf", "line 3"), ("nan", "line 1")]
    {
        let error = Duo::parse(bad, 20).unwrap_err();
        assert!(error.starts_with(line), "{error}");
    }
    let cache = Cache::new(config(2).evict(duo.eviction().batch(1))).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &rows(cache.config(), 0, 70));
    let streaming = (0..2).chain(52..70).collect();
    for l in 0..2 {
        assert_eq!(held(&sequence, l, 0), (0..70).collect());
        assert_eq!(held(&sequence, l, 1), streaming);
    }
    // All gates open: to the bit what a cache without a policy gives.
    let open = Duo::new(vec![vec![1.0; 2]; 2], 20);
    let duo = Cache::new(config(2).evict(open.eviction())).unwrap();
    let plain = Cache::new(config(2)).unwrap();
    let (mut a, mut b) = (duo.sequence(), plain.sequence());
    for n in [40, 1, 1, 30, 5, 64, 1] {
        let rows = rows(plain.config(), a.next_position().0, n);
        assert_eq!(feed(&duo, &mut a, &rows), feed(&plain, &mut b, &rows));
    }
    // Gates of another model are refused.
    let narrow = Duo::new(vec![vec![1.0; 2]], 20);
    assert!(Cache::new(config(2).evict(narrow.eviction())).is_err());
}

#[test]
fn budgets_of_a_pyramid() {
    let layers = 4;
    let budgets = PyramidKv { capacity: 40, window: 8, beta: 4.0 }.budgets(layers).unwrap();
    assert!(budgets.is_sorted_by(|a, b| a > b));
    let rule = Eviction::new(H2o, Budget::Layers(budgets.clone().into())).batch(1);
    let cache = Cache::new(config(layers as usize).evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &rows(cache.config(), 0, 120));
    for (l, budget) in budgets.iter().enumerate() {
        assert_eq!(sequence.resident(l, 1).unwrap().0, *budget);
    }
    assert_eq!(budgets.iter().sum::<u32>(), 40 * layers);
}

/// Score of every token by H2O: the whole prompt in one step, and the mass that attention itself reports.
fn prompt(config: &CacheConfig, n: u32) -> (Vec<Row>, Vec<f32>) {
    let plain = Cache::new(config.clone()).unwrap();
    let mut sequence = plain.sequence();
    let all = rows(config, 0, n);
    let mut scores = vec![0.0; n as usize];
    run(&plain, &mut sequence, &all, |step, l, q, size| {
        let (mut out, mut mass) = (vec![0.0; size], Vec::new());
        step.attend(l, q, &Attend::new(0.5), Output::new(&mut out).mass(&mut mass)).unwrap();
        for page in mass.iter().filter(|page| l == 0 && page.kv_head == 0) {
            let at = page.page.ordinal as usize * 32;
            for (lane, x) in page.tokens.iter().enumerate().take(n as usize - at) {
                scores[at + lane] += x;
            }
        }
    });
    (all, scores)
}

#[test]
fn whole_chunks_go_as_chunk_kv_has_it() {
    // 60 tokens, none of them sinks, the ring's 5 exempt: 11 chunks of 5, of which 6 fit.
    let config = CacheConfig::new(vec![crate::setup::shape(1, 2, 4, 3)], 1 << 20)
        .backend(pikv_test::backend::backend())
        .ring(5);
    let (all, scores) = prompt(&config, 60);
    let keep = ChunkKv { chunk: 5, budget: 30 }.keep(&scores[..55]).unwrap();
    let want = (0..55).filter(|p| keep[*p as usize]).chain(55..60).collect();
    let rule = eviction(Box::new(Chunks::new(H2o, 5)), Budget::Tokens(35)).batch(1);
    let cache = Cache::new(config.evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &all);
    assert_eq!(held(&sequence, 0, 0), want);
}

#[test]
fn the_least_attended_go_as_fast_v_has_it() {
    let mut config = CacheConfig::new(vec![crate::setup::shape(1, 2, 4, 3); 4], 1 << 20)
        .backend(pikv_test::backend::backend())
        .ring(8);
    config.sinks = 4;
    let (all, scores) = prompt(&config, 60);
    // Mean over the rows that could see a token, and the two query heads.
    let received: Vec<f32> = (0..60).map(|p| scores[p] / (2 * (60 - p)) as f32).collect();
    let fast = FastV { ratio: 0.5, from: 2, sinks: 4, window: 8 };
    let keep = fast.keep(2, &received).unwrap();
    assert_eq!(keep.iter().filter(|k| **k).count(), 36);
    // Layers 0 and 1 keep all; of layer 2 the rule is asked for what FastV keeps of these 60. It ranks by its own layer's
    // attention, so the same keys and queries are given to each.
    let rule = Eviction::new(pikv::policy::FastVReceived, Budget::Tokens(36)).batch(1);
    let cache = Cache::new(config.evict_layer(2, rule.clone()).evict_layer(3, rule)).unwrap();
    let mut sequence = cache.sequence();
    let same: Vec<Row> = all
        .into_iter()
        .map(|mut row| {
            row.k = vec![row.k[0].clone(); 4];
            row.q = vec![row.q[0].clone(); 4];
            row
        })
        .collect();
    feed(&cache, &mut sequence, &same);
    for l in 0..2 {
        assert_eq!(sequence.resident(l, 0).unwrap().0, 60);
    }
    for l in 2..4 {
        assert_eq!(held(&sequence, l, 0), (0..60).filter(|p| keep[*p as usize]).collect());
    }
}

#[test]
fn layers_with_rules_of_their_own() {
    let config = config(3)
        .evict(Eviction::new(StreamingLlm, Budget::Tokens(30)).batch(1))
        .evict_layer(1, Eviction::new(KeyNorm, Budget::Share(0.5)).batch(1));
    let cache = Cache::new(config).unwrap();
    let mut sequence = cache.sequence();
    for _ in 0..50 {
        let rows = rows(cache.config(), sequence.next_position().0, 2);
        feed(&cache, &mut sequence, &rows);
    }
    assert_eq!(held(&sequence, 0, 0), (0..2).chain(72..100).collect());
    assert_eq!(held(&sequence, 0, 0), held(&sequence, 2, 1));
    assert_eq!(sequence.resident(1, 0).unwrap().0, 50);
    // A tenth of 100 is 10, although 0.1 in f32 is more than a tenth.
    let rule = Eviction::new(KeyNorm, Budget::Share(0.1)).batch(1);
    let cache = Cache::new(crate::setup::config(1).evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &rows(cache.config(), 0, 100));
    assert_eq!(sequence.resident(0, 0).unwrap().0, 10);
}
