//! Files that the library makes: private where they hold what prompts were, whole where they take another's place, and an error where
//! the system would end the process for their size.

use std::fs::TryLockError;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::path::Path;

/// 16 random digits, which cannot be guessed: two processes of one number (in two containers, say) do not choose the same name.
fn random() -> String {
    format!("{:016x}", std::hash::RandomState::new().build_hasher().finish())
}

/// Has the file that is made be readable and writable by its owner alone, from its first instant.
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options
}

/// Whether `file` may reach `end` bytes. Past the limit of the process (`RLIMIT_FSIZE`) a write would raise `SIGXFSZ`, which ends the
/// process unless it is handled; so writes ask first.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`].
pub(crate) fn room(file: &File, end: u64) -> io::Result<()> {
    #[cfg(unix)]
    {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the call writes `limit` and nothing else, and needs nothing of what it holds.
        let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
        #[allow(clippy::unnecessary_cast, reason = "it has 64 bits on most systems, not on all")]
        let past = limit.rlim_cur != libc::RLIM_INFINITY && end > limit.rlim_cur as u64;
        // Devices have no such limit.
        if known && past && file.metadata()?.is_file() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
    }
    #[cfg(not(unix))]
    let _ = (file, end);
    Ok(())
}

/// A private file in `dir` that has no name: from the first instant where the file system makes such files, else once it is open.
#[cfg(unix)]
pub(crate) fn nameless(dir: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        let mut options = File::options();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_TMPFILE | libc::O_EXCL);
        let opened = private(options.read(true).write(true)).open(dir);
        // What file systems and kernels say that make none.
        let none = [libc::EOPNOTSUPP, libc::EISDIR, libc::EINVAL];
        match &opened {
            Err(error) if error.raw_os_error().is_some_and(|code| none.contains(&code)) => {}
            _ => return opened,
        }
    }
    named(dir)
}

/// A private file whose name is removed as soon as it is open.
#[cfg(unix)]
fn named(dir: &Path) -> io::Result<File> {
    loop {
        let path = dir.join(format!(".pikv-{}", random()));
        match private(File::options().read(true).write(true).create_new(true)).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => {
                fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
}

/// Who may read a file that takes another's place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    /// Who could read the one before; who the process lets read new files, if there was none.
    #[cfg(feature = "fit")]
    AsBefore,
    /// Its owner alone.
    Owner,
}

/// Writes a file in one piece: under a random name beside `path`, synced, and then in place of what was there. What was at `path` stays until
/// the new file is whole, which `write` makes it. What earlier calls left that were killed is removed.
///
/// # Errors
/// The file system's, and those of `write`; `path` is as it was then, unless it is the directory that could not be synced.
pub(crate) fn replace<T, E: From<io::Error>>(
    path: &Path,
    readers: Readers,
    write: impl FnOnce(&mut Private) -> Result<T, E>,
) -> Result<T, E> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "a path without a file name");
    let name = path.file_name().ok_or_else(no_name)?;
    let dir = match path.parent() {
        Some(dir) if dir != Path::new("") => dir,
        _ => Path::new("."),
    };
    // Leftovers cost room and nothing else: where they cannot be removed, they stay.
    let _ = sweep(dir, name.as_encoded_bytes());
    let (before, is_private) = match readers {
        #[cfg(feature = "fit")]
        Readers::AsBefore => {
            let file = fs::symlink_metadata(path).ok().filter(|file| file.is_file());
            (file.as_ref().map(fs::Metadata::permissions), file.is_some())
        }
        Readers::Owner => (None, true),
    };
    let (part, file) = loop {
        let mut part = name.to_owned();
        part.push(format!(".{}.part", random()));
        let part = dir.join(part);
        let mut options = File::options();
        let options = options.write(true).create_new(true);
        let opened = match is_private {
            true => private(options).open(&part),
            false => options.open(&part),
        };
        match opened {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error.into()),
            Ok(file) if held(&file)? => break (part, file),
            // Another save took it for a leftover, and has removed it or will.
            Ok(_) => {}
        }
    };
    let mut whole = Private { file, len: 0 };
    let written = write(&mut whole).and_then(|written| {
        before.map_or(Ok(()), |permissions| whole.file.set_permissions(permissions))?;
        whole.sync()?;
        fs::rename(&part, path)?;
        Ok(written)
    });
    if written.is_err() {
        // The first error is what matters; at worst the part stays for the next save to remove.
        let _ = fs::remove_file(&part);
        return written;
    }
    match sync_dir(dir) {
        // A file system that does not know what that is has no more to give.
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Err(error.into())
        }
        _ => written,
    }
}

/// Locks a part that was made, until it is closed, so that no other save takes it for a leftover; `false` if one already has.
fn held(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(false),
        // Where nothing can be locked, nothing is removed either.
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    #[cfg(unix)]
    let linked = std::os::unix::fs::MetadataExt::nlink(&file.metadata()?) > 0;
    #[cfg(not(unix))]
    let linked = true;
    Ok(linked)
}

/// Has the directory's own entries outlast a loss of power.
fn sync_dir(dir: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(dir)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

/// Removes temporary parts of files named `name` that no running save has locked.
fn sweep(dir: &Path, name: &[u8]) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let found = entry.file_name();
        let rest = found.as_encoded_bytes().strip_prefix(name).and_then(|rest| rest.strip_prefix(b"."));
        let digits = rest.and_then(|rest| rest.strip_suffix(b".part")).unwrap_or_default();
        let ours = digits.len() == 16 && digits.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        if ours && entry.file_type()?.is_file() {
            let file = File::options().write(true).open(entry.path())?;
            if file.try_lock().is_ok() {
                fs::remove_file(entry.path())?;
            }
        }
    }
    Ok(())
}

/// A file that is written from its beginning, and refuses to pass the limit of the process.
#[derive(Debug)]
pub(crate) struct Private {
    file: File,
    len: u64,
}

impl Private {
    /// Makes the file. A file that has the name loses it first, so that who has that open, or could, sees nothing of the new one.
    ///
    /// # Errors
    /// The file system's; something else than a file that has the name.
    pub fn create(path: &Path) -> io::Result<Private> {
        if fs::symlink_metadata(path).is_ok_and(|file| file.is_file()) {
            fs::remove_file(path)?;
        }
        let file = private(File::options().write(true).create_new(true)).open(path)?;
        Ok(Private { file, len: 0 })
    }

    /// Has what was written outlast a loss of power.
    ///
    /// # Errors
    /// The file system's.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

impl Write for Private {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        room(&self.file, self.len + bytes.len() as u64)?;
        let n = self.file.write(bytes)?;
        self.len += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    /// The way of file systems without nameless files, which the tests' own may not be.
    #[test]
    fn a_name_is_gone_once_the_file_is_open() {
        let dir = std::env::temp_dir().join(format!("pikv-files-{}", random()));
        fs::create_dir(&dir).unwrap();
        let file = named(&dir).unwrap().metadata().unwrap();
        assert_eq!((file.mode() & 0o777, file.nlink()), (0o600, 0));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        fs::remove_dir(&dir).unwrap();
        assert_eq!(named(&dir).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
