//! Invalid bytes: messages to ranks and their answers, states of routers, traces, fitted maps, saved sequences. No bytes may cause a
//! panic, an endless wait, or an allocation above the limits stated here.
//!
//! The inputs are mutations of valid bytes, the same in each run: 2,000 of each kind (10,000 saved sequences), or 1,000,000 if the variable
//! `PIKV_TEST` is `full`.

use pikv::codec::{Code, Codec, Coding, FitShape, Fitted, FittedError, FittedSide, Map};
use pikv::fabric::{Fabric, FabricError, InProcess, Options, RankStore};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::report::PageMass;
use pikv::router::{
    Adaptive, CacheAware, Eplb, Hashed, LoadBalanced, PageFeedback, Router, RouterState, Routes, Shape, TopK,
};
use pikv::rules::Hits;
use pikv::save::SaveError;
use pikv::shard::ShardMap;
use pikv::trace::{Reader, Row, Skewed, TraceError, Writer};
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ConfigError, Dtype, Error, LayerShape, Position, Rope, Rows,
    Sequence,
};
use pikv_test::numbers::{Rng, bits, noise};
use safetensors::SafeTensors;
use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The system's allocator, with a count of the bytes held by each thread.
struct Counting;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    MOST.set(MOST.get().max(held));
}

// SAFETY: every call is passed to the system's allocator unchanged; counting does not touch the memory, and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Memory) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: by the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Memory) {
        count(-(layout.size() as i64));
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `f`, and the most bytes that this thread held during it beyond those held before.
fn weighed<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = HELD.get();
    MOST.set(before);
    let result = f();
    (result, (MOST.get() - before) as u64)
}

/// Cases of each kind.
fn cases() -> u64 {
    if std::env::var("PIKV_TEST").is_ok_and(|test| test == "full") { 1_000_000 } else { 2_000 }
}

/// Changes some of a list: a few elements, its length, or the order of its parts.
fn mutate<T: Copy>(rng: &mut Rng, list: &mut Vec<T>, other: &[T], change: impl Fn(&mut Rng, T) -> T) {
    for _ in 0..1 + rng.below(3) {
        if list.is_empty() {
            return;
        }
        let at = rng.below(list.len() as u32) as usize;
        match rng.below(12) {
            0 => list.truncate(at),
            1 => {
                let end = (at + 1 + rng.below(8) as usize).min(list.len());
                list.drain(at..end);
            }
            2 => {
                let end = (at + 1 + rng.below(40) as usize).min(list.len());
                let part = list[at..end].to_vec();
                list.splice(at..at, part);
            }
            3 if !other.is_empty() => {
                let from = rng.below(other.len() as u32) as usize;
                let to = (from + 1 + rng.below(64) as usize).min(other.len());
                list.splice(at.., other[from..to].iter().copied());
            }
            4 => {
                let with = rng.below(list.len() as u32) as usize;
                list.swap(at, with);
            }
            // Words near the beginning determine how the rest is read.
            5..=7 => {
                let at = rng.below(list.len().min(24) as u32) as usize;
                list[at] = change(rng, list[at]);
            }
            _ => list[at] = change(rng, list[at]),
        }
    }
}

fn word(rng: &mut Rng, word: u32) -> u32 {
    match rng.below(8) {
        0 => 0,
        1 => rng.of(&[
            1,
            2,
            7,
            8,
            31,
            32,
            33,
            1 << 16,
            1 << 24,
            1 << 30,
            1 << 31,
            u32::MAX,
            u32::MAX - 1,
            0x7f80_0000,
        ]),
        2 => word.wrapping_add(1),
        3 => word.wrapping_sub(1),
        4 => rng.next() as u32,
        _ => word ^ 1 << rng.below(32),
    }
}

fn byte(rng: &mut Rng, byte: u8) -> u8 {
    match rng.below(6) {
        0 => 0,
        1 => rng.of(&[1, 0x7f, 0x80, 0xff, b'0', b'9', b',', b' ', b'\n', b'"', b'{', b'-']),
        2 => rng.next() as u8,
        _ => byte ^ 1 << rng.below(8),
    }
}

const DIM: usize = 8;
const LAYERS: usize = 2;
const EXPERTS: u32 = 2;
const BUDGET: u64 = 1 << 20;
/// Bytes of tables of rotations that a rank of a small budget takes at most.
const TABLE: u64 = 64 << 20;

