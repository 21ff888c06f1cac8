//! Decode attention beside the machine's limits, measured in one run.
//!
//! `cargo bench --bench attend [-- --lanes NAME] [--context N]`
//!
//! 32 query heads over 8 KV heads of 128 channels. The *roof* is the lower of two rates: the machine's read bandwidth
//! over a buffer that no cache holds, and the rate of KV bytes at which its measured peak of independent fused
//! multiply-adds would be used up (2 * head_dim * group of them a token and KV head). Every configuration is checked
//! against a float64 softmax before it is timed. The results of a whole run go to
//! `benches/results/attend.csv`.

mod machine;

use machine::{Machine, median};
use pikv::lanes::Lanes;
use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Layout, Output, Position, Rows, Sequence};
use std::error::Error;
use std::io::Write;
use std::time::Instant;

const HEAD_DIM: usize = 128;
const KV_HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const THREADS: [usize; 2] = [1, 2];

fn main() -> Result<(), Box<dyn Error>> {
    let (lanes, contexts) = arguments()?;
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results/attend.csv");
    let mut csv =
        vec!["machine,lanes,dtype,context,batch,threads,kv_gbps,read_gbps,fma_gbps,roof_ratio".to_owned()];
    let name = machine::name();
    println!("{name}\n");
    println!(
        "{:9} {:5} {:>7} {:>7} {:>8} {:>8} {:>8} {:>7}  spread",
        "lanes", "dtype", "context", "threads", "KV GB/s", "read", "FMA", "/ roof"
    );
    for lanes in lanes {
        for dtype in Dtype::ALL {
            for &context in &contexts {
                let (cache, sequence) = build(lanes, dtype, context)?;
                let q: Vec<f32> = machine::noise(3).map(|x| 4.0 * x).take(QUERY_HEADS * HEAD_DIM).collect();
                check(&cache, &sequence, &q)?;
                for threads in THREADS {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
                    let (rate, spread, machine) =
                        pool.install(|| measure(&cache, &sequence, &q, lanes, dtype))?;
                    let token = 2 * HEAD_DIM * dtype.bits() as usize / 8;
                    let fmas = 2 * HEAD_DIM * QUERY_HEADS / KV_HEADS;
                    let fma = machine.fmas_per_s / fmas as f64 * token as f64 / 1e9;
                    let ratio = rate / machine.read_gbps.min(fma);
                    println!(
                        "{:9} {:5} {context:>7} {threads:>7} {rate:>8.2} {:>8.2} {fma:>8.2} {ratio:>7.3}  {spread:.0} %",
                        lanes.name(),
                        dtype.name(),
                        machine.read_gbps
                    );
                    csv.push(format!(
                        "{name},{},{},{context},1,{threads},{rate:.3},{:.3},{fma:.3},{ratio:.4}",
                        lanes.name(),
                        dtype.name(),
                        machine.read_gbps
                    ));
                }
            }
        }
    }
    println!("\nspread: of the middle half of the runs, over the median");
    // A part of the configurations does not replace the record of all.
    if std::env::args().skip(1).all(|argument| argument == "--bench") {
        let mut file = std::fs::File::create(path)?;
        writeln!(file, "{}", csv.join("\n"))?;
        println!("written to benches/results/attend.csv");
    }
    Ok(())
}

fn arguments() -> Result<(Vec<Lanes>, Vec<u32>), Box<dyn Error>> {
    let mut lanes: Vec<Lanes> = Lanes::available().filter(|lanes| *lanes != Lanes::Portable).collect();
    if lanes.is_empty() {
        lanes.push(Lanes::Portable);
    }
    let mut contexts = vec![4096, 32768, 131_072];
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--lanes" => lanes = vec![Lanes::by_name(&arguments.next().unwrap_or_default())?],
            "--context" => contexts = vec![arguments.next().unwrap_or_default().parse()?],
            other => return Err(format!("{other}: options are --lanes NAME and --context N").into()),
        }
    }
    Ok((lanes, contexts))
}

