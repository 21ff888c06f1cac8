//! The routines that run on lanes, one by one, on every lanes of the machine.
//!
//! `cargo bench -p pikv-benches --bench kernels [-- FILTER]`
//!
//! A block is 8 full pages (256 tokens) of 128 channels under 4 query rows. Each routine's result is compared with the
//! portable lanes' before it is timed; on a CUDA device too, where there is one (512 blocks in a launch, by its events). Rates are KV bytes for attention, stored bytes for appending.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pikv::lanes::Lanes;
use pikv::shape::PAGE;
use pikv::{Dtype, Layout, Position};
use pikv_core::attend::{BLOCK, Looks, Sight, attend_block};
use pikv_core::full::{Full, PageRef, Query};
use pikv_core::merge::{Partial, merge};
use pikv_core::warp::{Kernel, LANES, Warp};
use pikv_core::{math, rope::Rotation};
use pikv_kernels::args::{JoinArg, LayoutArg, RopeArg, RowArg, SightArg, TaskArg, WriteArg};
use std::hint::black_box;

mod device;
#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use device::{Gpu, Memory, THREADS, arguments};

const DIM: u32 = 128;
const ROWS: usize = 4;
/// Blocks of a tree of partial results, and half the blocks of a node of each level.
const TREE: usize = 16;
const HALVES: [usize; 4] = [1, 2, 4, 8];

/// `exp2` and `ln` of 32 lanes at a time.
struct Functions<'a>(&'a mut [[f32; LANES]]);

impl Kernel for Functions<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        for row in self.0 {
            let x = w.load_f(row);
            w.store(w.add(math::exp2_nonpos(w, w.mul(x, x)), math::ln(w, w.mul(x, x))), row);
        }
    }
}

struct Attend<'a> {
    layout: &'a Layout,
    pages: &'a [PageRef<'a>],
    q: &'a [[f32; ROWS]],
    rotation: Option<Rotation<'a>>,
    out: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let all = Sight { floor: 0, lo: 0, sinks: 0, hi: i32::MAX - 1 };
        let query = Query { q: self.q, k_dim: DIM as usize, rotation: self.rotation };
        let looks = Looks { sight: [all; ROWS], softcap: None };
        let mut form = Full { layout: self.layout, pages: self.pages, next: [&[]; 2], query };
        let mut out = Partial::new(self.out, ROWS, self.layout.acc_rows());
        attend_block(w, &mut form, &looks, &mut out, 0, None);
    }
}

struct Merge<'a>(&'a Layout, &'a mut [f32], &'a mut [f32]);

impl Kernel for Merge<'_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(self, w: W) {
        let acc_rows = self.0.acc_rows();
        merge(w, &mut Partial::new(self.1, ROWS, acc_rows), &Partial::new(self.2, ROWS, acc_rows));
    }
}

fn pages(layout: &Layout) -> Vec<Vec<u32>> {
    let mut noise = machine::noise(5);
    let mut row = || (&mut noise).take(DIM as usize).collect::<Vec<f32>>();
    (0..BLOCK as u32)
        .map(|page| {
            let mut words = vec![0; layout.words() as usize];
            for lane in 0..PAGE {
                let position = Position(page * PAGE + lane);
                layout.write(&mut words, lane, position, &row(), &row()).expect("noise is finite");
            }
            words
        })
        .collect()
}

fn same(name: &str, got: &[f32], want: &[f32]) {
    assert!(
        got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()),
        "{name} differs from the portable lanes"
    );
}

fn functions(c: &mut Criterion) {
    let mut group = c.benchmark_group("exp2 and ln");
    let data: Vec<[f32; LANES]> = machine::noise(2).collect_rows(64);
    let mut want = data.clone();
    Lanes::Portable.run(Functions(&mut want));
    group.throughput(Throughput::Elements(data.len() as u64 * LANES as u64));
    for lanes in Lanes::available() {
        let mut got = data.clone();
        lanes.run(Functions(&mut got));
        same("exp2 and ln", got.as_flattened(), want.as_flattened());
        group.bench_function(lanes.name(), |b| {
            b.iter(|| {
                got.copy_from_slice(&data);
                lanes.run(Functions(black_box(&mut got)));
            });
        });
    }
}

