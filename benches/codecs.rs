//! Decode attention over packed pages beside bf16, in one run.
//!
//! `cargo bench -p pikv-benches --bench codecs [-- --lanes NAME] [--context N] [--codec NAME]`
//!
//! 32 query heads over 8 KV heads of 128 channels, all but the ring packed. Each codec takes its turn with bf16, sample by sample; the
//! figure is tokens a second over those of bf16, and KV bytes over the roof (the machine's read bandwidth, or its multiply-adds if
//! those bind first). Values are checked against a float64 softmax over what is stored before anything is timed. The results of a
//! whole run go to `benches/results/codecs.csv`.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use machine::{Machine, median};
use pikv::codec::{Code, Codec, Coding, Map};
use pikv::lanes::Lanes;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, Rows, Sequence};
use std::error::Error;
use std::io::Write;
use std::time::Instant;

const DIM: usize = 128;
const KV_HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const RING: u32 = 256;
const OPTIONS: Attend = Attend::new(0.088_388_35);
const SAMPLES: usize = 11;

/// A name, and how K and V are packed; `None` keeps bf16.
type Row = (&'static str, Option<Codec>);

fn rows() -> Result<Vec<Row>, Box<dyn Error>> {
    let both = |code| Some(Codec::new(Coding::new(code), Coding::new(code)));
    let factors = |coding: Coding| Some(Codec::new(coding.clone(), coding));
    let turned = Coding::new(Code::Int4).map(Map::hadamard(DIM as u32)?);
    let half: Vec<u32> = (0..DIM as u32 / 2).collect();
    let crop = Coding::new(Code::Bf16).map(Map::identity_subset(DIM as u32, &half)?);
    Ok(vec![
        ("bf16", None),
        ("int8", both(Code::Int8)),
        ("int4", both(Code::Int4)),
        ("int4 hadamard K", Some(Codec::new(turned, Coding::new(Code::Int4)))),
        ("int8 K int4 V", Some(Codec::new(Coding::new(Code::Int8), Coding::new(Code::Int4)))),
        ("e4m3", both(Code::E4m3)),
        ("e5m2", both(Code::E5m2)),
        ("64 of 128 channels bf16", Some(Codec::new(crop.clone(), crop))),
        ("means of 2", factors(Coding::means(Code::Bf16, 1)?)),
        ("means of 4", factors(Coding::means(Code::Bf16, 2)?)),
        ("block PCA 7 int8", factors(Coding::block_pca(Code::Int8, 7)?)),
        ("block PCA 15 int8", factors(Coding::block_pca(Code::Int8, 15)?)),
    ])
}

fn main() -> Result<(), Box<dyn Error>> {
    let (lanes, context, only) = arguments()?;
    let name = machine::name();
    println!("{name}, {} lanes, {context} tokens\n", lanes.name());
    println!(
        "{:24} {:>7} {:>7} {:>9} {:>9} {:>8} {:>7}  spread",
        "codec", "threads", "ratio", "x bf16", "KV GB/s", "roof", "/ roof"
    );
    let when = machine::when("cargo bench -p pikv-benches --bench codecs")?;
    let mut csv = vec![
        "machine,lanes,codec,context,threads,ratio,x_bf16,kv_gbps,roof_gbps,roof_ratio,date,commit,command"
            .to_owned(),
    ];
    let q: Vec<f32> = machine::noise(3).map(|x| 4.0 * x).take(QUERY_HEADS * DIM).collect();
    let rows = rows()?;
    let plain = build(lanes, None, context)?;
    check(&plain, &q)?;
    for (label, codec) in rows.iter().filter(|(label, _)| only.as_deref().is_none_or(|only| only == *label)) {
        let packed = build(lanes, codec.clone(), context)?;
        check(&packed, &q)?;
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
            let (mut times, mut base, mut limits) = (Vec::new(), Vec::new(), Vec::new());
            pool.install(|| -> Result<(), pikv::Error> {
                for _ in 0..SAMPLES {
                    base.push(time(&plain, &q)?);
                    times.push(time(&packed, &q)?);
                    limits.push(Machine::measure(lanes));
                }
                Ok(())
            })?;
            let speed: Vec<f64> = base.iter().zip(&times).map(|(b, t)| b / t).collect();
            let bytes = packed.1.bytes() as f64;
            let rate = bytes / median(&times) / 1e9;
            let read = median(&limits.iter().map(|m| m.read_gbps).collect::<Vec<_>>());
            let fmas = median(&limits.iter().map(|m| m.fmas_per_s).collect::<Vec<_>>());
            let products = f64::from(context) * 2.0 * (DIM * QUERY_HEADS) as f64;
            let roof = read.min(fmas / products * bytes / 1e9);
            let ratio = codec.as_ref().map_or(1.0, |codec| codec.ratio(DIM as u32, DIM as u32));
            let (speed, spread) = (median(&speed), spread(&speed));
            println!(
                "{label:24} {threads:>7} {ratio:>7.3} {speed:>9.3} {rate:>9.2} {roof:>8.2} {:>7.3}  {spread:.0} %",
                rate / roof
            );
            csv.push(format!(
                "{name},{},{label},{context},{threads},{ratio:.4},{speed:.4},{rate:.3},{roof:.3},{:.4},{when}",
                lanes.name(),
                rate / roof
            ));
        }
    }
    println!("\nspread: of the middle half of the samples, over the median");
    if std::env::args().skip(1).all(|argument| argument == "--bench") {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/results/codecs.csv");
        writeln!(std::fs::File::create(path)?, "{}", csv.join("\n"))?;
        println!("written to benches/results/codecs.csv");
    }
    Ok(())
}

