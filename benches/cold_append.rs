//! The cost of writing a token beside attention, in memory that is cold: 32 layers of 32 query heads over 8 KV heads of 128 channels in
//! bf16, at 1,024 tokens.
//!
//! `cargo bench -p pikv-benches --bench cold_append [-- --quick]`
//!
//! A step is `begin`, then for each layer `append` and attention of the new token, then `commit`. Before each step 64 MiB are read that are
//! no part of the cache, as weights would be; attention itself reads 128 MiB a sequence. `append_share` is what `begin`, `append` and
//! `commit` take over what attention takes, both as medians over 96 steps, on one thread; `slowest_over_median` is of the former. Every 32nd
//! step opens pages. Attention of a step is checked against float64 before anything is timed. The memory of the longest run is 4.5 GB. Writes
//! `results/cold_append.csv`. `--quick`: 4 layers, batches of 1 and 2, nothing is written.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use pikv::report::Place;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

const QUERY_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const ROW: usize = KV_HEADS * DIM;
const CONTEXT: u32 = 1024;
const RING: u32 = 256;
const STEPS: usize = 96;
const SWEEP: usize = 64 << 20;
const OPTIONS: Attend = Attend::new(0.088_388_35);

fn main() -> Result<(), Box<dyn Error>> {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (layers, batches) = if quick { (4, &[1, 2][..]) } else { (32, &[1, 8, 32][..]) };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    let end = machine::provenance("cargo bench -p pikv-benches --bench cold_append")?;
    let mut csv =
        vec!["batch,layers,context,append_share,slowest_over_median,machine,date,commit,command".to_owned()];
    println!("{:>5} {:>10} {:>10} {:>7} {:>7}", "batch", "append ms", "attend ms", "share", "slowest");
    for &batch in batches {
        let (mut append, attend) =
            pool.install(|| steps(layers, batch)).map_err(|error| error.to_string())?;
        let (median, attend) = (machine::median(&append), machine::median(&attend));
        append.sort_by(f64::total_cmp);
        let (share, slowest) = (median / attend, append[append.len() - 1] / median);
        println!("{batch:>5} {:>10.3} {:>10.3} {share:>7.3} {slowest:>7.2}", median * 1e3, attend * 1e3);
        csv.push(format!("{batch},{layers},{CONTEXT},{share:.4},{slowest:.2},{end}"));
    }
    if !quick {
        std::fs::write(
            concat!(env!("CARGO_MANIFEST_DIR"), "/results/cold_append.csv"),
            csv.join("\n") + "\n",
        )?;
    }
    Ok(())
}

/// Seconds that each step takes to write its tokens, and to attend.
fn steps(layers: usize, batch: usize) -> Result<(Vec<f64>, Vec<f64>), Box<dyn Error + Send + Sync>> {
    let layer = LayerShape::new(KV_HEADS as u32, QUERY_HEADS as u32, DIM as u32, Dtype::Bf16);
    let cache = Cache::new(CacheConfig::new(vec![layer; layers], 1 << 40).ring(RING))?;
    let noise: Vec<f32> = machine::noise(1).take((batch.max(64) + 64) * ROW).collect();
    let q: Vec<f32> = machine::noise(2).map(|x| 4.0 * x).take(batch * QUERY_HEADS * DIM).collect();
    let mut sequences: Vec<Sequence> = (0..batch).map(|_| cache.sequence()).collect();
    for sequence in &mut sequences {
        for first in (0..CONTEXT).step_by(64) {
            let rows = &noise[first as usize / 64 * DIM..][..64 * ROW];
            let mut step = cache.begin([(&mut *sequence, 64)])?;
            (0..layers).try_for_each(|layer| step.append(layer, rows, rows))?;
            step.commit()?;
        }
    }
    let sweep = vec![1u64; SWEEP / 8];
    let mut out = vec![0.0; q.len()];
    let (mut append, mut attend) = (Vec::new(), Vec::new());
    for token in 0..=STEPS {
        black_box(sweep.iter().step_by(8).fold(0, |sum: u64, word| sum.wrapping_add(*word)));
        let rows = &noise[token % 64 * ROW..][..batch * ROW];
        let (mut writing, mut attending) = (0.0, 0.0);
        let start = Instant::now();
        let mut step = cache.begin(sequences.iter_mut().map(|sequence| (sequence, 1)))?;
        writing += start.elapsed().as_secs_f64();
        for layer in 0..layers {
            let start = Instant::now();
            step.append(layer, rows, rows)?;
            writing += start.elapsed().as_secs_f64();
            let start = Instant::now();
            step.attend(layer, &q, &OPTIONS, AttendOutput::new(&mut out))?;
            attending += start.elapsed().as_secs_f64();
        }
        let start = Instant::now();
        step.commit()?;
        writing += start.elapsed().as_secs_f64();
        // The first step is checked, and not timed.
        if token == 0 {
            let last = (layers - 1, batch - 1);
            check(
                &sequences[last.1],
                last.0,
                &q[last.1 * QUERY_HEADS * DIM..],
                &out[last.1 * QUERY_HEADS * DIM..],
            )?;
        } else {
            append.push(writing);
            attend.push(attending);
        }
    }
    Ok((append, attend))
}

/// The first query head of the newest row against a softmax in float64 over what is stored.
fn check(
    sequence: &Sequence,
    layer: usize,
    q: &[f32],
    out: &[f32],
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let (mut key, mut value) = (vec![0.0; DIM], vec![0.0; DIM]);
    let (mut sum, mut total) = (vec![0.0; DIM], 0.0);
    let newest = sequence.next_position().0 - 1;
    for page in sequence.pages(layer, 0)? {
        for lane in 0..page.tokens {
            let position = sequence.read(layer, 0, page.id, lane, &mut key, &mut value)?.0;
            // What is filed already is in the ring too.
            if (position + RING > newest) != (page.id.place == Place::Ring) {
                continue;
            }
            let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let weight = (dot * f64::from(OPTIONS.scale)).exp();
            total += weight;
            sum.iter_mut().zip(&value).for_each(|(sum, v)| *sum += weight * f64::from(*v));
        }
    }
    for (out, sum) in out.iter().zip(&sum) {
        let expected = sum / total;
        if (f64::from(*out) - expected).abs() > 1e-5 {
            return Err(format!("{out} where float64 gives {expected}").into());
        }
    }
    Ok(())
}