trait CollectRows {
    fn collect_rows(self, n: usize) -> Vec<[f32; LANES]>;
}

impl<I: Iterator<Item = f32>> CollectRows for I {
    fn collect_rows(mut self, n: usize) -> Vec<[f32; LANES]> {
        (0..n).map(|_| std::array::from_fn(|_| self.next().unwrap_or(0.0))).collect()
    }
}

fn attention(c: &mut Criterion) {
    let q: Vec<[f32; ROWS]> =
        (0..DIM).map(|i| std::array::from_fn(|r| ((i * 7 + r as u32) as f32).sin())).collect();
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
            let mut want = vec![0.0; Partial::len(ROWS, layout.acc_rows())];
            run(Lanes::Portable, &mut want);
            group.throughput(Throughput::Bytes(BLOCK as u64 * layout.bytes()));
            for lanes in Lanes::available() {
                let mut got = vec![0.0; want.len()];
                run(lanes, &mut got);
                same(name, &got, &want);
                group.bench_function(BenchmarkId::new(lanes.name(), dtype.name()), |b| {
                    b.iter(|| run(lanes, black_box(&mut got)));
                });
            }
        }
    }
}

fn merging(c: &mut Criterion) {
    let layout = Layout::new(DIM, Dtype::F32);
    let mut group = c.benchmark_group("merge");
    let data: Vec<f32> =
        machine::noise(3).map(|x| (x * 8.0).round()).take(Partial::len(ROWS, layout.acc_rows())).collect();
    let mut right = data.clone();
    let mut run = |lanes: Lanes, left: &mut [f32]| lanes.run(Merge(&layout, left, &mut right));
    let mut want = data.clone();
    run(Lanes::Portable, &mut want);
    for lanes in Lanes::available() {
        let mut got = data.clone();
        run(lanes, &mut got);
        same("merge", &got, &want);
        group.bench_function(lanes.name(), |b| {
            b.iter(|| {
                got.copy_from_slice(&data);
                run(lanes, black_box(&mut got));
            });
        });
    }
}

fn writing(c: &mut Criterion) {
    let mut group = c.benchmark_group("write a token");
    for dtype in Dtype::ALL {
        let layout = Layout::new(DIM, dtype);
        let (mut words, row) =
            (vec![0; layout.words() as usize], machine::noise(1).take(DIM as usize).collect::<Vec<_>>());
        layout.write(&mut words, 3, Position(3), &row, &row).expect("noise is finite");
        let mut back = vec![0.0; DIM as usize];
        layout.read_key(&words, 3, &mut back);
        assert!(
            back.iter()
                .zip(&row)
                .all(|(b, x)| Some(b.to_bits()) == dtype.encode(*x).map(|e| dtype.decode(e).to_bits()))
        );
        group.throughput(Throughput::Bytes(u64::from(2 * DIM * dtype.bits() / 8)));
        let mut lane = 0;
        group.bench_function(dtype.name(), |b| {
            b.iter(|| {
                lane = (lane + 1) % PAGE;
                layout.write(black_box(&mut words), lane, Position(lane), &row, &row)
            });
        });
    }
}

/// Blocks that a device attends in one launch, each of pages of its own: more than its caches hold.
const BLOCKS: usize = 512;

