//! Pages that forks, prefixes and checkpoints share move down once, for all that hold them.

use crate::setup::{Control, PAGE_BYTES, bytes, config, fake, feed};
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::report::{PageInfo, Place};
use pikv::save::Parkable;
use pikv::tiers::{TierOperation, Tiers};
use pikv::{Cache, Error, Sequence};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Full pages of a head of `grown`.
const FULL: u64 = 40;

/// A sequence of 1,288 tokens, of which 1,280 have left the ring.
fn grown(cache: &Cache) -> Sequence {
    let mut sequence = cache.sequence();
    (0..1 + 4 * FULL).for_each(|i| drop(feed(cache, &mut sequence, 8, i).unwrap()));
    sequence
}

fn outside_ring(sequence: &Sequence, head: usize) -> Vec<PageInfo> {
    sequence.pages(0, head).unwrap().filter(|page| page.id.place != Place::Ring).collect()
}

fn lower(sequence: &Sequence) -> u64 {
    (0..2).flat_map(|head| outside_ring(sequence, head)).filter(|page| page.tier > 0).count() as u64
}

/// A cache with a lower tier, and one without.
fn caches(budget: u64, tiers: Tiers) -> [Cache; 2] {
    [config(1, budget).tiers(tiers), config(1, 1 << 24)].map(|config| Cache::new(config).unwrap())
}

/// Adds tokens to the same sequence of both caches, with the same results.
fn step(caches: &[Cache; 2], pair: &mut [Sequence; 2], n: u32, seed: u64) {
    let [a, b] = pair.each_mut();
    let got = feed(&caches[0], a, n, seed).unwrap();
    assert_eq!(got, feed(&caches[1], b, n, seed).unwrap());
}

#[test]
fn a_prompt_moves_once_for_all_its_forks() {
    let caches = caches(1 << 22, Tiers::new().host(1 << 22));
    let mut prompt = caches.each_ref().map(grown);
    let mut forks: Vec<[Sequence; 2]> = (0..3).map(|_| prompt.each_ref().map(Sequence::fork)).collect();
    // The first fork has changed no list; the others have lists of their own, in which they share parts.
    for (i, fork) in (1..).zip(&mut forks[1..]) {
        step(&caches, fork, 40, i);
    }
    let before = bytes(&caches[0]);
    assert_eq!(prompt[0].demote(u64::MAX), Ok(0));
    assert_eq!(forks[0][0].demote(u64::MAX), Ok(0));
    let own = 2 * PAGE_BYTES;
    assert_eq!(forks[1][0].demote(u64::MAX), Ok(own));
    // Of the lists of the others some are in the layers that the prompt and the first share.
    for bytes in [PAGE_BYTES, u64::MAX] {
        let others = forks[1..].iter_mut().chain([&mut prompt]).map(|pair| &mut pair[0]);
        assert_eq!(caches[0].demote(others, bytes), Ok(PAGE_BYTES));
    }
    let before = [before[0] - 2 * own, 2 * own];
    assert_eq!(bytes(&caches[0]), before);
    // A page of the first head, and then one of the second.
    for moved in 1..=2 {
        let all = [&mut prompt].into_iter().chain(&mut forks).map(|pair| &mut pair[0]);
        assert_eq!(caches[0].demote(all, PAGE_BYTES), Ok(PAGE_BYTES));
        assert_eq!(bytes(&caches[0]), [before[0] - moved * PAGE_BYTES, before[1] + moved * PAGE_BYTES]);
        assert_eq!(lower(&forks[0][0]), moved);
    }
    let all = [&mut prompt].into_iter().chain(&mut forks).map(|pair| &mut pair[0]);
    let down = caches[0].demote(all, u64::MAX).unwrap();
    assert_eq!(down, 2 * (FULL - 1) * PAGE_BYTES);
    let all = 2 * FULL * PAGE_BYTES + 2 * own;
    assert_eq!(bytes(&caches[0]), [before[0] + before[1] - all, all]);
    assert_eq!(
        [lower(&prompt[0]), lower(&forks[0][0]), lower(&forks[2][0])],
        [2 * FULL, 2 * FULL, 2 * FULL + 2]
    );
    assert!(outside_ring(&forks[2][0], 0)[..FULL as usize].iter().all(|page| page.shared));
    for (i, fork) in (10..).zip(&mut forks) {
        step(&caches, fork, 33, i);
    }
    step(&caches, &mut prompt, 5, 20);
    // Back in the first tier each page is there once too.
    let before = bytes(&caches[0]);
    let up = caches[0].promote(forks.iter_mut().map(|fork| &mut fork[0]), u64::MAX).unwrap();
    assert_eq!(up, all);
    assert_eq!(bytes(&caches[0]), [before[0] + up, 2 * FULL * PAGE_BYTES]);
    assert_eq!([lower(&prompt[0]), lower(&forks[0][0]), lower(&forks[2][0])], [2 * FULL, 0, 0]);
    for (i, fork) in (30..).zip(&mut forks) {
        step(&caches, fork, 33, i);
    }
    step(&caches, &mut prompt, 5, 40);
    drop((prompt, forks));
    assert_eq!(bytes(&caches[0]), [0, 0]);
}

