//! Calls from rayon pools over every fabric: each call ends, with the bits of one process. One fabric has a rank that works on the thread
//! of its caller, as the front of an MPI world has.

use pikv::fabric::{Fabric, FabricError, InProcess, Options, RankStore};
use pikv::shard::ShardMap;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, Rows, Sequence};
use pikv_test::numbers::{bits, noise};
use rayon::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

const DIM: usize = 64;
const HEADS: usize = 4;
const EXPERTS: u32 = 4;
const LIMIT: Duration = Duration::from_secs(120);

/// Fails if `f` takes longer than the limit, in which a call is stuck for good.
fn watched(what: &str, f: impl FnOnce() + Send + 'static) {
    let (done, ended) = channel();
    let body = thread::spawn(move || {
        f();
        // After the timeout the receiver is dropped.
        let _ = done.send(());
    });
    match ended.recv_timeout(LIMIT) {
        Ok(()) => body.join().unwrap(),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(body.join().unwrap_err())
        }
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what}: stuck for {LIMIT:?}"),
    }
}

/// Ranks that work on the thread that asks them.
struct Here {
    stores: Vec<RankStore>,
    queue: VecDeque<(u32, Vec<u32>)>,
}

impl Here {
    fn new(config: &CacheConfig, ranks: u32) -> Here {
        let store = |_| RankStore::new(config, 256 << 20).unwrap().parallel(true);
        Here { stores: (0..ranks).map(store).collect(), queue: VecDeque::new() }
    }
}

impl Fabric for Here {
    fn ranks(&self) -> u32 {
        self.stores.len() as u32
    }

    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError> {
        self.queue.push_back((rank, message));
        Ok(())
    }

    fn receive(&mut self, _until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        while let Some((rank, message)) = self.queue.pop_front() {
            if let Some(answer) = self.stores[rank as usize].answer(&message) {
                return Ok(Some((rank, answer)));
            }
        }
        Ok(None)
    }
}

fn config() -> CacheConfig {
    let heads = HEADS as u32;
    let layer = LayerShape::new(heads, heads, DIM as u32, Dtype::F32);
    let map = ShardMap::sum(EXPERTS).unwrap();
    CacheConfig::new(vec![layer], 64 << 20).ring(32).experts(EXPERTS, 1).shards(map)
}

fn extend(cache: &Cache, sequence: &mut Sequence, n: usize, seed: u64) {
    let mut step = cache.begin([(sequence, n as u32)]).unwrap();
    let (k, v) = (noise(seed, n * HEADS * DIM), noise(seed + 1, n * HEADS * DIM));
    step.append(0, &k, &v).unwrap();
    let chosen: Vec<u16> = (0..n).map(|i| ((i as u64 * 7 + seed) % u64::from(EXPERTS)) as u16).collect();
    step.route(0, &chosen).unwrap();
    step.commit().unwrap();
}

/// A sequence of 1056 tokens, of which 1024 left the ring.
fn sequence(cache: &Cache) -> Sequence {
    let mut sequence = cache.sequence();
    (0..33).for_each(|i| extend(cache, &mut sequence, 32, 2 * i));
    sequence
}

fn attend(cache: &Cache, sequence: &Sequence, seed: u64, masses: bool) -> Vec<u32> {
    let mut out = vec![0.0; HEADS * DIM];
    let rows = [Rows::new(sequence, Position(sequence.next_position().0 - 1), 1)];
    let mut mass = Vec::new();
    let to = AttendOutput::new(&mut out);
    let to = if masses { to.mass(&mut mass) } else { to };
    cache.attend(0, &rows, &noise(seed, HEADS * DIM), &Attend::new(0.125), to).unwrap();
    let mut all = bits(&out);
    mass.iter().for_each(|page| all.extend(bits(&page.tokens)));
    all
}

