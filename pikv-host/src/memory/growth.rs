//! Page memory that is cleared before steps need it.
//!
//! All heads of all layers open a page in the same step, one in 32. That step would wait for the system, which clears 2 MiB at the first
//! touch of each chunk. So every commit clears the share of memory that its tokens will fill.

use crate::memory::arena::Arenas;
use crate::memory::size_class::{mapped, pages_of_chunk};
use pikv_core::page::PAGE;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a small page of the system.
const SMALL: usize = 4096;

/// Filled memory by page size.
#[derive(Debug)]
pub(crate) struct Growth {
    classes: Vec<Class>,
    /// Whether a thread clears memory.
    busy: AtomicBool,
}

/// Pages of one size.
#[derive(Debug, Default)]
struct Class {
    /// Heads of all layers with pages of this size.
    heads: u64,
    /// Tokens of all such heads so far, times two: each fills a page of the ring, and one outside it.
    filled: AtomicU64,
    /// Chunks cleared for them.
    grown: AtomicU64,
    /// Pages that all heads of the last step's sequences can need in one step.
    wanted: AtomicU64,
}

impl Growth {
    /// `classes`: words of a page, ascending; `heads`: words of a page, and the number of heads with pages of that size.
    pub fn new(classes: &[u32], heads: &[(u32, u32)]) -> Growth {
        let of = |words: u32| heads.iter().filter(move |(of, _)| *of == words).map(|(_, n)| u64::from(*n));
        let class = |words: &u32| Class { heads: of(*words).sum(), ..Class::default() };
        Growth { classes: classes.iter().map(class).collect(), busy: AtomicBool::new(false) }
    }
}

impl Arenas {
    /// Clears the memory that `tokens` more tokens of `sequences` sequences will fill, on another thread of the caller's
    /// pool if there is one. Does nothing on a device.
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
                // If pages are freed as fast as they are filled, no memory is needed.
                match (0..self.shards()).any(|shard| self.wants(shard, index).is_some()) {
                    true => due = true,
                    false => class.grown.store(chunks, Ordering::Relaxed),
                }
            }
        }
        if due && !self.growth().busy.swap(true, Ordering::Acquire) {
            // A weak handle: work that waits in a busy pool must not keep the memory of a dropped cache.
            let arenas = Arc::downgrade(self);
            aside(move || {
                if let Some(arenas) = arenas.upgrade() {
                    arenas.grow_due();
                    arenas.growth().busy.store(false, Ordering::Release);
                }
            });
        }
    }

    /// Clears the chunks that are due, and counts them as done if enough pages are free.
    fn grow_due(&self) {
        let shards = self.shards() as u64;
        for (index, class) in self.growth().classes.iter().enumerate() {
            let words = self.classes()[index];
            let due = class.filled.load(Ordering::Relaxed) / tokens_of_chunk(words);
            let from = class.grown.swap(due, Ordering::Relaxed);
            // Shards take turns. After a round without a new chunk, all have enough.
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

    /// Number of free pages of a size class that has fewer than [`SizeClass::wants`](crate::memory::size_class::SizeClass::wants) asks for.
    fn wants(&self, shard: usize, class: usize) -> Option<u64> {
        let wanted = self.growth().classes[class].wanted.load(Ordering::Relaxed);
        self.size(shard, class).wants(wanted.div_ceil(self.shards() as u64))
    }

    /// Adds a cleared chunk to a size class that [needs](Self::wants) it; returns whether it did. It does not if pages in use, free and new
    /// would exceed the budget, or if the system has no memory (a step that needs it returns the error).
    fn grow_by_one(&self, shard: usize, class: usize) -> bool {
        let words = self.classes()[class];
        let bytes = pages_of_chunk(words) * u64::from(words) * 4;
        let Some(free) = self.wants(shard, class) else { return false };
        if self.taken().saturating_add(free * u64::from(words) * 4 + bytes) > self.budget() {
            return false;
        }
        let Ok((base, memory)) = mapped(bytes) else { return false };
        // SAFETY: the `bytes` bytes of the chunk that was just mapped, zeroed and initialised; no other reference to them exists.
        let chunk = unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), bytes as usize / 4) };
        chunk.iter_mut().step_by(SMALL / 4).for_each(|word| *word = 0);
        self.size(shard, class).add(base, memory, (shard as u32, class as u16), pages_of_chunk(words));
        true
    }
}

/// Tokens of a head that fill a chunk of pages of this size.
fn tokens_of_chunk(words: u32) -> u64 {
    pages_of_chunk(words) * u64::from(PAGE)
}

/// Runs `work` on another thread of the caller's pool, or here if there is none.
fn aside(work: impl FnOnce() + Send + 'static) {
    #[cfg(feature = "rayon")]
    if rayon::current_num_threads() > 1 {
        return rayon::spawn(work);
    }
    work();
}
