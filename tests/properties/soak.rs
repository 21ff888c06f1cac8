//! Memory of a sequence does not depend on the number of tokens seen: host tables, allocations and pages stay constant under every
//! policy, codec and form of reading. `PIKV_TEST=full` takes 10^6 tokens for each.

use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{
    AdaKvLit, Budget, Chunks, Dense, Duo, DuoLit, Eviction, ExpectedAttention, FastVReceived, H2o, KeyNorm,
    Lru, LruPlus, QuestLit, SnapKv, StreamingLlm, Tova,
};
use pikv::report::PageInfo;
use pikv::rules::Hits;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ConfigError, Dtype, Error, LayerShape, ReadPages, Sequence,
};
use pikv_test::numbers::Rng;
use std::alloc::{GlobalAlloc, Layout as Request, System};
use std::cell::Cell;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

thread_local! {
    /// Bytes that this thread holds, and the largest request since it was last set to 0.
    static HELD: Cell<i64> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

impl Counting {
    fn count(more: usize, less: usize) {
        HELD.set(HELD.get() + more as i64 - less as i64);
        LARGEST.set(LARGEST.get().max(more));
    }
}

// SAFETY: every call is passed to the system's allocator unchanged; counting neither allocates nor fails.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, request: Request) -> *mut u8 {
        Counting::count(request.size(), 0);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(request) }
    }

    unsafe fn dealloc(&self, at: *mut u8, request: Request) {
        Counting::count(0, request.size());
        // SAFETY: as above.
        unsafe { System.dealloc(at, request) }
    }

    unsafe fn realloc(&self, at: *mut u8, request: Request, size: usize) -> *mut u8 {
        Counting::count(size, request.size());
        // SAFETY: as above.
        unsafe { System.realloc(at, request, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DIM: u32 = 8;
const HEADS: u32 = 2;
const ROW: usize = (DIM * HEADS) as usize;
const HELD_TOKENS: u32 = 256;

fn config(experts: u32) -> CacheConfig {
    let layer = LayerShape::new(HEADS, HEADS, DIM, Dtype::F32);
    CacheConfig::new(vec![layer], 64 << 20).ring(32).sinks(4).experts(experts, experts.min(2))
}

fn eviction(policy: impl pikv::policy::Policy + 'static) -> Eviction {
    Eviction::new(policy, Budget::Tokens(HELD_TOKENS))
}

/// Adds a token of random numbers, and returns its row's output.
fn step(cache: &Cache, sequence: &mut Sequence, rng: &mut Rng, read: ReadPages) -> [f32; ROW] {
    let [k, v, q] = [(); 3].map(|()| [(); ROW].map(|()| rng.value(1.0)));
    let mut out = [0.0; ROW];
    let experts = cache.config().experts as u16;
    let mut step = cache.begin([(sequence, 1)]).unwrap();
    step.append(0, &k, &v).unwrap();
    if experts > 1 {
        let first = rng.below(u32::from(experts)) as u16;
        step.route(0, &[first, (first + 1) % experts]).unwrap();
    }
    step.attend(0, &q, &Attend::new(1.0).read(read), AttendOutput::new(&mut out)).unwrap();
    step.commit().unwrap();
    out
}

/// Tokens of a case: a quick form, and a long one.
fn tokens() -> u32 {
    if std::env::var("PIKV_TEST").is_ok_and(|form| form == "full") { 1_000_000 } else { 3_000 }
}

/// The most of a tenth of the tokens.
#[derive(Clone, Copy, Default)]
struct Tenth {
    tables: u64,
    held: i64,
    largest: usize,
    pages: u64,
    time: Duration,
}

/// CPU time of this thread. Where the system does not report it, the time elapsed, which includes other load.
fn on_cpu() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let ran = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ran = ran.and_then(|ran| ran.split(' ').next()?.parse().ok());
    ran.map_or_else(|| START.elapsed(), Duration::from_nanos)
}

/// Decodes, and compares the last tenth of the tokens with the second.
fn soak(name: &str, config: CacheConfig, read: ReadPages) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        let cache = Cache::new(config).unwrap();
        let (mut sequence, mut rng) = (cache.sequence(), Rng(1));
        let mut tenths = [Tenth::default(); 10];
        let before = HELD.get();
        for tenth in &mut tenths {
            let start = on_cpu();
            LARGEST.set(0);
            for token in 0..tokens() / 10 {
                step(&cache, &mut sequence, &mut rng, read);
                tenth.held = tenth.held.max(HELD.get() - before);
                tenth.pages = tenth.pages.max(cache.usage().taken);
                if token % 16 == 0 {
                    tenth.tables = tenth.tables.max(sequence.table_bytes());
                }
            }
            (tenth.largest, tenth.time) = (LARGEST.get(), on_cpu() - start);
        }
        let [_, second, .., last] = tenths;
        let flat = |what, second: u64, last: u64, spare: u64| {
            assert!(last <= second + second / 10 + spare, "{name}: {what} from {second} to {last}");
        };
        // Lists double, and a page more or less is chance where there are a dozen.
        flat("host tables", second.tables, last.tables, 8 << 10);
        flat("memory held", second.held as u64, last.held as u64, 12 << 10);
        flat("the largest allocation", second.largest as u64, last.largest as u64, 8 << 10);
        flat("bytes of pages", second.pages, last.pages, 5 << 10);
        // Caches are shared with others.
        let (second, last) = (second.time.as_secs_f64(), last.time.as_secs_f64());
        assert!(last <= 4.0 * second + 0.5, "{name}: a tenth took {second} s, and {last} s at the end");
    });
}

