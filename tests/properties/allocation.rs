//! A step of a size that occurred before allocates nothing: append, pack, attend, route, observe, commit. Only a ranking of tokens by a
//! policy, which is due once in a sixteenth of its budget, allocates lists.

use half::bf16;
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o, Lru, SnapKv, StreamingLlm};
use pikv::router::{CacheAware, LoadBalanced, Router, Shape};
use pikv::rules::Hits;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape, Rope, Scalar, Sequence};
use pikv_test::full;
use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The system's allocator, which counts the bytes requested while it is switched on.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicU64 = AtomicU64::new(0);
/// Bytes that were asked for and not given back.
static HELD: AtomicI64 = AtomicI64::new(0);

fn asked(bytes: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        ASKED.fetch_add(1, Ordering::Relaxed);
        HELD.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed to the system's allocator unchanged; counting does not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        asked(layout.size() as i64);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Memory) -> *mut u8 {
        asked(layout.size() as i64);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        asked(size as i64 - layout.size() as i64);
        // SAFETY: by the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Memory) {
        if COUNTS.load(Ordering::Relaxed) {
            HELD.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        }
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DIM: usize = 32;
const HEADS: usize = 2;
const QUERY_HEADS: usize = 4;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const LAYERS: usize = 2;
const OPTIONS: Attend = Attend::new(0.17);

fn config(window: Option<u32>, rope: Option<Rope>) -> CacheConfig {
    let dim = DIM as u32;
    let (kv_heads, query_heads) = (HEADS as u32, QUERY_HEADS as u32);
    let layer = LayerShape::new(kv_heads, query_heads, dim, Dtype::Bf16).window(window).rope(rope);
    let config = CacheConfig::new(vec![layer; LAYERS], 256 << 20).ring(64).sinks(4);
    // Few evicted pages are known, so that as many are dropped as are added.
    config.experts(EXPERTS as u32, TOP_K as u32).hits(Hits::new().known(8))
}

fn noise(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Elements of tensors.
trait Number: Scalar {
    fn of(x: f32) -> Self;
    fn is_finite(&self) -> bool;
}

impl Number for f32 {
    fn of(x: f32) -> f32 {
        x
    }
    fn is_finite(&self) -> bool {
        f32::is_finite(*self)
    }
}

impl Number for bf16 {
    fn of(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    fn is_finite(&self) -> bool {
        bf16::is_finite(*self)
    }
}

/// Three sequences in a loop, with room for a step's rows.
struct Decoding<T> {
    of: ClosedLoop,
    sequences: Vec<Sequence>,
    k: Vec<T>,
    v: Vec<T>,
    q: Vec<T>,
    logits: Vec<T>,
    out: Vec<T>,
    seed: u64,
}

impl<T: Number> Decoding<T> {
    fn new(config: CacheConfig, balanced: bool) -> Decoding<T> {
        let cache = Cache::new(config).unwrap();
        let shape = Shape::new(EXPERTS as u32, TOP_K as u32);
        let router = || -> Box<dyn Router> {
            match balanced {
                true => Box::new(LoadBalanced::default().router(shape).unwrap()),
                false => Box::new(CacheAware::default().router(shape).unwrap()),
            }
        };
        let sequences: Vec<Sequence> = (0..3).map(|_| cache.sequence()).collect();
        let rows = sequences.len();
        Decoding {
            of: ClosedLoop::new(cache, (0..LAYERS).map(|_| router()).collect()).unwrap(),
            sequences,
            k: vec![T::of(0.0); rows * HEADS * DIM],
            v: vec![T::of(0.0); rows * HEADS * DIM],
            q: vec![T::of(0.0); rows * QUERY_HEADS * DIM],
            logits: vec![T::of(0.0); rows * EXPERTS],
            out: vec![T::of(0.0); rows * QUERY_HEADS * DIM],
            seed: 7,
        }
    }

    /// A token of each sequence.
    fn step(&mut self) {
        let mut step = self.of.begin(self.sequences.iter_mut().map(|sequence| (sequence, 1))).unwrap();
        for layer in 0..LAYERS {
            for x in [&mut self.k, &mut self.v, &mut self.q, &mut self.logits] {
                x.iter_mut().for_each(|x| *x = T::of(noise(&mut self.seed)));
            }
            step.append(layer, &self.k, &self.v).unwrap();
            step.attend(layer, &self.q, &OPTIONS, AttendOutput::new(&mut self.out)).unwrap();
            step.route(layer, &self.logits).unwrap();
        }
        step.commit().unwrap();
        assert!(self.out.iter().all(|x| x.is_finite()));
    }

    /// Bytes that a step requests from the allocator, in the calling thread and in those of its pool; `None` if tokens were ranked in it.
    fn ask(&mut self) -> Option<u64> {
        let before = ASKED.load(Ordering::Relaxed);
        COUNTS.store(true, Ordering::Relaxed);
        self.step();
        COUNTS.store(false, Ordering::Relaxed);
        let asked = ASKED.load(Ordering::Relaxed) - before;
        self.of.report().evicted.is_empty().then_some(asked)
    }

    /// Bytes that `steps` steps request, and the number of steps with a ranking.
    fn asks(&mut self, steps: usize) -> (u64, usize) {
        let asked: Vec<Option<u64>> = (0..steps).map(|_| self.ask()).collect();
        (asked.iter().flatten().sum(), asked.iter().filter(|asked| asked.is_none()).count())
    }
}

/// Nothing else may run at the same time, since it would be counted.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs `config` over `warm` steps, and counts over as many again, with one thread and with two. Each thread has lists of its own, and it
/// is chance which thread gets the largest tasks: there are up to seven more rounds, until one requests nothing.
fn settles(name: &str, config: &CacheConfig, warm: usize) {
    settles_in::<f32>(name, config, warm);
}

/// [`settles`], with tensors of some dtype.
fn settles_in<T: Number>(name: &str, config: &CacheConfig, warm: usize) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for threads in [1, 2] {
        // Inside a pool: to be let in from outside, a call puts itself in a queue that grows.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        // Quick: one router with one thread, the other with two.
        for balanced in [true, false].into_iter().filter(|b| full() || *b == (threads == 1)) {
            let asked = pool.install(|| {
                let mut decoding = Decoding::<T>::new(config.clone(), balanced);
                (0..warm).for_each(|_| decoding.step());
                let mut least = decoding.asks(warm);
                for _ in 0..7 {
                    if least.0 == 0 {
                        break;
                    }
                    least = least.min(decoding.asks(warm));
                }
                least
            });
            let (asked, rankings) = asked;
            assert!(rankings <= warm / 20, "{name}: {rankings} rankings in {warm} steps");
            assert_eq!(asked, 0, "{name}, {threads} threads, balanced: {balanced}");
        }
    }
}

#[test]
fn what_is_counted_is_seen() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = ASKED.load(Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    drop(std::hint::black_box(Box::new(1)));
    rayon::join(|| drop(std::hint::black_box(vec![0u8; 9])), || ());
    COUNTS.store(false, Ordering::Relaxed);
    assert!(ASKED.load(Ordering::Relaxed) - before >= 2);
}

#[test]
fn behind_a_window_nothing_is_asked_for() {
    settles("window", &config(Some(500), None), 1500);
    let rope = Rope::new(10_000.0, DIM as u32);
    settles("window, rotated", &config(Some(500), Some(rope)), 1500);
    let codec = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4));
    settles("window, packed", &config(Some(500), None).compress(codec), 1500);
}

