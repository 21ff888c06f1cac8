//! A policy that wraps another: chunks of one position are the policy itself.

use crate::setup::{Event, Kind, Log, Row, Spy, bits, config, held, rope, row, run, shape};
use pikv::policy::{
    AdaKvLit, Budget, Candidates, Chunks, DuoLit, Eviction, ExpectedAttention, FastVReceived, H2o, HeadSeen,
    KeyNorm, Lru, LruPlus, Policy, SnapKv, StreamingLlm, Tova,
};
use pikv::rules::Hits;
use pikv::shape::Frequencies;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ConfigError, Error, Sequence};
use std::collections::BTreeSet;
use std::num::NonZeroU32;

const BUDGET: Budget = Budget::Tokens(40);

fn chunks<P: Policy>(of: P) -> Chunks<P> {
    Chunks::new(of, NonZeroU32::MIN)
}

/// Two layers without a number of sinks, so that the policy's applies.
fn unset() -> CacheConfig {
    let mut config = config(2).experts(3, 2).hits(Hits::new().pages(2).every(1)).rollback(2);
    config.sinks = None;
    config
}

/// Decodes `n` tokens; the bits of all outputs, and the positions that each head holds in the end.
fn decode(config: CacheConfig, n: u32) -> (Vec<u32>, Vec<BTreeSet<u32>>) {
    let cache = Cache::new(config).unwrap();
    let mut sequence: Sequence = cache.sequence();
    let mut all = Vec::new();
    for p in 0..n {
        let rows: [Row; 1] = [row(cache.config(), Kind::Hot, u64::from(p))];
        run(&cache, &mut sequence, &rows, |step, l, q, size| {
            let mut out = vec![0.0; size];
            step.attend(l, q, &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
            all.extend(bits(&out));
        });
    }
    let layers = cache.config().layers.len();
    let heads = (0..layers).flat_map(|l| (0..2).map(move |h| (l, h)));
    (all, heads.map(|(l, h)| held(&sequence, l, h)).collect())
}

fn same(policy: impl Policy + Clone + 'static) {
    let name = policy.name().to_owned();
    for by_page in [false, true] {
        let of = |eviction: Eviction| {
            decode(unset().evict(if by_page { eviction.by_page() } else { eviction }), 160)
        };
        let plain = of(Eviction::new(policy.clone(), BUDGET).batch(1));
        let wrapped = of(Eviction::new(chunks(policy.clone()), BUDGET).batch(1));
        assert_eq!(plain.1, wrapped.1, "{name}, by page: {by_page}");
        assert_eq!(plain.0, wrapped.0, "{name}, by page: {by_page}");
    }
}

#[test]
fn chunks_of_one_position_are_the_policy() {
    same(AdaKvLit::default().target(0.99).gamma(0.3));
    same(DuoLit);
    same(ExpectedAttention::new(Some(rope(4)), true).memory(16));
    same(FastVReceived);
    same(H2o);
    same(KeyNorm);
    same(Lru::default());
    same(LruPlus::default());
    same(SnapKv::default().window(3).pool(1));
    same(StreamingLlm);
    same(Tova);
}

/// The sinks of the wrapped policy are kept.
#[test]
fn chunks_of_streaming_llm_keep_its_sinks() {
    let (_, held) = decode(unset().evict(Eviction::new(chunks(StreamingLlm), BUDGET).batch(1)), 120);
    assert_eq!(held[0], (0..4).chain(84..120).collect());
}

/// Hits and misses are counted for the wrapped policy, although the configuration asks for none.
#[test]
fn chunks_of_a_policy_that_wants_hits_get_them() {
    let log = Log::default();
    let spy = Spy { of: Box::new(AdaKvLit::default()), log: log.clone() };
    let mut config = unset();
    config.hits = None;
    decode(config.evict(Eviction::new(chunks(spy), BUDGET).batch(1)), 160);
    let sums = log.lock().unwrap().iter().fold((0.0, 0.0), |sums, event| match event {
        Event::Head { hits, misses, .. } => (sums.0 + hits, sums.1 + misses),
        _ => sums,
    });
    assert!(sums.0 > 0.0 && sums.1 > 0.0, "{sums:?}");
}

/// Older tokens are worth less; head 1 gets the larger part of the budget that the heads share.
#[derive(Clone, Debug)]
struct Leans;

impl Policy for Leans {
    fn name(&self) -> &str {
        "leans"
    }
    fn head_words(&self, _k_dim: usize, _group: usize) -> usize {
        1
    }
    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        state[0] = seen.kv_head as f32;
    }
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        (0..tokens.len()).for_each(|i| utility[i] = tokens.position(i) as f32);
    }
    fn lean(&self, head: &[f32]) -> Option<f32> {
        Some(head[0])
    }
}

#[test]
fn chunks_of_a_policy_that_leans_share_the_budget_of_the_heads() {
    let (_, held) = decode(unset().evict(Eviction::new(chunks(Leans), BUDGET).batch(1)), 160);
    assert!(held[0].len() < 40 && held[1].len() > 40, "{} and {}", held[0].len(), held[1].len());
    same(Leans);
}

/// A policy whose oldest tokens are evicted without a ranking.
#[derive(Debug)]
struct Oldest;

impl Policy for Oldest {
    fn name(&self) -> &str {
        "oldest"
    }
    fn oldest_first(&self) -> bool {
        true
    }
    fn rank(&self, _: &Candidates<'_>, _: &mut [f32]) {
        panic!("the oldest tokens are known without a ranking");
    }
}

#[test]
fn chunks_of_a_policy_by_age_are_not_ranked() {
    let (_, held) = decode(unset().evict(Eviction::new(chunks(Oldest), BUDGET).batch(1)), 120);
    assert_eq!(held[0], (80..120).collect());
}

/// The rotation of the wrapped policy is compared with the layer's, and counts where the engine rotates.
#[test]
fn chunks_of_expected_attention_have_its_rotation() {
    let of = |rotation| Eviction::new(chunks(ExpectedAttention::new(Some(rotation), false)), BUDGET);
    let mut layer = shape(2, 2, 4, 3);
    layer.rope = Some(rope(4));
    let config = |layer| CacheConfig::new(vec![layer], 1 << 20);
    let refused = Cache::new(config(layer).evict(of(rope(2)))).unwrap_err();
    assert_eq!(refused, Error::Config(ConfigError::PolicyRope { layer: 0, policy: "ChunkKV".to_owned() }));
    Cache::new(config(layer).evict(of(rope(4)))).unwrap();
    // Frequencies of a layer whose keys come rotated: their number is that of the policy's rotation.
    layer.rope = None;
    let frequencies = Frequencies::plain(100.0, 4).unwrap();
    let with =
        |rotation| Cache::new(config(layer).evict(of(rotation)).frequencies(0..1, frequencies.clone()));
    with(rope(4)).unwrap();
    assert_eq!(
        with(rope(2)).unwrap_err(),
        Error::Config(ConfigError::Frequencies { layer: 0, got: 2, pairs: 1 })
    );
}