fn build(lanes: Lanes, dtype: Dtype, context: u32) -> Result<(Cache, Sequence), Box<dyn Error>> {
    let dim = HEAD_DIM as u32;
    let layout = Layout { k_dim: dim, v_dim: dim, k: dtype, v: dtype };
    let layer = LayerShape {
        kv_heads: KV_HEADS as u32,
        query_heads: QUERY_HEADS as u32,
        layout,
        window: None,
        rope: None,
    };
    let cache = Cache::new(CacheConfig::new(vec![layer], 4 << 30).ring(512).lanes(lanes))?;
    let mut sequence = cache.sequence();
    let noise: Vec<f32> = machine::noise(1).take(1 << 20).collect();
    let row = KV_HEADS * HEAD_DIM;
    for first in (0..context).step_by(512) {
        let n = 512.min(context - first);
        let at = first as usize / 512 * 7919 % (noise.len() - 512 * row);
        let (k, v) = (&noise[at..at + n as usize * row], &noise[at / 2..at / 2 + n as usize * row]);
        let mut step = cache.begin([(&mut sequence, n)])?;
        step.append(0, k, v)?;
        step.commit()?;
    }
    Ok((cache, sequence))
}

fn rows(sequence: &Sequence) -> [Rows<'_>; 1] {
    [Rows { sequence, first: Position(sequence.next_position().0 - 1), rows: 1 }]
}

const OPTIONS: Attend = Attend::new(0.088_388_35);

/// Attention of two query heads against float64 over what is stored.
fn check(cache: &Cache, sequence: &Sequence, q: &[f32]) -> Result<(), Box<dyn Error>> {
    let mut out = vec![0.0; QUERY_HEADS * HEAD_DIM];
    cache.attend(0, &rows(sequence), q, &OPTIONS, Output::new(&mut out))?;
    for head in [0, QUERY_HEADS - 1] {
        let q = &q[head * HEAD_DIM..][..HEAD_DIM];
        let (mut sum, mut total) = (vec![0.0; HEAD_DIM], 0.0);
        let (mut key, mut value) = (vec![0.0; HEAD_DIM], vec![0.0; HEAD_DIM]);
        let kv_head = head * KV_HEADS / QUERY_HEADS;
        // A token that is filed is still in the ring's oldest page: each position once.
        let mut seen = vec![false; sequence.next_position().0 as usize];
        for page in sequence.pages(0, kv_head)? {
            for lane in 0..page.tokens {
                let p = sequence.read(0, kv_head, page.id, lane, &mut key, &mut value)?;
                if std::mem::replace(&mut seen[p.0 as usize], true) {
                    continue;
                }
                let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let weight = (dot * f64::from(OPTIONS.scale)).exp();
                total += weight;
                sum.iter_mut().zip(&value).for_each(|(s, v)| *s += weight * f64::from(*v));
            }
        }
        for (out, sum) in out[head * HEAD_DIM..].iter().zip(&sum) {
            let off = (f64::from(*out) - sum / total).abs();
            if off.is_nan() || off > 1e-5 {
                return Err(format!("head {head}: {out} where float64 gives {}", sum / total).into());
            }
        }
    }
    Ok(())
}

/// KV GB/s, its spread, and the machine's limits, taken in turn.
fn measure(
    cache: &Cache,
    sequence: &Sequence,
    q: &[f32],
    lanes: Lanes,
    dtype: Dtype,
) -> Result<(f64, f64, Machine), pikv::Error> {
    let mut out = vec![0.0; QUERY_HEADS * HEAD_DIM];
    let context = sequence.next_position().0 as usize;
    let bytes = context * KV_HEADS * 2 * HEAD_DIM * dtype.bits() as usize / 8;
    // At least a few milliseconds a sample.
    let repeat = (1 << 28) / bytes + 1;
    let (mut times, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..11 {
        let start = Instant::now();
        for _ in 0..repeat {
            cache.attend(0, &rows(sequence), q, &OPTIONS, Output::new(&mut out))?;
        }
        times.push(start.elapsed().as_secs_f64() / repeat as f64);
        limits.push(Machine::measure(lanes));
    }
    times.sort_by(f64::total_cmp);
    let (mid, half) = (median(&times), times.len() / 4);
    let spread = (times[times.len() - 1 - half] - times[half]) / mid * 100.0;
    let read: Vec<f64> = limits.iter().map(|m| m.read_gbps).collect();
    let fma: Vec<f64> = limits.iter().map(|m| m.fmas_per_s).collect();
    Ok((bytes as f64 / mid / 1e9, spread, Machine { read_gbps: median(&read), fmas_per_s: median(&fma) }))
}
