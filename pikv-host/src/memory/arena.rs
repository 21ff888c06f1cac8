//! Page memory: a size class for each shard and page size, handles that free their page on drop, and one budget over all.
//!
//! For a page on a device the host keeps a header: the positions of its tokens, which the cache's bookkeeping reads, and its address.

use crate::backend::Backend;
use crate::base::error::Error;
use crate::base::failures::Counts;
use crate::config::CacheConfig;
use crate::memory::cuda::Pending;
use crate::memory::growth::Growth;
use crate::memory::size_class::{Counted, FILLER, SizeClass, Spot};
use pikv_core::LANES;
use pikv_core::page::{Layout, PAGE};
use std::borrow::Cow;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All page memory of a cache.
pub struct Arenas {
    /// Words of a page, for each size in use, ascending.
    classes: Vec<u32>,
    /// `[shard][class]`.
    sizes: Vec<Mutex<SizeClass>>,
    /// Bytes in use on each shard.
    shards: Vec<AtomicU64>,
    backend: Backend,
    budget: u64,
    /// Bytes in use or reserved.
    taken: AtomicU64,
    growth: Growth,
    nan_fill: bool,
    /// Whether freed pages are overwritten, and the count of failures to do so.
    wipe: bool,
    failures: Arc<Counts>,
}

/// Preferred location of a new page.
#[derive(Clone, Copy)]
pub(crate) enum Near<'a> {
    /// Anywhere: for pages that are freed soon.
    Any,
    /// At the start of a run of pages that are read together.
    Run,
    /// After this page, which is read just before.
    After(&'a Page),
}

impl<'a> Near<'a> {
    /// Location of the page after `last` in a run.
    pub fn next(last: Option<&'a Page>) -> Near<'a> {
        last.map_or(Near::Run, Near::After)
    }
}

/// Reserved bytes for pages. Unused bytes are released on drop.
#[derive(Debug)]
pub struct Reservation {
    arenas: Arc<Arenas>,
    /// Bytes left, or 0 if they are lent.
    bytes: u64,
    /// Bytes left, if a [`Lease`] owns them.
    lent: Option<Arc<AtomicU64>>,
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

/// Unused reserved bytes of a step, owned by a sequence of the step: if the step is leaked instead of dropped, they are released when
/// the sequence is used again or dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    arenas: Arc<Arenas>,
    left: Arc<AtomicU64>,
}

impl Lease {
    /// A lease of 0 bytes.
    pub fn new(arenas: &Arc<Arenas>) -> Lease {
        Lease { arenas: arenas.clone(), left: Arc::default() }
    }

    /// Bytes that a leaked step left.
    pub fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// Releases the bytes that a leaked step left.
    pub fn give_back(&self) {
        self.arenas.taken.fetch_sub(self.left.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A handle of a page. Clones share the page; the last drop frees it.
pub struct Page {
    arenas: Arc<Arenas>,
    words: NonNull<u32>,
    counted: NonNull<Counted>,
}

// SAFETY: shared handles only read the words; writes need `Page::words_mut`, which needs the sole handle, and the count is
// atomic.
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
    /// Starts without memory. `heads`: words of each page size, and the number of heads with pages of that size.
    pub(crate) fn new(
        config: &CacheConfig,
        heads: impl IntoIterator<Item = (u32, u32)>,
        failures: &Arc<Counts>,
    ) -> Arc<Arenas> {
        let heads: Vec<(u32, u32)> = heads.into_iter().collect();
        let mut classes: Vec<u32> = heads.iter().map(|(words, _)| *words).collect();
        let &CacheConfig { budget, nan_fill, wipe, .. } = config;
        let (shards, failures) = (config.shards.shards(), failures.clone());
        let backend = config.backend.clone();
        classes.sort_unstable();
        classes.dedup();
        let sizes = (0..shards as usize * classes.len()).map(|_| Mutex::default()).collect();
        let shards = (0..shards).map(|_| AtomicU64::new(0)).collect();
        let taken = AtomicU64::new(0);
        let growth = Growth::new(&classes, &heads);
        Arc::new(Arenas { classes, sizes, shards, backend, budget, taken, growth, nan_fill, wipe, failures })
    }

    /// Bytes of pages in use on each shard.
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

    /// Whether pages lie in host memory.
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

    /// Reserves `needed` bytes of the budget.
    pub(crate) fn reserve(self: &Arc<Self>, needed: u64) -> Result<Reservation, Error> {
        self.taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
                taken.checked_add(needed).filter(|sum| *sum <= self.budget)
            })
            .map(|_| Reservation {
                arenas: self.clone(),
                bytes: needed,
                lent: None,
                pending: self.backend.device().cloned().map(Pending::new),
            })
            .map_err(|taken| Error::OutOfBudget { needed, available: self.budget.saturating_sub(taken) })
    }

