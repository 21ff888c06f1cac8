//! Pages that no sequence reads, which can be freed for a step.

use crate::cache::sequence::Sequence;
use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// A holder of pages that it can free on request.
pub(crate) trait Spare: Debug + Send + Sync {
    /// Frees at least `bytes` of the first tier if it can; returns the bytes freed.
    fn give_back(&self, bytes: u64) -> u64;

    /// Locks its sequences and calls `call` with them, which may move their pages to lower tiers; returns what that returns.
    fn lend(&self, call: &mut dyn FnMut(Vec<&mut Sequence>) -> Keys) -> Keys;
}

/// Keys of pages in the first tier, and of the same pages in the lower tier to which they moved.
pub(crate) type Keys = Vec<(usize, usize)>;

/// The holders to ask before a step is refused.
#[derive(Debug, Default)]
pub(crate) struct Idle(RwLock<Vec<Weak<dyn Spare>>>);

impl Idle {
    fn known(&self) -> Vec<Arc<dyn Spare>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.iter().filter_map(Weak::upgrade).collect()
    }

    /// Calls `call` once with the sequences of all holders, which are locked in the order in which they were added.
    pub fn lend(&self, call: &mut dyn FnMut(Vec<&mut Sequence>) -> Keys) {
        lend(&self.known(), Vec::new(), call);
    }

    /// Adds a holder. It is asked as long as it lives.
    pub fn add(&self, spare: &Arc<dyn Spare>) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|spare| spare.strong_count() > 0);
        known.push(Arc::downgrade(spare));
    }

    /// Asks the holders in turn for `bytes`; returns the bytes freed.
    pub fn give_back(&self, bytes: u64) -> u64 {
        let known = self.known();
        let mut came = 0;
        for spare in known {
            if came < bytes {
                came += spare.give_back(bytes - came);
            }
        }
        came
    }
}

/// Calls `call` with `before` and the sequences of `spares`.
fn lend(
    spares: &[Arc<dyn Spare>],
    mut before: Vec<&mut Sequence>,
    call: &mut dyn FnMut(Vec<&mut Sequence>) -> Keys,
) -> Keys {
    let Some((spare, rest)) = spares.split_first() else { return call(before) };
    spare.lend(&mut |own| {
        let known = before.iter_mut().map(|sequence| &mut **sequence);
        lend(rest, known.chain(own).collect(), call)
    })
}
