//! Files made by the library: their permissions, remains of a killed process, and the effect of a file size limit.

use pikv::codec::{FitShape, Fitted, FittedError, FittedSide, Map};
use pikv::policy::{Budget, Eviction, H2o};
use pikv::report::Failures;
use pikv::tiers::{PageStore, TierOperation, Tiers};
use pikv::trace::{Reader, Row, TraceFile, Writer};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Layout};
use pikv_test::dir::Dir;
use std::fs::{self, File, FileTimes};
use std::io::{self, BufReader};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

fn dir(name: &str) -> Dir {
    Dir::new(env!("CARGO_TARGET_TMPDIR"), name)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

const LAYOUT: Layout = Layout::new(32, Dtype::F32);

/// A cache with room for a ring and a few pages, and the rest in a file in `dir`.
fn cache(dir: &Path, wipe: bool) -> Cache {
    let layer = LayerShape::with_layout(1, 1, LAYOUT);
    let tiers = Tiers::new().file(dir, 1 << 20);
    Cache::new(CacheConfig::new(vec![layer], 64 << 10).ring(32).tiers(tiers).wipe(wipe)).unwrap()
}

/// Appends 32 tokens with keys and values of `x`.
fn grow(cache: &Cache, sequence: &mut pikv::Sequence, x: f32) -> Result<(), Error> {
    let mut step = cache.begin([(&mut *sequence, 32)])?;
    step.append(0, &[x; 32 * 32], &[x; 32 * 32])?;
    step.commit().map(|_| ())
}

/// The files in `dir` that this process has open, by their numbers.
#[cfg(target_os = "linux")]
fn open_in(dir: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    all.filter(|fd| fs::read_link(fd).is_ok_and(|to| to.starts_with(dir))).collect()
}

/// Only the owner can open a tier's file, and it has no name.
#[cfg(target_os = "linux")]
#[test]
fn a_file_of_a_tier_is_private_and_nameless() {
    let dir = dir("private");
    let _cache = cache(&dir.0, false);
    let open = open_in(&dir.0);
    assert_eq!(open.len(), 1);
    let file = fs::metadata(&open[0]).unwrap();
    assert_eq!((file.permissions().mode() & 0o7777, file.nlink()), (0o600, 0));
    assert_eq!(dir.names(), [""; 0]);
}

/// Where the file system has files without names, a tier's file has none at any time: the directory does not change.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_file_of_a_tier_never_has_a_name() {
    let dir = dir("nameless");
    const O_TMPFILE: i32 = 0o20_200_000;
    if fs::OpenOptions::new().write(true).custom_flags(O_TMPFILE).open(&dir.0).is_err() {
        println!("not run: {} has no files without names", dir.0.display());
        return;
    }
    let past = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    File::open(&dir.0).unwrap().set_times(FileTimes::new().set_modified(past)).unwrap();
    let _cache = cache(&dir.0, false);
    assert_eq!(fs::metadata(&dir.0).unwrap().modified().unwrap(), past);
}

/// A missing directory is an error that names the tier.
#[test]
fn a_directory_that_is_not_there() {
    let dir = dir("missing");
    let layer = LayerShape::with_layout(1, 1, LAYOUT);
    let tiers = Tiers::new().file(dir.0.join("none"), 1 << 20);
    let refused = Cache::new(CacheConfig::new(vec![layer], 64 << 10).tiers(tiers)).unwrap_err();
    let Error::Tier { operation: TierOperation::Open, tier, kind: io::ErrorKind::NotFound, .. } = refused
    else {
        panic!("{refused}");
    };
    assert!(tier.ends_with("none"), "{tier}");
}

/// The contents of the tier's file, read without the cache.
#[cfg(target_os = "linux")]
fn contents(dir: &Path) -> Vec<u8> {
    let open = open_in(dir);
    assert_eq!(open.len(), 1);
    fs::read(&open[0]).unwrap()
}

/// With `wipe` no bytes of a dropped sequence stay in a file; without it they stay until overwritten.
#[cfg(target_os = "linux")]
#[test]
fn pages_of_files_are_wiped_when_they_are_given_back() {
    for wipe in [false, true] {
        let dir = dir(if wipe { "wiped" } else { "kept" });
        let cache = cache(&dir.0, wipe);
        let mut sequence = cache.sequence();
        for _ in 0..16 {
            grow(&cache, &mut sequence, 1.5).unwrap();
        }
        assert!(sequence.bytes_in_tier(1) > 0);
        let holds =
            || contents(&dir.0).windows(8).any(|bytes| bytes == [1.5f32.to_le_bytes(); 2].as_flattened());
        assert!(holds());
        drop(sequence);
        assert_eq!(holds(), !wipe);
        assert_eq!(cache.usage().tiers[0].bytes, 0);
        assert_eq!(cache.failures(), Default::default());
    }
}

