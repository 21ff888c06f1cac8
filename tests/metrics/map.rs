//! The map of a sequence: its bytes equal those of the cache, after any history of its pages.

use super::cache_of;
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, StreamingLlm};
use pikv::report::StorageForm;
use pikv::tiers::Tiers;
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Sequence};

fn feed(cache: &Cache, sequence: &mut Sequence, n: usize) {
    let mut step = cache.begin([(sequence, n as u32)]).unwrap();
    for layer in 0..2 {
        let rows: Vec<f32> = (0..n * 32).map(|i| (i % 7) as f32 * 0.1).collect();
        step.append(layer, &rows, &rows).unwrap();
        let experts: Vec<u16> = (0..n).map(|row| (row / 5 % 3) as u16).collect();
        step.route(layer, &experts).unwrap();
    }
    step.commit().unwrap();
}

fn config() -> CacheConfig {
    let layers = vec![LayerShape::new(2, 4, 16, Dtype::Bf16); 2];
    CacheConfig::new(layers, 4 << 20).ring(40).sinks(4).rollback(8).experts(3, 1)
}

fn int(code: Code) -> Codec {
    Codec::new(Coding::new(code), Coding::new(code))
}

#[test]
fn bytes_of_the_map_are_those_of_the_cache() {
    let evicting = config().evict(Eviction::new(StreamingLlm, Budget::Tokens(200)));
    let packed = config().compress(int(Code::Int8)).age(200, int(Code::Int4));
    for (config, form) in
        [(config(), StorageForm::Full), (evicting, StorageForm::Full), (packed, StorageForm::PackedAgain)]
    {
        let (cache, mut sequence) = cache_of(config);
        for n in [100, 1, 37, 400, 8, 1] {
            feed(&cache, &mut sequence, n);
            let map = sequence.map();
            assert_eq!(map.bytes(), sequence.bytes());
            assert_eq!(map.bytes(), cache.usage().taken);
            assert_eq!((map.heads.len(), map.heads[1].len(), map.len), (2, 2, sequence.next_position().0));
        }
        let map = sequence.map();
        assert!(map.count(form).0 > 0 && map.count(StorageForm::Open).0 > 0, "{map:?}");
        sequence.rollback(5).unwrap();
        assert_eq!(sequence.map().bytes(), cache.usage().taken);
    }
}

#[test]
fn pages_of_a_lower_tier_are_told_apart_and_drawn() {
    let (cache, mut sequence) = cache_of(config().rollback(0).tiers(Tiers::new().host(1 << 20)));
    feed(&cache, &mut sequence, 500);
    let freed = sequence.demote(20 << 10).unwrap();
    let map = sequence.map();
    let (pages, bytes) = map.count(StorageForm::LowerTier);
    assert!(pages > 0 && bytes >= freed, "{pages} pages, {bytes} bytes");
    assert_eq!(map.bytes(), cache.usage().taken);
    assert_eq!(bytes, cache.usage().tiers[0].bytes);
    let svg = map.svg();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("lower tier: "));
    // A bar for each page.
    let all: usize = map.heads.iter().flatten().map(Vec::len).sum();
    assert_eq!(svg.matches('M').count(), all);
    assert!(svg.len() < 3000 + 60 * all, "{} bytes", svg.len());
}
