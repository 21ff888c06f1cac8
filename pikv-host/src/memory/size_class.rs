//! Pages of one size on one shard, in chunks of memory of the system or of a device.

use crate::backend::{Backend, Kind};
use crate::base::error::Error;
#[cfg(feature = "cuda")]
use crate::device::PageMemory;
use crate::memory::free::Free;
use memmap2::MmapMut;
#[cfg(feature = "cuda")]
use pikv_core::LANES;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes that a size class takes from the system at a time: one huge page, since pages of 8 to 64 KiB that lie anywhere would
/// else cost an address translation every few of their rows.
const CHUNK: u64 = 2 << 20;

/// What poisoned pages hold: NaN as f32, f16 and bf16, and no position.
pub(super) const POISON: u32 = u32::MAX;

/// Words of the header of a page on a device: positions, then the address.
#[cfg(feature = "cuda")]
const HEADER: usize = LANES + 2;

/// Pages of one size on one shard.
#[derive(Debug, Default)]
pub(crate) struct SizeClass {
    chunks: Vec<Option<Chunk>>,
    /// Chunks with a free page.
    open: Vec<u32>,
    /// Chunks that had an eight of free pages when they were last looked at.
    roomy: Vec<u32>,
    /// Pages that somebody has, and that nobody has.
    used: u64,
    free: u64,
    /// Places in `chunks` that were given back to the system.
    holes: Vec<u32>,
    /// Chunks that had no page in use when they were last looked at.
    empty: Vec<u32>,
    /// Free pages that the steps under way may ask for at once.
    wanted: u64,
}

#[derive(Debug)]
struct Chunk {
    base: NonNull<u32>,
    /// What `base` points into, given back on drop.
    _memory: Memory,
    pages: Box<[Counted]>,
    free: Free,
    /// Whether it is listed as roomy.
    roomy: bool,
    /// Whether it is listed as empty.
    empty: bool,
}

/// Where a page lies, and how many handles there are on it. Beside the pages, so that a handle is three words.
#[derive(Debug)]
pub(super) struct Counted {
    pub refs: AtomicU32,
    pub shard: u32,
    pub class: u16,
    pub chunk: u32,
    pub index: u32,
}

/// Memory of a chunk. `allow`: held for its drop.
#[derive(Debug)]
#[allow(dead_code)]
pub(crate) enum Memory {
    /// All zero at first.
    Host(MmapMut),
    /// Headers, and the pages themselves.
    #[cfg(feature = "cuda")]
    Device(Vec<u32>, PageMemory),
}

// SAFETY: a chunk owns its memory; the words are reached through `Page` only, which hands out `&mut` where it is the only
// handle, and the size class itself touches them only while a page has no handle.
unsafe impl Send for Chunk {}

/// Where a page would best lie.
#[derive(Clone, Copy)]
pub(super) enum Spot {
    /// Anywhere.
    Any,
    /// First of eight free ones.
    Run,
    /// Behind page `index` of a chunk of this class.
    After { chunk: u32, index: u32 },
}

impl SizeClass {
    /// A free page: its first word, and its count, which is 1.
    ///
    /// # Errors
    /// The system or the device has no memory.
    pub(super) fn take(
        &mut self,
        backend: &Backend,
        (shard, class): (u32, u16),
        words: u32,
        near: Spot,
    ) -> Result<(NonNull<u32>, NonNull<Counted>), Error> {
        let place = (shard, class);
        let found = match near {
            Spot::Any => None,
            Spot::Run => self.eight(backend, place, words),
            Spot::After { chunk, index } => {
                self.behind(chunk, index).or_else(|| self.eight(backend, place, words))
            }
        };
        let (at, index) = match found {
            Some(found) => found,
            None => self.any(backend, place, words)?,
        };
        (self.used, self.free) = (self.used + 1, self.free - 1);
        if self.chunk(at).free.count == 0 {
            self.open.retain(|open| *open != at);
        }
        let chunk = self.chunk(at);
        let counted = &chunk.pages[index as usize];
        counted.refs.store(1, Ordering::Relaxed);
        let stride = match &chunk._memory {
            Memory::Host(_) => words as usize,
            #[cfg(feature = "cuda")]
            Memory::Device(..) => HEADER,
        };
        // SAFETY: `index` is below the pages of the chunk, each `stride` words long.
        let first = unsafe { chunk.base.add(index as usize * stride) };
        Ok((first, NonNull::from(counted)))
    }

    fn chunk(&mut self, at: u32) -> &mut Chunk {
        match &mut self.chunks[at as usize] {
            Some(chunk) => chunk,
            None => unreachable!("listed chunks exist, and those of pages"),
        }
    }

    /// Any free page.
    fn any(&mut self, backend: &Backend, place: (u32, u16), words: u32) -> Result<(u32, u32), Error> {
        let at = match self.open.last() {
            Some(&at) => at,
            None => self.grow(backend, place, words)?,
        };
        let index = self.chunk(at).free.any();
        Ok((at, index.unwrap_or_else(|| unreachable!("open chunks have a free page"))))
    }

    /// The page behind page `index` of a chunk, if it is free for it.
    fn behind(&mut self, chunk: u32, index: u32) -> Option<(u32, u32)> {
        Some((chunk, self.chunk(chunk).free.at(index + 1)?))
    }

