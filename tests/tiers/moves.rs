//! Which pages move, when, and to which tier.

use crate::setup::{Control, PAGE_BYTES, attend, bytes, config, fake, feed};
use pikv::planner::flexgen::{Class, Machine, Tier};
use pikv::report::{PageInfo, Place};
use pikv::rules::Hits;
use pikv::tiers::{Fetches, Tiers};
use pikv::{Attend, Cache, Error, ReadPages, Sequence, StepReport};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

fn filled(cache: &Cache, tokens: u32) -> Sequence {
    let mut sequence = cache.sequence();
    (0..tokens / 8).for_each(|i| drop(feed(cache, &mut sequence, 8, u64::from(i)).unwrap()));
    sequence
}

fn pool(sequence: &Sequence, layer: usize, head: usize) -> Vec<PageInfo> {
    sequence.pages(layer, head).unwrap().filter(|page| page.id.place != Place::Ring).collect()
}

/// Tiers of the pages of a head, the oldest page first.
fn tiers(sequence: &Sequence, layer: usize, head: usize) -> Vec<usize> {
    pool(sequence, layer, head).iter().map(|page| page.tier).collect()
}

#[test]
fn the_oldest_pages_go_first_and_come_last() {
    let cache = Cache::new(config(1, 1 << 20).tiers(Tiers::new().host(3 * PAGE_BYTES).file("/tmp", 1 << 20)))
        .unwrap();
    let mut sequence = filled(&cache, 8 + 32 * 5 + 8);
    let before: Vec<PageInfo> = pool(&sequence, 0, 0);
    assert_eq!(tiers(&sequence, 0, 0), [0; 6]);
    // One page of each head and half of another: two pages each, three to the host, one to the file.
    assert_eq!(sequence.demote(PAGE_BYTES * 3 + 1), Ok(PAGE_BYTES * 4));
    assert_eq!(tiers(&sequence, 0, 0), [1, 1, 0, 0, 0, 0]);
    assert_eq!(tiers(&sequence, 0, 1), [1, 2, 0, 0, 0, 0]);
    assert_eq!((sequence.bytes_in_tier(1), sequence.bytes_in_tier(2)), (3 * PAGE_BYTES, PAGE_BYTES));
    assert_eq!(bytes(&cache), [sequence.bytes(), 3 * PAGE_BYTES, PAGE_BYTES]);
    // All that can: the last page is not full.
    assert_eq!(sequence.demote(u64::MAX), Ok(PAGE_BYTES * 6));
    assert_eq!(tiers(&sequence, 0, 0), [1, 1, 2, 2, 2, 0]);
    assert_eq!(sequence.promote(1), Ok(PAGE_BYTES));
    assert_eq!(tiers(&sequence, 0, 1), [1, 2, 2, 2, 0, 0]);
    assert_eq!(sequence.promote(u64::MAX), Ok(PAGE_BYTES * 9));
    assert_eq!(pool(&sequence, 0, 0), before);
    assert_eq!(bytes(&cache), [sequence.bytes(), 0, 0]);
}

#[test]
fn what_rollback_or_a_fork_needs_stays() {
    let cache = Cache::new(config(1, 1 << 20).rollback(40).tiers(Tiers::new().host(1 << 20))).unwrap();
    let mut sequence = filled(&cache, 8 + 40 + 64);
    // 104 tokens left the ring, of which 64 for good: two full pages.
    assert_eq!(tiers(&sequence, 0, 0), [0; 4]);
    let mut fork = sequence.fork();
    assert_eq!(sequence.demote(u64::MAX), Ok(0));
    drop(fork);
    assert_eq!(sequence.demote(u64::MAX), Ok(4 * PAGE_BYTES));
    assert_eq!(tiers(&sequence, 0, 0), [1, 1, 0, 0]);
    // Forks share pages in lower tiers, and each promotes its own.
    fork = sequence.fork();
    assert!(pool(&fork, 0, 0)[0].shared);
    assert_eq!(bytes(&cache)[1], 4 * PAGE_BYTES);
    assert_eq!(fork.promote(u64::MAX), Ok(4 * PAGE_BYTES));
    assert_eq!(bytes(&cache)[1], 4 * PAGE_BYTES);
    drop(sequence);
    assert_eq!(bytes(&cache), [fork.bytes(), 0]);
    fork.rollback(40).unwrap();
}

/// Forks share long lists of pages, each page counted once: demoting one would free no memory.
#[test]
fn what_two_forks_list_together_stays() {
    let cache = Cache::new(config(1, 1 << 22).tiers(Tiers::new().host(1 << 22))).unwrap();
    let mut sequence = filled(&cache, 8 + 40 * 32);
    let mut fork = sequence.fork();
    for sequence in [&mut fork, &mut sequence] {
        feed(&cache, sequence, 1, 7).unwrap();
    }
    let before = bytes(&cache);
    for (sequence, other) in [(&mut fork, 0), (&mut sequence, 1)] {
        assert!(pool(sequence, 0, 0)[..39].iter().all(|page| page.shared), "sequence {other}");
        assert_eq!(sequence.demote(u64::MAX), Ok(0));
        assert_eq!(bytes(&cache), before);
    }
    drop(fork);
    let taken = cache.usage().taken;
    let freed = sequence.demote(u64::MAX).unwrap();
    assert!(freed >= 2 * 38 * PAGE_BYTES, "{freed}");
    assert_eq!(cache.usage().taken, taken - freed);
}

