//! The models with pikv as their cache against the same models with candle's own: the same logits.

use candle::{DType, Device, Tensor};
use pikv_candle::pikv::report::{PageInfo, Place};
use pikv_candle::pikv::shard::ShardMap;
use pikv_candle::pikv::{Cache, CacheConfig, Dtype};
use pikv_candle::{Error, KvCache, pikv};
use pikv_candle_models::{Model, Shape};
use std::collections::BTreeSet;

/// Allowed difference between logits in f32, which are around 1.
const WITHIN: f32 = 1e-4;
const EXPERTS: u32 = 4;
const SHAPE: Shape = Shape {
    vocabulary: 97,
    layers: 3,
    heads: 8,
    kv_heads: 2,
    head_dim: 16,
    intermediate: 96,
    positions: 1024,
    experts: EXPERTS,
    window: 4096,
};

/// A cache of the model's shape, with a small ring, so that most tokens leave it.
fn config(shape: &Shape) -> CacheConfig {
    shape.cache(Dtype::F32, 1 << 24).ring(64)
}

fn kv(config: CacheConfig) -> KvCache {
    KvCache::new(Cache::new(config).unwrap())
}

fn mixtral_config() -> CacheConfig {
    config(&SHAPE).experts(EXPERTS, 2)
}

/// Tokens `[batch, n]` of a text, from position `from` on.
fn tokens(text: u64, from: usize, n: usize, batch: usize) -> Tensor {
    let token = |i: usize, row: usize| {
        let x = (text + 1)
            .wrapping_mul(0x9e37_79b9)
            .wrapping_add((i * 31 + row * 977) as u64)
            .wrapping_mul(0x85eb_ca6b);
        (x >> 7) as u32 % SHAPE.vocabulary
    };
    let all: Vec<u32> = (0..batch).flat_map(|row| (from..from + n).map(move |i| token(i, row))).collect();
    Tensor::from_vec(all, (batch, n), &Device::Cpu).unwrap()
}

