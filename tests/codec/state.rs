//! Rollback, abort, fork and eviction of packed pages.

use crate::model::Model;
use crate::setup::{Setup, Stored, codec, feed, fill, options, shape, snapshot};
use pikv::codec::Code;
use pikv::report::Place;
use pikv::{Cache, Dtype, Error, Sequence};

fn ids(range: std::ops::Range<u32>) -> Vec<u64> {
    range.map(u64::from).collect()
}

/// Two layers of two heads, one head packed in 4 bits, the other in 8, which close pages together unless one is evicted from.
fn setup() -> Setup {
    let both = [Some(codec(Code::Int4, Code::Int8)), Some(codec(Code::E4m3, Code::Bf16))];
    Setup {
        layers: 2,
        rollback: 70,
        sinks: 3,
        experts: 3,
        codecs: both.to_vec(),
        ..Setup::new(shape(2, 2, 20, 33, Dtype::F16), 10, codec(Code::Int4, Code::Int8))
    }
}

/// The state that two sequences with the same tokens share: everything but which pages are shared.
fn essence(setup: &Setup, sequence: &Sequence) -> Vec<Stored> {
    let mut all = snapshot(setup, sequence);
    all.iter_mut().for_each(|(page, _)| page.shared = false);
    all
}

/// [`essence`] without remains of a rollback: tiles of the ring, and originals that are not needed.
fn filed(setup: &Setup, sequence: &Sequence) -> Vec<Stored> {
    let mut all = essence(setup, sequence);
    all.retain(|(page, _)| page.id.place != Place::Ring);
    all.iter_mut().filter(|(page, _)| page.packed).for_each(|(page, _)| page.bytes = 0);
    all
}

#[track_caller]
fn feed_both(setup: &Setup, cache: &Cache, a: &mut Sequence, b: &mut Sequence, ids: &[u64]) {
    let rows = |sequence: &mut Sequence| -> Vec<_> {
        feed(setup, cache, sequence, ids.to_vec()).iter().map(|got| got.bits()).collect()
    };
    assert_eq!(rows(a), rows(b));
}

#[test]
fn rollback_is_never_having_appended() {
    let setup = setup();
    let cache = setup.cache();
    for len in [40u32, 75, 101, 140, 171] {
        for (n, at_once) in
            [(1, true), (2, true), (10, false), (31, true), (32, false), (33, false), (70, false)]
        {
            let (mut never, mut back) = (cache.sequence(), cache.sequence());
            (0..len).for_each(|p| drop(feed(&setup, &cache, &mut never, [u64::from(p)])));
            (0..len).for_each(|p| drop(feed(&setup, &cache, &mut back, [u64::from(p)])));
            let wrong: Vec<u64> = (0..n).map(|i| 10_000 + i).collect();
            if at_once && n <= 10 {
                feed(&setup, &cache, &mut back, wrong);
            } else {
                wrong.into_iter().for_each(|id| drop(feed(&setup, &cache, &mut back, [id])));
            }
            back.rollback(n as u32).unwrap();
            assert_eq!(filed(&setup, &never), filed(&setup, &back), "{len} + {n} - {n}");
            // In two steps, with other tokens, and further.
            let (mut a, mut b) = (never.fork(), back.fork());
            for step in 0..12 {
                let next = (0..10).map(|i| 20_000 + step * 10 + i).collect::<Vec<_>>();
                feed_both(&setup, &cache, &mut a, &mut b, &next);
                assert_eq!(filed(&setup, &a), filed(&setup, &b));
            }
            drop((never, back));
            assert_eq!(essence(&setup, &a), essence(&setup, &b));
            assert_eq!(a.bytes(), b.bytes());
            drop((a, b));
            assert_eq!(cache.usage().taken, 0);
        }
    }
}

#[test]
fn repeated_rollback_over_one_boundary() {
    let setup = Setup { experts: 1, layers: 1, sinks: 0, ..setup() };
    let cache = setup.cache();
    let mut never = cache.sequence();
    feed(&setup, &cache, &mut never, ids(0..41));
    let mut back = never.fork();
    for round in 0..40u64 {
        // The page of 32 is packed by the next token, each time with other last tokens.
        let wrong: Vec<u64> = (0..1 + round % 5).map(|i| 500 + 10 * round + i).collect();
        feed(&setup, &cache, &mut back, wrong.clone());
        assert!(back.pages(0, 0).unwrap().any(|page| page.packed));
        back.rollback(wrong.len() as u32).unwrap();
        assert!(!back.pages(0, 0).unwrap().any(|page| page.packed));
        assert_eq!(filed(&setup, &never), filed(&setup, &back), "round {round}");
    }
    feed_both(&setup, &cache, &mut never, &mut back, &ids(41..51));
    assert_eq!(essence(&setup, &never), essence(&setup, &back));
}

