//! Items of a call that a device computes together, as lists for its kernels.

use crate::attend::forest::{Forest, ListedPage};
use crate::attend::job::{Item, Job};
use crate::attend::mass::WeightSets;
use crate::attend::queries::Packed as Queries;
use crate::attend::queries::{SCRATCH, Scratch};
use crate::attend_cuda::tree::{Joins, Tree};
use crate::base::ids::Place;
use crate::codec::{Coding, HeadCodec};
use pikv_core::attend::BLOCK;
use pikv_core::codec::factors::FactorScratch;
use pikv_core::codec::read::REBUILT;
use pikv_core::mass::ROW;
use pikv_core::merge::Partial;
use pikv_core::warp::LANES;
use pikv_kernels::args::{FoldArg, MassArg, QueryArg, RowArg, SightArg, TaskArg, WeighedArg};
use pikv_lanes::attend::{PACKED_ROWS, bundles};
use std::ops::Range;

/// Most rows of a bundle.
const ROWS: usize = 8;

/// Most rows of a bundle for factored pages.
pub const FACTORED_ROWS: usize = 1;

/// Most rows of a bundle if pages of these codecs are read too.
pub(crate) fn most<'c>(codecs: impl Iterator<Item = &'c HeadCodec>) -> usize {
    let of = |codec: &HeadCodec| if codec.packed.factored() { FACTORED_ROWS } else { PACKED_ROWS };
    codecs.map(of).fold(ROWS, usize::min)
}

/// Whether pages of the two codecs are read alike: in the same layout, through maps that share what they hold. Each head has a codec of its
/// own.
fn read_alike(a: &HeadCodec, b: &HeadCodec) -> bool {
    let same = |a: &Coding, b: &Coding| match (a.mapped(), b.mapped()) {
        (None, None) => true,
        (Some(a), Some(b)) => a.is(b),
        _ => false,
    };
    a.packed == b.packed && same(&a.codec.k, &b.codec.k) && same(&a.codec.v, &b.codec.v)
}

/// Items whose partial results are on the device together.
#[derive(Default)]
pub struct Wave<'a> {
    pub q: Vec<f32>,
    /// Queries on the device, and f32 of the bundles in which they are gathered; used instead of `q`.
    pub gathers: Vec<QueryArg>,
    bundles: u64,
    /// For each page: its address and the lanes to read; for a packed page also its last position and the position that
    /// packed it.
    pub pages: Vec<u64>,
    pub live: Vec<u32>,
    pub last: Vec<u32>,
    pub by: Vec<u32>,
    pub sights: Vec<SightArg>,
    /// For 1, 2, 4 and 8 rows.
    pub tasks: [Vec<TaskArg>; 4],
    pub packed: Vec<Packed<'a>>,
    /// The codecs of the pages.
    pub heads: Vec<&'a HeadCodec>,
    pub joins: Joins,
    pub rows: Vec<RowArg>,
    /// f32 of the partial results.
    pub parts: u64,
    /// f32 of the weights, if they are kept, and their rows.
    pub raw: u64,
    pub weighed: Vec<WeighedArg>,
    /// f32 of the device memory for the wave, with scratch memory of kernels.
    pub size: u64,
    forests: Vec<ForestPart>,
}

/// Blocks of packed pages that bundles of one width read.
pub struct Packed<'a> {
    pub codec: &'a HeadCodec,
    pub width: usize,
    /// Queries in the codec's channels, `[bundle][width][query_cols]` rows of lanes, and the constant terms of their scores. Empty if keys
    /// are rotated when they are read.
    pub q: Vec<[f32; LANES]>,
    pub start: Vec<f32>,
    /// Indices of the queries on the device, if they are there.
    folds: Vec<u32>,
    pub tasks: Vec<TaskArg>,
}

/// Queries of an item in a codec's channels, and the constant terms of their scores; or the indices of the queries on the device.
#[derive(Clone, Copy)]
pub enum ItemQueries<'l> {
    Host(&'l [[f32; LANES]], &'l [f32]),
    Device(&'l [u32]),
}

