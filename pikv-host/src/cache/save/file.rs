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

/// What a file is made or opened by failed.
struct Failed(Error);

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Failed {
        Failed(SaveError::Io { operation: SaveOperation::File, at: 0, kind: error.kind() }.into())
    }
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
    /// Those of [`Sequence::save`]; [`SaveError::Io`] with what the file system says, or
    /// [`FileTooLarge`](io::ErrorKind::FileTooLarge) where the file would pass the size that the process may give one (`RLIMIT_FSIZE`). What is at
    /// `path` stays, unless it is the directory that could not be synced.
    #[cfg(feature = "save")]
    pub fn save_file(&self, note: &[u8], path: &Path) -> Result<u64, Error> {
        let write = |file: &mut Private| {
            let mut buffered = BufWriter::with_capacity(BUFFER, file);
            self.save(note, &mut buffered).map_err(Failed)
        };
        files::replace(path, Readers::Owner, write).map_err(|Failed(error)| error)
    }
}

impl Cache {
    /// [`Cache::restore`] from a file, which holds one saved sequence and nothing behind it.
    ///
    /// # Errors
    /// Those of [`Cache::restore`]; [`SaveError::Io`] for a file that is not there, [`SaveError::TooLong`].
    #[cfg(feature = "save")]
    pub fn restore_file(&self, path: &Path) -> Result<Restored, Error> {
        let open = || -> Result<(File, u64), Failed> {
            let file = File::open(path)?;
            let bytes = file.metadata()?.len();
            Ok((file, bytes))
        };
        let (file, all) = open().map_err(|Failed(error)| error)?;
        let restored = self.restore(&mut BufReader::with_capacity(BUFFER, file))?;
        if all > restored.bytes {
            return Err(SaveError::TooLong { bytes: restored.bytes, file: all }.into());
        }
        Ok(restored)
    }
}
