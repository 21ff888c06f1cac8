//! Rollback, forks and memory: tokens that were rolled back leave no trace in a policy's state.

use crate::model::{ALL, Def};
use crate::setup::{Kind, Log, Row, Spy, bits, config, eviction, held, mix, row, run};
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, LruPlus};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Error, ReadPages, Sequence};
use proptest::prelude::*;

/// Appends and attends rows; the bits of all outputs.
fn feed(cache: &Cache, sequence: &mut Sequence, rows: &[Row]) -> Vec<u32> {
    let mut outs = Vec::new();
    run(cache, sequence, rows, |step, l, q, size| {
        let (mut out, mut lse) = (vec![0.0; size], vec![0.0; size / 3]);
        let read = if cache.config().key_bounds { ReadPages::Quest { pages: 1 } } else { ReadPages::All };
        step.attend(l, q, &Attend::new(0.5).read(read), AttendOutput::new(&mut out).lse(&mut lse)).unwrap();
        outs.extend(bits(&out));
        outs.extend(bits(&lse));
    });
    outs
}

/// A page: its name, its tokens' lanes and positions, and the bits of their keys and values.
type Page = (String, Vec<(u32, u32)>, Vec<u32>);

/// The visible state of a sequence: the pages, the place of each token in them, and its bytes.
fn seen(sequence: &Sequence) -> Vec<Page> {
    let mut all = Vec::new();
    let first = sequence.next_position().0 - sequence.in_ring().0;
    for (l, h) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for page in sequence.pages(l, h).unwrap() {
            let at: Vec<(u32, u32)> = sequence
                .positions(l, h, page.id)
                .unwrap()
                .map(|(lane, p)| (lane, p.0))
                .filter(|(_, p)| page.id.place != pikv::report::Place::Ring || *p >= first)
                .collect();
            let (mut k, mut v, mut read) = ([0.0; 4], [0.0; 3], Vec::new());
            for (lane, _) in &at {
                sequence.read(l, h, page.id, *lane, &mut k, &mut v).unwrap();
                read.extend(bits(&k));
                read.extend(bits(&v));
            }
            // The id of a page without visible tokens is not compared.
            if !at.is_empty() {
                all.push((format!("{l} {h} {}", page.id), at, read));
            }
        }
    }
    all
}

fn cache(
    def: Def,
    slack: u32,
    budget: u32,
    code: Option<Code>,
    rule: impl Fn(Eviction) -> Eviction,
) -> Cache {
    let mut config = config(2).experts(2, 1).rollback(slack).key_bounds(slack == 8);
    config.layers[1].window = (budget == 60).then_some(45);
    if let Some(code) = code {
        config = config.compress(Codec::new(Coding::new(code), Coding::new(code)));
    }
    Cache::new(config.evict(rule(eviction(def.policy(), Budget::Tokens(budget))))).unwrap()
}

fn rows(config: &CacheConfig, from: u32, n: u32, salt: u64) -> Vec<Row> {
    (from..from + n).map(|p| row(config, Kind::Noise, salt << 32 | u64::from(p))).collect()
}

#[test]
fn drafts_leave_no_trace() {
    for (i, def) in ALL.into_iter().enumerate() {
        for slack in [1, 4, 8] {
            let (by_page, budget) = (i % 3 == 2, [24, 60, 90][i % 3]);
            let code = [None, Some(Code::Int8)][(i + slack as usize) % 2];
            let cache = cache(def, slack, budget, code, |mut e| {
                e.by_page = by_page;
                e
            });
            no_trace(&cache, slack, &format!("{def:?}"));
        }
    }
}

