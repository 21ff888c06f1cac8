//! Sequences parked to free memory for others: which, in what order and how many bytes; with several threads stepping at once; and
//! refusals.

use pikv::policy::{Budget, Eviction, H2o};
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::save::Parkable;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::backend::backend;
use pikv_test::numbers::{Rng, bits, noise};
use pikv_test::scaled;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const LAYERS: usize = 2;

/// Bytes of a page of every layer.
fn page() -> u64 {
    LAYERS as u64 * shape().layout.bytes()
}

fn shape() -> LayerShape {
    LayerShape::new(1, 1, 4, Dtype::F32)
}

/// A cache of so many pages, with as many as asked for beneath.
fn cache(pages: u64, host: u64) -> Cache {
    let config = CacheConfig::new(vec![shape(); LAYERS], pages * page()).ring(32).backend(backend());
    let config = if host > 0 { config.tiers(Tiers::new().host(host * page())) } else { config };
    Cache::new(config).unwrap()
}

/// Appends and attends tokens that a seed and their positions give; the bits of the outputs.
fn add(cache: &Cache, sequence: &mut Sequence, seed: u64, n: u32) -> Result<Vec<u32>, Error> {
    let first = u64::from(sequence.next_position().0);
    let rows: Vec<f32> = (first..first + u64::from(n)).flat_map(|p| noise(seed << 32 ^ p << 3, 4)).collect();
    let mut all = Vec::new();
    let mut step = cache.begin([(sequence, n)])?;
    for layer in 0..LAYERS {
        let mut out = vec![0.0; rows.len()];
        step.append(layer, &rows, &rows)?;
        step.attend(layer, &rows, &Attend::new(0.5), AttendOutput::new(&mut out))?;
        all.extend(bits(&out));
    }
    step.commit()?;
    Ok(all)
}

fn chats(cache: &Cache, lengths: &[u32]) -> Vec<Parkable> {
    let chat = |(seed, n): (u64, &u32)| {
        let mut sequence = cache.sequence();
        add(cache, &mut sequence, seed, *n).unwrap();
        Parkable::new(sequence)
    };
    (0..).zip(lengths).map(chat).collect()
}

fn parked(chats: &[Parkable]) -> Vec<bool> {
    chats.iter().map(Parkable::is_parked).collect()
}

#[test]
fn the_least_recently_stepped_goes_first_and_no_more_than_needed() {
    let cache = cache(40, 1000);
    // 4 pages each.
    let mut chats = chats(&cache, &[128; 4]);
    let ids: Vec<u64> = chats.iter().map(Parkable::id).collect();
    let (taken, budget) = (cache.usage().taken, cache.usage().budget);
    assert_eq!(taken, 16 * page());
    // What is free already needs nobody to go.
    let made = cache.make_room(budget - taken).unwrap();
    assert_eq!((made.freed, made.available, made.parked.len()), (0, budget - taken, 0));
    add(&cache, &mut chats[0].awake().unwrap(), 0, 1).unwrap();
    let taken = cache.usage().taken;
    // A byte more than one of them has: two go, of which the first in turn is the second.
    let made = cache.make_room(budget - taken + 4 * page() + 1).unwrap();
    assert_eq!((made.freed, made.parked, made.demoted), (8 * page(), vec![ids[1], ids[2]], vec![]));
    assert_eq!(made.available, budget - taken + 8 * page());
    assert_eq!(parked(&chats), [false, true, true, false]);
    assert_eq!([&chats[0], &chats[1]].map(|chat| chat.next_position().0), [129, 128]);
    assert_eq!([&chats[0], &chats[1]].map(Parkable::bytes_to_wake), [0, 4 * page()]);
    // The lowest priority goes first, however late it was stepped.
    chats[3].set_priority(7);
    let made = cache.make_room(budget - 4 * page()).unwrap();
    assert_eq!((made.parked, chats[3].priority()), (vec![ids[0]], 7));
    // All there is, and what is left if that is not enough.
    let made = cache.make_room(budget + 1).unwrap();
    assert_eq!((made.parked, made.available), (vec![ids[3]], budget));
    // They go on as if nothing had been.
    for (seed, chat) in (0..).zip(&mut chats) {
        let mut alone = Parkable::new(cache.sequence());
        add(&cache, &mut alone.awake().unwrap(), seed, 128).unwrap();
        if seed == 0 {
            add(&cache, &mut alone.awake().unwrap(), 0, 1).unwrap();
        }
        let got = add(&cache, &mut chat.awake().unwrap(), seed, 5).unwrap();
        assert_eq!(got, add(&cache, &mut alone.awake().unwrap(), seed, 5).unwrap());
    }
}