/// A step makes room by itself, and only as much as it needs.
#[test]
fn a_step_that_lacks_bytes_moves_the_oldest_pages() {
    let cache = Cache::new(config(2, 24 * PAGE_BYTES).tiers(Tiers::new().host(30 * PAGE_BYTES))).unwrap();
    let mut sequence = cache.sequence();
    let mut most = 0;
    let refused = loop {
        let seed = u64::from(sequence.next_position().0);
        match feed(&cache, &mut sequence, 8, seed) {
            Ok(_) => {
                let usage = cache.usage();
                assert!(usage.taken <= usage.budget && usage.tiers[0].bytes <= usage.tiers[0].capacity);
                most = most.max(usage.taken);
            }
            Err(error) => break error,
        }
    };
    // Both tiers are full, except what a step reserves in the first.
    assert_eq!(cache.usage().tiers[0].bytes, 30 * PAGE_BYTES);
    assert_eq!(most, 24 * PAGE_BYTES);
    let Error::OutOfBudget { needed, available } = refused else { panic!("{refused}") };
    assert!(needed > available);
    assert_eq!(tiers(&sequence, 1, 1), [vec![1; 7], vec![0; tiers(&sequence, 1, 1).len() - 7]].concat());
    // No tokens are lost, and no pages were moved in vain.
    assert_eq!(sequence.resident(0, 0).unwrap().0, sequence.next_position().0);
    sequence.clear();
    assert_eq!(bytes(&cache), [0, 0]);
}

#[test]
fn hits_are_in_the_first_tier() {
    let control = Arc::new(Control::default());
    let hits = Hits::new().pages(4).every(1);
    let tiers = fake(Tiers::new(), 1 << 20, &control);
    let cache = Cache::new(config(1, 1 << 20).key_bounds(true).hits(hits).tiers(tiers)).unwrap();
    let mut sequence = filled(&cache, 8 + 32 * 4);
    sequence.demote(2 * PAGE_BYTES).unwrap();
    let mut report = StepReport::default();
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    crate::setup::append(&mut step, 0, 1, 99);
    attend(&mut step, 0, 1, 99, &Attend::new(1.0)).unwrap();
    step.commit_with(&mut report).unwrap();
    // In each head 129 tokens left the ring, and 32 of them are in the lower tier; the 4 pages of the others are all wanted.
    assert_eq!((report.held_tokens(0), report.lost_tokens(0)), (&[2 * 97][..], &[2 * 32][..]));
    assert_eq!((report.hits(0), report.misses(0)), (&[6.0][..], &[2.0][..]));
    assert_eq!(report.remote_bytes(0), 2 * PAGE_BYTES);
    // Which of these the reads are depends on timing.
    let Fetches { in_place, ahead, awaited, late, .. } = cache.fetches();
    assert_eq!((in_place, ahead + awaited + late), (0, 2));
    // With Quest only selected pages are read.
    let before = cache.fetches();
    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
    crate::setup::append(&mut step, 0, 1, 100);
    attend(&mut step, 0, 1, 100, &Attend::new(1.0).read(ReadPages::Quest { pages: 0 })).unwrap();
    step.commit_with(&mut report).unwrap();
    assert_eq!(report.remote_bytes(0), 0);
    // The prefetch, made since the previous step read all pages, was not used.
    assert_eq!(cache.fetches(), before);
}

/// Pages that already lie in their tier are not written again.
#[test]
fn a_plan_that_holds_moves_nothing() {
    let control = Arc::default();
    let cache = Cache::new(config(1, 1 << 20).tiers(fake(Tiers::new(), 1 << 20, &control))).unwrap();
    let mut sequence = filled(&cache, 8 + 32 * 10);
    for (shares, written) in [([0.5, 0.5], 10), ([0.5, 0.5], 10), ([0.2, 0.8], 16), ([0.2, 0.8], 16)] {
        sequence.arrange(0..1, &shares).unwrap();
        assert_eq!(control.written.load(SeqCst), written);
    }
}

