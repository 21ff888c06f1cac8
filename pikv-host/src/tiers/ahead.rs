//! Prefetch of pages from lower tiers, by a thread of the cache.

use super::level::{Level, StoredPage};
use super::{Fetches, TierUsage, Tiers};
use crate::base::error::Error;
use crate::base::failures::Counts;
use crate::base::locks::mpsc::{Receiver, Sender, channel};
use crate::base::locks::thread::{self, JoinHandle};
use crate::base::locks::{Condvar, Mutex, MutexGuard};
use crate::base::parallel::each;
use pikv_core::warp::LANES;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

/// The tiers of a cache below the first.
#[derive(Debug)]
pub(crate) struct Levels {
    pub levels: Vec<Arc<Level>>,
    spare: Arc<Spare>,
    thread: Mutex<Option<Thread>>,
    /// Whether the last call read all pages; the next call is then likely to do so.
    pub reads_all: AtomicBool,
    /// Whether pages in host memory are read without a copy.
    in_place: bool,
    fetches: [AtomicU64; 4],
}

/// Pages of a layer that a step has begun to prefetch.
#[derive(Debug, Default)]
pub(crate) struct Prefetched {
    pub layer: usize,
    /// Pages in files.
    pub ahead: Option<Ahead>,
    /// Pages in memory, on their way to a device.
    pub lifted: Option<crate::tiers::upload::UploadedPages>,
}

/// The prefetch thread, and its queue.
#[derive(Debug)]
struct Thread {
    queue: Sender<Weak<Batch>>,
    handle: JoinHandle<()>,
}

/// A prefetch of a layer's pages. Dropping it cancels reads that have not begun, and waits for the one in progress.
#[derive(Debug)]
pub(crate) struct Ahead {
    index: HashMap<usize, usize>,
    batch: Arc<Batch>,
}

#[derive(Debug)]
struct Batch {
    pages: Mutex<Vec<PrefetchState>>,
    changed: Condvar,
    spare: Arc<Spare>,
}

/// Staging buffers kept for reuse: the first write to new memory from the system costs more than the read into it.
#[derive(Debug)]
struct Spare {
    /// Most bytes that a call may stage, and that are kept in buffers.
    staging: u64,
    buffers: Mutex<Buffers>,
}

#[derive(Debug, Default)]
struct Buffers {
    by_words: HashMap<usize, Vec<Box<[u32]>>>,
    /// Bytes of all buffers.
    bytes: u64,
}

impl Spare {
    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a page into a buffer.
    fn read(&self, slot: &StoredPage) -> Result<Box<[u32]>, Error> {
        let spare = {
            let Buffers { by_words, bytes } = &mut *self.buffers();
            let buffer = by_words.get_mut(&slot.words()).and_then(Vec::pop);
            *bytes -= buffer.as_ref().map_or(0, |_| slot.bytes());
            buffer
        };
        let mut words = spare.unwrap_or_else(|| vec![0; slot.words()].into_boxed_slice());
        slot.read_into(&mut words)?;
        Ok(words)
    }

    fn give_back(&self, read: impl Iterator<Item = Box<[u32]>>) {
        let Buffers { by_words, bytes } = &mut *self.buffers();
        for words in read {
            let more = *bytes + size_of_val(&words[..]) as u64;
            if more <= self.staging {
                *bytes = more;
                by_words.entry(words.len()).or_default().push(words);
            }
        }
    }
}

/// A page of a batch of reads.
#[derive(Debug)]
enum PrefetchState {
    Waiting(Arc<StoredPage>),
    Reading,
    Here(Box<[u32]>),
    /// Taken, cancelled or failed: the caller reads the page itself.
    Gone,
}

/// Pages read for a call, by [`key`].
#[derive(Debug)]
pub(crate) struct Staged {
    pages: HashMap<usize, Box<[u32]>>,
    spare: Arc<Spare>,
}

/// A slot's key: its address, which is unique while the slot is held.
fn key(slot: &Arc<StoredPage>) -> usize {
    Arc::as_ptr(slot) as usize
}

impl Staged {
    /// The words of a gathered page; empty for other pages.
    pub fn words(&self, slot: &Arc<StoredPage>) -> &[u32] {
        self.pages.get(&key(slot)).map_or(&[], |words| words)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.spare.give_back(self.pages.drain().map(|(_, words)| words));
    }
}

