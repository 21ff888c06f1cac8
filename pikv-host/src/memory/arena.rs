//! Page memory: one arena a shard and page size, pages that come back on drop, one budget over all.
//!
//! Of a page on a device the host has a header: the positions of its tokens, which say what a sequence holds, and its address.

use crate::backend::{Backend, Kind};
use crate::base::error::Error;
use crate::base::failures::Counts;
use crate::config::CacheConfig;
use crate::memory::growth::Growth;
use memmap2::MmapMut;
use pikv_core::LANES;
use std::borrow::Cow;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(feature = "cuda")]
use {crate::device::PageMemory, crate::memory::cuda::pending::Pending};

/// Bytes that an arena takes from the system at a time: one huge page, since pages of 8 to 64 KiB that lie anywhere would
/// else cost an address translation every few of their rows.
const CHUNK: u64 = 2 << 20;

/// What poisoned pages hold: NaN as f32, f16 and bf16, and no position.
const POISON: u32 = u32::MAX;

/// Words of the header of a page on a device: positions, then the address.
#[cfg(feature = "cuda")]
const HEADER: usize = LANES + 2;

/// All page memory of a cache.
pub struct Arenas {
    /// Words of a page, for each size in use.
    classes: Vec<u32>,
    /// `[shard][class]`.
    arenas: Vec<Mutex<Arena>>,
    /// Bytes in use on each shard.
    shards: Vec<AtomicU64>,
    backend: Backend,
    budget: u64,
    /// Bytes in use or reserved.
    taken: AtomicU64,
    growth: Growth,
    poison: bool,
    /// Whether pages that are given back are overwritten, and where it is counted that they could not be.
    wipe: bool,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device can refuse"))]
    failures: Arc<Counts>,
}

/// Pages of one size on one shard.
#[derive(Debug, Default)]
pub(crate) struct Arena {
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
struct Counted {
    refs: AtomicU32,
    shard: u32,
    class: u16,
    chunk: u32,
    index: u32,
}

/// Pages of a chunk that nobody has. They are given out in the order of their addresses, going round: what a step takes is then read
/// in that order too, and the processor's own prefetchers follow.
///
/// A run of pages that are read one after the other is better off with neighbours: a page asks for the one after it, and the first of a
/// run for the first of eight that are all free, which leaves room behind it.
#[derive(Debug)]
struct Free {
    /// Bit `i % 64` of word `i / 64` is set if page `i` is free.
    bits: Box<[u64]>,
    pages: u32,
    count: u32,
    /// Eights (of the last, what there is) whose pages are all free.
    whole: u32,
    /// The page after the last one given out.
    from: u32,
}

/// Pages that a run is given room for.
const EIGHT: u32 = 8;

impl Free {
    fn all(pages: u32) -> Free {
        let left = |word: u32| pages - word * 64;
        let bits = (0..pages.div_ceil(64)).map(|word| u64::MAX >> (64 - left(word).min(64)));
        Free { bits: bits.collect(), pages, count: pages, whole: pages.div_ceil(EIGHT), from: 0 }
    }

    /// The first free page from the last one on.
    fn any(&mut self) -> Option<u32> {
        let bit = self.find(|bits| bits)?;
        Some(self.remove(bit))
    }

    /// The first of an eight of which all are free.
    fn first_of_eight(&mut self) -> Option<u32> {
        let last = self.pages.next_multiple_of(EIGHT) - EIGHT;
        let bit = (self.whole > 0).then(|| self.find(whole_eights)).flatten();
        let last_is_free = || (self.whole > 0 && self.is_whole(last)).then_some(last);
        let bit = bit.or_else(last_is_free)?;
        Some(self.remove(bit))
    }

    /// Page `index`, if it is free and does not open an eight that others have begun.
    fn at(&mut self, index: u32) -> Option<u32> {
        let free = index < self.pages && self.bits[index as usize / 64] >> (index % 64) & 1 == 1;
        let fits = free && (!index.is_multiple_of(EIGHT) || self.is_whole(index));
        fits.then(|| self.remove(index))
    }

    /// Whether all pages of the eight that page `index` is in are free.
    fn is_whole(&self, index: u32) -> bool {
        let first = index - index % EIGHT;
        let all = u64::MAX >> (64 - (self.pages - first).min(EIGHT));
        self.bits[first as usize / 64] >> (first % 64) & all == all
    }