fn values(logits: &Tensor) -> Vec<f32> {
    logits.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest difference of two logits; infinite if one is NaN.
fn off(ours: &Tensor, own: &Tensor) -> f32 {
    assert_eq!(ours.dims(), own.dims());
    values(ours).iter().zip(values(own)).fold(0.0, |most, (a, b)| {
        let off = (a - b).abs();
        if off.is_nan() { f32::INFINITY } else { most.max(off) }
    })
}

/// Parts of a text: a prompt, a second one, and single tokens.
const PARTS: [usize; 12] = [150, 1, 1, 40, 1, 1, 1, 1, 1, 1, 1, 1];

/// Runs both models over a text from a position on, and compares them. Returns the position at its end.
fn beside(ours: &mut Model, own: &mut Model, text: u64, at: usize, batch: usize, within: f32) -> usize {
    PARTS.into_iter().fold(at, |at, n| {
        let tokens = tokens(text, at, n, batch);
        let off = off(&ours(&tokens, at).unwrap(), &own(&tokens, at).unwrap());
        assert!(off <= within, "tokens {at}..{}: off by {off:e}", at + n);
        at + n
    })
}

/// Pages of the experts of a head, in the order of the experts.
fn filed(kv: &KvCache, sequence: usize, layer: usize, head: usize) -> Vec<(u16, PageInfo)> {
    kv.sequences(|all| {
        let pages = all[sequence].pages(layer, head).unwrap();
        let of = |page: PageInfo| match page.id.place {
            Place::Run(expert) => Some((expert, page)),
            _ => None,
        };
        pages.filter_map(of).collect()
    })
}

#[test]
fn llama_has_the_logits_of_candles_cache() {
    // One KV head for all query heads; one for each four; one for each.
    for kv_heads in [1, 2, 8] {
        let shape = Shape { kv_heads, ..SHAPE };
        for batch in [1, 3] {
            let kv = kv(config(&shape));
            let mut ours = shape.llama(DType::F32, &kv).unwrap();
            let mut own = shape.own_llama(DType::F32).unwrap();
            let end = beside(&mut ours, &mut own, 1, 0, batch, WITHIN);
            assert_eq!((kv.current_seq_len(), kv.sequences(|all| all.len())), (end, batch));
        }
    }
}

#[test]
fn llama_in_16_bits_is_as_near_as_they_are_fine() {
    // Both widen keys and values to f32 in attention, and round its result.
    for (dtype, stored, within) in [(DType::F16, Dtype::F16, 0.02), (DType::BF16, Dtype::Bf16, 0.15)] {
        let kv = kv(SHAPE.cache(stored, 1 << 24).ring(64));
        let mut own = SHAPE.own_llama(dtype).unwrap();
        beside(&mut SHAPE.llama(dtype, &kv).unwrap(), &mut own, 1, 0, 1, within);
    }
}

#[test]
fn mixtral_has_the_logits_of_candles_cache_and_is_filed_by_its_experts() {
    for batch in [1, 2] {
        let kv = kv(mixtral_config());
        let end =
            beside(&mut SHAPE.mixtral(&kv).unwrap(), &mut SHAPE.own_mixtral().unwrap(), 2, 0, batch, WITHIN);
        assert_eq!(kv.current_seq_len(), end);
        for (sequence, layer) in (0..batch).flat_map(|i| (0..SHAPE.layers).map(move |layer| (i, layer))) {
            let pages = filed(&kv, sequence, layer, 0);
            let experts: BTreeSet<u16> = pages.iter().map(|(expert, _)| *expert).collect();
            assert!(experts.len() > 1, "layer {layer}: {experts:?}");
            // All tokens but the ring's 64.
            assert_eq!(pages.iter().map(|(_, page)| page.tokens as usize).sum::<usize>(), end - 64);
        }
    }
    // In a cache with one expert the gate's weights are ignored.
    let kv = kv(config(&SHAPE));
    beside(&mut SHAPE.mixtral(&kv).unwrap(), &mut SHAPE.own_mixtral().unwrap(), 2, 0, 1, WITHIN);
}

#[test]
fn mixtral_over_shards_of_experts_has_the_bits_of_one_shard() {
    let whole = kv(mixtral_config());
    let sharded = kv(mixtral_config().shards(ShardMap::xor(1, EXPERTS, EXPERTS).unwrap()));
    let (mut of_one, mut of_four) = (SHAPE.mixtral(&whole).unwrap(), SHAPE.mixtral(&sharded).unwrap());
    let mut at = 0;
    for n in PARTS {
        let tokens = tokens(3, at, n, 2);
        let bits = |model: &mut Model| {
            values(&model(&tokens, at).unwrap()).into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        assert_eq!(bits(&mut of_one), bits(&mut of_four), "tokens {at}..{}", at + n);
        at += n;
    }
    // Each expert's pages are in its own shard.
    for (layer, head) in (0..SHAPE.layers).flat_map(|layer| [(layer, 0), (layer, 1)]) {
        let pages = filed(&sharded, 0, layer, head);
        assert!(pages.iter().all(|(expert, page)| page.shard == u32::from(*expert)), "{layer}, {head}");
    }
    let held = sharded.cache().usage();
    assert!(held.shards.len() == EXPERTS as usize && held.shards.iter().all(|bytes| *bytes > 0), "{held}");
}

#[test]
fn a_window_is_kept_over_cached_tokens_too() {
    // candle's mask applies the window only within the tokens of a pass, and a token sees itself and `sliding_window` before it. So it is
    // right if the whole text is one pass.
    let shape = Shape { window: 20, ..SHAPE };
    let mut config = mixtral_config();
    for layer in &mut config.layers {
        *layer = layer.window(shape.window as u32 + 1);
    }
    let kv = kv(config);
    let mut ours = shape.mixtral(&kv).unwrap();
    let mut at = 0;
    for n in [100, 1, 1, 30, 1, 1] {
        let got = ours(&tokens(4, at, n, 1), at).unwrap();
        at += n;
        let whole = tokens(4, 0, at, 1);
        let off_by = off(&got, &shape.own_mixtral().unwrap()(&whole, 0).unwrap());
        assert!(off_by <= WITHIN, "{at} tokens: off by {off_by:e}");
        // A model without a window gives other logits.
        let none = SHAPE.own_mixtral().unwrap()(&whole, 0).unwrap();
        assert!(off(&got, &none) > 100.0 * WITHIN);
    }
}

#[test]
fn after_a_reset_another_batch_begins() {
    let kv = kv(config(&SHAPE));
    let mut ours = SHAPE.llama(DType::F32, &kv).unwrap();
    for (text, batch) in [(5, 2), (6, 1), (7, 3)] {
        beside(&mut ours, &mut SHAPE.own_llama(DType::F32).unwrap(), text, 0, batch, WITHIN);
        kv.reset();
        assert_eq!((kv.current_seq_len(), kv.cache().usage().taken), (0, 0));
    }
}

#[test]
fn a_fork_goes_on_by_itself() {
    let kv = kv(mixtral_config());
    let mut ours = SHAPE.mixtral(&kv).unwrap();
    let end = beside(&mut ours, &mut SHAPE.own_mixtral().unwrap(), 8, 0, 1, WITHIN);
    let fork = kv.fork();
    // Each continuation against a separate model.
    for text in [9, 10] {
        let mut own = SHAPE.own_mixtral().unwrap();
        own(&tokens(8, 0, end, 1), 0).unwrap();
        beside(&mut ours, &mut own, text, end, 1, WITHIN);
        kv.swap(&fork);
    }
    assert_eq!((kv.current_seq_len(), fork.current_seq_len()), (2 * end, 2 * end));
}

#[test]
fn a_pass_that_fails_leaves_no_trace() {
    // Memory for the prompt, and little more.
    let kv = kv(SHAPE.cache(Dtype::F32, 256 << 10).ring(64));
    let (mut ours, mut own) = (SHAPE.llama(DType::F32, &kv).unwrap(), SHAPE.own_llama(DType::F32).unwrap());
    let prompt = tokens(11, 0, 100, 1);
    ours(&prompt, 0).unwrap();
    own(&prompt, 0).unwrap();
    let refused = ours(&tokens(11, 100, 800, 1), 100).unwrap_err();
    let found = Error::of(&refused);
    assert!(matches!(found, Some(Error::Cache(pikv::Error::OutOfBudget { .. }))), "{refused}");
    // A batch of another size, and a token outside the vocabulary: it fails before its first layer.
    let refused = ours(&tokens(11, 100, 1, 2), 100).unwrap_err();
    assert!(matches!(Error::of(&refused), Some(Error::Batch { got: 2, held: 1 })), "{refused}");
    assert!(ours(&Tensor::new(&[[1000u32]], &Device::Cpu).unwrap(), 100).is_err());
    assert_eq!(kv.current_seq_len(), 100);
    let next = tokens(11, 100, 1, 1);
    assert!(off(&ours(&next, 100).unwrap(), &own(&next, 100).unwrap()) <= WITHIN);
}

#[test]
fn patches_are_of_forty_lines_at_most() {
    for patch in [include_str!("../patches/llama.patch"), include_str!("../patches/mixtral.patch")] {
        let file = |line: &&str| !line.starts_with("+++") && !line.starts_with("---");
        let changed = patch.lines().filter(file).filter(|line| line.starts_with(['+', '-']));
        assert!(changed.count() <= 40);
    }
}
