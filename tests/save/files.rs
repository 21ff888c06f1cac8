//! Files of sequences: complete or absent, however the save ends.

use pikv::save::{SaveError, SaveOperation};
use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape, Sequence};
use pikv_test::dir::Dir;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn dir(name: &str) -> Dir {
    Dir::new(env!("CARGO_TARGET_TMPDIR"), name)
}

fn cache() -> Cache {
    let layer = LayerShape::new(2, 2, 64, Dtype::F32);
    Cache::new(CacheConfig::new(vec![layer; 2], 64 << 20).ring(32)).unwrap()
}

/// A sequence of `tokens` tokens whose keys and values are `x`.
fn sequence(cache: &Cache, tokens: u32, x: f32) -> Sequence {
    let mut sequence = cache.sequence();
    let mut step = cache.begin([(&mut sequence, tokens)]).unwrap();
    let rows = vec![x; tokens as usize * 128];
    (0..2).for_each(|layer| step.append(layer, &rows, &rows).unwrap());
    step.commit().unwrap();
    sequence
}

/// Which sequence is at `path`: by its note, and by the bytes that it is saved as.
fn read(cache: &Cache, path: &Path) -> Option<u8> {
    let restored = match cache.restore_file(path) {
        Err(Error::Save(SaveError::File {
            operation: SaveOperation::Open,
            kind: ErrorKind::NotFound,
            path: named,
        })) if Path::new(&named) == path => return None,
        restored => restored.unwrap(),
    };
    assert_eq!(restored.bytes, fs::metadata(path).unwrap().len());
    let mut again = Vec::new();
    restored.sequence.save(&restored.note, &mut again).unwrap();
    assert!(again == fs::read(path).unwrap());
    Some(restored.note[0])
}

#[test]
fn a_file_is_private_and_takes_the_place_of_another() {
    let (dir, cache) = (dir("place"), cache());
    let path = dir.0.join("chat");
    assert_eq!(read(&cache, &path), None);
    sequence(&cache, 70, 0.5).save_file(&[1], &path).unwrap();
    assert_eq!(read(&cache, &path), Some(1));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(dir.0.join("chat.0123456789abcdef.part"), "half").unwrap();
    sequence(&cache, 200, 0.25).save_file(&[2], &path).unwrap();
    assert_eq!(read(&cache, &path), Some(2));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(dir.names(), ["chat"]);

    let whole = fs::read(&path).unwrap();
    fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    let (bytes, file) = (whole.len() as u64, whole.len() as u64 + 1);
    assert_eq!(cache.restore_file(&path).err(), Some(SaveError::TooLong { bytes, file }.into()));
    for path in [dir.0.join("none").join("chat"), PathBuf::from("/"), dir.0.clone()] {
        let error = sequence(&cache, 9, 0.5).save_file(&[3], &path).unwrap_err();
        assert!(
            matches!(error, Error::Save(SaveError::File { operation: SaveOperation::Write, .. })),
            "{error}"
        );
    }
    assert_eq!(cache.usage().taken, 0);
}

/// The part that runs in a process of its own: saves two sequences in turn until it is killed, or once under a limit on files.
#[test]
fn inside() {
    let Ok(path) = std::env::var(INSIDE) else { return };
    let (cache, path) = (cache(), Path::new(&path));
    let [a, b] = [sequence(&cache, 300, 0.5), sequence(&cache, 3000, 0.25)];
    if std::env::var_os(LIMITED).is_some() {
        let error = b.save_file(&[2], path).unwrap_err();
        let Error::Save(SaveError::Io {
            operation: SaveOperation::Write, kind: ErrorKind::FileTooLarge, ..
        }) = error
        else {
            panic!("{error}");
        };
        return;
    }
    loop {
        a.save_file(&[1], path).unwrap();
        b.save_file(&[2], path).unwrap();
    }
}

const INSIDE: &str = "PIKV_TEST_SAVE_INSIDE";
const LIMITED: &str = "PIKV_TEST_SAVE_LIMITED";

fn start(path: &Path) -> Child {
    let me = std::env::current_exe().unwrap();
    let mut command = Command::new(me);
    command.args(["--exact", "files::inside", "--nocapture"]).env(INSIDE, path);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A save is killed at any moment. The file at the path is then one of the two sequences, complete, and the next save removes the
/// rest.
#[test]
fn a_kill_leaves_the_old_file_or_the_new_one() {
    let (dir, cache) = (dir("kill"), cache());
    let path = dir.0.join("chat");
    let mut rng = pikv_test::numbers::Rng(7);
    let (mut seen, mut parts) = ([0, 0], 0);
    for round in 0..pikv_test::scaled(12, 300) {
        let mut child = start(&path);
        let begun = Instant::now();
        // Until the process has saved for the first time, then for a while.
        while round == 0 && !path.exists() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        while !dir.names().iter().any(|name| name.ends_with(".part")) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(u64::from(rng.below(40_000))));
        child.kill().unwrap();
        child.wait().unwrap();
        parts += dir.names().len() - 1;
        seen[usize::from(read(&cache, &path).expect("a file that was there stays") - 1)] += 1;
    }
    assert!(parts > 0 && seen[0] + seen[1] > 0, "{parts} {seen:?}");
    sequence(&cache, 9, 0.5).save_file(&[3], &path).unwrap();
    assert_eq!((read(&cache, &path), dir.names()), (Some(3), vec!["chat".to_owned()]));
}

/// If any write of a save fails because the file may not grow, the file that was at the path stays.
#[test]
fn a_write_that_is_refused_leaves_the_old_file() {
    let (dir, cache) = (dir("limit"), cache());
    let path = dir.0.join("chat");
    sequence(&cache, 30, 0.5).save_file(&[1], &path).unwrap();
    let me = std::env::current_exe().unwrap();
    // Blocks of 512 or of 1024 bytes, as the shell will have it.
    for blocks in [0, 1, 7, 100, 600, 2000, 2500] {
        let inside = format!("ulimit -f {blocks}; exec \"$0\" --exact files::inside --nocapture");
        let mut command = Command::new("sh");
        command.arg("-c").arg(inside).arg(&me).env(INSIDE, &path).env(LIMITED, "1");
        let output = command.output().unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{blocks}: {text}");
        assert_eq!((read(&cache, &path), dir.names()), (Some(1), vec!["chat".to_owned()]));
    }
}
