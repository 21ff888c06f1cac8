//! The front of a fabric, held by its cache: the link to the ranks, the rank that holds each page, and the placement of new blocks.

use super::link::{Answer, Link, RankWork};
use super::store::fingerprint;
use super::{Fabric, Options, Traffic};
use crate::base::error::FabricError;
use crate::base::error::MAX_SHARDS;
use crate::base::error::{ConfigError, Error};
use crate::base::locks::{Mutex, MutexGuard, RwLock};
use crate::config::CacheConfig;
use crate::config::shape::CacheShape;
use crate::config::shape::first_heads;
use crate::tiers::replica::{Block, Copy, FetchPage, Freed, MirrorBook, RankPage};
use crate::tiers::{Level, StoredPage};
use pikv_core::shard::ShardMap;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError, TryLockError, Weak};
use std::thread::{self, JoinHandle};

pub(crate) struct Front {
    link: Mutex<Link>,
    freed: Arc<Freed>,
    next: AtomicU64,
    map: ShardMap,
    /// For each layer, the number of KV heads in earlier layers.
    first_heads: Vec<u32>,
    pub(super) experts: usize,
    pub(super) level: Arc<Level>,
    pub(super) fast: bool,
    /// For each rank, whether it is apart from the front.
    remote: Vec<bool>,
    /// For each layer: the ranks of each expert's slots, if experts were placed by load.
    pub(super) placed: RwLock<Vec<Option<Vec<Vec<u32>>>>>,
    /// Copies on ranks of pages that are still on the front, for moves.
    pub(super) mirrors: Arc<MirrorBook>,
    /// The pages of every block, for moves.
    pub(super) book: Mutex<HashMap<Block, Vec<Weak<StoredPage>>>>,
    /// `[layer][expert]` bytes that attention read since the last placement.
    reads: Vec<AtomicU64>,
    beat: Mutex<Option<Beat>>,
}

/// A thread that sends ranks regular messages.
struct Beat {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").field("map", &self.map).field("fast", &self.fast).finish_non_exhaustive()
    }
}

/// The `words` words of a fetched page, from word `at` of the answer on.
pub(super) fn fetched(answer: &Answer, at: usize, words: usize) -> Result<&[u32], FabricError> {
    let cut = FabricError::Malformed { rank: answer.rank, what: "an answer is cut off" };
    answer.words.get(answer.at + at..answer.at + at + words).ok_or(cut)
}

/// The first copy on a rank that is not lost.
pub(super) fn first_alive<'a>(link: &Link, copies: &'a [Arc<Copy>]) -> Result<&'a Arc<Copy>, FabricError> {
    let mut lost = Err(FabricError::Nobody);
    for copy in copies {
        match link.check(copy.rank) {
            Ok(()) => return Ok(copy),
            Err(error) => lost = Err(error),
        }
    }
    lost
}

/// Pages of a rank.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RankUsage {
    /// The rank.
    pub rank: u32,
    /// Bytes of its pages.
    pub bytes: u64,
    /// Number of pages.
    pub pages: u64,
    /// The error by which the rank was lost, if it is lost.
    pub lost: Option<FabricError>,
}

impl Front {
    /// The front of a cache of this configuration.
    ///
    /// # Errors
    /// An invalid configuration, or one that a fabric does not support; a rank that does not answer, or has another version or
    /// configuration.
    pub fn new(
        config: &CacheConfig,
        fabric: Box<dyn Fabric>,
        options: &Options,
    ) -> Result<Arc<Front>, Error> {
        let shape = CacheShape::new(config.clone(), true)?;
        no_ages(&shape)?;
        let fingerprint = fingerprint(&shape);
        if fabric.ranks() > MAX_SHARDS {
            return Err(ConfigError::Shards { shards: fabric.ranks() }.into());
        }
        let ranks = fabric.ranks() as usize;
        let remote = (0..fabric.ranks()).map(|rank| fabric.is_remote(rank)).collect();
        let session = RandomState::new().build_hasher().finish();
        let link = Link::new(fabric, options.timeout, session, fingerprint)?;
        let (layers, experts) = (config.layers.len(), config.experts as usize);
        let beats = link.wants_beat();
        let front = Arc::new(Front {
            link: Mutex::new(link),
            freed: Arc::new(Freed(Mutex::new(vec![Vec::new(); ranks]))),
            next: AtomicU64::new(0),
            map: config.shards,
            first_heads: first_heads(&config.layers).collect(),
            experts,
            level: Arc::new(Level::fabric()),
            fast: options.fast,
            remote,
            placed: RwLock::new(vec![None; layers]),
            mirrors: Arc::default(),
            book: Mutex::default(),
            reads: (0..layers * experts).map(|_| AtomicU64::new(0)).collect(),
            beat: Mutex::default(),
        });
        if beats {
            let (stop, stopped) = channel();
            let (weak, every) = (Arc::downgrade(&front), options.timeout / 4);
            let beat = move || {
                while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(every) {
                    let Some(front) = Weak::upgrade(&weak) else { return };
                    front.beat(every);
                }
            };
            let thread = thread::Builder::new()
                .name("pikv-beat".to_owned())
                .spawn(beat)
                .map_err(|error| FabricError::Transport(error.to_string()))?;
            *front.beat.lock().unwrap_or_else(PoisonError::into_inner) = Some(Beat { stop, thread });
        }
        Ok(front)
    }

