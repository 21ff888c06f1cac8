//! Names of runs, pages and blocks of a head.

use pikv_core::attend::BLOCK;
use std::fmt;

/// A run of pages of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Place {
    /// First positions, in every sliding window.
    Sinks,
    /// Tokens outside the ring, in the run with this number. Where each expert has a run of its own, it is that of the tokens with this
    /// home expert; `Cache::run_of` returns the run of an expert that shares.
    Run(u16),
    /// Newest tokens, by position.
    Ring,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Sinks => f.write_str("the sinks"),
            Place::Run(e) => write!(f, "run {e}"),
            Place::Ring => f.write_str("the ring"),
        }
    }
}

/// A page of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId {
    /// Run of the page.
    pub place: Place,
    /// Index in the run; eviction leaves gaps.
    pub ordinal: u32,
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {} of {}", self.ordinal, self.place)
    }
}

/// The name of run `c` of a head: 0 for the sinks, `1 + e` for run `e`.
pub(crate) fn run_place(c: usize) -> Place {
    match c.checked_sub(1) {
        None => Place::Sinks,
        Some(e) => Place::Run(e as u16),
    }
}

/// The block that a page of a run belongs to.
pub(crate) const fn block_of(ordinal: u32) -> u32 {
    ordinal / BLOCK as u32
}
