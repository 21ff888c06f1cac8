//! Ranks that die, hang, or send invalid answers: the others get an error in time, and continue.

use pikv::fabric::{Fabric, FabricError, InProcess, Options};
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, ConfigError, Dtype, Error, LayerShape, Position, ReadPages,
    Rows, Sequence,
};
use pikv_test::numbers::{bits, noise};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Seconds that the tests wait for a rank.
const TIMEOUT: Duration = Duration::from_millis(400);
/// Extra time for a busy machine.
const SLACK: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Gets nothing any more, and sends nothing.
    Dead,
    /// Receives messages and never answers.
    Hangs,
    /// Answers one call late.
    Late,
    Version,
    Magic,
    /// Gets messages of another version.
    Asked,
    /// Answers to another call.
    Call,
    /// Answers that end early.
    Short,
}

/// Threads, one of which fails as set.
struct Faulty {
    inner: InProcess,
    fault: Arc<Mutex<(Fault, u32)>>,
    late: VecDeque<(u32, Vec<u32>)>,
}

impl Fabric for Faulty {
    fn ranks(&self) -> u32 {
        self.inner.ranks()
    }

    fn send(&mut self, rank: u32, mut message: Vec<u32>) -> Result<(), FabricError> {
        let (fault, at) = *self.fault.lock().unwrap();
        match fault {
            Fault::Dead if at == rank => return Ok(()),
            Fault::Asked if at == rank => message[1] += 1,
            _ => {}
        }
        self.inner.send(rank, message)
    }

    fn receive(&mut self, until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        loop {
            let Some((rank, mut words)) = self.inner.receive(until)? else { return Ok(None) };
            let (fault, at) = *self.fault.lock().unwrap();
            if at != rank {
                return Ok(Some((rank, words)));
            }
            match fault {
                Fault::None | Fault::Dead | Fault::Asked => {}
                Fault::Hangs => continue,
                Fault::Late => {
                    self.late.push_back((rank, words));
                    match self.late.len() {
                        1 => continue,
                        _ => return Ok(self.late.pop_front()),
                    }
                }
                Fault::Version => words[1] += 1,
                Fault::Magic => words[0] ^= 1,
                Fault::Call => words[5] ^= 1,
                Fault::Short => words.truncate(words.len() - 3),
            }
            return Ok(Some((rank, words)));
        }
    }
}

fn config() -> CacheConfig {
    let layer = LayerShape::new(1, 2, 8, Dtype::F32);
    let config = CacheConfig::new(vec![layer], 1 << 24).ring(16).rollback(4).experts(4, 1).nan_fill(true);
    config.shards(ShardMap::sum(4).unwrap())
}

fn cache() -> (Cache, Arc<Mutex<(Fault, u32)>>) {
    let fault = Arc::new(Mutex::new((Fault::None, 0)));
    let inner = InProcess::new(&config(), 4, 1 << 24).unwrap();
    let faulty = Faulty { inner, fault: fault.clone(), late: VecDeque::new() };
    let cache = Cache::over(config(), Box::new(faulty), Options::default().timeout(TIMEOUT)).unwrap();
    (cache, fault)
}

/// Tokens with experts `which`, in steps of 16, and values from `seed`.
fn feed(cache: &Cache, sequence: &mut Sequence, n: u32, seed: u64, which: &[u16]) -> Result<(), Error> {
    for i in 0..n / 16 {
        let mut step = cache.begin([(&mut *sequence, 16)])?;
        let salt = seed * 1000 + u64::from(i);
        step.append(0, &noise(salt, 16 * 8), &noise(salt + 500, 16 * 8))?;
        let routes: Vec<u16> = (0..16).map(|t| which[(t + i as usize) % which.len()]).collect();
        step.route(0, &routes)?;
        step.commit()?;
    }
    Ok(())
}

fn read(cache: &Cache, sequence: &Sequence) -> Result<Vec<u32>, Error> {
    let mut out = vec![0.0; 16];
    let rows = [Rows::new(sequence, Position(sequence.next_position().0 - 1), 1)];
    cache.attend(0, &rows, &noise(9, 16), &Attend::new(0.7), AttendOutput::new(&mut out))?;
    Ok(bits(&out))
}

fn plain(n: u32, seed: u64, which: &[u16]) -> Vec<u32> {
    let cache = Cache::new(config()).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, n, seed, which).unwrap();
    read(&cache, &sequence).unwrap()
}

