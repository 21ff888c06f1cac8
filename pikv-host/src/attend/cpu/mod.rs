//! Attention on the lanes of the CPU: a call split into tasks for the threads.

mod block;
mod weights;

use crate::attend::executor::{Executor, Results, TaskLists};
use crate::attend::forest::{Done, Forest, Task};
use crate::attend::job::{Item, Job, Widest};
use crate::attend::mass::WeightSets;
use crate::attend::queries::{SCRATCH, Scratch};
use crate::attend::reduce::Trees;
use crate::base::error::Error;
use crate::base::host_slice::SharedRows;
use crate::base::parallel::{Shared, each_index, each_mut, threads};
use crate::base::scratch::emptied;
use pikv_core::merge::Partial;
use pikv_lanes::attend::{Finish, PACKED_ROWS};

/// The lanes of the CPU.
#[derive(Debug)]
pub(crate) struct Cpu;

impl Executor for Cpu {
    fn rounds(&self) -> bool {
        true
    }

    fn widest(&self) -> Widest {
        |lanes, codecs| {
            let packed = codecs.iter().any(Option::is_some);
            if packed { lanes.rows().min(PACKED_ROWS) } else { lanes.rows() }
        }
    }

    fn run(
        &self,
        job: &mut Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[WeightSets]>,
        results: Results<'_>,
        cut: &mut TaskLists,
    ) -> Result<(), Error> {
        let Results { mut out, lse, seen } = results;
        let (out, lse) = (out.shared(), Shared::new(lse));
        match wanted {
            Some(wanted) => each_mut(seen, |i, feed| {
                let forest = &forests[i];
                job.with_mass(forest, &wanted[forest.view], &out, &lse, &mut feed.weighed);
            }),
            None => job.run(forests, cut, &out, &lse),
        }
        Ok(())
    }
}

impl Job<'_> {
    /// Splits rows into items, and items into tasks of whole subtrees if that keeps more threads busy.
    pub fn run(&self, forests: &[Forest<'_>], lists: &mut TaskLists, out: &SharedRows<'_>, lse: &Shared<'_>) {
        let mut items: Vec<Item<'_>> = emptied(std::mem::take(&mut lists.items));
        for forest in forests {
            // As with masses: whether a row is in a tile that is rounded must not depend on whether they are asked for.
            items.extend(self.items(forest, self.whole()));
        }
        let blocks: usize = items.iter().map(|item| item.forest.blocks.len()).sum();
        let level = match self.split {
            Some(blocks) => Some(blocks.ilog2()),
            // Whole items: enough of them for all threads, or too little work to split.
            None if threads() == 1 || items.len() >= 8 * threads() || blocks <= 2 * items.len() => None,
            None => Some((blocks / (8 * threads())).max(1).ilog2()),
        };
        match level {
            Some(level) => self.in_tasks(&items, level, lists, out, lse),
            None => each_index(items.len(), |i| {
                let item = &items[i];
                self.with_scratch(item, |trees, scratch, leaf| {
                    let Scratch { part, spare, .. } = scratch;
                    let full = trees.of(None);
                    part.resize(full.len().max(part.len()), 0.0);
                    item.forest.reduce(&trees, leaf, part, spare);
                    self.finish(item, &full.partial(part), out, lse);
                });
            }),
        }
        lists.items = emptied(items);
    }

    /// Runs a task for each subtree of `2^level` blocks, then joins the tasks of each item.
    fn in_tasks(
        &self,
        items: &[Item<'_>],
        level: u32,
        lists: &mut TaskLists,
        out: &SharedRows<'_>,
        lse: &Shared<'_>,
    ) {
        let TaskLists { tasks, roots, offsets, parts: buffer, .. } = lists;
        tasks.clear();
        roots.clear();
        offsets.clear();
        let mut total = 0;
        for (i, item) in items.iter().enumerate() {
            let trees = self.trees(item);
            for (run, blocks) in item.forest.subtrees(level) {
                offsets.push(total);
                total += trees.of(item.forest.codec_of_run(run)).len();
                roots.push(item.forest.index[blocks.start] >> level);
                tasks.push(Task { item: i, run, blocks });
            }
        }
        // Each task writes all of its part.
        buffer.resize(total.max(buffer.len()), 0.0);
        let parts = Shared::new(buffer);
        each_index(tasks.len(), |t| {
            let Task { item, run, blocks } = &tasks[t];
            let item = &items[*item];
            self.with_scratch(item, |trees, scratch, leaf| {
                let shape = trees.of(item.forest.codec_of_run(*run));
                // SAFETY: `offsets` are the prefix sums of the lengths of the parts, so each task has a range of its own, as long as its
                // part.
                let part = unsafe { parts.part(offsets[t], shape.len()) };
                let mut leaf = |i: usize, out: &mut [f32], _: &mut Vec<Vec<f32>>| leaf(i, out);
                let tree = item.forest.blocks_tree(blocks.clone(), level);
                shape.reduce(tree, &mut leaf, part, &mut scratch.spare);
            });
        });
        let buffer = &buffer[..];
        each_index(items.len(), |i| {
            let item = &items[i];
            let trees = self.trees(item);
            let full = trees.of(None);
            let from = tasks.partition_point(|task| task.item < i);
            let mine = from..tasks.partition_point(|task| task.item <= i);
            let (tasks, roots, offsets) = (&tasks[mine.clone()], &roots[mine.clone()], &offsets[mine]);
            let done = Done { tasks, roots, offsets, parts: buffer };
            SCRATCH.with_borrow_mut(|Scratch { part, spare, .. }| {
                part.resize(full.len().max(part.len()), 0.0);
                item.forest.join(&trees, &done, part, spare);
                self.finish(item, &full.partial(part), out, lse);
            });
        });
    }

    /// Scales, rotates and packs the queries of an item, and calls `f` with a function that computes a block of it.
    pub fn with_scratch(
        &self,
        item: &Item<'_>,
        f: impl FnOnce(Trees<'_>, &mut Scratch, &mut dyn FnMut(usize, &mut [f32])),
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.pack(item, scratch);
            let mut packed = std::mem::take(&mut scratch.packed);
            let mut leaf = |block: usize, part: &mut [f32]| self.block(item, block, &mut packed, part, None);
            f(self.trees(item), scratch, &mut leaf);
            scratch.packed = packed;
        });
    }

    pub fn finish(&self, item: &Item<'_>, part: &Partial<'_>, out: &SharedRows<'_>, lse: &Shared<'_>) {
        let v_dim = self.shape.layout.v_dim as usize;
        let stride = self.layout().acc_rows() as usize;
        for r in 0..item.rows {
            let (m, l) = (part.m[r], part.l[r]);
            let at = self.output_row(item, r);
            let acc = &part.acc[r * stride..][..stride];
            // SAFETY: (row, query head) belongs to one item only, and one task finishes an item.
            let lse = unsafe { lse.part(at, 1) };
            let finish = |out: &mut [f32]| {
                let finish = Finish { layout: self.layout(), m, l, acc, out: &mut *out };
                lse[0] = finish.run(self.inner.config.lanes);
                self.judge(at, m, l, out);
            };
            // SAFETY: as above.
            self.note_beyond(unsafe { out.write(at * v_dim, v_dim, finish) });
        }
    }
}
