//! The tree over partial results as lists that kernels read.

use crate::attend::forest::Forest;
use crate::attend::tree::{Split, Subtree};
use pikv_core::merge::Partial;
use pikv_kernels::args::{BackArg, PairArg};

/// Joins of partial results, by their height in the tree.
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
    /// The root. Results that need room of their own are placed at `end`, which is moved on.
    pub fn join(&self, joins: &mut Joins, end: &mut u64) -> Option<Node> {
        let forest = self.forest;
        let upper = forest.upper();
        let index: Vec<u32> = upper.iter().map(|(index, _)| *index).collect();
        let mut leaf = |i: usize, joins: &mut Joins| {
            let runs = upper[i].1.clone();
            let Some(codec) = forest.codec_of_run(runs.start) else {
                return self.run(runs.start, self.full, joins);
            };
            let packed = Subtree::whole(&forest.runs[runs.clone()], runs.start);
            let acc_rows = self.packed[codec];
            let mut run = |i: usize, joins: &mut Joins| self.run(i, acc_rows, joins);
            let root = self.subtree(packed, &mut run, acc_rows, joins)?;
            Some(self.back(root, codec, joins, end))
        };
        self.subtree(Subtree::whole(&index, 0), &mut leaf, self.full, joins)
    }

    fn run(&self, run: usize, acc_rows: u32, joins: &mut Joins) -> Option<Node> {
        let mut leaf = |block: usize, _: &mut Joins| Some(Node { part: self.parts[block], height: 0 });
        self.subtree(self.forest.run_tree(run), &mut leaf, acc_rows, joins)
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

    /// The joins of a subtree, each in the list of its height; `leaf(i, ..)` is the partial result of the list's leaf `i`, of `acc_rows` rows of
    /// lanes for each row.
    fn subtree(
        &self,
        tree: Subtree<'_>,
        leaf: &mut dyn FnMut(usize, &mut Joins) -> Option<Node>,
        acc_rows: u32,
        joins: &mut Joins,
    ) -> Option<Node> {
        let (left, right) = match tree.split() {
            Split::Empty => return None,
            Split::Leaf(i) => return leaf(i, joins),
            Split::Join(left, right) => (left, right),
        };
        let left = self.subtree(left, leaf, acc_rows, joins);
        let right = self.subtree(right, leaf, acc_rows, joins);
        let (Some(l), Some(r)) = (left, right) else { return left.or(right) };
        let height = l.height.max(r.height);
        at(&mut joins.pairs, height).push(PairArg { left: l.part, right: r.part, rows: self.rows, acc_rows });
        Some(Node { part: l.part, height: height + 1 })
    }
}
