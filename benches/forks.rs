//! Time and host bytes beside pages of forks, of their first tokens, and of empty sequences.
//!
//! `cargo bench -p pikv-benches --bench forks [-- --quick]`
//!
//! * *Fork*: of a sequence of 48 layers of 4 heads of 64 channels in bf16. It is 16,400 tokens long, so the newest page of each ring and run
//!   is half full, and the first of the two that is written to copies it.
//! * *First token*: of such a fork, attention of 16 query heads included; `ratio` is its time over the median of the 8 tokens that follow,
//!   the median of 11 forks. *First write* is the same without attention.
//! * *Empty*: a sequence of 92 layers of 8 heads and 160 experts.
//! * *Fork of an empty sequence*: of 94 layers of 4 heads and 128 experts.
//!
//! `us` is the median of several; `bytes` are those that the fork or the sequence asked the allocator for and kept, after the token for a
//! fork that goes on. Allowed are 50 us for a fork and for an empty sequence, 64 bytes a head for a fork, 64 KiB for an empty sequence, and
//! for the first token 1.3 times the others.
//!
//! Writes `results/forks.csv`, and fails where more is taken than is allowed. `--quick`: a short sequence, nothing is written.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use machine::median;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The system's allocator, which counts the bytes that are held.
struct Counting;

static HELD: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator as it came; counting touches none of the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYERS: usize = 48;
const HEADS: usize = 4;
const GROUP: usize = 4;
const DIM: usize = 64;

/// A row of the results: `what,layers,heads,experts,tokens`, microseconds, bytes, and the ratio to what it is held against.
struct Row(&'static str, [usize; 4], f64, i64, f64);

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let tokens = if quick { 1_040 } else { 16_400 };
    let mut rows = forks(tokens)?;
    rows.extend(empty()?);
    let mut csv =
        vec!["what,layers,heads,experts,tokens,us,bytes,ratio,machine,date,commit,command".to_owned()];
    for Row(what, [layers, heads, experts, tokens], us, bytes, ratio) in &rows {
        println!("{what}: {us:.1} us, {bytes} bytes, ratio {ratio:.3}");
        let from = machine::provenance("cargo bench -p pikv-benches --bench forks")?;
        csv.push(format!("{what},{layers},{heads},{experts},{tokens},{us:.1},{bytes},{ratio:.3},{from}"));
    }
    if quick {
        return Ok(());
    }
    std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/results/forks.csv"), csv.join("\n") + "\n")?;
    println!("written to benches/results/forks.csv");
    let over = |row: &&Row| row.0 != "first write" && row.4 > if row.0 == "first token" { 1.3 } else { 1.0 };
    match rows.iter().find(over) {
        Some(Row(what, .., ratio)) => Err(format!("{what}: {ratio:.2} is more than is allowed").into()),
        None => Ok(()),
    }
}

/// Seconds that `act` takes, what it gives, and the bytes that it keeps.
fn taken<T>(act: impl FnOnce() -> T) -> (f64, T, i64) {
    let (before, start) = (HELD.load(Ordering::Relaxed), Instant::now());
    let made = act();
    let took = start.elapsed().as_secs_f64();
    (took, made, HELD.load(Ordering::Relaxed) - before)
}

/// The median microseconds of making something many times, and the bytes that it takes.
fn made<T>(times: usize, make: impl Fn() -> T) -> (f64, i64) {
    let all: Vec<(f64, T, i64)> = (0..times).map(|_| taken(&make)).collect();
    let us: Vec<f64> = all.iter().map(|(took, ..)| took * 1e6).collect();
    (median(&us), all[times / 2].2)
}

/// Appends a token, and attends it if that is wanted.
fn token(cache: &Cache, sequence: &mut Sequence, values: &[f32], out: Option<&mut [f32]>) -> Result<()> {
    let mut out = out;
    let mut step = cache.begin([(sequence, 1)])?;
    for layer in 0..LAYERS {
        step.append(layer, &values[..HEADS * DIM], &values[..HEADS * DIM])?;
        if let Some(out) = &mut out {
            step.attend(layer, values, &Attend::new(0.125), AttendOutput::new(out))?;
        }
    }
    step.commit()?;
    Ok(())
}

/// Forks of a sequence of so many tokens, and what goes on after them.
fn forks(tokens: usize) -> Result<Vec<Row>> {
    let layer = LayerShape::new(HEADS as u32, (HEADS * GROUP) as u32, DIM as u32, Dtype::Bf16);
    let cache = Cache::new(CacheConfig::new(vec![layer; LAYERS], 1 << 40))?;
    let mut sequence = cache.sequence();
    let values: Vec<f32> = machine::noise(1).take(80 * HEADS * DIM).collect();
    for _ in 0..tokens / 80 {
        let mut step = cache.begin([(&mut sequence, 80)])?;
        (0..LAYERS).try_for_each(|layer| step.append(layer, &values, &values))?;
        step.commit()?;
    }
    let shape = [LAYERS, HEADS, 1, tokens];
    let (us, bytes) = made(101, || sequence.fork());
    let most = (us / 50.0).max(bytes as f64 / (64 * LAYERS * HEADS) as f64);
    let mut rows = vec![Row("fork", shape, us, bytes, most)];
    let mut out = vec![0.0; HEADS * GROUP * DIM];
    let row = &values[..HEADS * GROUP * DIM];
    for (what, attends, rounds) in [("first token", true, 11), ("first write", false, 21)] {
        let (mut first, mut ratios, mut grown) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rounds {
            let mut fork = sequence.fork();
            let mut next = || {
                let out = attends.then_some(&mut out[..]);
                let (took, done, bytes) = taken(|| token(&cache, &mut fork, row, out));
                done.map(|()| (took * 1e6, bytes))
            };
            let (took, bytes) = next()?;
            first.push(took);
            grown = bytes;
            let others: Vec<f64> = (0..8).map(|_| Ok(next()?.0)).collect::<Result<_>>()?;
            ratios.push(took / median(&others));
        }
        rows.push(Row(what, shape, median(&first), grown, median(&ratios)));
    }
    Ok(rows)
}

/// Empty sequences, and forks of them.
fn empty() -> Result<[Row; 2]> {
    let cache = |layers: usize, heads: usize, experts: usize| {
        let layer = LayerShape::new(heads as u32, heads as u32, DIM as u32, Dtype::Bf16);
        Cache::new(CacheConfig::new(vec![layer; layers], 1 << 40).experts(experts as u32, 8))
    };
    let ([layers, heads, experts], [of_layers, of_heads, of_experts]) = ([92, 8, 160], [94, 4, 128]);
    let whole = cache(layers, heads, experts)?;
    let (us, bytes) = made(101, || whole.sequence());
    let most = (us / 50.0).max(bytes as f64 / f64::from(64 << 10));
    let one = Row("empty", [layers, heads, experts, 0], us, bytes, most);
    let sequence = cache(of_layers, of_heads, of_experts)?.sequence();
    let (us, bytes) = made(101, || sequence.fork());
    Ok([one, Row("fork of an empty sequence", [of_layers, of_heads, of_experts, 0], us, bytes, us / 50.0)])
}
