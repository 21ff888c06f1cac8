//! Attention over a sequence's sinks, expert pages and ring, on all shards.
//!
//! What is read is a *forest*: for each run of pages (sinks, each expert, ring) the fixed tree over its blocks, and a
//! fixed tree over the runs. A block is a leaf; which thread computes it, and how leaves are grouped into tasks, does not
//! show in the result.

use crate::cache::Inner;
use crate::error::Error;
use crate::reduce::{Tree, levels};
use crate::rope::Table;
use crate::sequence::{Layer, PageId, Place, block_of, chain_place};
use crate::step::length;
use pikv_core::attend::{BLOCK, PageRef, Query, Sight, attend_block};
use pikv_core::math::exp2i;
use pikv_core::merge::{Partial, finish};
use pikv_core::page::{Layout, PAGE};
use pikv_core::plan::LayerShape;
use pikv_core::warp::{Kernel, LANES, Warp};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows of one head that a task takes at most: enough to read a block from the cache many times, few enough for
/// their partial results to stay there.
const TILE: usize = 64;

/// Scores from here on differ by less than f32 resolves, or have overflowed.
const TOP_SCORE: f32 = 16_777_216.0;

/// Options of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attend {
    /// Factor of `q . k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Logits become `softcap * tanh(logit / softcap)`, as in Gemma 2.
    pub softcap: Option<f32>,
    /// Blocks of 256 tokens that a task takes, a power of two. By default chosen from the work and the threads. It bears on
    /// speed only.
    pub split: Option<u32>,
}

impl Attend {
    /// Attention with factor `scale`.
    pub const fn new(scale: f32) -> Attend {
        Attend { scale, softcap: None, split: None }
    }

    /// Sets the cap of the logits.
    pub const fn softcap(mut self, cap: f32) -> Attend {
        self.softcap = Some(cap);
        self
    }

    /// Sets the blocks of a task.
    pub const fn split(mut self, blocks: u32) -> Attend {
        self.split = Some(blocks);
        self
    }
}

/// Where results go.
#[derive(Debug)]
pub struct Output<'a> {
    out: &'a mut [f32],
    lse: Option<&'a mut [f32]>,
    mass: Option<&'a mut Vec<PageMass>>,
}

impl<'a> Output<'a> {
    /// Attention output, `[rows][query_heads][v_dim]`. A row that sees nothing gets zeros.
    pub fn new(out: &'a mut [f32]) -> Output<'a> {
        Output { out, lse: None, mass: None }
    }

    /// Also the natural log-sum-exp of the scaled logits, `[rows][query_heads]`; -inf for a row that sees nothing.
    pub fn lse(mut self, lse: &'a mut [f32]) -> Output<'a> {
        self.lse = Some(lse);
        self
    }

    /// Also the attention mass of every page read; `mass` is cleared first. The scores are kept meanwhile: 4 bytes a row, head
    /// and token.
    pub fn mass(mut self, mass: &'a mut Vec<PageMass>) -> Output<'a> {
        self.mass = Some(mass);
        self
    }
}

/// The softmax weight that the tokens of one page received.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMass {
    /// Index of the sequence in the call.
    pub sequence: usize,
    /// KV head.
    pub kv_head: usize,
    /// The page.
    pub page: PageId,
    /// For each lane the weights summed over the query heads of the KV head, then over the rows; 0 for lanes not seen.
    pub tokens: [f32; LANES],
}

impl PageMass {
    /// Weight of the whole page.
    pub fn total(&self) -> f32 {
        self.tokens.iter().sum()
    }
}

/// Rows of one sequence in one layer.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub layer: &'a Layer,
    /// Position of the first row.
    pub first: u32,
    pub rows: u32,
    /// Tokens written to the ring.
    pub len: u32,
}

/// What one KV head of one sequence is read from.
struct Forest<'a> {
    view: usize,
    head: usize,
    pages: Vec<PageRef<'a>>,
    /// Run and ordinal of each page.
    ids: Vec<(u32, u32)>,
    /// Blocks: a range of pages each.
    blocks: Vec<Range<usize>>,
    /// Index of each block in the tree of its run.
    index: Vec<u32>,
    /// Runs: their index, and their blocks.
    runs: Vec<u32>,
    run_blocks: Vec<Range<usize>>,
}

