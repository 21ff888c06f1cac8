//! Decoding with some pages in lower tiers: measures the rates of the tiers, places pages by a linear program, and prints the time of a
//! step as a ratio to a step with all pages in the first tier. The bits are compared each time.
//!
//! `cargo run --release -p pikv-examples --bin tiers [tokens]`

use pikv::planner::flexgen::{Class, Machine, Tier};
use pikv::report::Place;
use pikv::tiers::Tiers;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, Error, LayerShape, Layout, Sequence};
use std::time::Instant;

const LAYERS: usize = 8;
const KV_HEADS: usize = 2;
const HEADS: usize = 8;
const DIM: usize = 64;
/// Tokens decoded for each figure, and rolled back.
const STEPS: usize = 24;

fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Decodes, rolls the tokens back, and returns the median seconds of a step and all outputs.
fn decode(cache: &Cache, sequence: &mut Sequence) -> Result<(f64, Vec<u32>), Error> {
    let (mut seconds, mut bits) = (Vec::new(), Vec::new());
    let mut out = vec![0.0; HEADS * DIM];
    for i in 0..STEPS as u64 {
        let inputs: Vec<[Vec<f32>; 3]> = (0..LAYERS as u64)
            .map(|layer| {
                let seed = 1 << 40 | i << 8 | layer << 2;
                [(0, KV_HEADS), (1, KV_HEADS), (2, HEADS)].map(|(of, heads)| noise(seed + of, heads * DIM))
            })
            .collect();
        let from = Instant::now();
        let mut step = cache.begin([(&mut *sequence, 1)])?;
        for (layer, [k, v, q]) in inputs.iter().enumerate() {
            step.append(layer, k, v)?;
            step.attend(layer, q, &Attend::new(0.125), AttendOutput::new(&mut out))?;
            bits.extend(out.iter().map(|x| x.to_bits()));
        }
        step.commit()?;
        seconds.push(from.elapsed().as_secs_f64());
    }
    sequence.rollback(STEPS as u32)?;
    seconds.sort_by(f64::total_cmp);
    Ok((seconds[STEPS / 2], bits))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens: u32 = std::env::args().nth(1).map_or(Ok(16384), |n| n.parse())?;
    let layout = Layout::new(DIM as u32, Dtype::Bf16);
    let shape = LayerShape::with_layout(KV_HEADS as u32, HEADS as u32, layout);
    let room = 4 << 30;
    let tiers = Tiers::new().host(room).file(std::env::temp_dir(), room).staging(1 << 30);
    let config = CacheConfig::new(vec![shape; LAYERS], room).ring(128).rollback(STEPS as u32).tiers(tiers);
    let cache = Cache::new(config)?;
    let mut sequence = cache.sequence();
    while sequence.next_position().0 < tokens {
        let (n, seed) =
            (128.min(tokens - sequence.next_position().0), u64::from(sequence.next_position().0) << 8);
        let mut step = cache.begin([(&mut sequence, n)])?;
        for layer in 0..LAYERS {
            let rows = |of| noise(seed + 2 * layer as u64 + of, n as usize * KV_HEADS * DIM);
            step.append(layer, &rows(0), &rows(1))?;
        }
        step.commit()?;
    }
    let pool = sequence.pages(0, 0)?.filter(|page| page.id.place != Place::Ring && page.tokens == 32).count();
    let pages = (pool * LAYERS * KV_HEADS) as u64;
    let bytes = pages * layout.bytes();
    println!("{pages} pages of {} bytes: {:.1} MB", layout.bytes(), bytes as f64 / 1e6);

    let rates = cache.tier_rates(layout.bytes(), pages as usize)?;
    for rate in &rates {
        println!("{}: {:.2} GB/s up, {:.2} GB/s down", rate.name, rate.read / 1e9, rate.write / 1e9);
    }
    decode(&cache, &mut sequence)?;
    let (compute, want) = decode(&cache, &mut sequence)?;
    println!("all in the first tier: {:.2} ms a step\n", 1e3 * compute);
    println!(
        "fast, host, file (pages) | planned ms | measured ms | tokens/s of all-fast | same bits | read ahead, awaited, late"
    );
    for (share, host) in [(1.0, 1.0), (0.5, 0.25), (0.5, 0.0), (0.25, 0.25), (0.25, 0.0), (0.0, 0.0)] {
        let mut below: Vec<Tier> = rates.iter().cloned().map(Tier::from).collect();
        below[0].capacity = (bytes as f64 * host) as u64;
        let machine = Machine::new((bytes as f64 * share) as u64, below).compute(compute);
        let pool = Class::new("pool", pages, layout.bytes());
        let placement = machine.place(&[pool])?;
        sequence.arrange(0..LAYERS, &placement.shares(0))?;
        decode(&cache, &mut sequence)?;
        // The load of the machine varies: the all-fast step is measured right after.
        let before = cache.fetches();
        let (seconds, got) = decode(&cache, &mut sequence)?;
        let after = cache.fetches();
        sequence.arrange(0..LAYERS, &[1.0, 0.0, 0.0])?;
        let (fast, again) = decode(&cache, &mut sequence)?;
        let fetched = [after.ahead - before.ahead, after.awaited - before.awaited, after.late - before.late];
        println!(
            "{:?} | {:.2} | {:.2} | {:.3} | {} | {:?}",
            placement.pages[0],
            1e3 * placement.seconds,
            1e3 * seconds,
            fast / seconds,
            if got == want && again == want { "yes" } else { "NO" },
            fetched
        );
    }
    Ok(())
}
