//! Pages move between nearly full ranks, while other threads step, fork, drop and get refusals.

use crate::{DIM, orders, read, rows};
use pikv::fabric::{Fabric, FabricError, Options, RankStore};
use pikv::router::Eplb;
use pikv::shard::ShardMap;
use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

const EXPERTS: u32 = 4;
const STEP: u32 = 32;
/// Steps of each sequence.
const STEPS: u32 = 9;
const SALT: [u64; 2] = [1_000, 2_000];

/// Ranks that answer on the thread that asks.
struct Here {
    ranks: Vec<RankStore>,
    answers: VecDeque<(u32, Vec<u32>)>,
}

impl Fabric for Here {
    fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn send(&mut self, rank: u32, message: Vec<u32>) -> Result<(), FabricError> {
        let answer = self.ranks[rank as usize].answer(&message);
        self.answers.extend(answer.map(|answer| (rank, answer)));
        Ok(())
    }

    fn receive(&mut self, _until: Instant) -> Result<Option<(u32, Vec<u32>)>, FabricError> {
        Ok(self.answers.pop_front())
    }
}

fn config() -> CacheConfig {
    let layer = LayerShape::new(1, 1, DIM as u32, Dtype::F32);
    CacheConfig::new(vec![layer], 1 << 20).ring(STEP).experts(EXPERTS, 1)
}

/// A cache over two ranks with room for `pages` pages each.
fn cache(pages: u64) -> Cache {
    let config = config().shards(ShardMap::sum(2).unwrap());
    let page = config.layers[0].layout.bytes();
    let ranks = (0..2).map(|_| RankStore::new(&config, pages * page).unwrap()).collect();
    Cache::over(config, Box::new(Here { ranks, answers: VecDeque::new() }), Options::default()).unwrap()
}

/// Lack of room is expected; no other error may occur.
fn refused<T>(made: Result<T, Error>) -> bool {
    match made {
        Ok(_) => false,
        Err(Error::OutOfBudget { .. } | Error::Fabric(FabricError::Budget { .. })) => true,
        Err(other) => panic!("{other}"),
    }
}

/// Adds a step of tokens, or is refused.
fn step(cache: &Cache, sequence: &mut Sequence, salt: u64) -> Result<(), Error> {
    let from = sequence.next_position().0;
    let experts: Vec<u16> = (from..from + STEP).map(|position| (position / 8 % EXPERTS) as u16).collect();
    let mut step = cache.begin([(sequence, STEP)])?;
    step.append(0, &rows(salt, from, STEP), &rows(salt + 500, from, STEP))?;
    step.route(0, &experts)?;
    step.commit()
}

/// Steps a sequence, reads it, forks it and continues with either; counts the steps.
fn decode(cache: &Cache, salt: u64, steps: &AtomicU32) -> Sequence {
    let mut sequence = cache.sequence();
    for _ in 0..STEPS {
        let fork = thread_rng().gen_bool(0.3).then(|| sequence.fork());
        let full = refused(step(cache, &mut sequence, salt));
        if let Some(fork) = fork.filter(|_| full || thread_rng().gen_bool(0.5)) {
            sequence = fork;
        }
        if sequence.next_position().0 > 0 {
            read(cache, 0, &sequence).unwrap();
        }
        steps.fetch_add(1, Ordering::Relaxed);
    }
    sequence
}

/// Places experts by new loads and copies pages, in parallel with the others.
fn shift(cache: &Cache, steps: &AtomicU32) {
    // As long as there are pages to move, which takes the others many more turns.
    while steps.load(Ordering::Relaxed) < 2 * STEPS {
        thread::yield_now();
        let loads = [(); EXPERTS as usize].map(|()| f64::from(thread_rng().gen_range(1..9u32)));
        match thread_rng().gen_range(0..3) {
            0 => drop(refused(cache.rebalance(0, &Eplb::global(4, 2), Some(&loads)))),
            1 => drop(refused(cache.replicate(0, 0, 2))),
            _ => drop(refused(cache.replicate(0, 1, 1))),
        }
    }
}

fn decode_while_pages_move() {
    let cache = cache(thread_rng().gen_range(3..12));
    let steps = Arc::new(AtomicU32::new(0));
    let tasks = SALT.map(|salt| {
        let (cache, steps) = (cache.clone(), steps.clone());
        thread::spawn(move || decode(&cache, salt, &steps))
    });
    let mover = cache.clone();
    let mover = thread::spawn(move || shift(&mover, &steps));
    let sequences = tasks.map(|task| task.join().unwrap());
    mover.join().unwrap();
    for (sequence, salt) in sequences.iter().zip(SALT).filter(|(sequence, _)| sequence.next_position().0 > 0)
    {
        let alone = Cache::new(config()).unwrap();
        let mut twin = alone.sequence();
        while twin.next_position() < sequence.next_position() {
            step(&alone, &mut twin, salt).unwrap();
        }
        assert_eq!(read(&cache, 0, sequence).unwrap(), read(&alone, 0, &twin).unwrap());
    }
    drop(sequences);
    // A message to every rank carries the ids of freed pages.
    let pages: u64 = cache.ranks().unwrap().iter().map(|rank| rank.pages).sum();
    assert_eq!(pages, 0, "pages are left on the ranks");
}

#[test]
fn pages_move_while_others_step_fork_and_drop() {
    shuttle::check_random(decode_while_pages_move, orders(2_000));
}

#[test]
fn pages_move_with_few_changes_of_thread() {
    shuttle::check_pct(decode_while_pages_move, orders(2_000), 4);
}
