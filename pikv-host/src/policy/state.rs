//! A policy's state of the tokens of a run of pages.

mod save;

use crate::base::huge_pages;
use pikv_core::warp::LANES;
use std::collections::VecDeque;
use std::ops::Range;

/// Rows of 32, a lane for each token of a page: `words` rows a page and version. A version is a length that a rollback can restore. The
/// pages of a version lie together, in the order in which they were added; the slot of a removed page is reused, so a run of constant size
/// allocates nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenStates {
    words: usize,
    versions: usize,
    /// `[versions][room][words]`; empty without state.
    rows: Vec<[f32; LANES]>,
    /// Slots of a version that are allocated, and those in use or freed, which come first.
    room: usize,
    slots: usize,
    /// A mark for each page of the run, in order.
    pages: VecDeque<Mark>,
    /// Free slots, the first freed first.
    free: VecDeque<u32>,
}

/// The slot of a page, and its last use.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// Slot of its rows; [`GONE`] once they are freed.
    slot: u32,
    /// Length of the sequence at the page's last recorded use; 0 without one.
    used: u32,
}

const GONE: u32 = u32::MAX;

/// The state of a page that was removed from its run: `[versions][words]`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Apart(Box<[[f32; LANES]]>);

impl Apart {
    pub fn bytes(&self) -> usize {
        size_of_val(&self.0[..])
    }
}

/// The state of one version.
pub(crate) struct Version<'a> {
    words: usize,
    rows: &'a mut [[f32; LANES]],
    pages: &'a mut VecDeque<Mark>,
}

impl Version<'_> {
    /// The rows of page `i`, and its last use.
    #[inline]
    pub fn page_mut(&mut self, i: usize) -> Option<(&mut [[f32; LANES]], &mut u32)> {
        let Mark { slot, used } = self.pages.get_mut(i)?;
        // [`GONE`] lies past the end of the rows.
        let from = *slot as usize * self.words;
        Some((self.rows.get_mut(from..from + self.words)?, used))
    }
}

impl TokenStates {
    /// The state of a run without pages.
    pub fn new(words: usize, versions: usize) -> TokenStates {
        let versions = if words == 0 { 0 } else { versions };
        TokenStates { words, versions, ..TokenStates::default() }
    }

    /// A slot for a page without tokens.
    fn take(&mut self) -> u32 {
        let slot = self.free.pop_front().unwrap_or_else(|| {
            if self.slots == self.room {
                self.grow();
            }
            self.slots += 1;
            self.slots as u32 - 1
        });
        for version in 0..self.versions {
            let rows = self.of(slot, version);
            self.rows[rows].fill([0.0; LANES]);
        }
        slot
    }

    /// Allocates another slot.
    fn grow(&mut self) {
        if self.versions == 1 {
            self.room += 1;
            huge_pages::resize(&mut self.rows, self.room * self.words, [0.0; LANES]);
        } else {
            self.set_room((2 * self.room).max(2));
        }
    }

    /// Moves the rows to lists of `room` slots; those in use keep their slots.
    fn set_room(&mut self, room: usize) {
        let mut rows = Vec::new();
        huge_pages::reserve(&mut rows, self.versions * room * self.words);
        for version in 0..self.versions {
            let from = version * self.room * self.words;
            rows.extend_from_slice(&self.rows[from..from + self.slots * self.words]);
            rows.resize((version + 1) * room * self.words, [0.0; LANES]);
        }
        (self.rows, self.room) = (rows, room);
    }

    /// Frees room if at most a quarter of it is used. O(1) a removed page, amortised.
    pub fn tighten(&mut self) {
        huge_pages::tighten(&mut self.pages);
        let held = self.slots - self.free.len();
        if self.room < 2 * huge_pages::FEW || held > self.room / 4 {
            return;
        }
        // In the order of the pages, so that consecutive pages are contiguous.
        let room = 2 * held.max(1);
        let mut rows = Vec::with_capacity(self.versions * room * self.words);
        for version in 0..self.versions {
            for page in self.pages.iter().filter(|page| page.slot != GONE) {
                rows.extend_from_slice(&self.rows[self.of(page.slot, version)]);
            }
            rows.resize((version + 1) * room * self.words, [0.0; LANES]);
        }
        for (slot, page) in (0..).zip(self.pages.iter_mut().filter(|page| page.slot != GONE)) {
            page.slot = slot;
        }
        (self.rows, self.room, self.slots, self.free) = (rows, room, held, VecDeque::new());
    }

