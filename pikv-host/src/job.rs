//! Attention cut into tasks.

use crate::attend::PageMass;
use crate::block::{Block, Finish, bundles};
use crate::cache::Inner;
use crate::filing::Layer;
use crate::forest::Forest;
use crate::reduce::Tree;
use crate::rope::Table;
use crate::sequence::{PageId, Place, chain_place};
use pikv_core::attend::{BLOCK, PageRef, Sight};
use pikv_core::math::exp2i;
use pikv_core::merge::Partial;
use pikv_core::page::{Layout, PAGE};
use pikv_core::plan::LayerShape;
use pikv_core::rope::Rotation;
use pikv_core::warp::LANES;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows of one head that a task takes at most: enough to read a block from the cache many times, few enough for
/// their partial results to stay there.
const TILE: usize = 64;

/// Scores from here on differ by less than f32 resolves, or have overflowed.
const TOP_SCORE: f32 = 16_777_216.0;

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

/// Some rows of one forest.
#[derive(Clone, Copy)]
struct Item<'a> {
    forest: &'a Forest<'a>,
    /// First row of the KV head, `position offset * group + query head in the group`.
    row: usize,
    rows: usize,
}

/// Everything that a task reads.
pub struct Job<'a> {
    pub inner: &'a Inner,
    pub shape: &'a LayerShape,
    pub views: &'a [View<'a>],
    /// Row of the call at which each view starts.
    pub starts: Vec<usize>,
    pub q: &'a [f32],
    /// Factor of q, in base 2 unless there is a cap.
    pub factor: f32,
    pub softcap: Option<f32>,
    pub table: Option<Table>,
    pub overflow: AtomicUsize,
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
pub struct Shared<'a> {
    start: *mut f32,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the slice is borrowed mutably for 'a, and `part` obliges its callers to keep parts apart.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub fn new(slice: &'a mut [f32]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), _slice: std::marker::PhantomData }
    }

    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, at: usize, n: usize) -> &mut [f32] {
        assert!(n <= self.len && at <= self.len - n);
        // SAFETY: within the slice by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), n) }
    }
}

/// Calls `f` on every item, in whatever order, and gives the results in the items' order.
pub fn each<I: Sync, O: Send>(items: &[I], f: impl Fn(&I) -> O + Sync + Send) -> Vec<O> {
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
    pub fn forest(&self, view: usize, head: usize) -> Forest<'a> {
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
    pub fn run(&self, forests: &[Forest<'_>], split: Option<u32>, out: &Shared<'_>, lse: &Shared<'_>) {
        let mut items = Vec::new();
        for forest in forests {
            let rows = self.views[forest.view].rows as usize * self.group();
            items.extend((0..rows).step_by(TILE).map(|row| Item { forest, row, rows: TILE.min(rows - row) }));
        }
        let blocks: usize = items.iter().map(|item| item.forest.blocks.len()).sum();
        let level = match split {
            Some(blocks) => Some(blocks.ilog2()),
            // Enough items to keep the threads busy, or too little work to cut: whole items.
            None if threads() == 1 || items.len() >= 8 * threads() || blocks <= 2 * items.len() => None,
            None => Some((blocks / (8 * threads())).max(1).ilog2()),
        };
        let Some(level) = level else {
            each(&items, |item| {
                self.with_scratch(item, |tree, scratch, leaf| {
                    let Scratch { part, spare, .. } = scratch;
                    part.resize(tree.len().max(part.len()), 0.0);
                    item.forest.reduce(&tree, leaf, part, spare);
                    self.finish(item, &tree.partial(part), out, lse);
                });
            });
            return;
        };
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
                self.finish(item, &tree.partial(part), out, lse);
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
        let ring = self.place(forest.ids[pages.start].0) == Place::Ring;
        self.inner.config.lanes.run(Block {
            layout: self.layout(),
            pages: &forest.pages[pages],
            next,
            q,
            sights,
            ring,
            softcap: self.softcap,
            rotation: self.rotation(),
            out: Partial::new(part, item.rows, self.layout()),
            raw,
        });
    }

    fn pack(&self, item: &Item<'_>, scratch: &mut Scratch) {
        let (group, k_dim) = (self.group(), self.shape.layout.k_dim as usize);
        let channels = self.layout().k_channels() as usize;
        let rotation = self.rotation();
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
                if let Some(rotation) = &rotation {
                    rotation.rotate(&mut scratch.row, position);
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

    fn rotation(&self) -> Option<Rotation<'_>> {
        Some(self.table.as_ref()?.rotation(self.shape.rope?))
    }

    /// Which run of pages has this index in a forest: the chains, then the ring.
    fn place(&self, run: u32) -> Place {
        if run == self.inner.config.experts + 1 { Place::Ring } else { chain_place(run as usize) }
    }

    /// Index of (row, query head) in the call.
    fn row_of(&self, view: usize, row: usize, head: usize) -> usize {
        (self.starts[view] + row) * self.shape.query_heads as usize + head
    }

    fn finish(&self, item: &Item<'_>, part: &Partial<'_>, out: &Shared<'_>, lse: &Shared<'_>) {
        let (group, v_dim) = (self.group(), self.shape.layout.v_dim as usize);
        let stride = self.layout().acc_rows() as usize;
        for r in 0..item.rows {
            let (m, l) = (part.m[r], part.l[r]);
            let i = item.row + r;
            let at = self.row_of(item.forest.view, i / group, item.forest.head * group + i % group);
            // SAFETY: (row, query head) belongs to one item only, and an item is finished by one task.
            let (out, lse) = unsafe { (out.part(at * v_dim, v_dim), lse.part(at, 1)) };
            let acc = &part.acc[r * stride..][..stride];
            let finish = Finish { layout: self.layout(), m, l, acc, out: &mut *out };
            lse[0] = self.inner.config.lanes.run(finish);
            let empty = m == f32::NEG_INFINITY;
            let sound = m.abs() < TOP_SCORE && l.is_finite() && out.iter().all(|x| x.is_finite());
            if !empty && !sound {
                self.overflow.fetch_min(at, Ordering::Relaxed);
            }
        }
    }

    /// As [`Job::run`] for one forest, and the mass of its pages.
    pub fn with_mass(&self, forest: &Forest<'_>, out: &Shared<'_>, lse: &Shared<'_>) -> Vec<PageMass> {
        let group = self.group();
        let rows = self.views[forest.view].rows as usize * group;
        let step = (TILE / group).max(1) * group;
        let mut mass: Vec<PageMass> = forest
            .ids
            .iter()
            .map(|&(run, ordinal)| PageMass {
                sequence: forest.view,
                kv_head: forest.head,
                page: PageId { place: self.place(run), ordinal },
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
                let total = tree.partial(part);
                self.finish(&item, &total, out, lse);
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
