//! Where a tier keeps bytes.

use std::fmt;
use std::io;
use std::path::Path;

/// A store of bytes by position. The cache sees to it that what it writes at the same time does not overlap, and that it reads only
/// what it wrote; calls come from several threads.
pub trait Store: fmt::Debug + Send + Sync {
    /// Writes all of `bytes` at `at`.
    ///
    /// # Errors
    /// Any; the page stays where it was.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Fills `bytes` from `at`.
    ///
    /// # Errors
    /// Any; the call that wants the page fails.
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
}

#[cfg(unix)]
impl Store for std::fs::File {
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(self, bytes, at)
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, bytes, at)
    }
}

/// A file without a name in `dir`.
#[cfg(unix)]
pub(super) fn open(dir: &Path) -> io::Result<Box<dyn Store>> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        // The counter only spares attempts: a name that is taken is left alone.
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".pikv-{}-{n}", std::process::id()));
        match std::fs::File::options().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(Box::new(file));
            }
        }
    }
}

/// Files are read and written by position, which the standard library offers on Unix.
#[cfg(not(unix))]
pub(super) fn open(_dir: &Path) -> io::Result<Box<dyn Store>> {
    Err(io::ErrorKind::Unsupported.into())
}
