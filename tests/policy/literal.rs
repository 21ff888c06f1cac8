//! The paper's forms of QUEST and AdaKV, and expected attention, compared with their definitions in f64.

use crate::back::no_trace;
use crate::setup::{Event, Kind, Log, Row, Spy, config, eviction, held, noise, rope, row, run, turned};
use pikv::policy::{
    AdaKvLit, Budget, Candidates, Dense, Eviction, ExpectedAttention, HeadSeen, KeyNorm, MassFeedback,
    Policy, QuestLit, QuestLitError, Seen, Token,
};
use pikv::rules::Hits;
use pikv::shape::LANES;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Sequence};
use safetensors::{Dtype, tensor::TensorView};
use std::collections::BTreeSet;

fn rows(config: &CacheConfig, from: u32, n: u32) -> Vec<Row> {
    (from..from + n).map(|p| row(config, Kind::Noise, u64::from(p))).collect()
}

fn feed(cache: &Cache, sequence: &mut Sequence, rows: &[Row]) {
    run(cache, sequence, rows, |step, l, q, size| {
        step.attend(l, q, &Attend::new(0.5), AttendOutput::new(&mut vec![0.0; size])).unwrap();
    });
}

/// The tokens kept of 0..n: sinks 0 and 1, a ring of 4, and the best others by utility.
fn best(utility: impl Fn(u32) -> f64, n: u32, budget: usize) -> BTreeSet<u32> {
    let mut order: Vec<u32> = (2..n - 4).collect();
    order.sort_by(|a, b| utility(*b).total_cmp(&utility(*a)));
    order.into_iter().take(budget - 6).chain([0, 1]).chain(n - 4..n).collect()
}

fn network(widths: &[usize]) -> Vec<Dense> {
    let layer =
        |(l, w): (usize, &[usize])| Dense::new(noise(l as u64, w[0] * w[1]), noise(99 + l as u64, w[1]));
    widths.windows(2).enumerate().map(layer).collect()
}

fn safetensors(layers: &[Dense]) -> Vec<u8> {
    let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = layers
        .iter()
        .enumerate()
        .flat_map(|(l, layer)| {
            let out = layer.bias.len();
            let weight =
                (format!("layers.{l}.weight"), vec![out, layer.weight.len() / out], bytes(&layer.weight));
            [weight, (format!("layers.{l}.bias"), vec![out], bytes(&layer.bias))]
        })
        .collect();
    let view = |(name, shape, data): &'_ (String, Vec<usize>, Vec<u8>)| {
        (
            name.clone(),
            TensorView::new(Dtype::F32, shape.clone(), Box::leak(data.clone().into_boxed_slice())).unwrap(),
        )
    };
    safetensors::serialize(tensors.iter().map(view), None).unwrap()
}