/// Keys before their rotation, in full pages and in packed ones; a policy that wants weights.
fn config() -> CacheConfig {
    let rope = Some(Rope::new(10_000.0, DIM as u32));
    let layer = LayerShape::new(1, 2, DIM as u32, Dtype::F32).rope(rope);
    CacheConfig::new(vec![layer; LAYERS], BUDGET)
        .ring(32)
        .experts(EXPERTS, 1)
        .shards(ShardMap::sum(2).unwrap())
        .compress_layer(1, Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8)))
        .evict_layer(0, Eviction::new(H2o, Budget::Tokens(640)).batch(32))
}

/// Messages sent: the rank, and the words.
type Heard = Arc<Mutex<Vec<(u32, Vec<u32>)>>>;

/// Two ranks on the caller's thread; messages are recorded, and answers may be changed.
struct Ranks {
    stores: [RankStore; 2],
    queue: VecDeque<(u32, Vec<u32>)>,
    heard: Heard,
    /// Changes one of so many answers.
    liar: Option<(Rng, u32)>,
    last: Vec<u32>,
}

impl Ranks {
    fn new(heard: Heard, liar: Option<(Rng, u32)>) -> Ranks {
        let stores = [(); 2].map(|()| RankStore::new(&config(), BUDGET).unwrap());
        Ranks { stores, queue: VecDeque::new(), heard, liar, last: Vec::new() }
    }
}

impl Fabric for Ranks {
    fn ranks(&self) -> u32 {
        2
    }

    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError> {
        if self.liar.is_none() {
            self.heard.lock().unwrap().push((rank, message.clone()));
        }
        self.queue.push_back((rank, message));
        Ok(())
    }

    fn receive(&mut self, _until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        while let Some((rank, message)) = self.queue.pop_front() {
            let Some(mut answer) = self.stores[rank as usize].answer(&message) else { continue };
            let Some((rng, one_in)) = &mut self.liar else { return Ok(Some((rank, answer))) };
            if rng.one_in(*one_in) {
                match rng.below(12) {
                    0 => return Ok(None),
                    1 => return Ok(Some((rng.below(5), answer))),
                    2 => return Err(FabricError::Lost { rank: rng.below(4), waited: Duration::ZERO }),
                    // The answer is dropped, and the message is executed again.
                    3 => {
                        self.queue.push_back((rank, message));
                        continue;
                    }
                    _ => mutate(rng, &mut answer, &self.last, word),
                }
            }
            self.last.clone_from(&answer);
            return Ok(Some((rank, answer)));
        }
        Ok(None)
    }
}

fn extend(cache: &Cache, sequence: &mut Sequence, n: usize, seed: u64) -> Result<Vec<f32>, Error> {
    let mut all = Vec::new();
    let mut step = cache.begin([(sequence, n as u32)])?;
    for layer in 0..LAYERS {
        let seed = seed * 16 + layer as u64 * 4;
        step.append(layer, &noise(seed, n * DIM), &noise(seed + 1, n * DIM))?;
        let mut out = vec![0.0; n * 2 * DIM];
        step.attend(layer, &noise(seed + 2, n * 2 * DIM), &Attend::new(0.3), AttendOutput::new(&mut out))?;
        all.extend(out);
        let experts: Vec<u16> = (0..n as u64).map(|i| ((i + seed) % 3 / 2) as u16).collect();
        step.route(layer, &experts)?;
    }
    step.commit()?;
    Ok(all)
}

fn attend(
    cache: &Cache,
    sequence: &Sequence,
    layer: usize,
    mass: Option<&mut Vec<PageMass>>,
) -> Result<Vec<f32>, Error> {
    let mut out = vec![0.0; 2 * DIM];
    let rows = [Rows::new(sequence, Position(sequence.next_position().0 - 1), 1)];
    let to = AttendOutput::new(&mut out);
    let to = match mass {
        Some(mass) => to.mass(mass),
        None => to,
    };
    cache.attend(layer, &rows, &noise(9, 2 * DIM), &Attend::new(0.3), to)?;
    Ok(out)
}

