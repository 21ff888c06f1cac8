//! Attention on the device: all blocks of all rows in one launch a width of bundle, the tree level by level, the end in one; where
//! the mass of pages is wanted, that in one more.

use super::work::{Upload, Work};
use super::{Device, arguments};
use crate::block::bundles;
use crate::error::Error;
use crate::forest::{Forest, Listed};
use crate::job::{Item, Job, SCRATCH, TILE};
use crate::mass::{Wanted, Weighed};
use crate::reduce::levels;
use crate::sequence::Place;
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;
use pikv_core::warp::LANES;
use pikv_kernels::args::{LayoutArg, MassArg, PairArg, RopeArg, RowArg, SightArg, TaskArg, WeighedArg};
use std::mem;
use std::ops::Range;

/// f32 of partial results and weights that a wave of items takes, unless it is a single item: 64 MiB.
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
    /// f32 of the weights, where they are kept, and whose they are.
    raw: u64,
    weighed: Vec<WeighedArg>,
    forests: Vec<Part>,
}

/// What a wave has of a forest.
struct Part {
    /// Index of the forest in the call.
    forest: usize,
    /// Its first page in the list.
    page: u32,
    /// The first token of the rows, and past the last one.
    tokens: Range<u32>,
    /// Its entries of `weighed`.
    weighed: Range<u32>,
}

/// Addresses of results.
#[derive(Clone, Copy)]
struct To {
    out: u64,
    ends: u64,
    mass: u64,
}

/// A partial result of the tree.
#[derive(Clone, Copy)]
struct Node {
    part: u64,
    /// Launches that must have been before.
    height: usize,
}

