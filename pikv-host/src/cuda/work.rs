//! Memory that launches work in: lists on their way up, partial results, and results on their way back.

use super::{answer, bare, granted};
use crate::backend::CudaError;
use crate::error::Error;
use cust::event::{Event, EventFlags};
use cust::memory::{DevicePointer, LockedBuffer, cuda_free, cuda_malloc};
use cust::stream::Stream;
use cust::sys;
use pikv_core::rope::Rope;

/// Bytes that a section of an upload is aligned to.
const ALIGN: usize = 16;

/// Device memory, given back on drop. The context must be current.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    address: u64,
    bytes: u64,
}

impl Memory {
    pub fn new(bytes: u64) -> Result<Memory, Error> {
        // SAFETY: given back on drop; nobody reads what was not written.
        let address = granted("cuMemAlloc", bytes, unsafe { cuda_malloc::<u8>(bytes as usize) })?;
        Ok(Memory { address: address.as_raw(), bytes })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// Makes room for `bytes` bytes; what was there is gone.
    fn reserve(&mut self, bytes: u64, stream: &Stream) -> Result<u64, Error> {
        if self.bytes < bytes {
            // Work under way still reads the old one.
            answer("cuStreamSynchronize", stream.synchronize())?;
            *self = Memory::default();
            *self = Memory::new(bytes.next_power_of_two())?;
        }
        Ok(self.address)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: from `cuda_malloc`, once. A lost device refuses, and has lost the memory with everything else.
            let _ = unsafe { cuda_free(DevicePointer::<u8>::from_raw(self.address)) };
        }
    }
}

/// Pinned words of the host.
#[derive(Debug, Default)]
struct Pinned(Option<LockedBuffer<u32>>);

impl Pinned {
    /// At least `words` words; nothing may be copied to or from them.
    fn reserve(&mut self, words: usize) -> Result<&mut [u32], Error> {
        if self.0.as_ref().is_none_or(|buffer| buffer.len() < words) {
            self.0 = None;
            let words = words.next_power_of_two();
            let buffer = LockedBuffer::new(&0, words);
            self.0 = Some(granted("cuMemAllocHost", words as u64 * 4, buffer)?);
        }
        Ok(self.0.as_deref_mut().unwrap_or_default())
    }
}

/// One of the ways up.
#[derive(Debug)]
struct Stage {
    host: Pinned,
    device: Memory,
    /// After its last copy.
    sent: Event,
}

/// What launches work in.
#[derive(Debug)]
pub(super) struct Work {
    stages: [Stage; 2],
    next: usize,
    parts: Memory,
    raw: Memory,
    out: Memory,
    back: Pinned,
    /// Tables of rotations, and the positions in them.
    tables: Vec<(Rope, u32, Memory)>,
}

/// Lists that are sent together.
pub(super) struct Upload<'a> {
    sections: Vec<&'a [u8]>,
    words: usize,
}

impl<'a> Upload<'a> {
    pub fn new() -> Upload<'a> {
        Upload { sections: Vec::new(), words: 0 }
    }

    /// Adds a list; where it will lie, from the start of all.
    pub fn add<T: bytemuck::NoUninit>(&mut self, list: &'a [T]) -> u64 {
        let at = self.words as u64 * 4;
        let bytes: &[u8] = bytemuck::cast_slice(list);
        self.sections.push(bytes);
        self.words += bytes.len().next_multiple_of(ALIGN) / 4;
        at
    }
}

impl Work {
    pub fn new() -> Result<Work, CudaError> {
        let stage = || {
            let sent = answer("cuEventCreate", Event::new(EventFlags::DISABLE_TIMING))?;
            Ok(Stage { host: Pinned::default(), device: Memory::default(), sent })
        };
        let (parts, raw, out) = (Memory::default(), Memory::default(), Memory::default());
        let back = Pinned::default();
        Ok(Work { stages: [stage()?, stage()?], next: 0, parts, raw, out, back, tables: Vec::new() })
    }

    /// Sends lists up; the address of the first.
    pub fn send(&mut self, stream: &Stream, upload: &Upload<'_>) -> Result<u64, Error> {
        let stage = &mut self.stages[self.next];
        self.next = (self.next + 1) % 2;
        // The copy before the last has left the buffer.
        answer("cuEventSynchronize", stage.sent.synchronize())?;
        let words = upload.words.max(1);
        let to = stage.device.reserve(words as u64 * 4, stream)?;
        let host = stage.host.reserve(words)?;
        let mut rest = &mut host[..words];
        for section in &upload.sections {
            let (to, after) = rest.split_at_mut(section.len().next_multiple_of(ALIGN) / 4);
            bytemuck::cast_slice_mut::<u32, u8>(to)[..section.len()].copy_from_slice(section);
            rest = after;
        }
        // SAFETY: both are that long; the pinned words are not touched again before `sent`.
        let code =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, host.as_ptr().cast(), words * 4, stream.as_inner()) };
        bare("cuMemcpyHtoDAsync", code)?;
        answer("cuEventRecord", stage.sent.record(stream))?;
        Ok(to)
    }

    /// Room for the partial results of a wave.
    pub fn parts(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.parts.reserve(floats * 4, stream)
    }

    /// Room for the weights of a wave.
    pub fn raw(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.raw.reserve(floats * 4, stream)
    }

    /// Room for results.
    pub fn out(&mut self, stream: &Stream, floats: u64) -> Result<u64, Error> {
        self.out.reserve(floats * 4, stream)
    }

    /// The table of a rotation.
    pub fn table(
        &mut self,
        stream: &Stream,
        rope: &Rope,
        values: &[f32],
        capacity: u32,
    ) -> Result<u64, Error> {
        if let Some((.., memory)) = self.tables.iter().find(|(known, n, _)| known == rope && *n == capacity) {
            return Ok(memory.address());
        }
        let memory = Memory::new(size_of_val(values) as u64)?;
        // SAFETY: the memory is that long. Nothing but the call itself reads the host's values: it waits for the copy.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                memory.address(),
                values.as_ptr().cast(),
                size_of_val(values),
                stream.as_inner(),
            )
        };
        bare("cuMemcpyHtoDAsync", code)?;
        answer("cuStreamSynchronize", stream.synchronize())?;
        // A shorter one has no more readers, all work being done.
        self.tables.retain(|(known, ..)| known != rope);
        let address = memory.address();
        self.tables.push((*rope, capacity, memory));
        Ok(address)
    }

    /// Waits for all that was asked for, and gives `f` the words at `address`.
    pub fn fetch<T>(
        &mut self,
        stream: &Stream,
        address: u64,
        words: usize,
        f: impl FnOnce(&[u32]) -> T,
    ) -> Result<T, Error> {
        let host = self.back.reserve(words)?;
        // SAFETY: both are that long, and the stream is waited for before anyone reads.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), address, words * 4, stream.as_inner())
        };
        bare("cuMemcpyDtoHAsync", code)?;
        answer("cuStreamSynchronize", stream.synchronize())?;
        Ok(f(&host[..words]))
    }
}
