//! Bytes that do not make a sequence: the error names the fault, and the cache is unchanged.

use pikv::codec::{Code, Codec, Coding, Map};
use pikv::policy::{Budget, Eviction, H2o, SnapKv};
use pikv::rules::Hits;
use pikv::save::{SaveError, SaveOperation};
use pikv::shape::Frequencies;
use pikv::shard::ShardMap;
use pikv::{
    Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Rope, Sequence, SequenceOptions,
};
use pikv_test::numbers::{bits, noise};
use pikv_test::saved_file;
use safetensors::SafeTensors;
use std::io::{self, ErrorKind, Write};

/// Two layers, one that packs and one that evicts, so that a file has everything in it.
fn config() -> CacheConfig {
    let layer = LayerShape::new(1, 2, 4, Dtype::Bf16);
    let rope = Rope::new(1000.0, 4);
    CacheConfig::new(vec![layer.rope(rope), layer], 1 << 20)
        .ring(8)
        .rollback(3)
        .sinks(1)
        .experts(2, 1)
        .key_bounds(true)
        .hits(Hits::new().pages(2).every(1))
        .compress_layer(0, Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4)))
        .evict_layer(1, Eviction::new(H2o, Budget::Tokens(70)).batch(1))
        .nan_fill(true)
}

/// Adds `n` tokens, one step each; the bits of what was attended.
fn feed(cache: &Cache, sequence: &mut Sequence, n: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for _ in 0..n {
        let at = u64::from(sequence.next_position().0);
        let mut step = cache.begin([(&mut *sequence, 1)]).unwrap();
        for layer in 0..2 {
            let seed = 8 * at + layer as u64;
            step.append(layer, &noise(seed, 4), &noise(seed + 2, 4)).unwrap();
            let mut out = [0.0; 8];
            step.attend(layer, &noise(seed + 4, 8), &Attend::new(0.5), AttendOutput::new(&mut out)).unwrap();
            let experts = u64::from(cache.config().experts);
            let expert = if experts == 2 { at % 3 % 2 } else { at * 5 % experts };
            step.route(layer, &[expert as u16]).unwrap();
            all.extend(bits(&out));
        }
        step.commit().unwrap();
    }
    all
}

fn saved(config: CacheConfig, tokens: u32) -> Vec<u8> {
    saved_with(config, tokens, SequenceOptions::new())
}

fn saved_with(config: CacheConfig, tokens: u32, options: SequenceOptions) -> Vec<u8> {
    let cache = Cache::new(config).unwrap();
    let mut sequence = cache.sequence_with(options).unwrap();
    feed(&cache, &mut sequence, tokens);
    sequence.pin(3..6);
    let mut bytes = Vec::new();
    sequence.save(b"a note", &mut bytes).unwrap();
    bytes
}

/// The error, once the cache was looked at.
fn refused(cache: &Cache, mut bytes: &[u8]) -> Error {
    let error = cache.restore(&mut bytes).expect_err("bytes that are no saved sequence");
    let usage = cache.usage();
    assert_eq!((usage.taken, usage.ghosts), (0, 0), "{error}");
    error
}

