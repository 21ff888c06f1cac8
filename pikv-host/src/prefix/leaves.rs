//! Boundaries without children, in order of eviction.

use crate::prefix::Key;
use crate::prefix::tree::{Boundary, Published};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Leaves, the least recently used first. A look-up updates only [`Boundary::used`], so the order may be out of date; it is corrected when
/// a leaf comes to the front. A leaf that a sequence holds counts as used at that time.
#[derive(Debug, Default)]
pub(crate) struct Leaves {
    /// Each leaf, with its time in `order`.
    of: HashMap<Key, (u64, Arc<Boundary>)>,
    order: BTreeSet<(u64, Key)>,
    /// Number of leaves that [`Leaves::oldest_idle`] has examined.
    #[cfg(test)]
    looked: u64,
}

impl Leaves {
    pub fn insert(&mut self, leaf: Arc<Boundary>) {
        self.remove(&leaf.key);
        let used = leaf.used.load(Relaxed);
        self.order.insert((used, leaf.key));
        self.of.insert(leaf.key, (used, leaf));
    }

    pub fn remove(&mut self, key: &Key) {
        if let Some((used, _)) = self.of.remove(key) {
            self.order.remove(&(used, *key));
        }
    }

    /// Stored sequences of leaves that no sequence holds, roughly the least recently used first. O(leaves).
    pub fn idle(&self) -> impl Iterator<Item = Arc<Published>> {
        let leaves = self.order.iter().filter_map(|(_, key)| Some(&self.of.get(key)?.1));
        leaves.filter(|leaf| !leaf.is_held()).filter_map(|leaf| leaf.stored.get().cloned())
    }

    /// The least recently used leaf that no sequence holds; `now` is in nanoseconds since the index was built. O(log leaves), and again for
    /// each leaf used or held since it was last examined.
    pub fn oldest_idle(&mut self, now: u64) -> Option<Arc<Boundary>> {
        while let Some(&(at, key)) = self.order.first().filter(|(at, _)| *at <= now) {
            #[cfg(test)]
            (self.looked += 1);
            let (place, leaf) = self.of.get_mut(&key)?;
            let used = leaf.used.load(Relaxed);
            if used <= at && !leaf.is_held() {
                return Some(leaf.clone());
            }
            // A held leaf is moved behind all leaves that this call examines.
            *place = if used > at { used } else { now + 1 };
            self.order.remove(&(at, key));
            self.order.insert((*place, key));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::tree::Boundary;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU32, AtomicU64};
    use std::sync::{OnceLock, Weak};

    fn leaf(n: u64, used: u64) -> Arc<Boundary> {
        let mut key = Key::default();
        key[..8].copy_from_slice(&n.to_le_bytes());
        Arc::new(Boundary {
            key,
            len: 32,
            parent: Weak::new(),
            stored: OnceLock::new(),
            used: AtomicU64::new(used),
            children: AtomicU32::new(0),
            lease: Arc::default(),
        })
    }

    proptest! {
        /// Compares with a search of all leaves: the least recently used leaf that nobody holds is taken. A leaf that was found held counts
        /// as used at that time.
        #[test]
        fn the_oldest_goes(acts in prop::collection::vec((0u8..5, 0usize..40), 1..300)) {
            let (mut leaves, mut model) = (Leaves::default(), Vec::new());
            let mut held: Vec<(Key, Arc<()>)> = Vec::new();
            for (now, (act, which)) in acts.into_iter().enumerate() {
                let now = 10 * (now as u64 + 1);
                match (act, model.len()) {
                    (0 | 1, _) | (_, 0) => {
                        let leaf = leaf(now, now);
                        leaves.insert(leaf.clone());
                        model.push((now, leaf));
                    }
                    (2, n) => {
                        let (_, leaf): &(u64, Arc<Boundary>) = &model[which % n];
                        leaf.used.store(now, Relaxed);
                        held.push((leaf.key, leaf.lease.clone()));
                    }
                    (3, n) if held.is_empty() => model[which % n].1.used.store(now, Relaxed),
                    (3, _) => drop(held.swap_remove(which % held.len())),
                    _ => {
                        for (at, leaf) in &mut model {
                            *at = (*at).max(leaf.used.load(Relaxed));
                        }
                        let oldest = model.iter().filter(|(_, leaf)| !leaf.is_held()).map(|(at, leaf)| (*at, leaf.key)).min();
                        let found = leaves.oldest_idle(now);
                        prop_assert_eq!(found.as_ref().map(|leaf| leaf.key), oldest.map(|(_, key)| key));
                        // Held leaves in front of it were examined.
                        for (at, leaf) in &mut model {
                            let before = oldest.is_none_or(|oldest| (*at, leaf.key) < oldest);
                            if leaf.is_held() && before {
                                *at = now + 1;
                            }
                        }
                        if let Some(leaf) = found {
                            leaves.remove(&leaf.key);
                            model.retain(|(_, of)| of.key != leaf.key);
                        }
                    }
                }
            }
        }
    }

    /// Takes many leaves, half of them used again and one held; each is examined a few times.
    #[test]
    fn each_is_looked_at_few_times() {
        let mut leaves = Leaves::default();
        let all: Vec<_> = (0..10_000).map(|n| leaf(n, n)).collect();
        all.iter().for_each(|leaf| leaves.insert(leaf.clone()));
        all.iter().step_by(2).for_each(|leaf| leaf.used.store(20_000, Relaxed));
        let held = all[0].lease.clone();
        let mut gone = 0;
        while let Some(leaf) = leaves.oldest_idle(20_000 + gone) {
            leaves.remove(&leaf.key);
            gone += 1;
        }
        assert_eq!(gone, 9_999);
        assert!(leaves.looked <= 3 * 10_000, "{}", leaves.looked);
        drop(held);
        assert!(leaves.oldest_idle(40_000).is_some());
    }
}
