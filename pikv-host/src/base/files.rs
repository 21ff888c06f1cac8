//! Files that the library writes: private if they contain data of prompts, replaced atomically, and with an error instead of a signal
//! at the limit of file sizes.

use std::fs::TryLockError;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::path::Path;

/// 16 random hex digits that cannot be guessed: two processes with the same pid (in two containers, say) get different names.
fn random() -> String {
    format!("{:016x}", std::hash::RandomState::new().build_hasher().finish())
}

/// Creates the file readable and writable by its owner alone (mode 0600).
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options
}

/// Checks that `file` may grow to `end` bytes. A write past the process's limit (`RLIMIT_FSIZE`) would raise `SIGXFSZ`, which ends the
/// process unless it is handled.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`].
pub(crate) fn room(file: &File, end: u64) -> io::Result<()> {
    #[cfg(unix)]
    {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the call writes `limit`, which is valid, and reads nothing of it.
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

/// A private file in `dir` without a name: created so if the file system supports it, else unlinked once it is open.
#[cfg(unix)]
pub(crate) fn nameless(dir: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        let mut options = File::options();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_TMPFILE | libc::O_EXCL);
        let opened = private(options.read(true).write(true)).open(dir);
        // Errors of file systems and kernels without such files.
        let none = [libc::EOPNOTSUPP, libc::EISDIR, libc::EINVAL];
        match &opened {
            Err(error) if error.raw_os_error().is_some_and(|code| none.contains(&code)) => {}
            _ => return opened,
        }
    }
    named(dir)
}

/// A private file that is unlinked as soon as it is open.
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

/// Permissions of a file that replaces another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    /// Permissions of the old file; those that the process gives new files if there was none.
    #[cfg(feature = "fit")]
    AsBefore,
    /// The owner alone.
    Owner,
}

/// Replaces a file atomically: `write` writes a file with a random name beside `path`, which is then synced and renamed. The old file stays
/// at `path` until then. Removes files that killed processes left.
///
/// # Errors
/// Errors of the file system and of `write`; `path` is then unchanged, unless only the directory could not be synced.
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
    // Leftover files only take room, so a failure to remove them is ignored.
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
            // Another save took the file for a leftover, and has removed it or will.
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
        // The first error is returned; if this one fails too, the next save removes the file.
        let _ = fs::remove_file(&part);
        return written;
    }
    match sync_dir(dir) {
        // File systems that cannot sync a directory.
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Err(error.into())
        }
        _ => written,
    }
}

/// Locks a new temporary file until it is closed, so that no other save removes it as a leftover; `false` if one has.
fn held(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(false),
        // `sweep` removes nothing on file systems without locks.
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    #[cfg(unix)]
    let linked = std::os::unix::fs::MetadataExt::nlink(&file.metadata()?) > 0;
    #[cfg(not(unix))]
    let linked = true;
    Ok(linked)
}

/// Syncs the entries of a directory.
fn sync_dir(dir: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(dir)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

/// Removes temporary files of `name` that no running save has locked.
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

/// A file for sequential writes that returns an error at the process's limit of file sizes.
#[derive(Debug)]
pub(crate) struct Private {
    file: File,
    len: u64,
}

impl Private {
    /// Creates the file. An existing file of that name is unlinked first, so that a process that has it open, or may open it, does not see
    /// the new one.
    ///
    /// # Errors
    /// Errors of the file system; `path` is something other than a file.
    pub fn create(path: &Path) -> io::Result<Private> {
        if fs::symlink_metadata(path).is_ok_and(|file| file.is_file()) {
            fs::remove_file(path)?;
        }
        let file = private(File::options().write(true).create_new(true)).open(path)?;
        Ok(Private { file, len: 0 })
    }

    /// Syncs the file, so that its data survives a loss of power.
    ///
    /// # Errors
    /// Errors of the file system.
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

    /// Covers file systems without nameless files, which the test's own may support.
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