#[test]
fn every_policy_takes_as_much_after_any_number_of_tokens() {
    let dense = Dense::new(vec![0.1; 8], vec![0.0]);
    for (name, eviction) in [
        ("LRU", eviction(Lru::default())),
        ("LRU+", eviction(LruPlus::default())),
        ("H2O", eviction(H2o)),
        ("H2O, heads that share", eviction(H2o).adaptive(0.2)),
        ("H2O, a token at a time", eviction(H2o).batch(1)),
        ("StreamingLLM", eviction(StreamingLlm)),
        ("QUEST-lit", eviction(QuestLit::new(vec![dense]).unwrap())),
        ("AdaKV-lit", eviction(AdaKvLit::default())),
        ("Duo", Duo::new(vec![vec![0.0; HEADS as usize]], HELD_TOKENS).eviction()),
        ("Duo-lit", eviction(DuoLit)),
        ("SnapKV", eviction(SnapKv::default())),
        ("TOVA", eviction(Tova)),
        ("key norm", eviction(KeyNorm)),
        ("expected attention", eviction(ExpectedAttention::new(None, false))),
        ("ChunkKV", eviction(Chunks::new(SnapKv::default(), NonZeroU32::new(10).unwrap()))),
        ("FastV", eviction(FastVReceived)),
    ] {
        // Known evicted pages are bounded, and the bound is reached within the first tenth.
        soak(name, config(1).hits(Hits::new().known(8)).evict(eviction), ReadPages::All);
    }
}

#[test]
fn rollback_experts_and_forms_of_reading_take_as_much_too() {
    for (name, eviction) in [("H2O", eviction(H2o)), ("key norm", eviction(KeyNorm))] {
        soak(name, config(1).rollback(5).evict(eviction.clone()), ReadPages::All);
        soak(name, config(4).evict(eviction.clone()), ReadPages::All);
        soak(name, config(4).rollback(3).evict(eviction.clone()), ReadPages::Experts);
        let hits = config(4).hits(Hits::new().known(8));
        soak(name, hits.evict(eviction.clone()), ReadPages::Experts);
        soak(name, config(2).key_bounds(true).evict(eviction), ReadPages::Quest { pages: 4 });
    }
}

#[test]
fn every_codec_takes_as_much_too() {
    let plain = |k, v| Codec::new(Coding::new(k), Coding::new(v));
    let means = Coding::means(Code::F16, 1).unwrap();
    for (name, codec) in [
        ("int8", plain(Code::Int8, Code::Int8)),
        ("int4", plain(Code::Int4, Code::Int4)),
        ("fp8", plain(Code::E4m3, Code::E5m2)),
        ("means", Codec::new(Coding::new(Code::F16), means)),
        ("block PCA", Codec::new(Coding::block_pca(Code::F32, 4).unwrap(), Coding::new(Code::Bf16))),
    ] {
        soak(name, config(1).compress(codec).evict(eviction(H2o).by_page()), ReadPages::All);
    }
    let aged = config(1).compress(plain(Code::Int8, Code::Int8)).age(64, plain(Code::Int4, Code::Int4));
    soak("aged", aged.evict(eviction(KeyNorm).by_page()), ReadPages::All);
}

/// The visible places of tokens.
fn pages(sequence: &Sequence) -> Vec<PageInfo> {
    (0..HEADS as usize).flat_map(|head| sequence.pages(0, head).unwrap()).collect()
}