fn arguments() -> Result<(Lanes, u32, Option<String>), Box<dyn Error>> {
    let (mut lanes, mut context, mut only) = (Lanes::detect(), 32768, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--lanes" => lanes = Lanes::by_name(&arguments.next().unwrap_or_default())?,
            "--context" => context = arguments.next().unwrap_or_default().parse()?,
            "--codec" => only = arguments.next(),
            other => {
                return Err(format!("{other}: options are --lanes NAME, --context N, --codec NAME").into());
            }
        }
    }
    Ok((lanes, context, only))
}

fn build(lanes: Lanes, codec: Option<Codec>, context: u32) -> Result<(Cache, Sequence), Box<dyn Error>> {
    let layer = LayerShape::new(KV_HEADS as u32, QUERY_HEADS as u32, DIM as u32, Dtype::Bf16);
    let mut config = CacheConfig::new(vec![layer], 4 << 30).ring(RING).lanes(lanes);
    if let Some(codec) = codec {
        config = config.compress(codec);
    }
    let cache = Cache::new(config)?;
    let mut sequence = cache.sequence();
    let noise: Vec<f32> = machine::noise(1).take(1 << 20).collect();
    let row = KV_HEADS * DIM;
    for first in (0..context).step_by(RING as usize) {
        let n = RING.min(context - first) as usize;
        let at = first as usize / RING as usize * 7919 % (noise.len() - n * row);
        let mut step = cache.begin([(&mut sequence, n as u32)])?;
        step.append(0, &noise[at..at + n * row], &noise[at / 2..at / 2 + n * row])?;
        step.commit()?;
    }
    Ok((cache, sequence))
}

fn query(sequence: &Sequence) -> [Rows<'_>; 1] {
    [Rows::new(sequence, Position(sequence.next_position().0 - 1), 1)]
}

/// Two query heads against float64 over what is stored.
fn check((cache, sequence): &(Cache, Sequence), q: &[f32]) -> Result<(), Box<dyn Error>> {
    let mut out = vec![0.0; QUERY_HEADS * DIM];
    cache.attend(0, &query(sequence), q, &OPTIONS, AttendOutput::new(&mut out))?;
    for head in [0, QUERY_HEADS - 1] {
        let q = &q[head * DIM..][..DIM];
        let (mut sum, mut total) = (vec![0.0; DIM], 0.0);
        let (mut key, mut value) = (vec![0.0; DIM], vec![0.0; DIM]);
        let kv_head = head * KV_HEADS / QUERY_HEADS;
        for page in sequence.pages(0, kv_head)? {
            for lane in 0..page.tokens {
                sequence.read(0, kv_head, page.id, lane, &mut key, &mut value)?;
                let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let weight = (dot * f64::from(OPTIONS.scale)).exp();
                total += weight;
                sum.iter_mut().zip(&value).for_each(|(s, v)| *s += weight * f64::from(*v));
            }
        }
        for (out, sum) in out[head * DIM..].iter().zip(&sum) {
            let off = (f64::from(*out) - sum / total).abs();
            // Queries and weights are rounded to 16 bits against integers.
            if off.is_nan() || off > 5e-5 {
                return Err(format!("head {head}: {out} where float64 gives {}", sum / total).into());
            }
        }
    }
    Ok(())
}

fn time((cache, sequence): &(Cache, Sequence), q: &[f32]) -> Result<f64, pikv::Error> {
    const REPEAT: usize = 3;
    let mut out = vec![0.0; QUERY_HEADS * DIM];
    let start = Instant::now();
    for _ in 0..REPEAT {
        cache.attend(0, &query(sequence), q, &OPTIONS, AttendOutput::new(&mut out))?;
    }
    Ok(start.elapsed().as_secs_f64() / REPEAT as f64)
}

fn spread(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let (mid, cut) = (values[values.len() / 2], values.len() / 4);
    (values[values.len() - 1 - cut] - values[cut]) / mid * 100.0
}
