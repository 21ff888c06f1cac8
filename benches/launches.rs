//! Launches, uploaded bytes, allocations and waits of a decode step on a device, by the number of sequences and their tokens.
//!
//! `cargo build --release -p pikv-standin`, then
//! `PIKV_LIBCUDA=$PWD/target/release/libpikv_standin.so cargo bench -p pikv-benches --bench launches [-- --quick]`
//!
//! The stand-in for the driver counts calls here, and runs no kernel. One layer of 32 query heads over 8 KV heads of 128 channels in bf16,
//! tensors on the device, nothing evicted. Several sequences are forks of one; each is attended for itself. Of 64 steps of one token a
//! sequence, after 64 others: the most launches of a step, the mean of the bytes that a step uploads, and the allocations and the waits of
//! all 64 together.
//!
//! Results go to `benches/results/launches.csv`; `--quick` only prints those of short contexts.

#[allow(dead_code, reason = "the limits are for other benches")]
mod machine;

use cust::memory::DeviceBuffer;
use libloading::Library;
use pikv::cuda::{DeviceOutput, DeviceSlice};
use pikv::{Attend, Backend, Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const HEAD_DIM: usize = 128;
const KV_HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
/// Tokens of a step while a sequence is filled.
const FILL: u32 = 512;
const STEPS: u64 = 64;
/// Numbers by which the stand-in knows its settings and counts.
const COUNT: u32 = 8;
const COUNTS: [u32; 4] = [LAUNCHED, 7, 2, 4];
const LAUNCHED: u32 = 1;

fn main() -> Result<()> {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let path = std::env::var("PIKV_LIBCUDA").map_err(|_| "PIKV_LIBCUDA names no stand-in for the driver")?;
    // SAFETY: the stand-in has no initialisers.
    let standin = Standin(unsafe { Library::new(path)? });
    let backend = Backend::cuda()?;
    standin.set(COUNT, 1)?;
    let of = machine::provenance("cargo bench -p pikv-benches --bench launches")?;
    println!(
        "{:>5} {:>8} {:>9} {:>12} {:>12} {:>6}",
        "batch", "context", "launches", "uploaded", "allocations", "waits"
    );
    let mut rows = Vec::new();
    for context in if quick { &[1 << 10, 8 << 10][..] } else { &[1 << 10, 8 << 10, 32 << 10, 128 << 10] } {
        for batch in [1, 8, 64] {
            let [launches, uploaded, allocations, waits] = counts(&standin, &backend, batch, *context)?;
            println!("{batch:>5} {context:>8} {launches:>9} {uploaded:>12} {allocations:>12} {waits:>6}");
            rows.push(format!("{batch},{context},{launches},{uploaded},{allocations},{waits},{of}"));
        }
    }
    if quick {
        return Ok(());
    }
    let columns = "batch,context,launches_per_layer,uploaded_bytes_per_layer,allocations,waits,machine,date,commit,command";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/results/launches.csv");
    Ok(machine::replace_rows(path, columns, [0, 1], &rows)?)
}

/// The library of the stand-in, which pikv has opened too.
struct Standin(Library);

impl Standin {
    fn set(&self, what: u32, value: u64) -> Result<()> {
        // SAFETY: the function's signature.
        let set = unsafe { self.0.get::<extern "C" fn(u32, u64)>(b"standin_set\0")? };
        set(what, value);
        Ok(())
    }

    /// All of [`COUNTS`] so far.
    fn counts(&self) -> Result<[u64; 4]> {
        // SAFETY: the function's signature.
        let get = unsafe { self.0.get::<extern "C" fn(u32) -> u64>(b"standin_get\0")? };
        Ok(COUNTS.map(|what| get(what)))
    }
}

/// Tensors on the device.
struct Tensors {
    kv: [DeviceBuffer<u16>; 2],
    q: DeviceBuffer<u16>,
    out: DeviceBuffer<u16>,
}

impl Tensors {
    /// For steps of `rows` rows.
    fn new(rows: usize) -> Result<Tensors> {
        // SAFETY: no kernel runs, so nothing reads them.
        let of = |heads: usize| unsafe { DeviceBuffer::uninitialized(rows * heads * HEAD_DIM) };
        Ok(Tensors { kv: [of(KV_HEADS)?, of(KV_HEADS)?], q: of(QUERY_HEADS)?, out: of(QUERY_HEADS)? })
    }

    /// Appends the rows of a step, and attends them if `attends`.
    fn step(&self, cache: &Cache, of: &mut [Sequence], tokens: u32, attends: bool) -> Result<()> {
        let rows = of.len() * tokens as usize;
        let slice = |buffer: &DeviceBuffer<u16>, heads: usize| {
            let at = buffer.as_device_ptr().as_raw();
            // SAFETY: the buffer has that many elements, and no kernel runs.
            unsafe { DeviceSlice::new(at, rows * heads * HEAD_DIM, Dtype::Bf16) }
        };
        let mut step = cache.begin(of.iter_mut().map(|sequence| (sequence, tokens)))?;
        let [k, v] = self.kv.each_ref().map(|buffer| slice(buffer, KV_HEADS));
        step.append_device(0, k, v)?;
        if attends {
            let attend = Attend::new((HEAD_DIM as f32).powf(-0.5));
            let out = DeviceOutput::new(slice(&self.out, QUERY_HEADS));
            step.attend_device(0, slice(&self.q, QUERY_HEADS), &attend, out)?;
        }
        Ok(step.commit()?)
    }
}

/// The columns of a row: launches, uploaded bytes, allocations and waits.
fn counts(standin: &Standin, backend: &Backend, batch: usize, context: u32) -> Result<[u64; 4]> {
    let layer = LayerShape::new(KV_HEADS as u32, QUERY_HEADS as u32, HEAD_DIM as u32, Dtype::Bf16);
    let cache = Cache::new(CacheConfig::new(vec![layer], 64 << 30).backend(backend.clone()))?;
    let tensors = Tensors::new(batch.max(FILL as usize))?;
    let mut sequences = vec![cache.sequence()];
    for first in (0..context).step_by(FILL as usize) {
        tensors.step(&cache, &mut sequences, FILL.min(context - first), false)?;
    }
    let forks: Vec<Sequence> = (1..batch).map(|_| sequences[0].fork()).collect();
    sequences.extend(forks);
    for _ in 0..STEPS {
        tensors.step(&cache, &mut sequences, 1, true)?;
    }
    let before = standin.counts()?;
    let (mut launches, mut last) = (0, before);
    for _ in 0..STEPS {
        tensors.step(&cache, &mut sequences, 1, true)?;
        let now = standin.counts()?;
        launches = launches.max(now[0] - last[0]);
        last = now;
    }
    let [_, uploaded, allocations, waits] = std::array::from_fn(|i| last[i] - before[i]);
    Ok([launches, uploaded / STEPS, allocations, waits])
}
