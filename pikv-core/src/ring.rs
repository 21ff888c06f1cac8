//! The ring: the newest tokens of a sequence, and when they leave it.
//!
//! Pure arithmetic on positions, shared by host and device. A token at position `p` lies in tile `p / 32`, lane
//! `p % 32`, whatever the capacity, so the order in which a ring is read does not depend on when it wrapped.

use crate::page::{PAGE, Position, Resident};
use core::ops::Range;

/// A ring of the newest `window` tokens, which keeps `slack` more of them for rollback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    window: u32,
    slack: u32,
}

impl Ring {
    /// `None` if the window is 0 or window and slack together pass [`Position::MAX`].
    pub const fn new(window: u32, slack: u32) -> Option<Ring> {
        if window == 0 || window as u64 + slack as u64 > Position::MAX.0 as u64 {
            return None;
        }
        Some(Ring { window, slack })
    }

    /// Tokens of the ring that a row sees, itself included.
    pub const fn window(&self) -> u32 {
        self.window
    }

    /// Largest rollback of a sequence, in tokens.
    pub const fn slack(&self) -> u32 {
        self.slack
    }

    /// Tokens that have left the ring of a sequence of `len` tokens: positions `0..left(len)`.
    pub const fn left(&self, len: u32) -> u32 {
        len.saturating_sub(self.window)
    }

    /// First position whose bytes are still in the ring's tiles, for rollback.
    pub const fn kept_from(&self, len: u32) -> u32 {
        len.saturating_sub(self.window + self.slack)
    }

    /// Tokens in the ring.
    pub const fn resident(&self, len: u32) -> Resident {
        Resident(if len < self.window { len } else { self.window })
    }

    /// Tiles that hold `kept_from(from)..to`: the ring of a sequence that grows from `from` to `to` tokens.
    pub const fn tiles(&self, from: u32, to: u32) -> Range<u32> {
        self.kept_from(from) / PAGE..to.div_ceil(PAGE)
    }

    /// Tiles of a sequence of `len` tokens.
    pub const fn pages(&self, len: u32) -> u32 {
        let tiles = self.tiles(len, len);
        tiles.end.saturating_sub(tiles.start)
    }
}
