//! Copies of lower tiers' pages to the device, on a stream of their own.

use crate::base::error::Error;
use crate::device::Device;
use crate::device::memory::{Memory, Pinned};
use crate::device::stream::Event;
use crate::device::upload_buffers::UploadBuffers;
use crate::tiers::StoredPage;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, PoisonError};

/// Pages on the device, or being copied to it; dropping it frees the memory for later pages.
#[derive(Debug)]
pub(crate) struct UploadedPages {
    /// Taken on drop.
    lift: Option<UploadBuffers>,
    /// Address of each page, by the address of its slot; slots are held so that their addresses stay unique.
    at: HashMap<usize, (Arc<StoredPage>, u64)>,
    device: Arc<Device>,
}

impl Device {
    /// Starts to copy pages to the device, each once.
    pub fn lift<'a>(
        self: &Arc<Self>,
        pages: impl Iterator<Item = (&'a Arc<StoredPage>, &'a [u32])>,
    ) -> Result<UploadedPages, Error> {
        self.enter()?;
        let (mut at, mut order, mut words) = (HashMap::new(), Vec::new(), 0);
        for (slot, page) in pages {
            if let Entry::Vacant(place) = at.entry(Arc::as_ptr(slot) as usize) {
                place.insert((slot.clone(), 4 * words as u64));
                words += page.len();
                order.push(page);
            }
        }
        let mut lifted = UploadedPages { lift: None, at, device: self.clone() };
        if words == 0 {
            return Ok(lifted);
        }
        let spare = {
            let mut spare = self.lifts.spare.lock().unwrap_or_else(PoisonError::into_inner);
            // If none is finished, the one used longest ago.
            let at = spare.iter().position(UploadBuffers::is_over).unwrap_or(0);
            (at < spare.len()).then(|| spare.remove(at))
        };
        let lift = match spare {
            Some(lift) => lift,
            None => UploadBuffers {
                host: Pinned::default(),
                memory: Memory::default(),
                done: Event::new()?,
                read: None,
            },
        };
        let UploadBuffers { host, memory, done, read } = lifted.lift.insert(lift);
        // A prefetch that was never used was never waited for.
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
        // SAFETY: source and target both have that length; the pinned words are not written again before `done`.
        unsafe { self.lifts.stream.up(to, &host[..words])? };
        done.record(&self.lifts.stream)?;
        lifted.at.values_mut().for_each(|(_, at)| *at += to);
        Ok(lifted)
    }
}

impl UploadedPages {
    /// Device address of a page, if it is among them.
    pub fn address(&self, slot: &Arc<StoredPage>) -> Option<u64> {
        self.at.get(&(Arc::as_ptr(slot) as usize)).map(|(_, at)| *at)
    }

    /// Makes later work on the device's stream wait for the copies.
    pub fn before(&self) -> Result<(), Error> {
        self.device.enter()?;
        if let Some(UploadBuffers { done, .. }) = &self.lift {
            done.before(&self.device.stream)?;
        }
        Ok(())
    }
}

impl Drop for UploadedPages {
    fn drop(&mut self) {
        let _ = self.device.enter();
        let Some(mut lift) = self.lift.take() else { return };
        // All its readers are launched. If that cannot be recorded, the memory is freed, and the driver waits for them.
        let read = lift.read.take().map_or_else(Event::new, Ok);
        if let Ok(read) = read.and_then(|read| read.record(&self.device.stream).map(|()| read)) {
            lift.read = Some(read);
            self.device.lifts.spare.lock().unwrap_or_else(PoisonError::into_inner).push(lift);
        }
    }
}
