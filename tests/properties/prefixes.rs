//! The prefix index: prefixes found have the bits of a new prefill, only prefixes of equal tokens are found, and it frees memory on demand.

use pikv::metrics::{MetricsSink, Sink};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::numbers::{Rng, bits, noise};

const K_DIM: usize = 8;
const TOP_K: usize = 2;

/// A model: keys, values, queries and experts of a token are a function of it and its position.
struct Model {
    cache: Cache,
    layers: usize,
    kv_heads: usize,
    experts: u16,
}

impl Model {
    fn config(layers: usize, kv_heads: u32, experts: u32, budget: u64) -> CacheConfig {
        let layer = LayerShape::new(kv_heads, 2 * kv_heads, K_DIM as u32, Dtype::Bf16);
        let config = CacheConfig::new(vec![layer; layers], budget).ring(40).rollback(3);
        config.experts(experts, experts.min(TOP_K as u32)).backend(pikv_test::backend::backend())
    }

    fn new(config: CacheConfig) -> Model {
        let (layers, kv_heads) = (config.layers.len(), config.layers[0].kv_heads as usize);
        let experts = config.experts as u16;
        Model { cache: Cache::new(config).unwrap(), layers, kv_heads, experts }
    }

    /// Computes what comes after a sequence's tokens, `chunk` at a time; returns the bits of all outputs.
    fn compute(&self, sequence: &mut Sequence, tokens: &[u32], chunk: usize) -> Result<Vec<u32>, Error> {
        let mut all = Vec::new();
        while (sequence.next_position().0 as usize) < tokens.len() {
            let from = sequence.next_position().0 as usize;
            let rows = &tokens[from..(from + chunk).min(tokens.len())];
            let mut step = self.cache.begin([(&mut *sequence, rows.len() as u32)])?;
            for layer in 0..self.layers {
                let of = |kind: u64, n: usize| -> Vec<f32> {
                    let seed = |i: usize| {
                        u64::from(rows[i]) << 32 | ((from + i) as u64) << 8 | (layer as u64) << 4 | kind
                    };
                    (0..rows.len()).flat_map(|i| noise(seed(i), n)).collect()
                };
                let head = self.kv_heads * K_DIM;
                step.append(layer, &of(0, head), &of(1, head))?;
                if self.experts > 1 {
                    let routes: Vec<u16> = rows
                        .iter()
                        .flat_map(|token| {
                            let first = (token % u32::from(self.experts)) as u16;
                            [first, (first + 1) % self.experts].into_iter().take(TOP_K)
                        })
                        .collect();
                    step.route(layer, &routes)?;
                }
                let mut out = vec![0.0; rows.len() * 2 * head];
                step.attend(layer, &of(2, 2 * head), &Attend::new(0.3), AttendOutput::new(&mut out))?;
                all.extend(bits(&out));
            }
            step.commit()?;
        }
        Ok(all)
    }
}

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = Rng(seed);
    (0..n).map(|_| rng.below(50_000)).collect()
}

/// Requests with a prefix in common have the same bits, whether it is found or not.
#[test]
fn what_is_found_has_the_bits_of_what_is_computed() {
    for experts in [1, 4] {
        let model = Model::new(Model::config(2, 2, experts, 64 << 20));
        let index = PrefixIndex::new(&model.cache, 32 << 20);
        let scope = PrefixScope::new(b"all").adapter("lora").version(7);
        let mut rng = Rng(5);
        let shared = tokens(1, 300);
        let mut found = 0;
        for request in 0..30 {
            let mut prompt = shared[..rng.below(301) as usize].to_vec();
            prompt.extend(tokens(100 + request % 7, 1 + rng.below(150) as usize));
            let mut sequence = index.find(&scope, &prompt).unwrap();
            let len = sequence.next_position().0 as usize;
            assert!(len < prompt.len() && len.is_multiple_of(32));
            found += len;
            let mut fresh = model.cache.sequence();
            model.compute(&mut fresh, &prompt[..len], 40).unwrap();
            let chunk = 1 + rng.below(40) as usize;
            let wanted = model.compute(&mut fresh, &prompt, chunk).unwrap();
            assert!(model.compute(&mut sequence, &prompt, chunk).unwrap() == wanted);
            let most = index.publish(&scope, &prompt, &mut sequence).unwrap();
            assert_eq!(most as usize, prompt.len() / 32 * 32);
        }
        assert!(found > 2000, "{found}");
        let usage = index.usage();
        assert!(usage.bytes <= model.cache.usage().taken && usage.hit_tokens >= found as u64);
        drop(index);
        assert_eq!(model.cache.usage().taken, 0);
    }
}