/// Wiping changes no bit of a result.
#[test]
fn wiping_changes_no_bit() {
    let outputs = [false, true].map(|wipe| {
        let dir = dir(if wipe { "bits-wiped" } else { "bits" });
        let cache = cache(&dir.0, wipe);
        let mut all = Vec::new();
        for round in 0..3 {
            let mut sequence = cache.sequence();
            for i in 0..12 {
                grow(&cache, &mut sequence, 0.25 * (i + round) as f32).unwrap();
            }
            let mut out = [0.0; 32];
            let mut step = cache.begin([(&mut sequence, 1)]).unwrap();
            step.append(0, &[0.5; 32], &[0.75; 32]).unwrap();
            step.attend(0, &[0.3; 32], &Attend::new(0.2), AttendOutput::new(&mut out)).unwrap();
            step.commit().unwrap();
            all.extend(pikv_test::numbers::bits(&out));
        }
        all
    });
    assert_eq!(outputs[0], outputs[1]);
}

fn fitted(seed: u64) -> Fitted {
    let mut rng = pikv_test::numbers::Rng(seed);
    let mut maps = Vec::new();
    for _ in 0..4 {
        maps.push(Map::new(8, 3, rng.values(24, 1.0), rng.values(24, 1.0), None).unwrap());
    }
    let shape = FitShape::new(2, 2, 2, 8);
    Fitted::new(shape, "model", Some(FittedSide::new("C_SVD", maps)), None).unwrap()
}

fn load(path: &Path) -> Fitted {
    Fitted::load(path, "model", fitted(1).shape()).unwrap()
}

/// A temporary file that a killed save of this process left behind does not stop a later save.
#[test]
fn a_save_that_was_killed_stops_no_later_one() {
    let dir = dir("killed");
    let path = dir.0.join("maps.safetensors");
    fs::write(dir.0.join(format!("maps.safetensors.{}.part", std::process::id())), "half").unwrap();
    fitted(1).save(&path).unwrap();
    assert_eq!(load(&path), fitted(1));
    fitted(2).save(&path).unwrap();
    assert_eq!(load(&path), fitted(2));
}

/// The next save removes the files of a killed save, and no others.
#[test]
fn leftovers_are_removed() {
    let dir = dir("leftovers");
    let path = dir.0.join("maps");
    let left = ["maps.0123456789abcdef.part", "maps.ffffffffffffffff.part"];
    let others = ["maps.part", "maps.0123456789abcdeg.part", "maps2.0123456789abcdef.part", "maps.1.part"];
    for name in left.iter().chain(&others) {
        fs::write(dir.0.join(name), "half").unwrap();
    }
    fitted(1).save(&path).unwrap();
    let mut expected: Vec<&str> = others.to_vec();
    expected.push("maps");
    expected.sort();
    assert_eq!(dir.names(), expected);
}

/// A save in progress is not removed: many threads save to one path, and each time one complete file is there.
#[test]
fn saves_at_the_same_time() {
    let dir = dir("together");
    let path = dir.0.join("maps");
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let path = &path;
            scope.spawn(move || (0..25).for_each(|_| fitted(seed).save(path).unwrap()));
        }
    });
    let last = load(&path);
    assert!((0..4).any(|seed| last == fitted(seed)));
    assert_eq!(dir.names(), ["maps"]);
}

