//! Launches of a wave: one for all blocks of each width of bundles (and form of packed pages), one for the trees and outputs of all rows, and
//! one for the masses of pages if they are wanted.

use crate::attend::job::{DeviceQueries, Job};
use crate::attend_cuda::wave::{FACTORED_ROWS, Packed, Wave};
use crate::base::error::Error;
use crate::base::rope_tables::Table;
use crate::device::Device;
use crate::device::driver::arguments;
use crate::device::kernels::Kernel;
use crate::device::ring::Upload;
use crate::device::work::{Direction, WorkBuffers};
use pikv_core::codec::back;
use pikv_core::codec::factors::FactorScratch;
use pikv_core::codec::read::{REBUILT, Scratch};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use pikv_kernels::JOINING;
use pikv_kernels::args::{FoldMapArg, HeadArg, LayoutArg, MassArg, PackedArg, RopeArg, TensorArg};

/// f32 of partial results and weights in a wave, unless it has a single item: 64 MiB.
pub const WAVE: u64 = 16 << 20;

/// Addresses of results.
#[derive(Clone, Copy)]
pub struct To {
    pub out: TensorArg,
    pub ends: Ends,
    pub mass: u64,
}

/// Where ends of rows are written.
#[derive(Clone, Copy)]
pub enum Ends {
    /// Log-sum-exp, exponent and sum, which the host checks.
    Host(u64),
    /// Log-sum-exp (or null), and the words that record rows and outputs that overflow.
    Device { lse: u64, faults: u64 },
}

/// Arguments of all launches of a call.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    pub of: &'a LayerShape,
    pub table: Option<&'a Table>,
    pub softcap: Option<f32>,
    /// Queries on the device, and their factor.
    pub on_device: Option<(DeviceQueries, f32)>,
}

impl<'a> Shape<'a> {
    pub fn of(job: &'a Job<'_>) -> Shape<'a> {
        let on_device = job.on_device.map(|on_device| (on_device, job.factor));
        Shape { of: job.shape, table: job.table.as_deref(), softcap: job.softcap, on_device }
    }
}

/// Addresses of lists of all kernels in a wave.
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

/// A wave whose lists are uploaded: addresses, and arguments of its launches.
struct Sent<'a> {
    device: &'a Device,
    layout: LayoutArg,
    /// The rotation and its table; none for layers that receive rotated keys.
    turn: (RopeArg, u64),
    softcap: f32,
    lists: Lists,
    /// Lists of queries to gather and to fold, and maps for the folds.
    gathers: u64,
    folds: (u64, u32),
    fold_maps: u64,
    /// Address of the gathered queries, and offsets of the folded queries for each entry of [`Wave::packed`].
    bundles: u64,
    gathered: Vec<[u64; 2]>,
    tasks: [u64; 4],
    /// For each entry of [`Wave::packed`]: queries, constant terms of scores, and tasks.
    packed: Vec<[u64; 3]>,
    /// Rows, their joins, the bounds of levels, and the heads of maps.
    joins: [u64; 4],
    weighed: u64,
    sums: u64,
}

