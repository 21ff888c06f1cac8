//! Pages that rows of attention wanted of experts, and those that were held.

use pikv_core::page::PAGE;

/// The pages of one expert that a row of a KV head wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Met {
    /// Row, counted from the first of its sequence in the step.
    pub row: u32,
    pub expert: u16,
    /// Pages wanted.
    pub wanted: u32,
    /// Tokens of them that lay in the first tier.
    pub held: u32,
}

impl Met {
    /// Tokens of the wanted pages that did not lie in the first tier.
    pub fn missed(&self) -> u32 {
        self.wanted * PAGE - self.held
    }
}

/// Adds up the counts of KV heads from item `from` on, by row and expert; `met` gets an item's counts.
pub(crate) fn combined<T: Copy>(all: &mut Vec<T>, from: usize, met: impl Fn(&mut T) -> &mut Met) {
    let key = |mut item: T| {
        let met = met(&mut item);
        (met.row, met.expert)
    };
    all[from..].sort_unstable_by_key(|item| key(*item));
    let mut end = from;
    for at in from..all.len() {
        let mut next = all[at];
        if end > from && key(all[end - 1]) == key(next) {
            let (kept, next) = (met(&mut all[end - 1]), met(&mut next));
            (kept.wanted, kept.held) = (kept.wanted + next.wanted, kept.held + next.held);
        } else {
            all[end] = next;
            end += 1;
        }
    }
    all.truncate(end);
}