#[test]
fn nothing_is_found_across_scopes() {
    let model = Model::new(Model::config(1, 1, 1, 8 << 20));
    let index = PrefixIndex::new(&model.cache, 4 << 20);
    let prompt = tokens(3, 100);
    let mut sequence = model.cache.sequence();
    model.compute(&mut sequence, &prompt, 32).unwrap();
    let a = PrefixScope::new(b"a").adapter("bc").version(1);
    assert_eq!(index.publish(&a, &prompt, &mut sequence), Ok(96));
    let found = |scope: &PrefixScope<'_>| index.find(scope, &prompt).unwrap().next_position().0;
    assert_eq!(found(&a), 96);
    for other in [
        PrefixScope::new(b"ab").adapter("c").version(1),
        PrefixScope::new(b"abc").version(1),
        PrefixScope::new(b"").adapter("abc").version(1),
        PrefixScope::new(b"a").adapter("bc").version(2),
        PrefixScope::new(b"a").adapter("b").version(1),
        PrefixScope::new(b"a").version(1),
    ] {
        assert_eq!(found(&other), 0);
    }
    // Nor with another token, wherever it is.
    for at in [0, 31, 32, 95] {
        let mut other = prompt.clone();
        other[at] ^= 1;
        assert_eq!(index.find(&a, &other).unwrap().next_position().0 as usize, at / 32 * 32);
    }
    for len in [0, 1, 32, 33, 64, 65] {
        let known = index.find(&a, &prompt[..len]).unwrap().next_position().0 as usize;
        assert_eq!(known, len.saturating_sub(1) / 32 * 32);
    }
    let other = Cache::new(Model::config(1, 1, 1, 8 << 20)).unwrap();
    let foreign = index.publish(&a, &prompt, &mut other.sequence());
    assert_eq!(foreign, Err(Error::ForeignSequence { index: 0 }));
    // Tokens that the sequence does not have are not known by it.
    assert_eq!(index.publish(&PrefixScope::new(b"x"), &prompt, &mut model.cache.sequence()), Ok(0));
    assert_eq!(index.publish(&PrefixScope::new(b"x"), &[], &mut sequence), Ok(0));
    let none = PrefixIndex::new(&model.cache, 0);
    assert_eq!(none.publish(&a, &prompt, &mut sequence), Ok(0));
    assert_eq!((none.find(&a, &prompt).unwrap().next_position().0, none.usage().bytes), (0, 0));
}

/// Two sequences compute the same prompt without finding each other, and a third continues it: one copy is kept.
#[test]
fn two_publishers_end_with_one_copy() {
    for experts in [1, 3] {
        let model = Model::new(Model::config(2, 1, experts, 64 << 20));
        let index = PrefixIndex::new(&model.cache, 32 << 20);
        let scope = PrefixScope::new(b"all");
        let prompt = tokens(3, 512);
        let mut held = Vec::new();
        let ends = [prompt.clone(), prompt.clone(), [&prompt[..], &tokens(4, 32)].concat()];
        for prompt in &ends {
            let mut sequence = model.cache.sequence();
            model.compute(&mut sequence, prompt, 32).unwrap();
            index.publish(&scope, prompt, &mut sequence).unwrap();
            held.push(index.usage().bytes);
        }
        assert_eq!(held[0], held[1]);
        assert_eq!(model.cache.usage().taken, held[2]);
        // With one expert the longer one has its own last page only; with more, the ring and open pages.
        let page = model.cache.config().layers[0].layout.bytes();
        let more = (held[2] - held[0]) / page / 2;
        assert!(if experts == 1 { more == 1 } else { more < 12 }, "{more} pages");
    }
}

