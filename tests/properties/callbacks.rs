//! Callbacks of the user's that panic, refuse, or return different values on each call: afterwards every sequence is as if the call had
//! not been made, or had succeeded, or reports that it is poisoned; and so are the routers.

use pikv::closed_loop::LoopError;
use pikv::metrics::{Collector, Sink, StepMetrics};
use pikv::policy::{
    Budget, Candidates, Eviction, H2o, HeadSeen, KeyNorm, Lru, MassFeedback, Policy, Scope, Seen, Token, Tova,
};
use pikv::router::{
    CacheAware, LoadBalanced, PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape,
};
use pikv::tiers::{PageStore, Tiers};
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, Error, LayerShape, Position, Rows, Sequence,
};
use pikv_test::numbers::{Rng, bits, noise};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};

const DIM: usize = 4;
const LAYERS: usize = 2;
const EXPERTS: usize = 4;

/// Panics in a callback when the count reaches 0.
#[derive(Debug, Default)]
struct Fuse(AtomicI64);

const BLOWN: &str = "a fuse of the test's";

impl Fuse {
    fn set(&self, calls: i64) {
        self.0.store(calls, Ordering::Relaxed);
    }

    fn call(&self) {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            panic!("{BLOWN}");
        }
    }
}

/// From when its count reaches 0, one address is read wrong: also when a read that was ahead of its use is repeated.
#[derive(Debug, Default)]
struct Lies {
    reads: AtomicI64,
    /// The address + 1; 0 for none.
    at: AtomicU64,
}

impl Lies {
    fn set(&self, reads: i64) {
        self.reads.store(reads, Ordering::Relaxed);
        self.at.store(0, Ordering::Relaxed);
    }

    fn read(&self, at: u64, bytes: &mut [u8]) {
        if self.reads.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.at.store(at + 1, Ordering::Relaxed);
        }
        bytes[0] ^= u8::from(self.at.load(Ordering::Relaxed) == at + 1);
    }
}

/// The result of `f`, or `None` if a fuse panicked in it.
fn guarded<T>(f: impl FnOnce() -> T) -> Option<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let said = payload.downcast_ref::<&str>().copied();
            if said.or(payload.downcast_ref::<String>().map(String::as_str)) != Some(BLOWN) {
                loud(info);
            }
        }));
    });
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => Some(result),
        Err(panic) => {
            let blown = panic.downcast_ref::<String>().map(String::as_str) == Some(BLOWN)
                || panic.downcast_ref::<&str>() == Some(&BLOWN);
            if !blown {
                std::panic::resume_unwind(panic);
            }
            None
        }
    }
}

fn layer() -> LayerShape {
    LayerShape::new(2, 2, DIM as u32, Dtype::F32)
}

fn config() -> CacheConfig {
    CacheConfig::new(vec![layer(); LAYERS], 8 << 20).ring(8).sinks(2).experts(EXPERTS as u32, 1)
}

/// A policy behind a fuse.
#[derive(Debug)]
struct Fused {
    inner: Arc<dyn Policy>,
    fuse: Arc<Fuse>,
}

impl Policy for Fused {
    fn name(&self) -> &str {
        self.fuse.call();
        self.inner.name()
    }
    fn feedback(&self) -> MassFeedback {
        self.fuse.call();
        self.inner.feedback()
    }
    fn words(&self) -> usize {
        self.inner.words()
    }
    fn head_words(&self, k_dim: usize, group: usize) -> usize {
        self.inner.head_words(k_dim, group)
    }
    fn scope(&self) -> Scope {
        self.fuse.call();
        self.inner.scope()
    }
    fn reads_tokens(&self) -> bool {
        self.fuse.call();
        self.inner.reads_tokens()
    }
    fn born(&self, token: &Token<'_>, state: &mut [f32]) {
        self.fuse.call();
        self.inner.born(token, state);
    }
    fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; 32]]) {
        self.inner.observe(seen, state);
        self.fuse.call();
    }
    fn observe_head(&self, seen: &HeadSeen<'_>, state: &mut [f32]) {
        self.inner.observe_head(seen, state);
        self.fuse.call();
    }
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
        self.inner.rank(tokens, utility);
        self.fuse.call();
    }
    fn oldest_first(&self) -> bool {
        self.fuse.call();
        self.inner.oldest_first()
    }
    fn lean(&self, head: &[f32]) -> Option<f32> {
        self.fuse.call();
        self.inner.lean(head)
    }
    fn threshold(&self, head: &[f32]) -> Option<f32> {
        self.fuse.call();
        self.inner.threshold(head)
    }
}

