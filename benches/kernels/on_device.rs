//! The kernels on a CUDA device, timed by its events.

use super::attention::{ALL, Attend, Merge, queries};
use super::device::{Gpu, Memory, THREADS, arguments};
use super::{DIM, ROWS, pages, same};
use crate::machine;
use criterion::{BenchmarkId, Criterion, Throughput};
use pikv::lanes::Lanes;
use pikv::shape::PAGE;
use pikv::{Dtype, Layout, Position};
use pikv_core::attend::BLOCK;
use pikv_core::full::PageRef;
use pikv_core::merge::Partial;
use pikv_core::rope::Rotation;
use pikv_core::warp::LANES;
use pikv_kernels::args::{JoinArg, LayoutArg, RopeArg, RowArg, SightArg, TaskArg, WriteArg};

/// Blocks of a tree of partial results, and half the blocks of a node of each level.
const TREE: usize = 16;
const HALVES: [usize; 4] = [1, 2, 4, 8];

/// Blocks that a device attends in one launch, each of pages of its own: more than its caches hold.
const BLOCKS: usize = 512;

/// The routines that are kernels, on the first CUDA device, timed by its events. Results are compared before.
pub fn all(c: &mut Criterion) {
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(why) => return println!("no CUDA device, so no figures of one: {why}"),
    };
    let blocks = if gpu.clock { BLOCKS } else { TREE };
    println!(
        "{}{}",
        gpu.name,
        if gpu.clock { "" } else { ", which measures no time: results are compared only" }
    );
    let q = queries();
    let rope = pikv::Rope::new(1e4, DIM).pairs(pikv::shape::Pairs::Halves);
    let capacity = PAGE * BLOCK as u32;
    let table: Vec<f32> = (0..DIM * capacity).map(|i| (i as f32).cos()).collect();
    let sights = gpu.put(&[SightArg::from(ALL); ROWS]);
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
