//! The way up: pinned memory of the host that lists go through, round and round, and the memory of the device where they lie.

use crate::base::error::CudaError;
use crate::base::error::Error;
use crate::base::host_slice::HostSlice;
use crate::device::memory::{Memory, Pinned};
use crate::device::stream::{Moment, Stream};
use std::collections::VecDeque;

/// Bytes that a section of an upload is aligned to.
const ALIGN: usize = 16;
/// Uploads of the largest size seen that the ring has room for.
const UPLOADS: usize = 64;
/// Words that it takes at least, 64 KiB, and for that at most, 64 MiB. For a single upload there is room twice.
const LEAST: usize = 16 << 10;
const MOST: usize = 16 << 20;

/// A list.
#[derive(Clone, Copy)]
enum Section<'a> {
    Bytes(&'a [u8]),
    /// Sent in f32.
    Wide(HostSlice<'a>),
}

/// Lists that are sent together.
pub struct Upload<'a> {
    sections: Vec<Section<'a>>,
    words: usize,
}

impl<'a> Upload<'a> {
    pub fn new() -> Upload<'a> {
        Upload { sections: Vec::new(), words: 0 }
    }

    /// Adds a list; where it will lie, from the start of all.
    pub fn add<T: bytemuck::NoUninit>(&mut self, list: &'a [T]) -> u64 {
        let bytes: &[u8] = bytemuck::cast_slice(list);
        self.push(Section::Bytes(bytes), bytes.len())
    }

    /// Adds elements in f32; where they will lie, from the start of all.
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

/// What is written once is copied by the stream later; until then nobody writes there. Places are counted on and on, in words.
#[derive(Debug, Default)]
pub struct Ring {
    host: Pinned,
    device: Memory,
    /// Words, a power of two.
    room: usize,
    next: usize,
    /// Copies that may be under way, in the order of the stream: where each begins, and the moment after it.
    sent: VecDeque<(usize, Moment)>,
    spare: Vec<Moment>,
}

impl Ring {
    /// So many words that nothing is copied from; where they begin. Waits where the copies before the last round are still under way.
    fn take(&mut self, words: usize, stream: &Stream) -> Result<usize, Error> {
        let words = words.next_multiple_of(ALIGN / 4);
        let wanted = (words * UPLOADS).clamp(LEAST, MOST).max(2 * words).next_power_of_two();
        if self.room < wanted {
            stream.synchronize()?;
            self.spare.extend(self.sent.drain(..).map(|(_, moment)| moment));
            (self.room, self.next) = (0, 0);
            self.device.reserve(wanted as u64 * 4, stream)?;
            self.host.reserve(wanted)?;
            self.room = wanted;
        }
        // What has passed is taken away as fast as it comes.
        for _ in 0..2 {
            if let Some((_, moment)) = self.sent.front()
                && moment.passed()?
            {
                self.spare.extend(self.sent.pop_front().map(|(_, moment)| moment));
            }
        }
        let left = self.room - self.next % self.room;
        let first = if left < words { self.next + left } else { self.next };
        while let Some((oldest, moment)) = self.sent.front()
            && oldest + self.room < first + words
        {
            moment.wait()?;
            self.spare.extend(self.sent.pop_front().map(|(_, moment)| moment));
        }
        self.next = first + words;
        Ok(first)
    }

    /// Words from a place on.
    fn words(&mut self, first: usize, words: usize) -> Result<&mut [u32], Error> {
        let at = first % self.room;
        Ok(&mut self.host.reserve(self.room)?[at..at + words])
    }

    /// Guards what was copied from a place on.
    fn guard(&mut self, first: usize, stream: &Stream) -> Result<(), CudaError> {
        let moment = self.spare.pop().map_or_else(Moment::new, Ok)?;
        moment.record(stream)?;
        self.sent.push_back((first, moment));
        Ok(())
    }

    /// Writes words to where they belong.
    pub fn write(&mut self, stream: &Stream, targets: &[(u64, &[u32])]) -> Result<(), Error> {
        let all = targets.iter().map(|(_, words)| words.len()).sum();
        let first = self.take(all, stream)?;
        let mut rest = self.words(first, all)?;
        for (to, words) in targets {
            let (host, after) = rest.split_at_mut(words.len());
            host.copy_from_slice(words);
            rest = after;
            // SAFETY: as long as the words, by the caller; the pinned words are not touched again before they are copied.
            unsafe { stream.up(*to, host)? };
        }
        Ok(self.guard(first, stream)?)
    }

    /// Sends lists up; the address of the first.
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
        // SAFETY: both are that long; the pinned words are not touched again before they are copied, and kernels that read what lies
        // in the device's are before the copy in the stream.
        unsafe { stream.up(to, host)? };
        self.guard(first, stream)?;
        Ok(to)
    }
}