/// One step of some sequences, up to `layers` layers; committed if these are all.
fn step(
    cache: &Cache,
    sequences: Vec<(&mut Sequence, u32)>,
    seed: u64,
    layers: usize,
) -> Result<Vec<f32>, Error> {
    let mut all = Vec::new();
    let mut step = cache.begin(sequences)?;
    let n = step.rows();
    for layer in 0..layers {
        let seed = seed * 16 + layer as u64 * 4;
        step.append(layer, &noise(seed, n * 2 * DIM), &noise(seed + 1, n * 2 * DIM))?;
        let mut out = vec![0.0; n * 2 * DIM];
        step.attend(layer, &noise(seed + 2, n * 2 * DIM), &Attend::new(1.0), AttendOutput::new(&mut out))?;
        all.extend(out);
        let experts: Vec<u16> = (0..n as u64).map(|i| ((i * 5 + seed) % EXPERTS as u64) as u16).collect();
        step.route(layer, &experts)?;
    }
    if layers == LAYERS {
        step.commit()?;
    }
    Ok(all)
}

/// The tokens that a sequence holds, and its outputs.
fn look(cache: &Cache, sequence: &Sequence) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let (mut outs, mut held) = (Vec::new(), Vec::new());
    let Some(last) = sequence.next_position().0.checked_sub(1) else { return Ok((outs, held)) };
    for layer in 0..LAYERS {
        let mut out = [0.0; 2 * DIM];
        let rows = [Rows::new(sequence, Position(last), 1)];
        cache.attend(layer, &rows, &noise(77, 2 * DIM), &Attend::new(1.0), AttendOutput::new(&mut out))?;
        outs.extend(bits(&out));
        for head in 0..2 {
            let pages: Vec<_> = sequence.pages(layer, head)?.collect();
            for page in pages {
                held.extend(sequence.positions(layer, head, page.id)?.map(|(_, position)| position.0));
            }
        }
    }
    Ok((outs, held))
}

fn same(caches: [&Cache; 2], sequences: [&Sequence; 2], what: &str) {
    assert_eq!(sequences[0].next_position(), sequences[1].next_position(), "{what}");
    assert!(
        look(caches[0], sequences[0]).unwrap() == look(caches[1], sequences[1]).unwrap(),
        "{what}: other bits, or other tokens"
    );
}

/// A sequence that says that it is poisoned says so to every call, and is as new once it is cleared.
fn poisoned(cache: &Cache, sequence: &mut Sequence) -> bool {
    if sequence.pages(0, 0).is_ok() {
        return false;
    }
    assert_eq!(cache.begin([(&mut *sequence, 1)]).err(), Some(Error::Poisoned));
    assert_eq!(sequence.rollback(0), Err(Error::Poisoned));
    assert_eq!(sequence.fork().resident(0, 0), Err(Error::Poisoned));
    let rows = [Rows::new(sequence, Position(sequence.next_position().0), 1)];
    let attended =
        cache.attend(0, &rows, &[0.0; 2 * DIM], &Attend::new(1.0), AttendOutput::new(&mut [0.0; 2 * DIM]));
    assert_eq!(attended, Err(Error::Poisoned));
    sequence.clear();
    assert!(sequence.pages(0, 0).is_ok());
    true
}

