//! The first tokens of a saved sequence alone.

use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::report::Place;
use pikv::save::SaveError;
use pikv::shard::ShardMap;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::backend::backend;
use pikv_test::numbers::{Rng, bits, noise};

const LAYERS: usize = 2;

fn config(experts: u32, sinks: u32) -> CacheConfig {
    let layer = LayerShape::new(2, 2, 4, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer; LAYERS], 8 << 20).ring(40).rollback(3).sinks(sinks);
    config.experts(experts, experts.min(2)).shards(ShardMap::spread(2).unwrap()).backend(backend())
}

/// Adds tokens that their positions give, in chunks; the bits of what was attended.
fn feed(cache: &Cache, sequence: &mut Sequence, until: u32) -> Vec<u32> {
    let (mut all, experts) = (Vec::new(), cache.config().experts);
    while sequence.next_position().0 < until {
        let from = sequence.next_position().0;
        let rows = from..until.min(from + 40);
        let mut step = cache.begin([(&mut *sequence, rows.len() as u32)]).unwrap();
        for layer in 0..LAYERS {
            let of = |kind: u64| -> Vec<f32> {
                rows.clone().flat_map(|p| noise(u64::from(p) << 8 | (layer as u64) << 4 | kind, 8)).collect()
            };
            step.append(layer, &of(0), &of(1)).unwrap();
            if experts > 1 {
                let chosen = rows.clone().flat_map(|p| {
                    let first = (u64::from(p) * 7 % 11) as u32 % experts;
                    [first as u16, ((first + 1) % experts) as u16]
                });
                step.route(layer, &chosen.collect::<Vec<u16>>()).unwrap();
            }
            let mut out = vec![0.0; rows.len() * 8];
            step.attend(layer, &of(2), &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
            all.extend(bits(&out));
        }
        step.commit().unwrap();
    }
    all
}

fn saved(sequence: &Sequence) -> Vec<u8> {
    let mut bytes = Vec::new();
    sequence.save(b"a note", &mut bytes).unwrap();
    bytes
}

/// The first tokens of a file, any number, have the bits of a sequence that was given only them, and take no more pages.
#[test]
fn first_tokens_are_those_of_a_fresh_sequence() {
    let mut rng = Rng(9);
    for (experts, sinks, tiers) in [(1, 0, false), (1, 0, true), (5, 3, false), (5, 0, true)] {
        let tiered = |config: CacheConfig| match tiers {
            true => config.tiers(Tiers::new().host(8 << 20)),
            false => config,
        };
        let cache = Cache::new(tiered(config(experts, sinks))).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 700);
        if tiers {
            sequence.demote(20_000).unwrap();
        }
        let (file, whole) = (saved(&sequence), sequence.bytes() + sequence.bytes_in_tier(1));
        let lengths = [0, 1, 31, 32, 40, 43, 100, 640, 657, 660, 661, 699, 700, 5000];
        let random: Vec<u32> = (0..pikv_test::scaled(6, 200)).map(|_| rng.below(700)).collect();
        for len in lengths.into_iter().chain(random) {
            // No room for the whole where only some of it is wanted.
            let roomy = len > 300;
            let mut small = config(experts, sinks);
            small.budget = if roomy { 8 << 20 } else { whole * 9 / 10 };
            let other = Cache::new(tiered(small)).unwrap();
            let restored = other.restore_prefix(len, &mut &file[..]).unwrap();
            assert_eq!((&restored.note[..], restored.bytes), (&b"a note"[..], file.len() as u64));
            let mut restored = restored.sequence;
            let len = len.min(700);
            assert_eq!(restored.next_position().0, len, "experts {experts}");
            let mut fresh = cache.sequence();
            feed(&cache, &mut fresh, len);
            if !tiers {
                // What the ring holds may lie in pages of runs too, which forks share.
                let page = cache.config().layers[0].layout.bytes();
                let ahead = 2 * LAYERS as u64 * u64::from(experts + 2) * page;
                assert!(other.usage().taken <= fresh.bytes() + ahead, "{len}");
            }
            for layer in 0..LAYERS {
                let of = |sequence: &Sequence| sequence.resident(layer, 1).unwrap();
                assert_eq!(of(&restored), of(&fresh));
                let filed = |sequence: &Sequence| -> Vec<_> {
                    let pages = sequence.pages(layer, 1).unwrap();
                    let pages = pages.filter(|page| page.id.place != Place::Ring);
                    pages.map(|page| (page.id, page.tokens, page.first, page.last)).collect()
                };
                assert_eq!(filed(&restored), filed(&fresh), "{len} of experts {experts}");
            }
            let until = len + 50;
            assert_eq!(feed(&other, &mut restored, until), feed(&cache, &mut fresh, until), "{len}");
            drop(restored);
            // As a fork of the whole, to the byte.
            let fork = sequence.fork_at(len).unwrap();
            let again = other.restore_prefix(len, &mut &file[..]).unwrap().sequence;
            if !tiers {
                assert!(saved(&fork) == saved(&again), "{len}");
            }
            drop(again);
            assert_eq!(
                (other.usage().taken, other.usage().tiers.iter().map(|t| t.bytes).sum::<u64>()),
                (0, 0)
            );
        }
    }
}