/// Drafts of `slack` tokens, partly or fully rolled back, compared with a sequence that never had those tokens.
pub fn no_trace(cache: &Cache, slack: u32, of: &str) {
    let (mut plain, mut drafted) = (cache.sequence(), cache.sequence());
    let prompt = rows(cache.config(), 0, 70, 1);
    assert_eq!(feed(cache, &mut plain, &prompt), feed(cache, &mut drafted, &prompt));
    for turn in 0..40 {
        let len = plain.next_position().0;
        let kept = (mix(turn) % u64::from(slack + 1)) as u32;
        // Some drafts are rolled back partly, some fully.
        let draft = rows(cache.config(), len, slack, 2 + turn);
        feed(cache, &mut drafted, &draft);
        drafted.rollback(slack - kept).unwrap();
        if kept > 0 {
            feed(cache, &mut plain, &draft[..kept as usize]);
        }
        for (l, h) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert_eq!(held(&plain, l, h), held(&drafted, l, h), "{of}, slack {slack}, turn {turn}");
        }
        // Pages are put together when a step begins, so they are compared after one.
        let next = rows(cache.config(), len + kept, 1, 100 + turn);
        let (a, b) = (feed(cache, &mut plain, &next), feed(cache, &mut drafted, &next));
        assert_eq!(a, b, "{of}, slack {slack}, turn {turn}");
        assert_eq!(seen(&plain), seen(&drafted), "{of}, slack {slack}, turn {turn}");
    }
}