impl Levels {
    /// `None` without tiers. `in_place`: pages in host memory are read without a copy; `wipe`: freed pages are overwritten.
    pub fn new(
        tiers: &Tiers,
        in_place: bool,
        wipe: bool,
        failures: &Arc<Counts>,
    ) -> Result<Option<Levels>, Error> {
        let level = |(i, spec)| Level::new(i + 1, spec, wipe, failures).map(Arc::new);
        let levels = tiers.specs.iter().enumerate().map(level).collect::<Result<Vec<_>, _>>()?;
        let (thread, reads_all) = (Mutex::default(), AtomicBool::new(false));
        let some = !levels.is_empty();
        let fetches = Default::default();
        let spare = Arc::new(Spare { staging: tiers.staging, buffers: Mutex::default() });
        Ok(some.then_some(Levels { levels, spare, thread, reads_all, in_place, fetches }))
    }

    /// Bytes of the staging area that reading the page takes.
    pub fn staged(&self, slot: &StoredPage) -> u64 {
        if slot.level.staged() || !self.in_place { slot.bytes() } else { 0 }
    }

    pub fn usage(&self) -> Vec<TierUsage> {
        self.levels.iter().map(|level| level.usage()).collect()
    }

    pub fn fetches(&self) -> Fetches {
        let [in_place, ahead, awaited, late] = [0, 1, 2, 3].map(|i| self.fetches[i].load(Ordering::Relaxed));
        Fetches { in_place, ahead, awaited, late }
    }

    /// Writes a page to the first tier that accepts it.
    ///
    /// # Errors
    /// The error of the last tier tried; [`Error::NoTiers`] without tiers.
    pub fn put(&self, words: &[u32], positions: [u32; LANES]) -> Result<StoredPage, Error> {
        let mut refused = Error::NoTiers;
        for level in &self.levels {
            match level.put(words, positions) {
                Ok(slot) => return Ok(slot),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    fn count(&self, counted: Fetches) {
        let Fetches { in_place, ahead, awaited, late } = counted;
        for (sum, n) in self.fetches.iter().zip([in_place, ahead, awaited, late]) {
            sum.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Starts to prefetch pages of a layer, as many as fit in the staging area besides `used` bytes.
    pub fn ahead<'s>(&self, slots: impl Iterator<Item = &'s Arc<StoredPage>>, used: u64) -> Option<Ahead> {
        let mut room = self.spare.staging.saturating_sub(used);
        let (mut index, mut pages) = (HashMap::new(), Vec::new());
        for slot in slots.filter(|slot| slot.level.staged()) {
            if let Entry::Vacant(at) = index.entry(key(slot)) {
                let Some(left) = room.checked_sub(slot.bytes()) else { break };
                room = left;
                at.insert(pages.len());
                pages.push(PrefetchState::Waiting(slot.clone()));
            }
        }
        if pages.is_empty() {
            return None;
        }
        let spare = self.spare.clone();
        let batch = Arc::new(Batch { pages: Mutex::new(pages), changed: Condvar::new(), spare });
        self.send(Arc::downgrade(&batch));
        Some(Ahead { index, batch })
    }

    /// Queues a batch for the thread, which is started with the first batch. Without a thread, pages are read on request.
    fn send(&self, batch: Weak<Batch>) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (queue, batches) = channel();
            let handle =
                thread::Builder::new().name("pikv-tiers".to_owned()).spawn(move || bring_up(&batches));
            *thread = handle.ok().map(|handle| Thread { queue, handle });
        }
        if let Some(Thread { queue, .. }) = &*thread {
            // The thread ends only when the queue is dropped.
            let _ = queue.send(batch);
        }
    }

    /// Reads a call's pages from lower tiers, and returns them with the number of bytes. Pages in host memory are not copied.
    ///
    /// # Errors
    /// [`Error::Staging`], or [`Error::Tier`] for the first page that could not be read.
    pub fn gather<'s>(
        &self,
        layer: usize,
        slots: impl Iterator<Item = &'s Arc<StoredPage>>,
        ahead: Option<Ahead>,
    ) -> Result<(Staged, u64), Error> {
        let (mut counted, mut remote, mut needed) = (Fetches::default(), 0, 0);
        let mut wanted: HashMap<usize, &Arc<StoredPage>> = HashMap::new();
        let mut order = Vec::new();
        for slot in slots {
            if wanted.insert(key(slot), slot).is_none() {
                remote += slot.bytes();
                needed += self.staged(slot);
                if slot.level.staged() {
                    order.push(slot);
                } else if self.in_place {
                    counted.in_place += 1;
                }
            }
        }
        let staging = self.spare.staging;
        if needed > staging {
            return Err(Error::Staging { layer, needed, staging });
        }
        let (mut late, mut awaited) = (Vec::new(), Vec::new());
        let mut staged = Staged { pages: HashMap::new(), spare: self.spare.clone() };
        if let Some(Ahead { index, batch, .. }) = &ahead {
            let mut pages = batch.pages();
            for slot in order {
                match index.get(&key(slot)) {
                    Some(at) => match std::mem::replace(&mut pages[*at], PrefetchState::Gone) {
                        PrefetchState::Here(words) => {
                            staged.pages.insert(key(slot), words);
                        }
                        PrefetchState::Reading => {
                            pages[*at] = PrefetchState::Reading;
                            awaited.push((*at, slot));
                        }
                        PrefetchState::Waiting(_) | PrefetchState::Gone => late.push(slot),
                    },
                    None => late.push(slot),
                }
            }
        } else {
            late = order;
        }
        counted.ahead = staged.pages.len() as u64;
        (counted.awaited, counted.late) = (awaited.len() as u64, late.len() as u64);
        for (slot, words) in late.iter().zip(each(&late, |slot| self.spare.read(slot))) {
            staged.pages.insert(key(slot), words?);
        }
        for (at, slot) in awaited {
            let words = match ahead.as_ref().and_then(|ahead| ahead.batch.wait(at)) {
                Some(words) => words,
                // The prefetch failed; read it again.
                None => self.spare.read(slot)?,
            };
            staged.pages.insert(key(slot), words);
        }
        self.count(counted);
        Ok((staged, remote))
    }
}

impl Levels {
    /// Starts to copy pages from host memory to a device, as many as fit in the staging area besides `used` bytes. Pages that fail are
    /// read on request.
    pub fn lift<'s>(
        &self,
        device: &Arc<crate::device::Device>,
        slots: impl Iterator<Item = &'s Arc<StoredPage>>,
        used: u64,
    ) -> Option<crate::tiers::upload::UploadedPages> {
        let mut room = self.spare.staging.saturating_sub(used);
        let fits = |slot: &(&Arc<StoredPage>, &[u32])| match room.checked_sub(slot.0.bytes()) {
            Some(left) => {
                room = left;
                true
            }
            None => false,
        };
        let near = slots.filter_map(|slot| Some((slot, slot.in_place()?)));
        device.lift(near.take_while(fits)).ok()
    }