/// Some rows of one forest.
#[derive(Clone, Copy)]
struct Item<'a> {
    forest: &'a Forest<'a>,
    /// First row of the KV head, `position offset * group + query head in the group`.
    row: usize,
    rows: usize,
}

/// Everything that a task reads.
struct Job<'a> {
    inner: &'a Inner,
    shape: &'a LayerShape,
    views: &'a [View<'a>],
    /// Row of the call at which each view starts.
    starts: Vec<usize>,
    q: &'a [f32],
    /// Factor of q, in base 2 unless there is a cap.
    factor: f32,
    softcap: Option<f32>,
    table: Option<Table>,
    overflow: AtomicUsize,
}

/// Buffers of a thread.
#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    sights: Vec<(Sight, Sight)>,
    part: Vec<f32>,
    spare: Vec<Vec<f32>>,
    row: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A slice that tasks write disjoint parts of.
struct Shared<'a> {
    start: *mut f32,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the slice is borrowed mutably for 'a, and `part` obliges its callers to keep parts apart.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    fn new(slice: &'a mut [f32]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), _slice: std::marker::PhantomData }
    }

    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, at: usize, n: usize) -> &mut [f32] {
        assert!(at + n <= self.len);
        // SAFETY: within the slice by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), n) }
    }
}

pub(crate) fn attend(
    inner: &Inner,
    layer: usize,
    shape: &LayerShape,
    views: &[View<'_>],
    q: &[f32],
    options: &Attend,
    output: Output<'_>,
) -> Result<(), Error> {
    let Attend { scale, softcap, split } = *options;
    if !(scale.is_finite() && scale > 0.0) {
        return Err(Error::Scale(scale));
    }
    if let Some(cap) = softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
        return Err(Error::Softcap(cap));
    }
    if let Some(split) = split.filter(|split| !split.is_power_of_two()) {
        return Err(Error::Split(split));
    }
    let mut starts = Vec::with_capacity(views.len());
    let mut rows = 0;
    for view in views {
        starts.push(rows);
        rows += view.rows as usize;
    }
    let heads = shape.query_heads as usize;
    let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
    length("q", q.len(), rows * heads * k_dim, "rows * query_heads * k_dim")?;
    length("out", output.out.len(), rows * heads * v_dim, "rows * query_heads * v_dim")?;
    if let Some(lse) = &output.lse {
        length("lse", lse.len(), rows * heads, "rows * query_heads")?;
    }
    if let Some(at) = q.iter().position(|x| !x.is_finite()) {
        let (row, head, channel) = (at / (heads * k_dim), at / k_dim % heads, at % k_dim);
        return Err(Error::Query { layer, row, head, channel, value: q[at] });
    }
    let table = shape.rope.and_then(|rope| inner.tables.get(&rope));
    let job = Job {
        inner,
        shape,
        views,
        starts,
        q,
        factor: softcap.map_or(scale * std::f32::consts::LOG2_E, |cap| scale / cap),
        softcap: softcap.map(|cap| cap * std::f32::consts::LOG2_E),
        table,
        overflow: AtomicUsize::new(usize::MAX),
    };
    let kv_heads = shape.kv_heads as usize;
    let forests: Vec<Forest<'_>> = (0..views.len() * kv_heads)
        .filter(|i| views[i / kv_heads].rows > 0)
        .map(|i| job.forest(i / kv_heads, i % kv_heads))
        .collect();
    let mut no_lse = Vec::new();
    let lse = output.lse.unwrap_or_else(|| {
        no_lse.resize(rows * heads, 0.0);
        &mut no_lse
    });
    let (out, lse) = (Shared::new(output.out), Shared::new(lse));
    match output.mass {
        Some(mass) => {
            mass.clear();
            for pages in each(&forests, |forest| job.with_mass(forest, &out, &lse)) {
                mass.extend(pages);
            }
        }
        None => job.run(&forests, split, &out, &lse),
    }
    match job.overflow.into_inner() {
        usize::MAX => Ok(()),
        at => Err(Error::ScoreOverflow { layer, row: at / heads, head: at % heads, scale }),
    }
}

