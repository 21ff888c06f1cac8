//! A study of eviction without a model: a stream of tokens is replayed into a cache that keeps a part of them, and its numbers
//! are collected.
//!
//! `cargo run --release --example trace [-- --read FILE] [--write FILE] [--tokens N] [--resident N]`
//!
//! The stream is read from a trace, or made up: 2 of 16 experts by Zipf's law, a hot set that drifts. Two policies are compared
//! on it: the page whose first token is oldest goes, or the page that was wanted longest ago.

use pikv::metrics::{Collector, Evicted, Reused, Sink, StepMetrics};
use pikv::trace::{Reader, Row, Skewed, Writer};
use pikv::{Cache, CacheConfig, Dtype, LayerShape, Layout, PageId, Place};
use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::{BufReader, BufWriter};

const RING: u32 = 64;
const DIM: u32 = 8;

#[derive(Clone, Copy, Debug)]
enum Policy {
    Oldest,
    LeastRecent,
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut read, mut write, mut tokens, mut resident) = (None, None, 8192, 2048);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().unwrap_or_default();
        let number =
            || value.parse::<u32>().map_err(|_| format!("{argument} {value:?}; it must be a whole number"));
        match argument.as_str() {
            "--read" => read = Some(value),
            "--write" => write = Some(value),
            "--tokens" => tokens = number()?,
            "--resident" => resident = number()?,
            other => {
                let options = "--read FILE, --write FILE, --tokens N and --resident N";
                return Err(format!("{other}: options are {options}").into());
            }
        }
    }
    let (experts, rows): (u32, Vec<Row>) = match read {
        Some(path) => {
            let reader = Reader::new(BufReader::new(File::open(path)?))?;
            (reader.experts(), reader.take(tokens as usize).collect::<Result<_, _>>()?)
        }
        None => {
            let options = Skewed::default();
            (options.experts, options.rows()?.take(tokens as usize).collect())
        }
    };
    if let Some(path) = write {
        let mut writer = Writer::new(BufWriter::new(File::create(path)?), experts)?;
        rows.iter().try_for_each(|row| writer.write(row))?;
        writer.finish()?;
    }
    println!("{} tokens, {experts} experts, at most {resident} resident\n", rows.len());
    println!(
        "{:12} {:>6} {:>8} {:>12} {:>12}   hits of the most and the least wanted expert",
        "goes first", "hits", "evicted", "age, median", "gap, median"
    );
    for policy in [Policy::Oldest, Policy::LeastRecent] {
        let sink = Collector::new(experts as usize);
        replay(&rows, experts, resident, policy, &sink)?;
        let totals = sink.totals();
        let wanted: Vec<u64> = totals.hits.iter().zip(&totals.misses).map(|(h, m)| h + m).collect();
        let by_wanted = |expert: &usize| wanted[*expert];
        let (all, hits): (u64, u64) = (wanted.iter().sum(), totals.hits.iter().sum());
        let known = |value: Option<u64>| value.map_or("none".to_owned(), |value| format!("<= {value}"));
        let rate = |expert: Option<usize>| {
            let rate = expert.and_then(|expert| totals.hit_rate(expert));
            rate.map_or("none".to_owned(), |rate| format!("{:.1} %", rate * 100.0))
        };
        println!(
            "{:12} {:>4.1} % {:>8} {:>12} {:>12}   {}, {}",
            format!("{policy:?}"),
            hits as f64 / all.max(1) as f64 * 100.0,
            totals.evicted_pages,
            known(totals.age.quantile(0.5)),
            known(totals.gap.quantile(0.5)),
            rate((0..wanted.len()).max_by_key(by_wanted)),
            rate((0..wanted.len()).filter(|e| wanted[*e] > 0).min_by_key(by_wanted)),
        );
    }
    Ok(())
}

fn replay(
    rows: &[Row],
    experts: u32,
    resident: u32,
    policy: Policy,
    sink: &dyn Sink,
) -> Result<(), Box<dyn Error>> {
    let layout = Layout { k_dim: DIM, v_dim: DIM, k: Dtype::F32, v: Dtype::F32 };
    let layer = LayerShape { kv_heads: 1, query_heads: 1, layout, window: None, rope: None };
    // The experts that a token is filed by beyond its first do not matter here.
    let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 32).ring(RING).experts(experts, 1))?;
    let mut sequence = cache.sequence();
    // When each resident page was last wanted, by step.
    let mut used: HashMap<PageId, usize> = HashMap::new();
    // Where each token is: in the ring at first, then a page, then nowhere.
    let mut place: Vec<Option<PageId>> = Vec::new();
    let mut filed = vec![0u32; experts as usize];
    let ring = |p: usize| PageId { place: Place::Ring, ordinal: p as u32 / pikv::PAGE };
    for (step, row) in rows.iter().enumerate() {
        let (mut hits, mut misses) = (vec![0; experts as usize], vec![0; experts as usize]);
        for &p in &row.wanted {
            let home = usize::from(rows[p as usize].experts[0]);
            let Some(page) = place[p as usize] else {
                misses[home] += 1;
                continue;
            };
            hits[home] += 1;
            let before = used.insert(page, step);
            if let Some(gap) = before.map(|before| (step - before) as u32).filter(|gap| *gap > 0) {
                sink.reused(&Reused { layer: 0, kv_head: 0, gap });
            }
        }
        let mut begun = cache.begin([(&mut sequence, 1)])?;
        begun.append(0, &[0.0; DIM as usize], &[0.0; DIM as usize])?;
        begun.route(0, &row.experts[..1])?;
        begun.commit()?;
        place.push(Some(ring(step)));
        if let Some(left) = (step + 1).checked_sub(RING as usize + 1) {
            let home = rows[left].experts[0];
            let ordinal = filed[usize::from(home)] / pikv::PAGE;
            filed[usize::from(home)] += 1;
            let page = PageId { place: Place::Expert(home), ordinal };
            place[left] = Some(page);
            used.entry(page).or_insert(step);
        }
        while sequence.resident(0, 0)?.0 > resident {
            // Full pages, so that what is filed next goes on where it was.
            let pages = sequence.pages(0, 0)?;
            let full = pages.filter(|page| page.id.place != Place::Ring && page.tokens == pikv::PAGE);
            let victim = full.min_by_key(|page| match policy {
                Policy::Oldest => (0, page.first),
                Policy::LeastRecent => (used.get(&page.id).copied().unwrap_or(0), page.first),
            });
            let Some(page) = victim else { break };
            let gone: Vec<_> = sequence.positions(0, 0, page.id)?.collect();
            gone.into_iter().for_each(|p| place[p.0 as usize] = None);
            used.remove(&page.id);
            sequence.evict(0, 0, page.id)?;
            let age = step as u32 - page.last.0;
            sink.evicted(&Evicted { layer: 0, kv_head: 0, tokens: page.tokens, bytes: page.bytes, age });
        }
        sink.step(&StepMetrics {
            rows: 1,
            resident_bytes: cache.usage().taken,
            logical_bytes: (step as u64 + 1) * u64::from(2 * DIM * 4),
            hits: &hits,
            misses: &misses,
        });
    }
    Ok(())
}