/// Random histories in which a policy panics in some callback, beside a twin without panics.
#[test]
fn a_policy_that_panics_leaves_what_a_twin_has_or_says_that_it_did_not() {
    let policies: [Arc<dyn Policy>; 4] =
        [Arc::new(H2o), Arc::new(Tova), Arc::new(Lru::default()), Arc::new(KeyNorm)];
    let (mut blown, mut spoilt, mut whole) = (0, 0, 0);
    for seed in 0..24u64 {
        let mut rng = Rng(seed);
        let fuse = Arc::new(Fuse::default());
        let inner = policies[seed as usize % 4].clone();
        let rollback = if seed % 8 < 4 { 0 } else { 3 };
        let cache = |fuse: &Arc<Fuse>| {
            let policy = Fused { inner: inner.clone(), fuse: fuse.clone() };
            Cache::new(config().rollback(rollback).evict(Eviction::new(policy, Budget::Tokens(24)).batch(3)))
                .unwrap()
        };
        let caches = [cache(&fuse), cache(&Arc::default())];
        let [mut a, mut b] = [0, 1].map(|i| [caches[i].sequence(), caches[i].sequence()]);
        for turn in 0..60 {
            let what = format!("seed {seed}, turn {turn}");
            fuse.set(if rng.one_in(3) { 1 + i64::from(rng.below(60)) } else { 0 });
            let at = rng.below(2) as usize;
            if rollback > 0 && rng.one_in(5) {
                let n = rng.below(4).min(a[at].rollback_limit());
                let done = guarded(|| a[at].rollback(n).unwrap());
                fuse.set(0);
                if done.is_none() {
                    blown += 1;
                    if poisoned(&caches[0], &mut a[at]) {
                        spoilt += 1;
                        b[at].clear();
                        continue;
                    }
                }
                b[at].rollback(n).unwrap();
                same([&caches[0], &caches[1]], [&a[at], &b[at]], &what);
                continue;
            }
            let both = rng.one_in(2);
            let n = if rng.one_in(4) { 5 } else { 1 };
            let layers = if rng.one_in(6) { 1 } else { LAYERS };
            let before = a[at].next_position().0;
            fn parts(of: &mut [Sequence; 2], at: usize, both: bool, n: u32) -> Vec<(&mut Sequence, u32)> {
                of.iter_mut().enumerate().filter(|(i, _)| both || *i == at).map(|(_, s)| (s, n)).collect()
            }
            let done =
                guarded(|| step(&caches[0], parts(&mut a, at, both, n), 100 * seed + turn, layers).unwrap());
            fuse.set(0);
            let mut bad = [false; 2];
            if done.is_none() {
                blown += 1;
                for (i, bad) in bad.iter_mut().enumerate() {
                    *bad = poisoned(&caches[0], &mut a[i]);
                }
                spoilt += u64::from(bad[0] || bad[1]);
                whole += u64::from(!bad[0] && !bad[1]);
            }
            // The twin repeats the step as far as it took effect: as a whole, or not at all.
            let committed = bad[0] || bad[1] || (layers == LAYERS && a[at].next_position().0 > before);
            let twin = step(
                &caches[1],
                parts(&mut b, at, both, n),
                100 * seed + turn,
                if committed { LAYERS } else { 0 },
            );
            let twin = twin.unwrap();
            if let Some(done) = done.filter(|_| layers == LAYERS) {
                assert_eq!(bits(&done), bits(&twin), "{what}");
            }
            for i in 0..2 {
                if bad[i] {
                    b[i].clear();
                }
                same([&caches[0], &caches[1]], [&a[i], &b[i]], &what);
            }
        }
        drop((a, b));
        caches.iter().for_each(|cache| assert_eq!(cache.usage().taken, 0, "seed {seed}"));
    }
    assert!(blown > 60 && spoilt > 10 && whole > 10, "{blown} {spoilt} {whole}");
}