#[test]
fn a_rank_that_fails_is_named_in_time_and_the_others_go_on() {
    for fault in
        [Fault::Dead, Fault::Hangs, Fault::Late, Fault::Version, Fault::Magic, Fault::Call, Fault::Short]
    {
        for append in [false, true] {
            let (cache, control) = cache();
            // Expert 1 begins on rank 1, with less than a block there.
            let [mut all, mut one, mut two] = [0; 3].map(|_| cache.sequence());
            feed(&cache, &mut all, 1600, 1, &[0, 1, 2, 3]).unwrap();
            feed(&cache, &mut one, 224, 2, &[1]).unwrap();
            feed(&cache, &mut two, 224, 3, &[2]).unwrap();
            let (whole, second) = (read(&cache, &all).unwrap(), read(&cache, &two).unwrap());
            assert_eq!(whole, plain(1600, 1, &[0, 1, 2, 3]));
            *control.lock().unwrap() = (fault, 1);
            let begun = Instant::now();
            let len = one.next_position();
            let failed = if append {
                feed(&cache, &mut one, 160, 4, &[1]).unwrap_err()
            } else {
                read(&cache, &all).unwrap_err()
            };
            assert!(begun.elapsed() < 2 * TIMEOUT + SLACK, "{fault:?}: {:?}", begun.elapsed());
            let right = match &failed {
                Error::Fabric(FabricError::Lost { rank: 1, .. }) => {
                    matches!(fault, Fault::Dead | Fault::Hangs | Fault::Late | Fault::Call)
                }
                Error::Fabric(FabricError::Version { rank: 1, theirs, ours }) => {
                    theirs != ours && matches!(fault, Fault::Version | Fault::Magic)
                }
                Error::Fabric(FabricError::Malformed { rank: 1, .. }) => fault == Fault::Short,
                _ => false,
            };
            assert!(right, "{fault:?}: {failed:?}");
            if append {
                // The step that failed never was.
                let kept = one.next_position().0;
                assert!(kept >= len.0 && (kept - len.0).is_multiple_of(16));
            }
            // A rank with short answers is not lost: the question can be repeated.
            if fault == Fault::Short {
                *control.lock().unwrap() = (Fault::None, 1);
                assert_eq!(read(&cache, &all).unwrap(), whole);
                continue;
            }
            // At once, and with the same error.
            let begun = Instant::now();
            assert!(read(&cache, &all).is_err());
            assert!(begun.elapsed() < SLACK);
            // Other sequences are unchanged, and have no pages of this one.
            assert_eq!(read(&cache, &two).unwrap(), second);
            assert_eq!(second, plain(224, 3, &[2]));
            // New sequences are spread over the three that are left.
            let mut fresh = cache.sequence();
            feed(&cache, &mut fresh, 1600, 5, &[0, 1, 2, 3]).unwrap();
            assert_eq!(read(&cache, &fresh).unwrap(), plain(1600, 5, &[0, 1, 2, 3]));
            let ranks = cache.ranks().unwrap();
            assert!(ranks[1].lost.is_some() && ranks[1].bytes == 0);
            assert!([0, 2, 3].iter().all(|rank| ranks[*rank].pages > 8), "{ranks:?}");
            // Pages on the lost rank cannot be read; others can.
            let (mut near, mut lost) = (0, 0);
            let pages: Vec<_> = all.pages(0, 0).unwrap().collect();
            for page in pages {
                let lane = all.positions(0, 0, page.id).unwrap().next().unwrap().0;
                match all.read(0, 0, page.id, lane, &mut [0.0; 8], &mut [0.0; 8]) {
                    Ok(_) => near += 1,
                    Err(Error::Fabric(_)) => {
                        assert_eq!(page.shard, 1);
                        lost += 1;
                        all.evict(0, 0, page.id).unwrap();
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert!(near > 20 && lost > 4, "{near} {lost}");
            // Without those pages the sequence continues.
            read(&cache, &all).unwrap();
            feed(&cache, &mut all, 320, 6, &[0, 1, 2, 3]).unwrap();
            read(&cache, &all).unwrap();
            drop((all, one, two, fresh));
            assert!(cache.ranks().unwrap().iter().all(|rank| rank.bytes == 0));
            assert_eq!(cache.usage().taken, 0);
        }
    }
}

#[test]
fn a_rank_that_fails_takes_no_replicated_pages_along() {
    let (cache, control) = cache();
    let mut all = cache.sequence();
    feed(&cache, &mut all, 3200, 1, &[0, 1, 2, 3]).unwrap();
    let whole = read(&cache, &all).unwrap();
    for expert in 0..4 {
        assert!(cache.replicate(0, expert, 2).unwrap().replicated > 0);
    }
    *control.lock().unwrap() = (Fault::Dead, 2);
    let failed = read(&cache, &all).unwrap_err();
    assert!(matches!(failed, Error::Fabric(FabricError::Lost { rank: 2, .. })), "{failed:?}");
    assert_eq!(read(&cache, &all).unwrap(), whole);
}

#[test]
fn a_front_of_another_version_or_configuration_is_refused() {
    let fault = Arc::new(Mutex::new((Fault::Version, 2)));
    let inner = InProcess::new(&config(), 4, 1 << 24).unwrap();
    let faulty = Faulty { inner, fault, late: VecDeque::new() };
    let made = Cache::over(config(), Box::new(faulty), Options::default().timeout(TIMEOUT));
    assert!(matches!(made, Err(Error::Fabric(FabricError::Version { rank: 2, .. }))), "{made:?}");
    let inner = InProcess::new(&config(), 4, 1 << 24).unwrap();
    let faulty = Faulty { inner, fault: Arc::new(Mutex::new((Fault::Asked, 1))), late: VecDeque::new() };
    let made = Cache::over(config(), Box::new(faulty), Options::default().timeout(TIMEOUT));
    assert!(matches!(made, Err(Error::Fabric(FabricError::Version { rank: 1, .. }))), "{made:?}");
    let mut other = config();
    other.layers[0].layout.k = Dtype::Bf16;
    let ranks = InProcess::new(&other, 4, 1 << 24).unwrap();
    let made = Cache::over(config(), Box::new(ranks), Options::default());
    assert!(matches!(made, Err(Error::Fabric(FabricError::Configuration { rank: 0, .. }))), "{made:?}");
    let tiers = config().tiers(pikv::tiers::Tiers::new().host(1 << 20));
    let ranks = InProcess::new(&tiers, 4, 1 << 24).unwrap();
    let made = Cache::over(tiers, Box::new(ranks), Options::default());
    assert!(matches!(made, Err(Error::Config(ConfigError::Fabric { what: "tiers", .. }))), "{made:?}");
    let none = Cache::new(config()).unwrap();
    assert!(matches!(none.ranks(), Err(Error::Fabric(FabricError::None))));
}

#[test]
fn pages_move_while_they_are_read() {
    let cache = crate::setup::over(config(), 4, 1 << 24, Options::default());
    let mut all = cache.sequence();
    feed(&cache, &mut all, 3200, 1, &[0, 1, 2, 3, 3, 3]).unwrap();
    let whole = read(&cache, &all).unwrap();
    let (done, reads) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(read(&cache, &all).unwrap(), whole);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (mut moved, mut replicated) = (0, 0);
        // On a busy machine readers may get little time: rounds go on until there were some reads.
        for round in (0..1000u32).take_while(|round| *round < 12 || reads.load(Ordering::Relaxed) < 8) {
            let loads: Vec<f64> = (0..4).map(|e| f64::from((round * 7 + e * 5) % 11)).collect();
            moved += cache.rebalance(0, &pikv::router::Eplb::global(8, 4), Some(&loads)).unwrap().moved;
            replicated += cache.replicate(0, (round % 4) as u16, 1 + round % 4).unwrap().replicated;
        }
        done.store(true, Ordering::Relaxed);
        assert!(moved > 50 && replicated > 20, "{moved} {replicated}");
    });
    let reads = reads.into_inner();
    assert!(reads >= 8, "{reads}");
    // Reads alone say where the load is: one expert was read more.
    let mut out = vec![0.0; 16];
    let moves = cache.rebalance(0, &pikv::router::Eplb::global(8, 4), None).unwrap();
    assert!(cache.traffic().unwrap().moved >= moves.moved);
    let mut step = cache.begin([(&mut all, 1)]).unwrap();
    step.append(0, &noise(1, 8), &noise(2, 8)).unwrap();
    step.route(0, &[2]).unwrap();
    step.attend(0, &noise(3, 16), &Attend::new(0.7).read(ReadPages::Experts), AttendOutput::new(&mut out))
        .unwrap();
    step.commit().unwrap();
}
