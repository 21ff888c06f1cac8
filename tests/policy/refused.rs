//! Invalid options are refused by name; and values that a policy of the user's may return.

use crate::setup::{Kind, Row, config, held, row, run};
use pikv::policy::{
    AdaKvLit, Budget, Candidates, Chunks, Duo, Eviction, ExpectedAttention, H2o, LruPlus, MassFeedback,
    Policy, Seen, SnapKv, StreamingLlm,
};
use pikv::shape::LANES;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ConfigError, Error, ReadPages, Sequence};
use std::num::NonZeroU32;

fn feed(cache: &Cache, sequence: &mut Sequence, n: u32) {
    let from = sequence.next_position().0;
    let rows: Vec<Row> = (from..from + n).map(|p| row(cache.config(), Kind::Noise, u64::from(p))).collect();
    run(cache, sequence, &rows, |step, l, q, size| {
        step.attend(l, q, &Attend::new(0.5), AttendOutput::new(&mut vec![0.0; size])).unwrap();
    });
}

#[track_caller]
fn refused(rule: Eviction, says: &str) {
    let error = Cache::new(config(2).evict_layer(1, rule)).unwrap_err();
    assert!(matches!(error, Error::Config(ConfigError::TokenBudget { layer: 1, .. })), "{error}");
    assert!(error.to_string().contains(says), "{error}");
}

#[test]
fn budgets_and_rules_that_are_none() {
    let of = |budget| Eviction::new(H2o, budget);
    for share in [0.0, -0.5, 1.5, f32::NAN, f32::INFINITY] {
        refused(of(Budget::Share(share)), "above 0 and at most 1");
    }
    refused(of(Budget::Layers([5].into())), "none for this layer");
    refused(of(Budget::Heads([vec![5, 5]].into())), "0 numbers for it; it has 2 KV heads");
    refused(of(Budget::Heads([vec![5, 5], vec![5]].into())), "1 numbers for it; it has 2 KV heads");
    refused(of(Budget::Heads([vec![5, 5], vec![5, 5, 5]].into())), "3 numbers for it; it has 2 KV heads");
    refused(of(Budget::Tokens(9)).batch(0), "at least 1");
    for floor in [-0.1, 1.1, f32::NAN] {
        refused(of(Budget::Tokens(9)).adaptive(floor), "0..=1");
    }
    refused(of(Budget::Tokens(9)).adaptive(0.2).by_page(), "by tokens");
    refused(Duo::new(vec![vec![1.0; 2]], 9).eviction(), "0 numbers for it; it has 2 KV heads");
    let error = Cache::new(config(2).evict_layer(2, of(Budget::Tokens(9)))).unwrap_err();
    assert_eq!(error, Error::Config(ConfigError::PolicyLayer { layer: 2, layers: 2 }));
    // Large values are accepted.
    Cache::new(config(2).evict(of(Budget::Share(1.0)).batch(u32::MAX))).unwrap();
    Cache::new(config(2).evict(of(Budget::Bytes(u64::MAX)).adaptive(1.0))).unwrap();
}

