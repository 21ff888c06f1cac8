//! Attention cut into tasks.

use crate::attend::Read;
use crate::attend::executor::{Elsewhere, Executor, OnDevice};
use crate::attend::forest::{Forest, Listed};
use crate::attend::lists::Cut;
use crate::attend::queries::Packed;
use crate::attend::reduce::Trees;
use crate::attend::view::View;
use crate::base::ids::Place;
use crate::base::parallel::{Shared, each_index, threads};
use crate::base::rope_tables::Table;
use crate::base::scratch::emptied;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use pikv_core::attend::BLOCK;
use pikv_core::codec::read::PackedRef;
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, MAX_DIM};
use pikv_core::plan::LayerShape;
use pikv_core::rope::Rotation;
use pikv_core::rows::TOP_SCORE;
use pikv_core::warp::LANES;
use pikv_lanes::attend::{Block, Common, Finish, PackedBlock, Raw, bundles};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows of one head that a task takes at most: enough to read a block from the cache many times, few enough for
/// their partial results to stay there.
pub const TILE: usize = 64;

fn reference<'a>(page: &Listed<'a>) -> PackedRef<'a> {
    let Listed { words, live, last, by, .. } = *page;
    PackedRef { words, live, last, by }
}

/// Some rows of one forest.
#[derive(Clone, Copy)]
pub struct Item<'a> {
    pub forest: &'a Forest<'a>,
    /// First row of the KV head, `position offset * group + query head in the group`.
    pub row: usize,
    pub rows: usize,
}

/// An aligned subtree of a run of an item.
pub struct Task {
    pub item: usize,
    /// The run's place in the forest's list.
    pub run: usize,
    pub blocks: Range<usize>,
}

/// Everything that a task reads.
pub struct Job<'a> {
    pub executor: &'a dyn Executor,
    pub inner: &'a CacheShape,
    pub layer: usize,
    pub shape: &'a LayerShape,
    pub views: &'a [View<'a>],
    /// Row of the call at which each view starts.
    pub starts: &'a [usize],
    /// `[rows][query_heads][k_dim]`, if the host has them.
    pub q: &'a [f32],
    /// The queries, if a device has them.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub on_device: Option<OnDevice>,
    /// As asked for, to be named by errors.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device asks"))]
    pub scale: f32,
    /// Blocks of a task, if that is asked for.
    pub split: Option<u32>,
    /// Factor of q, in base 2 unless there is a cap.
    pub factor: f32,
    pub softcap: Option<f32>,
    pub table: Option<Arc<Table>>,
    pub read: Read,
    pub closed_gaps: bool,
    /// By how much products of turned channels are larger than those before the rotation; 1 but where frequencies are scaled.
    pub stretch: f32,
    /// What other ranks worked out.
    pub remote: Option<Arc<dyn Elsewhere>>,
    pub overflow: AtomicUsize,
}

/// Buffers of a thread.
#[derive(Default)]
pub struct Scratch {
    pub packed: Packed,
    pub part: Vec<f32>,
    pub spare: Vec<Vec<f32>>,
    pub row: Vec<f32>,
    /// Where masses are wanted: the weights of a forest's pages in each row, and each block's exponents.
    pub raw: Vec<[f32; LANES]>,
    pub tops: Vec<f32>,
}