    /// Sends every rank a message, if none was sent for `every`.
    fn beat(&self, every: std::time::Duration) {
        let mut link = match self.link.try_lock() {
            Ok(link) => link,
            Err(TryLockError::Poisoned(link)) => link.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if link.last.elapsed() >= every {
            let all = link.alive().map(|rank| (rank, RankWork::default())).collect();
            // A rank lost here gives an error in the next call that needs it.
            let _ = self.work(&mut link, all);
        }
    }

    pub(super) fn link(&self) -> MutexGuard<'_, Link> {
        // After a panic an answer is unread; the next round discards it.
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        link.epoch += u64::from(std::mem::take(&mut link.unsure));
        link
    }

    /// Sends work to ranks; answers in the same order.
    pub(super) fn work(
        &self,
        link: &mut Link,
        work: Vec<(u32, RankWork)>,
    ) -> Result<Vec<Answer>, FabricError> {
        let mut freed = |rank: u32| {
            let mut freed = self.freed.0.lock().unwrap_or_else(PoisonError::into_inner);
            freed.get_mut(rank as usize).map(std::mem::take).unwrap_or_default()
        };
        link.work(&mut freed, work)
    }

    /// A new page on a rank.
    pub(super) fn copy(&self, rank: u32) -> Arc<Copy> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        Arc::new(Copy { rank, id, freed: self.freed.clone() })
    }

    /// The rank of a new block.
    pub(super) fn rank_of(&self, link: &Link, of: &Block) -> Result<u32, FabricError> {
        let placed = self.placed.read().unwrap_or_else(PoisonError::into_inner);
        let slots = placed[of.layer as usize].as_ref().map(|experts| &experts[usize::from(of.expert)]);
        let shard = match slots {
            Some(slots) => slots[of.block as usize % slots.len()],
            None => {
                let head = self.first_heads[of.layer as usize] + of.head;
                self.map.shard(u64::from(of.block), u32::from(of.expert), head)
            }
        };
        let rank = shard % link.lost.len() as u32;
        if link.check(rank).is_ok() {
            return Ok(rank);
        }
        // Blocks of a lost rank are spread over the others.
        let alive: Vec<u32> = link.alive().collect();
        let index = of.block as usize + usize::from(of.expert);
        alive.get(index % alive.len().max(1)).copied().ok_or(FabricError::Nobody)
    }

    /// Registers a page of a block.
    pub(super) fn note(&self, block: Block, slot: &Arc<StoredPage>) {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = book.entry(block).or_default();
        // Entries of freed pages are removed when the vector is full.
        if pages.len() == pages.capacity() {
            pages.retain(|page| page.strong_count() > 0);
        }
        pages.push(Arc::downgrade(slot));
    }

    pub(super) fn count_read(&self, layer: usize, expert: u16, bytes: u64) {
        if let Some(sum) = self.reads.get(layer * self.experts + usize::from(expert)) {
            sum.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes read of each expert of a layer.
    pub(super) fn reads(&self, layer: usize) -> Vec<f64> {
        let of = &self.reads[layer * self.experts..(layer + 1) * self.experts];
        of.iter().map(|bytes| bytes.load(Ordering::Relaxed) as f64).collect()
    }

    /// Resets the bytes read.
    pub(super) fn forget_reads(&self, layer: usize) {
        let of = &self.reads[layer * self.experts..(layer + 1) * self.experts];
        of.iter().for_each(|bytes| bytes.store(0, Ordering::Relaxed));
    }

    /// Bytes and pages of every rank, after it freed unused pages; of a lost one, those of its last answer.
    pub fn usage(&self) -> Result<Vec<RankUsage>, FabricError> {
        let mut link = self.link();
        let all = link.alive().map(|rank| (rank, RankWork::default())).collect();
        self.work(&mut link, all)?;
        let of = |(rank, ((bytes, pages), lost)): (usize, (&(u64, u64), &Option<FabricError>))| RankUsage {
            rank: rank as u32,
            bytes: *bytes,
            pages: *pages,
            lost: lost.clone(),
        };
        Ok(link.held.iter().zip(&link.lost).enumerate().map(of).collect())
    }

    /// Bytes on all ranks, as last reported.
    pub fn held(&self) -> u64 {
        self.link().held.iter().fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes))
    }

    pub fn traffic(&self) -> Traffic {
        self.link().traffic
    }
}

impl FetchPage for Front {
    fn fetch(&self, page: &RankPage, words: &mut [u32]) -> Result<(), Error> {
        let mut link = self.link();
        let copies = page.copies();
        let copy = first_alive(&link, &copies)?;
        let mut work = RankWork::default();
        work.fetches.id(copy.id);
        let answers = self.work(&mut link, vec![(copy.rank, work)])?;
        words.copy_from_slice(fetched(&answers[0], 0, words.len())?);
        Ok(())
    }

    fn is_remote(&self, rank: u32) -> bool {
        self.remote.get(rank as usize).copied().unwrap_or(true)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let beat = self.beat.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Beat { stop, thread }) = beat {
            drop(stop);
            // This thread may be the one that drops the front.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Refuses configurations that ranks do not support.
pub(super) fn no_ages(shape: &CacheShape) -> Result<(), ConfigError> {
    let mut codecs = shape.codecs.iter().flat_map(|heads| heads.iter().flatten());
    if codecs.any(|codec| codec.aged.is_some()) {
        let instead = "one codec for pages of every age";
        return Err(ConfigError::Fabric { what: "pages that are packed again by age", instead });
    }
    Ok(())
}
