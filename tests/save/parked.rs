//! Sequences parked in a lower tier.

use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::save::SaveError;
use pikv::tiers::Tiers;
use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::numbers::noise;

/// Bytes of a page.
const PAGE: u64 = 4 * (32 + 2 * 8 * 32);

fn cache(pages: u64, host: u64, file: u64) -> Cache {
    let layer = LayerShape::new(1, 1, 8, Dtype::F32);
    let tiers = Tiers::new().host(host * PAGE).file(std::env::temp_dir(), file * PAGE);
    Cache::new(CacheConfig::new(vec![layer], pages * PAGE).ring(32).rollback(4).tiers(tiers)).unwrap()
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
