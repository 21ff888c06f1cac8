//! Sequences that are parked in one call, so that a page which they share is written once.

use super::{Awake, Slot, State, may_go};
use crate::base::chunks::Chunks;
use crate::base::error::Error;
use crate::cache::owners::References;
use crate::cache::parkables::MadeRoom;
use crate::cache::sequence::Sequence;
use crate::memory::arena::Page;
use crate::memory::pool::Pool;
use crate::pages::sealed::Sealed;
use std::mem;
use std::sync::Arc;

/// Sequences that are locked to be parked together.
pub(super) struct Group<'s> {
    members: Vec<Member<'s>>,
    /// Bytes of pages in the first tier that only members refer to.
    bytes: u64,
    /// Number of slots up to the last member; all if there is no member.
    pub seen: usize,
}

struct Member<'s> {
    slot: &'s Slot,
    /// Place among the slots.
    at: usize,
    /// Bytes of pages that only its sequence refers to.
    bytes: u64,
    sequence: Awake<'s>,
}

impl<'s> Member<'s> {
    /// `None` for a sequence that is in use, parked or poisoned, is not in `pool`, or shares all its pages.
    fn new((at, slot): (usize, &'s Slot), pool: &Pool) -> Option<Member<'s>> {
        let state = slot.idle()?;
        let bytes = match &*state {
            State::Awake(sequence) if may_go(sequence, pool) => own_bytes([&**sequence]),
            _ => 0,
        };
        (bytes > 0).then(|| Member { slot, at, bytes, sequence: Awake { state } })
    }
}

impl<'s> Group<'s> {
    /// Locks the fewest of `slots`, in order, whose own pages have `missing` bytes together; all if they have fewer. O(pages log slots).
    pub fn new(slots: &[&'s Slot], pool: &Pool, missing: u64) -> Group<'s> {
        let mut group = Group { members: Vec::new(), bytes: 0, seen: slots.len() };
        let mut rest = slots.iter().copied().enumerate();
        let mut too_few = 0;
        // Twice as many each time, as the pages of all members are counted again.
        for most in (0..).map(|power| 1 << power) {
            let next = rest.by_ref().filter_map(|slot| Member::new(slot, pool));
            group.members.extend(next.take(most - group.len()));
            group.bytes = group.bytes_of(group.len());
            if group.bytes >= missing {
                let sizes: Vec<usize> = (too_few + 1..group.len()).collect();
                group.keep(too_few + 1 + sizes.partition_point(|n| group.bytes_of(*n) < missing));
                break;
            }
            if group.len() < most {
                break;
            }
            too_few = most;
        }
        group
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Releases all but the first `n`, of which there is at least one.
    pub fn keep(&mut self, n: usize) {
        if n < self.len() {
            self.members.truncate(n);
            self.bytes = self.bytes_of(n);
        }
        self.seen = self.members.last().map_or(self.seen, |last| last.at + 1);
    }

    /// Bytes of pages in the first tier that only the first `n` members refer to.
    fn bytes_of(&self, n: usize) -> u64 {
        match &self.members[..n] {
            [one] => one.bytes,
            members => own_bytes(members.iter().map(|member| &*member.sequence)),
        }
    }

    /// Parks all members in lower tiers, or none.
    ///
    /// # Errors
    /// The errors of [`Cache::park`](crate::Cache::park).
    pub fn park(&mut self, made: &mut MadeRoom) -> Result<(), Error> {
        let Some(first) = self.members.first() else { return Ok(()) };
        let cache = first.sequence.cache();
        let sequences = self.members.iter_mut().map(|member| &mut *member.sequence);
        let parked = cache.park(sequences, 1)?;
        for (mut member, parked) in mem::take(&mut self.members).into_iter().zip(parked) {
            *member.sequence.state = State::Parked(parked);
            made.parked.push(member.slot.id);
        }
        made.freed += self.bytes;
        Ok(())
    }

    /// Moves `bytes` of the first member's full pages to lower tiers.
    ///
    /// # Errors
    /// The errors of [`Sequence::demote`].
    pub fn demote(&mut self, bytes: u64, made: &mut MadeRoom) -> Result<(), Error> {
        let Some(first) = self.members.first_mut() else { return Ok(()) };
        let freed = first.sequence.demote(bytes)?;
        if freed > 0 {
            made.freed += freed;
            made.demoted.push(first.slot.id);
        }
        Ok(())
    }
}

/// Bytes of pages in the first tier that only these sequences refer to, by the page, its list or its layer.
fn own_bytes<'s>(sequences: impl IntoIterator<Item = &'s Sequence>) -> u64 {
    let (mut layers, mut checkpoints) = (References::new(), References::new());
    for sequence in sequences {
        sequence.layers.iter().for_each(|layer| _ = layers.note(layer.holders(), &**layer));
        for kept in &sequence.checkpoints {
            checkpoints.note((Arc::as_ptr(kept).addr(), Arc::strong_count(kept)), kept);
        }
    }
    for layer in checkpoints.own().flat_map(|kept| &kept.layers) {
        layers.note(layer.holders(), &**layer);
    }
    let (mut sealed, mut lists, mut pages) = (References::new(), References::new(), References::new());
    let mut note = |page: &Page| {
        pages.note((page.key(), page.handles() as usize), page.bytes());
    };
    for layer in layers.own() {
        for head in &layer.heads {
            head.ring.iter().for_each(&mut note);
            let parts = head.runs.iter().flat_map(|(_, run)| run.entries.parts());
            for (holders, entries) in parts {
                lists.note(holders, entries);
            }
        }
        layer.past.pages().flat_map(|held| held.pages()).for_each(&mut note);
        if let Some(ahead) = &layer.sealed {
            sealed.note(ahead.holders(), ahead);
        }
    }
    for (holders, entries) in sealed.own().flat_map(Sealed::lists).flat_map(Chunks::parts) {
        lists.note(holders, entries);
    }
    let entries = lists.own().flatten();
    entries.flat_map(|entry| entry.held.pages()).for_each(&mut note);
    pages.own().sum()
}