/// A policy whose properties change from call to call. The values read when the cache was built apply.
#[test]
fn a_policy_that_changes_its_mind_is_taken_at_its_first_word() {
    #[derive(Debug, Default)]
    struct Fickle(AtomicU64);
    impl Fickle {
        fn odd(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) % 2 == 1
        }
    }
    #[derive(Debug)]
    struct Steady;
    fn rank(tokens: &Candidates<'_>, utility: &mut [f32]) {
        for (i, utility) in utility.iter_mut().enumerate() {
            // Including NaN, which is the lowest utility.
            *utility =
                if tokens.position(i) % 7 == 3 { f32::NAN } else { (tokens.position(i) * 37 % 101) as f32 };
        }
    }
    impl Policy for Fickle {
        fn name(&self) -> &str {
            // Never the same twice.
            const NAMES: [&str; 4] = ["a", "b", "c", "d"];
            NAMES[self.0.fetch_add(1, Ordering::Relaxed) as usize % 4]
        }
        fn scope(&self) -> Scope {
            if self.0.load(Ordering::Relaxed) < 16 || self.odd() { Scope::Layer } else { Scope::Sequence }
        }
        fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
            rank(tokens, utility);
        }
        fn threshold(&self, _head: &[f32]) -> Option<f32> {
            Some(if self.odd() { f32::NAN } else { f32::NEG_INFINITY })
        }
    }
    impl Policy for Steady {
        fn name(&self) -> &str {
            "steady"
        }
        fn scope(&self) -> Scope {
            Scope::Layer
        }
        fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
            rank(tokens, utility);
        }
    }
    let cache = |eviction| Cache::new(config().evict(eviction)).unwrap();
    let caches = [
        cache(Eviction::new(Fickle::default(), Budget::Tokens(20))),
        cache(Eviction::new(Steady, Budget::Tokens(20))),
    ];
    let [mut a, mut b] = [0, 1].map(|i| caches[i].sequence());
    for seed in 0..80 {
        step(&caches[0], vec![(&mut a, 1)], seed, LAYERS).unwrap();
        step(&caches[1], vec![(&mut b, 1)], seed, LAYERS).unwrap();
        same([&caches[0], &caches[1]], [&a, &b], &format!("step {seed}"));
    }
}

/// In its callbacks a policy steps, reads and forks other sequences of its own cache.
#[test]
fn a_policy_that_calls_the_cache_changes_nothing_of_the_call_that_it_is_in() {
    #[derive(Debug, Default)]
    struct Busy(Mutex<Option<Cache>>, AtomicU64);
    impl Busy {
        fn work(&self, seed: u64) {
            if !self.1.fetch_add(1, Ordering::Relaxed).is_multiple_of(40) {
                return;
            }
            // Taken out during the calls, so that their own callbacks do nothing.
            let Some(cache) = self.0.lock().unwrap().take() else { return };
            let mut own = cache.sequence();
            for i in 0..3 {
                step(&cache, vec![(&mut own, 9)], seed + i, LAYERS).unwrap();
            }
            look(&cache, &own.fork()).unwrap();
            *self.0.lock().unwrap() = Some(cache);
        }
    }
    impl Policy for Busy {
        fn name(&self) -> &str {
            "busy"
        }
        fn feedback(&self) -> MassFeedback {
            MassFeedback::All
        }
        fn words(&self) -> usize {
            1
        }
        fn born(&self, token: &Token<'_>, state: &mut [f32]) {
            self.work(1);
            KeyNorm.born(token, state);
        }
        fn observe(&self, seen: &Seen<'_>, state: &mut [[f32; 32]]) {
            self.work(2);
            H2o.observe(seen, state);
        }
        fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]) {
            self.work(3);
            H2o.rank(tokens, utility);
        }
    }
    let busy = Arc::new(Busy::default());
    let build = |policy: Arc<dyn Policy>| {
        let mut eviction = Eviction::new(H2o, Budget::Tokens(20)).batch(2);
        eviction.policy = policy;
        Cache::new(config().evict(eviction)).unwrap()
    };
    let caches = [build(busy.clone()), build(Arc::new(Busy::default()))];
    *busy.0.lock().unwrap() = Some(caches[0].clone());
    let [mut a, mut b] = [0, 1].map(|i| caches[i].sequence());
    for seed in 0..40 {
        let n = if seed % 6 == 5 { 12 } else { 1 };
        let x = step(&caches[0], vec![(&mut a, n)], 50 + seed, LAYERS).unwrap();
        let y = step(&caches[1], vec![(&mut b, n)], 50 + seed, LAYERS).unwrap();
        assert_eq!(bits(&x), bits(&y), "step {seed}");
        same([&caches[0], &caches[1]], [&a, &b], &format!("step {seed}"));
    }
    *busy.0.lock().unwrap() = None;
}

