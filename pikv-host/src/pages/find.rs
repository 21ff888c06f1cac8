//! Finds pages by their ordinals in the list of a run.

use crate::base::chunks::Chunks;
use crate::pages::entry::Entry;
use std::ops::Range;

/// Looks up pages by ordinals that mostly ascend. Where none is missing it computes the index from the ends of a stretch of the list, since
/// to load each entry would take longer than what is done with it.
pub(crate) struct Finder<'a> {
    entries: &'a Chunks<Entry>,
    /// Indices of a stretch without a missing ordinal, and the ordinal of its first entry.
    stretch: Range<usize>,
    first: u32,
}

impl<'a> Finder<'a> {
    pub fn new(entries: &'a Chunks<Entry>) -> Finder<'a> {
        Finder { entries, stretch: 0..0, first: 0 }
    }

    /// Index of the page at `ordinal`.
    pub fn index(&mut self, ordinal: u32) -> Option<usize> {
        let after = ordinal.checked_sub(self.first).map(|after| after as usize);
        if let Some(after) = after.filter(|after| *after < self.stretch.len()) {
            return Some(self.stretch.start + after);
        }
        let i = find(self.entries, self.stretch.end, ordinal)?;
        let adjacent = |last: Option<&Entry>, n: usize| {
            last.filter(|last| last.ordinal.checked_sub(ordinal) == Some(n as u32 - 1)).map(|_| i..i + n)
        };
        let chunk = self.entries.rest_of_chunk(i);
        let all = adjacent(self.entries.back(), self.entries.len() - i);
        self.stretch = all.or_else(|| adjacent(chunk.last(), chunk.len())).unwrap_or(i..i + 1);
        self.first = ordinal;
        Some(i)
    }
}

/// Index of the page at `ordinal` in a list with ascending ordinals; tries `guess` first, which is right if no ordinal is missing.
pub(crate) fn find(entries: &Chunks<Entry>, guess: usize, ordinal: u32) -> Option<usize> {
    let is = |i: &usize| entries.get(*i).is_some_and(|entry| entry.ordinal == ordinal);
    let found = || entries.partition_point(|entry| entry.ordinal < ordinal);
    Some(guess).filter(is).or_else(|| Some(found()).filter(is))
}

#[cfg(test)]
mod tests {
    use super::{Finder, find};
    use crate::base::chunks::Chunks;
    use crate::pages::entry::{Entry, PageState};
    use crate::pages::homes::Homes;

    /// Lists without a gap, with gaps in one place, everywhere, and at the ends of chunks; every ordinal asked for in order, and some again.
    #[test]
    fn ordinals_are_found_where_they_are() {
        for missing in [|_: u32| false, |o| o == 40, |o| o % 3 == 1, |o| o % 16 == 15, |o| o / 20 % 2 == 1] {
            let ordinals: Vec<u32> = (5..200).filter(|ordinal| !missing(*ordinal)).collect();
            let held = PageState::Gone { last: 0 };
            let entry = |ordinal: &u32| {
                let (held, homes) = (held.clone(), Homes::default());
                Entry { ordinal: *ordinal, held, fill: 0, live: 0, pending: 0, bounds: None, homes }
            };
            let entries: Chunks<Entry> = ordinals.iter().map(entry).collect();
            let mut finder = Finder::new(&entries);
            for ordinal in (0..210).chain([7, 6, 150, 3, 199, 5]) {
                let expected = ordinals.iter().position(|o| *o == ordinal);
                assert_eq!(finder.index(ordinal), expected, "{ordinal} of {ordinals:?}");
                assert_eq!(find(&entries, 3, ordinal), expected);
            }
        }
        let none = Chunks::default();
        assert_eq!(Finder::new(&none).index(0), None);
    }
}