/// Five forks of one prompt, each with 40 tokens of its own; the prompt itself is dropped.
fn forked_chats(cache: &Cache) -> Vec<Parkable> {
    let mut prompt = cache.sequence();
    add(cache, &mut prompt, 7, 256).unwrap();
    let fork = |seed| {
        let mut fork = prompt.fork();
        add(cache, &mut fork, seed, 40).unwrap();
        Parkable::new(fork)
    };
    (0..5).map(fork).collect()
}

/// Compares the outputs of each fork's next 5 tokens with those in a cache where no sequence was parked.
fn compare_forks(cache: &Cache, chats: &mut [Parkable]) {
    let other = self::cache(200, 0);
    let mut alone = forked_chats(&other);
    for (seed, (chat, alone)) in (0..).zip(chats.iter_mut().zip(&mut alone)) {
        let got = add(cache, &mut chat.awake().unwrap(), seed, 5).unwrap();
        assert_eq!(got, add(&other, &mut alone.awake().unwrap(), seed, 5).unwrap());
    }
}

#[test]
fn sequences_that_have_to_go_at_once_share_their_pages_in_the_tier() {
    let cache = cache(200, 1000);
    let mut chats = forked_chats(&cache);
    let usage = cache.usage();
    let ids: Vec<u64> = chats.iter().map(Parkable::id).collect();
    let made = cache.make_room(usage.budget).unwrap();
    assert_eq!((made.freed, made.parked), (usage.taken, ids));
    // One by one, each would have the prompt's pages for itself.
    let each: u64 = chats.iter().map(Parkable::bytes).sum();
    assert_eq!(cache.usage().tiers[0].bytes, usage.taken);
    assert!(each > 2 * usage.taken, "{each} {}", usage.taken);
    compare_forks(&cache, &mut chats);
}

/// Whatever is missing, the fewest in turn are parked that have it: their own pages, and at the end the prompt's.
#[test]
fn no_more_are_parked_together_than_needed() {
    let whole = {
        let cache = cache(200, 1000);
        let _chats = forked_chats(&cache);
        cache.usage().taken
    };
    for missing in (1..=whole).step_by(page() as usize / 2) {
        let cache = cache(200, 1000);
        let chats = forked_chats(&cache);
        let usage = cache.usage();
        let made = cache.make_room(usage.budget - usage.taken + missing).unwrap();
        assert!(made.freed >= missing && made.available >= missing);
        assert_eq!(
            (made.parked.len(), made.demoted.len()),
            (parked(&chats).iter().filter(|on| **on).count(), 0)
        );
        // Without the last of them there would be too little: those that stay keep the prompt's pages in the first tier.
        let own = (usage.taken - made.freed) / (chats.len() - made.parked.len()).max(1) as u64;
        if made.parked.len() < chats.len() {
            let each = made.freed / made.parked.len() as u64;
            assert!(own > each, "a fork that stays has its own pages and a share of the prompt's");
            assert!(made.freed - each < missing, "{} {missing}", made.freed);
        }
    }
}

