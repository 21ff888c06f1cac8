//! Deferred writes and copies of tokens, in as few launches as their order allows.

use crate::base::error::Error;
use crate::codec::{Codec, HeadCodec, Old};
use crate::device::Device;
use crate::device::driver::arguments;
use crate::device::kernels::Kernel;
use crate::device::ring::Upload;
use crate::device::work::Direction;
use crate::memory::writes::Tokens;
use pikv_core::page::{Layout, MAX_DIM};
use pikv_core::warp::LANES;
use pikv_kernels::args::{CodecArg, CopyArg, LayoutArg, PackArg, PackedArg, TensorArg, WriteArg};
use pikv_lanes::Lanes;
use std::collections::HashSet;
use std::sync::Arc;

/// Rows of lanes in the scratch memory of one packed page.
const WORK: usize = 4 * MAX_DIM as usize;
/// Most pages of one launch of packing: their scratch memory takes 32 MiB.
const PACKED: usize = 256;

/// Deferred work of a step that is not launched yet.
#[derive(Debug)]
pub(crate) struct Pending {
    device: Arc<Device>,
    writes: Vec<WriteArg>,
    copies: Vec<CopyBatch>,
    packs: Vec<Pack>,
}

/// A page to pack, after its tokens are written.
#[derive(Debug)]
struct Pack {
    codec: HeadCodec,
    lanes: Lanes,
    layout: Layout,
    page: u64,
    fill: u32,
    packed: u64,
    way: Packing,
}

/// Implementation that packs a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    /// A kernel.
    Device,
    /// The host reads the page, and writes means, or coefficients and a basis. Both are computed in f64, which is slow on most devices, and
    /// a basis by sequential rotations, 500 a sweep, that a warp can hardly share. The host waits for the page once in 32 tokens.
    Host,
    /// The host, by the second codec, from the output of the first, with this last position: once in the life of a page.
    Again { last: u32 },
}

impl Packing {
    /// Whether packs of these two kinds can be done together.
    fn follows(self, other: Packing) -> bool {
        matches!(self, Packing::Again { .. }) == matches!(other, Packing::Again { .. })
            && (self == Packing::Device) == (other == Packing::Device)
    }
}

impl Pack {
    /// Words of the source page.
    fn words(&self) -> usize {
        match self.way {
            Packing::Again { .. } => self.codec.packed.words() as usize,
            _ => self.layout.words() as usize,
        }
    }

    /// Packs on the host.
    fn pack(&self, words: &[u32]) -> Vec<u32> {
        let Pack { codec, lanes, layout, fill, way, .. } = self;
        let room = |codec: &HeadCodec| vec![0; codec.packed.words() as usize];
        match (*way, &codec.aged) {
            (Packing::Again { last }, Some(aged)) => {
                let mut out = room(&aged.codec);
                codec.repack(*lanes, layout, Old { words, fill: *fill, last }, &mut out);
                out
            }
            _ => {
                let mut out = room(codec);
                codec.pack(*lanes, layout, words, *fill, &mut out);
                out
            }
        }
    }
}

/// Copies that do not depend on each other.
#[derive(Debug)]
struct CopyBatch {
    layout: Layout,
    list: Vec<CopyArg>,
    read: HashSet<u64>,
    written: HashSet<u64>,
}

impl Pending {
    pub fn new(device: Arc<Device>) -> Pending {
        Pending { device, writes: Vec::new(), copies: Vec::new(), packs: Vec::new() }
    }

    /// Defers the write of a row to the page at this address.
    pub fn write(&mut self, page: u64, position: u32, row: u32) {
        self.writes.push(WriteArg { page, position, row });
    }

    /// Defers the copy of a token between lanes of pages: each by its address and the lane.
    pub fn copy(&mut self, layout: &Layout, (source, from): (u64, u32), (target, to): (u64, u32)) {
        let copy = CopyArg { source, target, from, to };
        let follows = |last: &&mut CopyBatch| {
            last.layout == *layout
                && !last.written.contains(&copy.source)
                && !last.read.contains(&copy.target)
        };
        if let Some(last) = self.copies.last_mut().filter(follows) {
            last.read.insert(copy.source);
            last.written.insert(copy.target);
            last.list.push(copy);
            return;
        }
        let (read, written) = (HashSet::from([copy.source]), HashSet::from([copy.target]));
        self.copies.push(CopyBatch { layout: *layout, list: vec![copy], read, written });
    }

    pub fn pack(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        page: u64,
        fill: u32,
        packed: u64,
    ) {
        let way = if codec.packed.factored() { Packing::Host } else { Packing::Device };
        let (codec, layout) = (codec.clone(), *layout);
        self.packs.push(Pack { codec, lanes, layout, page, fill, packed, way });
    }

    /// `page`: address of the page that the codec packed, its number of tokens, and its last position.
    pub fn repack(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        (page, fill, last): (u64, u32, u32),
        packed: u64,
    ) {
        let (codec, layout, way) = (codec.clone(), *layout, Packing::Again { last });
        self.packs.push(Pack { codec, lanes, layout, page, fill, packed, way });
    }

    pub fn forget_pack(&mut self, packed: u64) {
        self.packs.retain(|pack| pack.packed != packed);
    }

    /// Drops the last copy to a lane.
    pub fn forget_copy(&mut self, target: u64, to: u32) {
        for copies in self.copies.iter_mut().rev() {
            if let Some(at) = copies.list.iter().rposition(|copy| (copy.target, copy.to) == (target, to)) {
                copies.list.remove(at);
                return;
            }
        }
    }

    /// Drops deferred writes. Copies stay, because pages copied for these writes are already in their runs.
    pub fn forget_writes(&mut self) {
        self.writes.clear();
    }

