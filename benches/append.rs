//! What a token costs to append: as its sequence grows, and beside a copy of its bytes.
//!
//! `cargo bench -p pikv-benches --bench append`
//!
//! *Growth*: one token at a time through `begin`, `append`, `route` and `commit`, 8 experts, at lengths of 2^10 to 2^20, all past the
//! ring, in turns with a sequence that starts from 2^10. Fails if a token of the longest costs more than 1.2 times one of the shortest.
//! The appended tokens are read back.
//!
//! *Beside a copy*: the time of a token of a layer of 8 heads of 128 channels, given in f32, kept in bf16, and packed to int8 or int4 in
//! pages of 32 once it has left the ring. It is divided by the time to write the same 4 KiB, rounded already, to the end of a buffer (`row`)
//! and to their places in a page (`places`), once for the ring and once for the page of the expert.

#[allow(dead_code, reason = "the other benches use the rest")]
mod machine;

use machine::median;
use pikv::codec::{Code, Codec, Coding};
use pikv::report::Place;
use pikv::shard::ShardMap;
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Sequence};
use std::error::Error;
use std::io::Write;
use std::time::Instant;

const DIM: usize = 64;
const KV_HEADS: usize = 2;
/// Tokens of a sample, of which the fastest counts: the others were disturbed.
const SAMPLE: u32 = 64;
const SAMPLES: u32 = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let layer = LayerShape::new(KV_HEADS as u32, KV_HEADS as u32, DIM as u32, Dtype::Bf16);
    let config = CacheConfig::new(vec![layer], 2 << 30).experts(8, 2).shards(ShardMap::sum(4)?).rollback(8);
    let noise: Vec<f32> = machine::noise(1).take(1 << 16).collect();
    println!("{:>9} {:>12} {:>15} {:>7}", "tokens", "ns a token", "of 1024 tokens", "ratio");
    let cache = Cache::new(config)?;
    let mut sequence = cache.sequence();
    let mut ratio = 0.0;
    for power in (10..=20).step_by(2) {
        let target = 1u32 << power;
        grow(&cache, &mut sequence, target, &noise)?;
        let (mut long, mut short) = (f64::INFINITY, f64::INFINITY);
        let mut young = cache.sequence();
        grow(&cache, &mut young, 1024, &noise)?;
        for _ in 0..SAMPLES {
            // In turns, so that what disturbs the machine disturbs both, and each finds its last page as cold as the other.
            short = short.min(sample(&cache, &mut young, &noise)?);
            long = long.min(sample(&cache, &mut sequence, &noise)?);
        }
        ratio = long / short;
        println!("{target:>9} {long:>12.0} {short:>15.0} {ratio:>7.3}");
    }
    check(&sequence, &noise)?;
    drop(sequence);
    beside_copies(&noise)?;
    if ratio > 1.2 {
        return Err(format!(
            "a token costs {ratio:.3} times what it did at the start; at most 1.2 is allowed"
        )
        .into());
    }
    Ok(())
}

fn grow(cache: &Cache, sequence: &mut Sequence, len: u32, noise: &[f32]) -> Result<(), pikv::Error> {
    while sequence.next_position().0 < len {
        append(cache, sequence, 256.min(len - sequence.next_position().0), noise)?;
    }
    Ok(())
}

/// Channels and heads of the layer whose tokens are set beside copies, and the tokens of a sample.
const WIDE: usize = 128;
const MANY: usize = 8;
const TOKENS: usize = 4096;
/// bf16 in pairs: words of a token, and of a page.
const WORDS: usize = MANY * WIDE;
const PAGE_WORDS: usize = 32 * WIDE;

