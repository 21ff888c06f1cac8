//! The tree over partial results as lists of joins for kernels.

use crate::attend::forest::Forest;
use crate::attend::tree::{Split, Subtree};
use pikv_core::merge::Partial;
use pikv_kernels::args::{BackArg, PairArg};

/// Joins of partial results, by their height in the tree.
#[derive(Default)]
pub struct Joins {
    pub pairs: Vec<Vec<PairArg>>,
    /// Conversions of rows to the head's channels.
    pub backs: Vec<Vec<BackArg>>,
}

/// A partial result of the tree.
#[derive(Clone, Copy)]
pub struct Node {
    pub part: u64,
    /// Number of launches that must come before.
    height: usize,
}

/// Entry `at` of a list, which grows as needed.
fn at<T>(lists: &mut Vec<Vec<T>>, at: usize) -> &mut Vec<T> {
    while lists.len() <= at {
        lists.push(Vec::new());
    }
    &mut lists[at]
}

/// The tree of [`Forest::reduce`] as lists of joins.
pub struct Tree<'a> {
    pub forest: &'a Forest<'a>,
    /// By block.
    pub parts: &'a [u64],
    pub rows: u32,
    /// Rows of lanes in the result of one row over full pages, and over pages of either codec.
    pub full: u32,
    pub packed: [u32; 2],
    /// Indices of the codecs in the list.
    pub heads: [u32; 2],
}

impl Tree<'_> {
    /// The root of the tree. Results that need memory of their own are placed at `end`, which advances.
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

    /// Converts the result over a codec's runs to the head's channels.
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

    /// Lists the joins of a subtree by height; `leaf(i, ..)` is the partial result of leaf `i` of the list, with `acc_rows` rows of
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
