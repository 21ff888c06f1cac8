//! Saved sequences in files.

use super::Restored;
use crate::base::error::{Error, SaveError, SaveOperation};
use crate::base::files::{self, Private, Readers};
use crate::cache::Cache;
use crate::cache::sequence::Sequence;
use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::Path;

/// Bytes that are read or written at a time, beside pages that are larger.
const BUFFER: usize = 1 << 18;

/// What making a file failed by.
enum Failed<E> {
    File(io::ErrorKind),
    Save(E),
}

impl<E> From<io::Error> for Failed<E> {
    fn from(error: io::Error) -> Failed<E> {
        Failed::File(error.kind())
    }
}

/// Has `save` write the file at `path`, which is the old one or the whole new one at any time.
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

/// Has `restore` read the file at `path`, which has nothing behind what it reads.
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

/// That a file cannot be opened or made.
fn refused(operation: SaveOperation, path: &Path, kind: io::ErrorKind) -> Error {
    SaveError::File { operation, path: path.display().to_string(), kind }.into()
}

impl Sequence {
    /// [`Sequence::save`] to a file, in one piece: under a random name beside `path`, synced, and then in the place of what is at `path`. A
    /// process that is killed, or a machine that loses power, leaves the old file or the new one; the next save to `path` removes what
    /// killed ones left (`NAME.0123456789abcdef.part`). Only its owner can read the file (mode 0600), also where it takes another's
    /// place. Pages go to the file one by one, without a second copy of the sequence in memory. Returns the file's bytes.
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
    /// Those of [`Sequence::save`]; [`SaveError::File`] with what the file system says; [`SaveError::Io`] of kind
    /// [`FileTooLarge`](io::ErrorKind::FileTooLarge) where the file would pass the size that the process may give one (`RLIMIT_FSIZE`). What is at
    /// `path` stays, unless it is the directory that could not be synced.
    pub fn save_file(&self, note: &[u8], path: impl AsRef<Path>) -> Result<u64, Error> {
        write_file(path.as_ref(), |to| self.save(note, to))
    }
}

impl Cache {
    /// [`Cache::restore`] from a file, which holds one saved sequence and nothing behind it.
    ///
    /// # Errors
    /// Those of [`Cache::restore`]; [`SaveError::File`] for a file that is not there, [`SaveError::TooLong`].
    pub fn restore_file(&self, path: impl AsRef<Path>) -> Result<Restored, Error> {
        read_file(path.as_ref(), |from| self.restore(from))
    }
}