/// Places of a wave's queries that are gathered and folded on the device, as offsets in f32.
#[derive(Default)]
pub struct Gathered {
    pub folds: Vec<FoldArg>,
    /// For each entry of [`Wave::packed`], the folded queries and the constant terms of their scores.
    pub packed: Vec<[u64; 2]>,
    /// f32 of all of these.
    pub floats: u64,
}

/// An item that is being added to a wave.
struct Pushed<'p, 'a> {
    job: &'p Job<'a>,
    item: &'p Item<'p>,
    /// The queries on the host.
    packed: &'p Queries,
    /// Start of the queries, and of those for the sinks.
    q: usize,
    sinks: usize,
    /// Indices of the rows' queries on the device, if they are there.
    device: Vec<u32>,
    /// For each block, the index of its first page in the list, and the number of its pages.
    lists: Vec<(u32, u32)>,
    codecs: [Option<&'a HeadCodec>; 2],
    /// Indices of the codecs in [`Wave::heads`].
    heads: [u32; 2],
    /// Whether weights are kept.
    wanted: bool,
}

/// The part of a wave that one forest has.
struct ForestPart {
    /// Index of the forest in the call.
    forest: usize,
    /// Index of its first page in the list.
    page: u32,
    /// The tokens of its rows.
    tokens: Range<u32>,
    /// Its part of the wave's list `weighed`.
    weighed: Range<u32>,
}

/// Place of a page in a block with open pages some of which were packed since. At most one page of an expert was open at a row, and it
/// takes the expert's place.
fn place_of(page: &ListedPage<'_>) -> usize {
    match page.id.place {
        Place::Run(e) => usize::from(e) % BLOCK,
        Place::Sinks | Place::Ring => 0,
    }
}

/// f32 of scratch memory for a row of a block of packed pages, beside its partial result.
pub fn packed_room(turned: bool) -> usize {
    size_of::<FactorScratch<1>>() / 4 + if turned { REBUILT * LANES } else { 0 }
}

impl<'a> Wave<'a> {
    /// Rows of an item of a forest, at most `most`.
    pub fn step(job: &Job<'_>, forest: &Forest<'_>, most: usize) -> usize {
        // The pages that were open, or not packed again yet, differ between tokens.
        let differs = forest.passes().next().is_some();
        if differs { job.group() } else { most }
    }

    /// f32 that an item takes in a wave.
    pub fn cost(job: &Job<'_>, item: &Item<'_>, wanted: bool) -> u64 {
        let forest = item.forest;
        let row = Partial::len(1, job.shape.layout.acc_rows()) + if wanted { ROW } else { 0 };
        let packed = (0..forest.blocks.len()).filter(|block| forest.codec(*block).is_some()).count();
        // Upper bound: a partial result over packed pages has at most as many rows of lanes as a value has groups.
        let more = packed_room(job.shape.rope.is_some()) + 8 * LANES;
        (item.rows * (row * forest.blocks.len() + more * packed)) as u64
    }

