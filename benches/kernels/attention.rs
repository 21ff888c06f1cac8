//! Attention over a block of pages, merges of partial results, and sums of weights.

use super::{CollectRows, DIM, ROWS, on_all_lanes, pages};
use crate::machine;
use criterion::{Criterion, Throughput};
use pikv::codec::Code;
use pikv::lanes::Lanes;
use pikv::shape::PAGE;
use pikv::{Dtype, Layout};
use pikv_core::attend::{BLOCK, Looks, Sight, attend_block};
use pikv_core::codec::packed::Packed;
use pikv_core::codec::read::{Folded, PackedPages, PackedRef, Scratch};
use pikv_core::full::{Full, PageRef, Query};
use pikv_core::merge::{Partial, merge};
use pikv_core::rope::Rotation;
use pikv_core::warp::{Kernel, LANES, Warp};
use pikv_lanes::mass::Sum;
use pikv_lanes::pack::{Channels, pack};

/// Rows that see every token.
pub const ALL: Sight = Sight { floor: 0, lo: 0, sinks: 0, hi: i32::MAX - 1 };

/// Attention of [`ROWS`] rows over full pages.
pub struct Attend<'a> {
    pub layout: &'a Layout,
    pub pages: &'a [PageRef<'a>],
    /// `[DIM]`
    pub q: &'a [[f32; ROWS]],
    pub rotation: Option<Rotation<'a>>,
    /// The partial result.
    pub out: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let query = Query { q: self.q, k_dim: DIM as usize, rotation: self.rotation };
        let looks = Looks { sight: [ALL; ROWS], softcap: None };
        let mut form = Full { layout: self.layout, pages: self.pages, next: [&[]; 2], query };
        let mut out = Partial::new(self.out, ROWS, self.layout.acc_rows());
        attend_block(w, &mut form, &looks, &mut out, 0, None);
    }
}

/// Merges the second partial result into the first.
pub struct Merge<'a>(pub &'a Layout, pub &'a mut [f32], pub &'a mut [f32]);

impl Kernel for Merge<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let acc_rows = self.0.acc_rows();
        merge(w, &mut Partial::new(self.1, ROWS, acc_rows), &Partial::new(self.2, ROWS, acc_rows));
    }
}

/// A query of each row, `[DIM]`.
pub fn queries() -> Vec<[f32; ROWS]> {
    (0..DIM).map(|i| std::array::from_fn(|r| ((i * 7 + r as u32) as f32).sin())).collect()
}

/// A block of full pages, with keys that are rotated before they are stored and when they are read.
pub fn full(c: &mut Criterion) {
    let q = queries();
    let rope = pikv::Rope::new(1e4, DIM).pairs(pikv::shape::Pairs::Halves);
    let capacity = PAGE * BLOCK as u32;
    let table: Vec<f32> = (0..DIM * capacity).map(|i| (i as f32).cos()).collect();
    for (name, turned) in [("attend block", false), ("attend block, keys turned", true)] {
        let mut group = c.benchmark_group(name);
        for dtype in Dtype::ALL {
            let layout = Layout::new(DIM, dtype);
            let words = pages(&layout);
            let pages: Vec<PageRef<'_>> =
                words.iter().map(|words| PageRef { words, live: u32::MAX }).collect();
            let rotation = turned.then_some(Rotation { rope, table: &table, capacity });
            let run = |lanes: Lanes, out: &mut [f32]| {
                lanes.run(Attend { layout: &layout, pages: &pages, q: &q, rotation, out });
            };
            group.throughput(Throughput::Bytes(BLOCK as u64 * layout.bytes()));
            on_all_lanes(&mut group, dtype.name(), Partial::len(ROWS, layout.acc_rows()), run);
        }
    }
}

/// Attention of [`ROWS`] rows over packed pages.
struct AttendPacked<'a> {
    packed: &'a Packed,
    pages: &'a [PackedRef<'a>],
    /// `[ROWS][DIM / 32]`
    rows: &'a [[f32; LANES]],
    scratch: &'a mut Scratch<ROWS>,
    out: &'a mut [f32],
}

impl Kernel for AttendPacked<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let looks = Looks { sight: [ALL; ROWS], softcap: None };
        let query = Folded { rows: self.rows, start: [0.0; ROWS], whole: None };
        let mut form = PackedPages::new(self.packed, self.pages, &[], query, self.scratch, &mut []);
        let mut out = Partial::new(self.out, ROWS, self.packed.acc_rows());
        attend_block(w, &mut form, &looks, &mut out, 0, None);
    }
}

/// A block of packed pages. Codes of one width for K and V.
pub fn packed(c: &mut Criterion) {
    let mut group = c.benchmark_group("attend block, packed");
    let mut noise = machine::noise(7);
    let mut channels = || (&mut noise).collect_rows(DIM as usize);
    let rows = machine::noise(11).collect_rows(ROWS * DIM as usize / LANES);
    for code in [Code::Int8, Code::Int4, Code::Int2, Code::E4m3, Code::Mxfp4] {
        let packed = Packed::new(DIM, DIM, code, code);
        let positions: Vec<u32> = (0..PAGE).collect();
        let words: Vec<Vec<u32>> = (0..BLOCK)
            .map(|_| {
                let mut words = vec![0; packed.words() as usize];
                let [mut k, mut v] = [channels(), channels()];
                let [k, v] = [&mut k, &mut v].map(|rows| Channels { rows, map: None });
                pack(Lanes::Portable, &packed, &positions, k, v, &mut words);
                words
            })
            .collect();
        let pages: Vec<PackedRef<'_>> = words
            .iter()
            .map(|words| PackedRef { words, live: u32::MAX, last: PAGE - 1, by: PAGE - 1 })
            .collect();
        let mut scratch = Scratch::default();
        let run = |lanes: Lanes, out: &mut [f32]| {
            lanes.run(AttendPacked {
                packed: &packed,
                pages: &pages,
                rows: &rows,
                scratch: &mut scratch,
                out,
            });
        };
        group.throughput(Throughput::Bytes(BLOCK as u64 * packed.bytes()));
        on_all_lanes(&mut group, code.name(), Partial::len(ROWS, packed.acc_rows()), run);
    }
}

/// Partial results of two blocks, merged.
pub fn merging(c: &mut Criterion) {
    let layout = Layout::new(DIM, Dtype::F32);
    let mut group = c.benchmark_group("merge");
    let data: Vec<f32> =
        machine::noise(3).map(|x| (x * 8.0).round()).take(Partial::len(ROWS, layout.acc_rows())).collect();
    let mut right = data.clone();
    on_all_lanes(&mut group, "", data.len(), |lanes, left: &mut [f32]| {
        left.copy_from_slice(&data);
        lanes.run(Merge(&layout, left, &mut right));
    });
}

/// Softmax weights of the pages of a block, summed over the rows of a token.
pub fn masses(c: &mut Criterion) {
    let mut group = c.benchmark_group("mass of a block");
    let raw = machine::noise(9).map(f32::abs).collect_rows(ROWS * BLOCK);
    let factors = [0.5, 0.25, 0.125, 0.0625];
    group.throughput(Throughput::Bytes(size_of_val(&*raw) as u64));
    on_all_lanes(&mut group, "", BLOCK, |lanes, mass: &mut [[f32; LANES]]| {
        Sum { raw: &raw, factors: &factors, mass, sets: 1, to: &[(0, true)] }.run(lanes);
    });
}