#[test]
fn where_not_all_have_room_as_many_are_parked_as_have() {
    let most = {
        let cache = cache(200, 1000);
        let _chats = forked_chats(&cache);
        cache.usage().taken / page()
    };
    for room in 1..=most {
        let cache = cache(200, room);
        let mut chats = forked_chats(&cache);
        let usage = cache.usage();
        let made = cache.make_room(usage.budget).unwrap();
        let lower = cache.usage().tiers[0].bytes;
        assert!(lower <= room * page() && made.freed == usage.taken - cache.usage().taken, "{room}");
        assert_eq!(made.parked.len(), parked(&chats).iter().filter(|on| **on).count());
        assert_eq!(made.parked.len() == chats.len(), room == most, "{room}");
        assert!(made.freed > 0, "{room}: full pages fit one by one");
        compare_forks(&cache, &mut chats);
    }
}

/// A checkpoint shares its sequence's layers and lists of pages: both are the sequence's own.
#[test]
fn checkpoints_of_its_own_keep_no_sequence_here() {
    let cache = cache(40, 1000);
    let mut chats = chats(&cache, &[128; 2]);
    let budget = cache.usage().budget;
    chats[0].awake().unwrap().checkpoint().unwrap();
    add(&cache, &mut chats[1].awake().unwrap(), 1, 40).unwrap();
    chats[1].awake().unwrap().checkpoint().unwrap();
    add(&cache, &mut chats[1].awake().unwrap(), 1, 40).unwrap();
    let taken = cache.usage().taken;
    let made = cache.make_room(budget).unwrap();
    assert_eq!(made.parked, [chats[0].id(), chats[1].id()]);
    assert_eq!(made.freed, taken - cache.usage().taken);
}

#[test]
fn who_is_awake_stays_and_so_does_what_others_read_too() {
    let cache = cache(40, 1000);
    let mut chats = chats(&cache, &[128; 3]);
    let (budget, ids) = (cache.usage().budget, [chats[0].id(), chats[2].id()]);
    // All of its pages are a fork's too: parking it would free nothing.
    let fork = chats[1].awake().unwrap().fork();
    let awake = chats[0].awake().unwrap();
    let made = cache.make_room(budget).unwrap();
    assert_eq!((made.parked, made.available), (vec![ids[1]], budget - 8 * page()));
    assert_eq!(awake.next_position().0, 128);
    drop((awake, fork));
    let made = cache.make_room(budget).unwrap();
    assert_eq!((made.parked.len(), made.available), (2, budget));
    assert!(chats[0].if_awake().is_none());
    assert_eq!(chats[0].awake().unwrap().next_position().0, 128);
    assert!(chats[0].if_awake().is_some());
    chats[0].park(1).unwrap();
    assert_eq!(cache.usage().taken, 0);
    // A handle that is given up is a sequence, or what is parked of it.
    assert_eq!(chats.remove(0).into_inner().unwrap_err().next_position().0, 128);
    let mut last = chats.remove(0);
    drop(last.awake().unwrap());
    let sequence = last.into_inner().unwrap();
    assert_eq!(cache.make_room(budget).unwrap().parked, vec![0u64; 0]);
    assert_eq!((sequence.next_position().0, cache.usage().taken), (128, 4 * page()));
}

#[test]
fn a_step_has_room_made_for_it_before_its_own_pages_go() {
    let cache = cache(13, 1000);
    let mut chats = chats(&cache, &[128, 128, 128]);
    // The first has to go for it, and only that.
    add(&cache, &mut chats[2].awake().unwrap(), 2, 60).unwrap();
    assert_eq!(parked(&chats), [true, false, false]);
    assert_eq!(chats[2].awake().unwrap().bytes_in_tier(1), 0);
    // So it is for one that wakes.
    chats[0].awake().unwrap();
    assert_eq!(parked(&chats), [false, true, false]);
    // What can never fit has nobody parked.
    let mut huge = cache.sequence();
    assert!(matches!(add(&cache, &mut huge, 9, 1000), Err(Error::OutOfBudget { .. })));
    assert_eq!(parked(&chats), [false, true, false]);
}