/// The caches of one process and of every fabric, with a name each.
fn over_fabrics() -> Vec<(&'static str, Cache)> {
    let over = |fabric: Box<dyn Fabric>| Cache::over(config(), fabric, Options::default()).unwrap();
    vec![
        ("here, 1 rank", over(Box::new(Here::new(&config(), 1)))),
        ("here, 3 ranks", over(Box::new(Here::new(&config(), 3)))),
        ("threads", over(Box::new(InProcess::new(&config(), 2, 256 << 20).unwrap()))),
        ("one process", Cache::new(config()).unwrap()),
    ]
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// The results of 24 calls made one after the other.
fn expected(masses: bool) -> Vec<Vec<u32>> {
    let cache = Cache::new(config()).unwrap();
    let sequence = sequence(&cache);
    (0..24).map(|i| attend(&cache, &sequence, 1000 + i, masses)).collect()
}

/// The results of 24 calls made by a pool in any order.
fn in_parallel(cache: &Cache, sequence: &Sequence, masses: bool) -> Vec<Vec<u32>> {
    (0..24u32)
        .into_par_iter()
        .with_max_len(1)
        .map(|i| attend(cache, sequence, 1000 + u64::from(i), masses))
        .collect()
}

#[test]
fn calls_in_parallel_end_over_every_fabric() {
    for masses in [false, true] {
        let want = Arc::new(expected(masses));
        for (name, cache) in over_fabrics() {
            for threads in [1, 2, 4] {
                let (cache, want) = (cache.clone(), want.clone());
                watched(&format!("{name}, {threads} threads, masses {masses}"), move || {
                    let sequence = sequence(&cache);
                    for _ in 0..2 {
                        let got = pool(threads).install(|| in_parallel(&cache, &sequence, masses));
                        assert!(got == *want, "{name}, {threads} threads");
                    }
                });
            }
        }
    }
}

#[test]
fn calls_in_nested_pools_end() {
    let want = Arc::new(expected(false));
    for (name, cache) in over_fabrics() {
        for inner in [1, 3] {
            let (cache, want) = (cache.clone(), want.clone());
            watched(&format!("{name}, a pool of {inner} in a pool of 3"), move || {
                let sequence = sequence(&cache);
                let (outer, inner) = (pool(3), pool(inner));
                let got: Vec<Vec<Vec<u32>>> = outer.install(|| {
                    let each = |_| inner.install(|| in_parallel(&cache, &sequence, false));
                    (0..6).into_par_iter().with_max_len(1).map(each).collect()
                });
                assert!(got.iter().all(|got| *got == *want), "{name}");
            });
        }
    }
}

/// One thread outside the pool, whose own work runs in it, while threads of the pool step.
#[test]
fn calls_from_outside_a_pool_end_beside_those_inside() {
    let want = Arc::new(expected(false));
    for (name, cache) in over_fabrics() {
        let (cache, want) = (cache.clone(), want.clone());
        watched(&format!("{name}, inside and outside"), move || {
            let sequence = sequence(&cache);
            thread::scope(|scope| {
                let outside = |i: u64| {
                    let (cache, sequence) = (&cache, &sequence);
                    scope.spawn(move || {
                        (0..24).map(|_| attend(cache, sequence, 1000 + i, false)).collect::<Vec<_>>()
                    })
                };
                let outside: Vec<_> = (0..2).map(outside).collect();
                for _ in 0..4 {
                    assert!(in_parallel(&cache, &sequence, false) == *want, "{name}");
                }
                for (i, outside) in outside.into_iter().enumerate() {
                    assert!(outside.join().unwrap().iter().all(|got| *got == want[i]), "{name}");
                }
            });
        });
    }
}

/// Steps that write, and free pages on ranks, while other threads read.
#[test]
fn steps_in_parallel_end_beside_calls() {
    for (name, cache) in over_fabrics() {
        watched(&format!("{name}, steps"), move || {
            let sequence = sequence(&cache);
            let got: Vec<Vec<u32>> = pool(4).install(|| {
                let one = |i: u32| {
                    let i = u64::from(i);
                    let mut fork = sequence.fork();
                    (0..4).for_each(|n| extend(&cache, &mut fork, 32, 500 + i % 3 + n));
                    attend(&cache, &fork, i % 3, true)
                };
                (0..12u32).into_par_iter().with_max_len(1).map(one).collect()
            });
            let plain = Cache::new(config()).unwrap();
            let twin = self::sequence(&plain);
            for (i, got) in (0..).zip(got) {
                let mut fork = twin.fork();
                (0..4).for_each(|n| extend(&plain, &mut fork, 32, 500 + i % 3 + n));
                assert!(got == attend(&plain, &fork, i % 3, true), "{name}, fork {i}");
            }
        });
    }
}
