//! Saved sequences in files.

use super::Restored;
use crate::base::error::{Error, SaveError, SaveOperation};
use crate::base::files::{self, Private, Readers};
use crate::cache::Cache;
use crate::cache::sequence::Sequence;
use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::Path;

/// Bytes read or written at a time; larger pages are read and written whole.
const BUFFER: usize = 1 << 18;

/// Error while a file is written: by the file or by the caller.
enum Failed<E> {
    File(io::ErrorKind),
    Save(E),
}

impl<E> From<io::Error> for Failed<E> {
    fn from(error: io::Error) -> Failed<E> {
        Failed::File(error.kind())
    }
}

/// Makes `save` write the file at `path` atomically: a crash leaves the old file or the whole new one.
pub(crate) fn write_file<E: From<Error>>(
    path: &Path,
    save: impl FnOnce(&mut BufWriter<&mut Private>) -> Result<u64, E>,
) -> Result<u64, E> {
    let write = |file: &mut Private| save(&mut BufWriter::with_capacity(BUFFER, file)).map_err(Failed::Save);
    files::replace(path, Readers::Owner, write).map_err(|failed| match failed {
        Failed::File(kind) => refused(SaveOperation::Write, path, kind).into(),
        Failed::Save(error) => error,
    })
}

/// Makes `restore` read the file at `path`; it is an error if bytes are left.
pub(crate) fn read_file<E: From<Error>>(
    path: &Path,
    restore: impl FnOnce(&mut BufReader<File>) -> Result<Restored, E>,
) -> Result<Restored, E> {
    let failed = |error: io::Error| refused(SaveOperation::Open, path, error.kind());
    let file = File::open(path).map_err(failed)?;
    let all = file.metadata().map_err(failed)?.len();
    let restored = restore(&mut BufReader::with_capacity(BUFFER, file))?;
    if all > restored.bytes {
        return Err(Error::from(SaveError::TooLong { bytes: restored.bytes, file: all }).into());
    }
    Ok(restored)
}

/// Error for a file that cannot be opened or created.
fn refused(operation: SaveOperation, path: &Path, kind: io::ErrorKind) -> Error {
    SaveError::File { operation, path: path.display().to_string(), kind }.into()
}

impl Sequence {
    /// [`Sequence::save`] to a file, atomically: it is written under a random name beside `path`, synced, and renamed to `path`. If the
    /// process is killed or the machine loses power, the old file or the new one is left; the next save to `path` removes leftovers of
    /// killed saves (`NAME.0123456789abcdef.part`). Only the owner can read the file (mode 0600), even if it replaces a file with other
    /// permissions. Pages are written one by one, without a second copy of the sequence in memory. Returns the bytes of the file.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let cache = Cache::new(CacheConfig::new(vec![LayerShape::new(1, 2, 4, Dtype::F32)], 1 << 20))?;
    /// let path = std::env::temp_dir().join(format!("chat-{}.safetensors", std::process::id()));
    /// let bytes = cache.sequence().save_file(b"", &path)?;
    /// assert_eq!(cache.restore_file(&path)?.bytes, bytes);
    /// # std::fs::remove_file(&path).expect("it was there");
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Sequence::save`]; [`SaveError::File`] for an error of the file system; [`SaveError::Io`] of kind
    /// [`FileTooLarge`](io::ErrorKind::FileTooLarge) if the file would exceed the process's limit (`RLIMIT_FSIZE`). The file at `path` is
    /// unchanged then, unless only the sync of the directory failed.
    pub fn save_file(&self, note: &[u8], path: impl AsRef<Path>) -> Result<u64, Error> {
        write_file(path.as_ref(), |to| self.save(note, to))
    }
}

impl Cache {
    /// [`Cache::restore`] from a file, which must hold one saved sequence and nothing after it.
    ///
    /// # Errors
    /// The errors of [`Cache::restore`]; [`SaveError::File`] if the file cannot be opened, [`SaveError::TooLong`].
    pub fn restore_file(&self, path: impl AsRef<Path>) -> Result<Restored, Error> {
        read_file(path.as_ref(), |from| self.restore(from))
    }
}
