//! Attention on the device: all blocks of all rows in one launch a width of bundle, the tree level by level, the end in one.

use super::work::{Upload, Work};
use super::{Device, arguments};
use crate::block::bundles;
use crate::error::Error;
use crate::forest::Forest;
use crate::job::{Item, Job, SCRATCH};
use crate::reduce::levels;
use crate::sequence::Place;
use pikv_core::merge::Partial;
use pikv_kernels::args::{LayoutArg, PairArg, RopeArg, RowArg, SightArg, TaskArg};
use std::ptr;

/// f32 of partial results that a wave of items takes, unless it is a single item: 64 MiB.
const WAVE: u64 = 16 << 20;

/// Rows of a bundle at most.
pub(crate) const ROWS: usize = 8;

/// Items whose partial results are on the device together.
#[derive(Default)]
struct Wave {
    q: Vec<f32>,
    pages: Vec<u64>,
    live: Vec<u32>,
    sights: Vec<SightArg>,
    /// For 1, 2, 4 and 8 rows.
    tasks: [Vec<TaskArg>; 4],
    /// By their height in the tree.
    pairs: Vec<Vec<PairArg>>,
    rows: Vec<RowArg>,
    /// f32 of the partial results.
    parts: u64,
    /// The forest whose pages came last, and the first of them.
    last: Option<(*const (), u32)>,
}

/// A partial result of the tree.
#[derive(Clone, Copy)]
struct Node {
    part: u64,
    /// Launches that must have been before.
    height: usize,
}

impl Wave {
    fn push(&mut self, job: &Job<'_>, item: &Item<'_>) {
        let forest = item.forest;
        let key = ptr::from_ref(forest).cast();
        let first_page = match self.last {
            Some((last, first)) if last == key => first,
            _ => {
                let first = self.pages.len() as u32;
                self.pages.extend(forest.pages.iter().map(|page| page.address));
                self.live.extend(forest.pages.iter().map(|page| page.live));
                self.last = Some((key, first));
                first
            }
        };
        let (channels, acc_rows) = (job.shape.layout.k_channels() as usize, job.shape.layout.acc_rows());
        SCRATCH.with_borrow_mut(|scratch| {
            job.pack(item, scratch);
            let first_q = self.q.len();
            self.q.extend(&scratch.packed.q);
            // Where gaps are closed the sinks are read by queries of their own.
            let first_sink_q = if job.closed_gaps { self.q.len() } else { first_q };
            self.q.extend(&scratch.packed.sinks);
            for (row, width) in bundles(item.rows, ROWS) {
                let looks = &scratch.packed.sights[row..row + width];
                let sights = self.sights.len() as u32;
                self.sights.extend(looks.iter().map(|(pool, _)| SightArg::from(*pool)));
                self.sights.extend(looks.iter().map(|(_, ring)| SightArg::from(*ring)));
                let (first_part, len) = (self.parts, Partial::len(width, acc_rows) as u64);
                for pages in &forest.blocks {
                    let place = forest.pages[pages.start].id.place;
                    let ring = place == Place::Ring;
                    let q = if place == Place::Sinks { first_sink_q } else { first_q };
                    self.tasks[width.ilog2() as usize].push(TaskArg {
                        part: self.parts,
                        q: (q + row * channels) as u32,
                        pages: first_page + pages.start as u32,
                        count: pages.len() as u32,
                        sights: sights + if ring { width as u32 } else { 0 },
                    });
                    self.parts += len;
                }
                if let Some(root) = self.join(forest, first_part, len, width as u32) {
                    self.rows.extend((0..width).map(|r| RowArg {
                        part: root.part,
                        rows: width as u32,
                        row: r as u32,
                        out: job.output_row(item, row + r) as u32,
                        pad: 0,
                    }));
                }
            }
        });
    }

    /// The tree of [`Forest::reduce`] over blocks whose partial results begin at `first`, `len` f32 each.
    fn join(&mut self, forest: &Forest<'_>, first: u64, len: u64, rows: u32) -> Option<Node> {
        let pairs = &mut self.pairs;
        let mut run = |i: usize, pairs: &mut Vec<Vec<PairArg>>| {
            let blocks = forest.run_blocks[i].clone();
            let mut leaf = |block: usize, _: &mut Vec<Vec<PairArg>>| {
                Some(Node { part: first + block as u64 * len, height: 0 })
            };
            let index = &forest.index[blocks.clone()];
            subtree(index, forest.levels(i), 0, blocks.start, &mut leaf, rows, pairs)
        };
        let level = forest.runs.last().map_or(0, |last| levels(*last));
        subtree(&forest.runs, level, 0, 0, &mut run, rows, pairs)
    }

