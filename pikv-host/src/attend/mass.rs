//! The attention mass of pages.

use crate::attend::forest::Forest;
use crate::base::ids::PageId;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// The softmax weights that the tokens of pages received, from several sets of rows each: from all, if asked for, then from each
/// cut.
#[derive(Debug, Default)]
pub(crate) struct Weighed {
    /// The pages, and their lanes that were read, a bit each.
    pub pages: Vec<(PageId, u32)>,
    pub(super) sets: usize,
    /// Whether the first set is that of all rows.
    all: bool,
    /// `[pages][sets]`
    pub(super) mass: Vec<[f32; LANES]>,
    /// `[pages][sets]`: whether rows of the set read the page at all.
    read: Vec<bool>,
}

/// Whose weights are wanted.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub all: bool,
    /// Rows of the sequence, apart, ascending.
    pub cuts: SmallVec<[Range<u32>; 2]>,
}

impl Wanted {
    /// The sets of rows whose weights are wanted apart.
    pub fn sets(&self) -> impl Iterator<Item = Range<u32>> {
        self.all.then_some(0..u32::MAX).into_iter().chain(self.cuts.iter().cloned())
    }

    /// Whether some of the rows are wanted.
    pub(super) fn any(&self, rows: &Range<u32>) -> bool {
        self.all || self.cuts.iter().any(|cut| cut.start < rows.end && rows.start < cut.end)
    }

    /// The sets that a row belongs to.
    pub(super) fn of(&self, row: u32) -> SmallVec<[usize; 2]> {
        let cut = self.cuts.iter().position(|cut| cut.contains(&row));
        let cut = cut.map(|cut| usize::from(self.all) + cut);
        self.all.then_some(0).into_iter().chain(cut).collect()
    }
}

impl Weighed {
    /// Of the pages of a forest. What they weigh is left over from what was there before, and still to be written.
    pub fn start(&mut self, forest: &Forest<'_>, wanted: &Wanted) {
        self.pages.clear();
        self.pages.extend(forest.pages.iter().map(|page| (page.id, page.live)));
        (self.sets, self.all) = (wanted.sets().count(), wanted.all);
        self.mass.resize(self.pages.len() * self.sets, [0.0; LANES]);
        self.read.clear();
        for _ in &self.pages {
            self.read.extend(wanted.sets().map(|rows| !rows.is_empty()));
        }
    }

    /// Empties the list of pages. Old weights stay allocated, and [`start`](Self::start) overwrites them.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.read.clear();
        self.sets = 0;
    }

    /// The weights of page `i` from set `set`.
    fn mass_mut(&mut self, i: usize, set: usize) -> &mut [f32; LANES] {
        &mut self.mass[i * self.sets + set]
    }

    /// The weights of page `i` from all rows, if they were asked for.
    pub fn all(&self, i: usize) -> &[f32; LANES] {
        &self.mass[i * self.sets]
    }

    /// The weights of page `i` from the rows of a cut, if one of them read it.
    pub fn cut(&self, i: usize, cut: usize) -> Option<&[f32; LANES]> {
        let at = i * self.sets + usize::from(self.all) + cut;
        self.read[at].then_some(&self.mass[at])
    }

    /// Adds a page that weighs nothing; returns its index.
    fn push(&mut self, page: PageId, live: u32) -> usize {
        self.pages.push((page, live));
        self.mass.resize(self.pages.len() * self.sets, [0.0; LANES]);
        self.read.resize(self.pages.len() * self.sets, false);
        self.pages.len() - 1
    }

    /// Takes a token's weight in a cut along to where it lies now: from page `from` to lane `lane` of `to`, which is added if it is
    /// missing.
    pub fn carry(
        &mut self,
        index: &mut HashMap<PageId, usize>,
        cut: usize,
        (from, from_lane): (PageId, usize),
        (to, to_lane): (PageId, usize),
    ) {
        let Some(&from) = index.get(&from) else { return };
        let to = *index.entry(to).or_insert_with(|| self.push(to, 0));
        let set = usize::from(self.all) + cut;
        let mass = std::mem::take(&mut self.mass_mut(from, set)[from_lane]);
        self.mass_mut(to, set)[to_lane] += mass;
        self.read[to * self.sets + set] = true;
    }

    /// Index of each page.
    pub fn index(&self) -> HashMap<PageId, usize> {
        self.pages.iter().enumerate().map(|(i, (page, _))| (*page, i)).collect()
    }

    /// Adds what other rows of the same head saw; `index` is that of these pages.
    pub fn merge(&mut self, index: &mut HashMap<PageId, usize>, other: &Weighed) {
        for (i, &(page, live)) in other.pages.iter().enumerate() {
            let own = i * other.sets..(i + 1) * other.sets;
            let to = match index.entry(page) {
                Entry::Occupied(at) => *at.get(),
                Entry::Vacant(at) => *at.insert(self.push(page, live)),
            };
            self.add(to, &other.mass[own.clone()]);
            let read = &mut self.read[to * self.sets..];
            read.iter_mut().zip(&other.read[own]).for_each(|(read, x)| *read |= x);
        }
    }

    /// Adds what page `from` of `other` weighs, to page `to`.
    fn add(&mut self, to: usize, other: &[[f32; LANES]]) {
        for (sum, x) in self.mass[to * self.sets..].iter_mut().zip(other) {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
    }

    /// Writes what was weighed, `[sets][pages]`.
    #[cfg(feature = "cuda")]
    pub fn fill(&mut self, mass: &[[f32; LANES]]) {
        let pages = self.pages.len();
        for (at, to) in self.mass.iter_mut().enumerate() {
            *to = mass[at % self.sets * pages + at / self.sets];
        }
    }

    /// A page that was packed in between is listed in two forms or three, of which each row read one: puts their masses
    /// together. `passes`: those of the forest.
    pub fn one_form(&mut self, passes: impl DoubleEndedIterator<Item = usize>) {
        for original in passes.rev() {
            let (page, _) = self.pages.remove(original);
            let of = original * self.sets..(original + 1) * self.sets;
            let mass: SmallVec<[[f32; LANES]; 2]> = self.mass.drain(of.clone()).collect();
            self.read.drain(of);
            if let Some(packed) = self.pages.iter().position(|(other, _)| *other == page) {
                self.add(packed, &mass);
            }
        }
    }
}
