//! Pages on the ranks of a fabric, as data: what knows the ranks is above.

use crate::base::error::Error;
use smallvec::SmallVec;
use std::cmp::Ordering;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Brings pages here that ranks have.
pub(crate) trait FetchPage: Send + Sync {
    /// Fills `words` with those of a page, as many as it has.
    ///
    /// # Errors
    /// The ranks that have copies are lost, or one fails.
    fn fetch(&self, page: &Kept, words: &mut [u32]) -> Result<(), Error>;

    /// Whether a rank is another process, or kept apart as if it were one.
    fn is_wired(&self, rank: u32) -> bool;
}

/// A block of 8 pages of one expert, of whatever sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    pub layer: u32,
    pub head: u32,
    pub expert: u16,
    pub block: u32,
}

/// Pages that nobody holds any more, by rank, which learns of it with the next message.
#[derive(Debug, Default)]
pub struct Freed(pub Mutex<Vec<Vec<u64>>>);

/// A page on a rank. Dropped, it is freed there.
#[derive(Debug)]
pub struct Copy {
    pub rank: u32,
    pub id: u64,
    pub freed: Arc<Freed>,
}

impl Drop for Copy {
    fn drop(&mut self) {
        let mut freed = self.freed.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(freed) = freed.get_mut(self.rank as usize) {
            freed.push(self.id);
        }
    }
}

/// Copies of a page.
pub type Copies = SmallVec<[Arc<Copy>; 1]>;

/// A page that ranks keep.
pub(crate) struct Kept {
    pub copies: RwLock<Copies>,
    pub block: Block,
    front: Arc<dyn FetchPage>,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("block", &self.block)
            .field("copies", &self.copies)
            .finish_non_exhaustive()
    }
}

impl Kept {
    pub fn new(front: Arc<dyn FetchPage>, block: Block, copies: Copies) -> Kept {
        Kept { copies: RwLock::new(copies), block, front }
    }

    /// The copies as they are now; as long as they are held, so are the pages.
    pub fn copies(&self) -> Copies {
        self.copies.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The rank that is asked first.
    pub fn rank(&self) -> u32 {
        self.copies().first().map_or(0, |copy| copy.rank)
    }

    /// Whether this process has a copy, as rank 0 of `mpi`.
    pub fn is_here(&self) -> bool {
        self.copies().iter().any(|copy| !self.front.is_wired(copy.rank))
    }

    /// Brings a copy of the page here.
    ///
    /// # Errors
    /// The ranks that have copies are lost, or one fails.
    pub fn fetch(&self, words: &mut [u32]) -> Result<(), Error> {
        self.front.fetch(self, words)
    }
}

/// Pages of a chain that are still here, and of which a rank has a copy, because the rest of their block is there. The rank has room for
/// the next page of that block, too: no read takes memory there.
#[derive(Debug, Default)]
pub(crate) struct Mirrors(Mutex<Vec<Mirror>>);

#[derive(Clone, Debug)]
pub(crate) struct Mirror {
    pub ordinal: u32,
    pub copy: Arc<Copy>,
    /// Lanes that the rank has as they are here.
    pub synced: u32,
    /// Of the link when it was made.
    pub epoch: u64,
}

impl Mirror {
    /// Has everything be sent again if that was before a round that failed. The rank still has the room for it.
    pub fn renew(&mut self, epoch: u64) {
        if self.epoch != epoch {
            (self.epoch, self.synced) = (epoch, 0);
        }
    }
}

/// A fork reads the same copies, until either side writes: whoever writes first then gets one of its own.
impl Clone for Mirrors {
    fn clone(&self) -> Mirrors {
        Mirrors(Mutex::new(self.list().clone()))
    }
}

impl Mirrors {
    /// Notes what a rank has by now.
    pub fn note(&self, mirror: Mirror) {
        let mut list = self.list();
        list.retain(|known| known.ordinal != mirror.ordinal);
        list.push(mirror);
    }

    pub fn list(&self) -> MutexGuard<'_, Vec<Mirror>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes back what the rank has past `fill` lanes of the last page, which is at `ordinal`.
    pub fn cut(&mut self, ordinal: u32, fill: u32) {
        let list = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        list.retain(|mirror| mirror.ordinal <= ordinal + 1);
        for mirror in list {
            match mirror.ordinal.cmp(&ordinal) {
                Ordering::Less => {}
                Ordering::Equal => mirror.synced = mirror.synced.min(fill),
                Ordering::Greater => mirror.synced = 0,
            }
        }
    }

    /// Bytes of the list.
    pub fn bytes(&self) -> usize {
        self.list().capacity() * size_of::<Mirror>()
    }

    /// Forgets the pages before `ordinal`, whose tokens moved.
    pub fn forget(&mut self, ordinal: u32) {
        let list = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        list.retain(|mirror| mirror.ordinal >= ordinal);
    }

    /// The rank that has a copy of the page at `ordinal`.
    pub fn rank(&self, ordinal: u32) -> Option<u32> {
        self.list().iter().find(|mirror| mirror.ordinal == ordinal).map(|mirror| mirror.copy.rank)
    }
}
