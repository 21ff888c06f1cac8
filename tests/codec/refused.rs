//! Values, rules and maps that a codec refuses.

use crate::setup::{Setup, codec, feed, key, shape, snapshot, value};
use pikv::codec::{Code, Codec, Coding, Map, MapError};
use pikv::policy::{Budget, Eviction, Lru};
use pikv::report::{PageId, Place};
use pikv::shape::PAGE;
use pikv::{Cache, ConfigError, Dtype, Error, LayerShape};

#[test]
fn values_past_a_codec_are_refused() {
    for (layer, k, v) in [(0, Code::Int8, Code::F16), (1, Code::F16, Code::Int4), (0, Code::F32, Code::Int8)]
    {
        let mut setup = Setup { layers: 2, ..Setup::new(shape(2, 1, 8, 8, Dtype::F32), 4, codec(k, v)) };
        // Only the second head has the codec.
        setup.codecs = vec![None, Some(codec(k, v))];
        let cache = setup.cache();
        let mut sequence = cache.sequence();
        (0..50).for_each(|p| drop(feed(&setup, &cache, &mut sequence, [p])));
        let mut never = cache.sequence();
        (0..50).for_each(|p| drop(feed(&setup, &cache, &mut never, [p])));
        let rows = |row: fn(&Setup, usize, u64, usize) -> Vec<f32>, layer| -> Vec<f32> {
            (50..52).flat_map(|id| [row(&setup, layer, id, 0), row(&setup, layer, id, 1)].concat()).collect()
        };
        let mut step = cache.begin([(&mut sequence, 2)]).unwrap();
        (0..layer).for_each(|l| step.append(l, &rows(key, l), &rows(value, l)).unwrap());
        let wrong =
            [("k", 24 + 5), ("v", 24 + 7)].into_iter().filter(|(what, _)| *what == "v" || k != Code::F32);
        for (what, at) in wrong {
            for x in [65_000.0, -65_500.0, 1e30] {
                let (mut key, mut value) = (rows(key, layer), rows(value, layer));
                let row = if what == "k" { &mut key } else { &mut value };
                row[at] = x;
                let channel = at as u32 - 24;
                let want = Error::Unstorable {
                    what,
                    layer,
                    kv_head: 1,
                    row: 1,
                    channel,
                    value: x,
                    dtype: "f32",
                    limit: 0.99 * 65504.0,
                };
                assert_eq!(step.append(layer, &key, &value), Err(want));
            }
        }
        // The step continues: append the layer again.
        for l in layer..2 {
            step.append(l, &rows(key, l), &rows(value, l)).unwrap();
        }
        step.commit().unwrap();
        feed(&setup, &cache, &mut never, [50, 51]);
        assert_eq!(snapshot(&setup, &sequence), snapshot(&setup, &never));
        // A value just below the limit is stored, and the head without a codec has no limit.
        let mut step = cache.begin([(&mut sequence, 2)]).unwrap();
        let (key, mut value) = (rows(key, 0), rows(value, 0));
        (value[16], value[24]) = (1e30, 0.989 * 65504.0);
        step.append(0, &key, &value).unwrap();
    }
}

#[test]
fn a_map_lowers_the_limit() {
    let map = Map::hadamard(16).unwrap();
    let setup = Setup::new(
        shape(1, 1, 16, 16, Dtype::F32),
        4,
        Codec::new(Coding::new(Code::Int8).map(map), Coding::new(Code::F32)),
    );
    let cache = setup.cache();
    let mut sequence = cache.sequence();
    let v = [0.5; 16];
    for (x, fits) in [(60_000.0, false), (17_000.0, false), (16_000.0, true)] {
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        let refused = step.append(0, &[x; 16], &v);
        assert_eq!(refused.is_ok(), fits, "{x}: {refused:?}");
    }
    // All values at the limit, through a page: decoded values are within half a step, and finite.
    let x = setup.codec(0).unwrap().k.limit();
    for p in 0..40 {
        let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
        step.append(0, &[if p % 2 == 0 { x } else { -x }; 16], &v).unwrap();
        step.commit().unwrap();
    }
    let (mut k, mut v) = ([0.0; 16], [0.0; 16]);
    let id = PageId { place: Place::Run(0), ordinal: 0 };
    for lane in 0..PAGE {
        sequence.read(0, 0, id, lane, &mut k, &mut v).unwrap();
        let want = if lane % 2 == 0 { x } else { -x };
        assert!(k.iter().all(|k| (k - want).abs() < 8.0 * x / 255.0), "{k:?} for {want}");
    }
}

#[test]
fn factors_that_are_none() {
    for level in [0, 4, u32::MAX] {
        assert_eq!(Coding::means(Code::F16, level).unwrap_err(), MapError::Level { level });
    }
    for code in Code::ALL.into_iter().skip(3) {
        assert_eq!(Coding::means(code, 1).unwrap_err(), MapError::Scaled { code: code.name() });
    }
    for rank in [0, 32, u32::MAX] {
        assert_eq!(Coding::block_pca(Code::Int8, rank).unwrap_err(), MapError::Rank { rank });
    }
}

