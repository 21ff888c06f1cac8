//! Launches of a wave: all blocks of its rows in one launch for each width of bundle (and form of packed pages), the tree level by
//! level, the ends of rows in one; where the mass of pages is wanted, that in one more.

use crate::attend::job::{Job, OnDevice};
use crate::attend_cuda::wave::{FACTORED_ROWS, Packed, Wave};
use crate::base::error::Error;
use crate::base::rope_tables::Table;
use crate::device::Device;
use crate::device::driver::arguments;
use crate::device::ring::Upload;
use crate::device::work::{Way, Work};
use pikv_core::codec::back;
use pikv_core::codec::factors::FactorScratch;
use pikv_core::codec::read::{REBUILT, Scratch};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use pikv_kernels::args::{FoldMapArg, HeadArg, LayoutArg, MassArg, PackedArg, RopeArg, TensorArg};

/// f32 of partial results and weights that a wave of items takes, unless it is a single item: 64 MiB.
pub const WAVE: u64 = 16 << 20;

/// Addresses of results.
#[derive(Clone, Copy)]
pub struct To {
    pub out: TensorArg,
    pub ends: Ends,
    pub mass: u64,
}

/// Where the ends of rows go.
#[derive(Clone, Copy)]
pub enum Ends {
    /// Log-sum-exp, exponent and sum, which the host judges.
    Host(u64),
    /// The log-sum-exp, or null, and where rows and outputs that overflow are noted.
    Device { lse: u64, faults: u64 },
}

/// The arguments that all launches of a call have in common.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    pub of: &'a LayerShape,
    pub table: Option<&'a Table>,
    pub softcap: Option<f32>,
    /// Queries that are gathered on the device, and their factor.
    pub on_device: Option<(OnDevice, f32)>,
}

impl<'a> Shape<'a> {
    pub fn of(job: &'a Job<'_>) -> Shape<'a> {
        let on_device = job.on_device.map(|on_device| (on_device, job.factor));
        Shape { of: job.shape, table: job.table.as_deref(), softcap: job.softcap, on_device }
    }
}

/// Addresses of what all kernels of a wave read.
#[derive(Clone, Copy)]
struct Lists {
    q: u64,
    pages: u64,
    live: u64,
    last: u64,
    by: u64,
    sights: u64,
    parts: u64,
    raw: u64,
}

/// A wave whose lists are on their way up: addresses, and what its launches have in common.
struct Sent<'a> {
    device: &'a Device,
    layout: LayoutArg,
    /// The rotation and its table; none where keys come rotated.
    turn: (RopeArg, u64),
    softcap: f32,
    lists: Lists,
    /// Queries to be gathered, to be folded, and the maps for that.
    gathers: u64,
    folds: (u64, u32),
    fold_maps: u64,
    /// Where queries are gathered, and where what is left of those of [`Wave::packed`] lies.
    bundles: u64,
    gathered: Vec<[u64; 2]>,
    tasks: [u64; 4],
    /// Of each of [`Wave::packed`]: queries, what scores start from, and tasks.
    packed: Vec<[u64; 3]>,
    pairs: Vec<u64>,
    backs: Vec<u64>,
    heads: u64,
    rows: u64,
    weighed: u64,
    sums: u64,
}

