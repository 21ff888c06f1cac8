//! The pages that one KV head of a sequence reads: runs of pages, cut into blocks of 8, and the trees that join their results.
//!
//! Without a codec the runs are the sinks, each expert, and the ring, and one tree joins them. With one, an expert's packed pages
//! and the page that is still open are read apart: a tree joins the packed runs of all experts, in the channels that are stored;
//! the result is taken back to the head's channels once, and joined with the sinks, the open pages (page `e` that of expert `e`)
//! and the ring, in that order. What a second codec packed again is a third kind of run, joined last.

use crate::attend::reduce::{Leaf, Tree, Trees};
use crate::attend::tree::Subtree;
use crate::base::ids::{PageId, block_of};
use crate::base::scratch::emptied;
use crate::tiers::{Staged, Stored};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// A page that is read.
#[derive(Clone, Copy)]
pub struct Listed<'a> {
    /// Its words; of a page on a device the positions, and nothing where the page is still to be staged.
    pub words: &'a [u32],
    /// Where it lies on a device.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub address: u64,
    /// Where it lies, in a lower tier.
    pub slot: Option<&'a Arc<Stored>>,
    /// Lanes that are read, a bit each.
    pub live: u32,
    /// Of a packed page: the position of its last token.
    pub last: u32,
    /// Of a packed page, and of the original of one: the position that packed it.
    pub by: u32,
    /// Whether it is the original of a packed page: read by rows that have `by` still in their ring.
    pub original: bool,
    /// Of a packed page that was packed again, the position that did: read by rows that have it still in their ring.
    pub until: Option<u32>,
    pub id: PageId,
}

impl Listed<'_> {
    /// Of a page that is read as its tokens came: whether the row that reads tokens up to `hi` in pages found it open. Of the pages of one
    /// expert at most one was open, and had tokens, when the row came.
    pub fn is_open_to(&self, hi: i32) -> bool {
        self.words[0] as i32 <= hi && (!self.original || self.by as i32 > hi)
    }

    /// Of a packed page: whether that row reads it as it was before it was packed again, if it was.
    pub fn is_young_to(&self, hi: i32) -> bool {
        self.until.is_none_or(|until| hi < until as i32)
    }
}

/// An aligned subtree of a run of an item.
pub struct Task {
    pub item: usize,
    /// The run's place in the forest's list.
    pub run: usize,
    pub blocks: Range<usize>,
}

/// Tasks of one item, the subtrees that [`Forest::subtrees`] lists, with their results.
pub struct Done<'a> {
    pub tasks: &'a [Task],
    /// Indices of the subtrees among those of their level.
    pub roots: &'a [u32],
    /// Where each result begins in `parts`.
    pub offsets: &'a [usize],
    pub parts: &'a [f32],
}

/// The pages that one KV head of one sequence reads.
#[derive(Default)]
pub struct Forest<'a> {
    pub view: usize,
    pub head: usize,
    pub pages: Vec<Listed<'a>>,
    /// Blocks: a range of pages each.
    pub blocks: Vec<Range<usize>>,
    /// Index of each block in the tree of its run.
    pub index: Vec<u32>,
    /// Runs: their index in the tree over runs, and their blocks. Packed runs come first.
    pub runs: Vec<u32>,
    pub run_blocks: Vec<Range<usize>>,
    /// Runs that the first codec packed, then those of the second; their indices are those of trees of their own.
    pub packed: [usize; 2],
}

/// Index of the packed runs' result in the tree over the other runs, of either codec.
pub const PACKED_RUN: [u32; 2] = [1, 4];

