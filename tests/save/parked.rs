//! Sequences parked in a lower tier.

use pikv::codec::{Code, Codec, Coding};
use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::save::{Parked, SaveError};
use pikv::tiers::Tiers;
use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::numbers::noise;

/// Bytes of a page.
const PAGE: u64 = 4 * (32 + 2 * 8 * 32);

fn config(pages: u64) -> CacheConfig {
    let layer = LayerShape::new(1, 1, 8, Dtype::F32);
    CacheConfig::new(vec![layer], pages * PAGE).ring(32).rollback(4)
}

fn cache(pages: u64, host: u64, file: u64) -> Cache {
    let tiers = Tiers::new().host(host * PAGE).file(std::env::temp_dir(), file * PAGE);
    Cache::new(config(pages).tiers(tiers)).unwrap()
}

fn sequence(cache: &Cache, tokens: u32) -> Sequence {
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, tokens)]).unwrap();
    let n = tokens as usize * 8;
    step.append(0, &noise(1, n), &noise(2, n)).unwrap();
    step.commit().unwrap();
    sequence
}

fn bytes(sequence: &Sequence) -> Vec<u8> {
    let mut bytes = Vec::new();
    sequence.save(b"", &mut bytes).unwrap();
    bytes
}

#[test]
fn a_parked_sequence_leaves_the_first_tier_and_can_be_saved() {
    let cache = cache(40, 3, 100);
    let mut sequence = sequence(&cache, 300);
    let (whole, held) = (bytes(&sequence), sequence.bytes());
    let parked = sequence.park(1).unwrap();
    assert_eq!((cache.usage().taken, parked.bytes()), (0, held));
    // Where host memory is full, files take the rest; nothing is left of the sequence itself.
    let used: Vec<u64> = cache.usage().tiers.iter().map(|tier| tier.bytes).collect();
    assert_eq!(used, [3 * PAGE, held - 3 * PAGE]);
    assert_eq!((sequence.next_position().0, parked.next_position().0), (0, 300));
    assert!(parked.table_bytes() > 0);
    let mut saved = Vec::new();
    parked.save(b"", &mut saved).unwrap();
    assert!(saved == whole);
    // Twice: two sequences, each with pages of its own.
    let twins = [parked.wake().unwrap(), parked.wake().unwrap()];
    assert!(twins.iter().all(|twin| bytes(twin) == whole));
    assert_eq!(cache.usage().taken, 2 * held);
    drop((parked, twins));
    let usage = cache.usage();
    assert!(usage.taken == 0 && usage.tiers.iter().all(|tier| tier.bytes == 0));
}

#[test]
fn where_there_is_no_room_all_stays_as_it_was() {
    let tight = cache(40, 3, 4);
    let mut waits = sequence(&tight, 300);
    let whole = bytes(&waits);
    let before = tight.usage();
    let error = waits.park(1).unwrap_err();
    assert!(matches!(error, Error::TierFull { needed: PAGE, available: 0, .. }), "{error}");
    assert_eq!(
        (tight.usage(), waits.park(3).err(), waits.park(0).err()),
        (before, Some(Error::NoTiers), Some(Error::NoTiers))
    );
    assert!(bytes(&waits) == whole);

    let small = cache(20, 100, 0);
    let mut waits = sequence(&small, 300);
    let parked = waits.park(1).unwrap();
    let other = sequence(&small, 300);
    let before = small.usage();
    assert!(matches!(parked.wake(), Err(Error::OutOfBudget { needed, .. }) if needed == parked.bytes()));
    assert_eq!(small.usage(), before);
    drop(other);
    assert!(bytes(&parked.wake().unwrap()) == whole);
}

/// Adds tokens to a sequence.
fn add(cache: &Cache, sequence: &mut Sequence, tokens: u32, seed: u64) {
    let mut step = cache.begin([(sequence, tokens)]).unwrap();
    let n = tokens as usize * 8;
    step.append(0, &noise(seed, n), &noise(seed + 1, n)).unwrap();
    step.commit().unwrap();
}

/// Forks of a prompt of 8,192 tokens, each with tokens of its own.
fn forks(cache: &Cache) -> Vec<Sequence> {
    let prompt = sequence(cache, 8192);
    let fork = |i: u32| {
        let mut fork = prompt.fork();
        add(cache, &mut fork, 70 + i, 10 + u64::from(i));
        fork
    };
    (0..8).map(fork).collect()
}