#[test]
fn a_dropped_step_never_happened() {
    for rollback in [0, 25] {
        let setup = Setup { rollback, ..setup() };
        let cache = setup.cache();
        let mut sequence = cache.sequence();
        for len in 0..170u32 {
            if len % 13 == 0 || (100..140).contains(&len) {
                let (before, usage) = (snapshot(&setup, &sequence), cache.usage());
                // Once alone, and once with pages shared by a fork.
                for fork in [false, true] {
                    let fork = fork.then(|| sequence.fork());
                    for (n, layers) in [(1, 1), (10, 2), (40, 2), (90, 1)] {
                        let wrong: Vec<u64> = (0..n).map(|i| 5000 + i).collect();
                        let mut step = cache.begin([(&mut sequence, n as u32)]).unwrap();
                        for layer in 0..layers {
                            fill(&setup, &mut step, layer, &wrong, &options(&setup), false).unwrap();
                        }
                        drop(step);
                        assert_eq!(cache.usage(), usage);
                        if fork.is_none() {
                            assert_eq!(before, snapshot(&setup, &sequence), "{n} tokens after {len}");
                        } else {
                            assert_eq!(
                                sequence.bytes(),
                                before.iter().map(|(page, _)| page.bytes).sum::<u64>()
                            );
                        }
                    }
                }
                assert_eq!(before, snapshot(&setup, &sequence));
            }
            feed(&setup, &cache, &mut sequence, [u64::from(len)]);
        }
        let mut never = cache.sequence();
        (0..170).for_each(|p| drop(feed(&setup, &cache, &mut never, [p])));
        assert_eq!(snapshot(&setup, &never), snapshot(&setup, &sequence));
    }
}

#[test]
fn forks_share_packed_pages_and_stay_apart() {
    let setup = Setup { rollback: 20, ..setup() };
    let cache = setup.cache();
    for len in [100u32, 117, 150, 300] {
        let mut a = cache.sequence();
        (0..len).for_each(|p| drop(feed(&setup, &cache, &mut a, [u64::from(p)])));
        let usage = cache.usage();
        let mut b = a.fork();
        assert_eq!(cache.usage(), usage);
        assert!(b.pages(0, 0).unwrap().filter(|page| page.packed).count() > 1);
        assert!(b.pages(0, 1).unwrap().all(|page| page.shared));
        // One continues, the other is rolled back over a page boundary and elsewhere.
        let mut fresh = [cache.sequence(), cache.sequence()];
        let histories = [
            (0..len + 60).map(u64::from).collect::<Vec<_>>(),
            ids(0..len - 20).into_iter().chain(7000..7080).collect(),
        ];
        for p in len..len + 60 {
            feed(&setup, &cache, &mut a, [u64::from(p)]);
        }
        b.rollback(20).unwrap();
        (7000..7080).for_each(|id| drop(feed(&setup, &cache, &mut b, [id])));
        for (fresh, history) in fresh.iter_mut().zip(&histories) {
            history.iter().for_each(|id| drop(feed(&setup, &cache, fresh, [*id])));
        }
        assert_eq!(essence(&setup, &a), essence(&setup, &fresh[0]));
        assert_eq!(essence(&setup, &b), essence(&setup, &fresh[1]));
        drop(a);
        assert_eq!(essence(&setup, &b), essence(&setup, &fresh[1]));
        drop((b, fresh));
        assert_eq!(cache.usage().taken, 0);
    }
}

#[test]
fn evicting_from_one_head() {
    let setup = Setup { rollback: 40, layers: 1, sinks: 0, ..setup() };
    let cache = setup.cache();
    let (mut sequence, mut model) = (cache.sequence(), Model::new(&setup, 0));
    let options = options(&setup);
    let mut evictions = vec![];
    for p in 0..400u32 {
        // A packed page, an open one, and twice one with its original kept: of head 1 only, each at the first chance.
        let pages: Vec<_> =
            sequence.pages(0, 1).unwrap().filter(|page| page.id.place == Place::Run(0)).collect();
        let kept = |page: &&pikv::report::PageInfo| page.packed && page.bytes > setup.packed_bytes(1);
        let page = match evictions.len() {
            0 if p >= 99 => pages.iter().find(|page| page.packed),
            1 if p >= 125 => pages.iter().find(|page| !page.packed),
            2 if p >= 151 => pages.iter().find(kept),
            3 if p >= 205 => pages.iter().find(kept),
            _ => None,
        };
        if let Some(page) = page {
            evictions.push(p);
            sequence.evict(0, 1, page.id).unwrap();
            let mut evicted = 0;
            for own in model.runs[1][1].iter_mut().filter(|own| own.positions[0] == page.first.0 && !own.gone)
            {
                own.gone = true;
                evicted += 1;
            }
            assert_eq!(evicted, 1);
            assert!(matches!(sequence.evict(0, 1, page.id), Err(Error::NoPage { .. })));
        }
        if [100, 155, 230].contains(&p)
            || [2, 3, 4].iter().any(|n| evictions.get(n - 1).is_some_and(|at| at + 9 == p))
        {
            let n = sequence.rollback_limit().min(38);
            sequence.rollback(n).unwrap();
            model.rollback(&setup, n);
        }
        let id = u64::from(p);
        let got = feed(&setup, &cache, &mut sequence, [id]).remove(0);
        model.push(&setup, &[id]);
        model.check(&setup, 1, &options, &got.out, &got.lse, 1);
        assert_eq!(sequence.bytes(), model.bytes(&setup), "token {p}");
    }
    assert_eq!(evictions.len(), 4);
    let fills = |h: usize| model.runs[h][1].iter().map(|page| page.positions.clone()).collect::<Vec<_>>();
    assert_ne!(fills(0), fills(1), "the heads close pages at different times");
    sequence.evict_all();
    assert!(sequence.pages(0, 1).unwrap().all(|page| page.id.place == Place::Ring));
}
