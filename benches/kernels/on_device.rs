//! The kernels on a CUDA device, timed by its events.

use super::attention::{ALL, Attend, Merge, queries};
use super::device::{Gpu, Memory, arguments};
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
use pikv_kernels::args::{LayoutArg, PairArg, RopeArg, SightArg, TaskArg, WriteArg};

/// Blocks that a device attends in one launch, each of pages of its own: more than its caches hold.
const BLOCKS: usize = 512;

/// The routines that are kernels, on the first CUDA device, timed by its events. Results are compared before.
pub fn all(c: &mut Criterion) {
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
        let pair = |i: usize| PairArg {
            left: (2 * i * len) as u64,
            right: ((2 * i + 1) * len) as u64,
            rows: ROWS as u32,
            acc_rows: layout.acc_rows(),
        };
        let pairs = gpu.put(&(0..blocks / 2).map(pair).collect::<Vec<_>>());
        let (pairs_at, count) = (at(&pairs), (blocks / 2) as u32);
        let arguments = arguments!(pairs_at, count, parts_at);
        let mut host = gpu.floats(&parts, 2 * len);
        let (left, right) = host.split_at_mut(len);
        Lanes::Portable.run(Merge(&layout, left, right));
        // SAFETY: as above; the parts are those that were just computed.
        unsafe { gpu.run("merge_pairs", blocks / 2, arguments) };
        same("merge", &gpu.floats(&parts, len), left);
        let bytes = (blocks / 2 * 3 * len * 4) as u64;
        measure(c, &gpu, "merge", dtype, Throughput::Bytes(bytes), "merge_pairs", blocks / 2, arguments);
        // A token of each page anew, from the same row.
        let row = machine::noise(1).take(DIM as usize).collect::<Vec<_>>();
        let mut want = words[0].clone();
        layout.write(&mut want, 3, Position(3), &row, &row).expect("noise is finite");
        let row = gpu.put(&row);
        let write = |i: usize| WriteArg { page: page(i), position: 3, row: 0 };
        let writes = gpu.put(&(0..blocks * BLOCK).map(write).collect::<Vec<_>>());
        let (row_at, writes_at, count) = (at(&row), at(&writes), (blocks * BLOCK) as u32);
        let arguments = arguments!(arg, row_at, row_at, writes_at, count);
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