impl Wave<'_> {
    /// `to`: where rows that are done go, and the masses that are wanted; without it partial results are all.
    pub fn launch(
        &self,
        device: &Device,
        work: &mut Work,
        shape: &Shape<'_>,
        to: Option<(To, &[MassArg])>,
    ) -> Result<(), Error> {
        let masses = to.map_or(&[][..], |(_, masses)| masses);
        let sent = self.send(device, work, shape, masses)?;
        if let Some(queries) = shape.on_device {
            self.launch_gathers(&sent, queries)?;
        }
        self.launch_full(&sent)?;
        for (i, (of, at)) in self.packed.iter().zip(&sent.packed).enumerate() {
            let [mut folded, mut start, tasks] = *at;
            if let Some(at) = sent.gathered.get(i) {
                [folded, start] = at.map(|at| sent.bundles + 4 * at);
            }
            of.launch(device, work, shape, sent.turn, &sent.lists, [folded, start, tasks])?;
        }
        self.launch_joins(&sent, work)?;
        let Some((to, _)) = to else { return Ok(()) };
        self.launch_ends(&sent, to)?;
        if masses.is_empty() {
            return Ok(());
        }
        let Sent { layout, weighed, sums, lists: Lists { parts, raw, .. }, .. } = sent;
        let (group, count, mass) = (shape.of.group(), masses.len() as u32, to.mass);
        // SAFETY: the parameters of `mass_pages`; a page and a set of rows have one output, and stand once in a wave.
        unsafe {
            let arguments = arguments!(layout, group, sums, count, weighed, raw, parts, mass);
            device.launch(device.kernels.mass_pages, masses.len(), arguments)?;
        }
        Ok(())
    }

    /// Makes room for what the wave works in, and sends its lists up.
    fn send<'d>(
        &self,
        device: &'d Device,
        work: &mut Work,
        shape: &Shape<'_>,
        masses: &[MassArg],
    ) -> Result<Sent<'d>, Error> {
        let stream = &device.stream;
        let turn = match (&shape.of.rope, shape.table) {
            (Some(rope), Some(table)) => {
                let at = work.table(stream, table.index(), table.values(), table.capacity())?;
                (RopeArg::new(rope, table.capacity()), at)
            }
            _ => (RopeArg::NONE, 0),
        };
        let parts = work.parts(stream, self.parts)?;
        let raw = if self.raw > 0 { work.raw(stream, self.raw)? } else { 0 };
        let gathered = self.gathered(shape.on_device.is_some());
        let bundles = if gathered.floats > 0 { work.queries(stream, gathered.floats)? } else { 0 };
        let fold_maps = self.fold_maps(work, device, !gathered.folds.is_empty())?;
        let heads = self.heads(work, device)?;
        let mut upload = Upload::new();
        let (q, pages, live) = (upload.add(&self.q), upload.add(&self.pages), upload.add(&self.live));
        let gathers = upload.add(&self.gathers);
        let (folds, maps) = (upload.add(&gathered.folds), upload.add(&fold_maps));
        let (last, by) =
            if self.packed.is_empty() { (0, 0) } else { (upload.add(&self.last), upload.add(&self.by)) };
        let sights = upload.add(&self.sights);
        let tasks = self.tasks.each_ref().map(|tasks| upload.add(tasks));
        let packed = self.packed.iter();
        let packed: Vec<[u64; 3]> =
            packed.map(|of| [upload.add(&of.q), upload.add(&of.start), upload.add(&of.tasks)]).collect();
        let pairs: Vec<u64> = self.joins.pairs.iter().map(|pairs| upload.add(pairs)).collect();
        let backs: Vec<u64> = self.joins.backs.iter().map(|backs| upload.add(backs)).collect();
        let head_list = upload.add(&heads);
        let (rows, weighed, sums) = (upload.add(&self.rows), upload.add(&self.weighed), upload.add(masses));
        let base = work.send(stream, &upload)?;
        let at = |list: u64| base + list;
        let q = if shape.on_device.is_some() { bundles } else { at(q) };
        let (pages, live, last, by, sights) = (at(pages), at(live), at(last), at(by), at(sights));
        Ok(Sent {
            device,
            layout: LayoutArg::from(shape.of.layout),
            turn,
            softcap: shape.softcap.unwrap_or(0.0),
            lists: Lists { q, pages, live, last, by, sights, parts, raw },
            gathers: at(gathers),
            folds: (at(folds), gathered.folds.len() as u32),
            fold_maps: at(maps),
            bundles,
            gathered: gathered.packed,
            tasks: tasks.map(at),
            packed: packed.into_iter().map(|of| of.map(at)).collect(),
            pairs: pairs.into_iter().map(at).collect(),
            backs: backs.into_iter().map(at).collect(),
            heads: at(head_list),
            rows: at(rows),
            weighed: at(weighed),
            sums: at(sums),
        })
    }

    /// Puts queries of the caller's into bundles, and folds them through the maps of codecs.
    fn launch_gathers(&self, sent: &Sent<'_>, (from, factor): (OnDevice, f32)) -> Result<(), Error> {
        let Sent { device, layout, turn: (rope, table), bundles, gathers: list, .. } = *sent;
        let (fault, from) = (from.fault, TensorArg::from(from.q));
        let (count, kernels) = (self.gathers.len() as u32, &device.kernels);
        let (gather, fold) = match from.wide() {
            true => (kernels.gather_queries, kernels.fold_queries),
            false => (kernels.gather_halves, kernels.fold_halves),
        };
        // SAFETY: the parameters of `gather_queries` and `gather_halves`: the caller's queries, `[rows][query_heads][k_dim]`, which
        // stay until the stream has passed, and bundles that have room for all; of a bundle each row stands once.
        unsafe {
            let arguments = arguments!(layout, from, factor, rope, table, list, count, bundles, fault);
            device.launch(gather, self.gathers.len(), arguments)?;
        }
        let (list, count) = sent.folds;
        if count > 0 {
            let maps = sent.fold_maps;
            // SAFETY: the parameters of `fold_queries` and `fold_halves`, as above; the maps are on the device.
            unsafe {
                let arguments = arguments!(layout, from, factor, maps, list, count, bundles);
                device.launch(fold, count as usize, arguments)?;
            }
        }
        Ok(())
    }

    /// Attends blocks of full pages, a launch for each width of bundles.
    fn launch_full(&self, sent: &Sent<'_>) -> Result<(), Error> {
        let Sent { device, layout, turn: (rope, table), softcap, .. } = *sent;
        let Lists { q, pages, live, sights, parts, raw, .. } = sent.lists;
        for ((kernel, tasks), list) in device.kernels.attend.iter().zip(&self.tasks).zip(sent.tasks) {
            if tasks.is_empty() {
                continue;
            }
            let count = tasks.len() as u32;
            // SAFETY: the parameters of `attend_r*`. The lists are on the device, and the pages held by the views' sequences; each
            // task's part is its own, within `parts`, and so are its weights within `raw`.
            unsafe {
                let arguments =
                    arguments!(layout, q, pages, live, list, count, sights, softcap, rope, table, parts, raw);
                device.launch(*kernel, tasks.len(), arguments)?;
            }
        }
        Ok(())
    }

    /// Joins partial results, height by height, and takes those of packed pages back to the heads' channels.
    fn launch_joins(&self, sent: &Sent<'_>, work: &mut Work) -> Result<(), Error> {
        let Sent { device, layout, heads, lists: Lists { parts, .. }, .. } = *sent;
        for height in 0..self.joins.pairs.len().max(self.joins.backs.len()) {
            if let Some(count) = self.joins.pairs.get(height).map(Vec::len).filter(|n| *n > 0) {
                let (list, n) = (sent.pairs[height], count as u32);
                // SAFETY: the parameters of `merge_pairs`; at one height of a tree no part stands twice.
                unsafe { device.launch(device.kernels.merge_pairs, count, arguments!(list, n, parts))? };
            }
            if let Some(count) = self.joins.backs.get(height).map(Vec::len).filter(|n| *n > 0) {
                let (list, n) = (sent.backs[height], count as u32);
                let room = work.scratch(&device.stream, (count * back::WORK * LANES * 4) as u64)?;
                // SAFETY: the parameters of `back_rows`; each row has an output and room of its own, and its input is done.
                unsafe {
                    let arguments = arguments!(layout, heads, list, n, room, parts);
                    device.launch(device.kernels.back_rows, count, arguments)?;
                }
            }
        }
        Ok(())
    }

    /// Normalizes the rows and writes them out.
    fn launch_ends(&self, sent: &Sent<'_>, To { out, ends, .. }: To) -> Result<(), Error> {
        let Sent { device, layout, rows, lists: Lists { parts, .. }, .. } = *sent;
        let count = self.rows.len() as u32;
        match ends {
            // SAFETY: the parameters of `finish_rows`; a row of the call is one item's, and `out` and `ends` have room for all.
            Ends::Host(ends) => unsafe {
                let out = out.at;
                let arguments = arguments!(layout, rows, count, parts, out, ends);
                device.launch(device.kernels.finish_rows, self.rows.len(), arguments)?;
            },
            Ends::Device { lse, faults } => {
                let wide = out.wide();
                let kernel = if wide { device.kernels.finish_in_place } else { device.kernels.finish_halves };
                // SAFETY: the parameters of `finish_in_place` and `finish_halves`, as above; the caller's tensors stay until the stream
                // has passed, and nobody else touches them.
                unsafe {
                    let arguments = arguments!(layout, rows, count, parts, out, lse, faults);
                    device.launch(kernel, self.rows.len(), arguments)?;
                }
            }
        }
        Ok(())
    }

    /// Of the codecs of [`Wave::packed`] the maps that queries are folded through, if any are.
    fn fold_maps(&self, work: &mut Work, device: &Device, any: bool) -> Result<Vec<FoldMapArg>, Error> {
        let of = |of: &Packed<'_>| {
            let map = work.map(&device.stream, of.codec.codec.k.mapped(), Way::Back)?;
            let (narrow, cols) = (of.codec.packed.query_dim(), of.codec.packed.query_cols());
            Ok(FoldMapArg { map, narrow, cols })
        };
        self.packed.iter().filter(|_| any).map(of).collect()
    }

    /// How the values of each codec's heads come back, the maps on the device.
    fn heads(&self, work: &mut Work, device: &Device) -> Result<Vec<HeadArg>, Error> {
        let head = |codec: &&crate::codec::HeadCodec| {
            let map = work.map(&device.stream, codec.codec.v.mapped(), Way::Sum)?;
            Ok(HeadArg { packed: PackedArg::from(codec.packed.v_out()), map })
        };
        self.heads.iter().map(head).collect()
    }
}