/// Calls `f` on every item, in whatever order, and gives the results in the items' order.
fn each<I: Sync, O: Send>(items: &[I], f: impl Fn(&I) -> O + Sync + Send) -> Vec<O> {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        if items.len() > 1 && threads() > 1 {
            return items.par_iter().with_max_len(1).map(f).collect();
        }
    }
    items.iter().map(f).collect()
}

fn threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    return 1;
}

impl<'a> Job<'a> {
    fn group(&self) -> usize {
        self.shape.group() as usize
    }

    fn layout(&self) -> &Layout {
        &self.shape.layout
    }

    /// The pages of one KV head, in the order of the reduction.
    fn forest(&self, view: usize, head: usize) -> Forest<'a> {
        let View { layer, len, .. } = self.views[view];
        let state = &layer.heads[head];
        let mut forest = Forest {
            view,
            head,
            pages: Vec::new(),
            ids: Vec::new(),
            blocks: Vec::new(),
            index: Vec::new(),
            runs: Vec::new(),
            run_blocks: Vec::new(),
        };
        for (c, chain) in state.chains.iter().enumerate() {
            let pages = chain.entries.iter().enumerate().filter_map(|(i, entry)| {
                let page = entry.page.as_ref()?;
                Some((chain.first + i as u32, PageRef { words: page.words(), fill: entry.fill }))
            });
            forest.push_run(c as u32, pages);
        }
        let tiles = state.ring.iter().enumerate().map(|(i, page)| {
            let tile = layer.first_tile + i as u32;
            (tile, PageRef { words: page.words(), fill: len.saturating_sub(tile * PAGE).min(PAGE) })
        });
        forest.push_run(state.chains.len() as u32, tiles);
        forest
    }

    /// Rows cut into tiles, whole subtrees into tasks, tasks to threads.
    fn run(&self, forests: &[Forest<'_>], split: Option<u32>, out: &Shared<'_>, lse: &Shared<'_>) {
        let mut items = Vec::new();
        for forest in forests {
            let rows = self.views[forest.view].rows as usize * self.group();
            items.extend((0..rows).step_by(TILE).map(|row| Item { forest, row, rows: TILE.min(rows - row) }));
        }
        let blocks: usize = items.iter().map(|item| item.forest.blocks.len()).sum();
        let level = match split {
            Some(blocks) => blocks.ilog2(),
            // Enough items to keep the threads busy, or too little work to cut: whole items.
            None if threads() == 1 || items.len() >= 8 * threads() || blocks <= 2 * items.len() => 63,
            None => (blocks / (8 * threads())).max(1).ilog2(),
        };
        if level == 63 {
            each(&items, |item| {
                self.with_scratch(item, |tree, scratch, leaf| {
                    let Scratch { part, spare, .. } = scratch;
                    part.resize(tree.len().max(part.len()), 0.0);
                    item.forest.reduce(&tree, leaf, part, spare);
                    self.finish(item, &part[..tree.len()], out, lse);
                });
            });
            return;
        }
        let tasks: Vec<(usize, usize, Range<usize>)> = items
            .iter()
            .enumerate()
            .flat_map(|(i, item)| item.forest.subtrees(level).map(move |(run, blocks)| (i, run, blocks)))
            .collect();
        let mut offsets = Vec::with_capacity(tasks.len());
        let mut total = 0;
        for (item, ..) in &tasks {
            offsets.push(total);
            total += Partial::len(items[*item].rows, self.layout());
        }
        let mut buffer = vec![0.0; total];
        let parts = Shared::new(&mut buffer);
        let numbered: Vec<usize> = (0..tasks.len()).collect();
        each(&numbered, |&t| {
            let (item, run, blocks) = &tasks[t];
            let item = &items[*item];
            self.with_scratch(item, |tree, scratch, leaf| {
                // SAFETY: each task has a range of its own, as long as its partial result, and `offsets` are their prefix sums.
                let part = unsafe { parts.part(offsets[t], tree.len()) };
                item.forest.reduce_blocks(&tree, *run, blocks.clone(), level, leaf, part, &mut scratch.spare);
            });
        });
        let buffer = &buffer;
        let numbered: Vec<usize> = (0..items.len()).collect();
        each(&numbered, |&i| {
            let item = &items[i];
            let tree = self.tree(item);
            let from = tasks.partition_point(|(item, ..)| *item < i);
            let mine = from..tasks.partition_point(|(item, ..)| *item <= i);
            let (tasks, offsets) = (&tasks[mine.clone()], &offsets[mine]);
            SCRATCH.with_borrow_mut(|Scratch { part, spare, .. }| {
                part.resize(tree.len().max(part.len()), 0.0);
                item.forest.join(&tree, level, tasks, offsets, buffer, part, spare);
                self.finish(item, &part[..tree.len()], out, lse);
            });
        });
    }

    fn tree<'t>(&'t self, item: &Item<'_>) -> Tree<'t> {
        Tree { lanes: self.inner.config.lanes, layout: self.layout(), rows: item.rows }
    }

    /// Scales, turns and packs the queries of an item, and calls `f` with the routine that computes a block of it.
    fn with_scratch(
        &self,
        item: &Item<'_>,
        f: impl FnOnce(Tree<'_>, &mut Scratch, &mut dyn FnMut(usize, &mut [f32])),
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.pack(item, scratch);
            let (q, sights) = (std::mem::take(&mut scratch.q), std::mem::take(&mut scratch.sights));
            let mut leaf = |block: usize, part: &mut [f32]| self.block(item, block, &q, &sights, part, None);
            f(self.tree(item), scratch, &mut leaf);
            (scratch.q, scratch.sights) = (q, sights);
        });
    }

    fn block(
        &self,
        item: &Item<'_>,
        block: usize,
        q: &[f32],
        sights: &[(Sight, Sight)],
        part: &mut [f32],
        raw: Option<&mut [[[f32; LANES]; BLOCK]]>,
    ) {
        let forest = item.forest;
        let pages = forest.blocks[block].clone();
        let next = forest.pages.get(pages.end).map(|page| page.words);
        let ring = forest.ids[pages.start].0 as usize == self.inner.config.experts as usize + 1;
        let rotation = match (&self.table, self.shape.rope) {
            (Some(table), Some(rope)) => Some(table.rotation(rope)),
            _ => None,
        };
        self.inner.config.lanes.run(Block {
            layout: self.layout(),
            pages: &forest.pages[pages],
            next,
            q,
            sights,
            ring,
            softcap: self.softcap,
            rotation,
            out: Partial::new(part, item.rows, self.layout()),
            raw,
        });
    }

    fn pack(&self, item: &Item<'_>, scratch: &mut Scratch) {
        let (group, k_dim) = (self.group(), self.shape.layout.k_dim as usize);
        let channels = self.shape.layout.k_rows() as usize * self.shape.layout.k.per_word() as usize;
        let View { layer, first, .. } = self.views[item.forest.view];
        let (ring, window) = (self.inner.store.ring.window(), self.shape.window);
        scratch.q.clear();
        scratch.q.resize(channels * item.rows, 0.0);
        scratch.sights.clear();
        let mut at = 0;
        for (row, width) in bundles(item.rows, self.inner.config.lanes.rows()) {
            for r in 0..width {
                let i = item.row + row + r;
                let position = first + (i / group) as u32;
                let head = item.forest.head * group + i % group;
                let source = &self.q[self.row_of(item.forest.view, i / group, head) * k_dim..][..k_dim];
                scratch.row.clear();
                scratch.row.extend_from_slice(source);
                if let (Some(table), Some(rope)) = (&self.table, self.shape.rope) {
                    table.rotation(rope).rotate(&mut scratch.row, position);
                }
                for (c, x) in scratch.row.iter().enumerate() {
                    scratch.q[at + c * width + r] = x * self.factor;
                }
                // In the ring a row finds its own token and the `ring - 1` before it, and whatever was not filed yet.
                let floor = (position + 1).saturating_sub(ring).min(layer.filed);
                let lo = window.map_or(0, |w| (position + 1).saturating_sub(w));
                let sight = Sight { floor, lo, sinks: self.inner.store.sinks, hi: position as i32 };
                scratch.sights.push((Sight { floor: 0, hi: floor as i32 - 1, ..sight }, sight));
            }
            at += channels * width;
        }
    }

    /// Index of (row, query head) in the call.
    fn row_of(&self, view: usize, row: usize, head: usize) -> usize {
        (self.starts[view] + row) * self.shape.query_heads as usize + head
    }

    fn finish(&self, item: &Item<'_>, part: &[f32], out: &Shared<'_>, lse: &Shared<'_>) {
        let (group, v_dim) = (self.group(), self.shape.layout.v_dim as usize);
        let stride = self.layout().acc_rows() as usize;
        let (acc, rest) = part.split_at(item.rows * stride * LANES);
        let (m, l) = rest.split_at(item.rows);
        for r in 0..item.rows {
            let i = item.row + r;
            let at = self.row_of(item.forest.view, i / group, item.forest.head * group + i % group);
            if m[r] >= TOP_SCORE || !l[r].is_finite() {
                self.overflow.fetch_min(at, Ordering::Relaxed);
            }
            // SAFETY: (row, query head) belongs to one item only, and an item is finished by one task.
            let (out, lse) = unsafe { (out.part(at * v_dim, v_dim), lse.part(at, 1)) };
            let acc = &acc.as_chunks().0[r * stride..][..stride];
            let finish = Finish { layout: self.layout(), m: m[r], l: l[r], acc, out };
            lse[0] = self.inner.config.lanes.run(finish);
        }
    }

    /// As [`Job::run`] for one forest, and the mass of its pages.
    fn with_mass(&self, forest: &Forest<'_>, out: &Shared<'_>, lse: &Shared<'_>) -> Vec<PageMass> {
        let group = self.group();
        let rows = self.views[forest.view].rows as usize * group;
        let step = (TILE / group).max(1) * group;
        let experts = self.inner.config.experts as usize;
        let mut mass: Vec<PageMass> = forest
            .ids
            .iter()
            .map(|&(run, ordinal)| PageMass {
                sequence: forest.view,
                kv_head: forest.head,
                page: PageId {
                    place: if run as usize == experts + 1 { Place::Ring } else { chain_place(run as usize) },
                    ordinal,
                },
                tokens: [0.0; LANES],
            })
            .collect();
        let mut raw: Vec<[[f32; LANES]; BLOCK]> = Vec::new();
        let mut tops: Vec<f32> = Vec::new();
        for row in (0..rows).step_by(step) {
            let item = Item { forest, row, rows: step.min(rows - row) };
            raw.clear();
            raw.resize(forest.blocks.len() * item.rows, [[0.0; LANES]; BLOCK]);
            tops.clear();
            tops.resize(forest.blocks.len() * item.rows, 0.0);
            SCRATCH.with_borrow_mut(|scratch| {
                self.pack(&item, scratch);
                let Scratch { q, sights, part, spare, .. } = scratch;
                let tree = self.tree(&item);
                part.resize(tree.len().max(part.len()), 0.0);
                let mut leaf = |block: usize, part: &mut [f32]| {
                    let at = block * item.rows;
                    self.block(&item, block, q, sights, part, Some(&mut raw[at..at + item.rows]));
                    tops[at..at + item.rows].copy_from_slice(tree.partial(part).m);
                };
                forest.reduce(&tree, &mut leaf, part, spare);
                self.finish(&item, &part[..tree.len()], out, lse);
                let total = tree.partial(&mut part[..]);
                for (block, pages) in forest.blocks.iter().enumerate() {
                    for query in (0..item.rows).step_by(group) {
                        for (i, page) in mass[pages.clone()].iter_mut().enumerate() {
                            let mut sum = [0.0; LANES];
                            for r in query..query + group {
                                let at = block * item.rows + r;
                                if tops[at] == f32::NEG_INFINITY {
                                    continue;
                                }
                                let weight = exp2i(tops[at] - total.m[r]) / total.l[r];
                                for (sum, p) in sum.iter_mut().zip(&raw[at][i]) {
                                    *sum += p * weight;
                                }
                            }
                            for (token, sum) in page.tokens.iter_mut().zip(&sum) {
                                *token += sum;
                            }
                        }
                    }
                }
            });
        }
        mass
    }
}