#[test]
fn a_network_ranks_by_statistics() {
    let layers = network(&[8, 5, 3, 1]);
    let utility = |row: &Row| {
        let mut x = Vec::new();
        for part in [&row.k[0][..4], &row.v[0][..3]] {
            let of: Vec<f64> = part.iter().map(|x| f64::from(*x)).collect();
            x.push(of.iter().sum::<f64>() / of.len() as f64);
            x.push(of.iter().copied().fold(f64::INFINITY, f64::min));
            x.push(of.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            x.push(of.iter().map(|x| x * x).sum::<f64>().sqrt());
        }
        for (l, Dense { weight, bias, .. }) in layers.iter().enumerate() {
            let out = (0..bias.len()).map(|o| {
                let row = &weight[o * x.len()..][..x.len()];
                let y = f64::from(bias[o]) + row.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
                if l + 1 < layers.len() { y.max(0.0) } else { y }
            });
            x = out.collect();
        }
        x[0]
    };
    let policy = QuestLit::new(layers.clone()).unwrap();
    assert_eq!(QuestLit::from_safetensors(&safetensors(&layers)).unwrap(), policy);
    let cache = Cache::new(config(1).evict(Eviction::new(policy, Budget::Tokens(30)).batch(1))).unwrap();
    let mut sequence = cache.sequence();
    let all = rows(cache.config(), 0, 80);
    feed(&cache, &mut sequence, &all);
    assert_eq!(held(&sequence, 0, 0), best(|p| utility(&all[p as usize]), 80, 30));
    // One layer that looks at the key's norm alone is the policy of that name.
    let norm = Dense::new(vec![0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0], vec![0.0]);
    let of = |policy: Box<dyn Policy>| {
        let cache = Cache::new(config(1).evict(eviction(policy, Budget::Tokens(30)))).unwrap();
        let mut sequence = cache.sequence();
        (0..40).for_each(|i| feed(&cache, &mut sequence, &rows(cache.config(), i * 2, 2)));
        [held(&sequence, 0, 0), held(&sequence, 0, 1)]
    };
    assert_eq!(of(Box::new(QuestLit::new(vec![norm]).unwrap())), of(Box::new(KeyNorm)));
}

#[test]
fn networks_that_are_none() {
    use QuestLitError as E;
    assert!(matches!(QuestLit::new(vec![]), Err(E::Empty)));
    assert!(matches!(
        QuestLit::new(network(&[7, 1])),
        Err(E::Shape { layer: 0, weight: 7, bias: 1, wide: 8 })
    ));
    let mut odd = network(&[8, 3, 1]);
    odd[1] = network(&[2, 1]).remove(0);
    assert!(matches!(QuestLit::new(odd), Err(E::Shape { layer: 1, wide: 3, .. })));
    assert!(matches!(QuestLit::new(network(&[8, 2])), Err(E::Outputs { outputs: 2 })));
    let mut bad = network(&[8, 1]);
    bad[0].bias[0] = f32::NAN;
    assert!(matches!(QuestLit::new(bad), Err(E::NotFinite { layer: 0, .. })));
    assert!(matches!(QuestLit::from_safetensors(b"no such file"), Err(E::File(_))));
    let file = safetensors(&network(&[8, 3, 1]));
    let text = |from: &str, to: &str| {
        let at = file.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut file = file.clone();
        file[at..at + to.len()].copy_from_slice(to.as_bytes());
        QuestLit::from_safetensors(&file)
    };
    // A layer is missing; a weight of one dimension.
    assert!(matches!(text("layers.1.bias", "layers.7.bias"), Err(E::File(_))));
    assert!(matches!(text("[3,8]", "[ 24]"), Err(E::Tensor { dimensions: 2, .. })));
}

/// Threshold and hit rate as the definition has them, row by row.
fn thresholds(policy: &AdaKvLit, events: &[Event], head: usize, state: &mut (f64, f64, bool)) {
    for event in events {
        let Event::Head { head: h, hits, misses, asked, .. } = event else { continue };
        if *h != head || hits + misses == 0.0 {
            continue;
        }
        for _ in 0..*asked {
            let hit = f64::from(*hits) / f64::from(hits + misses);
            let (theta, eta, started) = state;
            *eta = if *started { *eta + f64::from(policy.rate) * (hit - *eta) } else { hit };
            *started = true;
            *theta = (*theta - f64::from(policy.gamma) * (f64::from(policy.target) - *eta)).clamp(0.0, 1.0);
        }
    }
}

/// Runs decoding without a budget; hit rates of the last rows, and the threshold at the end.
fn decode(policy: AdaKvLit, tokens: u32) -> (f64, f64) {
    let log = Log::default();
    let rule =
        eviction(Box::new(Spy { of: Box::new(policy), log: log.clone() }), Budget::Tokens(Budget::ALL));
    let cache = Cache::new(config(1).experts(3, 2).hits(Hits::new().every(1)).evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    let (mut state, mut hits) = ((0.0, 0.0, false), Vec::new());
    // Per token: shares and rows, uses and the last.
    let mut words = vec![[0.0f64; 4]; tokens as usize];
    let mut want: BTreeSet<u32> = BTreeSet::new();
    for p in 0..tokens {
        feed(&cache, &mut sequence, &rows(cache.config(), p, 1));
        want.insert(p);
        let events: Vec<Event> = log.lock().unwrap().drain(..).collect();
        words[p as usize][3] = f64::from(p);
        let faded = |from: f64| 2f64.powf(-(f64::from(p) - from) / f64::from(policy.half_life));
        for event in &events {
            if let Event::Seen { head: 0, resident, tokens, .. } = event {
                for (at, mass) in tokens {
                    let w = &mut words[*at as usize];
                    let share = f64::from(*mass) * f64::from(*resident);
                    (w[0], w[1]) = (w[0] + share, w[1] + 2.0);
                    if share >= 2.0 {
                        (w[2], w[3]) = (w[2] * faded(w[3]) + 1.0, f64::from(p));
                    }
                }
            }
        }
        thresholds(&policy, &events, 0, &mut state);
        let now = f64::from(p + 1);
        let utility = |at: u32| {
            let w = words[at as usize];
            let fade = |from: f64| 2f64.powf(-(now - from) / f64::from(policy.half_life));
            let (share, uses) = (w[0] / w[1], w[2] * fade(w[3]));
            let phi = [fade(f64::from(at)), share / (1.0 + share), uses / (1.0 + uses)];
            policy.alpha.iter().zip(phi).map(|(a, phi)| f64::from(*a) * phi).sum::<f64>()
        };
        let kept = held(&sequence, 0, 0);
        for at in want.clone() {
            let may = (2..(p + 1).saturating_sub(4)).contains(&at);
            let goes = may && utility(at) < state.0;
            if goes {
                want.remove(&at);
            }
            // f32 and f64 may differ for a utility at the threshold.
            if goes == kept.contains(&at) {
                assert!(
                    (utility(at) - state.0).abs() < 1e-5,
                    "{at} at {p}: {} under {}",
                    utility(at),
                    state.0
                );
                if kept.contains(&at) {
                    want.insert(at)
                } else {
                    want.remove(&at)
                };
            }
        }
        if let Some(Event::Head { hits: h, misses, .. }) =
            events.iter().find(|e| matches!(e, Event::Head { head: 0, .. }))
            && h + misses > 0.0
        {
            hits.push(f64::from(*h) / f64::from(h + misses));
        }
    }
    let last = &hits[hits.len() - 50..];
    (last.iter().sum::<f64>() / 50.0, state.0)
}

#[test]
fn the_threshold_settles_and_the_papers_sign_runs_away() {
    let policy = AdaKvLit::default().target(0.8).gamma(0.02);
    let (hits, theta) = decode(policy, 500);
    assert!((hits - 0.8).abs() < 0.1, "hit rate {hits}");
    assert!(theta < 0.9, "{theta}");
    // The paper's sign. A head without misses then never evicts,
    let paper = policy.gamma(-0.02);
    assert_eq!(decode(paper, 200), (1.0, 0.0));
    // and one that misses, here because of its budget, ends with sinks and ring, while the corrected sign keeps its tokens.
    let held_in_the_end = |policy: AdaKvLit| {
        let config = config(1).hits(Hits::new().every(1));
        let cache = Cache::new(config.evict(Eviction::new(policy, Budget::Tokens(40)).batch(1))).unwrap();
        let mut sequence = cache.sequence();
        (0..500).for_each(|p| feed(&cache, &mut sequence, &rows(cache.config(), p, 1)));
        held(&sequence, 0, 0).len() + held(&sequence, 0, 1).len()
    };
    // The two heads share 80.
    assert_eq!((held_in_the_end(policy), held_in_the_end(paper)), (80, 12));
}

/// AdaKV-lit with the threshold held at 1, above all utilities, for the first tokens: the head misses nearly all.
#[derive(Debug)]
struct Starved(AdaKvLit, u32);

impl Policy for Starved {
    fn name(&self) -> &str {
        "starved"
    }
    fn feedback(&self) -> MassFeedback {
        self.0.feedback()
    }
    fn wants_hits(&self) -> bool {
        self.0.wants_hits()
    }
    fn words(&self) -> usize {
        self.0.words()
    }
    fn head_words(&self, k_dim: usize, group: usize) -> usize {
        self.0.head_words(k_dim, group)
    }
    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        self.0.born(token, state);
    }
    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        self.0.observe(seen, state);
    }
    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        self.0.observe_head(seen, state);
        if seen.first.0 < self.1 {
            state[0] = 1.0;
        }
    }
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        self.0.rank(tokens, utility);
    }
    fn threshold(&self, head: &[f32]) -> Option<f32> {
        self.0.threshold(head)
    }
}