fn damage(cache: &Cache, bytes: &[u8]) -> SaveError {
    match refused(cache, bytes) {
        Error::Save(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_saved_sequence_is_a_safetensors_file() {
    let bytes = saved(config(), 150);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!((&metadata["format"][..], &metadata["version"][..]), ("pikv sequence", "1"));
    assert_eq!(file.tensor("note").unwrap().data(), b"a note");
    // Pages as they are held, packed ones packed.
    let held: u64 = file
        .iter()
        .filter(|(name, _)| name.ends_with(".pages"))
        .map(|(_, pages)| pages.data().len() as u64)
        .sum();
    let restored = Cache::new(config()).unwrap().restore(&mut &bytes[..]).unwrap();
    assert_eq!(held, restored.sequence.bytes());
    assert_eq!(file.tensor("sum").unwrap().data().len(), 32);
}

#[test]
fn an_end_that_comes_early() {
    let (bytes, cache) = (saved(config(), 60), Cache::new(config()).unwrap());
    for end in 0..bytes.len() {
        let error = damage(&cache, &bytes[..end]);
        let early = matches!(error, SaveError::Io { operation: SaveOperation::Read, kind: ErrorKind::UnexpectedEof, at } if at <= end as u64);
        assert!(early, "{end}: {error}");
    }
    // What comes after it is not read.
    let longer = [&bytes[..], b"more"].concat();
    let mut rest = &longer[..];
    assert_eq!(cache.restore(&mut rest).unwrap().bytes, bytes.len() as u64);
    assert_eq!(rest, b"more");
}

#[test]
fn any_bit_that_changed() {
    let (mut bytes, cache) = (saved(config(), 60), Cache::new(config()).unwrap());
    let step = pikv_test::scaled(13, 1);
    for bit in (0..bytes.len() * 8).step_by(step) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = refused(&cache, &bytes);
        assert!(matches!(error, Error::Save(_) | Error::OutOfBudget { .. }), "bit {bit}: {error}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(cache.restore(&mut &bytes[..]).is_ok());
}

/// An error names the part of the configuration that differs. Places of pages, and the lanes and devices that compute, may differ.
#[test]
fn another_configuration() {
    let bytes = saved(config(), 60);
    let with = |change: &dyn Fn(&mut CacheConfig)| {
        let mut config = config();
        change(&mut config);
        config
    };
    let int8 = || Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int8));
    let map = |k: f32| {
        let map = Map::new(4, 1, vec![1.0, 0.5, 0.0, k], vec![1.0, 0.5, 0.0, k], None).unwrap();
        Codec::new(Coding::new(Code::F16).map(map), Coding::new(Code::F16))
    };
    let frequencies = |theta| Frequencies::plain(theta, 4).unwrap();
    let others: [(&str, CacheConfig); 17] = [
        ("layers", with(&|c| (c.layers.truncate(1), c.evictions.clear()).1)),
        ("layers", with(&|c| c.layers[1].query_heads = 3)),
        ("layers", with(&|c| c.layers[1].layout.v = Dtype::F16)),
        ("layers", with(&|c| c.layers[1].window = Some(100))),
        ("layers", with(&|c| c.layers[0].rope = Some(Rope::new(1001.0, 4)))),
        ("layers", config().frequencies(0..1, frequencies(900.0))),
        ("ring", config().ring(9)),
        ("ring", config().rollback(4)),
        ("sinks", config().sinks(2)),
        ("experts", config().experts(3, 1)),
        ("experts", config().experts(2, 2)),
        ("codecs", config().compress_layer(0, int8())),
        ("codecs", config().compress_layer(0, map(0.25))),
        ("policies", config().evict_layer(1, Eviction::new(H2o, Budget::Tokens(71)).batch(1))),
        ("policies", config().evict_layer(1, Eviction::new(SnapKv::default(), Budget::Tokens(70)).batch(1))),
        ("bounds", config().key_bounds(false)),
        ("hits", config().hits(Hits::new().pages(3).every(1))),
    ];
    for (i, (part, config)) in others.into_iter().enumerate() {
        let error = damage(&Cache::new(config).unwrap(), &bytes);
        assert!(
            matches!(error, SaveError::Configuration { part: is } if is.contains(part)),
            "{i}, {part}: {error}"
        );
    }
    // Of policies and maps what they were made with counts.
    let policies = [SnapKv::default(), SnapKv::default().window(31), SnapKv::default().pool(7)];
    let evicting = |policy| config().evict_layer(1, Eviction::new(policy, Budget::Tokens(70)));
    let mapped = |k| config().compress_layer(0, map(k));
    for (a, b) in [
        (evicting(policies[0]), evicting(policies[1])),
        (evicting(policies[0]), evicting(policies[2])),
        (mapped(0.25), mapped(0.5)),
    ] {
        assert!(matches!(damage(&Cache::new(b).unwrap(), &saved(a, 9)), SaveError::Configuration { .. }));
    }
    let mut elsewhere = config().shards(ShardMap::spread(3).unwrap()).nan_fill(false).wipe(true);
    elsewhere.budget = 1 << 18;
    assert!(Cache::new(elsewhere).unwrap().restore(&mut &bytes[..]).is_ok());
}

/// The header with some of its text replaced, and its length set anew.
fn with_header(bytes: &[u8], change: impl Fn(&str) -> String) -> Vec<u8> {
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = change(std::str::from_utf8(&bytes[8..8 + n]).unwrap());
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + n..]].concat()
}

