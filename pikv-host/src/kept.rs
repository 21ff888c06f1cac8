//! What a policy keeps of the tokens of a run of pages.

use crate::huge;
use pikv_core::warp::LANES;
use std::collections::VecDeque;

/// Rows of 32, a lane for each token of a page: `words` of them a page, for each version, which is a length that can be gone back
/// to. The pages of a version lie together, in the order in which they came; a page that is gone leaves its place to one that
/// comes later, so a run that neither grows nor shrinks takes no memory anew.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    words: usize,
    /// Of each version `[slots][words]`; none where nothing is kept.
    versions: Vec<Vec<[f32; LANES]>>,
    /// Of each page of the run, in its order.
    pages: VecDeque<Mark>,
    /// Slots of pages that are gone, the first that went first.
    free: VecDeque<u32>,
}

/// What is kept of a page.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// Where its rows are; [`GONE`] once the page is gone.
    slot: u32,
    /// Tokens of the sequence when the page was last used, as far as somebody asked; 0 if it never was.
    used: u32,
}

const GONE: u32 = u32::MAX;

/// What is kept in a version.
pub(crate) struct Version<'a> {
    words: usize,
    rows: &'a mut [[f32; LANES]],
    pages: &'a mut VecDeque<Mark>,
}

impl Version<'_> {
    /// The rows of page `i`, and when it was used.
    #[inline]
    pub fn page_mut(&mut self, i: usize) -> Option<(&mut [[f32; LANES]], &mut u32)> {
        let Mark { slot, used } = self.pages.get_mut(i)?;
        // What is gone lies past the end of them all.
        let from = *slot as usize * self.words;
        Some((self.rows.get_mut(from..from + self.words)?, used))
    }
}

impl Kept {
    /// Of a run without pages.
    pub fn new(words: usize, versions: usize) -> Kept {
        let versions = if words == 0 { 0 } else { versions };
        Kept { words, versions: vec![Vec::new(); versions], ..Kept::default() }
    }

    /// A place for a page that does not hold tokens yet.
    fn take(&mut self) -> u32 {
        if let Some(slot) = self.free.pop_front() {
            let from = slot as usize * self.words;
            self.versions.iter_mut().for_each(|rows| rows[from..from + self.words].fill([0.0; LANES]));
            return slot;
        }
        let slots = self.versions[0].len() / self.words;
        for rows in &mut self.versions {
            huge::resize(rows, (slots + 1) * self.words, [0.0; LANES]);
        }
        slots as u32
    }

    fn give(&mut self, slot: u32) {
        if slot != GONE {
            self.free.push_back(slot);
        }
        if self.pages.is_empty() {
            // In order again.
            self.versions.iter_mut().for_each(Vec::clear);
            self.free.clear();
        }
    }

    /// Adds a page.
    pub fn push_back(&mut self) {
        if !self.versions.is_empty() {
            let slot = self.take();
            huge::push_back(&mut self.pages, Mark { slot, used: 0 });
        }
    }

    /// Forgets the first page.
    pub fn pop_front(&mut self) {
        if let Some(page) = self.pages.pop_front() {
            self.give(page.slot);
        }
    }

    /// Forgets the last page.
    pub fn pop_back(&mut self) {
        if let Some(page) = self.pages.pop_back() {
            self.give(page.slot);
        }
    }

    /// Forgets all but the first `pages`.
    pub fn truncate(&mut self, pages: usize) {
        while self.pages.len() > pages {
            self.pop_back();
        }
    }

    /// Frees the rows of page `i`, which stays in the run.
    pub fn free(&mut self, i: usize) {
        if let Some(page) = self.pages.get_mut(i) {
            let slot = std::mem::replace(&mut page.slot, GONE);
            self.give(slot);
        }
    }

    /// Gives page `i` rows again if it has none.
    pub fn renew(&mut self, i: usize) {
        if self.pages.get(i).is_some_and(|page| page.slot == GONE) {
            self.pages[i].slot = self.take();
        }
    }

    fn range(&self, i: usize) -> Option<std::ops::Range<usize>> {
        let slot = self.pages.get(i)?.slot;
        (slot != GONE).then(|| slot as usize * self.words..(slot as usize + 1) * self.words)
    }

    /// The rows of page `i`.
    pub fn rows(&self, i: usize, version: usize) -> Option<&[[f32; LANES]]> {
        Some(&self.versions.get(version)?[self.range(i)?])
    }

    /// What is kept in a version, to be gone through page by page.
    pub fn version_mut(&mut self, version: usize) -> Version<'_> {
        let Kept { words, versions, pages, .. } = self;
        let rows = versions.get_mut(version).map(|rows| &mut rows[..]).unwrap_or_default();
        Version { words: *words, rows, pages }
    }

    /// Sets the words of a token, in every version.
    pub fn set(&mut self, i: usize, lane: u32, words: &[f32]) {
        let Some(range) = self.range(i) else { return };
        for version in &mut self.versions {
            for (row, word) in version[range.clone()].iter_mut().zip(words) {
                row[lane as usize] = *word;
            }
        }
    }

    /// Copies what is kept of the token at `lane` of page `from.0` of another run, in some of the versions.
    pub fn copy(
        &mut self,
        versions: std::ops::Range<usize>,
        of: &Kept,
        from: (usize, u32),
        to: (usize, u32),
    ) {
        let (Some(source), Some(target)) = (of.range(from.0), self.range(to.0)) else { return };
        for version in versions {
            let rows = of.versions[version][source.clone()].iter();
            for (to_row, row) in self.versions[version][target.clone()].iter_mut().zip(rows) {
                to_row[to.1 as usize] = row[from.1 as usize];
            }
        }
    }

    /// Copies what is kept of the token at `lane` of page `from.0` to another place of the run.
    pub fn shift(&mut self, from: (usize, u32), to: (usize, u32)) {
        let (Some(source), Some(target)) = (self.range(from.0), self.range(to.0)) else { return };
        for version in &mut self.versions {
            for (a, b) in source.clone().zip(target.clone()) {
                version[b][to.1 as usize] = version[a][from.1 as usize];
            }
        }
    }

    /// How many versions there are.
    pub fn versions(&self) -> usize {
        self.versions.len()
    }

    /// Starts version `to` from version `from`.
    pub fn turn(&mut self, from: usize, to: usize) {
        if let Ok([from, to]) = self.versions.get_disjoint_mut([from, to]) {
            to.copy_from_slice(from);
        }
    }
}
