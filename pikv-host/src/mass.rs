//! The attention mass of pages.

use crate::attend::PageMass;
use crate::forest::Forest;
use crate::job::{Item, Job, SCRATCH, Scratch, Shared, TILE};
use pikv_core::math::exp2i;
use pikv_core::warp::LANES;

impl Job<'_> {
    /// As [`Job::run`] for one forest, and the mass of its pages.
    pub fn with_mass(&self, forest: &Forest<'_>, out: &Shared<'_>, lse: &Shared<'_>) -> Vec<PageMass> {
        let group = self.group();
        let rows = self.views[forest.view].rows as usize * group;
        let step = (TILE / group).max(1) * group;
        let mut mass: Vec<PageMass> = forest
            .pages
            .iter()
            .map(|page| PageMass {
                sequence: forest.view,
                kv_head: forest.head,
                page: page.id,
                tokens: [0.0; LANES],
            })
            .collect();
        let mut raw: Vec<[f32; LANES]> = Vec::new();
        let mut tops: Vec<f32> = Vec::new();
        for row in (0..rows).step_by(step) {
            let item = Item { forest, row, rows: step.min(rows - row) };
            raw.clear();
            raw.resize(forest.pages.len() * item.rows, [0.0; LANES]);
            tops.clear();
            tops.resize(forest.blocks.len() * item.rows, 0.0);
            SCRATCH.with_borrow_mut(|scratch| {
                self.pack(&item, scratch);
                let Scratch { packed, part, spare, .. } = scratch;
                let trees = self.trees(&item);
                let full = trees.of(false);
                part.resize(full.len().max(part.len()), 0.0);
                let mut leaf = |block: usize, part: &mut [f32]| {
                    let pages = forest.blocks[block].clone();
                    let raw = &mut raw[pages.start * item.rows..pages.end * item.rows];
                    self.block(&item, block, packed, part, Some(raw));
                    let tree = trees.of(forest.is_packed(block));
                    tops[block * item.rows..][..item.rows].copy_from_slice(tree.partial(part).m);
                };
                forest.reduce(&trees, &mut leaf, part, spare);
                let total = full.partial(part);
                self.finish(&item, &total, out, lse);
                for (block, pages) in forest.blocks.iter().enumerate() {
                    let raw = &raw[pages.start * item.rows..pages.end * item.rows];
                    for query in (0..item.rows).step_by(group) {
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
                            for (token, sum) in page.tokens.iter_mut().zip(&sum) {
                                *token += sum;
                            }
                        }
                    }
                }
            });
        }
        // A page that was packed in between is listed in both forms; each row read one.
        for original in (0..mass.len()).rev().filter(|i| forest.pages[*i].original) {
            let PageMass { page, tokens, .. } = mass.remove(original);
            if let Some(packed) = mass.iter_mut().find(|mass| mass.page == page) {
                packed.tokens.iter_mut().zip(&tokens).for_each(|(sum, x)| *sum += x);
            }
        }
        mass
    }
}