#[test]
fn sequences_of_a_step_do_not_mix() {
    for (def, slack) in [(Def::H2o, 0), (Def::H2o, 8), (Def::Lru, 4), (Def::Tova, 1), (Def::DuoLit, 8)] {
        let cache = cache(def, slack, 40, None, |e| e);
        let mut together = [cache.sequence(), cache.sequence(), cache.sequence()];
        let mut apart = [cache.sequence(), cache.sequence(), cache.sequence()];
        for turn in 0..25u64 {
            let new: Vec<Vec<Row>> = (0..3u64)
                .map(|s| {
                    let n = if turn == 0 { 30 * (s as u32 + 1) } else { 1 + (mix(turn * 3 + s) % 4) as u32 };
                    rows(cache.config(), apart[s as usize].next_position().0, n, 10 + s)
                })
                .collect();
            let mut want = [Vec::new(), Vec::new()];
            for (sequence, rows) in apart.iter_mut().zip(&new) {
                let mut layers = 0..2;
                run(&cache, sequence, rows, |step, l, q, size| {
                    let mut out = vec![0.0; size];
                    step.attend(l, q, &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
                    want[layers.next().unwrap()].extend(bits(&out));
                });
            }
            let all = |of: &dyn Fn(&Row) -> Vec<f32>| new.iter().flatten().flat_map(of).collect::<Vec<f32>>();
            let parts = together.iter_mut().zip(&new).map(|(sequence, rows)| (sequence, rows.len() as u32));
            let mut step = cache.begin(parts).unwrap();
            for (l, want) in want.iter().enumerate() {
                step.append(l, &all(&|r| r.k[l].clone()), &all(&|r| r.v[l].clone())).unwrap();
                let experts: Vec<u16> = new.iter().flatten().flat_map(|r| r.experts[l].clone()).collect();
                step.route(l, &experts).unwrap();
                let q = all(&|r| r.q[l].clone());
                let mut out = vec![0.0; step.rows() * 12];
                // Of two calls the last counts.
                let other: Vec<f32> = q.iter().map(|x| -3.0 * x).collect();
                step.attend(l, &other, &Attend::new(2.0), AttendOutput::new(&mut out)).unwrap();
                step.attend(l, &q, &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
                assert_eq!(&bits(&out), want);
            }
            step.commit().unwrap();
            for (a, b) in together.iter().zip(&apart) {
                assert_eq!(seen(a), seen(b), "{def:?}, turn {turn}");
            }
        }
    }
}

#[test]
fn a_dropped_step_leaves_no_trace() {
    for def in ALL {
        let cache = cache(def, 4, 30, None, |e| e);
        let (mut plain, mut other) = (cache.sequence(), cache.sequence());
        for turn in 0..30 {
            let rows = rows(cache.config(), turn * 3, 3, 1);
            {
                let mut step = cache.begin([(&mut other, 5)]).unwrap();
                let size = |per: usize| vec![0.25; 5 * per];
                step.append(0, &size(8), &size(6)).unwrap();
                step.attend(0, &size(16), &Attend::new(1.0), AttendOutput::new(&mut size(12))).unwrap();
            }
            assert_eq!(feed(&cache, &mut plain, &rows), feed(&cache, &mut other, &rows), "{def:?}");
            assert_eq!(seen(&plain), seen(&other), "{def:?}");
        }
    }
}

#[test]
fn forks_go_on_apart_and_give_everything_back() {
    for (def, code) in
        [(Def::H2o, None), (Def::Lru, Some(Code::Int4)), (Def::KeyNorm, None), (Def::Streaming, None)]
    {
        for slack in [0, 4] {
            let cache = cache(def, slack, 50, code, |e| e);
            let mut base = cache.sequence();
            feed(&cache, &mut base, &rows(cache.config(), 0, 90, 1));
            // One continues alone, in a cache of its own.
            let twin = self::cache(def, slack, 50, code, |e| e);
            let mut alone = twin.sequence();
            feed(&twin, &mut alone, &rows(cache.config(), 0, 90, 1));
            let mut fork = base.fork();
            for turn in 0..12u64 {
                let at = base.next_position().0;
                let mine = rows(cache.config(), at, 7, 1);
                let here = feed(&cache, &mut base, &mine);
                let there = feed(&cache, &mut fork, &rows(cache.config(), at, 7, 2));
                assert_ne!(here, there);
                assert_eq!(here, feed(&twin, &mut alone, &mine), "{def:?} slack {slack} turn {turn}");
                assert_eq!(seen(&base), seen(&alone));
            }
            drop(base);
            let end = rows(cache.config(), fork.next_position().0, 40, 3);
            feed(&cache, &mut fork, &end);
            drop(fork);
            assert_eq!(cache.usage().taken, 0);
            assert!(cache.usage().shards.iter().all(|bytes| *bytes == 0));
        }
    }
}

/// A cache of one layer under a budget of bytes keeps to it after every step.
#[test]
fn bytes_stay_within_their_budget() {
    for (experts, slack) in [(1, 0), (4, 0), (8, 0)] {
        for def in [Def::H2o, Def::KeyNorm, Def::Streaming, Def::Lru] {
            for bytes in [80_000u64, 120_000] {
                let config = config(1).experts(experts, 1).rollback(slack);
                let page = config.layers[0].layout.bytes();
                let fixed = 2 * page * (2 + 1 + 2 * u64::from(experts));
                let rule = eviction(def.policy(), Budget::Bytes(bytes));
                let cache = Cache::new(config.evict(rule)).unwrap();
                let mut sequence = cache.sequence();
                let mut most = 0;
                for turn in 0..150 {
                    let len = sequence.next_position().0;
                    let rows: Vec<Row> = (len..len + 1 + turn % 23)
                        .map(|p| row(cache.config(), Kind::Noise, u64::from(p)))
                        .collect();
                    run(&cache, &mut sequence, &rows, |step, l, q, size| {
                        step.attend(l, q, &Attend::new(3.0), AttendOutput::new(&mut vec![0.0; size]))
                            .unwrap();
                    });
                    assert!(sequence.bytes() <= bytes.max(fixed), "{def:?}, {experts}: {}", sequence.bytes());
                    most = most.max(sequence.bytes());
                }
                assert!(most * 5 > bytes * 2, "{def:?}, {experts}: only {most} of {bytes}");
            }
        }
    }
}

/// Without free pages a step is refused and nothing is lost; pages that a policy frees serve the next step.
#[test]
fn a_full_pool() {
    let base = config(1).experts(2, 1);
    let page = base.layers[0].layout.bytes();
    let rule = Eviction::new(pikv::policy::H2o, Budget::Tokens(64));
    let full = |budget: u64| {
        let mut config = base.clone().evict(rule.clone());
        config.budget = budget;
        Cache::new(config).unwrap()
    };
    let take = |cache: &Cache, sequence: &mut Sequence, n: u32| {
        let len = sequence.next_position().0;
        let rows: Vec<Row> = (len..len + n).map(|p| row(cache.config(), Kind::Noise, u64::from(p))).collect();
        run(cache, sequence, &rows, |step, l, q, size| {
            step.attend(l, q, &Attend::new(3.0), AttendOutput::new(&mut vec![0.0; size])).unwrap();
        });
    };
    // Finds the smallest budget that a long run completes with; one page less stops the run without loss.
    let through = |pages: u64| {
        let cache = full(pages * page);
        let mut sequence = cache.sequence();
        for _ in 0..300 {
            let before = (held(&sequence, 0, 0), sequence.next_position(), cache.usage());
            if let Err(error) = cache.begin([(&mut sequence, 1)]).map(drop) {
                assert!(matches!(error, pikv::Error::OutOfBudget { .. }), "{error}");
                assert_eq!((held(&sequence, 0, 0), sequence.next_position(), cache.usage()), before);
                drop(sequence);
                assert_eq!(cache.usage().taken, 0);
                return false;
            }
            take(&cache, &mut sequence, 1);
        }
        // Fork under a full pool: compaction cannot copy, and nothing breaks.
        let mut fork = sequence.fork();
        for _ in 0..40 {
            if cache.begin([(&mut fork, 1)]).is_err() {
                break;
            }
            take(&cache, &mut fork, 1);
        }
        let kept = held(&sequence, 0, 0);
        // Three are evicted at once: a 16th of the budget.
        assert!((62..=64).contains(&kept.len()));
        drop((sequence, fork));
        assert_eq!(cache.usage().taken, 0);
        true
    };
    let least = (2..40).find(|pages| through(*pages)).expect("64 tokens fit 40 pages");
    // 64 tokens of two heads are 4 pages at least; two experts' open pages and their thinned ones, ring and sinks besides.
    assert!((6..=2 * (2 + 2 + 1 + 4 + 4)).contains(&least), "{least}");
}

proptest! {
    #![proptest_config(pikv_test::cases(24, 24))]
    /// A policy's observations have the same bits however rows that can be rolled back are cut into steps.
    #[test]
    fn policies_hear_the_same_in_steps_and_at_once(
        cuts in prop::collection::vec(1u32..5, 4..12),
        def in prop::sample::select(&ALL[..]),
    ) {
        let hear = |log: &Log| {
            let mut log: Vec<String> = log.lock().unwrap().drain(..).map(|event| format!("{event:?}")).collect();
            log.retain(|event| !event.starts_with("Ranked"));
            log.sort();
            log
        };
        let (log, mut config) = (Log::default(), config(2).experts(3, 2).rollback(8));
        config = config.compress_head(1, 1, Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8)));
        let rule = eviction(Box::new(Spy { of: def.policy(), log: log.clone() }), Budget::Tokens(Budget::ALL));
        let cache = Cache::new(config.evict(rule)).unwrap();
        let (mut one, mut many) = (cache.sequence(), cache.sequence());
        let prompt = rows(cache.config(), 0, 100, 5);
        feed(&cache, &mut one, &prompt);
        feed(&cache, &mut many, &prompt);
        hear(&log);
        for n in cuts {
            let rows = rows(cache.config(), one.next_position().0, n, 5);
            let single: Vec<u32> = rows.iter().flat_map(|r| feed(&cache, &mut one, std::slice::from_ref(r))).collect();
            let heard = hear(&log);
            let at_once = feed(&cache, &mut many, &rows);
            prop_assert_eq!(single.len(), at_once.len());
            prop_assert_eq!(&heard, &hear(&log));
        }
    }
}

/// Consecutive rollbacks reach no further than one, because a policy keeps no older versions of its state.
#[test]
fn rollbacks_add_up() {
    let config = config(1).ring(28).rollback(12);
    let cache = Cache::new(config.evict(Eviction::new(LruPlus::default(), Budget::Tokens(60)))).unwrap();
    let rows = |from: u64, n: u64| -> Vec<Row> {
        (from..from + n).map(|id| row(cache.config(), Kind::Noise, id)).collect()
    };
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, &rows(0, 22));
    sequence.rollback(2).unwrap();
    assert_eq!(sequence.rollback(11), Err(Error::RollbackTooFar { asked: 11, limit: 10 }));
    sequence.rollback(10).unwrap();
    assert_eq!(sequence.rollback_limit(), 0);
    feed(&cache, &mut sequence, &rows(50, 2));
    assert_eq!((sequence.next_position().0, sequence.rollback_limit()), (12, 2));
}
