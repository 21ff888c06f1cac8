//! The routines that run on lanes, one by one, on every kind of lanes of the machine.
//!
//! `cargo bench -p pikv-benches --bench kernels [-- FILTER]`; then `benches/kernels/table` writes `results/kernels.csv` from what
//! criterion measured.
//!
//! The result of each routine is compared with that of the portable lanes before it is timed; on a CUDA device too, where there is one
//! (512 blocks in a launch, timed by its events). What a routine reads lies in the processor's caches. `read` is the limit beside the
//! rates: loads of as many bytes as the pages of a block, and nothing else.
//!
//! | file | routines |
//! |---|---|
//! | `attention.rs` | attention over a block of full and of packed pages, merges, masses |
//! | `places.rs` | hashes of expert ids, the ring, maps of shards |
//! | `routing.rs` | penalties, top-k and weights, entropies, Quest's bounds |
//! | `storing.rs` | a token written, a page packed and unpacked |
//! | `on_device.rs` | the kernels on a CUDA device |

mod attention;
#[path = "../device/mod.rs"]
mod device;
#[allow(dead_code, reason = "the other benches use the rest")]
#[path = "../machine/mod.rs"]
mod machine;
mod on_device;
mod places;
mod routing;
mod storing;

use bytemuck::Pod;
use criterion::measurement::WallTime;
use criterion::{
    Bencher, BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use machine::Read;
use pikv::lanes::Lanes;
use pikv::shape::PAGE;
use pikv::{Layout, Position};
use pikv_core::attend::BLOCK;
use pikv_core::math;
use pikv_core::warp::{Kernel, LANES, Warp};
use std::hint::black_box;

/// Channels of a head.
const DIM: u32 = 128;
/// Query rows that read a page together.
const ROWS: usize = 4;

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

/// The full pages of a block.
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

/// Checks the bits of `got` against those of the portable lanes.
///
/// # Panics
/// If a bit differs.
fn same(name: &str, got: &[f32], want: &[f32]) {
    assert!(
        got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()),
        "{name} differs from the portable lanes"
    );
}

/// Rows of lanes from a stream of numbers.
trait CollectRows {
    /// The next `32 n` numbers.
    fn collect_rows(self, n: usize) -> Vec<[f32; LANES]>;
}

impl<I: Iterator<Item = f32>> CollectRows for I {
    fn collect_rows(mut self, n: usize) -> Vec<[f32; LANES]> {
        (0..n).map(|_| std::array::from_fn(|_| self.next().unwrap_or(0.0))).collect()
    }
}

/// Times `run` on every kind of lanes of the machine, which writes `len` results. Each has to have the bits of the portable lanes. `form`
/// tells rows of a group apart, or is empty.
///
/// # Panics
/// If a bit differs.
fn on_all_lanes<T: Pod>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    form: &str,
    len: usize,
    mut run: impl FnMut(Lanes, &mut [T]),
) {
    let mut want = vec![T::zeroed(); len];
    run(Lanes::Portable, &mut want);
    for lanes in Lanes::available() {
        let (mut got, name) = (vec![T::zeroed(); len], lanes.name());
        run(lanes, &mut got);
        let same = bytemuck::cast_slice::<T, u8>(&got) == bytemuck::cast_slice::<T, u8>(&want);
        assert!(same, "{form} differs on {name} lanes");
        let time = |b: &mut Bencher<'_>| b.iter(|| run(lanes, black_box(&mut got)));
        match form {
            "" => group.bench_function(name, time),
            form => group.bench_function(BenchmarkId::new(name, form), time),
        };
    }
}

fn functions(c: &mut Criterion) {
    let mut group = c.benchmark_group("exp2 and ln");
    let data: Vec<[f32; LANES]> = machine::noise(2).collect_rows(64);
    group.throughput(Throughput::Elements(data.len() as u64 * LANES as u64));
    on_all_lanes(&mut group, "", data.len(), |lanes, out: &mut [[f32; LANES]]| {
        out.copy_from_slice(&data);
        lanes.run(Functions(out));
    });
}

/// The limit of what the caches give: reads of a block of f32 and of bf16.
fn reading(c: &mut Criterion) {
    let mut group = c.benchmark_group("read");
    for (name, bits) in [("f32", 32), ("bf16", 16), ("int8", 8), ("int4", 4)] {
        let bytes = BLOCK * (PAGE * 2 * DIM * bits / 8) as usize;
        let rows: Vec<[u32; LANES]> = (0..bytes / 128).map(|i| [i as u32; LANES]).collect();
        group.throughput(Throughput::Bytes(bytes as u64));
        for lanes in Lanes::available() {
            assert_eq!(lanes.run(Read(&rows)), u32::MAX, "{} lanes read other words", lanes.name());
            group.bench_function(BenchmarkId::new(lanes.name(), name), |b| {
                b.iter(|| lanes.run(Read(black_box(&rows))));
            });
        }
    }
}

criterion_group!(
    kernels,
    functions,
    reading,
    places::hashing,
    places::ring,
    places::shards,
    routing::ranking,
    routing::penalties,
    routing::entropies,
    routing::bounds,
    storing::writing,
    storing::packing,
    attention::full,
    attention::packed,
    attention::merging,
    attention::masses,
    on_device::all
);
criterion_main!(kernels);
