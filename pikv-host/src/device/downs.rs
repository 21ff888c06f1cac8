//! Words on their way down from the device, that the host waits for later.

use super::stream::{Moment, Stream};
use crate::base::error::Error;
use crate::device::memory::{Memory, Pinned};
use std::sync::{Mutex, PoisonError};

/// Words on their way down to pinned memory.
#[derive(Debug)]
pub struct Down {
    host: Pinned,
    words: usize,
    /// After the copy.
    pub done: Moment,
}

impl Down {
    /// Once it has passed.
    pub fn words(&self) -> &[u32] {
        &self.host.words()[..self.words]
    }
}

/// What may be used again.
#[derive(Debug, Default)]
pub struct Downs {
    spare: Mutex<Vec<Down>>,
    pub faults: Mutex<Vec<Memory>>,
}

impl Downs {
    /// Starts to bring bytes down from several places, one after the other, each in words of its own.
    pub fn bring(&self, stream: &Stream, places: &[(u64, usize)]) -> Result<Down, Error> {
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
            None => Down { host: Pinned::default(), words: 0, done: Moment::new()? },
        };
        let brought = down.bring(stream, places, all);
        if let Err(error) = brought {
            self.put_back(down);
            return Err(error);
        }
        Ok(down)
    }

    pub fn put_back(&self, down: Down) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(down);
    }
}

impl Down {
    fn bring(&mut self, stream: &Stream, places: &[(u64, usize)], all: usize) -> Result<(), Error> {
        // Nobody waited for what was not wanted in the end.
        self.done.wait()?;
        let to = &mut self.host.reserve(all)?[..all];
        // SAFETY: as long as all places, and nobody reads or writes there before `done`.
        unsafe { stream.down(places.iter().copied(), to)? };
        self.words = all;
        Ok(self.done.record(stream)?)
    }
}
