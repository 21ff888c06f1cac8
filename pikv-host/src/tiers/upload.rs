//! Pages of lower tiers on their way up to the device: on a stream of their own, beside the work that is under way.

use crate::base::error::Error;
use crate::device::Device;
use crate::device::lifts::Lift;
use crate::device::memory::{Memory, Pinned};
use crate::device::stream::Moment;
use crate::tiers::Stored;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, PoisonError};

/// Pages on the device, or on their way there. Dropped, its memory takes the next ones.
#[derive(Debug)]
pub(crate) struct Lifted {
    /// Emptied on drop.
    lift: Option<Lift>,
    /// Each page where it lies, by where its slot does; the slots are held, so that no other takes the place of one.
    at: HashMap<usize, (Arc<Stored>, u64)>,
    device: Arc<Device>,
}

impl Device {
    /// Starts to bring up pages, each once.
    pub fn lift<'a>(
        self: &Arc<Self>,
        pages: impl Iterator<Item = (&'a Arc<Stored>, &'a [u32])>,
    ) -> Result<Lifted, Error> {
        self.enter()?;
        let (mut at, mut order, mut words) = (HashMap::new(), Vec::new(), 0);
        for (slot, page) in pages {
            if let Entry::Vacant(place) = at.entry(Arc::as_ptr(slot) as usize) {
                place.insert((slot.clone(), 4 * words as u64));
                words += page.len();
                order.push(page);
            }
        }
        let mut lifted = Lifted { lift: None, at, device: self.clone() };
        if words == 0 {
            return Ok(lifted);
        }
        let spare = {
            let mut spare = self.lifts.spare.lock().unwrap_or_else(PoisonError::into_inner);
            // Else the one that was used longest ago.
            let at = spare.iter().position(Lift::is_over).unwrap_or(0);
            (at < spare.len()).then(|| spare.remove(at))
        };
        let lift = match spare {
            Some(lift) => lift,
            None => {
                Lift { host: Pinned::default(), memory: Memory::default(), done: Moment::new()?, read: None }
            }
        };
        let Lift { host, memory, done, read } = lifted.lift.insert(lift);
        // Nobody waited for what was not wanted in the end.
        done.wait()?;
        if let Some(read) = read {
            if memory.bytes() < 4 * words as u64 {
                read.wait()?;
            }
            read.before(&self.lifts.stream)?;
        }
        let to = memory.reserve(4 * words as u64, &self.lifts.stream)?;
        let host = host.reserve(words)?;
        let mut rest = &mut host[..words];
        for page in order {
            let (place, after) = rest.split_at_mut(page.len());
            place.copy_from_slice(page);
            rest = after;
        }
        // SAFETY: both are that long; the pinned words are not touched again before `done`.
        unsafe { self.lifts.stream.up(to, &host[..words])? };
        done.record(&self.lifts.stream)?;
        lifted.at.values_mut().for_each(|(_, at)| *at += to);
        Ok(lifted)
    }
}

impl Lifted {
    /// Where a page lies, if it is among them.
    pub fn address(&self, slot: &Arc<Stored>) -> Option<u64> {
        self.at.get(&(Arc::as_ptr(slot) as usize)).map(|(_, at)| *at)
    }

    /// Has what is asked of the device from here on wait until they are there.
    pub fn before(&self) -> Result<(), Error> {
        self.device.enter()?;
        if let Some(Lift { done, .. }) = &self.lift {
            done.before(&self.device.stream)?;
        }
        Ok(())
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        let _ = self.device.enter();
        let Some(mut lift) = self.lift.take() else { return };
        // All reads of it have been launched. If that cannot be recorded it is freed, and the driver waits for its readers.
        let read = lift.read.take().map_or_else(Moment::new, Ok);
        if let Ok(read) = read.and_then(|read| read.record(&self.device.stream).map(|()| read)) {
            lift.read = Some(read);
            self.device.lifts.spare.lock().unwrap_or_else(PoisonError::into_inner).push(lift);
        }
    }
}
