//! Pages on the ranks of a fabric, as data; the code that talks to ranks lies above.

use crate::base::error::Error;
use crate::base::locks::{Mutex, MutexGuard, RwLock};
use smallvec::SmallVec;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock, PoisonError, Weak};

/// Fetches pages from ranks.
pub(crate) trait FetchPage: Send + Sync {
    /// Copies the words of a page to `words`, which must have its length.
    ///
    /// # Errors
    /// All ranks with copies are lost, or one fails.
    fn fetch(&self, page: &RankPage, words: &mut [u32]) -> Result<(), Error>;

    /// Whether a rank is apart from the front ([`Fabric::is_remote`](crate::fabric::Fabric::is_remote)).
    fn is_remote(&self, rank: u32) -> bool;
}

/// A block of 8 pages of one expert, of any sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    pub layer: u32,
    pub head: u32,
    pub expert: u16,
    pub block: u32,
}

/// Ids of pages that no sequence holds, by rank; the rank frees them at the next message.
#[derive(Debug, Default)]
pub struct Freed(pub Mutex<Vec<Vec<u64>>>);

/// A page on a rank; dropping it frees it there.
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

/// A page stored on ranks.
pub(crate) struct RankPage {
    pub copies: RwLock<Copies>,
    pub block: Block,
    front: Arc<dyn FetchPage>,
}

impl fmt::Debug for RankPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankPage")
            .field("block", &self.block)
            .field("copies", &self.copies)
            .finish_non_exhaustive()
    }
}

impl RankPage {
    pub fn new(front: Arc<dyn FetchPage>, block: Block, copies: Copies) -> RankPage {
        RankPage { copies: RwLock::new(copies), block, front }
    }

    /// The present copies; holding them keeps the pages.
    pub fn copies(&self) -> Copies {
        self.copies.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The rank that is asked first.
    pub fn rank(&self) -> u32 {
        self.copies().first().map_or(0, |copy| copy.rank)
    }

    /// Whether a rank that is not apart from the front has a copy, as rank 0 of `pikv-mpi` may.
    pub fn is_here(&self) -> bool {
        self.copies().iter().any(|copy| !self.front.is_remote(copy.rank))
    }

    /// Copies the page's words to `words`.
    ///
    /// # Errors
    /// All ranks with copies are lost, or one fails.
    pub fn fetch(&self, words: &mut [u32]) -> Result<(), Error> {
        self.front.fetch(self, words)
    }
}

/// Name of an expert's run in a KV head of a layer, for any sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunId {
    pub layer: u32,
    pub head: u32,
    pub expert: u16,
}

impl Block {
    /// The run that the block belongs to.
    pub fn run(self) -> RunId {
        RunId { layer: self.layer, head: self.head, expert: self.expert }
    }
}

type List = Mutex<Vec<Mirror>>;

/// All lists of mirrors by run, of all sequences: when a block moves, its mirrors move too.
#[derive(Debug, Default)]
pub struct MirrorBook(Mutex<HashMap<RunId, Vec<Weak<List>>>>);

impl MirrorBook {
    fn add(&self, run: RunId, list: &Arc<List>) {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lists = book.entry(run).or_default();
        // Lists of dropped sequences are removed when the vector is full.
        if lists.len() == lists.capacity() {
            lists.retain(|list| list.strong_count() > 0);
        }
        lists.push(Arc::downgrade(list));
    }

    /// The lists of a run.
    pub fn of(&self, run: RunId) -> Vec<Arc<List>> {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(lists) = book.get_mut(&run) else { return Vec::new() };
        lists.retain(|list| list.strong_count() > 0);
        let held: Vec<Arc<List>> = lists.iter().filter_map(Weak::upgrade).collect();
        if lists.is_empty() {
            book.remove(&run);
        }
        held
    }
}

/// Pages of a run that are still on the front and that a rank has a copy of, because the rest of their block lies there. The rank also has
/// room for the next page of that block, so no read allocates there. Empty until a page is sent to a rank.
#[derive(Debug, Default)]
pub(crate) struct Mirrors(OnceLock<Box<Listed>>);

#[derive(Debug)]
struct Listed {
    list: Arc<List>,
    run: RunId,
    book: Arc<MirrorBook>,
}

impl Listed {
    /// A list that is entered in the book.
    fn new(list: Vec<Mirror>, run: RunId, book: &Arc<MirrorBook>) -> Box<Listed> {
        let list = Arc::new(Mutex::new(list));
        book.add(run, &list);
        Box::new(Listed { list, run, book: book.clone() })
    }

    fn list(&self) -> MutexGuard<'_, Vec<Mirror>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Mirror {
    pub ordinal: u32,
    pub copy: Arc<Copy>,
    /// Lanes in which the rank's copy equals the front's.
    pub synced: u32,
    /// Epoch of the link when the mirror was made.
    pub epoch: u64,
}

impl Mirror {
    /// Marks all lanes as not sent if the mirror is older than a failed round. The rank still has the room.
    pub fn renew(&mut self, epoch: u64) {
        if self.epoch != epoch {
            (self.epoch, self.synced) = (epoch, 0);
        }
    }
}

/// A fork shares the copies until either side writes; the first to write gets a copy of its own.
impl Clone for Mirrors {
    fn clone(&self) -> Mirrors {
        let own = OnceLock::new();
        if let Some(listed) = self.0.get() {
            let list = listed.list().clone();
            own.get_or_init(|| Listed::new(list, listed.run, &listed.book));
        }
        Mirrors(own)
    }
}

impl Mirrors {
    /// The list, for changes; entered in `book` if it is new.
    pub fn open(&self, run: RunId, book: &Arc<MirrorBook>) -> MutexGuard<'_, Vec<Mirror>> {
        self.0.get_or_init(|| Listed::new(Vec::new(), run, book)).list()
    }

    /// The list, if there is one.
    pub fn list(&self) -> Option<MutexGuard<'_, Vec<Mirror>>> {
        self.0.get().map(|listed| listed.list())
    }

    /// Records the lanes that a rank has of a page.
    pub fn note(&self, run: RunId, book: &Arc<MirrorBook>, mirror: Mirror) {
        let mut list = self.open(run, book);
        list.retain(|known| known.ordinal != mirror.ordinal);
        list.push(mirror);
    }

    /// Discards the rank's lanes past `fill` of the last page, which is at `ordinal`.
    pub fn cut(&mut self, ordinal: u32, fill: u32) {
        let Some(mut list) = self.list() else { return };
        list.retain(|mirror| mirror.ordinal <= ordinal + 1);
        for mirror in &mut *list {
            match mirror.ordinal.cmp(&ordinal) {
                Ordering::Less => {}
                Ordering::Equal => mirror.synced = mirror.synced.min(fill),
                Ordering::Greater => mirror.synced = 0,
            }
        }
    }

    /// Bytes of the list.
    pub fn bytes(&self) -> usize {
        let list =
            |list: MutexGuard<'_, Vec<Mirror>>| size_of::<Listed>() + list.capacity() * size_of::<Mirror>();
        self.list().map_or(0, list)
    }

    /// Removes the mirrors of pages before `ordinal`, whose tokens moved.
    pub fn forget(&mut self, ordinal: u32) {
        if let Some(mut list) = self.list() {
            list.retain(|mirror| mirror.ordinal >= ordinal);
        }
    }

    /// The rank with copies of pages in `ordinals`.
    pub fn rank(&self, ordinals: Range<u32>) -> Option<u32> {
        self.list()?.iter().find(|mirror| ordinals.contains(&mirror.ordinal)).map(|mirror| mirror.copy.rank)
    }
}
