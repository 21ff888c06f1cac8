//! The attention mass of pages.

use crate::attend::forest::Forest;
use crate::base::ids::PageId;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Softmax weights of the tokens of pages, summed over sets of rows: all rows, if asked for, then each cut.
#[derive(Debug, Default)]
pub(crate) struct PageWeights {
    pub pages: Vec<PageId>,
    pub(super) sets: usize,
    /// Whether the first set is all rows.
    all: bool,
    /// `[pages][sets]`
    pub(super) mass: Vec<[f32; LANES]>,
    /// `[pages][sets]`: lanes, a bit each, that rows of the set read.
    read: Vec<u32>,
}

/// Rows whose weights are computed.
#[derive(Clone, Debug)]
pub(crate) struct WeightSets {
    pub all: bool,
    /// Disjoint ranges of rows of the sequence, ascending.
    pub cuts: SmallVec<[Range<u32>; 2]>,
}

impl WeightSets {
    /// The sets of rows whose weights are summed separately.
    pub fn sets(&self) -> impl Iterator<Item = Range<u32>> {
        self.all.then_some(0..u32::MAX).into_iter().chain(self.cuts.iter().cloned())
    }

    /// Whether any of the rows is in a set.
    pub(super) fn any(&self, rows: &Range<u32>) -> bool {
        self.all || self.cuts.iter().any(|cut| cut.start < rows.end && rows.start < cut.end)
    }

    /// The sets of a row.
    pub(super) fn of(&self, row: u32) -> SmallVec<[usize; 2]> {
        let cut = self.cuts.iter().position(|cut| cut.contains(&row));
        let cut = cut.map(|cut| usize::from(self.all) + cut);
        self.all.then_some(0).into_iter().chain(cut).collect()
    }
}

impl PageWeights {
    /// Takes the pages of a forest. Their weights have stale values, and are still to be written.
    pub fn start(&mut self, forest: &Forest<'_>, wanted: &WeightSets) {
        self.pages.clear();
        self.pages.extend(forest.pages.iter().map(|page| page.id));
        (self.sets, self.all) = (wanted.sets().count(), wanted.all);
        self.mass.resize(self.pages.len() * self.sets, [0.0; LANES]);
        self.read.clear();
        for page in &forest.pages {
            self.read.extend(wanted.sets().map(|rows| if rows.is_empty() { 0 } else { page.live }));
        }
    }

    /// Empties the list of pages. Stale weights stay allocated; [`start`](Self::start) reuses them.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.read.clear();
        self.sets = 0;
    }

    /// The weights of page `i` in set `set`.
    fn mass_mut(&mut self, i: usize, set: usize) -> &mut [f32; LANES] {
        &mut self.mass[i * self.sets + set]
    }

    /// The weights of page `i` over all rows, if they were asked for.
    pub fn all(&self, i: usize) -> &[f32; LANES] {
        &self.mass[i * self.sets]
    }

    /// The weights of page `i` over the rows of a cut, and the lanes that one of them read, if there are any.
    pub fn cut(&self, i: usize, cut: usize) -> Option<(&[f32; LANES], u32)> {
        let at = i * self.sets + usize::from(self.all) + cut;
        let lanes = self.read[at];
        (lanes != 0).then_some((&self.mass[at], lanes))
    }

    /// Adds a page with weight 0; returns its index.
    fn push(&mut self, page: PageId) -> usize {
        self.pages.push(page);
        self.mass.resize(self.pages.len() * self.sets, [0.0; LANES]);
        self.read.resize(self.pages.len() * self.sets, 0);
        self.pages.len() - 1
    }

    /// Moves a token's weight in a cut, from page `from` to lane `to_lane` of page `to`, which is added if it is missing.
    pub fn carry(
        &mut self,
        index: &mut HashMap<PageId, usize>,
        cut: usize,
        (from, from_lane): (PageId, usize),
        (to, to_lane): (PageId, usize),
    ) {
        let Some(&from) = index.get(&from) else { return };
        let to = *index.entry(to).or_insert_with(|| self.push(to));
        let set = usize::from(self.all) + cut;
        let mass = std::mem::take(&mut self.mass_mut(from, set)[from_lane]);
        self.mass_mut(to, set)[to_lane] += mass;
        self.read[to * self.sets + set] |= 1 << to_lane;
    }

    /// Index of each page by its name.
    pub fn index(&self) -> HashMap<PageId, usize> {
        self.pages.iter().enumerate().map(|(i, page)| (*page, i)).collect()
    }

    /// Adds the weights of other rows of the same head; `index` is that of `self`.
    pub fn merge(&mut self, index: &mut HashMap<PageId, usize>, other: &PageWeights) {
        for (i, &page) in other.pages.iter().enumerate() {
            let own = i * other.sets..(i + 1) * other.sets;
            let to = match index.entry(page) {
                Entry::Occupied(at) => *at.get(),
                Entry::Vacant(at) => *at.insert(self.push(page)),
            };
            self.add(to, &other.mass[own.clone()]);
            let read = &mut self.read[to * self.sets..];
            read.iter_mut().zip(&other.read[own]).for_each(|(read, x)| *read |= x);
        }
    }

    /// Adds the weights of a page of another list to page `to`.
    fn add(&mut self, to: usize, other: &[[f32; LANES]]) {
        for (sum, x) in self.mass[to * self.sets..].iter_mut().zip(other) {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
    }

    /// Writes the weights from `[sets][pages]`.
    pub fn fill(&mut self, mass: &[[f32; LANES]]) {
        let pages = self.pages.len();
        for (at, to) in self.mass.iter_mut().enumerate() {
            *to = mass[at % self.sets * pages + at / self.sets];
        }
    }

    /// Merges the weights of pages that are listed in two or three forms, of which each row read one. `passes` are those of the forest.
    pub fn one_form(&mut self, passes: impl DoubleEndedIterator<Item = usize>) {
        for original in passes.rev() {
            let page = self.pages.remove(original);
            let of = original * self.sets..(original + 1) * self.sets;
            let mass: SmallVec<[[f32; LANES]; 2]> = self.mass.drain(of.clone()).collect();
            self.read.drain(of);
            if let Some(packed) = self.pages.iter().position(|other| *other == page) {
                self.add(packed, &mass);
            }
        }
    }
}