/// A life of a cache: steps, masses, moves, copies, a fork. Ends with the first error.
fn live(cache: &Cache, turns: u64) -> Result<Vec<f32>, Error> {
    let mut all = Vec::new();
    let mut sequence = cache.sequence();
    for turn in 0..turns {
        all.extend(extend(cache, &mut sequence, if turn % 5 == 4 { 3 } else { 40 }, turn)?);
        match turn % 6 {
            1 => _ = cache.rebalance((turn % 2) as usize, &Eplb::global(4, 2), Some(&[1.0, turn as f64]))?,
            2 => _ = cache.replicate(0, 0, 2)?,
            3 => all.extend(attend(cache, &sequence.fork(), 0, Some(&mut Vec::new()))?),
            4 => all.extend(attend(cache, &sequence, 1, None)?),
            5 => {
                cache.ranks()?;
                let page = sequence.pages(1, 0)?.find(|page| page.packed);
                if let Some(page) = page {
                    let (mut key, mut value) = ([0.0; DIM], [0.0; DIM]);
                    let lane = sequence.positions(1, 0, page.id)?.next().map_or(0, |(lane, _)| lane);
                    sequence.read(1, 0, page.id, lane, &mut key, &mut value)?;
                    all.extend(key);
                }
            }
            _ => {}
        }
    }
    Ok(all)
}

fn over(ranks: Ranks) -> Result<Cache, Error> {
    Cache::over(config(), Box::new(ranks), Options::default().timeout(Duration::from_millis(20)))
}

#[test]
fn ranks_outlive_any_message() {
    let heard = Heard::default();
    let want = live(&over(Ranks::new(heard.clone(), None)).unwrap(), 14).unwrap();
    assert!(want.len() > 1000);
    let mut heard = std::mem::take(&mut *heard.lock().unwrap());
    // The farewell wants no answer.
    heard.retain(|(rank, words)| *rank == 0 && words.len() > 8);
    let messages: Vec<Vec<u32>> = heard.into_iter().map(|(_, words)| words).collect();
    let (mut store, mut rng) = (RankStore::new(&config(), BUDGET).unwrap(), Rng(1));
    let (mut at, mut refused, mut most, mut longest) = (0, 0, 0, 0);
    for case in 0..cases() {
        // The rank has executed the earlier messages, up to one that is changed.
        if at == 0 || rng.one_in(64) {
            at = 1 + rng.below(messages.len() as u32 - 1) as usize;
            for message in &messages[..at] {
                store.answer(message).unwrap();
            }
        }
        let mut message =
            messages[if rng.one_in(3) { rng.below(messages.len() as u32) as usize } else { at }].clone();
        let other = &messages[rng.below(messages.len() as u32) as usize];
        mutate(&mut rng, &mut message, other, word);
        let (answer, bytes) = weighed(|| store.answer(&message));
        longest = longest.max(message.len());
        most = most.max(bytes);
        // Tables, pages, and for every row of every question the pages that are held.
        let bound =
            TABLE + BUDGET + 64 * 4 * message.len() as u64 + 4 * 64 * 256 * (message.len() as u64 / 16);
        assert!(bytes <= bound, "case {case}: {bytes} bytes for {} words", message.len());
        assert!(store.bytes() <= BUDGET);
        store.check().unwrap_or_else(|wrong| panic!("case {case}: {wrong}"));
        refused += u64::from(answer.is_none_or(|answer| answer.get(7) != Some(&0)));
        at = if at + 1 < messages.len() { at + 1 } else { 0 };
    }
    assert!(refused > cases() / 4, "{refused}");
    println!(
        "ranks: {refused} of {} refused; {most} bytes at most, messages of up to {longest} words",
        cases()
    );
}

#[test]
fn fronts_outlive_any_answer() {
    let want = live(&over(Ranks::new(Heard::default(), None)).unwrap(), 14).unwrap();
    let (mut rng, mut failed, mut most, mut done) = (Rng(2), 0, 0, 0);
    while done < cases() / 20 {
        done += 1;
        let seed = rng.next();
        let one_in = 1 + rng.below(60);
        let ranks = Ranks::new(Heard::default(), Some((Rng(seed), one_in)));
        let (result, bytes) = weighed(|| over(ranks).and_then(|cache| live(&cache, 14)));
        most = most.max(bytes);
        assert!(bytes <= 2 * BUDGET + 2 * TABLE, "seed {seed}: {bytes} bytes");
        match result {
            Err(Error::Fabric(_) | Error::ScoreOverflow { .. }) => failed += 1,
            Err(error) => panic!("seed {seed}: {error}"),
            Ok(got) => assert_eq!(got.len(), want.len()),
        }
    }
    assert!(failed > done / 4, "{failed}");
    println!("fronts: {failed} of {done} lives failed; {most} bytes at most");
}

