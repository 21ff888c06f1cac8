//! The tree over partial results as lists that kernels read.

use crate::attend::forest::Forest;
use crate::attend::reduce::levels;
use pikv_core::merge::Partial;
use pikv_kernels::args::{BackArg, PairArg};

/// What joins partial results, by its height in the tree.
#[derive(Default)]
pub struct Joins {
    pub pairs: Vec<Vec<PairArg>>,
    /// Rows that are taken back to the head's channels.
    pub backs: Vec<Vec<BackArg>>,
}

/// A partial result of the tree.
#[derive(Clone, Copy)]
pub struct Node {
    pub part: u64,
    /// Launches that must have been before.
    height: usize,
}

/// Entry `at` of a list that is as long as it has to be.
fn at<T>(lists: &mut Vec<Vec<T>>, at: usize) -> &mut Vec<T> {
    while lists.len() <= at {
        lists.push(Vec::new());
    }
    &mut lists[at]
}

/// The tree of [`Forest::reduce`] as lists of joins.
pub struct Tree<'a> {
    pub forest: &'a Forest<'a>,
    /// Of each block.
    pub parts: &'a [u64],
    pub rows: u32,
    /// Rows of lanes of one row's result over full pages, and over those that either codec packed.
    pub full: u32,
    pub packed: [u32; 2],
    /// The codecs' places in the list.
    pub heads: [u32; 2],
}

impl Tree<'_> {
    /// The root; what takes room of its own goes after `end`.
    pub fn join(&self, joins: &mut Joins, end: &mut u64) -> Option<Node> {
        let forest = self.forest;
        let upper = forest.upper();
        let index: Vec<u32> = upper.iter().map(|(index, _)| *index).collect();
        let mut leaf = |i: usize, joins: &mut Joins| {
            let runs = upper[i].1.clone();
            let Some(codec) = forest.codec_of_run(runs.start) else {
                return self.run(runs.start, self.full, joins);
            };
            let packed = &forest.runs[runs.clone()];
            let level = packed.last().map_or(0, |last| levels(*last));
            let acc_rows = self.packed[codec];
            let mut run = |i: usize, joins: &mut Joins| self.run(i, acc_rows, joins);
            let root = self.subtree(packed, level, 0, runs.start, &mut run, acc_rows, joins)?;
            Some(self.back(root, codec, joins, end))
        };
        let level = index.last().map_or(0, |last| levels(*last));
        self.subtree(&index, level, 0, 0, &mut leaf, self.full, joins)
    }

    fn run(&self, run: usize, acc_rows: u32, joins: &mut Joins) -> Option<Node> {
        let blocks = self.forest.run_blocks[run].clone();
        let mut leaf = |block: usize, _: &mut Joins| Some(Node { part: self.parts[block], height: 0 });
        let index = &self.forest.index[blocks.clone()];
        self.subtree(index, self.forest.levels(run), 0, blocks.start, &mut leaf, acc_rows, joins)
    }

    /// Takes the result of the runs that a codec packed back to the head's channels.
    fn back(&self, root: Node, codec: usize, joins: &mut Joins, end: &mut u64) -> Node {
        let (from, to, rows, head) = (root.part, *end, self.rows, self.heads[codec]);
        *end += Partial::len(rows as usize, self.full) as u64;
        at(&mut joins.backs, root.height).extend((0..rows).map(|row| BackArg {
            from,
            to,
            rows,
            row,
            head,
            pad: 0,
        }));
        Node { part: to, height: root.height + 1 }
    }

    /// [`Tree::reduce`](crate::attend::reduce::Tree::reduce) as a list of joins.
    #[allow(clippy::too_many_arguments)]
    fn subtree(
        &self,
        index: &[u32],
        level: u32,
        base: u64,
        first: usize,
        leaf: &mut dyn FnMut(usize, &mut Joins) -> Option<Node>,
        acc_rows: u32,
        joins: &mut Joins,
    ) -> Option<Node> {
        if index.is_empty() {
            return None;
        }
        if level == 0 {
            return leaf(first, joins);
        }
        let half = base + (1 << (level - 1));
        let cut = index.partition_point(|i| u64::from(*i) < half);
        let left = self.subtree(&index[..cut], level - 1, base, first, leaf, acc_rows, joins);
        let right = self.subtree(&index[cut..], level - 1, half, first + cut, leaf, acc_rows, joins);
        let (Some(l), Some(r)) = (left, right) else { return left.or(right) };
        let height = l.height.max(r.height);
        at(&mut joins.pairs, height).push(PairArg { left: l.part, right: r.part, rows: self.rows, acc_rows });
        Some(Node { part: l.part, height: height + 1 })
    }
}