impl Wave<'_> {
    /// `to`: addresses of results, and the sums of masses; `None` to compute only partial results.
    pub fn launch(
        &self,
        device: &Device,
        work: &mut WorkBuffers,
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
        self.launch_rows(&sent, work, to.map(|(to, _)| to))?;
        let Some((to, _)) = to else { return Ok(()) };
        if masses.is_empty() {
            return Ok(());
        }
        let Sent { layout, weighed, sums, lists: Lists { parts, raw, .. }, .. } = sent;
        let (group, count, mass) = (shape.of.group(), masses.len() as u32, to.mass);
        // SAFETY: the parameters of `mass_pages`; each (page, set of rows) has its own output, and occurs once in a wave.
        unsafe {
            let arguments = arguments!(layout, group, sums, count, weighed, raw, parts, mass);
            device.launch(Kernel::MassPages, masses.len(), arguments)?;
        }
        Ok(())
    }

    /// Reserves the buffers of the wave, and uploads its lists.
    fn send<'d>(
        &self,
        device: &'d Device,
        work: &mut WorkBuffers,
        shape: &Shape<'_>,
        masses: &[MassArg],
    ) -> Result<Sent<'d>, Error> {
        let stream = &device.stream;
        let turn = match (&shape.of.rope, shape.table) {
            (Some(rope), Some(table)) => {
                let at = work.table(stream, table)?;
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
        let (joins, bounds) = (upload.add(&self.joins.list), upload.add(&self.joins.bounds));
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
            joins: [rows, joins, bounds, head_list].map(at),
            weighed: at(weighed),
            sums: at(sums),
        })
    }

    /// Gathers the caller's queries in bundles, and folds them through the maps of codecs.
    fn launch_gathers(&self, sent: &Sent<'_>, (from, factor): (DeviceQueries, f32)) -> Result<(), Error> {
        let Sent { device, layout, turn: (rope, table), bundles, gathers: list, .. } = *sent;
        let (fault, from) = (from.fault, TensorArg::from(from.q));
        let count = self.gathers.len() as u32;
        let (gather, fold) = match from.wide() {
            true => (Kernel::GatherQueries, Kernel::FoldQueries),
            false => (Kernel::GatherHalves, Kernel::FoldHalves),
        };
        // SAFETY: the parameters of `gather_queries` and `gather_halves`: the caller's queries, `[rows][query_heads][k_dim]`, stay
        // allocated until the stream has passed, and the bundles have room for all; each row of a bundle occurs once.
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

    /// Attention of blocks of full pages, a launch for each width of bundles.
    fn launch_full(&self, sent: &Sent<'_>) -> Result<(), Error> {
        let Sent { device, layout, turn: (rope, table), softcap, .. } = *sent;
        let Lists { q, pages, live, sights, parts, raw, .. } = sent.lists;
        for ((kernel, tasks), list) in Kernel::ATTEND.into_iter().zip(&self.tasks).zip(sent.tasks) {
            if tasks.is_empty() {
                continue;
            }
            let count = tasks.len() as u32;
            // SAFETY: the parameters of `attend_r*`. The lists are on the device, and the views' sequences hold the pages; each
            // task has its own part within `parts`, and its own weights within `raw`.
            unsafe {
                let arguments =
                    arguments!(layout, q, pages, live, list, count, sights, softcap, rope, table, parts, raw);
                device.launch(kernel, tasks.len(), arguments)?;
            }
        }
        Ok(())
    }

    /// Joins the partial results of each row, a block a row, and writes the row to its output if there is one.
    fn launch_rows(&self, sent: &Sent<'_>, work: &mut WorkBuffers, to: Option<To>) -> Result<(), Error> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let Sent { device, layout, joins: [rows, joins, bounds, heads], lists: Lists { parts, .. }, .. } =
            *sent;
        let (blocks, warps) = (self.rows.len(), self.joins.widest.next_power_of_two().clamp(1, JOINING));
        let room = (blocks * warps * back::WORK * LANES * 4) as u64;
        let room = if self.joins.maps { work.scratch(&device.stream, room)? } else { 0 };
        match to {
            // SAFETY: the parameters of `join_rows`. The lists are on the device; at one level of a tree no part occurs twice as an output,
            // and its inputs are complete; bundles have parts of their own, and each warp its own working memory.
            None => unsafe {
                device.launch_blocks(
                    Kernel::JoinRows,
                    blocks,
                    warps,
                    arguments!(layout, rows, joins, bounds, heads, room, parts),
                )?;
            },
            // SAFETY: the parameters of `finish_rows`, as above; each row of the call belongs to one item, and `out` and `ends` have room
            // for all.
            Some(To { out, ends: Ends::Host(ends), .. }) => unsafe {
                let out = out.at;
                let arguments = arguments!(layout, rows, joins, bounds, heads, room, parts, out, ends);
                device.launch_blocks(Kernel::FinishRows, blocks, warps, arguments)?;
            },
            Some(To { out, ends: Ends::Device { lse, faults }, .. }) => {
                let kernel = if out.wide() { Kernel::FinishInPlace } else { Kernel::FinishHalves };
                // SAFETY: the parameters of `finish_in_place` and `finish_halves`, as above; the caller's tensors stay allocated until the
                // stream has passed, and nothing else accesses them.
                unsafe {
                    let arguments =
                        arguments!(layout, rows, joins, bounds, heads, room, parts, out, lse, faults);
                    device.launch_blocks(kernel, blocks, warps, arguments)?;
                }
            }
        }
        Ok(())
    }

    /// The maps through which queries are folded, for the codecs of [`Wave::packed`]; empty unless `any`.
    fn fold_maps(
        &self,
        work: &mut WorkBuffers,
        device: &Device,
        any: bool,
    ) -> Result<Vec<FoldMapArg>, Error> {
        let of = |of: &Packed<'_>| {
            let map = work.map(&device.stream, of.codec.codec.k.mapped(), Direction::Back)?;
            let (narrow, cols) = (of.codec.packed.query_dim(), of.codec.packed.query_cols());
            Ok(FoldMapArg { map, narrow, cols })
        };
        self.packed.iter().filter(|_| any).map(of).collect()
    }

    /// For each codec, the layout and the map of its values.
    fn heads(&self, work: &mut WorkBuffers, device: &Device) -> Result<Vec<HeadArg>, Error> {
        let head = |codec: &&crate::codec::HeadCodec| {
            let map = work.map(&device.stream, codec.codec.v.mapped(), Direction::Sum)?;
            Ok(HeadArg { packed: PackedArg::from(codec.packed.v_out()), map })
        };
        self.heads.iter().map(head).collect()
    }
}

impl Packed<'_> {
    /// `at`: queries, constant terms of scores, and tasks.
    fn launch(
        &self,
        device: &Device,
        work: &mut WorkBuffers,
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
            let map = work.map(stream, self.codec.codec.k.mapped(), Direction::Back)?;
            // SAFETY: the parameters of `attend_factors`, as those of `attend_packed_r*` and `attend_rebuilt_r*`.
            unsafe {
                let arguments = arguments!(
                    packed, q, start, pages, live, last, by, tasks, count, sights, softcap, scratch, parts,
                    raw, rope, layout, map, table, rebuilt
                );
                device.launch(Kernel::AttendFactors, self.tasks.len(), arguments)?;
            }
            return Ok(());
        }
        if whole > 0 {
            let map = work.map(stream, self.codec.codec.k.mapped(), Direction::Back)?;
            // SAFETY: the parameters of `attend_rebuilt_r*`, as those of `attend_packed_r*`.
            unsafe {
                let arguments = arguments!(
                    packed, layout, map, q, rope, table, pages, live, last, by, tasks, count, sights,
                    softcap, scratch, rebuilt, parts, raw
                );
                device.launch(Kernel::ATTEND_REBUILT[width], self.tasks.len(), arguments)?;
            }
            return Ok(());
        }
        // SAFETY: the parameters of `attend_packed_r*`. The lists are on the device, and the views' sequences hold the pages; each
        // task has its own part within `parts`, its own weights within `raw`, and its own scratch memory.
        unsafe {
            let arguments = arguments!(
                packed, folded, start, pages, live, last, by, tasks, count, sights, softcap, scratch, parts,
                raw
            );
            device.launch(Kernel::ATTEND_PACKED[width], self.tasks.len(), arguments)?;
        }
        Ok(())
    }
}