impl<'a> Forest<'a> {
    /// No pages, with the room of this one's lists.
    pub fn felled(self) -> Forest<'static> {
        let Forest { pages, mut blocks, mut index, mut runs, mut run_blocks, .. } = self;
        blocks.clear();
        index.clear();
        runs.clear();
        run_blocks.clear();
        Forest { view: 0, head: 0, pages: emptied(pages), blocks, index, runs, run_blocks, packed: [0, 0] }
    }

    /// Adds a run of pages with ascending ordinals, cut into blocks.
    pub fn push_run(&mut self, run: u32, pages: impl Iterator<Item = (u32, Listed<'a>)>) {
        let first_block = self.blocks.len();
        for (ordinal, page) in pages {
            let at = self.pages.len();
            self.pages.push(page);
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

    /// Pages of which some rows read another form, which is listed too.
    pub fn passes(&self) -> impl DoubleEndedIterator<Item = usize> + use<'_> {
        (0..self.pages.len()).filter(|i| self.pages[*i].original || self.pages[*i].until.is_some())
    }

    /// Whether a block has originals of packed pages.
    pub fn is_mixed(&self, block: usize) -> bool {
        self.pages[self.blocks[block].clone()].iter().any(|page| page.original)
    }

    /// Pages of lower tiers.
    pub fn away(&self) -> impl Iterator<Item = &'a Arc<Stored>> {
        self.pages.iter().filter_map(|page| page.slot)
    }

    /// Pages of lower tiers with their words, once they are staged.
    #[cfg(feature = "cuda")]
    pub fn away_words(&self) -> impl Iterator<Item = (&'a Arc<Stored>, &'a [u32])> {
        self.pages.iter().filter_map(|page| Some((page.slot?, page.words)))
    }

    /// Has staged pages read from where they are now.
    pub fn stage(&mut self, staged: &'a Staged) {
        for page in self.pages.iter_mut().filter(|page| page.words.is_empty()) {
            page.words = page.slot.map_or(&[], |slot| staged.words(slot));
        }
    }

    /// Which codec packed a block's pages, if one did.
    pub fn codec(&self, block: usize) -> Option<usize> {
        self.codec_of_run(self.run_blocks.partition_point(|blocks| blocks.end <= block))
    }

    /// Which codec packed the pages of run `i` of the list, if one did.
    pub fn codec_of_run(&self, i: usize) -> Option<usize> {
        let [first, second] = self.packed;
        (i < first + second).then_some(usize::from(i >= first))
    }

    /// Whether there are packed pages.
    pub fn has_packed(&self) -> bool {
        self.packed != [0, 0]
    }

    /// Has pages of lower tiers read from where they are on a device.
    #[cfg(feature = "cuda")]
    pub fn lift(&mut self, address: impl Fn(&Arc<Stored>) -> Option<u64>) {
        for page in &mut self.pages {
            page.address = page.slot.and_then(&address).unwrap_or(page.address);
        }
    }

    /// The tree over the blocks of run `i` of the list.
    pub fn run_tree(&self, i: usize) -> Subtree<'_> {
        let blocks = self.run_blocks[i].clone();
        Subtree::whole(&self.index[blocks.clone()], blocks.start)
    }

    /// The aligned subtree of `2^level` blocks of a run that has these.
    pub fn blocks_tree(&self, blocks: Range<usize>, level: u32) -> Subtree<'_> {
        Subtree::aligned(&self.index[blocks.clone()], level, blocks.start)
    }

    /// The shape of partial results of run `i` of the list.
    fn shape<'t>(&self, trees: &'t Trees<'_>, i: usize) -> &'t Tree {
        trees.of(self.codec_of_run(i))
    }

    /// The whole forest into `out`; `leaf(i, ..)` computes block `i`.
    pub fn reduce(
        &self,
        trees: &Trees<'_>,
        leaf: &mut dyn FnMut(usize, &mut [f32]),
        out: &mut [f32],
        spare: &mut Vec<Vec<f32>>,
    ) {
        let mut run = |i: usize, out: &mut [f32], spare: &mut Vec<Vec<f32>>| {
            let mut leaf = |i: usize, out: &mut [f32], _: &mut Vec<Vec<f32>>| leaf(i, out);
            self.shape(trees, i).reduce(self.run_tree(i), &mut leaf, out, spare);
        };
        self.join_runs(trees, &mut run, out, spare);
    }

    /// The runs of the upper tree: their indices, and their places in the list, those of one codec together.
    pub fn upper(&self) -> SmallVec<[(u32, Range<usize>); 8]> {
        let [first, second] = self.packed;
        let of_codec = [0..first, first..first + second];
        let rest = first + second..self.runs.len();
        let mut upper: SmallVec<[(u32, Range<usize>); 8]> = rest.map(|i| (self.runs[i], i..i + 1)).collect();
        for (index, runs) in PACKED_RUN.into_iter().zip(of_codec).filter(|(_, runs)| !runs.is_empty()) {
            let at = upper.partition_point(|(other, _)| *other < index);
            upper.insert(at, (index, runs));
        }
        upper
    }

    /// Joins the runs' results.
    fn join_runs(&self, trees: &Trees<'_>, run: &mut Leaf<'_>, out: &mut [f32], spare: &mut Vec<Vec<f32>>) {
        let (full, upper) = (trees.of(None), self.upper());
        let index: SmallVec<[u32; 8]> = upper.iter().map(|(index, _)| *index).collect();
        let mut leaf = |i: usize, out: &mut [f32], spare: &mut Vec<Vec<f32>>| {
            let runs = upper[i].1.clone();
            let Some(codec) = self.codec_of_run(runs.start) else { return run(runs.start, out, spare) };
            let tree = trees.of(Some(codec));
            let mut part = spare.pop().unwrap_or_default();
            part.resize(tree.len().max(part.len()), 0.0);
            let packed = Subtree::whole(&self.runs[runs.clone()], runs.start);
            tree.reduce(packed, run, &mut part[..tree.len()], spare);
            trees.unpack(codec, &mut part, out);
            spare.push(part);
        };
        full.reduce(Subtree::whole(&index, 0), &mut leaf, &mut out[..full.len()], spare);
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

    /// Joins the results of the head's tasks into `out`.
    pub fn join(&self, trees: &Trees<'_>, done: &Done<'_>, out: &mut [f32], spare: &mut Vec<Vec<f32>>) {
        let mut run = |i: usize, out: &mut [f32], spare: &mut Vec<Vec<f32>>| {
            let from = done.tasks.partition_point(|task| task.run < i);
            let to = done.tasks.partition_point(|task| task.run <= i);
            let mut leaf = |t: usize, out: &mut [f32], _: &mut Vec<Vec<f32>>| {
                out.copy_from_slice(&done.parts[done.offsets[t]..][..out.len()]);
            };
            let roots = Subtree::whole(&done.roots[from..to], from);
            self.shape(trees, i).reduce(roots, &mut leaf, out, spare);
        };
        self.join_runs(trees, &mut run, out, spare);
    }
}