impl Packed<'_> {
    /// `at`: queries, what scores start from, and tasks.
    fn launch(
        &self,
        device: &Device,
        work: &mut Work,
        shape: &Shape<'_>,
        (rope, table): (RopeArg, u64),
        lists: &Lists,
        [folded, start, tasks]: [u64; 3],
    ) -> Result<(), Error> {
        let stream = &device.stream;
        let (packed, count) = (PackedArg::from(self.codec.packed), self.tasks.len() as u32);
        let factored = self.codec.packed.factored();
        let of = match (self.width, factored) {
            (1, false) => size_of::<Scratch<1>>(),
            (2, false) => size_of::<Scratch<2>>(),
            (_, false) => size_of::<Scratch<4>>(),
            (_, true) => size_of::<FactorScratch<FACTORED_ROWS>>(),
        };
        let Lists { q, pages, live, last, by, sights, parts, raw } = *lists;
        let (softcap, width) = (shape.softcap.unwrap_or(0.0), self.width.ilog2() as usize);
        let whole = if shape.of.rope.is_some() { REBUILT * LANES * 4 } else { 0 };
        let rebuilt = work.scratch(stream, (self.tasks.len() * (whole + of)) as u64)?;
        let scratch = rebuilt + (self.tasks.len() * whole) as u64;
        let layout = LayoutArg::from(shape.of.layout);
        if factored {
            let q = if whole > 0 { q } else { folded };
            let map = work.map(stream, self.codec.codec.k.mapped(), Way::Back)?;
            // SAFETY: the parameters of `attend_factors`, as those of `attend_packed_r*` and `attend_rebuilt_r*`.
            unsafe {
                let arguments = arguments!(
                    packed, q, start, pages, live, last, by, tasks, count, sights, softcap, scratch, parts,
                    raw, rope, layout, map, table, rebuilt
                );
                device.launch(device.kernels.attend_factors, self.tasks.len(), arguments)?;
            }
            return Ok(());
        }
        if whole > 0 {
            let map = work.map(stream, self.codec.codec.k.mapped(), Way::Back)?;
            // SAFETY: the parameters of `attend_rebuilt_r*`, as those of `attend_packed_r*`.
            unsafe {
                let arguments = arguments!(
                    packed, layout, map, q, rope, table, pages, live, last, by, tasks, count, sights,
                    softcap, scratch, rebuilt, parts, raw
                );
                device.launch(device.kernels.attend_rebuilt[width], self.tasks.len(), arguments)?;
            }
            return Ok(());
        }
        // SAFETY: the parameters of `attend_packed_r*`. The lists are on the device, and the pages held by the views' sequences; each
        // task's part is its own, within `parts`, and so are its weights within `raw` and its scratch.
        unsafe {
            let arguments = arguments!(
                packed, folded, start, pages, live, last, by, tasks, count, sights, softcap, scratch, parts,
                raw
            );
            device.launch(device.kernels.attend_packed[width], self.tasks.len(), arguments)?;
        }
        Ok(())
    }
}