impl Wave {
    /// Adds an item of forest `index` of the call; its weights are kept if they are `wanted`.
    fn push(&mut self, job: &Job<'_>, index: usize, item: &Item<'_>, wanted: bool) {
        let forest = item.forest;
        let (first, end) = (item.row / job.group(), (item.row + item.rows).div_ceil(job.group()));
        if self.forests.last().is_none_or(|part| part.forest != index) {
            let none = self.weighed.len() as u32;
            self.forests.push(Part {
                forest: index,
                page: self.pages.len() as u32,
                tokens: first as u32..first as u32,
                weighed: none..none,
            });
            self.pages.extend(forest.pages.iter().map(|page| page.address));
            self.live.extend(forest.pages.iter().map(|page| page.live));
        }
        let first_page = self.forests.last().map_or(0, |part| part.page);
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
                let (first_part, first_raw) = (self.parts, self.raw);
                let len = Partial::len(width, acc_rows) as u64;
                for pages in &forest.blocks {
                    let place = forest.pages[pages.start].id.place;
                    let q = if place == Place::Sinks { first_sink_q } else { first_q };
                    self.tasks[width.ilog2() as usize].push(TaskArg {
                        part: self.parts,
                        raw: self.raw,
                        q: (q + row * channels) as u32,
                        pages: first_page + pages.start as u32,
                        count: pages.len() as u32,
                        sights: sights + if place == Place::Ring { width as u32 } else { 0 },
                    });
                    self.parts += len;
                    self.raw += if wanted { (width * ROW) as u64 } else { 0 };
                }
                let Some(root) = self.join(forest, first_part, len, width as u32) else { continue };
                let rows = width as u32;
                self.weighed.push(WeighedArg { raw: first_raw, part: root.part, width: rows, pad: 0 });
                self.rows.extend((0..width).map(|r| RowArg {
                    part: root.part,
                    rows,
                    row: r as u32,
                    out: job.output_row(item, row + r) as u32,
                    pad: 0,
                }));
            }
        });
        if let Some(part) = self.forests.last_mut() {
            (part.weighed.end, part.tokens.end) = (self.weighed.len() as u32, end as u32);
        }
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

    /// What is to be added up for each page and each set of rows that is wanted. Output rows of forest `f` begin at `firsts[f]`.
    fn masses(&self, forests: &[Forest<'_>], wanted: &[Wanted], firsts: &[usize]) -> Vec<MassArg> {
        let mut masses = Vec::new();
        for part in &self.forests {
            let forest = &forests[part.forest];
            let mut out = firsts[part.forest] as u32;
            for set in sets(&wanted[forest.view]) {
                let meets = set.start < part.tokens.end && part.tokens.start < set.end;
                for (block, pages) in (0..).zip(forest.blocks.iter().filter(|_| meets)) {
                    masses.extend(pages.clone().map(|page| MassArg {
                        block,
                        page: (page - pages.start) as u32,
                        first: part.weighed.start,
                        count: part.weighed.len() as u32,
                        token: part.tokens.start,
                        from: set.start,
                        to: set.end,
                        out: out + page as u32,
                    }));
                }
                out += forest.pages.len() as u32;
            }
        }
        masses
    }

    fn launch(
        &self,
        device: &Device,
        work: &mut Work,
        job: &Job<'_>,
        to: To,
        masses: &[MassArg],
    ) -> Result<(), Error> {
        let To { out, ends, mass } = to;
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
        let raw = if self.raw > 0 { work.raw(stream, self.raw)? } else { 0 };
        let mut upload = Upload::new();
        let (q, pages, live) = (upload.add(&self.q), upload.add(&self.pages), upload.add(&self.live));
        let sights = upload.add(&self.sights);
        let tasks = self.tasks.each_ref().map(|tasks| upload.add(tasks));
        let pairs: Vec<u64> = self.pairs.iter().map(|pairs| upload.add(pairs)).collect();
        let (rows, weighed, sums) = (upload.add(&self.rows), upload.add(&self.weighed), upload.add(masses));
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
            // task's part is its own, within `parts`, and so are its weights within `raw`.
            unsafe {
                let arguments =
                    arguments!(layout, q, pages, live, list, count, sights, softcap, rope, table, parts, raw);
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
        if masses.is_empty() {
            return Ok(());
        }
        let (weighed, sums) = (base + weighed, base + sums);
        let (group, count) = (job.group() as u32, masses.len() as u32);
        // SAFETY: the parameters of `mass_pages`; a page and a set of rows have one output, and stand once in a wave.
        unsafe {
            let arguments = arguments!(layout, group, sums, count, weighed, raw, parts, mass);
            device.launch(device.kernels.mass_pages, masses.len(), arguments)?;
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

/// The sets of tokens of a view whose weights are wanted apart.
fn sets(wanted: &Wanted) -> impl Iterator<Item = Range<u32>> {
    wanted.all.then_some(0..u32::MAX).into_iter().chain(wanted.cuts.iter().cloned())
}

/// Attends the forests of a job. `out` is `[rows][query_heads][v_dim]`, `lse` `[rows][query_heads]`. With `wanted`, of each view,
/// the masses of each forest's pages too.
pub(crate) fn attend(
    device: &Device,
    job: &Job<'_>,
    forests: &[Forest<'_>],
    wanted: Option<&[Wanted]>,
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<Vec<Vec<Weighed>>, Error> {
    if lse.is_empty() {
        return Ok(Vec::new());
    }
    let mut work = device.work()?;
    let stream = &device.stream;
    // Rows of masses, forest by forest.
    let (mut firsts, mut masses) = (Vec::new(), 0);
    for forest in forests {
        firsts.push(masses);
        masses += wanted.map_or(0, |wanted| sets(&wanted[forest.view]).count()) * forest.pages.len();
    }
    let floats = out.len() + 3 * lse.len() + LANES * masses;
    let first = work.out(stream, floats as u64)?;
    let ends = first + 4 * out.len() as u64;
    let to = To { out: first, ends, mass: ends + 12 * lse.len() as u64 };
    let (blank, full): (Vec<_>, Vec<_>) =
        forests.iter().enumerate().partition(|(_, forest)| forest.blocks.is_empty());
    if masses > 0 || !blank.is_empty() {
        // Sums go on from wave to wave; and of rows that nothing is there for nobody else writes the output.
        device.fill(first, 0, floats as u32)?;
    }
    let step = if wanted.is_some() { job.whole() } else { TILE };
    let width = Partial::len(1, job.shape.layout.acc_rows()) + if wanted.is_some() { ROW } else { 0 };
    let mut wave = Wave::default();
    let go = |wave: &mut Wave, work: &mut Work| {
        let wave = mem::take(wave);
        let masses = wanted.map_or_else(Vec::new, |wanted| wave.masses(forests, wanted, &firsts));
        wave.launch(device, work, job, to, &masses)
    };
    for (index, forest) in full {
        for item in job.items(forest, step) {
            let more = (width * item.rows * forest.blocks.len()) as u64;
            if wave.parts > 0 && wave.parts + wave.raw + more > WAVE {
                go(&mut wave, &mut work)?;
            }
            wave.push(job, index, &item, wanted.is_some());
        }
    }
    if wave.parts > 0 {
        go(&mut wave, &mut work)?;
    }
    let weighed = work.fetch(stream, first, floats, |words| {
        let floats: &[f32] = bytemuck::cast_slice(words);
        let (from, rest) = floats.split_at(out.len());
        let (ends, mass) = rest.split_at(3 * lse.len());
        out.copy_from_slice(from);
        let width = out.len() / lse.len();
        for (at, ([end, m, l], lse)) in ends.as_chunks().0.iter().zip(lse.iter_mut()).enumerate() {
            *lse = *end;
            job.judge(at, *m, *l, &out[at * width..][..width]);
        }
        let Some(wanted) = wanted else { return Vec::new() };
        let of = |(forest, first): (&Forest<'_>, &usize)| {
            let wanted = &wanted[forest.view];
            let row = |set: usize, page: usize| mass.as_chunks().0[first + set * forest.pages.len() + page];
            let page = |(i, page): (usize, &Listed<'_>)| {
                let mut weighed = wanted.blank(page.id);
                let before = usize::from(wanted.all);
                if wanted.all {
                    weighed.all = row(0, i);
                }
                weighed.cuts.iter_mut().enumerate().for_each(|(cut, to)| *to = row(before + cut, i));
                weighed
            };
            forest.pages.iter().enumerate().map(page).collect()
        };
        forests.iter().zip(&firsts).map(of).collect()
    })?;
    for (_, forest) in blank {
        for item in job.items(forest, step) {
            (0..item.rows).for_each(|r| lse[job.output_row(&item, r)] = f32::NEG_INFINITY);
        }
    }
    Ok(weighed)
}