    /// The first page of a free eight, if there is one, or room for one costs no memory to speak of.
    fn eight(&mut self, backend: &Backend, place: (u32, u16), words: u32) -> Option<(u32, u32)> {
        let found = self.whole();
        if found.is_some() || self.used / 8 <= self.free {
            return found;
        }
        // Without memory for it, any page will do.
        self.grow(backend, place, words).ok()?;
        self.whole()
    }

    /// The first page of a free eight, if there is one.
    fn whole(&mut self) -> Option<(u32, u32)> {
        while let Some(&at) = self.roomy.last() {
            let chunk = self.chunk(at);
            if let Some(index) = chunk.free.first_of_eight() {
                return Some((at, index));
            }
            chunk.roomy = false;
            self.roomy.pop();
        }
        None
    }

    fn grow(&mut self, backend: &Backend, (shard, class): (u32, u16), words: u32) -> Result<u32, Error> {
        let (page, pages) = (u64::from(words) * 4, pages_of_chunk(words));
        let bytes = pages * page;
        let (base, memory) = match &backend.0 {
            Kind::Cpu => mapped(bytes)?,
            #[cfg(feature = "cuda")]
            Kind::Cuda(device) => {
                let memory = device.allocate(bytes)?;
                let address = |page_index| memory.address() + page_index * page;
                let header = |i| {
                    [[POISON; LANES].as_slice(), &[address(i) as u32, (address(i) >> 32) as u32]].concat()
                };
                let mut headers: Vec<u32> = (0..pages).flat_map(header).collect();
                (NonNull::from(&mut headers[..]).cast(), Memory::Device(headers, memory))
            }
        };
        Ok(self.add(base, memory, (shard, class), pages))
    }

    /// Adds a chunk of `pages` free pages in `memory`, the first at `base`. Older chunks are used up first.
    pub fn add(&mut self, base: NonNull<u32>, memory: Memory, (shard, class): (u32, u16), pages: u64) -> u32 {
        let at = match self.holes.pop() {
            Some(at) => at,
            None => {
                self.chunks.push(None);
                self.chunks.len() as u32 - 1
            }
        };
        let counted = |index| Counted { refs: AtomicU32::new(0), shard, class, chunk: at, index };
        self.chunks[at as usize] = Some(Chunk {
            base,
            _memory: memory,
            pages: (0..pages as u32).map(counted).collect(),
            free: Free::all(pages as u32),
            roomy: true,
            empty: true,
        });
        self.open.insert(0, at);
        self.roomy.insert(0, at);
        self.empty.push(at);
        self.free += pages;
        at
    }

    pub fn give_back(&mut self, at: u32, index: u32) {
        (self.used, self.free) = (self.used - 1, self.free + 1);
        let chunk = self.chunk(at);
        chunk.free.give_back(index);
        let Free { count, pages, whole, .. } = chunk.free;
        if whole > 0 && !std::mem::replace(&mut chunk.roomy, true) {
            self.roomy.push(at);
        }
        if count == 1 {
            self.open.push(at);
        }
        if count == pages && !std::mem::replace(&mut self.chunk(at).empty, true) {
            self.empty.push(at);
        }
        self.shrink();
    }

    /// Free pages, if they are fewer than `wanted`, which steps may ask for at once, and the eighth that runs are given room for.
    pub fn wants(&mut self, wanted: u64) -> Option<u64> {
        self.wanted = wanted;
        (self.free < self.used / 8 + wanted).then_some(self.free)
    }

    /// Pages that nobody has.
    #[cfg(test)]
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Gives empty chunks back to the system where far more is free than [`SizeClass::wants`] asks for: what a step gives back, the next
    /// ones take again. One chunk is kept in any case, so that a page that comes and goes does not ask the system each time.
    fn shrink(&mut self) {
        let keep = self.used / 8 + 2 * self.wanted.min(self.used / 8);
        while let Some(&at) = self.empty.last() {
            let Free { count, pages, .. } = self.chunk(at).free;
            if count == pages && (self.open.len() == 1 || self.free < keep + u64::from(pages)) {
                return;
            }
            self.empty.pop();
            if count < pages {
                self.chunk(at).empty = false;
                continue;
            }
            self.chunks[at as usize] = None;
            self.holes.push(at);
            self.open.retain(|open| *open != at);
            self.roomy.retain(|roomy| *roomy != at);
            self.free -= u64::from(pages);
        }
    }
}

/// Pages of `words` words in a chunk.
pub(crate) fn pages_of_chunk(words: u32) -> u64 {
    (CHUNK / (u64::from(words) * 4)).max(1)
}

/// Memory of the system for a chunk, and its first word.
pub(crate) fn mapped(bytes: u64) -> Result<(NonNull<u32>, Memory), Error> {
    // Mappings are aligned to small pages only: twice the length holds an aligned chunk. What is not touched takes no memory.
    let align = CHUNK as usize;
    let refused = |_| Error::OutOfMemory { bytes };
    let mut memory = MmapMut::map_anon(bytes as usize + align).map_err(refused)?;
    #[cfg(target_os = "linux")]
    // A hint: without huge pages everything works, slower.
    let _ = memory.advise(memmap2::Advice::HugePage);
    let start = memory.as_ptr().align_offset(align).min(align);
    let aligned = &mut memory[start..start + bytes as usize];
    Ok((NonNull::from(aligned).cast(), Memory::Host(memory)))
}
