//! Eviction from a prefix index that exceeds its budget, or for a step that needs memory: only prefixes that no sequence reads, the least
//! recently used first, the last tokens of a prefix before earlier ones. For a step, pages are first moved to lower tiers.

use crate::cache::idle::{Keys, Spare};
use crate::cache::owners::Owner;
use crate::cache::sequence::Sequence;
use crate::cache::tiering::lower;
use crate::prefix::tree::{Boundary, Published, Tree};
use crate::prefix::{Shared, add};
use pikv_core::page::PAGE;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLockWriteGuard};

impl Spare for Shared {
    fn give_back(&self, bytes: u64) -> u64 {
        self.free(&mut self.tree(), bytes)
    }

    fn lend(&self, call: &mut dyn FnMut(Vec<&mut Sequence>) -> Keys) -> Keys {
        let tree = &mut *self.tree();
        let stored = self.stored();
        let mut locked: Vec<_> = stored.iter().map(|stored| written(stored)).collect();
        let keys = call(locked.iter_mut().filter_map(|sequence| sequence.as_mut()).collect());
        add(&self.counts.lower, tree.lowered(&keys));
        keys
    }
}

/// The sequence, locked for writing.
fn written(stored: &Published) -> RwLockWriteGuard<'_, Option<Sequence>> {
    stored.sequence.write().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Demotes until `bytes` of the cache are free, then evicts until they are, or nothing more can be evicted; returns the bytes freed.
    pub(super) fn free(&self, tree: &mut Tree, bytes: u64) -> u64 {
        let arenas = &self.cache.inner.pool.arenas;
        let before = arenas.taken();
        let came = || before.saturating_sub(arenas.taken());
        if bytes > 0 {
            self.demote_until(tree, bytes);
            self.evict_until(tree, &|| came() >= bytes);
        }
        came()
    }

    /// All stored sequences. O(boundaries).
    fn stored(&self) -> Vec<Arc<Published>> {
        let mut all = HashMap::new();
        for part in &self.parts {
            let part = part.read().unwrap_or_else(PoisonError::into_inner);
            for stored in part.values().filter_map(|boundary| boundary.stored.get()) {
                all.entry(Arc::as_ptr(stored)).or_insert_with(|| stored.clone());
            }
        }
        all.into_values().collect()
    }

    /// Moves pages of idle leaves to lower tiers, the least recently used first, until `bytes` are free, also pages that stored sequences
    /// share. Stops at the first error of a tier: the rest can be evicted.
    fn demote_until(&self, tree: &mut Tree, bytes: u64) {
        let Some(levels) = &self.cache.inner.pool.tiers else { return };
        let idle: Vec<Arc<Published>> = tree.leaves.idle().filter(|of| !of.lowered.load(Relaxed)).collect();
        if idle.is_empty() {
            return;
        }
        let turns: HashMap<_, _> = idle.iter().map(Arc::as_ptr).zip(0..).collect();
        let stored = self.stored();
        let mut locked: Vec<_> = stored.iter().map(|stored| (stored, written(stored))).collect();
        let owners = locked.iter_mut().filter_map(|(stored, sequence)| {
            let turn = turns.get(&Arc::as_ptr(stored)).copied();
            Some(Owner { sequence: sequence.as_mut()?, turn })
        });
        let lowered = lower(levels, &mut owners.collect::<Vec<_>>(), bytes, false);
        add(&self.counts.lower, tree.lowered(&lowered.keys));
        if lowered.failed.is_none() && lowered.freed < bytes {
            idle.iter().for_each(|stored| stored.lowered.store(true, Relaxed));
        }
    }

    /// Evicts until `enough` returns true or no idle leaf is left.
    pub(super) fn evict_until(&self, tree: &mut Tree, enough: &dyn Fn() -> bool) {
        while !enough() {
            let Some(leaf) = tree.leaves.oldest_idle(self.now()) else { return };
            self.evict(tree, leaf);
        }
    }

    /// Removes a leaf and, with it, preceding boundaries that were not used later, and frees their pages: up to an eighth of the prefix at
    /// a time, so that a long prefix is not cut many times.
    fn evict(&self, tree: &mut Tree, leaf: Arc<Boundary>) {
        let (used, now) = (leaf.used.load(Relaxed), self.now());
        let stored = leaf.stored.get().cloned();
        let most = (leaf.len / PAGE / 8).max(1);
        let mut last = Some(leaf);
        for taken in 0.. {
            let Some(boundary) = last.take_if(|boundary| {
                let own = match (boundary.stored.get(), &stored) {
                    (Some(of), Some(stored)) => Arc::ptr_eq(of, stored) && taken < most,
                    // A boundary without a stored sequence cannot be found.
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
                // A use of a boundary is a use of its parent.
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

    /// Cuts a stored sequence to its first `len` tokens; 0 drops it.
    fn trim(&self, tree: &mut Tree, stored: &Published, len: u32) {
        let mut sequence = stored.sequence.write().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = sequence.take() else { return };
        self.counts.let_go(tree.take_pages(&old));
        if len > 0 {
            // Without memory for the pages of the new ring, the sequence keeps its length until it is dropped.
            let cut = old.fork_at(len).ok().filter(|cut| cut.len == len);
            let mut kept = cut.unwrap_or(old);
            kept.lease_of_prefix = None;
            self.counts.hold(tree.add_pages(&kept));
            stored.lowered.store(false, Relaxed);
            *sequence = Some(kept);
        }
    }
}