/// Nobody is parked for a sequence of a lower priority: neither when it wakes nor for its step, alone or with a sequence of a higher
/// one. Sequences of the same or a lower priority are parked.
#[test]
fn nobody_is_parked_for_one_of_a_lower_priority() {
    let cache = cache(21, 1000);
    let mut chats = chats(&cache, &[128; 3]);
    (0..3).zip([0, 5, 3]).for_each(|(at, priority): (usize, _)| chats[at].set_priority(priority));
    chats[0].park(1).unwrap();
    // Less is left than the 4 pages of one that wakes.
    let mut filler = cache.sequence();
    let available = || cache.usage().budget - cache.usage().taken;
    while available() > 3 * page() {
        add(&cache, &mut filler, 9, 1).unwrap();
    }
    let refused = chats[0].awake().err();
    let expected = Error::OutOfBudget { needed: 4 * page(), available: available() };
    assert_eq!((refused, parked(&chats)), (Some(expected), vec![true, false, false]));
    // 4 is more than 3, and no more than 4.
    chats[0].set_priority(4);
    assert_eq!(chats[0].awake().unwrap().next_position().0, 128);
    assert_eq!(parked(&chats), [false, false, true]);
    chats[2].set_priority(4);
    chats[2].awake().unwrap();
    assert_eq!(parked(&chats), [true, false, false]);
    // Steps of more than what their own pages could make room for, one beside a sequence of the highest priority.
    let mut best = Parkable::new(cache.sequence());
    best.set_priority(i32::MAX);
    for beside in [false, true] {
        let (mut chat, mut best) = (chats[2].awake().unwrap(), best.awake().unwrap());
        chat.clear();
        let parts = [(&mut *chat, 200), (&mut *best, 1)];
        let refused = cache.begin(parts.into_iter().take(1 + usize::from(beside)));
        assert!(matches!(refused.err(), Some(Error::OutOfBudget { .. })));
    }
    assert_eq!(parked(&chats), [true, false, false]);
    assert!(cache.begin([(&mut *best.awake().unwrap(), 100)]).is_ok());
    assert_eq!(parked(&chats), [true, true, false]);
    // For a sequence without a handle everybody may go.
    chats[1].awake().unwrap();
    add(&cache, &mut filler, 9, 100).unwrap();
    assert_eq!(parked(&chats), [true, true, false]);
}

#[test]
fn prefixes_that_nobody_reads_go_before_sequences() {
    let cache = cache(40, 1000);
    let index = PrefixIndex::new(&cache, 1 << 30);
    let scope = PrefixScope::new(b"all");
    let tokens: Vec<u32> = (0..128).collect();
    let mut sequence = cache.sequence();
    add(&cache, &mut sequence, 1, 128).unwrap();
    index.publish(&scope, &tokens, &mut sequence).unwrap();
    drop(sequence);
    let chats = chats(&cache, &[128]);
    let budget = cache.usage().budget;
    let made = cache.make_room(budget - 4 * page()).unwrap();
    assert_eq!((made.freed >= 4 * page(), made.parked.len()), (true, 0));
    assert_eq!(cache.make_room(budget).unwrap().parked, [chats[0].id()]);
}

#[test]
fn without_tiers_nobody_is_parked_and_where_they_are_full_pages_go_down() {
    let none = cache(20, 0);
    let mut handles = chats(&none, &[128, 128, 128]);
    assert_eq!(none.make_room(1), Err(Error::NoTiers));
    assert_eq!(handles[0].park(1), Err(Error::NoTiers));
    let refused = add(&none, &mut handles[2].awake().unwrap(), 2, 400);
    assert!(matches!(refused, Err(Error::OutOfBudget { .. })));
    assert_eq!(parked(&handles), [false; 3]);
    // Room for two pages, and the sequence has four, of which one that is full has left the ring and more.
    let tight = cache(40, 3);
    let mut handles = chats(&tight, &[200]);
    let before = tight.usage().taken;
    let made = tight.make_room(tight.usage().budget).unwrap();
    assert_eq!((made.parked.len(), made.demoted), (0, vec![handles[0].id()]));
    assert_eq!((made.freed, tight.usage().taken), (3 * page(), before - 3 * page()));
    let other = cache(40, 0);
    let mut alone = other.sequence();
    add(&other, &mut alone, 0, 200).unwrap();
    let got = add(&tight, &mut handles[0].awake().unwrap(), 0, 3).unwrap();
    assert_eq!(got, add(&other, &mut alone, 0, 3).unwrap());
}

