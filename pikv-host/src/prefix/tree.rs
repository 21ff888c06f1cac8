//! Stored prefixes of an index.

use crate::cache::sequence::Sequence;
use crate::prefix::Key;
use crate::prefix::leaves::Leaves;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock, RwLock, Weak};

/// A length at which a prefix may be found.
#[derive(Debug)]
pub(crate) struct Boundary {
    pub key: Key,
    pub len: u32,
    /// The boundary 32 tokens earlier, which is evicted after this one.
    pub parent: Weak<Boundary>,
    /// Sequence to fork; empty where the prefix has no checkpoint.
    pub stored: OnceLock<Arc<Published>>,
    /// Time of the last use or of the insertion, in nanoseconds since the index was built.
    pub used: AtomicU64,
    /// Number of boundaries with this parent. Changed only under the lock of the tree.
    pub children: AtomicU32,
    /// Cloned into each sequence found here, and into its forks.
    pub lease: Arc<()>,
}

impl Boundary {
    /// The preceding boundary; `None` for the first.
    pub fn parent(&self) -> Option<Arc<Boundary>> {
        self.parent.upgrade()
    }

    /// Whether a sequence found here is alive.
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.lease) > 1
    }
}

/// A published sequence.
#[derive(Debug)]
pub(crate) struct Published {
    /// Scope, adapter and budget, as hashed.
    pub root: Arc<[u8]>,
    /// All tokens up to its last boundary, including those of earlier boundaries.
    pub tokens: Arc<[u32]>,
    /// `None` after its eviction. Written only under the lock of the tree.
    pub sequence: RwLock<Option<Sequence>>,
    /// Whether all pages that can lie in lower tiers do.
    pub lowered: AtomicBool,
}

impl Published {
    /// Whether it starts with these tokens, in this scope.
    pub fn starts_with(&self, root: &[u8], tokens: &[u32]) -> bool {
        *self.root == *root && self.tokens.get(..tokens.len()) == Some(tokens)
    }
}

/// State that is changed under one lock.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Boundaries without children.
    pub leaves: Leaves,
    /// For each page: number of stored sequences that hold it, its bytes, and whether it lies in a lower tier.
    pages: HashMap<usize, (u32, u64, bool)>,
}

/// Bytes of pages: in all tiers, and in lower tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub all: u64,
    pub lower: u64,
}

impl Bytes {
    fn add(&mut self, bytes: u64, lower: bool) {
        self.all += bytes;
        self.lower += if lower { bytes } else { 0 };
    }
}

/// Calls `told` for each page of a sequence with a key unique among live pages, its bytes, and whether it lies in a lower tier.
fn each(sequence: &Sequence, told: &mut dyn FnMut(usize, u64, bool)) {
    sequence.each_page(&mut |page| told(page.key(), page.bytes(), false));
    sequence.each_slot(&mut |slot| told(Arc::as_ptr(slot).addr(), slot.bytes(), true));
}

impl Tree {
    /// Adds the pages of a sequence to the counts; returns the bytes of pages not counted before.
    pub fn add_pages(&mut self, sequence: &Sequence) -> Bytes {
        let mut added = Bytes::default();
        each(sequence, &mut |key, bytes, lower| {
            let (count, ..) = self.pages.entry(key).or_insert((0, bytes, lower));
            *count += 1;
            if *count == 1 {
                added.add(bytes, lower);
            }
        });
        added
    }

    /// Undoes [`Tree::add_pages`]; returns the bytes of pages that no sequence holds then.
    pub fn take_pages(&mut self, sequence: &Sequence) -> Bytes {
        let mut taken = Bytes::default();
        each(sequence, &mut |key, _, _| {
            if let Some((count, bytes, lower)) = self.pages.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    taken.add(*bytes, *lower);
                    self.pages.remove(&key);
                }
            }
        });
        taken
    }

    /// Counts pages that moved to lower tiers, given with their keys before and after; returns their bytes.
    pub fn lowered(&mut self, keys: &[(usize, usize)]) -> u64 {
        let mut bytes = 0;
        for (before, after) in keys {
            if let Some((count, of, _)) = self.pages.remove(before) {
                self.pages.insert(*after, (count, of, true));
                bytes += of;
            }
        }
        bytes
    }
}