    pub(crate) fn size(&self, shard: usize, class: usize) -> MutexGuard<'_, SizeClass> {
        // A size class does not panic halfway through a change, so its state behind a poisoned lock is valid.
        self.sizes[shard * self.classes.len() + class].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Words of a page that are in host memory: all, or the positions of a device page.
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
        if self.nan_fill || self.wipe {
            // SAFETY: the last handle is being dropped, so nothing else accesses these `near` words of the chunk.
            unsafe { std::slice::from_raw_parts_mut(page.words.as_ptr(), near) }.fill(FILLER);
        }
        if self.wipe
            && let Some(device) = self.backend.device()
            && device.fill(page.address(), FILLER, words as u32).is_err()
        {
            self.failures.unwiped();
        }
        self.size(shard, class).give_back(chunk, index);
        self.shards[shard].fetch_sub(words as u64 * 4, Ordering::Relaxed);
        self.taken.fetch_sub(words as u64 * 4, Ordering::Relaxed);
    }
}

impl Reservation {
    /// Reserves bytes again that this step took and has just freed, unless other steps took them meanwhile.
    pub(crate) fn regain(&mut self, bytes: u64) {
        if let Ok(mut again) = self.arenas.reserve(bytes) {
            self.add(std::mem::take(&mut again.bytes));
        }
    }

    /// Lends the bytes left to `lease`.
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

    /// Allocates a page of `words` words on `shard` from the reserved bytes. It has no positions, and its other words are undefined.
    pub(crate) fn take(&mut self, shard: u32, words: u32, near: Near<'_>) -> Result<Page, Error> {
        let bytes = u64::from(words) * 4;
        let arenas = &self.arenas;
        let Ok(class) = arenas.classes.binary_search(&words) else {
            unreachable!("the classes are those of the layers")
        };
        // A step reserves an upper bound of its bytes; if the bound were wrong, this step fails and no other.
        let available = self.left();
        if bytes > available {
            return Err(Error::OutOfBudget { needed: bytes, available });
        }
        let place = (shard, class as u16);
        // A page of another class or shard has no useful neighbours.
        let spot = match near {
            Near::Any => Spot::Any,
            Near::After(page) if (page.shard(), page.counted().class) == place => {
                let &Counted { chunk, index, .. } = page.counted();
                Spot::After { chunk, index }
            }
            Near::Run | Near::After(_) => Spot::Run,
        };
        let (first, counted) =
            arenas.size(shard as usize, class).take(&arenas.backend, place, words, spot)?;
        arenas.shards[shard as usize].fetch_add(bytes, Ordering::Relaxed);
        let mut page = Page { arenas: arenas.clone(), words: first, counted };
        self.subtract(bytes);
        let all = self.arenas.nan_fill;
        if let Some(words) = page.words_mut() {
            let n = if all { words.len() } else { LANES };
            words[..n].fill(FILLER);
        }
        // The whole page: a device reads the keys of all lanes, written or not.
        if let Some(device) = page.arenas.backend.device() {
            device.fill(page.address(), FILLER, words)?;
        }
        Ok(page)
    }
}

impl Page {
    /// The page's words; only the positions for a page on a device.
    #[inline]
    pub fn words(&self) -> &[u32] {
        let words = self.arenas.near(self.counted().class);
        // SAFETY: this handle holds the arenas, which keep a chunk while one of its pages has a handle; from here the chunk has `words`
        // initialised words, which are written only through a sole handle borrowed mutably, and `self` is borrowed shared.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), words) }
    }