#[test]
fn other_versions_and_lengths_that_overflow() {
    let (bytes, cache) = (saved(config(), 60), Cache::new(config()).unwrap());
    let with = |from: &str, to: &str| with_header(&bytes, |header| header.replacen(from, to, 1));
    let error = |from: &str, to: &str| damage(&cache, &with(from, to));
    let later = |version| SaveError::Version { found: version, newest: 5 };
    assert_eq!(error("\"version\":\"1\"", "\"version\":\"6\""), later(6));
    // What the second adds is not there.
    let short = error("\"version\":\"1\"", "\"version\":\"2\"");
    assert!(matches!(short, SaveError::Content { tensor, .. } if tensor == "sequence"));
    assert_eq!(error("\"version\":\"1\"", &format!("\"version\":\"{}\"", u64::MAX)), later(u64::MAX));
    for (from, to) in [
        ("\"version\":\"1\"", "\"version\":\"0\""),
        ("\"version\":\"1\"", "\"version\":\"18446744073709551616\""),
        ("pikv sequence", "pikv fitted maps"),
        ("\"U32\",\"shape\":[", "\"U32\",\"shape\":[0"),
        ("\"U32\",\"shape\":[", "\"U32\",\"shape\":[18446744073709551615"),
        ("\"U32\",\"shape\":[", "\"U32\",\"shape\":[4611686018427387904,"),
        ("\"U32\",\"shape\":[", "\"U32\",\"shape\":[-"),
        ("layers.0.state", "layers.9.state"),
        ("}}", "}}}"),
    ] {
        assert!(matches!(error(from, to), SaveError::Header { .. }), "{from} {to}");
    }
    // Lengths that agree with each other, of more than there is, and a header of more than one has.
    let grown = with_header(&bytes, |header| {
        let at = header.find("\"sequence\"").unwrap();
        format!(
            "{}\"sequence\":{{\"dtype\":\"U32\",\"shape\":[1099511627776],\"data_offsets\":[0,4398046511104]}}",
            &header[..at]
        )
    });
    assert!(matches!(damage(&cache, &grown), SaveError::Header { .. }));
    for length in [u64::MAX, 1 << 40, 1 << 20] {
        let mut long = bytes.clone();
        long[..8].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(damage(&cache, &long), SaveError::Header { at: 0, .. }));
    }
    assert!(matches!(damage(&cache, &[0; 64]), SaveError::Header { at: 8, .. }));
}