/// A rank that answers endlessly, but never to the present call.
#[test]
fn an_endless_stream_of_other_answers_ends_with_the_timeout() {
    struct Talks(bool);
    impl Fabric for Talks {
        fn ranks(&self) -> u32 {
            1
        }
        fn send(&mut self, _rank: u32, _message: Vec<u32>) -> Result<(), FabricError> {
            Ok(())
        }
        fn receive(&mut self, _until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
            match self.0 {
                true => Err(FabricError::Lost { rank: 7, waited: Duration::ZERO }),
                false => Ok(Some((7, vec![1, 2, 3]))),
            }
        }
    }
    for failing in [true, false] {
        let begun = Instant::now();
        let options = Options::default().timeout(Duration::from_millis(50));
        let refused = Cache::over(config(), Box::new(Talks(failing)), options).err();
        assert!(matches!(refused, Some(Error::Fabric(FabricError::Lost { .. }))), "{refused:?}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn more_ranks_than_shards_are_refused_before_there_is_anything_for_them() {
    struct Many;
    impl Fabric for Many {
        fn ranks(&self) -> u32 {
            u32::MAX
        }
        fn send(&mut self, _rank: u32, _message: Vec<u32>) -> Result<(), FabricError> {
            Ok(())
        }
        fn receive(&mut self, _until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
            Ok(None)
        }
    }
    let want = Some(Error::Config(ConfigError::Shards { shards: u32::MAX }));
    let (refused, bytes) = weighed(|| Cache::over(config(), Box::new(Many), Options::default()).err());
    assert_eq!(refused, want);
    assert!(bytes < 1 << 20);
    assert_eq!(InProcess::new(&config(), u32::MAX, BUDGET).err(), want);
}

/// A step's reservation takes no memory before its tokens are appended.
#[test]
fn a_step_of_a_billion_tokens_costs_nothing_before_they_come() {
    let mut config = config();
    config.budget = 1 << 60;
    let cache = Cache::new(config).unwrap();
    let mut sequence = cache.sequence();
    extend(&cache, &mut sequence, 3, 1).unwrap();
    let begun = Instant::now();
    let ((), bytes) = weighed(|| {
        let mut step = cache.begin([(&mut sequence, 1 << 30)]).unwrap();
        assert!(matches!(step.append(0, &[0.0; DIM], &[0.0; DIM]), Err(Error::Length { what: "k", .. })));
        assert!(matches!(step.route(0, &[0]), Err(Error::Length { what: "experts", .. })));
    });
    assert!(bytes < 1 << 20, "{bytes} bytes");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let twin_cache = Cache::new(self::config()).unwrap();
    let mut twin = twin_cache.sequence();
    extend(&twin_cache, &mut twin, 3, 1).unwrap();
    let (a, b) =
        (extend(&cache, &mut sequence, 40, 2).unwrap(), extend(&twin_cache, &mut twin, 40, 2).unwrap());
    assert_eq!(bits(&a), bits(&b));
}

fn routers() -> Vec<Box<dyn Router>> {
    let shape = Shape::new(8, 2);
    vec![
        Box::new(Hashed::default().router(shape).unwrap()),
        Box::new(TopK.router(shape).unwrap()),
        Box::new(LoadBalanced::default().router(shape).unwrap()),
        Box::new(CacheAware::default().router(shape).unwrap()),
        Box::new(Adaptive::new(2, 3).router(shape).unwrap()),
    ]
}

/// Some steps of a router; the last choices.
fn steps(router: &mut dyn Router, seed: u64) -> Routes {
    let mut routes = Routes::default();
    for step in 0..4 {
        routes.clear();
        router.route(Position(step as u32), &noise(seed + step, 3 * 8), &mut routes).unwrap();
        router.observe(&PageFeedback::new(&[4; 8], &[0, 1, 2, 3, 4, 0, 0, 1]).remote_bytes(1 << 20)).unwrap();
    }
    routes
}

#[test]
fn routers_go_on_from_any_state_that_they_take() {
    let mut rng = Rng(3);
    let mut states: Vec<Vec<u8>> = Vec::new();
    for router in &mut routers() {
        steps(&mut **router, 5);
        states.push(router.state().to_bytes());
    }
    let mut taken = 0;
    for case in 0..cases() {
        let at = rng.below(states.len() as u32) as usize;
        let mut bytes = states[at].clone();
        let other = &states[rng.below(states.len() as u32) as usize];
        mutate(&mut rng, &mut bytes, other, byte);
        let (state, held) = weighed(|| RouterState::from_bytes(&bytes));
        assert!(held <= 4096 + 8 * bytes.len() as u64, "case {case}: {held} bytes");
        let Ok(state) = state else { continue };
        assert_eq!(state.to_bytes(), bytes, "case {case}: what is read is what was there");
        for router in &mut routers() {
            if router.restore(&state).is_ok() {
                taken += 1;
                let routes = steps(&mut **router, case);
                assert!(routes.filing().experts.iter().all(|e| *e < 8), "case {case}");
            }
        }
    }
    assert!(taken > cases() / 20, "{taken}");
}

fn trace() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), 16).unwrap();
    Skewed::default().rows().unwrap().take(40).for_each(|row| writer.write(&row).unwrap());
    writer.finish().unwrap()
}

