//! What one KV head of a sequence is read from: runs of pages, cut into blocks, over which the trees stand.

use crate::reduce::{Tree, levels};
use crate::sequence::block_of;
use pikv_core::attend::PageRef;
use std::ops::Range;

/// What one KV head of one sequence is read from.
pub struct Forest<'a> {
    pub view: usize,
    pub head: usize,
    pub pages: Vec<PageRef<'a>>,
    /// Run and ordinal of each page.
    pub ids: Vec<(u32, u32)>,
    /// Blocks: a range of pages each.
    pub blocks: Vec<Range<usize>>,
    /// Index of each block in the tree of its run.
    pub index: Vec<u32>,
    /// Runs: their index, and their blocks.
    pub runs: Vec<u32>,
    pub run_blocks: Vec<Range<usize>>,
}

impl<'a> Forest<'a> {
    /// Adds a run of pages with ascending ordinals, cut into blocks.
    pub fn push_run(&mut self, run: u32, pages: impl Iterator<Item = (u32, PageRef<'a>)>) {
        let first_block = self.blocks.len();
        for (ordinal, page) in pages {
            let at = self.pages.len();
            self.pages.push(page);
            self.ids.push((run, ordinal));
            let block = block_of(ordinal);
            if self.blocks.len() == first_block || self.index.last() != Some(&block) {
                self.blocks.push(at..at);
                self.index.push(block);
            }
            if let Some(block) = self.blocks.last_mut() {
                block.end = at + 1;
            }
        }
        if self.blocks.len() > first_block {
            self.runs.push(run);
            self.run_blocks.push(first_block..self.blocks.len());
        }
    }

    /// Levels of the tree over the blocks of run `i` of the list.
    pub fn levels(&self, i: usize) -> u32 {
        self.index[self.run_blocks[i].clone()].last().map_or(0, |last| levels(*last))
    }

    /// Levels of the tree over the runs.
    pub fn top(&self) -> u32 {
        self.runs.last().map_or(0, |last| levels(*last))
    }

    /// The whole forest into `out`; `leaf(i, ..)` computes block `i`.
    pub fn reduce(
        &self,
        tree: &Tree<'_>,
        leaf: &mut dyn FnMut(usize, &mut [f32]),
        out: &mut [f32],
        spare: &mut Vec<Vec<f32>>,
    ) {
        let out = &mut out[..tree.len()];
        let mut run = |i: usize, out: &mut [f32], spare: &mut Vec<Vec<f32>>| {
            let blocks = self.run_blocks[i].clone();
            self.reduce_blocks(tree, i, blocks, self.levels(i), leaf, out, spare);
        };
        tree.reduce(&self.runs, self.top(), 0, 0, &mut run, out, spare);
    }

    /// One aligned subtree of `2^level` leaves of run `run` of the list.
    #[allow(clippy::too_many_arguments)]
    pub fn reduce_blocks(
        &self,
        tree: &Tree<'_>,
        run: usize,
        blocks: Range<usize>,
        level: u32,
        leaf: &mut dyn FnMut(usize, &mut [f32]),
        out: &mut [f32],
        spare: &mut Vec<Vec<f32>>,
    ) {
        let level = level.min(self.levels(run));
        let base = u64::from(self.index[blocks.start]) >> level << level;
        let mut leaf = |i: usize, out: &mut [f32], _: &mut Vec<Vec<f32>>| leaf(i, out);
        tree.reduce(&self.index[blocks.clone()], level, base, blocks.start, &mut leaf, out, spare);
    }

    /// The subtrees of `2^level` leaves that have blocks: the run's place in the list, and the blocks.
    pub fn subtrees(&self, level: u32) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.run_blocks.iter().enumerate().flat_map(move |(run, blocks)| {
            let mut rest = blocks.clone();
            std::iter::from_fn(move || {
                let id = self.index.get(rest.start).filter(|_| !rest.is_empty())? >> level;
                let end = rest.start + self.index[rest.clone()].partition_point(|i| i >> level == id);
                let blocks = rest.start..end;
                rest.start = end;
                Some((run, blocks))
            })
        })
    }

    /// Joins the subtrees of [`Forest::subtrees`], whose results lie in `parts` at `offsets`, into `out`.
    #[allow(clippy::too_many_arguments)]
    pub fn join(
        &self,
        tree: &Tree<'_>,
        level: u32,
        tasks: &[(usize, usize, Range<usize>)],
        offsets: &[usize],
        parts: &[f32],
        out: &mut [f32],
        spare: &mut Vec<Vec<f32>>,
    ) {
        let roots: Vec<u32> = tasks.iter().map(|(.., blocks)| self.index[blocks.start] >> level).collect();
        let mut run = |i: usize, out: &mut [f32], spare: &mut Vec<Vec<f32>>| {
            let from = tasks.partition_point(|(_, run, _)| *run < i);
            let to = tasks.partition_point(|(_, run, _)| *run <= i);
            let mut leaf = |t: usize, out: &mut [f32], _: &mut Vec<Vec<f32>>| {
                out.copy_from_slice(&parts[offsets[t]..][..out.len()]);
            };
            let above = self.levels(i).saturating_sub(level);
            tree.reduce(&roots[from..to], above, 0, from, &mut leaf, out, spare);
        };
        tree.reduce(&self.runs, self.top(), 0, 0, &mut run, &mut out[..tree.len()], spare);
    }
}
