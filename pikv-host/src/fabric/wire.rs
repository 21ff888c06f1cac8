//! Messages between ranks: little-endian words of 32 bits.
//!
//! ```text
//! magic, version, kind, session (2), call (2), then by kind
//! hello    fingerprint (2)                    -> status, fingerprint (2)
//! work     freed pages, tokens, whole pages, pages that must be there, pages that are wanted, questions
//!                                             -> status, bytes (2), pages (2), nanoseconds (2), the pages wanted, the partial results
//! bye      whether a rank was lost            -> no answer
//! ```
//! Lists begin with their length. An answer has the kind, session and call of its message; others are ignored.

use crate::base::error::FabricError;
use pikv_core::page::{Layout, PAGE};

/// The first word of every message.
pub const MAGIC: u32 = u32::from_le_bytes(*b"pikv");

/// Version of the messages, raised with every change.
pub const VERSION: u32 = 4;

/// Set in the length of a page for which only room is requested: no words follow.
pub const ROOM: u32 = 1 << 31;

/// Words of a message's header.
pub const HEADER: usize = 7;

/// The kinds of messages.
pub mod kind {
    pub const HELLO: u32 = 1;
    pub const WORK: u32 = 2;
    pub const BYE: u32 = 3;
}

/// The status of an answer.
mod status {
    pub const DONE: u32 = 0;
    pub const BUDGET: u32 = 1;
    pub const MEMORY: u32 = 2;
    pub const MISSING: u32 = 3;
    pub const MALFORMED: u32 = 4;
    pub const VERSION: u32 = 5;
    pub const DEVICE: u32 = 6;
}

/// Options of a question, a bit each.
pub mod flag {
    /// The weight of every token is wanted too.
    pub const RAW: u32 = 1;
    /// The pages are packed by the head's codec.
    pub const PACKED: u32 = 2;
    /// One partial result for all blocks.
    pub const FAST: u32 = 4;
    /// Logits are capped.
    pub const CAPPED: u32 = 8;
}

/// A refusal by a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Budget { needed: u64, available: u64 },
    Memory { bytes: u64 },
    Missing { page: u64 },
    Malformed,
    Version,
    Device { code: u32, lost: bool },
}

impl Refusal {
    pub fn write(self, out: &mut Vec<u32>) {
        let (status, a, b) = match self {
            Refusal::Budget { needed, available } => (status::BUDGET, needed, available),
            Refusal::Memory { bytes } => (status::MEMORY, bytes, 0),
            Refusal::Missing { page } => (status::MISSING, page, 0),
            Refusal::Malformed => (status::MALFORMED, 0, 0),
            Refusal::Version => (status::VERSION, u64::from(VERSION), 0),
            Refusal::Device { code, lost } => (status::DEVICE, u64::from(code), u64::from(lost)),
        };
        out.push(status);
        push_u64(out, a);
        push_u64(out, b);
    }
}

/// An empty message of a kind.
pub fn message(kind: u32, session: u64, call: u64) -> Vec<u32> {
    let mut out = vec![MAGIC, VERSION, kind];
    push_u64(&mut out, session);
    push_u64(&mut out, call);
    out
}

/// Appends the status of success.
pub fn done(out: &mut Vec<u32>) {
    out.push(status::DONE);
}

pub fn push_u64(out: &mut Vec<u32>, x: u64) {
    out.extend([x as u32, (x >> 32) as u32]);
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub version: u32,
    pub kind: u32,
    pub session: u64,
    pub call: u64,
}

/// A message that is being read.
#[derive(Clone)]
pub struct Reader<'a> {
    words: &'a [u32],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(words: &'a [u32]) -> Reader<'a> {
        Reader { words, at: 0 }
    }

    /// Words read so far.
    pub fn at(&self) -> usize {
        self.at
    }

    pub fn word(&mut self) -> Option<u32> {
        let word = self.words.get(self.at)?;
        self.at += 1;
        Some(*word)
    }

    pub fn u64(&mut self) -> Option<u64> {
        let [low, high] = *self.words(2)?.first_chunk()?;
        Some(u64::from(low) | u64::from(high) << 32)
    }

    pub fn words(&mut self, n: usize) -> Option<&'a [u32]> {
        let words = self.words.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(words)
    }

    pub fn header(&mut self) -> Option<Header> {
        let magic = self.word()?;
        let version = self.word()?;
        let version = if magic == MAGIC { version } else { 0 };
        Some(Header { version, kind: self.word()?, session: self.u64()?, call: self.u64()? })
    }

    /// Reads the status of an answer.
    pub fn status(&mut self, rank: u32) -> Result<(), FabricError> {
        let malformed = FabricError::Malformed { rank, what: "an answer is cut off" };
        let word = self.word().ok_or(malformed.clone())?;
        if word == status::DONE {
            return Ok(());
        }
        let (Some(a), Some(b)) = (self.u64(), self.u64()) else { return Err(malformed) };
        Err(match word {
            status::BUDGET => FabricError::Budget { rank, needed: a, available: b },
            status::MEMORY => FabricError::Memory { rank, bytes: a },
            status::MISSING => FabricError::Missing { rank, page: a },
            status::VERSION => FabricError::Version { rank, theirs: a as u32, ours: VERSION },
            status::DEVICE => FabricError::Device { rank, code: a as u32, lost: b != 0 },
            _ => FabricError::Malformed { rank, what: "what it was sent" },
        })
    }
}

/// Words of a token of a page in a message: its position, key and value.
pub fn token_words(layout: &Layout) -> usize {
    1 + (layout.k_rows() + layout.v_stride()) as usize
}

/// Appends the token at `lane` of a page, in the head's dtype.
pub fn push_token(layout: &Layout, page: &[u32], lane: u32, out: &mut Vec<u32>) {
    let rows = layout.v_base() as usize;
    out.extend(page[..rows].iter().skip(lane as usize).step_by(PAGE as usize));
    let stride = layout.v_stride() as usize;
    out.extend_from_slice(&page[rows + lane as usize * stride..][..stride]);
}

/// Writes the words of [`push_token`] to a lane.
pub fn place_token(layout: &Layout, token: &[u32], page: &mut [u32], lane: u32) {
    let rows = layout.v_base() as usize;
    let column = page[..rows].iter_mut().skip(lane as usize).step_by(PAGE as usize);
    column.zip(token).for_each(|(to, from)| *to = *from);
    let stride = layout.v_stride() as usize;
    page[rows + lane as usize * stride..][..stride].copy_from_slice(&token[token.len() - stride..]);
}
