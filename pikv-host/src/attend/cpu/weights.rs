//! Softmax weights of pages, computed beside the output.

use crate::attend::forest::Forest;
use crate::attend::job::{Job, TILE};
use crate::attend::mass::{PageWeights, WeightSets};
use crate::attend::queries::{SCRATCH, Scratch};
use crate::base::host_slice::SharedRows;
use crate::base::parallel::Shared;
use pikv_core::math::exp2i;
use pikv_core::warp::LANES;
use pikv_lanes::mass::Sum;
use smallvec::SmallVec;

impl Job<'_> {
    /// [`Job::run`] for one forest, and the weights of its pages.
    pub fn with_mass(
        &self,
        forest: &Forest<'_>,
        wanted: &WeightSets,
        out: &SharedRows<'_>,
        lse: &Shared<'_>,
        weighed: &mut PageWeights,
    ) {
        let group = self.group();
        weighed.start(forest, wanted);
        let sets = weighed.sets;
        let mut begun: SmallVec<[bool; 4]> = SmallVec::from_elem(false, sets);
        let mut factors: SmallVec<[f32; TILE]> = SmallVec::from_elem(0.0, group);
        for item in self.items(forest, self.whole()) {
            let row = item.row;
            let tokens = (row / group) as u32..((row + item.rows) / group) as u32;
            let counts = wanted.any(&tokens);
            SCRATCH.with_borrow_mut(|scratch| {
                self.pack(&item, scratch);
                let Scratch { packed, part, spare, raw, tops, .. } = scratch;
                // Every block writes all of its part.
                raw.resize(if counts { forest.pages.len() * item.rows } else { 0 }, [0.0; LANES]);
                tops.resize(forest.blocks.len() * item.rows, 0.0);
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
                for query in (0..item.rows).step_by(group) {
                    let of = wanted.of(((row + query) / group) as u32);
                    if of.is_empty() {
                        continue;
                    }
                    let to: SmallVec<[(usize, bool); 2]> =
                        of.iter().map(|set| (*set, !std::mem::replace(&mut begun[*set], true))).collect();
                    for (block, pages) in forest.blocks.iter().enumerate() {
                        for (r, factor) in (query..).zip(&mut factors) {
                            let top = tops[block * item.rows + r];
                            let blind = top == f32::NEG_INFINITY;
                            *factor = if blind { 0.0 } else { exp2i(top - total.m[r]) / total.l[r] };
                        }
                        let raw = &raw[pages.start * item.rows..pages.end * item.rows];
                        let sum = Sum {
                            raw: &raw[query * pages.len()..],
                            factors: &factors,
                            mass: &mut weighed.mass[pages.start * sets..pages.end * sets],
                            sets,
                            to: &to,
                        };
                        sum.run(self.inner.config.lanes);
                    }
                }
            });
        }
        for set in (0..sets).filter(|set| !begun[*set]) {
            weighed.mass.iter_mut().skip(set).step_by(sets).for_each(|mass| mass.fill(0.0));
        }
        weighed.one_form(forest.passes());
    }
}