    /// Adds an item of forest `index` of the call; keeps its weights if `wanted`.
    pub fn push(&mut self, job: &Job<'a>, index: usize, item: &Item<'_>, wanted: bool) {
        self.size += Wave::cost(job, item, wanted);
        let forest = item.forest;
        let first_page = self.begin(job, index, item);
        let codecs = job.codecs(forest);
        let heads = codecs.map(|codec| codec.map_or(0, |codec| self.head(codec)));
        SCRATCH.with_borrow_mut(|scratch| {
            let (q, sinks) = match job.on_device {
                Some(_) => self.gather(job, item, scratch),
                None => {
                    job.pack(item, scratch);
                    let (first, packed) = (self.q.len(), &scratch.packed);
                    self.q.extend(&packed.q);
                    // With closed gaps the sinks have queries of their own.
                    let sinks = if job.closed_gaps(item) { self.q.len() } else { first };
                    self.q.extend(&packed.sinks);
                    (first, sinks)
                }
            };
            let packed = &scratch.packed;
            let device: Vec<u32> = match job.on_device {
                Some(_) => (0..item.rows).map(|r| job.output_row(item, r) as u32).collect(),
                None => Vec::new(),
            };
            let lists = forest.blocks.iter().enumerate().map(|(block, pages)| {
                let of = &forest.pages[pages.clone()];
                match (forest.is_mixed(block), of.iter().any(|page| page.until.is_some())) {
                    (true, _) => self.list_open(of, packed.sights[0].0.hi),
                    (_, true) => self.list_young(of, packed.sights[0].0.hi),
                    _ => (first_page + pages.start as u32, pages.len() as u32),
                }
            });
            let lists = lists.collect();
            let pushed = Pushed { job, item, packed, q, sinks, device, lists, codecs, heads, wanted };
            for rows in bundles(item.rows, job.most(forest)) {
                self.push_bundle(&pushed, rows);
            }
        });
        let end = (item.row + item.rows).div_ceil(job.group());
        if let Some(part) = self.forests.last_mut() {
            (part.weighed.end, part.tokens.end) = (self.weighed.len() as u32, end as u32);
        }
    }

    /// Lists the pages of an item's forest, unless its last item did; returns the index of the first.
    fn begin(&mut self, job: &Job<'a>, index: usize, item: &Item<'_>) -> u32 {
        let first = (item.row / job.group()) as u32;
        if self.forests.last().is_none_or(|part| part.forest != index) {
            let none = self.weighed.len() as u32;
            let page = self.pages.len() as u32;
            self.forests.push(ForestPart { forest: index, page, tokens: first..first, weighed: none..none });
            item.forest.pages.iter().for_each(|page| self.list(page, page.live));
        }
        self.forests.last().map_or(0, |part| part.page)
    }

    /// Adds `width` rows of an item from `row` on, which are computed together: a task for each block, and the tree over them.
    fn push_bundle(&mut self, of: &Pushed<'_, 'a>, (row, width): (usize, usize)) {
        let Pushed { job, item, packed, ref device, codecs, heads, .. } = *of;
        let (forest, shape) = (item.forest, job.shape);
        let channels = shape.layout.k_channels() as usize;
        let looks = &packed.sights[row..row + width];
        let sights = self.sights.len() as u32;
        self.sights.extend(looks.iter().map(|(pool, _)| SightArg::from(*pool)));
        self.sights.extend(looks.iter().map(|(_, ring)| SightArg::from(*ring)));
        let first_raw = self.raw;
        let q = of.q + row * channels;
        let bundles = [0, 1].map(|at| {
            let whole = shape.rope.map(|_| q as u32);
            let left = match job.on_device {
                Some(_) => ItemQueries::Device(device),
                None => ItemQueries::Host(&packed.folded[at], &packed.start[at]),
            };
            codecs[at].map(|codec| self.bundle(codec, (row, width), whole, left))
        });
        let mut parts = Vec::with_capacity(of.lists.len());
        for (block, (pages, count)) in of.lists.iter().copied().enumerate() {
            let place = forest.pages[forest.blocks[block].start].id.place;
            let at = forest.codec(block);
            let (packed, codec) = (at.and_then(|at| bundles[at]), at.and_then(|at| codecs[at]));
            let q = if place == Place::Sinks { of.sinks + row * channels } else { q };
            let task = TaskArg {
                part: self.parts,
                raw: self.raw,
                q: packed.map_or(q as u32, |(_, q)| q),
                pages,
                count,
                sights: sights + if place == Place::Ring { width as u32 } else { 0 },
            };
            parts.push(self.parts);
            let acc_rows = codec.map_or(shape.layout.acc_rows(), |codec| codec.packed.acc_rows());
            self.parts += Partial::len(width, acc_rows) as u64;
            self.raw += if of.wanted { (width * ROW) as u64 } else { 0 };
            match packed {
                Some((of, _)) => self.packed[of].tasks.push(task),
                None => self.tasks[width.ilog2() as usize].push(task),
            }
        }
        let rows = width as u32;
        let packed = codecs.map(|codec| codec.map_or(0, |codec| codec.packed.acc_rows()));
        let tree = Tree { forest, parts: &parts, rows, full: shape.layout.acc_rows(), packed, heads };
        let Some(root) = tree.join(&mut self.joins, &mut self.parts) else { return };
        self.weighed.push(WeighedArg { raw: first_raw, part: root.part, width: rows, pad: 0 });
        self.end_bundle(root.part, width, |r| job.output_row(item, row + r) as u32);
    }