fn beside_copies(noise: &[f32]) -> Result<(), Box<dyn Error>> {
    let dim = WIDE as u32;
    let heads = MANY as u32;
    let layer = LayerShape::new(heads, heads, dim, Dtype::Bf16);
    let config = || CacheConfig::new(vec![layer], 1 << 30);
    let plain = |code| Codec::new(Coding::new(code), Coding::new(code));
    let forms = [
        ("bf16", config()),
        ("int8", config().compress(plain(Code::Int8))),
        ("int4", config().compress(plain(Code::Int4))),
    ];
    let name = machine::name();
    println!("\n{:>6} {:>12} {:>8} {:>8}", "form", "ns a token", "row", "places");
    let when = machine::when("cargo bench -p pikv-benches --bench append")?;
    let mut csv = vec!["machine,form,row_ratio,places_ratio,date,commit,command".to_owned()];
    for (form, config) in forms {
        let (mut appended, mut rows, mut places) = (vec![], vec![], vec![]);
        for _ in 0..9 {
            let cache = Cache::new(config.clone())?;
            let mut sequence = cache.sequence();
            let mut take = |tokens: usize| -> Result<f64, pikv::Error> {
                let start = Instant::now();
                for i in 0..tokens {
                    let row = &noise[i * 37 % (noise.len() - WORDS)..][..WORDS];
                    let mut step = cache.begin([(&mut sequence, 1)])?;
                    step.append(0, row, row)?;
                    step.commit()?;
                }
                Ok(start.elapsed().as_secs_f64() / tokens as f64)
            };
            // Past the ring, and over pages that the system has given.
            take(TOKENS)?;
            appended.push(take(TOKENS)?);
            rows.push(copies(Copied::Row));
            places.push(copies(Copied::Places));
        }
        let [appended, rows, places] = [appended, rows, places].map(|of| median(&of));
        let (row, place) = (appended / rows, appended / places);
        println!("{form:>6} {:>12.0} {row:>8.2} {place:>8.2}", appended * 1e9);
        csv.push(format!("{name},{form},{row:.3},{place:.3},{when}"));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/results/append.csv");
    writeln!(std::fs::File::create(path)?, "{}", csv.join("\n"))?;
    println!("\nwritten to benches/results/append.csv");
    Ok(())
}

#[derive(Clone, Copy)]
enum Copied {
    Row,
    Places,
}

/// Seconds a token.
fn copies(to: Copied) -> f64 {
    let token: Vec<u32> = (0..WORDS as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
    let mut buffer = vec![1u32; 2 * TOKENS * WORDS];
    let (ring, pool) = buffer.split_at_mut(TOKENS * WORDS);
    let start = Instant::now();
    for i in 0..TOKENS {
        match to {
            Copied::Row => ring[i * WORDS..][..WORDS].copy_from_slice(&token),
            Copied::Places => {
                for part in [&mut *ring, &mut *pool] {
                    let pages = &mut part[i / 32 * MANY * PAGE_WORDS..][..MANY * PAGE_WORDS];
                    for (page, words) in pages.chunks_exact_mut(PAGE_WORDS).zip(token.chunks_exact(WIDE)) {
                        let (keys, values) = page.split_at_mut(PAGE_WORDS / 2);
                        let (key, value) = words.split_at(WIDE / 2);
                        keys.iter_mut().skip(i % 32).step_by(32).zip(key).for_each(|(to, from)| *to = *from);
                        values[i % 32 * WIDE / 2..][..WIDE / 2].copy_from_slice(value);
                    }
                }
            }
        }
    }
    let took = start.elapsed().as_secs_f64() / TOKENS as f64;
    std::hint::black_box(&buffer);
    took
}

/// Nanoseconds a token.
fn sample(cache: &Cache, sequence: &mut Sequence, noise: &[f32]) -> Result<f64, pikv::Error> {
    let start = Instant::now();
    for _ in 0..SAMPLE {
        append(cache, sequence, 1, noise)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(SAMPLE))
}

/// The row of a position, and the experts it goes to.
fn row(position: u32, noise: &[f32]) -> (&[f32], [u16; 2]) {
    let at = position as usize * 31 % (noise.len() - KV_HEADS * DIM);
    let expert = (position.wrapping_mul(0x9e37_79b9) >> 29) as u16;
    (&noise[at..at + KV_HEADS * DIM], [expert, (expert + 3) % 8])
}

fn append(cache: &Cache, sequence: &mut Sequence, n: u32, noise: &[f32]) -> Result<(), pikv::Error> {
    let start = sequence.next_position().0;
    let (mut rows, mut experts) = (Vec::new(), Vec::new());
    for position in start..start + n {
        let (row, chosen) = row(position, noise);
        rows.extend_from_slice(row);
        experts.extend(chosen);
    }
    let mut step = cache.begin([(sequence, n)])?;
    step.append(0, &rows, &rows)?;
    step.route(0, &experts)?;
    step.commit()
}

/// Every token is there, under its expert, with its values.
fn check(sequence: &Sequence, noise: &[f32]) -> Result<(), Box<dyn Error>> {
    let (mut key, mut value) = ([0.0; DIM], [0.0; DIM]);
    let mut seen = vec![false; sequence.next_position().0 as usize];
    for page in sequence.pages(0, 1)? {
        for lane in 0..page.tokens {
            let position = sequence.read(0, 1, page.id, lane, &mut key, &mut value)?;
            let (row, experts) = row(position.0, noise);
            let stored = row[DIM..].iter().map(|x| half::bf16::from_f32(*x).to_f32());
            let filed = page.id.place == Place::Ring || page.id.place == Place::Run(experts[0]);
            if !filed || !stored.eq(key) || key != value {
                return Err(format!("position {} is not what was appended", position.0).into());
            }
            seen[position.0 as usize] = true;
        }
    }
    match seen.iter().position(|seen| !seen) {
        Some(position) => Err(format!("position {position} is missing").into()),
        None => Ok(()),
    }
}