#[test]
fn a_plan_is_followed() {
    let tiers_of = Tiers::new().host(1 << 20).file("/tmp", 1 << 20);
    let cache = Cache::new(config(2, 1 << 20).tiers(tiers_of)).unwrap();
    let mut sequence = filled(&cache, 8 + 32 * 10);
    let tier = |name: &str, read| Tier::new(name, 1 << 20, read, 1e9);
    let machine = Machine::new(20 * PAGE_BYTES, vec![tier("host", 3e9), tier("file", 1e9)]);
    let class = Class::new("pool", 40, PAGE_BYTES);
    let placement = machine.place(&[class]).unwrap();
    assert_eq!(placement.pages, [[20, 15, 5]]);
    sequence.arrange(0..2, &placement.shares(0)).unwrap();
    assert_eq!((sequence.bytes_in_tier(1), sequence.bytes_in_tier(2)), (15 * PAGE_BYTES, 5 * PAGE_BYTES));
    assert_eq!(tiers(&sequence, 0, 0), [2, 2, 1, 1, 1, 0, 0, 0, 0, 0]);
    assert_eq!(tiers(&sequence, 1, 1), [2, 1, 1, 1, 1, 0, 0, 0, 0, 0]);
    // And back, and another way.
    sequence.arrange(1..2, &[0.0, 0.0, 1.0]).unwrap();
    assert_eq!(tiers(&sequence, 1, 1), [2; 10]);
    sequence.arrange(0..2, &[1.0, 0.0, 0.0]).unwrap();
    assert_eq!(bytes(&cache)[1..], [0, 0]);

    let shares = |shares: &[f64], sequence: &mut Sequence| sequence.arrange(0..2, shares).unwrap_err();
    assert_eq!(shares(&[1.0], &mut sequence), Error::Shares { got: 1, tiers: 3, sum: 1.0 });
    assert_eq!(shares(&[0.5, 0.25, 0.5], &mut sequence), Error::Shares { got: 3, tiers: 3, sum: 1.25 });
    assert!(matches!(shares(&[f64::NAN, 0.0, 1.0], &mut sequence), Error::Shares { .. }));
    assert_eq!(sequence.arrange(1..3, &[1.0, 0.0, 0.0]), Err(Error::Layer { layer: 3, layers: 2 }));
    let none = Cache::new(config(1, 1 << 20)).unwrap();
    let mut sequence = none.sequence();
    assert_eq!(sequence.demote(1), Err(Error::NoTiers));
    assert_eq!(sequence.promote(1), Err(Error::NoTiers));
    assert_eq!(sequence.arrange(0..1, &[1.0]), Err(Error::NoTiers));
    assert_eq!(none.tier_rates(4096, 1), Err(Error::NoTiers));
}

#[test]
fn rates_are_measured() {
    let cache =
        Cache::new(config(1, 1 << 20).tiers(Tiers::new().host(1 << 20).file("/tmp", 1 << 20))).unwrap();
    let rates = cache.tier_rates(4096, 64).unwrap();
    assert_eq!(rates.len(), 2);
    for rate in &rates {
        assert!(
            rate.read > 1e5 && rate.write > 1e5 && rate.read.is_finite() && rate.write.is_finite(),
            "{rate:?}"
        );
        assert_eq!(rate.capacity, 1 << 20);
    }
    assert_eq!(Tier::from(rates[0].clone()).name, "host");
    assert_eq!(bytes(&cache), [0, 0, 0]);
    for (page, pages) in [(4096, 300), (u64::MAX, 1), (4096, usize::MAX), (u64::MAX, usize::MAX)] {
        let available = 1 << 20;
        let full = Error::TierFull { tier: "host".into(), needed: page, available };
        assert_eq!(cache.tier_rates(page, pages), Err(full));
    }
}

/// Threads with sequences of their own, in one cache that holds none of them.
#[test]
fn threads_take_turns_with_the_tiers() {
    let control = Arc::new(Control::default());
    let tiers = fake(Tiers::new().host(20 * PAGE_BYTES), 1 << 22, &control);
    let tight = Cache::new(config(2, 160 * PAGE_BYTES).tiers(tiers)).unwrap();
    let roomy = Cache::new(config(2, 1 << 26)).unwrap();
    let thread = |thread: u64| {
        let (mut a, mut b) = (tight.sequence(), roomy.sequence());
        for i in 0..60 {
            let n = if i % 3 == 0 { 17 } else { 1 };
            let seed = thread << 20 | i;
            // Other threads' steps may hold the rest of the budget.
            let mut out = feed(&tight, &mut a, n, seed);
            for _ in 0..100_000 {
                if !matches!(out, Err(Error::OutOfBudget { .. })) {
                    break;
                }
                std::thread::yield_now();
                out = feed(&tight, &mut a, n, seed);
            }
            assert_eq!(out.unwrap(), feed(&roomy, &mut b, n, seed).unwrap());
        }
        a
    };
    // Which sequence is demoted depends on timing, but together they exceed the budget.
    let sequences: Vec<Sequence> = std::thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|i| {
            scope.spawn({
                let thread = &thread;
                move || thread(i)
            })
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(sequences.iter().map(|a| a.bytes_in_tier(1) + a.bytes_in_tier(2)).sum::<u64>() > 0);
    drop(sequences);
    let usage = tight.usage();
    assert_eq!((usage.taken, bytes(&tight)), (0, vec![0; 3]));
    let fetches = tight.fetches();
    assert!(fetches.in_place + fetches.ahead + fetches.awaited + fetches.late > 0);
}
