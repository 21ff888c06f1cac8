//! One tier: its free space, and the pages stored in it.

use super::replica::RankPage;
use super::{PageStore, Spec, TierUsage};
use crate::base::error::FabricError;
use crate::base::error::{Error, TierOperation};
use crate::base::failures::Counts;
use crate::base::page_sum::sum;
use pikv_core::warp::LANES;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A tier below the first.
#[derive(Debug)]
pub(crate) struct Level {
    name: String,
    capacity: u64,
    /// Index of the tier; the first tier, which has no `Level`, is 0.
    pub index: usize,
    /// `None` for a tier in host memory.
    store: Option<Box<dyn PageStore>>,
    room: Mutex<FreeRanges>,
    /// Whether freed pages are overwritten, and the counter of failures to do so.
    wipe: bool,
    failures: Arc<Counts>,
}

/// The free ranges of a tier.
#[derive(Debug)]
struct FreeRanges {
    used: u64,
    /// For a store: free ranges by start, none adjacent to another.
    free: BTreeMap<u64, u64>,
}

impl FreeRanges {
    /// Takes `bytes` contiguous bytes at the lowest start.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&start, &len) = self.free.iter().find(|(_, len)| **len >= bytes)?;
        self.free.remove(&start);
        if len > bytes {
            self.free.insert(start + bytes, len - bytes);
        }
        self.used += bytes;
        Some(start)
    }

    fn give_back(&mut self, mut start: u64, bytes: u64) {
        self.used -= bytes;
        let mut len = bytes;
        if let Some(after) = self.free.remove(&(start + len)) {
            len += after;
        }
        if let Some((&before, &of)) = self.free.range(..start).next_back().filter(|(s, l)| *s + *l == start) {
            (start, len) = (before, of + len);
        }
        self.free.insert(start, len);
    }
}

/// A page in a tier; dropping it frees its space.
#[derive(Debug)]
pub(crate) struct StoredPage {
    pub level: Arc<Level>,
    data: Data,
    words: usize,
    sum: u64,
    /// Position of each lane that was written.
    pub positions: [u32; LANES],
}

#[derive(Debug)]
enum Data {
    Memory(Box<[u32]>),
    At(u64),
    /// On ranks of a fabric.
    Ranks(RankPage),
}

impl Level {
    pub fn new(index: usize, spec: &Spec, wipe: bool, failures: &Arc<Counts>) -> Result<Level, Error> {
        let Spec { name, capacity, open } = spec;
        let failed = |error: io::Error| Error::Tier {
            operation: TierOperation::Open,
            tier: name.clone(),
            bytes: *capacity,
            kind: error.kind(),
        };
        let store = open.as_ref().map(|open| open()).transpose().map_err(failed)?;
        let free = (*capacity > 0).then_some((0, *capacity)).into_iter().collect();
        let room = Mutex::new(FreeRanges { used: 0, free });
        let (name, failures) = (name.clone(), failures.clone());
        Ok(Level { name, capacity: *capacity, index, store, room, wipe, failures })
    }

    /// The level of pages stored on ranks of a fabric.
    pub fn fabric() -> Level {
        let room = Mutex::new(FreeRanges { used: 0, free: BTreeMap::new() });
        let (name, failures) = ("fabric".to_owned(), Arc::default());
        Level { name, capacity: u64::MAX, index: 0, store: None, room, wipe: false, failures }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn usage(&self) -> TierUsage {
        TierUsage { name: self.name.clone(), bytes: self.room().used, capacity: self.capacity }
    }

    /// Free bytes.
    pub fn available(&self) -> u64 {
        self.capacity - self.room().used
    }

    /// Whether a page must be copied to the staging area before it is read.
    pub fn staged(&self) -> bool {
        self.store.is_some()
    }

    fn room(&self) -> MutexGuard<'_, FreeRanges> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, operation: TierOperation, bytes: u64, error: &io::Error) -> Error {
        Error::Tier { operation, tier: self.name.clone(), bytes, kind: error.kind() }
    }

    /// Writes a page.
    ///
    /// # Errors
    /// [`Error::TierFull`], or [`Error::Tier`] from the store; no space is taken then.
    pub fn put(self: &Arc<Self>, words: &[u32], positions: [u32; LANES]) -> Result<StoredPage, Error> {
        let bytes = size_of_val(words) as u64;
        let full = |used: u64| Error::TierFull {
            tier: self.name.clone(),
            needed: bytes,
            available: self.capacity - used,
        };
        // Take the space first: dropping the slot after a failure frees it.
        let mut room = self.room();
        let used = room.used;
        let data = match &self.store {
            Some(_) => Data::At(room.take(bytes).ok_or_else(|| full(used))?),
            None if bytes > self.capacity - used => return Err(full(used)),
            None => {
                room.used += bytes;
                Data::Memory(Box::default())
            }
        };
        drop(room);
        let mut slot =
            StoredPage { level: self.clone(), data, words: words.len(), sum: sum(words), positions };
        match (&self.store, &mut slot.data) {
            (Some(store), Data::At(at)) => store
                .write(*at, bytemuck::cast_slice(words))
                .map_err(|error| self.failed(TierOperation::Write, bytes, &error))?,
            (_, Data::Memory(memory)) => {
                let mut copy = Vec::new();
                let refused =
                    |_| self.failed(TierOperation::Write, bytes, &io::ErrorKind::OutOfMemory.into());
                copy.try_reserve_exact(words.len()).map_err(refused)?;
                copy.extend_from_slice(words);
                *memory = copy.into_boxed_slice();
            }
            (None, Data::At(_)) | (_, Data::Ranks(_)) => unreachable!("positions are those of a store"),
        }
        Ok(slot)
    }
}

