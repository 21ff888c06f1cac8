//! How long the slowest steps take to write their tokens, beside the median: `begin`, `append` and `commit` of 32 layers of 8 KV heads
//! of 128 channels in bf16, one token a sequence and step, without attention.
//!
//! `cargo bench -p pikv-benches --bench stalls [-- --quick]`
//!
//! All sequences of a batch start together, so all heads of all layers open a page in the same step: every 32nd. The memory of the
//! longest run is 8.6 GB. Writes `results/stalls.csv` and fails where the 99.9th percentile passes 4 times the median. `--quick`: short
//! sequences of 4 layers, nothing is written.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use pikv::{Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::error::Error;
use std::time::Instant;

const KV_HEADS: usize = 8;
const DIM: usize = 128;
const ROW: usize = KV_HEADS * DIM;

/// Sequences, and the tokens of each.
const RUNS: [(usize, u32); 3] = [(1, 10_000), (8, 2_500), (64, 1_024)];

fn main() -> Result<(), Box<dyn Error>> {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let layers = if quick { 4 } else { 32 };
    let mut csv = vec!["batch,layers,tokens,median_ms,p999_ms,max_ms,machine,date,commit,command".to_owned()];
    println!(
        "{:>5} {:>7} {:>10} {:>10} {:>10} {:>6}",
        "batch", "tokens", "median ms", "p99.9 ms", "max ms", "ratio"
    );
    let mut worst = 0.0f64;
    for (batch, tokens) in RUNS {
        let tokens = if quick { tokens / 16 } else { tokens };
        let mut took = steps(layers, batch, tokens)?;
        took.sort_unstable_by(f64::total_cmp);
        let at =
            |share: f64| took[((took.len() as f64 * share).ceil() as usize).clamp(1, took.len()) - 1] * 1e3;
        let (median, p999, max) = (at(0.5), at(0.999), at(1.0));
        println!("{batch:>5} {tokens:>7} {median:>10.3} {p999:>10.3} {max:>10.3} {:>6.2}", p999 / median);
        worst = worst.max(p999 / median);
        csv.push(format!(
            "{batch},{layers},{tokens},{median:.3},{p999:.3},{max:.3},{}",
            machine::provenance("cargo bench -p pikv-benches --bench stalls")?
        ));
    }
    if quick {
        return Ok(());
    }
    std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/results/stalls.csv"), csv.join("\n") + "\n")?;
    println!("written to benches/results/stalls.csv");
    match worst <= 4.0 {
        true => Ok(()),
        false => {
            Err(format!("the slowest steps take {worst:.2} times the median; at most 4 is allowed").into())
        }
    }
}

/// Seconds of each step.
fn steps(layers: usize, batch: usize, tokens: u32) -> Result<Vec<f64>, Box<dyn Error>> {
    let heads = KV_HEADS as u32;
    let layer = LayerShape::new(heads, heads, DIM as u32, Dtype::Bf16);
    let cache = Cache::new(CacheConfig::new(vec![layer; layers], 1 << 40))?;
    let noise: Vec<f32> = machine::noise(1).take((batch + 64) * ROW).collect();
    let mut sequences: Vec<Sequence> = (0..batch).map(|_| cache.sequence()).collect();
    let mut took = Vec::with_capacity(tokens as usize);
    for token in 0..tokens as usize {
        let rows = &noise[token % 64 * ROW..][..batch * ROW];
        let start = Instant::now();
        let mut step = cache.begin(sequences.iter_mut().map(|sequence| (sequence, 1)))?;
        for layer in 0..layers {
            step.append(layer, rows, rows)?;
        }
        step.commit()?;
        took.push(start.elapsed().as_secs_f64());
    }
    let held = sequences.iter().map(|sequence| sequence.next_position().0);
    if held.clone().any(|held| held != tokens) {
        return Err("tokens are missing".into());
    }
    Ok(took)
}