/// Under a policy and a codec prefixes are found at checkpoints.
#[test]
fn checkpoints_are_what_is_found_where_tokens_are_evicted() {
    let config = Model::config(2, 1, 2, 64 << 20).evict(Eviction::new(H2o, Budget::Tokens(150)));
    let model = Model::new(config);
    let index = PrefixIndex::new(&model.cache, 32 << 20);
    let scope = PrefixScope::new(b"all");
    let prompt = tokens(3, 500);
    let mut sequence = model.cache.sequence();
    for len in [128, 256, 300, 384, 500] {
        model.compute(&mut sequence, &prompt[..len], 32).unwrap();
        sequence.checkpoint().unwrap();
    }
    assert_eq!(index.publish(&scope, &prompt, &mut sequence), Ok(384));
    drop(sequence);
    for (len, known) in [(500, 384), (384, 256), (300, 256), (256, 128), (129, 128), (128, 0)] {
        let mut found = index.find(&scope, &prompt[..len]).unwrap();
        assert_eq!(found.next_position().0, known, "{len}");
        let mut fresh = model.cache.sequence();
        let mut steps = [128, 256, 300, 384].into_iter().filter(|end| *end <= known as usize);
        steps.by_ref().for_each(|end| drop(model.compute(&mut fresh, &prompt[..end], 32).unwrap()));
        let wanted = model.compute(&mut fresh, &prompt, 32).unwrap();
        assert!(model.compute(&mut found, &prompt, 32).unwrap() == wanted);
    }
    index.clear();
    assert_eq!((index.usage().bytes, index.usage().boundaries, model.cache.usage().taken), (0, 0, 0));
    // What was evicted by hand is not what others would compute.
    let mut sequence = model.cache.sequence();
    model.compute(&mut sequence, &prompt[..256], 32).unwrap();
    sequence.evict_all();
    assert_eq!(index.publish(&scope, &prompt, &mut sequence), Ok(0));
    // Nor does it become that in a file.
    let mut file = Vec::new();
    sequence.save(b"", &mut file).unwrap();
    let mut restored = model.cache.restore(&mut &file[..]).unwrap().sequence;
    assert_eq!(index.publish(&scope, &prompt, &mut restored), Ok(0));
    // Pins keep tokens that the policy would have evicted from another.
    let mut sequence = model.cache.sequence();
    sequence.pin(0..100);
    model.compute(&mut sequence, &prompt[..256], 32).unwrap();
    sequence.unpin();
    assert_eq!(index.publish(&scope, &prompt, &mut sequence), Ok(0));
}

/// The index keeps its budget. The last tokens of a prefix are evicted before those that they follow, and pages that a sequence reads
/// stay.
#[test]
fn leaves_go_first_and_what_is_read_stays() {
    let model = Model::new(Model::config(1, 1, 1, 64 << 20));
    let page = model.cache.config().layers[0].layout.bytes();
    let index = PrefixIndex::new(&model.cache, 40 * page);
    let scope = PrefixScope::new(b"all");
    let shared = tokens(1, 320);
    let request = |seed| [&shared[..], &tokens(seed, 321)].concat();
    let known = |seed| index.find(&scope, &request(seed)).unwrap().next_position().0;
    for seed in 10..14 {
        let mut sequence = index.find(&scope, &request(seed)).unwrap();
        model.compute(&mut sequence, &request(seed), 32).unwrap();
        assert_eq!(index.publish(&scope, &request(seed), &mut sequence), Ok(640));
        assert!(index.usage().bytes <= 40 * page);
    }
    // 10 pages that all have, and 30 for the newest three.
    assert_eq!([10, 11, 12, 13].map(known), [320, 640, 640, 640]);
    // The one that is read stays, though it was used first.
    let reader = index.find(&scope, &request(11)).unwrap();
    assert_eq!([12, 13].map(known), [640, 640]);
    for seed in 20..24 {
        let mut sequence = index.find(&scope, &request(seed)).unwrap();
        model.compute(&mut sequence, &request(seed), 32).unwrap();
        assert_eq!(index.publish(&scope, &request(seed), &mut sequence), Ok(640));
    }
    assert_eq!([11, 12, 13].map(known), [640, 320, 320]);
    assert!(index.usage().evicted_tokens >= 5 * 320 && index.usage().bytes <= 40 * page);
    drop(reader);
    index.clear();
    assert_eq!((index.usage().bytes, model.cache.usage().taken), (0, 0));
}