impl StoredPage {
    /// A page of these words that is stored on ranks.
    pub fn on_ranks(level: Arc<Level>, kept: RankPage, words: &[u32], positions: [u32; LANES]) -> StoredPage {
        StoredPage { level, data: Data::Ranks(kept), words: words.len(), sum: sum(words), positions }
    }

    /// The copies on ranks, if the page is stored there.
    pub fn rank_page(&self) -> Option<&RankPage> {
        match &self.data {
            Data::Ranks(kept) => Some(kept),
            _ => None,
        }
    }

    /// The page's words, if it lies in host memory.
    pub fn in_place(&self) -> Option<&[u32]> {
        match &self.data {
            Data::Memory(words) => Some(words),
            Data::At(_) | Data::Ranks(_) => None,
        }
    }

    pub fn words(&self) -> usize {
        self.words
    }

    pub fn bytes(&self) -> u64 {
        self.words as u64 * 4
    }

    /// Copies the page to `words`, which must have its length.
    ///
    /// # Errors
    /// [`Error::Tier`], also if the bytes do not match the page's checksum.
    pub fn read_into(&self, words: &mut [u32]) -> Result<(), Error> {
        match (&self.data, &self.level.store) {
            (Data::At(at), Some(store)) => {
                let failed = |error| self.level.failed(TierOperation::Read, self.bytes(), &error);
                store.read(*at, bytemuck::cast_slice_mut(words)).map_err(failed)?;
                if sum(words) != self.sum {
                    return Err(failed(io::ErrorKind::InvalidData.into()));
                }
            }
            (Data::Memory(memory), _) => words.copy_from_slice(memory),
            (Data::Ranks(kept), _) => {
                kept.fetch(words)?;
                if sum(words) != self.sum {
                    return Err(
                        FabricError::Malformed { rank: kept.rank(), what: "a page of other bytes" }.into()
                    );
                }
            }
            (Data::At(_), None) => unreachable!("positions are those of a store"),
        }
        Ok(())
    }

    /// A copy of the page.
    ///
    /// # Errors
    /// The same as [`StoredPage::read_into`].
    pub fn read(&self) -> Result<Box<[u32]>, Error> {
        let mut words = vec![0; self.words].into_boxed_slice();
        self.read_into(&mut words)?;
        Ok(words)
    }
}

impl StoredPage {
    /// Overwrites the page with zeros; ranks of a fabric overwrite theirs themselves.
    fn wipe(&mut self) {
        let wiped = match (&mut self.data, &self.level.store) {
            (Data::At(at), Some(store)) => store.write(*at, &vec![0; self.words * 4]),
            (Data::Memory(words), _) => {
                words.fill(0);
                // Keeps the compiler from removing the writes, which nothing reads.
                std::hint::black_box(words);
                Ok(())
            }
            _ => Ok(()),
        };
        if wiped.is_err() {
            self.level.failures.unwiped();
        }
    }
}

impl Drop for StoredPage {
    fn drop(&mut self) {
        let bytes = self.bytes();
        if self.level.wipe {
            self.wipe();
        }
        let mut room = self.level.room();
        match self.data {
            Data::At(at) => room.give_back(at, bytes),
            Data::Memory(_) => room.used -= bytes,
            Data::Ranks(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares `FreeRanges` with a map of single bytes.
    #[test]
    fn first_fit_and_joined_again() {
        let mut room = FreeRanges { used: 0, free: [(0, 100)].into() };
        let mut taken = [false; 100];
        let mut held: Vec<(u64, u64)> = Vec::new();
        let mut x = 1u32;
        for _ in 0..5000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let n = u64::from(x >> 8) % 17 + 1;
            if x >> 31 == 0 {
                let fits = (0..=100 - n as usize).find(|at| !taken[*at..*at + n as usize].contains(&true));
                let at = room.take(n);
                assert_eq!(at, fits.map(|at| at as u64));
                if let Some(at) = at {
                    taken[at as usize..(at + n) as usize].fill(true);
                    held.push((at, n));
                }
            } else if !held.is_empty() {
                let (at, n) = held.swap_remove(x as usize % held.len());
                taken[at as usize..(at + n) as usize].fill(false);
                room.give_back(at, n);
            }
            assert_eq!(room.used, taken.iter().filter(|t| **t).count() as u64);
        }
        held.into_iter().for_each(|(at, n)| room.give_back(at, n));
        assert_eq!(room.free, [(0, 100)].into());
    }
}