/// The routines that are kernels, on the first CUDA device, timed by its events. Results are compared before.
fn on_the_device(c: &mut Criterion) {
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(why) => return println!("no CUDA device, so no figures of one: {why}"),
    };
    let blocks = if gpu.clock { BLOCKS } else { 3 };
    println!(
        "{}{}",
        gpu.name,
        if gpu.clock { "" } else { ", which measures no time: results are compared only" }
    );
    let q: Vec<[f32; ROWS]> =
        (0..DIM).map(|i| std::array::from_fn(|r| ((i * 7 + r as u32) as f32).sin())).collect();
    let rope = pikv::Rope::new(1e4, DIM).pairs(pikv::shape::Pairs::Halves);
    let capacity = PAGE * BLOCK as u32;
    let table: Vec<f32> = (0..DIM * capacity).map(|i| (i as f32).cos()).collect();
    let all = Sight { floor: 0, lo: 0, sinks: 0, hi: i32::MAX - 1 };
    let sights = gpu.put(&[SightArg::from(all); ROWS]);
    let (queries, turns) = (gpu.put(q.as_flattened()), gpu.put(&table));
    for dtype in Dtype::ALL {
        let layout = Layout::new(DIM, dtype);
        let arg = LayoutArg::from(layout);
        let len = Partial::len(ROWS, layout.acc_rows());
        let words = pages(&layout);
        let memory = gpu.put(&words.concat().repeat(blocks));
        let page = |i: usize| memory.as_device_ptr().as_raw() + i as u64 * layout.bytes();
        let list = gpu.put(&(0..blocks * BLOCK).map(page).collect::<Vec<u64>>());
        let live = gpu.put(&vec![u32::MAX; blocks * BLOCK]);
        let task = |i: usize| TaskArg {
            part: (i * len) as u64,
            raw: 0,
            q: 0,
            pages: (i * BLOCK) as u32,
            count: BLOCK as u32,
            sights: 0,
        };
        let tasks = gpu.put(&(0..blocks).map(task).collect::<Vec<_>>());
        let parts = gpu.put(&vec![0.0f32; blocks * len]);
        let at = |memory: &Memory| memory.as_device_ptr().as_raw();
        let (q_at, list_at, live_at, tasks_at) = (at(&queries), at(&list), at(&live), at(&tasks));
        let (sights_at, table_at, parts_at) = (at(&sights), at(&turns), at(&parts));
        let (count, softcap, none) = (blocks as u32, 0.0f32, 0u64);
        for (name, turned) in [("attend block", false), ("attend block, keys turned", true)] {
            let turn = if turned { RopeArg::new(&rope, capacity) } else { RopeArg::NONE };
            let arguments = arguments!(
                arg, q_at, list_at, live_at, tasks_at, count, sights_at, softcap, turn, table_at, parts_at,
                none
            );
            // SAFETY: the parameters of the kernel, over lists and memory as it is promised them.
            unsafe { gpu.run("attend_r4", blocks, arguments) };
            let refs: Vec<PageRef<'_>> =
                words.iter().map(|words| PageRef { words, live: u32::MAX }).collect();
            let rotation = turned.then_some(Rotation { rope, table: &table, capacity });
            let mut want = vec![0.0; len];
            Lanes::Portable.run(Attend { layout: &layout, pages: &refs, q: &q, rotation, out: &mut want });
            same(name, &gpu.floats(&parts, len), &want);
            same(name, &gpu.floats(&parts, blocks * len)[(blocks - 1) * len..], &want);
            let bytes = (blocks * BLOCK) as u64 * layout.bytes();
            measure(c, &gpu, name, dtype, Throughput::Bytes(bytes), "attend_r4", blocks, arguments);
        }
        let (joins, bounds, rows) = trees(blocks, len, layout.acc_rows());
        let (warps, [joins, bounds, rows]) =
            (THREADS as usize / LANES * rows.len(), [gpu.put(&joins), gpu.put(&bounds), gpu.put(&rows)]);
        let (rows_at, joins_at, bounds_at) = (at(&rows), at(&joins), at(&bounds));
        let arguments = arguments!(arg, rows_at, joins_at, bounds_at, none, none, parts_at);
        let mut host = gpu.floats(&parts, TREE * len);
        for half in HALVES {
            for pair in host.chunks_mut(2 * half * len) {
                let (left, right) = pair.split_at_mut(half * len);
                Lanes::Portable.run(Merge(&layout, &mut left[..len], &mut right[..len]));
            }
        }
        // SAFETY: as above; the parts are those that were just computed.
        unsafe { gpu.run("join_rows", warps, arguments) };
        same("merge", &gpu.floats(&parts, len), &host[..len]);
        let bytes = (blocks * 3 * len * 4) as u64;
        measure(c, &gpu, "merge", dtype, Throughput::Bytes(bytes), "join_rows", warps, arguments);
        // A token of each page anew, from the same row.
        let row = machine::noise(1).take(DIM as usize).collect::<Vec<_>>();
        let mut want = words[0].clone();
        layout.write(&mut want, 3, Position(3), &row, &row).expect("noise is finite");
        let row = gpu.put(&row);
        let write = |i: usize| WriteArg { page: page(i), position: 3, row: 0 };
        let writes = gpu.put(&(0..blocks * BLOCK).map(write).collect::<Vec<_>>());
        let (row_at, writes_at, count) = (at(&row), at(&writes), (blocks * BLOCK) as u32);
        let copied = 0u32;
        let arguments = arguments!(arg, row_at, row_at, writes_at, count, none, copied);
        // SAFETY: as above.
        unsafe { gpu.run("append", blocks * BLOCK, arguments) };
        let got = gpu.floats(&memory, want.len());
        assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == *want), "a token differs");
        let bytes = (blocks * BLOCK) as u64 * u64::from(2 * DIM * dtype.bits() / 8);
        measure(
            c,
            &gpu,
            "write a token",
            dtype,
            Throughput::Bytes(bytes),
            "append",
            blocks * BLOCK,
            arguments,
        );
    }
}

