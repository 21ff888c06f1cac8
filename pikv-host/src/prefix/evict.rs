//! What goes when an index is over its budget, or a step needs room: what no sequence reads, the least recently used first, the last
//! tokens before those that they follow. What a step needs goes to lower tiers first, as far as it can.

use crate::cache::idle::Spare;
use crate::prefix::tree::{Boundary, Stored, Tree};
use crate::prefix::{Shared, add};
use pikv_core::page::PAGE;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

impl Spare for Shared {
    fn give_back(&self, bytes: u64) -> u64 {
        self.free(&mut self.tree(), bytes)
    }
}

impl Shared {
    /// Demotes until so many bytes of the cache came free, then evicts until they did, or nothing more can go; returns how many did.
    pub(super) fn free(&self, tree: &mut Tree, bytes: u64) -> u64 {
        let arenas = &self.cache.inner.pool.arenas;
        let before = arenas.taken();
        let came = || before.saturating_sub(arenas.taken());
        if bytes > 0 {
            self.demote_until(tree, bytes, &came);
            self.evict_until(tree, &|| came() >= bytes);
        }
        came()
    }

    /// Moves pages of leaves that no sequence reads to lower tiers, of the least recently used first, until `bytes` came. A page that several
    /// stored sequences have stays. A tier that fails ends it: what is left can be evicted.
    fn demote_until(&self, tree: &mut Tree, bytes: u64, came: &dyn Fn() -> u64) {
        if self.cache.inner.pool.tiers.is_none() {
            return;
        }
        let idle: Vec<Arc<Stored>> = tree.leaves.idle().filter(|of| !of.lowered.load(Relaxed)).collect();
        for stored in idle {
            let missing = bytes.saturating_sub(came());
            if missing == 0 {
                return;
            }
            let mut sequence = stored.sequence.write().unwrap_or_else(PoisonError::into_inner);
            let Some(sequence) = &mut *sequence else { continue };
            self.counts.let_go(tree.take_pages(sequence));
            let demoted = sequence.demote(missing);
            self.counts.hold(tree.add_pages(sequence));
            match demoted {
                Ok(freed) => stored.lowered.store(freed < missing, Relaxed),
                Err(_) => return,
            }
        }
    }

    /// Evicts until `enough` says so, or nothing more can go.
    pub(super) fn evict_until(&self, tree: &mut Tree, enough: &dyn Fn() -> bool) {
        while !enough() {
            let Some(leaf) = tree.leaves.oldest_idle(self.now()) else { return };
            self.evict(tree, leaf);
        }
    }

    /// Takes out a leaf, and those before it that are as old, whose pages go with it: an eighth of what is stored at least, so that long
    /// prefixes are not cut many times.
    fn evict(&self, tree: &mut Tree, leaf: Arc<Boundary>) {
        let (used, now) = (leaf.used.load(Relaxed), self.now());
        let stored = leaf.stored.get().cloned();
        let most = (leaf.len / PAGE / 8).max(1);
        let mut last = Some(leaf);
        for taken in 0.. {
            let Some(boundary) = last.take_if(|boundary| {
                let own = match (boundary.stored.get(), &stored) {
                    (Some(of), Some(stored)) => Arc::ptr_eq(of, stored) && taken < most,
                    // Nobody can find it.
                    (None, _) => true,
                    (Some(_), None) => false,
                };
                let bare = boundary.children.load(Relaxed) == 0 && !boundary.is_held();
                bare && own && boundary.used.load(Relaxed) <= used
            }) else {
                break;
            };
            self.part(&boundary.key).write().unwrap_or_else(PoisonError::into_inner).remove(&boundary.key);
            tree.leaves.remove(&boundary.key);
            add(&self.counts.evictions, 1);
            add(&self.counts.evicted_tokens, u64::from(PAGE));
            add(&self.counts.evicted_age, now.saturating_sub(boundary.used.load(Relaxed)));
            self.counts.boundaries.fetch_sub(1, Relaxed);
            last = boundary.parent();
            if let Some(parent) = &last {
                // Who used it used what it follows.
                parent.used.fetch_max(boundary.used.load(Relaxed), Relaxed);
                if parent.children.fetch_sub(1, Relaxed) == 1 {
                    tree.leaves.insert(parent.clone());
                }
            }
        }
        if let Some(stored) = stored {
            let left = last.filter(|last| last.stored.get().is_some_and(|of| Arc::ptr_eq(of, &stored)));
            self.trim(tree, &stored, left.map_or(0, |last| last.len));
        }
    }

    /// Has a stored sequence hold no more than the first `len` tokens; nothing with 0.
    fn trim(&self, tree: &mut Tree, stored: &Stored, len: u32) {
        let mut sequence = stored.sequence.write().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = sequence.take() else { return };
        self.counts.let_go(tree.take_pages(&old));
        if len > 0 {
            // Where there is no memory for the ring it stays as long as it is, until all of it goes.
            let cut = old.fork_at(len).ok().filter(|cut| cut.len == len);
            let mut kept = cut.unwrap_or(old);
            kept.lease_of_prefix = None;
            self.counts.hold(tree.add_pages(&kept));
            stored.lowered.store(false, Relaxed);
            *sequence = Some(kept);
        }
    }
}