/// A tier's store that panics, refuses, or returns other bytes.
#[test]
fn a_tier_that_panics_or_lies_leaves_what_a_twin_has_or_says_that_it_did_not() {
    #[derive(Debug, Default)]
    struct Bytes {
        bytes: Mutex<Vec<u8>>,
        fuse: Arc<Fuse>,
        lies: Arc<Lies>,
    }
    impl PageStore for Bytes {
        fn write(&self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
            self.fuse.call();
            let mut all = self.bytes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let end = at as usize + bytes.len();
            let len = all.len().max(end);
            all.resize(len, 0);
            all[at as usize..end].copy_from_slice(bytes);
            Ok(())
        }
        fn read(&self, at: u64, bytes: &mut [u8]) -> std::io::Result<()> {
            self.fuse.call();
            let all = self.bytes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            bytes.copy_from_slice(&all[at as usize..at as usize + bytes.len()]);
            self.lies.read(at, bytes);
            Ok(())
        }
    }
    let (mut blown, mut refused) = (0, 0);
    for seed in 0..4u64 {
        let mut rng = Rng(seed);
        let (fuse, lies) = (Arc::new(Fuse::default()), Arc::new(Lies::default()));
        let build = |fuse: &Arc<Fuse>, lies: &Arc<Lies>| {
            let (fuse, lies) = (fuse.clone(), lies.clone());
            let open = move || -> std::io::Result<Box<dyn PageStore>> {
                Ok(Box::new(Bytes { fuse: fuse.clone(), lies: lies.clone(), ..Bytes::default() }))
            };
            let budget = 2 * 2 * 20 * u64::from(layer().layout.words()) * 4;
            let mut config = config().tiers(Tiers::new().store("bytes", 4 << 20, open));
            config.budget = budget;
            Cache::new(config.evict(Eviction::new(KeyNorm, Budget::Tokens(4000)))).unwrap()
        };
        let caches = [build(&fuse, &lies), build(&Arc::default(), &Arc::default())];
        let [mut a, mut b] = [0, 1].map(|i| caches[i].sequence());
        for turn in 0..120 {
            let what = format!("seed {seed}, turn {turn}");
            let trouble = rng.below(6);
            fuse.set(if trouble == 0 { 1 + i64::from(rng.below(12)) } else { 0 });
            lies.set(if trouble == 1 { 1 + i64::from(rng.below(12)) } else { 0 });
            let before = a.next_position().0;
            let done = guarded(|| step(&caches[0], vec![(&mut a, 8)], seed * 200 + turn, LAYERS));
            fuse.set(0);
            lies.set(0);
            blown += u64::from(done.is_none());
            refused += u64::from(matches!(done, Some(Err(_))));
            if poisoned(&caches[0], &mut a) {
                b.clear();
                continue;
            }
            let layers = if a.next_position().0 > before { LAYERS } else { 0 };
            let twin = step(&caches[1], vec![(&mut b, 8)], seed * 200 + turn, layers);
            if let (Some(Ok(done)), Ok(twin)) = (&done, &twin) {
                assert_eq!(bits(done), bits(twin), "{what}");
            }
            assert_eq!(a.next_position(), b.next_position(), "{what}: {done:?} {twin:?}");
        }
    }
    assert!(blown > 0 && refused > 0, "{blown} {refused}");
}

/// A router behind a fuse, which may also refuse to learn.
#[derive(Debug)]
struct Sulks {
    inner: Box<dyn Router>,
    fuse: Arc<Fuse>,
    refuses: Arc<Fuse>,
}

impl Sulks {
    fn refuses(&self) -> Result<(), RouteError> {
        if self.refuses.0.fetch_sub(1, Ordering::Relaxed) == 1 { Err(RouteError::NoArms) } else { Ok(()) }
    }
}

