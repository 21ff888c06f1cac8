//! The tree over partial results as lists of joins for kernels.

use crate::attend::forest::Forest;
use crate::attend::tree::{Split, Subtree};
use pikv_core::merge::Partial;
use pikv_kernels::args::JoinArg;

/// Joins of the bundles of a wave, each bundle's level by level.
#[derive(Default)]
pub struct Joins {
    pub list: Vec<JoinArg>,
    /// For each bundle the first join of each of its levels, and the end of the last.
    pub bounds: Vec<u32>,
    /// Most joins of a level of a bundle.
    pub widest: usize,
    /// Whether rows are mapped to the heads' channels.
    pub maps: bool,
    /// Joins of the bundle that is being added, by level.
    levels: Vec<Vec<JoinArg>>,
}

impl Joins {
    /// Adds a join to a level of the bundle.
    pub fn add(&mut self, level: usize, join: JoinArg) {
        if self.levels.len() <= level {
            self.levels.resize_with(level + 1, Vec::new);
        }
        self.levels[level].push(join);
    }

    /// Ends the bundle: returns its first entry in `bounds`, and the number of its levels.
    pub fn close(&mut self) -> (u32, u32) {
        let (first, end) = (self.bounds.len() as u32, self.list.len() as u32);
        self.bounds.push(end);
        let mut levels = 0;
        for level in self.levels.iter_mut().filter(|level| !level.is_empty()) {
            self.widest = self.widest.max(level.len());
            self.maps |= level.iter().any(|join| join.head != JoinArg::MERGE);
            self.list.append(level);
            self.bounds.push(self.list.len() as u32);
            levels += 1;
        }
        (first, levels)
    }
}

/// A partial result of the tree.
#[derive(Clone, Copy)]
pub struct Node {
    pub part: u64,
    /// Number of levels that must come before.
    height: usize,
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
        let (left, right, head) = (*end, root.part, self.heads[codec]);
        *end += Partial::len(self.rows as usize, self.full) as u64;
        joins.add(root.height, JoinArg { left, right, acc_rows: self.full, head });
        Node { part: left, height: root.height + 1 }
    }

    /// Lists the joins of a subtree by level; `leaf(i, ..)` is the partial result of leaf `i` of the list, with `acc_rows` rows of
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
        joins.add(height, JoinArg { left: l.part, right: r.part, acc_rows, head: JoinArg::MERGE });
        Some(Node { part: l.part, height: height + 1 })
    }
}