    /// The first page, from the last one given out on and round, whose bit `of` leaves.
    fn find(&self, of: impl Fn(u64) -> u64) -> Option<u32> {
        let (first, words) = (self.from as usize / 64, self.bits.len());
        // The first word is looked at twice: from where the search starts, and up to there.
        let after = u64::MAX << (self.from % 64);
        let looks = (0..=words).map(|i| match i {
            0 => (first, after),
            i if i == words => (first, !after),
            i => ((first + i) % words, u64::MAX),
        });
        let mut found = looks.map(|(word, mask)| (word, of(self.bits[word]) & mask));
        let (word, bits) = found.find(|(_, bits)| *bits != 0)?;
        Some(word as u32 * 64 + bits.trailing_zeros())
    }

    fn remove(&mut self, index: u32) -> u32 {
        self.whole -= u32::from(self.is_whole(index));
        self.bits[index as usize / 64] &= !(1 << (index % 64));
        self.count -= 1;
        self.from = (index + 1) % self.pages;
        index
    }

    fn give_back(&mut self, index: u32) {
        self.bits[index as usize / 64] |= 1 << (index % 64);
        self.count += 1;
        self.whole += u32::from(self.is_whole(index));
    }
}

/// Of each byte whose bits are all set, the first.
fn whole_eights(mut bits: u64) -> u64 {
    for shift in [1, 2, 4] {
        bits &= bits >> shift;
    }
    bits & 0x0101_0101_0101_0101
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
// handle, and the arena itself touches them only while a page has no handle.
unsafe impl Send for Chunk {}

/// Where a page would best lie.
#[derive(Clone, Copy)]
pub(crate) enum Near<'a> {
    /// It comes and goes.
    Any,
    /// It starts a run of pages that are read together.
    Run,
    /// Behind this one, with which it is read.
    After(&'a Page),
}

impl<'a> Near<'a> {
    /// The next of a run that ends with `last`.
    pub fn next(last: Option<&'a Page>) -> Near<'a> {
        last.map_or(Near::Run, Near::After)
    }
}

/// Bytes set aside for pages that will be taken. What is not used comes back on drop.
#[derive(Debug)]
pub struct Reservation {
    arenas: Arc<Arenas>,
    /// Bytes that are left, or 0 if they are lent.
    bytes: u64,
    /// Who owns what is left instead.
    lent: Option<Arc<AtomicU64>>,
    #[cfg(feature = "cuda")]
    pub(crate) pending: Option<Pending>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.arenas.taken.fetch_sub(self.bytes, Ordering::Relaxed);
        if let Some(lent) = &self.lent {
            self.arenas.taken.fetch_sub(lent.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// The bytes that a step reserved and did not take, owned by a sequence of the step: where the step is leaked instead of dropped, they
/// come back when the sequence is used again or dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    arenas: Arc<Arenas>,
    left: Arc<AtomicU64>,
}

impl Lease {
    /// Of nothing.
    pub fn new(arenas: &Arc<Arenas>) -> Lease {
        Lease { arenas: arenas.clone(), left: Arc::default() }
    }

    /// What a leaked step left.
    pub fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// Gives back what a leaked step left.
    pub fn give_back(&self) {
        self.arenas.taken.fetch_sub(self.left.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A handle on a page. Clones share it; the page comes back with the last of them.
pub struct Page {
    arenas: Arc<Arenas>,
    words: NonNull<u32>,
    counted: NonNull<Counted>,
}

// SAFETY: shared handles only read the words; they are written through `Page::words_mut`, which needs the only handle, and
// the count is atomic.
unsafe impl Send for Page {}
// SAFETY: as above; `&Page` gives `&[u32]` only.
unsafe impl Sync for Page {}

impl fmt::Debug for Arenas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arenas")
            .field("taken", &self.taken)
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counted { shard, class, chunk, index, .. } = self.counted();
        write!(f, "Page({shard}:{class}:{chunk}:{index})")
    }
}

impl Arenas {
    /// Without memory yet. `heads`: words of each size of page, and the heads whose tokens are kept in such pages.
    pub(crate) fn new(
        config: &CacheConfig,
        heads: impl IntoIterator<Item = (u32, u32)>,
        failures: &Arc<Counts>,
    ) -> Arc<Arenas> {
        let heads: Vec<(u32, u32)> = heads.into_iter().collect();
        let mut classes: Vec<u32> = heads.iter().map(|(words, _)| *words).collect();
        let &CacheConfig { budget, poison, wipe, .. } = config;
        let (shards, failures) = (config.shards.shards(), failures.clone());
        let backend = config.backend.clone();
        classes.sort_unstable();
        classes.dedup();
        let arenas = (0..shards as usize * classes.len()).map(|_| Mutex::default()).collect();
        let shards = (0..shards).map(|_| AtomicU64::new(0)).collect();
        let taken = AtomicU64::new(0);
        let growth = Growth::new(&classes, &heads);
        Arc::new(Arenas { classes, arenas, shards, backend, budget, taken, growth, poison, wipe, failures })
    }

    /// Bytes of pages in use, on each shard.
    pub fn bytes_by_shard(&self) -> impl Iterator<Item = u64> {
        self.shards.iter().map(|bytes| bytes.load(Ordering::Relaxed))
    }

    /// Words of a page, for each size in use, ascending.
    pub(crate) fn classes(&self) -> &[u32] {
        &self.classes
    }

    pub(crate) fn shards(&self) -> usize {
        self.shards.len()
    }

    pub(crate) fn growth(&self) -> &Growth {
        &self.growth
    }

    /// Whether pages lie in the host's memory.
    pub(crate) fn on_host(&self) -> bool {
        self.backend.is_cpu()
    }

    /// Bytes in use or reserved.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The budget.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Sets `needed` bytes aside.
    pub(crate) fn reserve(self: &Arc<Self>, needed: u64) -> Result<Reservation, Error> {
        self.taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
                taken.checked_add(needed).filter(|sum| *sum <= self.budget)
            })
            .map(|_| Reservation {
                arenas: self.clone(),
                bytes: needed,
                lent: None,
                #[cfg(feature = "cuda")]
                pending: self.backend.device().cloned().map(Pending::new),
            })
            .map_err(|taken| Error::OutOfBudget { needed, available: self.budget.saturating_sub(taken) })
    }

    pub(crate) fn arena(&self, shard: usize, class: usize) -> MutexGuard<'_, Arena> {
        // An arena's own code does not panic between two states that matter, so a poisoned lock still guards a sound one.
        self.arenas[shard * self.classes.len() + class].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Words of a page of a class that the host has.
    fn near(&self, class: u16) -> usize {
        match self.backend.is_cpu() {
            true => self.classes[usize::from(class)] as usize,
            false => LANES,
        }
    }

    fn give_back(&self, page: &Page) {
        let &Counted { shard, class, chunk, index, .. } = page.counted();
        let near = self.near(class);
        let (shard, class) = (shard as usize, usize::from(class));
        let words = self.classes[class] as usize;
        if self.poison || self.wipe {
            // SAFETY: the last handle is being dropped, so nobody else reads or writes these `near` words of the chunk.
            unsafe { std::slice::from_raw_parts_mut(page.words.as_ptr(), near) }.fill(POISON);
        }
        #[cfg(feature = "cuda")]
        if self.wipe
            && let Some(device) = self.backend.device()
            && device.fill(page.address(), POISON, words as u32).is_err()
        {
            self.failures.unwiped();
        }
        self.arena(shard, class).give_back(chunk, index);
        self.shards[shard].fetch_sub(words as u64 * 4, Ordering::Relaxed);
        self.taken.fetch_sub(words as u64 * 4, Ordering::Relaxed);
    }
}

impl Arena {
    /// A free page: its first word and its count, which is now 1.
    fn take(
        &mut self,
        backend: &Backend,
        (shard, class): (u32, u16),
        words: u32,
        near: Near<'_>,
    ) -> Result<(NonNull<u32>, NonNull<Counted>), Error> {
        let place = (shard, class);
        let found = match near {
            Near::Any => None,
            Near::Run => self.eight(backend, place, words),
            Near::After(page) => self.behind(page).or_else(|| self.eight(backend, place, words)),
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

    /// The page behind this one, if it is free for it.
    fn behind(&mut self, page: &Page) -> Option<(u32, u32)> {
        let Counted { chunk, index, .. } = *page.counted();
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
    pub(crate) fn add(
        &mut self,
        base: NonNull<u32>,
        memory: Memory,
        (shard, class): (u32, u16),
        pages: u64,
    ) -> u32 {
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

    fn give_back(&mut self, at: u32, index: u32) {
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
    pub(crate) fn wants(&mut self, wanted: u64) -> Option<u64> {
        self.wanted = wanted;
        (self.free < self.used / 8 + wanted).then_some(self.free)
    }

    /// Pages that nobody has.
    #[cfg(test)]
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Gives empty chunks back to the system where far more is free than [`Arena::wants`] asks for: what a step gives back, the next
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

impl Reservation {
    /// Sets bytes aside again that this step took and has just given back, unless others were quicker.
    pub(crate) fn regain(&mut self, bytes: u64) {
        if let Ok(mut again) = self.arenas.reserve(bytes) {
            self.add(std::mem::take(&mut again.bytes));
        }
    }

    /// Has `lease` own what is left.
    pub(crate) fn lend(&mut self, lease: &Lease) {
        lease.left.store(std::mem::take(&mut self.bytes), Ordering::Relaxed);
        self.lent = Some(lease.left.clone());
    }

    fn left(&self) -> u64 {
        self.lent.as_ref().map_or(self.bytes, |lent| lent.load(Ordering::Relaxed))
    }

    fn add(&mut self, bytes: u64) {
        match &self.lent {
            Some(lent) => drop(lent.fetch_add(bytes, Ordering::Relaxed)),
            None => self.bytes += bytes,
        }
    }

    fn subtract(&mut self, bytes: u64) {
        match &self.lent {
            Some(lent) => drop(lent.fetch_sub(bytes, Ordering::Relaxed)),
            None => self.bytes -= bytes,
        }
    }

    /// A page of `words` words on `shard`, out of what was reserved: without positions, its words undefined.
    pub(crate) fn take(&mut self, shard: u32, words: u32, near: Near<'_>) -> Result<Page, Error> {
        let bytes = u64::from(words) * 4;
        let arenas = &self.arenas;
        let Ok(class) = arenas.classes.binary_search(&words) else {
            unreachable!("the classes are those of the layers")
        };
        // A step reserves the most that it can take; if that was ever wrong, it is this step that fails.
        let available = self.left();
        if bytes > available {
            return Err(Error::OutOfBudget { needed: bytes, available });
        }
        let place = (shard, class as u16);
        // Of other pages the neighbours are of no use.
        let near = match near {
            Near::After(page) if (page.shard(), usize::from(page.counted().class)) != (shard, class) => {
                Near::Run
            }
            near => near,
        };
        let mut arena = arenas.arena(shard as usize, class);
        let (first, counted) = arena.take(&arenas.backend, place, words, near)?;
        drop(arena);
        arenas.shards[shard as usize].fetch_add(bytes, Ordering::Relaxed);
        let mut page = Page { arenas: arenas.clone(), words: first, counted };
        self.subtract(bytes);
        let all = self.arenas.poison;
        if let Some(words) = page.words_mut() {
            let n = if all { words.len() } else { LANES };
            words[..n].fill(POISON);
        }
        // The whole of it: a device reads the keys of all lanes, whether they were written or not.
        #[cfg(feature = "cuda")]
        if let Some(device) = page.arenas.backend.device() {
            device.fill(page.address(), POISON, words)?;
        }
        Ok(page)
    }
}

impl Page {
    /// The page's words; of a page on a device the positions.
    #[inline]
    pub fn words(&self) -> &[u32] {
        let words = self.arenas.near(self.counted().class);
        // SAFETY: the chunk lives as long as the arenas hold it, which is at least while this handle counts, and holds `words`
        // initialised words from here; they are written only through an only handle borrowed mutably, which `self` is not.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), words) }
    }

    /// Its first words: of a page of single tokens the positions.
    #[inline]
    pub fn positions(&self) -> &[u32; LANES] {
        // SAFETY: as in `words`; no page has fewer, and those of a device have these here. (How many there are stands elsewhere, and is
        // not worth fetching for these.)
        unsafe { &*self.words.as_ptr().cast() }
    }

    /// All of the page's words, wherever they lie.
    ///
    /// # Errors
    /// The device.
    pub fn fetch(&self) -> Result<Cow<'_, [u32]>, Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = self.arenas.backend.device() {
            let words = self.arenas.classes[usize::from(self.counted().class)];
            return Ok(Cow::Owned(device.read(self.address(), words)?));
        }
        Ok(Cow::Borrowed(self.words()))
    }

    /// Fills the page, of which this is the only handle, with `words`.
    ///
    /// # Errors
    /// The device.
    pub fn put(&mut self, words: &[u32]) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Some(device) = self.arenas.backend.device() {
            device.write(self.address(), words)?;
        }
        if let Some(near) = self.words_mut() {
            let n = near.len();
            near.copy_from_slice(&words[..n]);
        }
        Ok(())
    }

    /// Whether [`Page::words`] are all of its words.
    pub fn is_near(&self) -> bool {
        self.arenas.backend.is_cpu()
    }

    /// Where the page lies on a device; 0 in the host's memory.
    pub fn address(&self) -> u64 {
        #[cfg(feature = "cuda")]
        if !self.arenas.backend.is_cpu() {
            // SAFETY: a header has HEADER words, which live as the positions do; the last two are never written again.
            let [low, high] = unsafe { self.words.add(LANES).cast::<[u32; 2]>().read() };
            return u64::from(low) | u64::from(high) << 32;
        }
        0
    }

    /// What [`Page::words`] gives, to be written, if this is the only handle.
    #[inline]
    pub fn words_mut(&mut self) -> Option<&mut [u32]> {
        if self.is_shared() {
            return None;
        }
        let words = self.arenas.near(self.counted().class);
        // SAFETY: as in `words`; this is the only handle and it is borrowed mutably, so it cannot be cloned meanwhile.
        Some(unsafe { std::slice::from_raw_parts_mut(self.words.as_ptr(), words) })
    }

    /// Handles on it.
    pub fn handles(&self) -> u32 {
        self.count().load(Ordering::Acquire)
    }

    /// Whether there are other handles.
    #[inline]
    pub fn is_shared(&self) -> bool {
        // Acquire: what other handles read happened before this one writes.
        self.count().load(Ordering::Acquire) != 1
    }

    /// Whether both are handles on one page.
    pub fn is(&self, other: &Page) -> bool {
        self.counted == other.counted
    }

    /// A number that all handles on the page have, and those of other pages have not.
    pub fn key(&self) -> usize {
        self.counted.as_ptr().addr()
    }

    /// Bytes of the page.
    pub fn bytes(&self) -> u64 {
        u64::from(self.arenas.classes[usize::from(self.counted().class)]) * 4
    }

    /// The shard that holds the page.
    pub fn shard(&self) -> u32 {
        self.counted().shard
    }

    fn count(&self) -> &AtomicU32 {
        &self.counted().refs
    }

    fn counted(&self) -> &Counted {
        // SAFETY: it lies in the chunk, which outlives its pages' handles, and only its count is ever written.
        unsafe { self.counted.as_ref() }
    }
}

impl Clone for Page {
    fn clone(&self) -> Page {
        // As in `Arc`: forks that are forgotten by the billion must not bring the count round to 0.
        if self.count().fetch_add(1, Ordering::Relaxed) > i32::MAX as u32 {
            std::process::abort();
        }
        Page { arenas: self.arenas.clone(), ..*self }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.count().fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            self.arenas.give_back(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Free;
    use std::collections::BTreeSet;

    #[test]
    fn pages_are_given_out_round_and_round_and_runs_side_by_side() {
        for pages in [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 200] {
            let mut free = Free::all(pages);
            let mut held = BTreeSet::new();
            let (mut from, mut x) = (0, 1u64);
            let mut draw = |n: u32| {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (x >> 33) as u32 % n.max(1)
            };
            let eight = |first: u32| first..(first + 8).min(pages);
            for _ in 0..4000 {
                let whole = |held: &BTreeSet<u32>, first: u32| eight(first).all(|i| !held.contains(&i));
                let round = (0..pages).map(|i| (from + i) % pages);
                let (got, wanted) = match draw(6) {
                    0 => (free.any(), round.clone().find(|i| !held.contains(i))),
                    1 => {
                        let mut firsts = round.filter(|i| i % 8 == 0);
                        // Of a short eight at the end nobody asks before there is no other.
                        let full = firsts.clone().find(|i| i + 8 <= pages && whole(&held, *i));
                        (free.first_of_eight(), full.or_else(|| firsts.find(|i| whole(&held, *i))))
                    }
                    2 => {
                        let at = draw(pages + 1);
                        let fits = at < pages && !held.contains(&at) && (at % 8 != 0 || whole(&held, at));
                        (free.at(at), fits.then_some(at))
                    }
                    _ => {
                        if let Some(&back) = held.iter().nth(draw(held.len() as u32) as usize) {
                            held.remove(&back);
                            free.give_back(back);
                        }
                        continue;
                    }
                };
                assert_eq!(got, wanted);
                if let Some(index) = got {
                    held.insert(index);
                    from = (index + 1) % pages;
                }
                assert_eq!(free.count, pages - held.len() as u32);
                let firsts = (0..pages).step_by(8);
                assert_eq!(free.whole as usize, firsts.filter(|i| whole(&held, *i)).count());
            }
            while free.any().is_some() {}
            assert_eq!((free.count, free.whole), (0, 0));
        }
    }
}