    /// Adds the rows of the bundle whose joins were added last: `part` is their result, and row `r` has output `out(r)`.
    pub fn end_bundle(&mut self, part: u64, width: usize, out: impl Fn(usize) -> u32) {
        let (bounds, levels) = self.joins.close();
        let row = |r| RowArg { part, rows: width as u32, row: r as u32, out: out(r), bounds, levels, pad: 0 };
        self.rows.extend((0..width).map(row));
    }

    fn list(&mut self, page: &ListedPage<'_>, live: u32) {
        self.pages.push(page.address);
        self.live.push(live);
        self.last.push(page.last);
        self.by.push(page.by);
    }

    /// Lists the pages of a block that are open to rows that read pages up to `hi`, each in its expert's place; other places have
    /// a page without lanes.
    fn list_open(&mut self, pages: &[ListedPage<'_>], hi: i32) -> (u32, u32) {
        let first = self.pages.len() as u32;
        let count = pages.iter().map(place_of).max().map_or(0, |last| last + 1);
        for place in 0..count {
            match pages.iter().find(|page| place_of(page) == place && page.is_open_to(hi)) {
                Some(page) => self.list(page, page.live),
                None => self.list(&pages[0], 0),
            }
        }
        (first, count as u32)
    }

    /// Lists the pages of a block of packed pages; without lanes if rows that read pages up to `hi` read the second form.
    fn list_young(&mut self, pages: &[ListedPage<'_>], hi: i32) -> (u32, u32) {
        let first = self.pages.len() as u32;
        for page in pages {
            self.list(page, if page.is_young_to(hi) { page.live } else { 0 });
        }
        (first, pages.len() as u32)
    }

    /// Index of the codec in the list.
    fn head(&mut self, codec: &'a HeadCodec) -> u32 {
        let known = self.heads.iter().position(|known| read_alike(known, codec));
        known.unwrap_or_else(|| {
            self.heads.push(codec);
            self.heads.len() - 1
        }) as u32
    }

    /// Adds the rows `row..row + width` to the bundles of this width that read pages of `codec`; returns the index of these bundles, and
    /// the offset of the queries for tasks. The offset is `whole` if keys are rotated when they are read; otherwise the folded queries of
    /// `left` are added.
    pub fn bundle(
        &mut self,
        codec: &'a HeadCodec,
        (row, width): (usize, usize),
        whole: Option<u32>,
        left: ItemQueries<'_>,
    ) -> (usize, u32) {
        let same = |of: &Packed<'_>| read_alike(of.codec, codec) && of.width == width;
        let of = self.packed.iter().position(same).unwrap_or_else(|| {
            let (q, start, folds, tasks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            self.packed.push(Packed { codec, width, q, start, folds, tasks });
            self.packed.len() - 1
        });
        if let Some(whole) = whole {
            return (of, whole);
        }
        let Packed { q, start, folds, .. } = &mut self.packed[of];
        let cols = codec.packed.query_cols() as usize;
        let first = (q.len() + folds.len() * cols) * LANES;
        match left {
            ItemQueries::Host(folded, starts) => {
                q.extend(&folded[row * cols..][..width * cols]);
                start.extend(&starts[row..row + width]);
            }
            ItemQueries::Device(queries) => folds.extend(&queries[row..row + width]),
        }
        (of, first as u32)
    }

    /// Adds the queries of an item on the device; returns the offsets of their bundles, and of those for the sinks.
    fn gather(&mut self, job: &Job<'_>, item: &Item<'_>, scratch: &mut Scratch) -> (usize, usize) {
        job.sights(item, &mut scratch.packed.sights);
        let channels = u64::from(job.shape.layout.k_channels());
        let oldest = if job.closed_gaps(item) { job.oldest(item.forest) } else { 0 };
        let mut add = |sinks: bool| {
            let first = self.bundles;
            for (row, width) in bundles(item.rows, job.most(item.forest)) {
                for r in 0..width {
                    let position = job.position(item, row + r);
                    self.gathers.push(QueryArg {
                        bundle: self.bundles,
                        query: job.output_row(item, row + r) as u32,
                        position: if sinks { job.closed(position, oldest) } else { position },
                        row: r as u32,
                        width: width as u32,
                    });
                }
                self.bundles += channels * width as u64;
            }
            first as usize
        };
        let first = add(false);
        (first, if job.closed_gaps(item) { add(true) } else { first })
    }

    /// Offsets of gathered and folded queries, if the queries are on the device.
    pub fn gathered(&self, on_device: bool) -> Gathered {
        let mut gathered = Gathered { floats: self.bundles, ..Gathered::default() };
        for (map, of) in (0..).zip(self.packed.iter().filter(|_| on_device)) {
            let (width, rows) =
                (u64::from(of.codec.packed.query_cols()) * LANES as u64, of.folds.len() as u64);
            let first = gathered.floats.next_multiple_of(LANES as u64);
            let start = first + rows * width;
            gathered.packed.push([first, start]);
            gathered.floats = start + rows;
            gathered.folds.extend((0..).zip(&of.folds).map(|(i, query)| FoldArg {
                to: first + i * width,
                start: start + i,
                query: *query,
                map,
            }));
        }
        gathered
    }

    /// Sums to compute for each page and each set of rows. Output rows of forest `f` begin at `firsts[f]`.
    pub fn masses(
        &self,
        job: &Job<'_>,
        forests: &[Forest<'_>],
        wanted: &[WeightSets],
        firsts: &[usize],
    ) -> Vec<MassArg> {
        let mut masses = Vec::new();
        for part in &self.forests {
            let forest = &forests[part.forest];
            let mut out = firsts[part.forest] as u32;
            for set in wanted[forest.view].sets() {
                let meets = set.start < part.tokens.end && part.tokens.start < set.end;
                for (block, pages) in (0u32..).zip(forest.blocks.iter().filter(|_| meets)) {
                    let mixed = forest.is_mixed(block as usize);
                    masses.extend(pages.clone().map(|page| {
                        let listed = &forest.pages[page];
                        let (place, tokens) = match mixed {
                            true => (place_of(listed), opened(job, forest, listed, &part.tokens)),
                            false => (page - pages.start, set.clone()),
                        };
                        MassArg {
                            block,
                            page: place as u32,
                            first: part.weighed.start,
                            count: part.weighed.len() as u32,
                            token: part.tokens.start,
                            from: set.start.max(tokens.start),
                            to: set.end.min(tokens.end),
                            out: out + page as u32,
                        }
                    }));
                }
                out += forest.pages.len() as u32;
            }
        }
        masses
    }
}

/// The tokens among `tokens` to whose rows the page is open.
fn opened(job: &Job<'_>, forest: &Forest<'_>, page: &ListedPage<'_>, tokens: &Range<u32>) -> Range<u32> {
    let view = &job.views[forest.view];
    let finds = |token: &u32| page.is_open_to(job.floor(view, view.first + token) as i32 - 1);
    let start = tokens.clone().find(finds).unwrap_or(tokens.end);
    let end = (start..tokens.end).find(|token| !finds(token)).unwrap_or(tokens.end);
    start..end
}
