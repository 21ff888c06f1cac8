//! The pages that one KV head of a sequence reads: runs of pages, split into blocks of 8, and the trees that join their results.
//!
//! Without a codec the runs are the sinks, those of the experts, and the ring, and one tree joins them. With a codec, the packed pages of
//! a run and its open page are separate runs. A tree joins the packed runs in the packed channels; its result is converted once
//! to the head's channels, and joined with the sinks, the open pages (page `e` is that of run `e`) and the ring, in that order.
//! Pages that a second codec packed are a third kind of run, joined last.

use crate::attend::reduce::{Leaf, Tree, Trees};
use crate::attend::tree::Subtree;
use crate::base::ids::{PageId, block_of};
use crate::base::scratch::emptied;
use crate::tiers::{Staged, StoredPage};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// A page to read.
#[derive(Clone, Copy)]
pub struct ListedPage<'a> {
    /// Words of the page; only positions for a page on a device, empty before a page of a lower tier is staged.
    pub words: &'a [u32],
    /// Address on a device.
    pub address: u64,
    /// Slot in a lower tier.
    pub slot: Option<&'a Arc<StoredPage>>,
    /// Lanes that are read, a bit each.
    pub live: u32,
    /// Position of the last token, for packed pages.
    pub last: u32,
    /// For a packed page and its original: the position whose token packed it.
    pub by: u32,
    /// Whether this is the original of a packed page, for rows that have `by` still in their ring.
    pub original: bool,
    /// For a page that was packed again: the position whose token packed it again; rows that have it still in their ring read this form.
    pub until: Option<u32>,
    pub id: PageId,
}

impl ListedPage<'_> {
    /// For a page in the dtype of its layer: whether it was open to a row that reads tokens up to `hi` in pages. At most one page of a
    /// run was open, and had tokens, at that row.
    pub fn is_open_to(&self, hi: i32) -> bool {
        self.words[0] as i32 <= hi && (!self.original || self.by as i32 > hi)
    }

    /// For a packed page: whether a row that reads tokens up to `hi` reads the form of the first codec, and not of the second.
    pub fn is_young_to(&self, hi: i32) -> bool {
        self.until.is_none_or(|until| hi < until as i32)
    }
}

/// An aligned subtree of a run, for the rows of an item.
pub struct Task {
    pub item: usize,
    /// Index of the run in the forest's list.
    pub run: usize,
    pub blocks: Range<usize>,
}

/// Results of the tasks of one item, which are the subtrees of [`Forest::subtrees`].
pub struct Done<'a> {
    pub tasks: &'a [Task],
    /// Index of each subtree in its level.
    pub roots: &'a [u32],
    /// Offset of each result in `parts`.
    pub offsets: &'a [usize],
    pub parts: &'a [f32],
}

/// The pages that one KV head of one sequence reads.
#[derive(Default)]
pub struct Forest<'a> {
    pub view: usize,
    pub head: usize,
    pub pages: Vec<ListedPage<'a>>,
    /// Ranges of pages.
    pub blocks: Vec<Range<usize>>,
    /// Index of each block in the tree of its run.
    pub index: Vec<u32>,
    /// Runs: index in the tree over runs, and range of blocks. Packed runs come first.
    pub runs: Vec<u32>,
    pub run_blocks: Vec<Range<usize>>,
    /// Number of runs of the first codec, then of the second. The indices of such runs are those of separate trees.
    pub packed: [usize; 2],
}

/// Index of the joined packed runs in the tree over the other runs, for each codec.
pub const PACKED_RUN: [u32; 2] = [1, 4];

impl<'a> Forest<'a> {
    /// Empties the forest, and keeps the memory of its lists.
    pub fn felled(self) -> Forest<'static> {
        let Forest { pages, mut blocks, mut index, mut runs, mut run_blocks, .. } = self;
        blocks.clear();
        index.clear();
        runs.clear();
        run_blocks.clear();
        Forest { view: 0, head: 0, pages: emptied(pages), blocks, index, runs, run_blocks, packed: [0, 0] }
    }

    /// Adds a run of pages with ascending ordinals, split into blocks.
    pub fn push_run(&mut self, run: u32, pages: impl Iterator<Item = (u32, ListedPage<'a>)>) {
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

    /// Indices of pages that are listed in a second form, which other rows read.
    pub fn passes(&self) -> impl DoubleEndedIterator<Item = usize> + use<'_> {
        (0..self.pages.len()).filter(|i| self.pages[*i].original || self.pages[*i].until.is_some())
    }

    /// Whether a block has originals of packed pages.
    pub fn is_mixed(&self, block: usize) -> bool {
        self.pages[self.blocks[block].clone()].iter().any(|page| page.original)
    }

    /// Pages of lower tiers.
    pub fn away(&self) -> impl Iterator<Item = &'a Arc<StoredPage>> {
        self.pages.iter().filter_map(|page| page.slot)
    }

    /// Pages of lower tiers with their words, once they are staged.
    pub fn away_words(&self) -> impl Iterator<Item = (&'a Arc<StoredPage>, &'a [u32])> {
        self.pages.iter().filter_map(|page| Some((page.slot?, page.words)))
    }

    /// Sets the words of pages that were staged.
    pub fn stage(&mut self, staged: &'a Staged) {
        for page in self.pages.iter_mut().filter(|page| page.words.is_empty()) {
            page.words = page.slot.map_or(&[], |slot| staged.words(slot));
        }
    }

    /// Index of the codec of a block's pages, if they are packed.
    pub fn codec(&self, block: usize) -> Option<usize> {
        self.codec_of_run(self.run_blocks.partition_point(|blocks| blocks.end <= block))
    }

    /// Index of the codec of run `i` of the list, if it is packed.
    pub fn codec_of_run(&self, i: usize) -> Option<usize> {
        let [first, second] = self.packed;
        (i < first + second).then_some(usize::from(i >= first))
    }

    /// Whether there are packed pages.
    pub fn has_packed(&self) -> bool {
        self.packed != [0, 0]
    }

    /// Sets the device addresses of pages of lower tiers.
    pub fn lift(&mut self, address: impl Fn(&Arc<StoredPage>) -> Option<u64>) {
        for page in &mut self.pages {
            page.address = page.slot.and_then(&address).unwrap_or(page.address);
        }
    }

    /// The tree over the blocks of run `i` of the list.
    pub fn run_tree(&self, i: usize) -> Subtree<'_> {
        let blocks = self.run_blocks[i].clone();
        Subtree::whole(&self.index[blocks.clone()], blocks.start)
    }

    /// The aligned subtree of `2^level` leaves with these blocks of a run.
    pub fn blocks_tree(&self, blocks: Range<usize>, level: u32) -> Subtree<'_> {
        Subtree::aligned(&self.index[blocks.clone()], level, blocks.start)
    }

    /// Shape of partial results of run `i` of the list.
    fn shape<'t>(&self, trees: &'t Trees<'_>, i: usize) -> &'t Tree {
        trees.of(self.codec_of_run(i))
    }

    /// Joins the whole forest into `out`; `leaf(i, ..)` computes block `i`.
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

    /// Runs of the upper tree: their indices, and their ranges in the list. All runs of a codec are one.
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

    /// Joins the results of the runs.
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

    /// Subtrees of `2^level` leaves that have blocks: index of the run in the list, and the blocks.
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

    /// Joins the results of an item's tasks into `out`.
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