    /// The page's first words: the positions in a page of single tokens.
    #[inline]
    pub fn positions(&self) -> &[u32; LANES] {
        // SAFETY: as in `words`; every page has at least `LANES` words, and for a device page these are in host memory. (A check by `near`
        // would cost a memory access.)
        unsafe { &*self.words.as_ptr().cast() }
    }

    /// All words of the page, from host memory or the device.
    ///
    /// # Errors
    /// A failed device.
    pub fn fetch(&self) -> Result<Cow<'_, [u32]>, Error> {
        if let Some(device) = self.arenas.backend.device() {
            let words = self.arenas.classes[usize::from(self.counted().class)];
            return Ok(Cow::Owned(device.read(self.address(), words)?));
        }
        Ok(Cow::Borrowed(self.words()))
    }

    /// Fills the page with `words`. This must be its only handle.
    ///
    /// # Errors
    /// A failed device.
    pub fn put(&mut self, words: &[u32]) -> Result<(), Error> {
        if let Some(device) = self.arenas.backend.device() {
            device.write(self.address(), words)?;
        }
        if let Some(near) = self.words_mut() {
            let n = near.len();
            near.copy_from_slice(&words[..n]);
        }
        Ok(())
    }

    /// Whether [`Page::words`] gives all of its words.
    pub fn is_near(&self) -> bool {
        self.arenas.backend.is_cpu()
    }

    /// Prefetches the count of handles and, of a page of single tokens in host memory, a token: a cache line for each row of K, and V.
    #[inline]
    pub fn fetch_token(&self, layout: &Layout, lane: u32) {
        pikv_lanes::fetch_line(self.counted.as_ptr().cast());
        let fetch = |word: u32| {
            pikv_lanes::fetch_line(self.words.as_ptr().wrapping_add(word as usize).cast());
        };
        fetch(lane);
        (0..layout.k_rows()).for_each(|row| fetch(Layout::K_BASE + row * PAGE + lane));
        let v = layout.v_base() + lane * layout.v_stride();
        // Words of a cache line, on most processors.
        (v..v + layout.v_stride()).step_by(16).for_each(fetch);
    }

    /// Address of the page on a device; 0 in host memory.
    pub fn address(&self) -> u64 {
        if !self.arenas.backend.is_cpu() {
            // SAFETY: a device page has a header of HEADER words, which live as long as the positions; the last two are never written
            // again.
            let [low, high] = unsafe { self.words.add(LANES).cast::<[u32; 2]>().read() };
            return u64::from(low) | u64::from(high) << 32;
        }
        0
    }

    /// The words of [`Page::words`] for writing, if this is the only handle.
    #[inline]
    pub fn words_mut(&mut self) -> Option<&mut [u32]> {
        if self.is_shared() {
            return None;
        }
        let words = self.arenas.near(self.counted().class);
        // SAFETY: as in `words`; this is the only handle and it is borrowed mutably, so it cannot be cloned meanwhile.
        Some(unsafe { std::slice::from_raw_parts_mut(self.words.as_ptr(), words) })
    }

    /// Number of handles.
    pub fn handles(&self) -> u32 {
        self.count().load(Ordering::Acquire)
    }

    /// Whether there are other handles.
    #[inline]
    pub fn is_shared(&self) -> bool {
        // Acquire: reads through other handles happen before writes through this one.
        self.count().load(Ordering::Acquire) != 1
    }

    /// Whether both are handles of one page.
    pub fn is(&self, other: &Page) -> bool {
        self.counted == other.counted
    }

    /// A number that is equal for handles of one page, and differs between pages.
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
        // SAFETY: it lies in the chunk, which outlives the handles of its pages, and only the atomic count is ever written.
        unsafe { self.counted.as_ref() }
    }
}

impl Clone for Page {
    fn clone(&self) -> Page {
        // As in `Arc`: billions of leaked clones must not wrap the count to 0.
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