/// An option with which a policy cannot act is refused when the cache is built, also within a policy that wraps it.
#[test]
fn options_out_of_range() {
    let budget = || Budget::Tokens(9);
    let snap = SnapKv::default;
    let expected = || ExpectedAttention::new(None, false);
    let plus = |decay| Eviction::new(LruPlus::default().decay(decay), budget());
    let lit = |set: fn(AdaKvLit) -> AdaKvLit| Eviction::new(set(AdaKvLit::default()), budget());
    let chunks = Chunks::new(snap().window(0), NonZeroU32::MIN);
    for (rule, name, value) in [
        (Eviction::new(snap().window(0), budget()), "window", 0.0),
        (Eviction::new(chunks, budget()), "window", 0.0),
        (Eviction::new(snap().pool(0), budget()), "pool", 0.0),
        (Eviction::new(snap().pool(4), budget()), "pool", 4.0),
        (Eviction::new(expected().ahead(0), budget()), "ahead", 0.0),
        (Eviction::new(expected().memory(0), budget()), "memory", 0.0),
        (plus(0.0), "decay", 0.0),
        (plus(1.5), "decay", 1.5),
        (plus(f32::INFINITY), "decay", f64::INFINITY),
        (lit(|policy| policy.alpha([0.5, -0.5, 1.0])), "alpha", -0.5),
        (lit(|policy| policy.alpha([0.0; 3])), "alpha", 0.0),
        (lit(|policy| policy.target(1.5)), "target", 1.5),
        (lit(|policy| policy.gamma(0.0)), "gamma", 0.0),
        (lit(|policy| policy.rate(0.0)), "rate", 0.0),
        (lit(|policy| policy.rate(1.5)), "rate", 1.5),
        (lit(|policy| policy.half_life(0.0)), "half_life", 0.0),
        (lit(|policy| policy.half_life(f32::INFINITY)), "half_life", f64::INFINITY),
    ] {
        let error = Cache::new(config(2).evict_layer(1, rule)).unwrap_err();
        let Error::Config(ConfigError::PolicyOption { layer: 1, option, .. }) = &error else {
            panic!("{error}")
        };
        assert_eq!((option.name, option.value), (name, value));
        assert!(error.to_string().contains(&format!("with {name} {value}; it must be ")), "{error}");
    }
    assert!(Cache::new(config(1).evict(plus(f32::NAN))).is_err());
    // The least values that work.
    for rule in [
        Eviction::new(snap().window(1).pool(1), budget()),
        lit(|policy| policy.alpha([0.0, 0.0, 1.0]).target(0.0).gamma(-0.01).rate(1.0)),
        Eviction::new(expected().ahead(1).memory(1), budget()),
        plus(1.0),
    ] {
        Cache::new(config(2).evict(rule)).unwrap();
    }
}

#[test]
fn reads_that_cannot_be() {
    let cache = Cache::new(config(1).experts(3, 1)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, 40);
    let before = held(&sequence, 0, 0);
    {
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        step.append(0, &[0.5; 8], &[0.5; 6]).unwrap();
        let mut out = [0.0; 12];
        let mut ask =
            |options: Attend| step.attend(0, &[1.0; 16], &options, AttendOutput::new(&mut out)).unwrap_err();
        let plain = Attend::new(0.5);
        assert_eq!(ask(plain.read(ReadPages::Quest { pages: 3 })), Error::NoBounds);
        assert_eq!(ask(plain.closed_gaps(true)), Error::NoRotation { layer: 0 });
        assert_eq!(ask(plain.read(ReadPages::Experts)), Error::NotRouted { layer: 0, row: 0 });
        step.route(0, &[1]).unwrap();
        step.attend(0, &[1.0; 16], &plain.read(ReadPages::Experts), AttendOutput::new(&mut out)).unwrap();
    }
    assert_eq!(held(&sequence, 0, 0), before);
    feed(&cache, &mut sequence, 3);
    assert_eq!(sequence.next_position().0, 43);
}

/// Arbitrary utilities by position.
#[derive(Debug)]
struct Table(fn(u32) -> f32, Option<f32>);

impl Policy for Table {
    fn name(&self) -> &str {
        "table"
    }
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for (i, u) in utility.iter_mut().enumerate() {
            *u = (self.0)(tokens.position(i));
        }
    }
    fn threshold(&self, _head: &[f32]) -> Option<f32> {
        self.1
    }
}

fn kept(config: CacheConfig, rule: Eviction, n: u32) -> Vec<u32> {
    let cache = Cache::new(config.evict(rule)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, n);
    held(&sequence, 0, 0).into_iter().collect()
}

