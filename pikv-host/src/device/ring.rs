//! Uploads to the device, through a ring of pinned memory on the host and one of device memory.

use crate::base::error::CudaError;
use crate::base::error::Error;
use crate::base::host_slice::HostSlice;
use crate::device::memory::{Memory, Pinned};
use crate::device::stream::{Event, Stream};
use std::collections::VecDeque;

/// Alignment of a section of an upload, in bytes.
const ALIGN: usize = 16;
/// Number of uploads of the largest size seen that fit in the ring.
const UPLOADS: usize = 64;
/// Words of the ring: at least 64 KiB; at most 64 MiB, unless a larger upload needs room for two.
const LEAST: usize = 16 << 10;
const MOST: usize = 16 << 20;

/// A list of an upload.
#[derive(Clone, Copy)]
enum Section<'a> {
    Bytes(&'a [u8]),
    /// Sent as f32.
    Wide(HostSlice<'a>),
}

/// Lists that are uploaded together.
pub struct Upload<'a> {
    sections: Vec<Section<'a>>,
    words: usize,
}

impl<'a> Upload<'a> {
    pub fn new() -> Upload<'a> {
        Upload { sections: Vec::new(), words: 0 }
    }

    /// Adds a list; returns its offset in bytes.
    pub fn add<T: bytemuck::NoUninit>(&mut self, list: &'a [T]) -> u64 {
        let bytes: &[u8] = bytemuck::cast_slice(list);
        self.push(Section::Bytes(bytes), bytes.len())
    }

    /// Adds elements as f32; returns their offset in bytes.
    pub fn add_wide(&mut self, list: HostSlice<'a>) -> u64 {
        self.push(Section::Wide(list), 4 * list.len())
    }

    fn push(&mut self, section: Section<'a>, bytes: usize) -> u64 {
        let at = self.words as u64 * 4;
        self.sections.push(section);
        self.words += bytes.next_multiple_of(ALIGN) / 4;
        at
    }
}

/// Uploads in flight: the stream copies words of `host` later, and until then they are not written. Offsets in words count on over all
/// rounds.
#[derive(Debug, Default)]
pub struct Ring {
    host: Pinned,
    device: Memory,
    /// Words, a power of two.
    room: usize,
    next: usize,
    /// Copies in flight, in the order of the stream: first word, and the event after the copy.
    sent: VecDeque<(usize, Event)>,
    spare: Vec<Event>,
}

impl Ring {
    /// Allocates words that no copy reads; returns the first. Waits only if copies of the last round still read them.
    fn take(&mut self, words: usize, stream: &Stream) -> Result<usize, Error> {
        let words = words.next_multiple_of(ALIGN / 4);
        let wanted = (words * UPLOADS).clamp(LEAST, MOST).max(2 * words).next_power_of_two();
        if self.room < wanted {
            stream.synchronize()?;
            self.spare.extend(self.sent.drain(..).map(|(_, event)| event));
            (self.room, self.next) = (0, 0);
            self.device.reserve(wanted as u64 * 4, stream)?;
            self.host.reserve(wanted)?;
            self.room = wanted;
        }
        // Retires two copies for each new one, so the list stays short.
        for _ in 0..2 {
            if let Some((_, event)) = self.sent.front()
                && event.passed()?
            {
                self.spare.extend(self.sent.pop_front().map(|(_, event)| event));
            }
        }
        let left = self.room - self.next % self.room;
        let first = if left < words { self.next + left } else { self.next };
        while let Some((oldest, event)) = self.sent.front()
            && oldest + self.room < first + words
        {
            event.wait()?;
            self.spare.extend(self.sent.pop_front().map(|(_, event)| event));
        }
        self.next = first + words;
        Ok(first)
    }

    /// Words from `first` on.
    fn words(&mut self, first: usize, words: usize) -> Result<&mut [u32], Error> {
        let at = first % self.room;
        Ok(&mut self.host.reserve(self.room)?[at..at + words])
    }

    /// Records an event after the copies from `first` on.
    fn guard(&mut self, first: usize, stream: &Stream) -> Result<(), CudaError> {
        let event = self.spare.pop().map_or_else(Event::new, Ok)?;
        event.record(stream)?;
        self.sent.push_back((first, event));
        Ok(())
    }

    /// Copies words to their addresses.
    pub fn write(&mut self, stream: &Stream, targets: &[(u64, &[u32])]) -> Result<(), Error> {
        let all = targets.iter().map(|(_, words)| words.len()).sum();
        let first = self.take(all, stream)?;
        let mut rest = self.words(first, all)?;
        for (to, words) in targets {
            let (host, after) = rest.split_at_mut(words.len());
            host.copy_from_slice(words);
            rest = after;
            // SAFETY: the caller's targets have the length of the words; the pinned words are not written again before they are copied.
            unsafe { stream.up(*to, host)? };
        }
        Ok(self.guard(first, stream)?)
    }

    /// Uploads lists; returns the address of the first.
    pub fn send(&mut self, stream: &Stream, upload: &Upload<'_>) -> Result<u64, Error> {
        let words = upload.words.max(1);
        let first = self.take(words, stream)?;
        let to = self.device.address() + (first % self.room * 4) as u64;
        let host = self.words(first, words)?;
        let mut rest = &mut host[..];
        for section in &upload.sections {
            let bytes = match section {
                Section::Bytes(bytes) => bytes.len(),
                Section::Wide(list) => 4 * list.len(),
            };
            let (to, after) = rest.split_at_mut(bytes.next_multiple_of(ALIGN) / 4);
            match section {
                Section::Bytes(list) => {
                    bytemuck::cast_slice_mut::<u32, u8>(to)[..bytes].copy_from_slice(list)
                }
                Section::Wide(list) => list.widen(&mut bytemuck::cast_slice_mut(to)[..list.len()]),
            }
            rest = after;
        }
        // SAFETY: both have `words` words. The pinned words are not written again before they are copied, and kernels that read the old
        // content of the device's words come before the copy in the stream.
        unsafe { stream.up(to, host)? };
        self.guard(first, stream)?;
        Ok(to)
    }
}