/// A step that would exceed the budget gets the memory of prefixes that nobody reads; with tiers too.
#[test]
fn steps_take_what_is_idle() {
    for tiers in [false, true] {
        let config = Model::config(1, 1, 1, 1);
        let page = config.layers[0].layout.bytes();
        let config =
            Model::config(1, 1, 1, 40 * page).tiers(Tiers::new().host(if tiers { 8 * page } else { 0 }));
        let model = Model::new(config);
        let index = PrefixIndex::new(&model.cache, u64::MAX);
        let scope = PrefixScope::new(b"all");
        for seed in 0..6 {
            let prompt = tokens(seed, 320);
            let mut sequence = model.cache.sequence();
            model.compute(&mut sequence, &prompt, 32).unwrap();
            assert_eq!(index.publish(&scope, &prompt, &mut sequence), Ok(320));
        }
        assert!(index.usage().evictions > 0 && model.cache.usage().taken <= 40 * page);
        // All but what it reads itself.
        let prompt = [tokens(5, 320), tokens(77, 800)].concat();
        let mut sequence = index.find(&scope, &prompt).unwrap();
        assert_eq!(sequence.next_position().0, 320);
        model.compute(&mut sequence, &prompt, 32).unwrap();
        let full = model.compute(&mut sequence, &[prompt.clone(), tokens(9, 3000)].concat(), 32);
        assert!(matches!(full, Err(Error::OutOfBudget { .. } | Error::TierFull { .. })), "{full:?}");
        drop((sequence, index));
        assert_eq!(model.cache.usage().taken, 0);
    }
}

/// In a cache with tiers a step moves idle prefixes to lower tiers and evicts none. All are found afterwards, with the bits of
/// computed ones, and the bytes of all tiers add up. The index keeps its budget over all tiers.
#[test]
fn prefixes_move_down_before_they_go() {
    let scope = PrefixScope::new(b"all");
    let prompt = |seed| [tokens(seed, 512), tokens(50 + seed, 40)].concat();
    for (experts, pages) in [(1, 130), (3, 200)] {
        let page = Model::config(1, 1, 1, 1).layers[0].layout.bytes();
        let wide = Model::new(Model::config(2, 1, experts, 10_000 * page));
        for most in [u64::MAX, 150 * page] {
            let tiers = Tiers::new().host(10_000 * page);
            let model = Model::new(Model::config(2, 1, experts, pages * page).tiers(tiers));
            let index = PrefixIndex::new(&model.cache, most);
            let sums = || {
                let (index, cache) = (index.usage(), model.cache.usage());
                assert_eq!((index.bytes - index.lower, index.lower), (cache.taken, cache.tiers[0].bytes));
                index
            };
            for seed in 0..8 {
                let mut sequence = model.cache.sequence();
                model.compute(&mut sequence, &tokens(seed, 512), 32).unwrap();
                assert_eq!(index.publish(&scope, &tokens(seed, 512), &mut sequence), Ok(512));
                drop(sequence);
                assert!(sums().bytes <= most);
            }
            if most < u64::MAX {
                assert!(sums().evictions > 0);
                continue;
            }
            assert!(sums().evictions == 0 && sums().lower > 100 * page, "{:?}", sums());
            for seed in 0..8 {
                let mut found = index.find(&scope, &prompt(seed)).unwrap();
                assert_eq!(found.next_position().0, 512);
                let mut fresh = wide.cache.sequence();
                wide.compute(&mut fresh, &tokens(seed, 512), 32).unwrap();
                let wanted = wide.compute(&mut fresh, &prompt(seed), 7).unwrap();
                assert!(model.compute(&mut found, &prompt(seed), 7).unwrap() == wanted, "{experts} {seed}");
            }
            sums();
            index.clear();
            assert_eq!(sums().bytes, 0);
        }
    }
}