/// Takes so many bytes.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.0);
        self.0 -= n;
        if n == 0 { Err(ErrorKind::StorageFull.into()) } else { Ok(n) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn writers_that_refuse_budgets_that_are_full_and_steps_that_were_leaked() {
    let cache = Cache::new(config()).unwrap();
    let mut sequence = cache.sequence();
    feed(&cache, &mut sequence, 60);
    let mut bytes = Vec::new();
    sequence.save(b"", &mut bytes).unwrap();
    for room in (0..bytes.len()).step_by(97) {
        let error = sequence.save(b"", &mut Full(room)).unwrap_err();
        let full = SaveError::Io { operation: SaveOperation::Write, at: 0, kind: ErrorKind::StorageFull };
        let Error::Save(SaveError::Io { operation, kind, at }) = error else { panic!("{error}") };
        assert_eq!(SaveError::Io { operation, kind, at: 0 }, full);
        assert!(at <= room as u64);
    }
    // A step that is forgotten instead of dropped.
    let mut leaked = sequence.fork();
    let mut step = cache.begin([(&mut leaked, 1)]).unwrap();
    step.append(0, &[0.5; 4], &[0.5; 4]).unwrap();
    std::mem::forget(step);
    let mut again = Vec::new();
    leaked.save(b"", &mut again).unwrap();
    assert!(bytes == again);

    let mut small = config();
    small.budget = sequence.bytes() - 1;
    let error = refused(&Cache::new(small).unwrap(), &bytes);
    assert_eq!(error, Error::OutOfBudget { needed: sequence.bytes(), available: sequence.bytes() - 1 });
}

/// The bytes of a save have no words of other sequences, and none that were never written: pages from the free list have old contents,
/// and tokens that are merged while a fork reads their pages leave lanes of those pages free.
#[test]
fn nothing_of_other_sequences_is_saved() {
    let mut config = config().nan_fill(false);
    config.budget = 1 << 17;
    let bytes = [0, 400].map(|before| {
        let cache = Cache::new(config.clone()).unwrap();
        let mut other = cache.sequence();
        feed(&cache, &mut other, before);
        drop(other);
        let mut sequence = cache.sequence();
        let (mut forks, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..8 {
            feed(&cache, &mut sequence, 30);
            forks.push(sequence.fork());
            sequence.save(b"", &mut bytes).unwrap();
        }
        bytes
    });
    assert!(bytes[0] == bytes[1]);
}

/// A file of each version of the format is restored, and continues as a sequence that was never saved.
#[test]
fn files_of_every_version() {
    // A sequence is written in the first version that holds it: the second has budgets of sequences, the fourth runs that experts share.
    for (version, experts, budget) in [(1, 2, None), (2, 2, Some(40)), (4, 12, Some(40))] {
        let config = || config().experts(experts, 1);
        let options = SequenceOptions::new().budget(budget);
        let file = saved_file(version, &saved_with(config(), 150, options));
        let cache = Cache::new(config()).unwrap();
        let restored = cache.restore(&mut &file[..]).unwrap();
        assert_eq!((&restored.note[..], restored.sequence.budget()), (&b"a note"[..], budget));
        let (mut sequence, mut plain) = (restored.sequence, cache.sequence_with(options).unwrap());
        feed(&cache, &mut plain, 150);
        plain.pin(3..6);
        for _ in 0..20 {
            assert_eq!(feed(&cache, &mut sequence, 4), feed(&cache, &mut plain, 4));
            assert_eq!((sequence.rollback(2), plain.rollback(2)), (Ok(()), Ok(())));
        }
        assert!(plain.resident(1, 0).unwrap().0 <= budget.unwrap_or(70));
    }
}

/// A budget that the cache refuses is refused when it is read. The checksum detects a budget of another sequence.
#[test]
fn budgets_that_could_not_act() {
    let file = saved_with(config(), 60, SequenceOptions::new().budget(40));
    let cache = Cache::new(config()).unwrap();
    let words: Vec<usize> =
        (0..file.len() - 4).step_by(4).filter(|at| file[*at..at + 4] == 40u32.to_le_bytes()).collect();
    for tokens in [0, 70, u32::MAX, 41] {
        let mut found = Vec::new();
        for at in &words {
            let mut bytes = file.clone();
            bytes[*at..at + 4].copy_from_slice(&u32::to_le_bytes(tokens));
            found.push(damage(&cache, &bytes));
        }
        let acts =
            |error: &SaveError| matches!(error, SaveError::Content { what: "a budget that cannot act", .. });
        assert_eq!(found.iter().any(acts), tokens != 41, "{tokens}: {found:?}");
    }
}