#[test]
fn what_is_no_number_goes_first() {
    let odd = |p: u32| if p.is_multiple_of(2) { f32::NAN } else { -1e30 };
    let rule = |limit| Eviction::new(Table(odd, limit), Budget::Tokens(20)).batch(1);
    // Sinks 0 and 1, ring 36..40; of 2..36 all odd ones are fewer than 14: the newest even ones fill up.
    let mut want: Vec<u32> =
        (3..36).filter(|p| p % 2 == 1).rev().take(14).chain([0, 1]).chain(36..40).collect();
    want.sort_unstable();
    assert_eq!(kept(config(1), rule(None), 40), want);
    // Some utilities are below a threshold that the others reach; a NaN threshold is ignored.
    let all = Eviction::new(Table(odd, Some(-1e31)), Budget::Tokens(100));
    assert!(kept(config(1), all, 40).iter().all(|p| *p < 2 || *p >= 36 || p % 2 == 1));
    let none = Eviction::new(Table(odd, Some(f32::NAN)), Budget::Tokens(100));
    assert_eq!(kept(config(1), none, 40).len(), 40);
    // Infinities are numbers.
    let infinite = |p: u32| if p < 20 { f32::INFINITY } else { f32::NEG_INFINITY };
    let rule = Eviction::new(Table(infinite, None), Budget::Tokens(24)).batch(1);
    assert_eq!(kept(config(1), rule, 40), (0..20).chain(36..40).collect::<Vec<_>>());
    // 0.0 and -0.0 are equal: the older is evicted.
    let zeros = |p: u32| if p.is_multiple_of(2) { 0.0 } else { -0.0 };
    let rule = Eviction::new(Table(zeros, None), Budget::Tokens(16)).batch(1);
    assert_eq!(kept(config(1), rule, 40), (0..2).chain(26..40).collect::<Vec<_>>());
}

#[test]
fn thresholds_pins_and_pages() {
    let by_age = |p: u32| p as f32;
    // A threshold evicts below the budget, and by_page to the budget; both take whole pages only as far as needed.
    let rule = Eviction::new(Table(by_age, Some(30.0)), Budget::Tokens(100));
    assert_eq!(kept(config(1), rule, 60), (0..2).chain(30..60).collect::<Vec<_>>());
    let rule = Eviction::new(Table(by_age, None), Budget::Tokens(80)).by_page().batch(1);
    // Pages hold 2..34, 34..66, 66..96: with 20 too many, the first is evicted.
    assert_eq!(kept(config(1), rule, 100), (0..2).chain(34..100).collect::<Vec<_>>());
    let cache =
        Cache::new(config(1).evict(Eviction::new(StreamingLlm, Budget::Tokens(10)).batch(1))).unwrap();
    let mut sequence = cache.sequence();
    sequence.pin(5..8);
    sequence.pin(20..20);
    feed(&cache, &mut sequence, 50);
    assert_eq!(held(&sequence, 0, 1), [0, 1, 5, 6, 7, 45, 46, 47, 48, 49].into());
    let mut fork = sequence.fork();
    fork.unpin();
    feed(&cache, &mut fork, 1);
    feed(&cache, &mut sequence, 1);
    assert!(held(&sequence, 0, 0).contains(&5));
    // Room for ten: the pinned tokens are the oldest.
    assert_eq!(held(&fork, 0, 0), [0, 1, 6, 7, 45, 46, 47, 48, 49, 50].into());
    sequence.clear();
    feed(&cache, &mut sequence, 50);
    assert!(!held(&sequence, 0, 0).contains(&5));
}

/// Counts the observations of each token.
#[derive(Debug)]
struct Count;

impl Policy for Count {
    fn name(&self) -> &str {
        "count"
    }
    fn feedback(&self) -> MassFeedback {
        MassFeedback::All
    }
    fn words(&self) -> usize {
        1
    }
    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; LANES]]) {
        seen.lanes().for_each(|t| state[0][t] += seen.rows_after(seen.position(t)) as f32);
    }
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        for (i, u) in utility.iter_mut().enumerate() {
            // A token at position p was seen by every row since.
            assert_eq!(
                tokens.state(i, 0),
                (tokens.now() - tokens.position(i)) as f32,
                "{}",
                tokens.position(i)
            );
            *u = 0.0;
        }
    }
}

#[test]
fn every_row_is_told_once_however_steps_are_cut() {
    for slack in [0, 3] {
        for experts in [1, 3] {
            let config = config(1).experts(experts, 1).rollback(slack);
            let cache = Cache::new(config.evict(Eviction::new(Count, Budget::Tokens(60)))).unwrap();
            let mut sequence = cache.sequence();
            for n in [100, 1, 3, 2, 40, 5, 1, 1, 9, 33] {
                feed(&cache, &mut sequence, n);
                if slack > 0 {
                    sequence.rollback(2.min(n)).unwrap();
                }
            }
        }
    }
}