    /// Bytes of the lists, from their capacities.
    pub fn bytes(&self) -> u64 {
        let rows = self.rows.capacity() * size_of::<[f32; LANES]>();
        let marks = self.pages.capacity() * size_of::<Mark>() + self.free.capacity() * size_of::<u32>();
        (rows + marks) as u64
    }

    fn give(&mut self, slot: u32) {
        if slot != GONE {
            self.free.push_back(slot);
        }
        if self.pages.is_empty() {
            // Start again from the first slot.
            self.slots = 0;
            self.free.clear();
        }
    }

    /// Adds a page.
    pub fn push_back(&mut self) {
        if self.versions > 0 {
            let slot = self.take();
            huge_pages::push_back(&mut self.pages, Mark { slot, used: 0 });
        }
    }

    /// Removes the first page.
    pub fn pop_front(&mut self) {
        if let Some(page) = self.pages.pop_front() {
            self.give(page.slot);
        }
    }

    /// Adds a page without state before page `i`.
    pub fn insert(&mut self, i: usize) {
        if self.versions > 0 {
            self.pages.insert(i, Mark { slot: GONE, used: 0 });
        }
    }

    /// The state of the tokens of page `i`, in every version.
    pub fn rows_of(&self, i: usize) -> Apart {
        let Some(slot) = self.slot(i) else { return Apart::default() };
        let versions = (0..self.versions).flat_map(|version| &self.rows[self.of(slot, version)]);
        Apart(versions.copied().collect())
    }

    /// Gives page `i` rows again if they were freed: `rows`, or zeros.
    pub fn renew(&mut self, i: usize, rows: Option<&Apart>) {
        if self.pages.get(i).is_none_or(|page| page.slot != GONE) {
            return;
        }
        let slot = self.take();
        self.pages[i].slot = slot;
        let rows = rows.map_or(&[][..], |rows| &rows.0);
        for (version, rows) in rows.chunks_exact(self.words.max(1)).enumerate() {
            let to = self.of(slot, version);
            self.rows[to].copy_from_slice(rows);
        }
    }

    /// Removes the last page.
    pub fn pop_back(&mut self) {
        if let Some(page) = self.pages.pop_back() {
            self.give(page.slot);
        }
    }

    /// Removes all but the first `pages`.
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

    /// Removes the pages for which `stay`, one value a page, is false.
    pub fn retain(&mut self, stay: impl Iterator<Item = bool>) {
        if self.versions == 0 {
            return;
        }
        let mut stay = stay.collect::<Vec<bool>>().into_iter();
        let gone = self.pages.iter().zip(stay.clone()).filter(|(_, stays)| !stays).map(|(page, _)| page.slot);
        self.free.extend(gone.filter(|slot| *slot != GONE));
        self.pages.retain(|_| stay.next().unwrap_or(true));
        self.give(GONE);
    }

    /// The range of a slot's rows.
    fn of(&self, slot: u32, version: usize) -> Range<usize> {
        let from = (version * self.room + slot as usize) * self.words;
        from..from + self.words
    }

    /// The slot of page `i`.
    fn slot(&self, i: usize) -> Option<u32> {
        self.pages.get(i).map(|page| page.slot).filter(|slot| *slot != GONE)
    }

    /// The rows of page `i`.
    pub fn rows(&self, i: usize, version: usize) -> Option<&[[f32; LANES]]> {
        let slot = self.slot(i).filter(|_| version < self.versions)?;
        Some(&self.rows[self.of(slot, version)])
    }