/// Trees over `blocks` partial results, `len` f32 each: their joins, the bounds of their levels, and their rows.
fn trees(blocks: usize, len: usize, acc_rows: u32) -> (Vec<JoinArg>, Vec<u32>, Vec<RowArg>) {
    let (mut joins, mut bounds, mut list) = (Vec::new(), Vec::new(), Vec::new());
    let (rows, levels, head) = (ROWS as u32, HALVES.len() as u32, JoinArg::MERGE);
    let part = |block: usize| (block * len) as u64;
    for first in (0..blocks).step_by(TREE) {
        let row = |row| RowArg {
            part: part(first),
            rows,
            row,
            out: 0,
            bounds: bounds.len() as u32,
            levels,
            pad: 0,
        };
        list.extend((0..rows).map(row));
        for half in HALVES {
            bounds.push(joins.len() as u32);
            let join = |left| JoinArg { left: part(left), right: part(left + half), acc_rows, head };
            joins.extend((first..first + TREE).step_by(2 * half).map(join));
        }
        bounds.push(joins.len() as u32);
    }
    (joins, bounds, list)
}

/// Times one kernel, if the device can.
#[allow(clippy::too_many_arguments)]
fn measure(
    c: &mut Criterion,
    gpu: &Gpu,
    group: &str,
    dtype: Dtype,
    throughput: Throughput,
    kernel: &str,
    warps: usize,
    arguments: &[*const std::ffi::c_void],
) {
    if !gpu.clock {
        return;
    }
    let mut group = c.benchmark_group(group);
    group.throughput(throughput);
    group.bench_function(BenchmarkId::new("cuda", dtype.name()), |b| {
        // SAFETY: what was just run, again: the kernel reads and writes the same places.
        b.iter_custom(|n| unsafe { gpu.time(kernel, warps, arguments, n) }.unwrap_or_default());
    });
}

criterion_group!(kernels, functions, attention, merging, writing, on_the_device);
criterion_main!(kernels);