/// A file that replaces another keeps its permissions; a failed save keeps the old file.
#[test]
fn a_save_keeps_permissions_and_what_was_there() {
    let dir = dir("modes");
    let path = dir.0.join("maps");
    fitted(1).save(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    fitted(2).save(&path).unwrap();
    assert_eq!((mode(&path), load(&path)), (0o640, fitted(2)));
    let taken = dir.0.join("taken");
    fs::create_dir(&taken).unwrap();
    let refused = fitted(2).save(&taken).unwrap_err();
    assert!(matches!(&refused, FittedError::Io { path, .. } if *path == taken), "{refused}");
    let refused = fitted(2).save(Path::new("/")).unwrap_err();
    assert!(matches!(&refused, FittedError::Io { path, .. } if path == Path::new("/")), "{refused}");
    let nowhere = dir.0.join("none").join("maps");
    assert!(matches!(fitted(2).save(&nowhere), Err(FittedError::Io { .. })));
    assert_eq!(dir.names(), ["maps", "taken"]);
}

fn trace(path: &Path, tokens: u32) -> Result<(), pikv::trace::TraceError> {
    let mut writer = Writer::new(TraceFile::create(path)?, 4)?;
    for token in 0..tokens {
        writer.write(&Row::new(token, vec![1, 3], Vec::new()))?;
    }
    writer.finish()?.sync()?;
    Ok(())
}

/// A trace holds the tokens of prompts, so only its owner can read it, even if its name was that of a file that others could read. Who has
/// that file open does not read the trace.
#[test]
fn a_trace_is_private() {
    let dir = dir("trace");
    let path = dir.0.join("trace.csv");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let mut before = File::open(&path).unwrap();
    trace(&path, 100).unwrap();
    assert_eq!(mode(&path), 0o600);
    assert_eq!(io::read_to_string(&mut before).unwrap(), "old");
    let rows = Reader::new(BufReader::new(File::open(&path).unwrap())).unwrap();
    assert_eq!(
        rows.map(Result::unwrap).map(|row| row.token).collect::<Vec<_>>(),
        (0..100).collect::<Vec<_>>()
    );
    let linked = dir.0.join("link");
    std::os::unix::fs::symlink(&path, &linked).unwrap();
    assert!(trace(&linked, 1).is_err());
}

/// Under a file size limit calls return errors and the process lives. Run in a process of its own, which has the limit.
#[test]
fn a_limit_on_files_is_an_error() {
    const INSIDE: &str = "PIKV_TEST_FILES_INSIDE";
    if let Ok(dir) = std::env::var(INSIDE) {
        return inside_a_limit(Path::new(&dir));
    }
    let dir = dir("limit");
    let me = std::env::current_exe().unwrap();
    // Blocks of 512 or of 1024 bytes, as the shell will have it.
    let inside = "ulimit -f 32; exec \"$0\" --exact files::a_limit_on_files_is_an_error --nocapture";
    let output = Command::new("sh").arg("-c").arg(inside).arg(me).env(INSIDE, &dir.0).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(out.contains("1 passed"), "{out}");
}

fn inside_a_limit(dir: &Path) {
    let cache = cache(dir, false);
    let mut sequence = cache.sequence();
    let mut len = 0;
    let refused = loop {
        match grow(&cache, &mut sequence, 2.0) {
            Ok(()) => len += 32,
            Err(refused) => break refused,
        }
    };
    let Error::Tier { operation: TierOperation::Write, kind: io::ErrorKind::FileTooLarge, .. } = refused
    else {
        panic!("{refused}");
    };
    assert!(len > 64, "the first pages fit");
    assert_eq!(sequence.next_position().0, len);
    let path = dir.join("maps");
    let shape = FitShape::new(1, 1, 1, 128).v_dim(8);
    let maps = vec![Map::new(128, 128, vec![0.5; 1 << 14], vec![0.5; 1 << 14], None).unwrap()];
    let large = Fitted::new(shape, "model", Some(FittedSide::new("C_SVD", maps)), None).unwrap();
    let Err(FittedError::Io { source, .. }) = large.save(&path) else { panic!("64 KiB and more") };
    assert_eq!(source.kind(), io::ErrorKind::FileTooLarge);
    let Err(pikv::trace::TraceError::Io(refused)) = trace(&dir.join("trace"), 10_000) else {
        panic!("some 80 KiB")
    };
    assert_eq!(refused.kind(), io::ErrorKind::FileTooLarge);
}

/// A store in memory that refuses writes while it is set to.
#[derive(Clone, Debug, Default)]
struct Refusing(Arc<(Mutex<Vec<u8>>, AtomicBool)>);

impl PageStore for Refusing {
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if self.0.1.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.0.lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0.0.lock().unwrap()[at as usize..][..bytes.len()]);
        Ok(())
    }
}

/// Pages that lost tokens and cannot be merged are counted, and are merged once the store accepts writes.
#[test]
fn memory_that_does_not_come_back_is_counted() {
    let store = Refusing(Arc::new((Mutex::new(vec![0; 1 << 20]), AtomicBool::new(false))));
    let given = store.clone();
    let layer = LayerShape::with_layout(1, 1, LAYOUT);
    let tiers = Tiers::new().store("store", 1 << 20, move || Ok(Box::new(given.clone())));
    let rule = Eviction::new(H2o, Budget::Tokens(256)).batch(1);
    let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).tiers(tiers).evict(rule)).unwrap();
    let (mut sequence, mut rng) = (cache.sequence(), pikv_test::numbers::Rng(3));
    let mut run = |sequence: &mut pikv::Sequence, n: u32| {
        for _ in 0..n {
            let mut step = cache.begin([(&mut *sequence, 1)]).unwrap();
            step.append(0, &rng.values(32, 2.0), &rng.values(32, 1.0)).unwrap();
            step.attend(0, &rng.values(32, 2.0), &Attend::new(0.5), AttendOutput::new(&mut [0.0; 32]))
                .unwrap();
            step.commit().unwrap();
        }
    };
    run(&mut sequence, 250);
    assert!(sequence.demote(1 << 20).unwrap() > 0);
    assert_eq!(cache.failures(), Failures::default());
    let lower = || cache.usage().tiers[0].bytes;
    store.0.1.store(true, Ordering::Relaxed);
    run(&mut sequence, 150);
    let failed = cache.failures().uncompacted;
    assert!(failed > 0);
    let stuck = lower();
    store.0.1.store(false, Ordering::Relaxed);
    run(&mut sequence, 1);
    assert_eq!(cache.failures().uncompacted, failed);
    assert!(lower() < stuck);
}