/// The pages of a prompt lie once in the lower tier, whichever of its forks wake or are dropped there.
#[test]
fn forks_that_are_parked_together_share_their_pages_there() {
    for code in [None, Some(Code::Int8)] {
        let config = config(4000).tiers(Tiers::new().host(4000 * PAGE));
        let codec = code.map(|code| Codec::new(Coding::new(code), Coding::new(code)));
        let cache = Cache::new(codec.into_iter().fold(config, CacheConfig::compress)).unwrap();
        let mut forks = forks(&cache);
        let whole: Vec<Vec<u8>> = forks.iter().map(bytes).collect();
        let (held, of_each) = (cache.usage().taken, forks.iter().map(Sequence::bytes).sum::<u64>());
        let mut parked = cache.park(&mut forks, 1).unwrap();
        let lower = || cache.usage().tiers[0].bytes;
        assert_eq!((cache.usage().taken, lower()), (0, held));
        assert_eq!(parked.iter().map(Parked::bytes).sum::<u64>(), of_each);
        assert!(of_each > 6 * held, "{of_each} bytes of forks that share {held}");
        assert!(forks.iter().all(|fork| fork.next_position().0 == 0));

        let mut first = parked[0].wake().unwrap();
        assert!(bytes(&first) == whole[0]);
        add(&cache, &mut first, 100, 99);
        drop((parked.remove(0), first));
        for (parked, whole) in parked.into_iter().zip(&whole[1..]) {
            let mut saved = Vec::new();
            parked.save(b"", &mut saved).unwrap();
            assert!(saved == *whole && bytes(&parked.wake().unwrap()) == *whole);
        }
        assert_eq!((cache.usage().taken, lower()), (0, 0));
    }
}

/// A page that a sequence reads in part, because it was cut there, is a page of its own in the lower tier.
#[test]
fn what_was_cut_off_stays_with_the_others() {
    let cache = cache(40, 100, 0);
    let whole = sequence(&cache, 300);
    let mut all = [whole.fork_at(230).unwrap(), whole.fork_at(250).unwrap(), whole];
    let saved = all.each_ref().map(bytes);
    let parked = cache.park(&mut all, 1).unwrap();
    for (parked, saved) in parked.iter().zip(&saved) {
        assert!(bytes(&parked.wake().unwrap()) == *saved);
    }
}

#[test]
fn where_not_all_have_room_none_is_parked() {
    let (tight, other) = (cache(4000, 200, 60), cache(40, 3, 100));
    let mut forks = forks(&tight);
    let whole: Vec<Vec<u8>> = forks.iter().map(bytes).collect();
    let before = tight.usage();
    assert!(matches!(tight.park(&mut forks, 1), Err(Error::TierFull { needed: PAGE, .. })));
    let mut foreign = other.sequence();
    let [first, ..] = &mut forks[..] else { unreachable!() };
    assert_eq!(tight.park([first, &mut foreign], 1).err(), Some(Error::ForeignSequence { index: 1 }));
    assert_eq!(tight.park(&mut forks, 3).err(), Some(Error::NoTiers));
    assert_eq!(tight.usage(), before);
    assert!(forks.iter().map(bytes).eq(whole));
    assert!(tight.park([], 1).unwrap().is_empty());
}

/// Prefixes that nobody reads are freed for a sequence that wakes or is restored, as for a step.
#[test]
fn idle_prefixes_make_room_for_what_wakes() {
    let cache = cache(30, 100, 0);
    let index = PrefixIndex::new(&cache, 30 * PAGE);
    let scope = PrefixScope::new(b"");
    let fill = |first: u32| {
        let mut published = sequence(&cache, 300);
        index.publish(&scope, &(first..first + 300).collect::<Vec<_>>(), &mut published).unwrap();
    };
    let mut waits = sequence(&cache, 400);
    let whole = bytes(&waits);
    let parked = waits.park(1).unwrap();
    [0, 500].into_iter().for_each(fill);
    assert!(cache.usage().taken + parked.bytes() > 30 * PAGE);
    let woken = parked.wake().unwrap();
    assert!(bytes(&woken) == whole && index.usage().lower > 0);

    drop(woken);
    [1000, 1500].into_iter().for_each(fill);
    assert!(cache.usage().taken + parked.bytes() > 30 * PAGE);
    let mut saved = Vec::new();
    parked.save(b"", &mut saved).unwrap();
    assert_eq!(cache.restore(&mut &saved[..]).unwrap().sequence.next_position().0, 400);
}

/// A cache over a fabric neither saves nor parks nor restores sequences.
#[test]
fn a_cache_over_a_fabric_refuses() {
    use pikv::fabric::{InProcess, Options};
    let config = CacheConfig::new(vec![LayerShape::new(1, 1, 8, Dtype::F32)], 1 << 20).ring(32);
    let fabric = InProcess::new(&config, 2, 1 << 20).unwrap();
    let cache = Cache::over(config, Box::new(fabric), Options::default()).unwrap();
    let mut sequence = sequence(&cache, 100);
    let refused = Some(Error::Save(SaveError::Fabric));
    assert_eq!(sequence.save(b"", &mut Vec::new()).err(), refused);
    assert_eq!(sequence.park(1).err(), refused);
    assert_eq!(cache.restore(&mut &[0; 8][..]).err(), refused);
}
