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

/// Puts together what heads met, by row and expert.
pub(crate) fn combined(met: &mut Vec<Met>) {
    met.sort_unstable_by_key(|met| (met.row, met.expert));
    met.dedup_by(|next, kept| {
        let same = (next.row, next.expert) == (kept.row, kept.expert);
        if same {
            (kept.wanted, kept.held) = (kept.wanted + next.wanted, kept.held + next.held);
        }
        same
    });
}