    /// The state in a version, for a pass over its pages.
    pub fn version_mut(&mut self, version: usize) -> Version<'_> {
        let TokenStates { words, rows, pages, room, .. } = self;
        let rows = rows.chunks_exact_mut((*room * *words).max(1)).nth(version).unwrap_or_default();
        Version { words: *words, rows, pages }
    }

    /// Sets the words of a token, in every version.
    pub fn set(&mut self, i: usize, lane: u32, words: &[f32]) {
        let Some(slot) = self.slot(i) else { return };
        for version in 0..self.versions {
            let to = self.of(slot, version);
            for (row, word) in self.rows[to].iter_mut().zip(words) {
                row[lane as usize] = *word;
            }
        }
    }

    /// Copies the state of the token at `lane` of page `from.0` of another run, in some of the versions.
    pub fn copy(&mut self, versions: Range<usize>, of: &TokenStates, from: (usize, u32), to: (usize, u32)) {
        let (Some(source), Some(target)) = (of.slot(from.0), self.slot(to.0)) else { return };
        for version in versions {
            let target = self.of(target, version);
            let rows = of.rows[of.of(source, version)].iter();
            for (to_row, row) in self.rows[target].iter_mut().zip(rows) {
                to_row[to.1 as usize] = row[from.1 as usize];
            }
        }
    }

    /// Copies the state of the token at `lane` of page `from.0` to another place of the run.
    pub fn shift(&mut self, from: (usize, u32), to: (usize, u32)) {
        let (Some(source), Some(target)) = (self.slot(from.0), self.slot(to.0)) else { return };
        for version in 0..self.versions {
            for (a, b) in self.of(source, version).zip(self.of(target, version)) {
                self.rows[b][to.1 as usize] = self.rows[a][from.1 as usize];
            }
        }
    }

    /// Number of versions.
    pub fn versions(&self) -> usize {
        self.versions
    }

    /// Copies version `from` to version `to`.
    pub fn turn(&mut self, from: usize, to: usize) {
        if from != to && self.versions > 0 {
            let (stride, all) = (self.room * self.words, self.slots * self.words);
            self.rows.copy_within(from * stride..from * stride + all, to * stride);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TokenStates;

    /// The next number of a linear congruential generator, below `n`.
    fn draw(seed: &mut u32, n: usize) -> usize {
        *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (*seed >> 8) as usize % n.max(1)
    }

    #[test]
    fn a_run_keeps_what_plain_lists_do_and_gives_its_room_back() {
        for versions in [1, 2, 5] {
            let (words, mut seed) = (2, 7);
            let mut run = TokenStates::new(words, versions);
            // `[pages]`, each `[versions][words][32]`, or `None` once it was freed.
            let mut plain: Vec<Option<Vec<Vec<[f32; 32]>>>> = Vec::new();
            for round in 0..3000 {
                let grows = round / 500 % 2 == 0;
                match draw(&mut seed, if grows { 8 } else { 12 }) {
                    0..4 => {
                        run.push_back();
                        plain.push(Some(vec![vec![[0.0; 32]; words]; versions]));
                    }
                    4 | 5 if !plain.is_empty() => {
                        let (i, lane) = (draw(&mut seed, plain.len()), draw(&mut seed, 32));
                        let x = [round as f32, -(round as f32)];
                        run.set(i, lane as u32, &x);
                        for (w, x) in x.iter().enumerate() {
                            plain[i].iter_mut().flatten().for_each(|version| version[w][lane] = *x);
                        }
                    }
                    6 => {
                        let (from, to) = (draw(&mut seed, versions), draw(&mut seed, versions));
                        run.turn(from, to);
                        plain.iter_mut().flatten().for_each(|page| page[to] = page[from].clone());
                    }
                    7 if !plain.is_empty() => {
                        let (a, b) = (draw(&mut seed, plain.len()), draw(&mut seed, plain.len()));
                        let (x, y) = (draw(&mut seed, 32), draw(&mut seed, 32));
                        run.shift((a, x as u32), (b, y as u32));
                        if let (Some(from), Some(_)) = (plain[a].clone(), &plain[b]) {
                            for (to, from) in plain[b].iter_mut().flatten().zip(&from) {
                                (0..words).for_each(|w| to[w][y] = from[w][x]);
                            }
                        }
                    }
                    8 if !plain.is_empty() => {
                        run.pop_front();
                        plain.remove(0);
                    }
                    9 => {
                        run.pop_back();
                        plain.pop();
                    }
                    10 if !plain.is_empty() => {
                        let i = draw(&mut seed, plain.len());
                        run.free(i);
                        plain[i] = None;
                    }
                    11 => {
                        let stay: Vec<bool> = plain.iter().map(|page| page.is_some()).collect();
                        run.retain(stay.iter().copied());
                        plain.retain(Option::is_some);
                        run.tighten();
                    }
                    _ => {}
                }
                for (i, page) in plain.iter().enumerate() {
                    for version in 0..versions {
                        assert_eq!(run.rows(i, version), page.as_ref().map(|page| &page[version][..]));
                    }
                }
                assert_eq!(run.rows(plain.len(), 0), None);
            }
            run.truncate(1);
            run.tighten();
            assert!(run.bytes() < 20_000 * versions as u64, "{}", run.bytes());
        }
    }
}
