//! Policies against their definitions.

use pikv::policy::{Budget, Eviction, H2o, StreamingLlm};
use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Layout, Output, Place, Sequence};

fn shape() -> LayerShape {
    let layout = Layout { k_dim: 4, v_dim: 4, k: Dtype::F32, v: Dtype::F32 };
    LayerShape { kv_heads: 2, query_heads: 4, layout, window: None, rope: None }
}

fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn feed(cache: &Cache, sequence: &mut Sequence, n: u32, seed: u64) {
    let mut step = cache.begin([(&mut *sequence, n)]).unwrap();
    let n = n as usize;
    let mut out = vec![0.0; n * 16];
    step.append(0, &noise(seed, n * 8), &noise(seed + 1, n * 8)).unwrap();
    step.attend(0, &noise(seed + 2, n * 16), &Attend::new(8.0), Output::new(&mut out)).unwrap();
    step.commit().unwrap();
}

fn held(sequence: &Sequence, head: usize) -> Vec<u32> {
    let ring = sequence.next_position().0 - sequence.in_ring().0;
    let mut all: Vec<u32> = Vec::new();
    for page in sequence.pages(0, head).unwrap().collect::<Vec<_>>() {
        all.extend(
            sequence
                .positions(0, head, page.id)
                .unwrap()
                .map(|(_, p)| p.0)
                .filter(|p| page.id.place != Place::Ring || *p >= ring),
        );
    }
    all.sort_unstable();
    all
}

#[test]
fn sixteen_slots_and_forty_tokens() {
    let config = CacheConfig::new(vec![shape()], 1 << 20).ring(4).sinks(2);
    let cache =
        Cache::new(config.clone().evict(Eviction::new(StreamingLlm, Budget::Tokens(16)).batch(1))).unwrap();
    let mut sequence = cache.sequence();
    (0..40).for_each(|i| feed(&cache, &mut sequence, 1, i * 3));
    let kept: Vec<u32> = (0..2).chain(26..40).collect();
    assert_eq!(held(&sequence, 0), kept);
    assert_eq!(sequence.resident(0, 1).unwrap().0, 16);

    let cache = Cache::new(config.evict(Eviction::new(H2o, Budget::Tokens(16)).batch(1))).unwrap();
    let mut sequence = cache.sequence();
    (0..40).for_each(|i| feed(&cache, &mut sequence, 1, i * 3));
    for head in 0..2 {
        assert_eq!(sequence.resident(0, head).unwrap().0, 16);
    }
    assert_ne!(held(&sequence, 0), held(&sequence, 1));
}