impl Router for Sulks {
    fn kind(&self) -> RouterKind {
        self.inner.kind()
    }
    fn shape(&self) -> Shape {
        self.inner.shape()
    }
    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        self.inner.route(first, logits, out)?;
        self.fuse.call();
        self.refuses()
    }
    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        self.fuse.call();
        self.refuses()?;
        self.inner.observe(feedback)
    }
    fn discard(&mut self) {
        self.inner.discard();
    }
    fn state(&self) -> RouterState {
        self.inner.state()
    }
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        self.inner.restore(state)
    }
}

fn routers(fuses: &[[Arc<Fuse>; 2]; LAYERS]) -> Vec<Box<dyn Router>> {
    let shape = Shape::new(EXPERTS as u32, 1);
    let inner: [Box<dyn Router>; LAYERS] = [
        Box::new(LoadBalanced::default().router(shape).unwrap()),
        Box::new(CacheAware::default().router(shape).unwrap()),
    ];
    let fused = |(inner, [fuse, refuses]): (Box<dyn Router>, &[Arc<Fuse>; 2])| -> Box<dyn Router> {
        Box::new(Sulks { inner, fuse: fuse.clone(), refuses: refuses.clone() })
    };
    inner.into_iter().zip(fuses).map(fused).collect()
}

fn no_fuses() -> [[Arc<Fuse>; 2]; LAYERS] {
    [[Arc::default(), Arc::default()], [Arc::default(), Arc::default()]]
}

/// One step of a loop.
fn turn(pikv: &mut ClosedLoop, sequence: &mut Sequence, n: usize, seed: u64) -> Result<Vec<f32>, LoopError> {
    let mut all = Vec::new();
    let mut step = pikv.begin([(sequence, n as u32)])?;
    for layer in 0..LAYERS {
        let seed = seed * 16 + layer as u64 * 4;
        step.append(layer, &noise(seed, n * 2 * DIM), &noise(seed + 1, n * 2 * DIM))?;
        let mut out = vec![0.0; n * 2 * DIM];
        step.attend(layer, &noise(seed + 2, n * 2 * DIM), &Attend::new(1.0), AttendOutput::new(&mut out))?;
        all.extend(out);
        step.route(layer, &noise(seed + 3, n * EXPERTS))?;
    }
    step.commit()?;
    Ok(all)
}

fn state(pikv: &mut ClosedLoop, layer: usize) -> RouterState {
    pikv.routers()[layer].state()
}

#[test]
fn a_router_that_refuses_to_learn_does_not_undo_what_is_committed_and_is_named() {
    let fuses = no_fuses();
    let cache = Cache::new(config().evict(Eviction::new(H2o, Budget::Tokens(20)).batch(1))).unwrap();
    let sink = Arc::new(Collector::new(EXPERTS));
    let mut pikv = ClosedLoop::new(cache.clone(), routers(&fuses)).unwrap().sink(sink.clone());
    let mut twin = ClosedLoop::new(cache.clone(), routers(&no_fuses())).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    for seed in 0..30 {
        turn(&mut pikv, &mut a, 1, seed).unwrap();
        turn(&mut twin, &mut b, 1, seed).unwrap();
    }
    let before = state(&mut pikv, 0);
    // It is asked once by the route, and then by the commit.
    fuses[0][1].set(2);
    let refused = LoopError::Committed { layer: 0, source: RouteError::NoArms };
    assert_eq!(turn(&mut pikv, &mut a, 2, 30), Err(refused));
    turn(&mut twin, &mut b, 2, 30).unwrap();
    assert_eq!(a.next_position().0, 32, "the step is committed");
    assert_eq!((sink.totals().steps, sink.totals().rows), (31, 32), "the sink was told");
    assert_eq!(state(&mut pikv, 0), before, "it has learnt nothing, and counts nothing of the step");
    assert_eq!(state(&mut pikv, 1), state(&mut twin, 1), "the other has learnt");
    same([&cache, &cache], [&a, &b], "the sequences");
    // From the same state on all is as in the twin.
    let learnt = state(&mut twin, 0);
    pikv.routers_mut()[0].restore(&learnt).unwrap();
    for seed in 31..60 {
        let (x, y) = (turn(&mut pikv, &mut a, 1, seed).unwrap(), turn(&mut twin, &mut b, 1, seed).unwrap());
        assert_eq!(bits(&x), bits(&y));
        assert_eq!((state(&mut pikv, 0), state(&mut pikv, 1)), (state(&mut twin, 0), state(&mut twin, 1)));
    }
}

