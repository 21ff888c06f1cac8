//! Heads that share budgets, heads that keep everything, layers with budgets of their own; and token choices by the papers' definitions.

use crate::model::{Def, Model};
use crate::setup::{Kind, Row, bits, config, eviction, held, row, run};
use pikv::policy::{
    Budget, ChunkKv, Chunks, Duo, Eviction, FastV, H2o, KeyNorm, PyramidKv, StreamingLlm, fast_v,
};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Sequence};
use std::collections::BTreeSet;
use std::num::NonZeroU32;

fn rows(config: &CacheConfig, from: u32, n: u32) -> Vec<Row> {
    (from..from + n).map(|p| row(config, Kind::Noise, u64::from(p))).collect()
}

fn feed(cache: &Cache, sequence: &mut Sequence, rows: &[Row]) -> Vec<u32> {
    let mut outs = Vec::new();
    run(cache, sequence, rows, |step, l, q, size| {
        let mut out = vec![0.0; size];
        step.attend(l, q, &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
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
    for (bad, line, text) in
        [("0.1\ninf", 2, "inf"), ("x 1", 1, "x"), ("1\n\n0.5 -inf", 3, "-inf"), ("nan", 1, "nan")]
    {
        let error = Duo::parse(bad, 20).unwrap_err();
        assert_eq!((error.line, error.text.as_str()), (line, text));
        assert!(error.to_string().starts_with(&format!("line {line}: {text:?} ")), "{error}");
    }
    let cache = Cache::new(config(2).evict(duo.eviction().batch(1))).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &rows(cache.config(), 0, 70));
    let streaming = (0..2).chain(52..70).collect();
    for l in 0..2 {
        assert_eq!(held(&sequence, l, 0), (0..70).collect());
        assert_eq!(held(&sequence, l, 1), streaming);
    }
    // All gates open: bits of a cache without a policy.
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
    let budgets = PyramidKv::new(40).beta(4.0).budgets(layers).unwrap();
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
        step.attend(l, q, &Attend::new(0.5), AttendOutput::new(&mut out).mass(&mut mass)).unwrap();
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
    let keep = ChunkKv::new(5, 30).keep(&scores[..55]).unwrap();
    let want = (0..55).filter(|p| keep[*p as usize]).chain(55..60).collect();
    let rule = eviction(Box::new(Chunks::new(H2o, NonZeroU32::new(5).unwrap())), Budget::Tokens(35)).batch(1);
    let cache = Cache::new(config.evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &all);
    assert_eq!(held(&sequence, 0, 0), want);
}

#[test]
fn the_least_attended_go_as_fast_v_has_it() {
    // Two KV heads, so that the mean over heads is one that no head has.
    let mut config = CacheConfig::new(vec![crate::setup::shape(2, 2, 4, 3); 4], 1 << 20)
        .backend(pikv_test::backend::backend())
        .ring(8);
    config.sinks = Some(4);
    let all: Vec<Row> = (0..60).map(|id| row(&config, Kind::Noise, id)).collect();
    // Mean over the rows that could see a token and the four query heads of layer 1, in f64.
    let received: Vec<f64> = (0..60)
        .map(|p| {
            let of = |h: usize| (p..60).map(move |t| (h, t));
            (0..4).flat_map(of).map(|(h, t)| weight(&all, 1, h, t, p)).sum::<f64>()
                / f64::from(4 * (60 - p as u32))
        })
        .collect();
    let received: Vec<f32> = received.into_iter().map(|x| x as f32).collect();
    let fast = FastV::new(0.5).window(8);
    let keep = fast.keep(2, &received).unwrap();
    assert_eq!(keep.iter().filter(|k| **k).count(), 36);
    let want: BTreeSet<u32> = (0..60).filter(|p| keep[*p as usize]).collect();
    for (layer, rule) in fast_v(4, 2, |policy| Eviction::new(policy, Budget::Tokens(36)).batch(1)).unwrap() {
        config = config.evict_layer(layer, rule);
    }
    let cache = Cache::new(config).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &all);
    for l in 0..2 {
        assert_eq!(sequence.resident(l, 0).unwrap().0, 60);
    }
    for (l, head) in [(2, 0), (2, 1), (3, 0), (3, 1)] {
        assert_eq!(held(&sequence, l, head), want, "layer {l}, head {head}");
    }
    // Further tokens one by one: later layers and heads hold the same.
    for id in 60..90 {
        feed(&cache, &mut sequence, &[row(cache.config(), Kind::Noise, id)]);
        let first = held(&sequence, 2, 0);
        assert_eq!(first.len(), 36);
        assert!([(2, 1), (3, 0), (3, 1)].iter().all(|(l, head)| held(&sequence, *l, *head) == first), "{id}");
    }
    for from in [0, 4, 9] {
        let refused = fast_v(4, from, |policy| Eviction::new(policy, Budget::Tokens(36))).unwrap_err();
        assert!(refused.to_string().contains("below the number of layers"), "{refused}");
    }
}

/// The weight of token `p` for query head `h` of row `t`, in a layer of two query heads a KV head.
fn weight(all: &[Row], l: usize, h: usize, t: usize, p: usize) -> f64 {
    let q = &all[t].q[l][h * 4..][..4];
    let logit = |s: usize| {
        let k = &all[s].k[l][h / 2 * 4..][..4];
        0.5 * q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
    };
    let top = (0..=t).map(logit).fold(f64::MIN, f64::max);
    let sum: f64 = (0..=t).map(|s| (logit(s) - top).exp()).sum();
    (logit(p) - top).exp() / sum
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
