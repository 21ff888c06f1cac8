//! Copies from the device to the host that the host waits for later.

use super::stream::{Event, Stream};
use crate::base::error::Error;
use crate::device::memory::{Memory, Pinned};
use std::sync::{Mutex, PoisonError};

/// A copy to pinned memory.
#[derive(Debug)]
pub struct PinnedCopy {
    host: Pinned,
    words: usize,
    /// After the copy.
    pub done: Event,
}

impl PinnedCopy {
    /// The words. Wait for `done` first.
    pub fn words(&self) -> &[u32] {
        &self.host.words()[..self.words]
    }
}

/// Buffers for reuse.
#[derive(Debug, Default)]
pub struct PinnedCopies {
    spare: Mutex<Vec<PinnedCopy>>,
    pub faults: Mutex<Vec<Memory>>,
}

impl PinnedCopies {
    /// Starts copies of bytes from several places; each starts at a word of the result.
    pub fn bring(&self, stream: &Stream, places: &[(u64, usize)]) -> Result<PinnedCopy, Error> {
        let all = places.iter().map(|(_, bytes)| bytes.div_ceil(4)).sum();
        let taken = {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = (0..spare.len()).filter(|i| spare[*i].host.room() >= all);
            let best = fits.min_by_key(|i| spare[*i].host.room());
            let best = best.or_else(|| (0..spare.len()).max_by_key(|i| spare[*i].host.room()));
            best.map(|i| spare.swap_remove(i))
        };
        let mut down = match taken {
            Some(down) => down,
            None => PinnedCopy { host: Pinned::default(), words: 0, done: Event::new()? },
        };
        let brought = down.bring(stream, places, all);
        if let Err(error) = brought {
            self.put_back(down);
            return Err(error);
        }
        Ok(down)
    }

    pub fn put_back(&self, down: PinnedCopy) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(down);
    }
}

impl PinnedCopy {
    fn bring(&mut self, stream: &Stream, places: &[(u64, usize)], all: usize) -> Result<(), Error> {
        // A copy whose result was not needed may still run.
        self.done.wait()?;
        let to = &mut self.host.reserve(all)?[..all];
        // SAFETY: `to` has the length of all places, and is not accessed before `done`.
        unsafe { stream.down(places.iter().copied(), to)? };
        self.words = all;
        Ok(self.done.record(stream)?)
    }
}