#[test]
fn tensors_in_16_bits_are_widened_in_what_is_there() {
    let rope = Rope::new(10_000.0, DIM as u32);
    let codec = Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4));
    let evicted = Eviction::new(H2o, Budget::Tokens(400));
    // Without a window, which would have each head rank at steps of its own, in half of all.
    settles_in::<bf16>("bf16", &config(None, Some(rope)).compress(codec).evict(evicted), 1500);
}

#[test]
fn within_a_budget_nothing_is_asked_for() {
    let budget = || Budget::Tokens(400);
    settles("StreamingLLM", &config(None, None).evict(Eviction::new(StreamingLlm, budget())), 1500);
    settles("LRU", &config(None, None).evict(Eviction::new(Lru::default(), budget())), 1500);
    settles("H2O", &config(None, None).evict(Eviction::new(H2o, budget())), 1500);
    settles("SnapKV", &config(None, None).evict(Eviction::new(SnapKv::default(), budget())), 1500);
}

/// Enough rows for tiles: a thread reuses its scratch for them. (Pages and lists that grow are allocated at times.)
#[test]
fn rows_of_a_prompt_are_attended_in_what_is_there() {
    const ROWS: usize = 24;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let asked: Vec<u64> = pool.install(|| {
        let layer = LayerShape::new(HEADS as u32, QUERY_HEADS as u32, DIM as u32, Dtype::Bf16).window(500);
        let cache = Cache::new(CacheConfig::new(vec![layer], 256 << 20).ring(64).sinks(4)).unwrap();
        let mut sequence = cache.sequence();
        let mut seed = 3;
        let mut rows = |heads: usize| (0..ROWS * heads * DIM).map(|_| noise(&mut seed)).collect::<Vec<f32>>();
        let (k, v, q) = (rows(HEADS), rows(HEADS), rows(QUERY_HEADS));
        let mut out = vec![0.0; q.len()];
        let mut step = || {
            let mut step = cache.begin([(&mut sequence, ROWS as u32)]).unwrap();
            step.append(0, &k, &v).unwrap();
            let before = ASKED.load(Ordering::Relaxed);
            COUNTS.store(true, Ordering::Relaxed);
            step.attend(0, &q, &OPTIONS, AttendOutput::new(&mut out)).unwrap();
            COUNTS.store(false, Ordering::Relaxed);
            step.commit().unwrap();
            ASKED.load(Ordering::Relaxed) - before
        };
        (0..60).map(|_| step()).collect()
    });
    assert!(asked[0] > 0, "the first call makes the buffers");
    let quiet = asked[30..].iter().filter(|asked| **asked == 0).count();
    assert!(quiet >= 15, "{asked:?}");
}