#[test]
fn pins_merge_and_keep_what_ranges_that_never_touch_do() {
    const REACH: u32 = 400;
    for seed in 0..20 {
        let cache = Cache::new(config(1).evict(eviction(H2o))).unwrap();
        let (mut sequence, mut plain) = (cache.sequence(), cache.sequence());
        let mut rng = Rng(seed);
        let mut pinned = [false; REACH as usize];
        for _ in 0..1 + seed % 8 * 3 {
            let from = rng.below(REACH);
            let positions = from..(from + rng.below(40)).min(REACH);
            pinned[positions.start as usize..positions.end as usize].fill(true);
            sequence.pin(positions);
        }
        // One range for each run of pinned positions.
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for position in (0..REACH).filter(|position| pinned[*position as usize]) {
            match ranges.last_mut().filter(|range| range.end == position) {
                Some(range) => range.end += 1,
                None => ranges.push(position..position + 1),
            }
        }
        ranges.into_iter().for_each(|range| plain.pin(range));
        let (mut a, mut b) = (Rng(seed), Rng(seed));
        for _ in 0..REACH {
            let out = [(&mut sequence, &mut a), (&mut plain, &mut b)]
                .map(|(sequence, rng)| step(&cache, sequence, rng, ReadPages::All).map(f32::to_bits));
            assert_eq!(out[0], out[1]);
        }
        assert_eq!(pages(&sequence), pages(&plain));
        let held: Vec<bool> = (0..REACH).map(|p| holds(&sequence, p)).collect();
        assert!(pinned.iter().zip(held).all(|(pinned, held)| held || !pinned));
    }
}

/// Whether the first head holds the token at `position`.
fn holds(sequence: &Sequence, position: u32) -> bool {
    let mut pages = sequence.pages(0, 0).unwrap();
    pages.any(|page| sequence.positions(0, 0, page.id).unwrap().any(|(_, other)| other.0 == position))
}

#[test]
fn pinning_the_same_again_takes_no_memory() {
    let cache = Cache::new(config(1).evict(eviction(H2o))).unwrap();
    let mut sequence = cache.sequence();
    sequence.pin(0..16);
    let before = sequence.table_bytes();
    for i in 0..1_000_000 {
        sequence.pin(i % 16..16);
        sequence.pin(i % 3..i % 3);
    }
    assert_eq!(sequence.table_bytes(), before);
}

#[test]
fn a_rollback_that_no_memory_holds_is_refused_where_a_policy_keeps_something() {
    let refused = |rollback, eviction| match Cache::new(config(1).rollback(rollback).evict(eviction)) {
        Err(Error::Config(ConfigError::PolicyRollback { layer: 0, policy, rollback: told, limit: 1024 })) => {
            assert_eq!(told, rollback);
            Some(policy)
        }
        Err(other) => panic!("{other}"),
        Ok(_) => None,
    };
    for rollback in [1025, 1 << 20, (1 << 31) - 100] {
        assert_eq!(refused(rollback, eviction(H2o)).as_deref(), Some("H2O"));
        let expected = eviction(ExpectedAttention::new(None, false));
        assert_eq!(refused(rollback, expected).as_deref(), Some("expected attention"));
        // Policies without state.
        assert_eq!(refused(rollback, eviction(StreamingLlm)), None);
    }
    for eviction in [eviction(H2o), eviction(ExpectedAttention::new(None, false))] {
        let cache = Cache::new(config(1).rollback(1024).evict(eviction)).unwrap();
        let (mut sequence, mut rng) = (cache.sequence(), Rng(3));
        for _ in 0..100 {
            step(&cache, &mut sequence, &mut rng, ReadPages::All);
        }
        sequence.rollback(60).unwrap();
        assert_eq!(sequence.next_position().0, 40);
    }
    let error = Cache::new(config(1).rollback(5000).evict(eviction(Tova))).unwrap_err().to_string();
    assert!(error.contains("5000") && error.contains("1024") && error.contains("TOVA"), "{error}");
}

#[test]
fn the_docs_say_what_an_expert_costs() {
    let empty = |experts| Cache::new(config(experts)).unwrap().sequence().table_bytes();
    assert_eq!(empty(101), empty(1));
    let said = format!("{} bytes a layer, and an expert of a KV head takes nothing", empty(1));
    assert!(include_str!("../../docs/costs.md").contains(&said), "{said}");
}