#[test]
fn a_panic_with_a_guard_leaves_the_handle_and_the_cache_usable() {
    let cache = cache(40, 1000);
    let mut chats = chats(&cache, &[128, 128]);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut chat = chats[0].awake().unwrap();
        let mut step = cache.begin([(&mut *chat, 1)]).unwrap();
        step.append(0, &[1.0; 4], &[1.0; 4]).unwrap();
        panic!("the engine's own");
    }));
    assert!(panicked.is_err());
    // One of another cache under a handle is not this one's to park.
    let other = self::cache(40, 1000);
    *chats[1].awake().unwrap() = other.sequence();
    let made = cache.make_room(cache.usage().budget).unwrap();
    assert_eq!((made.parked, cache.usage().taken), (vec![chats[0].id()], 0));
    assert_eq!(chats[0].awake().unwrap().next_position().0, 128);
}

/// Threads step sequences of their own in a cache that holds a third of them. Others are parked for each step, and every output is
/// that of a cache that holds all.
#[test]
fn threads_that_step_at_once_make_room_for_each_other() {
    let (threads, each, rounds) = (3, 3, scaled(60, 300));
    let slept = AtomicUsize::new(0);
    for policy in [false, true] {
        let config = |pages: u64| {
            let config = CacheConfig::new(vec![shape(); LAYERS], pages * page()).ring(32).backend(backend());
            let evict = Eviction::new(H2o, Budget::Tokens(150)).batch(4);
            if policy { config.evict(evict) } else { config }
        };
        let tight = Cache::new(config(40).tiers(Tiers::new().host(10_000 * page()))).unwrap();
        let wide = Cache::new(config(10_000)).unwrap();
        let refused = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (tight, wide, refused, slept) = (&tight, &wide, &refused, &slept);
                scope.spawn(move || {
                    let mut rng = Rng(thread);
                    let mut own: Vec<(Parkable, Sequence)> =
                        (0..each).map(|_| (Parkable::new(tight.sequence()), wide.sequence())).collect();
                    for round in 0..rounds {
                        let at = rng.below(each);
                        let (chat, twin) = &mut own[at as usize];
                        slept.fetch_add(usize::from(chat.is_parked()), SeqCst);
                        let seed = 100 * thread + u64::from(at);
                        let n = 1 + rng.below(if round < 6 { 60 } else { 3 });
                        // Others may hold all there is at the moment: then it is asked again.
                        let got = loop {
                            let made = chat.awake().and_then(|mut chat| add(tight, &mut chat, seed, n));
                            match made {
                                Err(Error::OutOfBudget { .. }) => refused.fetch_add(1, SeqCst),
                                made => break made.unwrap(),
                            };
                            std::thread::yield_now();
                        };
                        assert_eq!(got, add(wide, twin, seed, n).unwrap());
                        if rng.one_in(5) {
                            tight.make_room(u64::from(rng.below(40)) * page()).unwrap();
                        }
                        if rng.one_in(20) {
                            own[at as usize] = (Parkable::new(tight.sequence()), wide.sequence());
                        }
                    }
                });
            }
        });
        assert_eq!((tight.usage().taken, tight.usage().tiers[0].bytes), (0, 0));
    }
    assert!(slept.load(SeqCst) > 0, "nobody was parked");
}

#[test]
fn handles_that_are_gone_leave_nothing_behind() {
    let cache = cache(40, 1000);
    for id in 0..10_000 {
        assert_eq!(Parkable::new(cache.sequence()).id(), id);
    }
    assert_eq!(cache.make_room(cache.usage().budget).unwrap().parked, vec![0u64; 0]);
}
