//! Pages of one size on one shard, in chunks of memory of the system or of a device.

use crate::backend::{Backend, Kind};
use crate::base::error::Error;
use crate::device::PageMemory;
use crate::memory::free::Free;
use memmap2::MmapMut;
use pikv_core::LANES;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a chunk of a size class: one huge page, because scattered pages of 8 to 64 KiB would need an address translation every few
/// rows.
const CHUNK: u64 = 2 << 20;

/// Word of unused and filled pages: NaN as f32, f16 and bf16, and not a position.
pub(super) const FILLER: u32 = u32::MAX;

/// Words of the header of a device page: positions, then the address.
const HEADER: usize = LANES + 2;

/// Pages of one size on one shard.
#[derive(Debug, Default)]
pub(crate) struct SizeClass {
    chunks: Vec<Option<Chunk>>,
    /// Chunks with a free page.
    open: Vec<u32>,
    /// Chunks that had eight adjacent free pages when last checked.
    roomy: Vec<u32>,
    /// Pages with handles, and free pages.
    used: u64,
    free: u64,
    /// Indices in `chunks` of freed chunks.
    holes: Vec<u32>,
    /// Chunks that had no page in use when last checked.
    empty: Vec<u32>,
    /// Free pages that the current steps can need at once.
    wanted: u64,
}

#[derive(Debug)]
struct Chunk {
    base: NonNull<u32>,
    /// Memory of `base`, freed on drop.
    _memory: Memory,
    pages: Box<[Counted]>,
    free: Free,
    /// Whether the chunk is in `roomy`.
    roomy: bool,
    /// Whether the chunk is in `empty`.
    empty: bool,
}

/// Location of a page, and its number of handles. Apart from the page, so that a handle is three words.
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
    /// Zeroed at first.
    Host(MmapMut),
    /// Headers on the host, and the pages.
    Device(Vec<u32>, PageMemory),
}

// SAFETY: a chunk owns its memory. The words are accessed through `Page` only, which gives `&mut` only to a sole handle; the size class
// accesses them only while a page has no handle.
unsafe impl Send for Chunk {}

/// Preferred location of a new page.
#[derive(Clone, Copy)]
pub(super) enum Spot {
    /// Anywhere.
    Any,
    /// First of eight free pages.
    Run,
    /// After page `index` of a chunk of this class.
    After { chunk: u32, index: u32 },
}

impl SizeClass {
    /// Allocates a page: its first word, and its count, which is 1.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] of the system or the device.
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
            Memory::Device(..) => HEADER,
        };
        // SAFETY: `index` is below the number of pages in the chunk, each `stride` words long.
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

    /// The page after page `index` of a chunk, if it is free and fits [`Free::at`].
    fn behind(&mut self, chunk: u32, index: u32) -> Option<(u32, u32)> {
        Some((chunk, self.chunk(chunk).free.at(index + 1)?))
    }

    /// The first page of eight free ones. If there are none, adds a chunk, unless an eighth of the pages in use are free.
    fn eight(&mut self, backend: &Backend, place: (u32, u16), words: u32) -> Option<(u32, u32)> {
        let found = self.whole();
        if found.is_some() || self.used / 8 <= self.free {
            return found;
        }
        // Without memory for a chunk, any page will do.
        self.grow(backend, place, words).ok()?;
        self.whole()
    }

    /// The first page of eight free ones, if there are any.
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
            Kind::Cuda(device) => {
                let memory = device.allocate(bytes)?;
                let address = |page_index| memory.address() + page_index * page;
                let header = |i| {
                    [[FILLER; LANES].as_slice(), &[address(i) as u32, (address(i) >> 32) as u32]].concat()
                };
                let mut headers: Vec<u32> = (0..pages).flat_map(header).collect();
                (NonNull::from(&mut headers[..]).cast(), Memory::Device(headers, memory))
            }
        };
        Ok(self.add(base, memory, (shard, class), pages))
    }

    /// Adds a chunk of `pages` free pages in `memory`, the first at `base`. It is used after the older chunks.
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

    /// The number of free pages, if it is below `wanted`, the pages that steps can need at once, plus an eighth of the pages in use.
    pub fn wants(&mut self, wanted: u64) -> Option<u64> {
        self.wanted = wanted;
        (self.free < self.used / 8 + wanted).then_some(self.free)
    }

    /// Free pages.
    #[cfg(test)]
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Frees empty chunks if far more pages are free than [`SizeClass::wants`] asks for, because the next steps need the pages that a step
    /// freed. Keeps at least one chunk, so that a single page that is allocated and freed does not map memory each time.
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

/// Maps memory of the system for a chunk; returns its first word.
pub(crate) fn mapped(bytes: u64) -> Result<(NonNull<u32>, Memory), Error> {
    // Mappings are aligned to small pages only: twice the length contains an aligned chunk. Untouched pages take no memory.
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