/// Threads find, compute, publish and drop prefixes at once.
#[test]
fn threads_share_an_index() {
    let config = Model::config(1, 2, 1, 1);
    let page = 2 * config.layers[0].layout.bytes();
    let model = Model::new(Model::config(1, 2, 1, 600 * page));
    let index = PrefixIndex::new(&model.cache, 60 * page);
    let wanted: Vec<Vec<u32>> = (0..4)
        .map(|seed| {
            let prompt = [tokens(0, 96), tokens(1 + seed, 70)].concat();
            model.compute(&mut model.cache.sequence(), &prompt, 1).unwrap()
        })
        .collect();
    std::thread::scope(|threads| {
        for thread in 0..4u64 {
            let (model, index, wanted) = (&model, &index, &wanted);
            threads.spawn(move || {
                let mut rng = Rng(thread);
                let scope = PrefixScope::new(b"all");
                for _ in 0..pikv_test::scaled(40, 2000) {
                    let seed = u64::from(rng.below(4));
                    let prompt = [tokens(0, 96), tokens(1 + seed, 70)].concat();
                    let mut sequence = index.find(&scope, &prompt).unwrap();
                    let known = sequence.next_position().0 as usize;
                    let got = model.compute(&mut sequence, &prompt, 1).unwrap();
                    let wanted = &wanted[seed as usize];
                    let from = known * wanted.len() / prompt.len();
                    assert!(got == wanted[from..]);
                    index.publish(&scope, &prompt, &mut sequence).unwrap();
                    if rng.one_in(8) {
                        index.clear();
                    }
                }
            });
        }
    });
    let usage = index.usage();
    assert!(usage.hits > 0 && usage.bytes <= 60 * page && usage.unequal == 0, "{usage:?}");
    index.clear();
    assert_eq!((index.usage().bytes, model.cache.usage().taken), (0, 0));
}

/// A prompt of any length is looked up in time proportional to the tokens found.
#[test]
fn long_prompts_are_looked_up() {
    let layer = LayerShape::new(1, 1, 1, Dtype::F32);
    let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 30)).unwrap();
    let index = PrefixIndex::new(&cache, 1 << 30);
    let scope = PrefixScope::new(&[7; 10_000]);
    let prompt = tokens(1, 1 << 20);
    assert_eq!(index.find(&scope, &prompt).unwrap().next_position().0, 0);
    let mut sequence = cache.sequence();
    for rows in prompt[..100_000].chunks(10_000) {
        let mut step = cache.begin([(&mut sequence, rows.len() as u32)]).unwrap();
        step.append(0, &vec![0.5; rows.len()], &vec![0.5; rows.len()]).unwrap();
        step.commit().unwrap();
    }
    assert_eq!(index.publish(&scope, &prompt, &mut sequence), Ok(100_000));
    assert_eq!(index.find(&scope, &prompt).unwrap().next_position().0, 100_000);
    drop((sequence, index));
    assert_eq!(cache.usage().taken, 0);
}

#[test]
fn numbers_go_to_a_sink() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    let model = Model::new(Model::config(1, 1, 1, 8 << 20));
    let index = PrefixIndex::new(&model.cache, 4 << 20);
    let prompt = tokens(3, 100);
    let mut sequence = model.cache.sequence();
    model.compute(&mut sequence, &prompt, 32).unwrap();
    index.publish(&PrefixScope::new(b"a"), &prompt, &mut sequence).unwrap();
    index.find(&PrefixScope::new(b"a"), &prompt).unwrap();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || MetricsSink::new(1).prefixes(&index.usage()));
    let all = snapshotter.snapshot().into_vec();
    let of = |name: &str| all.iter().find(|(key, ..)| key.key().name() == name).map(|(.., value)| value);
    assert_eq!(of("pikv_prefix_hit_tokens_total"), Some(&DebugValue::Counter(96)));
    assert_eq!(of("pikv_prefix_asked_tokens_total"), Some(&DebugValue::Counter(100)));
}