#[test]
fn where_it_is_not_exact_it_is_refused() {
    let codec = || Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
    let policy = Eviction::new(H2o, Budget::Tokens(100));
    let window = |mut config: CacheConfig| {
        config.layers[1].window = Some(64);
        config
    };
    for (config, what) in [
        (config(1, 0).compress(codec()), "codec"),
        (config(1, 0).evict(policy), "policy"),
        (window(config(1, 0)), "window"),
        (config(2, 0), "evicted"),
    ] {
        let cache = Cache::new(config).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 300);
        if what == "evicted" {
            let oldest = sequence.pages(0, 0).unwrap().next().unwrap();
            sequence.evict(0, 0, oldest.id).unwrap();
        }
        let file = saved(&sequence);
        let taken = cache.usage();
        let error = cache.restore_prefix(200, &mut &file[..]).unwrap_err();
        assert!(
            matches!(&error, Error::Save(SaveError::Part { why }) if why.contains(what)),
            "{what}: {error}"
        );
        assert_eq!(cache.usage(), taken);
        // The whole of it is no part.
        for len in [300, 301] {
            let restored = cache.restore_prefix(len, &mut &file[..]).unwrap().sequence;
            assert!(saved(&restored) == file, "{what}");
        }
    }
}

#[test]
fn damage_behind_what_is_wanted_is_seen() {
    let cache = Cache::new(config(3, 0)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, 400);
    let file = saved(&sequence);
    drop(sequence);
    for at in (0..file.len()).step_by(211) {
        let mut bytes = file.clone();
        bytes[at] ^= 4;
        let error = cache.restore_prefix(70, &mut &bytes[..]).unwrap_err();
        assert!(matches!(error, Error::Save(_) | Error::OutOfBudget { .. }), "{at}: {error}");
        let early = cache.restore_prefix(70, &mut &file[..at]).unwrap_err();
        assert!(matches!(early, Error::Save(SaveError::Io { .. })), "{at}: {early}");
        assert_eq!(cache.usage().taken, 0);
    }
}

/// Writes the checksum `actual`, in hexadecimal, to a file.
fn sign(bytes: &mut [u8], actual: &str) {
    let end = bytes.len() - 32;
    for (to, i) in bytes[end..].iter_mut().zip(0..) {
        *to = u8::from_str_radix(&actual[2 * i..2 * i + 2], 16).unwrap();
    }
}

/// A page with room for tokens is the newest of its run. With another count of pages, later tokens would be filed under an ordinal that no
/// page has.
#[test]
fn the_page_with_room_is_the_newest() {
    let cache = Cache::new(config(1, 0)).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, 300);
    let file = saved(&sequence);
    drop(sequence);
    let numbers = safetensors::SafeTensors::read_metadata(&file).unwrap().0 + 8;
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    // A run begins with: next ordinal, first page not packed twice, evicted lanes, tokens filed, pages.
    let is_run = |at: &usize| {
        let [next, _, dead, filed, pages] = [0, 4, 8, 12, 16].map(|from| word(at + from));
        next == pages && dead == 0 && (200..300).contains(&filed) && next == filed.div_ceil(32)
    };
    let runs: Vec<usize> = (numbers..file.len() - 52).step_by(4).filter(is_run).collect();
    assert_eq!(runs.len(), 2 * LAYERS, "one for each KV head of each layer");
    for at in runs {
        assert!(!word(at + 12).is_multiple_of(32), "the last page has room");
        let mut bytes = file.clone();
        bytes[at..at + 4].copy_from_slice(&(word(at) + 1).to_le_bytes());
        let mut error = cache.restore(&mut &bytes[..]).unwrap_err();
        if let Error::Save(SaveError::Sum { actual, .. }) = &error {
            sign(&mut bytes, actual);
            error = cache.restore(&mut &bytes[..]).unwrap_err();
        }
        assert!(error.to_string().contains("room that is not the newest"), "{error}");
    }
}

/// Files with invalid numbers and a matching checksum are refused, or the first tokens continue.
#[test]
fn hostile_files_are_refused_or_go_on() {
    let mut rng = Rng(4);
    let (mut refused, mut taken) = (0, 0);
    for experts in [1, 3] {
        let cache = Cache::new(config(experts, 0)).unwrap();
        let mut sequence = cache.sequence();
        feed(&cache, &mut sequence, 300);
        let file = saved(&sequence);
        drop(sequence);
        let numbers = safetensors::SafeTensors::read_metadata(&file).unwrap().0 as u32 + 8;
        for case in 0..pikv_test::scaled(400, 20_000) {
            let mut bytes = file.clone();
            for _ in 0..1 + rng.below(3) {
                let at = (numbers + 4 * rng.below((file.len() as u32 - 32 - numbers) / 4)) as usize;
                let word = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
                let word = [word ^ 1 << rng.below(32), word.wrapping_add(1), rng.below(400), u32::MAX]
                    [rng.below(4) as usize];
                bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
            let len = rng.below(300);
            let restored = match cache.restore_prefix(len, &mut &bytes[..]) {
                Err(Error::Save(SaveError::Sum { actual, .. })) => {
                    sign(&mut bytes, &actual);
                    cache.restore_prefix(len, &mut &bytes[..])
                }
                restored => restored,
            };
            match restored {
                Ok(restored) => {
                    taken += 1;
                    let mut sequence = restored.sequence;
                    let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
                    let attended = (0..LAYERS).try_for_each(|layer| {
                        step.append(layer, &[0.5; 8], &[0.5; 8])?;
                        step.attend(layer, &[0.5; 8], &Attend::new(0.5), AttendOutput::new(&mut [0.0; 8]))
                    });
                    // Keys can be anything, infinite too.
                    drop((attended, step));
                    let _ = sequence.rollback(sequence.rollback_limit().min(2));
                    let _ = sequence.fork_at(len / 2);
                }
                Err(error) => {
                    assert!(matches!(error, Error::Save(_)), "{case}: {error}");
                    refused += 1;
                }
            }
            assert_eq!(cache.usage().taken, 0, "{case}");
        }
    }
    assert!(refused > 50 && taken > 50, "{refused} {taken}");
}
