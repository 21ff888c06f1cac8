//! The attention mass of pages.

use crate::forest::Forest;
use crate::job::{Job, SCRATCH, Scratch, Shared, TILE};
use crate::sequence::PageId;
use pikv_core::math::exp2i;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// The softmax weight that the tokens of a page received.
#[derive(Clone, Debug)]
pub(crate) struct Weighed {
    pub page: PageId,
    /// From all rows, if asked for.
    pub all: [f32; LANES],
    /// From some rows each.
    pub cuts: Vec<[f32; LANES]>,
    /// Whether those rows read the page at all.
    pub read: Vec<bool>,
}

/// Whose weights are wanted.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub all: bool,
    /// Rows of the sequence, apart, ascending.
    pub cuts: SmallVec<[Range<u32>; 2]>,
}

impl Wanted {
    /// Nothing, of a page.
    pub fn blank(&self, page: PageId) -> Weighed {
        let read = self.cuts.iter().map(|cut| !cut.is_empty()).collect();
        Weighed { page, all: [0.0; LANES], cuts: vec![[0.0; LANES]; self.cuts.len()], read }
    }

    /// Whether some of the rows are wanted.
    pub fn any(&self, rows: &Range<u32>) -> bool {
        self.all || self.cuts.iter().any(|cut| cut.start < rows.end && rows.start < cut.end)
    }
}

impl Job<'_> {
    /// Rows of an item that holds whole tokens.
    pub fn whole(&self) -> usize {
        (TILE / self.group()).max(1) * self.group()
    }

    /// As [`Job::run`] for one forest, and the mass of its pages.
    pub fn with_mass(
        &self,
        forest: &Forest<'_>,
        wanted: &Wanted,
        out: &Shared<'_>,
        lse: &Shared<'_>,
    ) -> Vec<Weighed> {
        let group = self.group();
        let mut mass: Vec<Weighed> = forest.pages.iter().map(|page| wanted.blank(page.id)).collect();
        let mut raw: Vec<[f32; LANES]> = Vec::new();
        let mut tops: Vec<f32> = Vec::new();
        for item in self.items(forest, self.whole()) {
            let row = item.row;
            let tokens = (row / group) as u32..((row + item.rows) / group) as u32;
            let counts = wanted.any(&tokens);
            raw.clear();
            raw.resize(if counts { forest.pages.len() * item.rows } else { 0 }, [0.0; LANES]);
            tops.clear();
            tops.resize(forest.blocks.len() * item.rows, 0.0);
            SCRATCH.with_borrow_mut(|scratch| {
                self.pack(&item, scratch);
                let Scratch { packed, part, spare, .. } = scratch;
                let trees = self.trees(&item);
                let full = trees.of(None);
                part.resize(full.len().max(part.len()), 0.0);
                let mut leaf = |block: usize, part: &mut [f32]| {
                    let pages = forest.blocks[block].clone();
                    let raw = raw.get_mut(pages.start * item.rows..pages.end * item.rows);
                    self.block(&item, block, packed, part, raw.filter(|_| counts));
                    let tree = trees.of(forest.codec(block));
                    tops[block * item.rows..][..item.rows].copy_from_slice(tree.partial(part).m);
                };
                forest.reduce(&trees, &mut leaf, part, spare);
                let total = full.partial(part);
                self.finish(&item, &total, out, lse);
                if !counts {
                    return;
                }
                for (block, pages) in forest.blocks.iter().enumerate() {
                    let raw = &raw[pages.start * item.rows..pages.end * item.rows];
                    for query in (0..item.rows).step_by(group) {
                        let token = ((row + query) / group) as u32;
                        let cut = wanted.cuts.iter().position(|cut| cut.contains(&token));
                        if !wanted.all && cut.is_none() {
                            continue;
                        }
                        for (i, page) in mass[pages.clone()].iter_mut().enumerate() {
                            let mut sum = [0.0; LANES];
                            for r in query..query + group {
                                let top = tops[block * item.rows + r];
                                if top == f32::NEG_INFINITY {
                                    continue;
                                }
                                let weight = exp2i(top - total.m[r]) / total.l[r];
                                for (sum, p) in sum.iter_mut().zip(&raw[r * pages.len() + i]) {
                                    *sum += p * weight;
                                }
                            }
                            add(&mut page.all, &sum);
                            if let Some(cut) = cut {
                                add(&mut page.cuts[cut], &sum);
                            }
                        }
                    }
                }
            });
        }
        one_form(&mut mass, forest);
        mass
    }
}

/// A page that was packed in between is listed in two forms or three, of which each row read one: puts their masses together.
pub(crate) fn one_form(mass: &mut Vec<Weighed>, forest: &Forest<'_>) {
    let passes = |i: &usize| forest.pages[*i].original || forest.pages[*i].until.is_some();
    for original in (0..mass.len()).rev().filter(passes) {
        let Weighed { page, all, cuts, .. } = mass.remove(original);
        if let Some(packed) = mass.iter_mut().find(|mass| mass.page == page) {
            add(&mut packed.all, &all);
            packed.cuts.iter_mut().zip(&cuts).for_each(|(sum, x)| add(sum, x));
        }
    }
}

/// The masses of several rows of a head that were attended apart, page by page.
pub(crate) fn together(mut rows: impl Iterator<Item = Vec<Weighed>>) -> Vec<Weighed> {
    let mut all = rows.next().unwrap_or_default();
    let Some(second) = rows.next() else { return all };
    let mut index: HashMap<PageId, usize> = all.iter().enumerate().map(|(i, page)| (page.page, i)).collect();
    for pages in std::iter::once(second).chain(rows) {
        for page in pages {
            match index.entry(page.page) {
                Entry::Occupied(at) => {
                    let sum = &mut all[*at.get()];
                    add(&mut sum.all, &page.all);
                    sum.cuts.iter_mut().zip(&page.cuts).for_each(|(sum, x)| add(sum, x));
                    sum.read.iter_mut().zip(&page.read).for_each(|(read, x)| *read |= x);
                }
                Entry::Vacant(at) => {
                    at.insert(all.len());
                    all.push(page);
                }
            }
        }
    }
    all
}

fn add(sums: &mut [f32; LANES], x: &[f32; LANES]) {
    sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}
