//! Where a tier keeps bytes.

#[cfg(unix)]
use crate::base::files;
use std::fmt;
use std::io;
use std::path::Path;

/// A store of bytes by position. What it is given is what prompts left: who can read the store can read that. The cache sees to it that what it writes at the same time does not overlap, and that it reads only
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

/// Writes past the size that the process may give a file (`RLIMIT_FSIZE`) are refused before they raise `SIGXFSZ`.
#[cfg(unix)]
impl Store for std::fs::File {
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        files::room(self, at + bytes.len() as u64)?;
        std::os::unix::fs::FileExt::write_all_at(self, bytes, at)
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, bytes, at)
    }
}

/// A file without a name in `dir`.
#[cfg(unix)]
pub(super) fn open(dir: &Path) -> io::Result<Box<dyn Store>> {
    Ok(Box::new(files::nameless(dir)?))
}

/// Files are read and written by position, which the standard library offers on Unix.
#[cfg(not(unix))]
pub(super) fn open(_dir: &Path) -> io::Result<Box<dyn Store>> {
    Err(io::ErrorKind::Unsupported.into())
}