#[test]
fn a_router_that_panics_counts_nothing_twice_and_takes_nobody_along() {
    let fuses = no_fuses();
    let cache = Cache::new(config().evict(Eviction::new(H2o, Budget::Tokens(20)).batch(1))).unwrap();
    let mut pikv = ClosedLoop::new(cache.clone(), routers(&fuses)).unwrap();
    let mut twin = ClosedLoop::new(cache.clone(), routers(&no_fuses())).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    let mut rng = Rng(8);
    let (mut dropped, mut committed) = (0, 0);
    for seed in 0..200 {
        let layer = rng.below(2) as usize;
        let kind = rng.below(2) as usize;
        if rng.one_in(3) {
            fuses[layer][kind].set(1 + i64::from(rng.below(2)));
        }
        let (before, learnt) = (a.next_position(), [state(&mut pikv, 0), state(&mut pikv, 1)]);
        let done = guarded(|| turn(&mut pikv, &mut a, 1, seed));
        fuses.iter().flatten().for_each(|fuse| fuse.set(0));
        if matches!(done, Some(Ok(_))) {
            turn(&mut twin, &mut b, 1, seed).unwrap();
        } else if a.next_position() == before {
            dropped += 1;
            assert_eq!([state(&mut pikv, 0), state(&mut pikv, 1)], learnt, "step {seed} never was");
        } else {
            committed += 1;
            assert!(matches!(done, None | Some(Err(LoopError::Committed { .. }))), "{done:?}");
            turn(&mut twin, &mut b, 1, seed).unwrap();
            assert_eq!(state(&mut pikv, layer), learnt[layer], "step {seed}: it has learnt nothing");
            assert_eq!(
                state(&mut pikv, 1 - layer),
                state(&mut twin, 1 - layer),
                "step {seed}: the other has"
            );
            let own = state(&mut twin, layer);
            pikv.routers_mut()[layer].restore(&own).unwrap();
        }
        same([&cache, &cache], [&a, &b], &format!("step {seed}"));
        assert_eq!([0, 1].map(|l| state(&mut pikv, l)), [0, 1].map(|l| state(&mut twin, l)), "step {seed}");
    }
    assert!(dropped > 5 && committed > 5, "{dropped} {committed}");
}

/// A sink that panics in its first or its last call.
#[test]
fn a_sink_that_panics_leaves_a_step_that_is_committed_or_never_was() {
    struct Shouts(Arc<Fuse>);
    impl Sink for Shouts {
        fn step(&self, _step: &StepMetrics<'_>) {
            self.0.call();
        }
        fn wants_reused(&self) -> bool {
            self.0.call();
            true
        }
    }
    let fuse = Arc::new(Fuse::default());
    let cache = Cache::new(config().evict(Eviction::new(H2o, Budget::Tokens(20)).batch(1))).unwrap();
    let mut pikv =
        ClosedLoop::new(cache.clone(), routers(&no_fuses())).unwrap().sink(Arc::new(Shouts(fuse.clone())));
    let mut twin = ClosedLoop::new(cache.clone(), routers(&no_fuses())).unwrap();
    let (mut a, mut b) = (cache.sequence(), cache.sequence());
    for seed in 0..60 {
        fuse.set([0, 1, 2][seed as usize % 3]);
        let before = a.next_position();
        let done = guarded(|| turn(&mut pikv, &mut a, 1, seed).unwrap());
        assert_eq!(done.is_some(), seed % 3 == 0);
        assert_eq!(a.next_position() == before, seed % 3 == 1);
        if seed % 3 != 1 {
            turn(&mut twin, &mut b, 1, seed).unwrap();
        }
        same([&cache, &cache], [&a, &b], &format!("step {seed}"));
        assert_eq!([0, 1].map(|l| state(&mut pikv, l)), [0, 1].map(|l| state(&mut twin, l)), "step {seed}");
    }
}
