//! What an index holds, and the order in which it goes.

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
    /// The boundary 32 tokens before, which goes after this one.
    pub parent: Weak<Boundary>,
    /// What a fork is taken of; nothing where there is no checkpoint.
    pub stored: OnceLock<Arc<Stored>>,
    /// Nanoseconds since the index was made, when it was found last or put in.
    pub used: AtomicU64,
    /// Boundaries of which it is the parent. Changed by who holds the tree.
    pub children: AtomicU32,
    /// Cloned by each sequence that was found here, and its forks.
    pub lease: Arc<()>,
}

impl Boundary {
    /// The boundary before; nothing at the first.
    pub fn parent(&self) -> Option<Arc<Boundary>> {
        self.parent.upgrade()
    }

    /// Whether a sequence that was found here lives.
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.lease) > 1
    }
}

/// A sequence that was taken in.
#[derive(Debug)]
pub(crate) struct Stored {
    /// What it was computed for: scope and adapter, as they are hashed.
    pub root: Arc<[u8]>,
    /// All tokens before its last boundary, also those that other sequences have.
    pub tokens: Arc<[u32]>,
    /// Nothing once it was evicted. Written by who holds the tree.
    pub sequence: RwLock<Option<Sequence>>,
    /// Whether all that can lie in lower tiers does.
    pub lowered: AtomicBool,
}

impl Stored {
    /// Whether it starts with these tokens, computed for this.
    pub fn starts_with(&self, root: &[u8], tokens: &[u32]) -> bool {
        *self.root == *root && self.tokens.get(..tokens.len()) == Some(tokens)
    }
}

/// What those hold who put in or take out.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Boundaries without children.
    pub leaves: Leaves,
    /// Of each page that is held: by how many sequences, its bytes, and whether it lies in a lower tier.
    pages: HashMap<usize, (u32, u64, bool)>,
}

/// Bytes of pages: of all, and of those in lower tiers.
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

/// Tells the pages of a sequence: a number that no other page has meanwhile, bytes, and whether it lies in a lower tier.
fn each(sequence: &Sequence, told: &mut dyn FnMut(usize, u64, bool)) {
    sequence.each_page(&mut |page| told(page.key(), page.bytes(), false));
    sequence.each_slot(&mut |slot| told(Arc::as_ptr(slot).addr(), slot.bytes(), true));
}

impl Tree {
    /// Counts the pages of a sequence; returns the bytes of those that were not held.
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

    /// Undoes [`Tree::add_pages`].
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
}