    /// Counts the host memory pages that a device reads; those in `late` were not prefetched.
    pub fn count_lifted<'s>(
        &self,
        slots: impl Iterator<Item = &'s Arc<StoredPage>>,
        late: &crate::tiers::upload::UploadedPages,
    ) {
        let all = slots.filter(|slot| !slot.level.staged());
        let all: HashMap<usize, bool> = all.map(|slot| (key(slot), late.address(slot).is_some())).collect();
        let late = all.values().filter(|late| **late).count() as u64;
        self.count(Fetches { ahead: all.len() as u64 - late, late, ..Fetches::default() });
    }
}

impl Drop for Levels {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Thread { queue, handle }) = thread {
            drop(queue);
            // The thread catches panics of stores.
            let _ = handle.join();
        }
    }
}

impl Batch {
    fn pages(&self) -> MutexGuard<'_, Vec<PrefetchState>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the page at `at`, which is being read; `None` if the read fails.
    fn wait(&self, at: usize) -> Option<Box<[u32]>> {
        let mut pages = self.pages();
        while matches!(pages[at], PrefetchState::Reading) {
            pages = self.changed.wait(pages).unwrap_or_else(PoisonError::into_inner);
        }
        match std::mem::replace(&mut pages[at], PrefetchState::Gone) {
            PrefetchState::Here(words) => Some(words),
            _ => None,
        }
    }

    /// Reads the page at `at` if nothing has; `false` if `at` is past the last page.
    fn bring(&self, at: usize) -> bool {
        let slot = match self.pages().get_mut(at) {
            None => return false,
            Some(page @ PrefetchState::Waiting(_)) => match std::mem::replace(page, PrefetchState::Reading) {
                PrefetchState::Waiting(slot) => slot,
                _ => return true,
            },
            Some(_) => return true,
        };
        // A store of the user's may panic; waiting threads must be notified.
        let read = catch_unwind(AssertUnwindSafe(|| self.spare.read(&slot)));
        drop(slot);
        self.pages()[at] = match read {
            Ok(Ok(words)) => PrefetchState::Here(words),
            _ => PrefetchState::Gone,
        };
        self.changed.notify_all();
        true
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let mut pages = self.batch.pages();
        let given_up = pages.iter_mut().filter(|page| !matches!(page, PrefetchState::Reading));
        self.batch.spare.give_back(given_up.filter_map(|page| {
            match std::mem::replace(page, PrefetchState::Gone) {
                PrefetchState::Here(words) => Some(words),
                _ => None,
            }
        }));
        while pages.iter().any(|page| matches!(page, PrefetchState::Reading)) {
            pages = self.batch.changed.wait(pages).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The loop of the prefetch thread.
fn bring_up(batches: &Receiver<Weak<Batch>>) {
    for batch in batches {
        let mut at = 0;
        // Dropping a batch waits for at most the page being read.
        while batch.upgrade().is_some_and(|batch| batch.bring(at)) {
            at += 1;
        }
    }
}
