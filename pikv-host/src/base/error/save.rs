//! Why a sequence could not be saved or restored.

use std::fmt;
use std::io;
use thiserror::Error;

/// What was done with a saved sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveOperation {
    /// Writing it.
    Write,
    /// Reading it.
    Read,
    /// Opening its file.
    Open,
}

impl fmt::Display for SaveOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SaveOperation::Write => "writing",
            SaveOperation::Read => "reading",
            SaveOperation::Open => "opening",
        })
    }
}

impl SaveError {
    /// That tokens of it were evicted.
    pub(crate) fn evicted() -> super::Error {
        SaveError::Part { why: "tokens were evicted, or left a window" }.into()
    }
}

/// Why a sequence could not be saved or restored. The cache and all sequences are as they were before the call.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The reader, the writer or the file system. A file that ends early is of kind
    /// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof).
    #[error("{operation} a saved sequence, at byte {at}: {kind}")]
    Io {
        /// What was done.
        operation: SaveOperation,
        /// Bytes that were read or written before.
        at: u64,
        /// What the system says.
        kind: io::ErrorKind,
    },
    /// The file of a saved sequence: one that could not be opened, or made, synced and put in the place of an older one.
    #[error("{operation} {path}: {kind}")]
    File {
        /// What was done.
        operation: SaveOperation,
        /// The file, as it was named.
        path: String,
        /// What the system says.
        kind: io::ErrorKind,
    },
    /// Bytes that no `Sequence::save` wrote.
    #[error("not a saved sequence: byte {at} of the header; {wanted} is needed there")]
    Header {
        /// The byte of the file.
        at: u64,
        /// What would have worked.
        wanted: String,
    },
    /// A format that came later.
    #[error(
        "a saved sequence of format version {found}; versions up to {newest} can be read: use a later version of pikv"
    )]
    Version {
        /// In the file.
        found: u64,
        /// The last one that can be read.
        newest: u64,
    },
    /// Another configuration.
    #[error(
        "{part}: this cache's differ from those of the sequence that was saved; restore it in a cache of the same configuration \
         (a saved sequence has a sum of its configuration only; Sequence::save takes a note that can say more)"
    )]
    Configuration {
        /// What differs: of what the configuration says.
        part: &'static str,
    },
    /// What was read is not what was written.
    #[error("the file says its sum is {found}, its contents have {actual}: it is damaged")]
    Sum {
        /// In the file.
        found: String,
        /// Of what was read.
        actual: String,
    },
    /// Contents that no sequence has.
    #[error("tensor {tensor:?}: {what}; the file is damaged")]
    Content {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// More bytes after the end of a saved sequence.
    #[error("a saved sequence of {bytes} bytes in a file of {file}")]
    TooLong {
        /// Bytes of the saved sequence.
        bytes: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// The first tokens of a saved sequence, which cannot be had to the bit without the others.
    #[error(
        "of a saved sequence no first tokens can be restored alone: {why}; restore all of it (Cache::restore)"
    )]
    Part {
        /// What stands in the way.
        why: &'static str,
    },
    /// A sequence that was saved without the routers of a loop.
    #[error(
        "a sequence that was saved alone (Sequence::save), without routers; restore it with Cache::restore"
    )]
    NoRouters,
    /// A sequence whose pages lie on ranks, or a cache over ranks.
    #[error("sequences of a cache over a fabric are neither saved nor restored: what ranks hold is theirs")]
    Fabric,
}