#[test]
fn the_threshold_settles_from_below_too() {
    let log = Log::default();
    let of = Box::new(Starved(AdaKvLit::default().target(0.8).gamma(0.02), 100));
    let rule = eviction(Box::new(Spy { of, log: log.clone() }), Budget::Tokens(Budget::ALL));
    let cache = Cache::new(config(1).experts(3, 2).hits(Hits::new().every(1)).evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    (0..2000).for_each(|p| feed(&cache, &mut sequence, &rows(cache.config(), p, 1)));
    let rate = |event: &Event| match event {
        Event::Head { head: 0, hits, misses, .. } if hits + misses > 0.0 => {
            Some(f64::from(*hits) / f64::from(hits + misses))
        }
        _ => None,
    };
    let rates: Vec<f64> = log.lock().unwrap().iter().filter_map(rate).collect();
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    let (before, after) = (mean(&rates[60..90]), mean(&rates[rates.len() - 50..]));
    assert!(before < 0.2 && (after - 0.8).abs() < 0.1, "hit rates {before}, then {after}");
}

fn expected(policy: ExpectedAttention, key_rope: bool) -> (Vec<Row>, BTreeSet<u32>, BTreeSet<u32>) {
    let mut config = config(1);
    config.layers[0].rope = policy.rope.filter(|_| !policy.rotated && key_rope);
    let cache = Cache::new(config.evict(Eviction::new(policy, Budget::Tokens(30)).batch(1))).unwrap();
    let mut sequence = cache.sequence();
    let plain = rows(cache.config(), 0, 90);
    let mut given = plain.clone();
    if policy.rotated {
        for (p, row) in given.iter_mut().enumerate() {
            for x in row.k[0].chunks_mut(4).chain(row.q[0].chunks_mut(4)) {
                let turned = turned(x, policy.rope.as_ref(), p as f64);
                x.iter_mut().zip(turned).for_each(|(x, y)| *x = y as f32);
            }
        }
    }
    feed(&cache, &mut sequence, &given);
    (plain, held(&sequence, 0, 0), held(&sequence, 0, 1))
}

#[test]
fn what_queries_to_come_can_be_expected_to_look_at() {
    for rope in [None, Some(rope(4)), Some(rope(2))] {
        let policy = ExpectedAttention::new(rope, false).ahead(40).epsilon(0.01).scale(2.0);
        let (all, first, second) = expected(policy, true);
        for (h, got) in [&first, &second].into_iter().enumerate() {
            let mut p = vec![0.0; 90];
            for head in h * 2..h * 2 + 2 {
                let queries: Vec<Vec<f64>> = (4..90)
                    .map(|i| all[i].q[0][head * 4..][..4].iter().map(|x| f64::from(*x)).collect())
                    .collect();
                let n = queries.len() as f64;
                let mean: Vec<f64> = (0..4).map(|c| queries.iter().map(|q| q[c]).sum::<f64>() / n).collect();
                let variance: Vec<f64> = (0..4)
                    .map(|c| queries.iter().map(|q| (q[c] - mean[c]).powi(2)).sum::<f64>() / n)
                    .collect();
                // The mean rotation as a matrix, from unit vectors, over the next positions.
                let mut turn = [[0.0; 4]; 4];
                for at in 90..130 {
                    for c in 0..4 {
                        let mut unit = [0.0f32; 4];
                        unit[c] = 1.0;
                        let to = turned(&unit, rope.as_ref(), f64::from(at));
                        (0..4).for_each(|r| turn[r][c] += to[r] / 40.0);
                    }
                }
                let logit = |t: usize| {
                    let key = turned(&all[t].k[0][h * 4..][..4], rope.as_ref(), t as f64);
                    let back = |c: usize| (0..4).map(|r| key[r] * turn[r][c]).sum::<f64>();
                    let linear: f64 = (0..4).map(|c| back(c) * mean[c]).sum();
                    let square: f64 = (0..4).map(|c| back(c).powi(2) * variance[c]).sum();
                    2.0 * linear + 2.0 * square
                };
                let total: f64 = (2..86).map(|t| logit(t).exp()).sum();
                (2..86).for_each(|t| p[t] += logit(t).exp() / total / 2.0);
            }
            let norm = |t: usize| {
                all[t].v[0][h * 3..][..3].iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
            };
            assert_eq!(
                got,
                &best(|t| (p[t as usize] + 0.01) * norm(t as usize), 90, 30),
                "head {h}, {rope:?}"
            );
        }
        // The same tokens, rotated before they are appended.
        let (_, one, two) = expected(policy.rotated(true), false);
        assert_eq!((&one, &two), (&first, &second));
    }
}

#[test]
fn old_queries_fade() {
    // Queries point one way for 60 tokens, then the other for 30: with a short memory keys of the second kind are kept.
    let play = |memory: u32| {
        let policy = ExpectedAttention::new(None, false).memory(memory).scale(4.0);
        let cache = Cache::new(config(1).evict(Eviction::new(policy, Budget::Tokens(26)).batch(1))).unwrap();
        let mut sequence = cache.sequence();
        let mut all = rows(cache.config(), 0, 90);
        for (i, row) in all.iter_mut().enumerate() {
            row.q[0].fill(if i < 60 { 1.0 } else { -1.0 });
            row.k[0].fill(if i % 2 == 0 { 1.0 } else { -1.0 });
        }
        feed(&cache, &mut sequence, &all);
        held(&sequence, 0, 0).into_iter().filter(|p| (2..86).contains(p) && p % 2 == 1).count()
    };
    assert_eq!((play(8), play(1000)), (20, 0));
}

#[test]
fn drafts_leave_no_trace_here_either() {
    let policies: [fn() -> Box<dyn Policy>; 4] = [
        || Box::new(AdaKvLit::default().target(0.7).gamma(0.05)),
        || Box::new(ExpectedAttention::new(Some(rope(2)), true).memory(16)),
        || Box::new(QuestLit::new(network(&[8, 4, 1])).unwrap()),
        || Box::new(ExpectedAttention::new(None, true)),
    ];
    for of in policies {
        for slack in [1, 4] {
            let rule = eviction(of(), Budget::Tokens(60));
            let cache = Cache::new(config(2).experts(2, 1).rollback(slack).evict(rule)).unwrap();
            no_trace(&cache, slack, of().name());
        }
    }
}
