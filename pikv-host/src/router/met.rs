//! What rows of attention wanted of experts, and met.

use pikv_core::page::PAGE;

/// Of the pages that a row of a KV head wanted, those of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Met {
    /// Counted from the first of its sequence in the step.
    pub row: u32,
    pub expert: u16,
    /// Pages.
    pub wanted: u32,
    /// Their tokens that lay in the first tier.
    pub held: u32,
}

impl Met {
    /// Tokens of the wanted pages that did not.
    pub fn missed(&self) -> u32 {
        self.wanted * PAGE - self.held
    }
}

/// Puts together what heads met from item `from` on, by row and expert; `met` is where an item has it.
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