thread_local! {
    pub static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl<'a> Job<'a> {
    pub fn group(&self) -> usize {
        self.shape.group() as usize
    }

    pub fn layout(&self) -> &Layout {
        &self.shape.layout
    }

    /// The rows of a forest, `step` at a time.
    pub fn items<'f>(&self, forest: &'f Forest<'f>, step: usize) -> impl Iterator<Item = Item<'f>> + use<'f> {
        let rows = self.views[forest.view].rows as usize * self.group();
        (0..rows).step_by(step).map(move |row| Item { forest, row, rows: step.min(rows - row) })
    }

    /// Rows cut into tiles, whole subtrees into tasks, tasks to threads.
    pub fn run(&self, forests: &[Forest<'_>], lists: &mut Cut, out: &Shared<'_>, lse: &Shared<'_>) {
        let mut items: Vec<Item<'_>> = emptied(std::mem::take(&mut lists.items));
        for forest in forests {
            items.extend(self.items(forest, TILE));
        }
        let blocks: usize = items.iter().map(|item| item.forest.blocks.len()).sum();
        let level = match self.split {
            Some(blocks) => Some(blocks.ilog2()),
            // Enough items to keep the threads busy, or too little work to cut: whole items.
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

    /// A task a subtree of `2^level` blocks, then an item's tasks joined.
    fn in_tasks(&self, items: &[Item<'_>], level: u32, lists: &mut Cut, out: &Shared<'_>, lse: &Shared<'_>) {
        let Cut { tasks, roots, offsets, parts: buffer, .. } = lists;
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
        // Each part is written whole.
        buffer.resize(total.max(buffer.len()), 0.0);
        let parts = Shared::new(buffer);
        each_index(tasks.len(), |t| {
            let Task { item, run, blocks } = &tasks[t];
            let item = &items[*item];
            self.with_scratch(item, |trees, scratch, leaf| {
                let tree = trees.of(item.forest.codec_of_run(*run));
                // SAFETY: each task has a range of its own, as long as its partial result, and `offsets` are their prefix sums.
                let part = unsafe { parts.part(offsets[t], tree.len()) };
                item.forest.reduce_blocks(tree, *run, blocks.clone(), level, leaf, part, &mut scratch.spare);
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
            SCRATCH.with_borrow_mut(|Scratch { part, spare, .. }| {
                part.resize(full.len().max(part.len()), 0.0);
                item.forest.join(&trees, level, tasks, roots, offsets, buffer, part, spare);
                self.finish(item, &full.partial(part), out, lse);
            });
        });
    }

    pub fn codec(&self, forest: &Forest<'_>) -> Option<&'a HeadCodec> {
        self.views[forest.view].layer.codecs[forest.head].as_ref()
    }

    /// Those that have packed pages, in turn.
    pub fn codecs(&self, forest: &Forest<'_>) -> [Option<&'a HeadCodec>; 2] {
        let first = self.codec(forest);
        let second = first.and_then(|codec| Some(&codec.aged.as_ref()?.codec));
        [first.filter(|_| forest.packed[0] > 0), second.filter(|_| forest.packed[1] > 0)]
    }

    /// Rows of a bundle at most.
    pub fn most(&self, forest: &Forest<'_>) -> usize {
        self.executor.most(self, forest)
    }

    pub fn trees(&self, item: &Item<'_>) -> Trees<'_> {
        Trees::new(self.inner.config.lanes, self.layout(), self.codecs(item.forest), item.rows)
    }

    /// Scales, turns and packs the queries of an item, and calls `f` with the routine that computes a block of it.
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

    /// One block of an item, by the form of its pages.
    pub fn block(
        &self,
        item: &Item<'_>,
        block: usize,
        packed: &mut Packed,
        part: &mut [f32],
        mut raw: Raw<'_>,
    ) {
        if let Some(remote) = &self.remote
            && remote.place(item, block, part, raw.as_deref_mut())
        {
            return;
        }
        let (forest, lanes) = (item.forest, self.inner.config.lanes);
        let pages = forest.blocks[block].clone();
        let next = [0, 1].map(|i| forest.pages.get(pages.end + i).map_or(&[][..], |page| page.words));
        let pages = &forest.pages[pages];
        let common = Common {
            layout: self.layout(),
            sights: &packed.sights,
            ring: pages[0].id.place == Place::Ring,
            softcap: self.softcap,
            most: self.most(forest),
            q: match pages[0].id.place {
                Place::Sinks if self.closed_gaps => &packed.sinks,
                _ => &packed.q,
            },
            rotation: self.rotation(),
        };
        let at = forest.codec(block);
        match at.and_then(|at| Some((at, self.codecs(forest)[at]?))) {
            Some((at, codec)) => {
                let all = PackedBlock {
                    common,
                    packed: &codec.packed,
                    back: codec.back(),
                    pages: &[],
                    next: next[0],
                    folded: &packed.folded[at],
                    start: &packed.start[at],
                    rebuilt: &mut packed.rebuilt,
                    out: Partial::new(part, item.rows, codec.packed.acc_rows()),
                    first: 0,
                    raw: None,
                };
                self.packed(pages, all, raw);
            }
            _ if forest.is_mixed(block) => self.mixed(item, pages, common, part, raw),
            _ => {
                let mut list = [PageRef { words: &[], live: 0 }; BLOCK];
                for (to, from) in list.iter_mut().zip(pages) {
                    *to = PageRef { words: from.words, live: from.live };
                }
                let out = Partial::new(part, item.rows, self.layout().acc_rows());
                Block { common, pages: &list[..pages.len()], next, out, first: 0, raw }.run(lanes);
            }
        }
    }

    /// A block of packed pages. Where some were packed again meanwhile, each row is attended for itself, over those that it reads. Rare,
    /// but while a rollback could make them young again.
    fn packed(&self, pages: &[Listed<'_>], mut all: PackedBlock<'_>, mut raw: Raw<'_>) {
        let lanes = self.inner.config.lanes;
        let mut list = [PackedRef { words: &[], live: 0, last: 0, by: 0 }; BLOCK];
        if pages.iter().all(|page| page.until.is_none()) {
            list.iter_mut().zip(pages).for_each(|(to, from)| *to = reference(from));
            PackedBlock { pages: &list[..pages.len()], raw, ..all }.run(lanes);
            return;
        }
        // What a row does not read weighs nothing in it.
        raw.iter_mut().for_each(|raw| raw.fill([0.0; LANES]));
        let (common, cols) = (all.common, all.packed.query_cols() as usize);
        let channels = self.layout().k_channels() as usize;
        let mut single = [0.0; MAX_DIM as usize];
        let single = &mut single[..channels];
        let mut weights = [[0.0; LANES]; BLOCK];
        for (first, width) in bundles(common.sights.len(), common.most) {
            let bundle = &common.q[first * channels..][..width * channels];
            for row in first..first + width {
                for (single, rows) in single.iter_mut().zip(bundle.chunks_exact(width)) {
                    *single = rows[row - first];
                }
                let hi = common.sights[row].0.hi;
                let (mut at, mut n) = ([0; BLOCK], 0);
                for (i, page) in pages.iter().enumerate() {
                    if page.is_young_to(hi) {
                        (list[n], at[n]) = (reference(page), i);
                        n += 1;
                    }
                }
                let Partial { m, l, acc } = &mut all.out;
                PackedBlock {
                    common: Common { sights: &common.sights[row..row + 1], q: single, ..common },
                    packed: all.packed,
                    back: all.back,
                    pages: &list[..n],
                    next: &[],
                    folded: &all.folded[row * cols..(row + 1) * cols],
                    start: &all.start[row..row + 1],
                    rebuilt: &mut *all.rebuilt,
                    out: Partial { m, l, acc },
                    first: row,
                    raw: raw.is_some().then_some(&mut weights[..n]),
                }
                .run(lanes);
                if let Some(raw) = &mut raw {
                    for (at, weights) in at[..n].iter().zip(&weights) {
                        raw[row * pages.len() + at] = *weights;
                    }
                }
            }
        }
    }

    /// A block of open pages of which some are packed by now: each row reads the page that was open when it came, so that it
    /// makes no difference whether later rows belong to the same step. Rare: a page is in between once.
    fn mixed(
        &self,
        item: &Item<'_>,
        pages: &[Listed<'_>],
        common: Common<'_>,
        part: &mut [f32],
        mut raw: Raw<'_>,
    ) {
        // What a row does not read weighs nothing in it.
        raw.iter_mut().for_each(|raw| raw.fill([0.0; LANES]));
        let channels = self.layout().k_channels() as usize;
        let mut single = [0.0; MAX_DIM as usize];
        let single = &mut single[..channels];
        let mut weights = [[0.0; LANES]; BLOCK];
        for (first, width) in bundles(item.rows, common.most) {
            let bundle = &common.q[first * channels..][..width * channels];
            for r in 0..width {
                let hi = common.sights[first + r].0.hi;
                for (single, rows) in single.iter_mut().zip(bundle.chunks_exact(width)) {
                    *single = rows[r];
                }
                let mut list = [PageRef { words: &[], live: 0 }; BLOCK];
                let mut at = [0; BLOCK];
                let mut n = 0;
                for (i, page) in pages.iter().enumerate().filter(|(_, page)| page.is_open_to(hi)) {
                    (list[n], at[n]) = (PageRef { words: page.words, live: page.live }, i);
                    n += 1;
                }
                let row = first + r;
                Block {
                    common: Common { sights: &common.sights[row..row + 1], q: single, ..common },
                    pages: &list[..n],
                    next: [&[]; 2],
                    out: Partial::new(part, item.rows, self.layout().acc_rows()),
                    first: row,
                    raw: raw.is_some().then_some(&mut weights[..n]),
                }
                .run(self.inner.config.lanes);
                if let Some(raw) = &mut raw {
                    for (at, weights) in at[..n].iter().zip(&weights) {
                        raw[row * pages.len() + at] = *weights;
                    }
                }
            }
        }
    }

    pub fn rotation(&self) -> Option<Rotation<'_>> {
        Some(self.table.as_ref()?.rotation(self.shape.rope?))
    }

    /// Index of (row, query head) in the call.
    pub fn row_of(&self, view: usize, row: usize, head: usize) -> usize {
        (self.starts[view] + row) * self.shape.query_heads as usize + head
    }

    pub fn finish(&self, item: &Item<'_>, part: &Partial<'_>, out: &Shared<'_>, lse: &Shared<'_>) {
        let v_dim = self.shape.layout.v_dim as usize;
        let stride = self.layout().acc_rows() as usize;
        for r in 0..item.rows {
            let (m, l) = (part.m[r], part.l[r]);
            let at = self.output_row(item, r);
            // SAFETY: (row, query head) belongs to one item only, and an item is finished by one task.
            let (out, lse) = unsafe { (out.part(at * v_dim, v_dim), lse.part(at, 1)) };
            let acc = &part.acc[r * stride..][..stride];
            let finish = Finish { layout: self.layout(), m, l, acc, out: &mut *out };
            lse[0] = finish.run(self.inner.config.lanes);
            self.judge(at, m, l, out);
        }
    }

    /// Where row `r` of an item goes.
    pub fn output_row(&self, item: &Item<'_>, r: usize) -> usize {
        let (group, i) = (self.group(), item.row + r);
        self.row_of(item.forest.view, i / group, item.forest.head * group + i % group)
    }

    /// Whether exponent, sum and output of row `at` of the call are those of scores that f32 holds.
    pub fn judge(&self, at: usize, m: f32, l: f32, out: &[f32]) {
        let empty = m == f32::NEG_INFINITY;
        let sound = m.abs() < TOP_SCORE && l.is_finite() && out.iter().all(|x| x.is_finite());
        if !empty && !sound {
            self.overflow.fetch_min(at, Ordering::Relaxed);
        }
    }
}