#[test]
fn rules_of_age_that_cannot_act() {
    let (int8, int4) = (codec(Code::Int8, Code::Int8), codec(Code::Int4, Code::Int4));
    let base = || pikv::CacheConfig::new(vec![shape(2, 1, 8, 16, Dtype::F32); 2], 1 << 24);
    let refused = |config: pikv::CacheConfig| match Cache::new(config) {
        Err(Error::Config(ConfigError::Age { layer, kv_head, after, .. })) => (layer, kv_head, after),
        other => panic!("{other:?}"),
    };
    // No first codec; at once; no bytes to be won; tiers.
    assert_eq!(refused(base().compress_head(1, 0, int8.clone()).age_layer(1, 9, int4.clone())), (1, 1, 9));
    assert_eq!(refused(base().compress(int8.clone()).age(0, int4.clone())), (0, 0, 0));
    assert_eq!(refused(base().compress(int4.clone()).age_head(1, 1, 5, int8.clone())), (1, 1, 5));
    assert_eq!(refused(base().compress(int8.clone()).age(7, int8.clone())), (0, 0, 7));
    let tiers = pikv::tiers::Tiers::new().host(1 << 20);
    assert_eq!(refused(base().compress(int8.clone()).age(7, int4.clone()).tiers(tiers)), (0, 0, 7));
    let error = Cache::new(base().compress(int8.clone()).age_layer(2, 7, int4.clone())).unwrap_err();
    let none = ConfigError::CodecRule { layer: Some(2), kv_head: None, layers: 2, kv_heads: 0 };
    assert_eq!(error, Error::Config(none));
    Cache::new(base().compress(int8).age(7, int4)).unwrap();
}

#[test]
fn single_tokens_are_not_evicted_out_of_means() {
    let means = |code| Coding::means(code, 1).unwrap();
    let base =
        |codec| pikv::CacheConfig::new(vec![shape(2, 1, 8, 16, Dtype::F32); 2], 1 << 24).compress(codec);
    let one = Codec::new(Coding::new(Code::F32), means(Code::F16));
    let lru = || Eviction::new(Lru::default(), Budget::Tokens(100));
    let error = Cache::new(base(one.clone()).evict_layer(1, lru())).unwrap_err();
    assert_eq!(error, Error::Config(ConfigError::MeansEvicted { layer: 1 }));
    Cache::new(base(one.clone()).evict(lru().by_page())).unwrap();
    let old = base(codec(Code::F32, Code::F32)).age(50, one).evict(lru());
    assert_eq!(Cache::new(old).unwrap_err(), Error::Config(ConfigError::MeansEvicted { layer: 0 }));
}

#[test]
fn rules_that_name_nothing_are_refused() {
    let int8 = || codec(Code::Int8, Code::Int8);
    let layers: Vec<LayerShape> = vec![shape(2, 1, 8, 16, Dtype::F32), shape(1, 1, 8, 16, Dtype::F32)];
    let base = || pikv::CacheConfig::new(layers.clone(), 1 << 24);
    let refused = |config: pikv::CacheConfig| match Cache::new(config) {
        Err(Error::Config(error)) => error,
        other => panic!("{other:?}"),
    };
    let rule = |layer, kv_head, kv_heads| ConfigError::CodecRule { layer, kv_head, layers: 2, kv_heads };
    assert_eq!(refused(base().compress_layer(2, int8())), rule(Some(2), None, 0));
    assert_eq!(rule(Some(2), None, 0).to_string(), "a codec for layer 2; the cache has layers 0..2");
    let head = "a codec for KV head 1 of layer 1, which has KV heads 0..1";
    assert_eq!(rule(Some(1), Some(1), 1).to_string(), head);
    assert_eq!(refused(base().compress_head(1, 1, int8())), rule(Some(1), Some(1), 1));
    assert_eq!(refused(base().compress_head(usize::MAX, 0, int8())), rule(Some(usize::MAX), Some(0), 0));
    let mut every = base();
    every = every.compress_head(0, 1, int8());
    every.codecs[0].layer = None;
    assert_eq!(refused(every), rule(None, Some(1), 1));
    let wide = |k: u32, v: u32| {
        let coding = |n| Coding::new(Code::Int8).map(Map::hadamard(n).unwrap());
        Codec::new(coding(k), coding(v))
    };
    assert_eq!(
        refused(base().compress(wide(16, 16))),
        ConfigError::Map { layer: 0, what: "k", wide: 16, dim: 8 }
    );
    assert_eq!(
        refused(base().compress_layer(1, wide(8, 8))),
        ConfigError::Map { layer: 1, what: "v", wide: 8, dim: 16 }
    );
    // Of two rules the later applies.
    let config = base().compress(codec(Code::F32, Code::F32)).compress_layer(0, int8()).compress_head(
        0,
        1,
        codec(Code::Int4, Code::E5m2),
    );
    let cache = Cache::new(config).unwrap();
    let of = |layer, codec: Codec| {
        cache.store(layer).unwrap().head_bytes_at(&layers[layer], Some(&codec.packed(8, 16)), 800, [512])
    };
    assert_eq!(
        cache.bytes_at(0, 800, &[512.into()]).unwrap(),
        of(0, int8()) + of(0, codec(Code::Int4, Code::E5m2))
    );
    assert_eq!(cache.bytes_at(1, 800, &[512.into()]).unwrap(), of(1, codec(Code::F32, Code::F32)));
}