    fn launch(
        &self,
        device: &Device,
        work: &mut Work,
        job: &Job<'_>,
        out: u64,
        ends: u64,
    ) -> Result<(), Error> {
        let layout = LayoutArg::from(job.shape.layout);
        let stream = &device.stream;
        let (rope, table) = match (&job.shape.rope, &job.table) {
            (Some(rope), Some(table)) => {
                let at = work.table(stream, rope, table.values(), table.capacity())?;
                (RopeArg::new(rope, table.capacity()), at)
            }
            _ => (RopeArg::NONE, 0),
        };
        let parts = work.parts(stream, self.parts)?;
        let mut upload = Upload::new();
        let (q, pages, live) = (upload.add(&self.q), upload.add(&self.pages), upload.add(&self.live));
        let sights = upload.add(&self.sights);
        let tasks = self.tasks.each_ref().map(|tasks| upload.add(tasks));
        let pairs: Vec<u64> = self.pairs.iter().map(|pairs| upload.add(pairs)).collect();
        let rows = upload.add(&self.rows);
        let base = work.send(stream, &upload)?;
        let (q, pages, live, sights, rows) =
            (base + q, base + pages, base + live, base + sights, base + rows);
        let softcap = job.softcap.unwrap_or(0.0);
        for ((kernel, tasks), list) in device.kernels.attend.iter().zip(&self.tasks).zip(tasks) {
            if tasks.is_empty() {
                continue;
            }
            let (list, count) = (base + list, tasks.len() as u32);
            // SAFETY: the parameters of `attend_r*`. The lists are on the device, and the pages held by the views' sequences; each
            // task's part is its own, within `parts`.
            unsafe {
                let arguments =
                    arguments!(layout, q, pages, live, list, count, sights, softcap, rope, table, parts);
                device.launch(*kernel, tasks.len(), arguments)?;
            }
        }
        for (pairs, list) in self.pairs.iter().zip(pairs) {
            let (list, count) = (base + list, pairs.len() as u32);
            // SAFETY: the parameters of `merge_pairs`; at one height of a tree no part stands twice.
            unsafe {
                let arguments = arguments!(layout, list, count, parts);
                device.launch(device.kernels.merge_pairs, pairs.len(), arguments)?;
            }
        }
        let count = self.rows.len() as u32;
        // SAFETY: the parameters of `finish_rows`; a row of the call is one item's, and `out` and `ends` have room for all.
        unsafe {
            let arguments = arguments!(layout, rows, count, parts, out, ends);
            device.launch(device.kernels.finish_rows, self.rows.len(), arguments)?;
        }
        Ok(())
    }
}

/// Partial results of a leaf of the list, or of what stands in its place.
type Leaf<'a> = dyn FnMut(usize, &mut Vec<Vec<PairArg>>) -> Option<Node> + 'a;

/// [`Tree::reduce`](crate::reduce::Tree::reduce) as a list of joins.
fn subtree(
    index: &[u32],
    level: u32,
    base: u64,
    first: usize,
    leaf: &mut Leaf<'_>,
    rows: u32,
    pairs: &mut Vec<Vec<PairArg>>,
) -> Option<Node> {
    if index.is_empty() {
        return None;
    }
    if level == 0 {
        return leaf(first, pairs);
    }
    let half = base + (1 << (level - 1));
    let cut = index.partition_point(|i| u64::from(*i) < half);
    let left = subtree(&index[..cut], level - 1, base, first, leaf, rows, pairs);
    let right = subtree(&index[cut..], level - 1, half, first + cut, leaf, rows, pairs);
    let (Some(l), Some(r)) = (left, right) else { return left.or(right) };
    let height = l.height.max(r.height);
    if pairs.len() <= height {
        pairs.push(Vec::new());
    }
    pairs[height].push(PairArg { left: l.part, right: r.part, rows, pad: 0 });
    Some(Node { part: l.part, height: height + 1 })
}

/// Attends the items of a job. `out` is `[rows][query_heads][v_dim]`, `lse` `[rows][query_heads]`.
pub(crate) fn attend(
    device: &Device,
    job: &Job<'_>,
    forests: &[Forest<'_>],
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    if lse.is_empty() {
        return Ok(());
    }
    let mut work = device.work()?;
    let stream = &device.stream;
    let to = work.out(stream, (out.len() + 3 * lse.len()) as u64)?;
    let ends = to + 4 * out.len() as u64;
    let empty = |forest: &&Forest<'_>| forest.blocks.is_empty();
    if forests.iter().any(|forest| empty(&forest)) {
        // Rows that nothing is there for.
        device.fill(to, 0, (out.len() + 3 * lse.len()) as u32)?;
    }
    let mut wave = Wave::default();
    for item in job.items(forests) {
        let len = Partial::len(item.rows, job.shape.layout.acc_rows()) * item.forest.blocks.len();
        if wave.parts > 0 && wave.parts + len as u64 > WAVE {
            wave.launch(device, &mut work, job, to, ends)?;
            wave = Wave::default();
        }
        wave.push(job, &item);
    }
    if wave.parts > 0 {
        wave.launch(device, &mut work, job, to, ends)?;
    }
    work.fetch(stream, to, out.len() + 3 * lse.len(), |words| {
        let floats: &[f32] = bytemuck::cast_slice(words);
        let (from, ends) = floats.split_at(out.len());
        out.copy_from_slice(from);
        let width = out.len() / lse.len();
        for (at, ([end, m, l], lse)) in ends.as_chunks().0.iter().zip(lse.iter_mut()).enumerate() {
            *lse = *end;
            job.judge(at, *m, *l, &out[at * width..][..width]);
        }
    })?;
    for item in job.items(forests).iter().filter(|item| empty(&item.forest)) {
        for r in 0..item.rows {
            lse[job.output_row(item, r)] = f32::NEG_INFINITY;
        }
    }
    Ok(())
}