impl<'a> Forest<'a> {
    /// Adds a run of pages with ascending ordinals, cut into blocks.
    fn push_run(&mut self, run: u32, pages: impl Iterator<Item = (u32, PageRef<'a>)>) {
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
    fn levels(&self, i: usize) -> u32 {
        self.index[self.run_blocks[i].clone()].last().map_or(0, |last| levels(*last))
    }

    /// Levels of the tree over the runs.
    fn top(&self) -> u32 {
        self.runs.last().map_or(0, |last| levels(*last))
    }

    /// The whole forest into `out`; `leaf(i, ..)` computes block `i`.
    fn reduce(
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
    fn reduce_blocks(
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
    fn subtrees(&self, level: u32) -> impl Iterator<Item = (usize, Range<usize>)> {
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
    fn join(
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

/// Rows in bundles of powers of two that are at most `most` wide: first row and width of each.
fn bundles(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut row = 0;
    std::iter::from_fn(move || {
        let left = (rows - row).min(most);
        (left > 0).then(|| {
            let width = 1 << left.ilog2();
            row += width;
            (row - width, width)
        })
    })
}

/// One block of pages for all rows of an item.
struct Block<'a> {
    layout: &'a Layout,
    pages: &'a [PageRef<'a>],
    next: Option<&'a [u32]>,
    q: &'a [f32],
    /// Of each row, in the pool and in the ring.
    sights: &'a [(Sight, Sight)],
    ring: bool,
    softcap: Option<f32>,
    rotation: Option<pikv_core::rope::Rotation<'a>>,
    out: Partial<'a>,
    raw: Option<&'a mut [[[f32; LANES]; BLOCK]]>,
}

impl Block<'_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize, at: usize) {
        let channels = self.layout.k_rows() as usize * self.layout.k.per_word() as usize;
        let mut sight = [Sight::NONE; R];
        for (r, sight) in sight.iter_mut().enumerate() {
            let (pool, ring) = self.sights[row + r];
            *sight = if self.ring { ring } else { pool };
        }
        let query = Query {
            q: self.q[at..at + channels * R].as_chunks().0,
            k_dim: self.layout.k_dim as usize,
            sight,
            softcap: self.softcap,
            rotation: self.rotation,
        };
        let raw = self.raw.as_deref_mut().map(|raw| &mut raw[row..row + R]);
        attend_block::<W, R>(w, self.layout, self.pages, self.next, &query, &mut self.out, row, raw);
    }
}

impl Kernel for Block<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(mut self, w: W) {
        let channels = self.layout.k_rows() as usize * self.layout.k.per_word() as usize;
        for (row, width) in bundles(self.sights.len(), W::ROWS) {
            let at = row * channels;
            match width {
                8 => self.rows::<W, 8>(w, row, at),
                4 => self.rows::<W, 4>(w, row, at),
                2 => self.rows::<W, 2>(w, row, at),
                _ => self.rows::<W, 1>(w, row, at),
            }
        }
    }
}

/// Output and log-sum-exp of one row.
struct Finish<'a> {
    layout: &'a Layout,
    m: f32,
    l: f32,
    acc: &'a [[f32; LANES]],
    out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Out = f32;
    #[inline(always)]
    fn run<W: Warp>(self, w: W) -> f32 {
        finish(w, self.layout, self.m, self.l, self.acc, self.out)
    }
}