/// Bytes of the first tier that forks of a prompt take after a step that lacks memory.
#[test]
fn a_step_of_all_forks_moves_their_prompt() {
    // The prompt's pages, and for each fork a ring and two open pages.
    let budget = (2 * FULL + 50) * PAGE_BYTES;
    let caches = caches(budget, Tiers::new().host(1 << 22));
    let prompt = caches.each_ref().map(grown);
    let mut forks: Vec<[Sequence; 2]> = (0..4).map(|_| prompt.each_ref().map(Sequence::fork)).collect();
    let grow = |forks: &mut [[Sequence; 2]], n: u32| {
        let parts = forks.iter_mut().map(|[fork, _]| (fork, n));
        caches[0].begin(parts).map(drop)
    };
    // As long as another sequence holds the prompt, it stays.
    assert!(matches!(grow(&mut forks, 200), Err(Error::OutOfBudget { .. })));
    assert_eq!(bytes(&caches[0])[1], 0);
    drop(prompt);
    grow(&mut forks, 200).unwrap();
    assert!(bytes(&caches[0])[1] > 0 && bytes(&caches[0])[1] <= 2 * FULL * PAGE_BYTES);
    for (i, fork) in (0..).zip(&mut forks) {
        step(&caches, fork, 50, i);
    }
}

/// Checkpoints of a sequence are moved with it, and are forked with the same bits.
#[test]
fn checkpoints_do_not_keep_pages() {
    let caches = caches(1 << 22, Tiers::new().host(1 << 22));
    let mut pair = caches.each_ref().map(grown);
    pair.iter_mut().for_each(|sequence| sequence.checkpoint().unwrap());
    step(&caches, &mut pair, 40, 1);
    pair.iter_mut().for_each(|sequence| sequence.checkpoint().unwrap());
    // Another sequence holds the checkpoints too.
    let mut fork = pair.each_ref().map(Sequence::fork);
    assert_eq!(pair[0].demote(u64::MAX), Ok(0));
    let before = bytes(&caches[0]);
    let down = caches[0].demote([&mut pair[0], &mut fork[0]], u64::MAX).unwrap();
    assert_eq!(down, 2 * (FULL + 1) * PAGE_BYTES);
    assert_eq!(bytes(&caches[0]), [before[0] - down, down]);
    step(&caches, &mut fork, 40, 2);
    let mut cut = pair.each_ref().map(|sequence| sequence.fork_at(1288).unwrap());
    assert_eq!(cut[0].next_position().0, 1288);
    assert_eq!(lower(&cut[0]), 2 * FULL);
    for (i, pair) in (3..).zip([&mut cut, &mut pair]) {
        step(&caches, pair, 40, i);
    }
}

/// Prefixes that share their first tokens move down for a step, rather than go.
#[test]
fn prefixes_with_a_common_beginning_move_down() {
    let caches = caches((2 * FULL + 60) * PAGE_BYTES, Tiers::new().host(1 << 22));
    let index = PrefixIndex::new(&caches[0], 1 << 22);
    let scope = PrefixScope::new(b"all");
    let named = |branch: u32, len: u32| -> Vec<u32> {
        (0..len).map(|i| if i < 1280 { i } else { branch << 16 | i }).collect()
    };
    let mut first = grown(&caches[0]);
    index.publish(&scope, &named(0, 1280), &mut first).unwrap();
    for branch in 1..4 {
        let mut sequence = index.find(&scope, &named(branch, 1400)).unwrap();
        assert_eq!(sequence.next_position().0, 1280);
        feed(&caches[0], &mut sequence, 96, u64::from(branch)).unwrap();
        index.publish(&scope, &named(branch, 1376), &mut sequence).unwrap();
    }
    drop(first);
    let known = index.usage();
    assert_eq!((known.lower, known.evictions), (0, 0));
    let mut other = caches[0].sequence();
    let mut twin = caches[1].sequence();
    for seed in 0..180 {
        let got = feed(&caches[0], &mut other, 8, seed).unwrap();
        assert_eq!(got, feed(&caches[1], &mut twin, 8, seed).unwrap());
    }
    let usage = index.usage();
    assert_eq!((usage.evictions, usage.bytes), (0, known.bytes));
    assert!(usage.lower > FULL * PAGE_BYTES && usage.lower == bytes(&caches[0])[1], "{usage:?}");
    drop(other);
    // What is found in the lower tier has the bits of what was computed.
    let mut found = index.find(&scope, &named(2, 1400)).unwrap();
    assert_eq!(found.next_position().0, 1376);
    let mut twin = grown(&caches[1]).fork_at(1280).unwrap();
    feed(&caches[1], &mut twin, 96, 2).unwrap();
    assert_eq!(feed(&caches[0], &mut found, 20, 9).unwrap(), feed(&caches[1], &mut twin, 20, 9).unwrap());
    // A request moves the pages that it shares with the index.
    let lower = index.usage().lower;
    assert!(found.demote(u64::MAX).unwrap() > 0);
    assert!(index.usage().lower > lower);
    drop(found);
    index.clear();
    assert_eq!((index.usage().bytes, index.usage().lower), (0, 0));
    assert_eq!(bytes(&caches[0]), [0, 0]);
}

