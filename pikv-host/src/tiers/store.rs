//! Storage of a tier's bytes.

#[cfg(unix)]
use crate::base::files;
use std::fmt;
use std::io;
use std::path::Path;

/// A store of bytes by offset. It receives keys and values of prompts, so a reader of the store can read those. The cache never
/// overlaps concurrent writes, and reads only bytes that it wrote; calls come from several threads.
pub trait PageStore: fmt::Debug + Send + Sync {
    /// Writes all of `bytes` at offset `at`.
    ///
    /// # Errors
    /// Any; the page stays where it was.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Fills `bytes` from offset `at`.
    ///
    /// # Errors
    /// Any; the call that needs the page fails.
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Refuses writes above the process's file size limit (`RLIMIT_FSIZE`) before the system raises `SIGXFSZ`.
#[cfg(unix)]
impl PageStore for std::fs::File {
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
pub(super) fn open(dir: &Path) -> io::Result<Box<dyn PageStore>> {
    Ok(Box::new(files::nameless(dir)?))
}

/// Access by offset needs Unix.
#[cfg(not(unix))]
pub(super) fn open(_dir: &Path) -> io::Result<Box<dyn PageStore>> {
    Err(io::ErrorKind::Unsupported.into())
}