#[test]
fn traces_are_read_or_refused() {
    let (trace, mut rng, mut refused) = (trace(), Rng(4), 0);
    for case in 0..cases() {
        let mut bytes = trace.clone();
        mutate(&mut rng, &mut bytes, &trace, byte);
        let read =
            || Reader::new(&bytes[..]).and_then(|reader| reader.collect::<Result<Vec<Row>, TraceError>>());
        let (rows, held) = weighed(read);
        assert!(held <= 16384 + 64 * bytes.len() as u64, "case {case}: {held} bytes");
        refused += u64::from(rows.is_err());
    }
    assert!(refused > cases() / 4, "{refused}");
    let ones = |n: usize| (0..n).map(|e| (e % 60_000).to_string()).collect::<Vec<_>>().join(" ");
    let begun = Instant::now();
    for (experts, fine) in [(60_000, true), (60_001, false), (1_000_000, false)] {
        let text = format!("token,experts of 60000,wanted\n1,{},\n", ones(experts));
        let rows: Result<Vec<Row>, _> = Reader::new(text.as_bytes()).unwrap().collect();
        assert_eq!(rows.is_ok(), fine, "{experts}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let many = Skewed::default().wants(u32::MAX).rows().err();
    assert!(matches!(many, Some(TraceError::Value { name: "wants", .. })), "{many:?}");
}

/// A cache, and saved sequences of it: of different lengths, with tokens that can be rolled back.
fn saved() -> (Cache, Vec<Vec<u8>>) {
    let mut config =
        config().rollback(9).shards(ShardMap::ONE).evict_layer(0, Eviction::new(H2o, Budget::Tokens(80)));
    config.layers.iter_mut().for_each(|layer| layer.rope = None);
    let cache = Cache::new(config.sinks(1).key_bounds(true).hits(Hits::new().pages(2).every(1))).unwrap();
    let lengths = [40, 150, 290].into_iter().map(|tokens| {
        let mut sequence = cache.sequence();
        for step in 0..tokens / 10 {
            extend(&cache, &mut sequence, 10, step).unwrap();
        }
        let mut bytes = Vec::new();
        sequence.save(b"note", &mut bytes).unwrap();
        bytes
    });
    let files = lengths.collect();
    (cache, files)
}

/// The positions of a saved sequence's metadata words, without its pages.
fn numbers(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let (n, header) = SafeTensors::read_metadata(bytes).unwrap();
    let tensors = header.tensors();
    let states = tensors.iter().filter(|(name, _)| !name.ends_with("pages"));
    let place = |(from, to)| 8 + n + from..8 + n + to;
    states.map(|(_, info)| place(info.data_offsets)).filter(|range| range.len() >= 4).collect()
}

#[test]
fn saved_sequences_are_read_or_refused() {
    let ((cache, files), mut rng) = (saved(), Rng(6));
    let (mut refused, mut signed, mut taken) = (0, 0, 0);
    let begun = cache.usage();
    let all = cases().max(10_000);
    for case in 0..all {
        let file = &files[rng.below(files.len() as u32) as usize];
        let mut bytes = file.clone();
        if rng.one_in(4) {
            mutate(&mut rng, &mut bytes, file, byte);
        } else {
            // One or two numbers, which say how the rest is read.
            let places = numbers(file);
            for _ in 0..1 + rng.below(2) {
                let place = places[rng.below(places.len() as u32) as usize].clone();
                let at = place.start + 4 * rng.below((place.len() / 4) as u32) as usize;
                let (before, _) = bytes[at..].split_first_chunk::<4>().unwrap();
                let after = word(&mut rng, u32::from_le_bytes(*before)).to_le_bytes();
                bytes[at..at + 4].copy_from_slice(&after);
            }
        }
        for is_signed in [false, true] {
            let (read, held) = weighed(|| cache.restore(&mut &bytes[..]));
            assert!(held <= 65536 + 2 * bytes.len() as u64, "case {case}: {held} bytes of {}", bytes.len());
            match read {
                Ok(restored) => {
                    // Bytes after the sequence are left in the reader.
                    let is_whole = restored.bytes == file.len() as u64 && bytes.starts_with(file);
                    assert!(is_signed || is_whole, "case {case}: bytes that nobody signed");
                    taken += 1;
                    if case % 3 == 0 {
                        go_on(&cache, restored.sequence, case);
                    }
                    break;
                }
                Err(Error::Save(SaveError::Sum { found, actual })) => {
                    // A correct sum, as an attacker would write.
                    let decoded = |hex: &str| {
                        (0..32)
                            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
                            .collect::<Vec<u8>>()
                    };
                    let (found, actual) = (decoded(&found), decoded(&actual));
                    let Some(at) = bytes.windows(32).position(|part| part == found) else { break };
                    bytes[at..at + 32].copy_from_slice(&actual);
                    signed += 1;
                }
                Err(_) => {
                    refused += 1;
                    break;
                }
            }
        }
        assert_eq!(cache.usage(), begun, "case {case}");
    }
    assert!(refused > all / 5 && signed > all / 5 && taken > all / 20, "{refused} {signed} {taken}");
}

/// Whatever a sequence has become, steps, rollbacks and evictions end in results or errors.
fn go_on(cache: &Cache, mut sequence: Sequence, case: u64) {
    let mut fork = sequence.fork();
    for step in 0..3u32 {
        let _ = extend(cache, &mut sequence, 1 + step as usize, case);
        let _ = sequence.rollback(sequence.rollback_limit().min(3 * step + 1));
    }
    let _ = fork.rollback(fork.rollback_limit());
    let _ = extend(cache, &mut fork, 20, case);
    for layer in 0..LAYERS {
        let pages: Vec<_> = sequence.pages(layer, 0).unwrap().collect();
        for page in pages {
            assert!(sequence.positions(layer, 0, page.id).unwrap().count() <= 32);
            let _ = sequence.evict(layer, 0, page.id);
        }
    }
    let _ = extend(cache, &mut sequence, 33, case);
    sequence.save(b"", &mut Vec::new()).unwrap();
}

#[test]
fn fitted_files_are_read_or_refused() {
    const SHAPE: FitShape = FitShape::new(2, 1, 1, 4);
    let map = |rank: u32, seed: u64| {
        let n = (4 * rank) as usize;
        Map::new(4, rank, noise(seed, n), noise(seed + 1, n), (rank == 2).then(|| noise(seed + 2, 4)))
            .unwrap()
    };
    let side = |row: &str, seed| FittedSide::new(row, vec![map(2, seed), map(3, seed + 9)]);
    let fitted = Fitted::new(SHAPE, "a model", Some(side("C_Lo+", 1)), Some(side("C_SVD", 50))).unwrap();
    let file = fitted.to_bytes().unwrap();
    assert_eq!(Fitted::from_bytes(&file, "a model", SHAPE).unwrap(), fitted);
    let (mut rng, mut refused, mut signed) = (Rng(5), 0, 0);
    for case in 0..cases() {
        let mut bytes = file.clone();
        mutate(&mut rng, &mut bytes, &file, byte);
        for _ in 0..2 {
            let (read, held) = weighed(|| Fitted::from_bytes(&bytes, "a model", SHAPE));
            assert!(held <= 65536 + 64 * bytes.len() as u64, "case {case}: {held} bytes");
            refused += u64::from(read.is_err());
            // A correct digest, as an attacker would write.
            let Err(FittedError::Digest { found, actual }) = read else { break };
            let Some(at) = bytes.windows(found.len()).position(|part| part == found.as_bytes()) else {
                break;
            };
            if found.len() != actual.len() {
                break;
            }
            bytes[at..at + actual.len()].copy_from_slice(actual.as_bytes());
            signed += 1;
        }
    }
    assert!(refused > cases() / 2 && signed > cases() / 40, "{refused} {signed}");
    // Shapes that nothing holds.
    let most = FitShape::new(u32::MAX, u32::MAX, 1, 4);
    let (read, held) = weighed(|| Fitted::from_bytes(&file, "a model", most).is_err());
    assert!(read && held < 1 << 20, "{held}");
}
