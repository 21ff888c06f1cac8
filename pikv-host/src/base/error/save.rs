//! Errors of saving and restoring sequences.

use std::fmt;
use std::io;
use thiserror::Error;

/// An operation on a saved sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SaveOperation {
    /// Write the sequence.
    Write,
    /// Read the sequence.
    Read,
    /// Open the file.
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
    /// The error of a saved part whose tokens were evicted, or left a window.
    pub(crate) fn evicted() -> super::Error {
        SaveError::Part { why: "tokens were evicted, or left a window" }.into()
    }
}

/// Why a sequence could not be saved or restored. The cache and all sequences are unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// Error of the reader, the writer or the file system. A file that ends early gives
    /// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof).
    #[error("{operation} a saved sequence, at byte {at}: {kind}")]
    Io {
        /// The operation that failed.
        operation: SaveOperation,
        /// Bytes read or written before.
        at: u64,
        /// Error kind of the system.
        kind: io::ErrorKind,
    },
    /// The file could not be opened, or not created, synced or renamed over the older file.
    #[error("{operation} {path}: {kind}")]
    File {
        /// The operation that failed.
        operation: SaveOperation,
        /// Path as given.
        path: String,
        /// Error kind of the system.
        kind: io::ErrorKind,
    },
    /// The header is not that of a saved sequence.
    #[error("not a saved sequence: byte {at} of the header; {wanted} is needed there")]
    Header {
        /// Offset in the file, in bytes.
        at: u64,
        /// Accepted content.
        wanted: String,
    },
    /// The format is newer than this version of pikv reads.
    #[error(
        "a saved sequence of format version {found}; versions up to {newest} can be read: use a later version of pikv"
    )]
    Version {
        /// Version in the file.
        found: u64,
        /// Newest version that can be read.
        newest: u64,
    },
    /// The sequence was saved with another configuration.
    #[error(
        "{part}: this cache's differ from those of the sequence that was saved; restore it in a cache of the same configuration \
         (a saved sequence has a sum of its configuration only; Sequence::save takes a note that can say more)"
    )]
    Configuration {
        /// Part of the configuration that differs.
        part: &'static str,
    },
    /// The contents do not match the checksum in the file.
    #[error("the file says its sum is {found}, its contents have {actual}: it is damaged")]
    Sum {
        /// Checksum in the file.
        found: String,
        /// Checksum of the contents.
        actual: String,
    },
    /// Contents that no sequence can have.
    #[error("tensor {tensor:?}: {what}; the file is damaged")]
    Content {
        /// The tensor.
        tensor: String,
        /// Reason.
        what: &'static str,
    },
    /// The file has more bytes than the saved sequence.
    #[error("a saved sequence of {bytes} bytes in a file of {file}")]
    TooLong {
        /// Bytes of the saved sequence.
        bytes: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// The first tokens of a saved sequence, which cannot be restored to the bit without the others.
    #[error(
        "of a saved sequence no first tokens can be restored alone: {why}; restore all of it (Cache::restore)"
    )]
    Part {
        /// Reason.
        why: &'static str,
    },
    /// The sequence was saved alone, without the routers of a loop.
    #[error(
        "a sequence that was saved alone (Sequence::save), without routers; restore it with Cache::restore"
    )]
    NoRouters,
    /// Save or restore in a cache over a fabric.
    #[error("sequences of a cache over a fabric are neither saved nor restored: what ranks hold is theirs")]
    Fabric,
}
