//! What an index holds, and the order in which it goes.

use crate::cache::sequence::Sequence;
use crate::prefix::Key;
use crate::prefix::leaves::Leaves;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64};
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
    /// Of each page that is held: by how many sequences, and its bytes.
    pages: HashMap<usize, (u32, u64)>,
}

impl Tree {
    /// Counts the pages of a sequence; returns the bytes of those that were not held.
    pub fn add_pages(&mut self, sequence: &Sequence) -> u64 {
        let mut added = 0;
        sequence.each_page(&mut |page| {
            let (count, bytes) = self.pages.entry(page.key()).or_insert((0, page.bytes()));
            added += if *count == 0 { *bytes } else { 0 };
            *count += 1;
        });
        added
    }

    /// Undoes [`Tree::add_pages`].
    pub fn take_pages(&mut self, sequence: &Sequence) -> u64 {
        let mut taken = 0;
        sequence.each_page(&mut |page| {
            if let Some((count, bytes)) = self.pages.get_mut(&page.key()) {
                *count -= 1;
                if *count == 0 {
                    taken += *bytes;
                    self.pages.remove(&page.key());
                }
            }
        });
        taken
    }
}
