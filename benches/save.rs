//! Saving a sequence to memory, and restoring it, beside a copy of the same bytes.
//!
//! `cargo bench -p pikv-benches --bench save [-- --quick]`
//!
//! One sequence of 8,192 tokens in 8 layers of 4 KV heads of 128 channels, and two of 8,192 and 2,048 tokens in the layers of SmolLM2-135M (30
//! of 3 KV heads of 64 channels), in bf16 and packed by int4; the median of 15 runs of each, in turn. A save writes
//! to memory that was written before, and its ratio is that to a copy into such memory. A restore takes new memory from the system, as a
//! cache gives free chunks back; it has two ratios, to that copy and to a copy into new memory. Writes `results/save.csv` and fails where
//! the first or the last is below 0.6, unless the session has 2,048 tokens: part of that is copied from the CPU's caches. `--quick`: a short sequence, nothing is written.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use pikv::codec::{Code, Codec, Coding};
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

/// Name of a session; its tokens, layers, KV heads and channels.
const SESSIONS: [(&str, [usize; 4]); 3] = [
    ("8192 tokens", [8192, 8, 4, 128]),
    ("8192 tokens of SmolLM2-135M", [8192, 30, 3, 64]),
    ("2048 tokens of SmolLM2-135M", [2048, 30, 3, 64]),
];
const COMMAND: &str = "cargo bench -p pikv-benches --bench save";

fn main() -> Result<(), Box<dyn Error>> {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let mut csv = vec![
        "session,dtype,bytes,save_ratio,restore_ratio,restore_ratio_new_memory,machine,date,commit,command"
            .to_owned(),
    ];
    let mut worst = f64::INFINITY;
    for (name, [tokens, layers, heads, dim]) in SESSIONS {
        let layer = LayerShape::new(heads as u32, heads as u32, dim as u32, Dtype::Bf16);
        let plain = CacheConfig::new(vec![layer; layers], 1 << 32);
        let int4 = Codec::new(Coding::new(Code::Int4), Coding::new(Code::Int4));
        for (dtype, config) in [("bf16", plain.clone()), ("int4", plain.compress(int4))] {
            let cache = Cache::new(config)?;
            let sequence = filled(&cache, if quick { 512 } else { tokens }, heads * dim)?;
            let (bytes, [copy, new, save, restore]) = times(&cache, &sequence)?;
            let (save, restore, beside_new) = (copy / save, copy / restore, new / restore);
            println!(
                "{name}, {dtype}: {bytes} bytes: save {save:.2}, restore {restore:.2} of {:.1} GB/s, {beside_new:.2} of {:.1} GB/s into new memory",
                bytes as f64 / copy / 1e9,
                bytes as f64 / new / 1e9
            );
            if tokens > 2048 {
                worst = worst.min(save).min(beside_new);
            }
            let from = machine::provenance(COMMAND)?;
            csv.push(format!("{name},{dtype},{bytes},{save:.3},{restore:.3},{beside_new:.3},{from}"));
        }
    }
    if quick {
        return Ok(());
    }
    std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/results/save.csv"), csv.join("\n") + "\n")?;
    println!("written to benches/results/save.csv");
    match worst >= 0.6 {
        true => Ok(()),
        false => Err(format!("{worst:.2} of a copy; at least 0.6 is needed").into()),
    }
}

/// A sequence of so many tokens, of `row` keys and values a layer.
fn filled(cache: &Cache, tokens: usize, row: usize) -> Result<Sequence, Box<dyn Error>> {
    let noise: Vec<f32> = machine::noise(1).take(256 * row).collect();
    let mut sequence = cache.sequence();
    for _ in 0..tokens / 256 {
        let mut step = cache.begin([(&mut sequence, 256)])?;
        (0..cache.config().layers.len()).try_for_each(|layer| step.append(layer, &noise, &noise))?;
        step.commit()?;
    }
    Ok(sequence)
}

/// Bytes, and the median seconds of a copy, a copy into new memory, a save and a restore.
fn times(cache: &Cache, sequence: &Sequence) -> Result<(usize, [f64; 4]), Box<dyn Error>> {
    let mut saved = Vec::new();
    sequence.save(b"", &mut saved)?;
    let mut copy = saved.clone();
    let mut took = [const { Vec::new() }; 4];
    for _ in 0..15 {
        let start = Instant::now();
        copy.copy_from_slice(black_box(&saved));
        black_box(&copy);
        took[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let new = black_box(saved.clone());
        took[1].push(start.elapsed().as_secs_f64());
        drop(new);
        saved.clear();
        let start = Instant::now();
        sequence.save(b"", &mut saved)?;
        took[2].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let restored = cache.restore(&mut &saved[..])?;
        took[3].push(start.elapsed().as_secs_f64());
        drop(restored);
    }
    let median = |mut all: Vec<f64>| {
        all.sort_unstable_by(f64::total_cmp);
        all[all.len() / 2]
    };
    Ok((saved.len(), took.map(median)))
}
