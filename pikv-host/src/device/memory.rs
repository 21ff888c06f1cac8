//! Memory of the device, and pinned memory of the host.

use super::driver::granted;
use super::stream::Stream;
use crate::base::error::Error;
use cust::memory::{DevicePointer, LockedBuffer, cuda_free, cuda_malloc};

/// Device memory, freed on drop. The context must be current.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    address: u64,
    bytes: u64,
}

impl Memory {
    pub fn new(bytes: u64) -> Result<Memory, Error> {
        // SAFETY: freed on drop; nothing reads bytes that were not written.
        let address = granted("cuMemAlloc", bytes, unsafe { cuda_malloc::<u8>(bytes as usize) })?;
        Ok(Memory { address: address.as_raw(), bytes })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes room for `bytes` bytes; a larger buffer does not keep the old content.
    pub fn reserve(&mut self, bytes: u64, stream: &Stream) -> Result<u64, Error> {
        if self.bytes < bytes {
            // Work in flight may still read the old buffer.
            stream.synchronize()?;
            *self = Memory::default();
            *self = Memory::new(bytes.next_power_of_two())?;
        }
        Ok(self.address)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: from `cuda_malloc`, freed once. A lost device returns an error, and has lost the memory anyway.
            let _ = unsafe { cuda_free(DevicePointer::<u8>::from_raw(self.address)) };
        }
    }
}

/// Pinned words of the host.
#[derive(Debug, Default)]
pub struct Pinned(Option<LockedBuffer<u32>>);

impl Pinned {
    /// At least `words` words. No copy from or to them may be in flight.
    pub fn reserve(&mut self, words: usize) -> Result<&mut [u32], Error> {
        if self.0.as_ref().is_none_or(|buffer| buffer.len() < words) {
            self.0 = None;
            let words = words.next_power_of_two();
            let buffer = LockedBuffer::new(&0, words);
            self.0 = Some(granted("cuMemAllocHost", words as u64 * 4, buffer)?);
        }
        Ok(self.0.as_deref_mut().unwrap_or_default())
    }

    /// All words.
    pub fn words(&self) -> &[u32] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Number of words.
    pub fn room(&self) -> usize {
        self.words().len()
    }
}