    /// Launches the writes of rows of `tokens`, together with the first copies, which read no token that is written here.
    pub fn launch_writes(&mut self, layout: &Layout, tokens: &Tokens<'_>) -> Result<(), Error> {
        let device = &self.device;
        let mut work = device.work()?;
        let mut upload = Upload::new();
        let at_list = upload.add(&self.writes);
        let first = self.copies.first().filter(|first| first.layout == *layout);
        let with: &[CopyArg] = first.map_or(&[], |first| &first.list);
        let (at_copies, copied) = (upload.add(with), with.len() as u32);
        let (arg, count) = (LayoutArg::from(*layout), self.writes.len() as u32);
        let warps = self.writes.len() + with.len();
        match *tokens {
            Tokens::Host { k, v } => {
                let (at_k, at_v) = (upload.add_wide(k), upload.add_wide(v));
                let base = work.send(&device.stream, &upload)?;
                let (k, v, list, copies) = (base + at_k, base + at_v, base + at_list, base + at_copies);
                // SAFETY: the parameters of `append`. Rows are those of the call, and pages those of the step, which holds them; a step
                // writes a lane only once. Copies read tokens of earlier steps, and write lanes of pages that hold no token of this call.
                unsafe {
                    let arguments = arguments!(arg, k, v, list, count, copies, copied);
                    device.launch(Kernel::Append, warps, arguments)?;
                }
            }
            Tokens::Device { k, v, limits, faults } => {
                let (at_limits, heads) = (upload.add(limits), limits.len() as u32);
                let base = work.send(&device.stream, &upload)?;
                let (list, limits, copies) = (base + at_list, base + at_limits, base + at_copies);
                let (k, v) = (TensorArg::from(k), TensorArg::from(v));
                let wide = [k, v].iter().all(TensorArg::wide);
                let kernel = if wide { Kernel::AppendRows } else { Kernel::AppendHalves };
                // SAFETY: the parameters of `append_rows` and `append_halves`, as those of `append`; the caller's tensors stay allocated
                // until the stream has passed.
                unsafe {
                    let arguments = arguments!(arg, k, v, list, count, heads, limits, faults, copies, copied);
                    device.launch(kernel, warps, arguments)?;
                }
            }
        }
        if copied > 0 {
            self.copies.remove(0);
        }
        self.writes.clear();
        Ok(())
    }

    /// Launches the copies in their order. Copies that could not be launched stay.
    pub fn launch_copies(&mut self) -> Result<(), Error> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let device = &self.device;
        let mut work = device.work()?;
        while let Some(copies) = self.copies.first() {
            if copies.list.is_empty() {
                self.copies.remove(0);
                continue;
            }
            let mut upload = Upload::new();
            upload.add(&copies.list);
            let list = work.send(&device.stream, &upload)?;
            let (layout, count) = (LayoutArg::from(copies.layout), copies.list.len() as u32);
            // SAFETY: the parameters of `copy_tokens`. The step's sequences hold the pages; no copy of the list reads a page that another
            // one writes.
            unsafe {
                device.launch(Kernel::CopyTokens, copies.list.len(), arguments!(layout, list, count))?;
            }
            self.copies.remove(0);
        }
        Ok(())
    }

    /// Packs pages in their order, after their tokens are written. Packs that failed stay.
    pub fn launch_packs(&mut self) -> Result<(), Error> {
        let device = &self.device;
        while let Some(first) = self.packs.first() {
            let (layout, way) = (first.layout, first.way);
            let alike = |pack: &&Pack| pack.layout == layout && pack.way.follows(way);
            let same = self.packs.iter().take_while(alike).count().min(PACKED);
            let mut work = device.work()?;
            let stream = &device.stream;
            if way != Packing::Device {
                let packs = &self.packs[..same];
                let places: Vec<_> = packs.iter().map(|pack| (pack.page, pack.words())).collect();
                let packed: Vec<Vec<u32>> = work.fetch_all(stream, &places, |mut words| {
                    let next = |pack: &Pack| pack.pack(words.split_off(..pack.words()).unwrap_or_default());
                    packs.iter().map(next).collect()
                })?;
                let targets: Vec<_> =
                    packs.iter().zip(&packed).map(|(pack, words)| (pack.packed, &words[..])).collect();
                work.write(stream, &targets)?;
                self.packs.drain(..same);
                continue;
            }
            let (mut codecs, mut list) = (Vec::new(), Vec::new());
            for Pack { codec, page, fill, packed, .. } in &self.packs[..same] {
                let HeadCodec { codec: Codec { k, v }, packed: form, .. } = codec;
                let (k, v) = (
                    work.map(stream, k.mapped(), Direction::Store)?,
                    work.map(stream, v.mapped(), Direction::Store)?,
                );
                let codec = CodecArg { packed: PackedArg::from(*form), k, v };
                let at = codecs.iter().position(|known| *known == codec).unwrap_or_else(|| {
                    codecs.push(codec);
                    codecs.len() - 1
                });
                list.push(PackArg { page: *page, packed: *packed, fill: *fill, codec: at as u32 });
            }
            let room = work.scratch(stream, (same * WORK * LANES * 4) as u64)?;
            let mut upload = Upload::new();
            let (codecs, list) = (upload.add(&codecs), upload.add(&list));
            let base = work.send(stream, &upload)?;
            let (layout, codecs, list, count) =
                (LayoutArg::from(layout), base + codecs, base + list, same as u32);
            // SAFETY: the parameters of `pack_pages`. The step's sequences hold the pages; a page that is packed takes no more tokens, and
            // has a target page of its own.
            unsafe {
                device.launch(Kernel::PackPages, same, arguments!(layout, codecs, list, count, room))?;
            }
            self.packs.drain(..same);
        }
        Ok(())
    }
}