/// Parkable forks of one prompt share all of their full pages: none can be parked with a gain, but together they can give way.
#[test]
fn parkable_forks_give_way_together() {
    let caches = caches(1 << 22, Tiers::new().host(1 << 22));
    let prompt = caches.each_ref().map(grown);
    let mut forks: Vec<[Sequence; 2]> = (0..3).map(|_| prompt.each_ref().map(Sequence::fork)).collect();
    let mut handles: Vec<Parkable> = forks.iter_mut().map(|[fork, _]| Parkable::new(fork.fork())).collect();
    forks.iter_mut().for_each(|[fork, _]| fork.clear());
    let budget = caches[0].usage().budget;
    let made = caches[0].make_room(budget).unwrap();
    assert_eq!((made.freed, made.parked.len()), (0, 0), "the prompt is not parkable");
    let [prompt, _twin] = prompt;
    drop(prompt);
    let taken = caches[0].usage().taken;
    // The handle that is awake has the same pages.
    let awake = handles[0].awake().unwrap();
    assert_eq!(caches[0].make_room(budget).unwrap().freed, 0);
    drop(awake);
    let made = caches[0].make_room(budget - taken + 1).unwrap();
    let ids: Vec<u64> = handles.iter().map(Parkable::id).collect();
    assert_eq!((made.freed, made.parked.len(), made.demoted), (PAGE_BYTES, 0, ids));
    let made = caches[0].make_room(budget).unwrap();
    assert_eq!((made.freed, made.parked.len()), ((2 * FULL - 1) * PAGE_BYTES, 0));
    for (i, (handle, [_, twin])) in (0..).zip(handles.iter_mut().zip(&mut forks)) {
        let got = feed(&caches[0], &mut handle.awake().unwrap(), 20, i).unwrap();
        assert_eq!(got, feed(&caches[1], twin, 20, i).unwrap());
    }
    drop(handles);
    assert_eq!(bytes(&caches[0]), [0, 0]);
}

/// A tier that fails in the middle keeps what it has, and the rest stays where it was.
#[test]
fn a_store_that_fails_loses_nothing() {
    let control = Arc::new(Control::default());
    let caches = caches(1 << 22, fake(Tiers::new().host(5 * PAGE_BYTES), 1 << 22, &control));
    let prompt = caches.each_ref().map(grown);
    let mut forks: Vec<[Sequence; 2]> = (0..2).map(|_| prompt.each_ref().map(Sequence::fork)).collect();
    drop(prompt);
    let all = |forks: &'_ mut Vec<[Sequence; 2]>| -> Result<u64, Error> {
        caches[0].demote(forks.iter_mut().map(|fork| &mut fork[0]), u64::MAX)
    };
    control.full.store(true, SeqCst);
    let Err(Error::Tier { operation: TierOperation::Write, .. }) = all(&mut forks) else {
        panic!("it is full")
    };
    assert_eq!(bytes(&caches[0])[1..], [5 * PAGE_BYTES, 0]);
    assert_eq!([lower(&forks[0][0]), lower(&forks[1][0])], [5, 5]);
    for (i, fork) in (0..).zip(&mut forks) {
        step(&caches, fork, 40, i);
    }
    control.full.store(false, SeqCst);
    assert_eq!(all(&mut forks), Ok((2 * FULL - 5 + 4) * PAGE_BYTES));
    for (i, fork) in (5..).zip(&mut forks) {
        step(&caches, fork, 40, i);
    }
}

#[test]
fn sequences_of_another_cache_are_refused() {
    let [cache, none] = caches(1 << 22, Tiers::new().host(1 << 22));
    let (mut own, mut foreign) = (cache.sequence(), none.sequence());
    let refused = Err(Error::ForeignSequence { index: 1 });
    assert_eq!(cache.demote([&mut own, &mut foreign], 1), refused);
    assert_eq!(cache.promote([&mut own, &mut foreign], 1), refused);
    assert_eq!(none.demote([&mut foreign], 1), Err(Error::NoTiers));
    assert_eq!(none.promote([&mut foreign], 1), Err(Error::NoTiers));
    assert_eq!(cache.demote([], u64::MAX), Ok(0));
}
