//! Page memory that the system clears before steps need it.
//!
//! All heads of all layers open a page in the same step, one of 32. That step would wait for the system, which clears 2 MiB at the first
//! touch of each chunk. So every commit has the share of the memory cleared that its tokens will fill.

use crate::memory::arena::Arenas;
use crate::memory::size_class::{mapped, pages_of_chunk};
use pikv_core::page::PAGE;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of the smallest piece of memory that the system gives.
const SMALL: usize = 4096;

/// What is filled, by size of page.
#[derive(Debug)]
pub(crate) struct Growth {
    classes: Vec<Class>,
    /// Whether somebody is at it.
    busy: AtomicBool,
}

/// Pages of one size.
#[derive(Debug, Default)]
struct Class {
    /// Heads, over all layers, whose tokens are kept in such pages.
    heads: u64,
    /// Tokens of single heads that came so far, twice: each fills a page of the ring, and one behind it.
    filled: AtomicU64,
    /// Chunks that were cleared for them.
    grown: AtomicU64,
    /// Pages that all heads of the latest step's sequences can ask for in one step.
    wanted: AtomicU64,
}

impl Growth {
    /// `classes`: words of a page, ascending; `heads`: words of a page, and heads whose tokens are kept in such pages.
    pub fn new(classes: &[u32], heads: &[(u32, u32)]) -> Growth {
        let of = |words: u32| heads.iter().filter(move |(of, _)| *of == words).map(|(_, n)| u64::from(*n));
        let class = |words: &u32| Class { heads: of(*words).sum(), ..Class::default() };
        Growth { classes: classes.iter().map(class).collect(), busy: AtomicBool::new(false) }
    }
}

impl Arenas {
    /// Has the system clear the memory that `tokens` more tokens of `sequences` sequences will fill, on another thread of the caller's
    /// pool if it has one. Of a device there is none to clear.
    pub(crate) fn grow_ahead(self: &Arc<Self>, sequences: u64, tokens: u64) {
        if !self.on_host() {
            return;
        }
        let mut due = false;
        for (index, class) in self.growth().classes.iter().enumerate() {
            let filled = 2 * tokens * class.heads;
            let filled = class.filled.fetch_add(filled, Ordering::Relaxed) + filled;
            class.wanted.store(2 * sequences * class.heads, Ordering::Relaxed);
            let chunks = filled / tokens_of_chunk(self.classes()[index]);
            if chunks > class.grown.load(Ordering::Relaxed) {
                // Where pages come back as fast as they are filled, nobody has to be asked.
                match (0..self.shards()).any(|shard| self.wants(shard, index).is_some()) {
                    true => due = true,
                    false => class.grown.store(chunks, Ordering::Relaxed),
                }
            }
        }
        if due && !self.growth().busy.swap(true, Ordering::Acquire) {
            // A pool that is long busy must not keep the memory of a cache that is gone.
            let arenas = Arc::downgrade(self);
            aside(move || {
                if let Some(arenas) = arenas.upgrade() {
                    arenas.grow_due();
                    arenas.growth().busy.store(false, Ordering::Release);
                }
            });
        }
    }

    /// Clears the chunks that are due; where enough pages are free, they count as done.
    fn grow_due(&self) {
        let shards = self.shards() as u64;
        for (index, class) in self.growth().classes.iter().enumerate() {
            let words = self.classes()[index];
            let due = class.filled.load(Ordering::Relaxed) / tokens_of_chunk(words);
            let from = class.grown.swap(due, Ordering::Relaxed);
            // Shards take turns. Once around without a chunk, all have enough.
            let mut idle = 0;
            for turn in from..due {
                let grew = self.grow_by_one((turn % shards) as usize, index);
                idle = if grew { 0 } else { idle + 1 };
                if idle == shards {
                    break;
                }
            }
        }
    }

    /// Free pages of a size class that has fewer than all heads can ask for in one step, and what runs are given room for.
    fn wants(&self, shard: usize, class: usize) -> Option<u64> {
        let wanted = self.growth().classes[class].wanted.load(Ordering::Relaxed);
        self.size(shard, class).wants(wanted.div_ceil(self.shards() as u64))
    }

    /// Adds a chunk of cleared memory to a size class that [wants](Self::wants) it. Returns whether it did: not past the budget, and not where
    /// the system has none, which a step that needs it will say.
    fn grow_by_one(&self, shard: usize, class: usize) -> bool {
        let words = self.classes()[class];
        let bytes = pages_of_chunk(words) * u64::from(words) * 4;
        let Some(free) = self.wants(shard, class) else { return false };
        if self.taken().saturating_add(free * u64::from(words) * 4 + bytes) > self.budget() {
            return false;
        }
        let Ok((base, memory)) = mapped(bytes) else { return false };
        // SAFETY: the `bytes` bytes of the chunk that was just mapped, which nobody else knows of yet; all zero.
        let chunk = unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), bytes as usize / 4) };
        chunk.iter_mut().step_by(SMALL / 4).for_each(|word| *word = 0);
        self.size(shard, class).add(base, memory, (shard as u32, class as u16), pages_of_chunk(words));
        true
    }
}

/// Tokens of a head that a chunk of pages of so many words holds.
fn tokens_of_chunk(words: u32) -> u64 {
    pages_of_chunk(words) * u64::from(PAGE)
}

/// Runs `work` on another thread of the caller's pool, or here where there is none.
fn aside(work: impl FnOnce() + Send + 'static) {
    #[cfg(feature = "rayon")]
    if rayon::current_num_threads() > 1 {
        return rayon::spawn(work);
    }
    work();
}