#[test]
fn growth_is_asked_for_page_by_page() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    pool.install(|| {
        let mut decoding = Decoding::<f32>::new(config(None, None), true);
        (0..1000).for_each(|_| decoding.step());
        let asked: Vec<Option<u64>> = (0..500).map(|_| decoding.ask()).collect();
        let quiet = asked.iter().filter(|asked| **asked == Some(0)).count();
        assert!(quiet >= 400, "{asked:?}");
    });
}

/// The result of `make`, and the bytes that it allocated and kept.
fn kept<T>(make: impl FnOnce() -> T) -> (T, i64) {
    let before = HELD.load(Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    let made = make();
    COUNTS.store(false, Ordering::Relaxed);
    (made, HELD.load(Ordering::Relaxed) - before)
}

/// A fork takes a pointer a layer at any length. Its first token takes what is then written, and dropping it frees everything.
#[test]
fn a_fork_takes_little_until_it_grows() {
    const LAYERS: usize = 8;
    const HEADS: usize = 4;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        let layer = LayerShape::new(HEADS as u32, HEADS as u32, 8, Dtype::Bf16);
        let cache = Cache::new(CacheConfig::new(vec![layer; LAYERS], 1 << 30).ring(64)).unwrap();
        let add = |sequence: &mut Sequence, n: usize| {
            let rows = vec![0.5; n * HEADS * 8];
            let mut step = cache.begin([(sequence, n as u32)]).unwrap();
            (0..LAYERS).for_each(|layer| step.append(layer, &rows, &rows).unwrap());
            step.commit().unwrap();
        };
        for tokens in [0, 40, 4_000, 16_000] {
            let mut sequence = cache.sequence();
            (0..tokens / 40).for_each(|_| add(&mut sequence, 40));
            let (mut fork, bytes) = kept(|| sequence.fork());
            let heads = (LAYERS * HEADS) as i64;
            assert!(bytes <= 64 * heads, "{bytes} bytes of a fork of {tokens} tokens");
            // Lists of a few pages, and a pointer for every 16 others.
            let ((), grown) = kept(|| add(&mut fork, 1));
            let lists = (tokens as i64 / 32 / 16 + 6) * 64 + 16 * 128 + 1_500;
            assert!(grown <= heads * lists, "{grown} bytes of a fork's first token after {tokens}");
            let (_, left) = kept(|| drop(fork));
            assert!(left <= -bytes, "{left} of {bytes} bytes");
        }
    });
}

/// Experts without tokens take nothing, nor do layers without tokens.
#[test]
fn an_empty_sequence_takes_little_whatever_its_shape() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let layer = LayerShape::new(8, 8, 8, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer; 92], 1 << 30).ring(64).experts(160, 8);
    let cache = Cache::new(config).unwrap();
    let (mut sequence, bytes) = kept(|| cache.sequence());
    assert!(bytes <= 64 << 10, "{bytes} bytes of an empty sequence");
    assert!(sequence.table_bytes() <= 64 << 10, "{} bytes of tables", sequence.table_bytes());
    let (_, fork) = kept(|| sequence.fork());
    assert!(fork <= 64 << 10, "{fork} bytes of its fork");
    // The first tokens are filed by some of the experts: the others still take nothing.
    let ((), grown) = kept(|| {
        let rows = vec![0.5; 128 * 64];
        let mut step = cache.begin([(&mut sequence, 128)]).unwrap();
        for layer in 0..92 {
            step.append(layer, &rows, &rows).unwrap();
            step.route(layer, &[[1, 2, 3, 4, 5, 6, 7, 8]; 128].concat()).unwrap();
        }
        step.commit().unwrap();
    });
    assert!(grown <= 92 * 8 * (6 << 10), "{grown} bytes of a sequence of 128 tokens");
}
