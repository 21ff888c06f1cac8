//! Whether an expert pays off that pays for its misses: R_P beside R_T, over several seeds.

use crate::policies::Row;
use crate::replay::{self, key, look};
use crate::{Result, evaluate, hits};
use indicatif::ProgressBar;
use pikv::metrics::Collector;
use pikv::policy::{Budget, Eviction, Lru};
use pikv::router::{CacheAware, Router, Shape, TopK};
use pikv::trace::Skewed;
use pikv::{Attend, Cache, ClosedLoop, Output, Read};
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::subject::Subject;
use std::sync::Arc;

/// Tokens of a made-up stream.
const TOKENS: u32 = 8192;

/// Logits that an expert pays for each unit of `ln(1 + m_e)`: the default, and as much as the cap of a bias lets act.
const LAMBDAS: [f32; 2] = [0.05, 1.4];

/// Prints hit rates at a budget of a quarter under LRU: of a skewed stream, a seed each time, and of the MoE, a part of the novel
/// each time.
pub fn run(subject: &Subject, ids: &[u32], seeds: usize) -> Result<()> {
    let window = subject.window();
    let most = (ids.len() - 1) / window;
    if !(2..=most).contains(&seeds) {
        return Err(format!("--seeds {seeds}: 2 to {most}, as each is a window of the novel").into());
    }
    let bar = ProgressBar::new((seeds * (1 + LAMBDAS.len()) * 2) as u64);
    let all = || std::iter::once(None).chain(LAMBDAS.map(Some));
    println!(
        "hit rate with R_T, and what R_P adds to it (of {seeds} seeds the mean, the deviation of one, the least and the most)\n"
    );
    let stream = |seed: usize, lambda| -> Result<f64> {
        let rate = skewed(seed as u64, lambda);
        bar.inc(1);
        rate
    };
    report("skewed stream", seeds, all(), stream)?;
    let model = |seed: usize, lambda| -> Result<f64> {
        let budget = (window / 4) as u32;
        let row = Row::evicting("LRU", lru(budget));
        let (experts, top_k) = subject.experts;
        let routers = (0..subject.layers).map(|_| router(lambda, Shape::new(experts, top_k)));
        let routers = ("R_P", routers.collect::<Result<_>>()?);
        let ids = &ids[seed * window..=(seed + 1) * window];
        let outcome = evaluate(subject, routers, budget, &row, Read::Experts, ids, &ProgressBar::hidden())?;
        bar.inc(1);
        Ok(outcome.hit_rate)
    };
    report(subject.name(), seeds, all(), model)?;
    bar.finish_and_clear();
    Ok(())
}

fn report(
    name: &str,
    seeds: usize,
    lambdas: impl Iterator<Item = Option<f32>>,
    rate: impl Fn(usize, Option<f32>) -> Result<f64>,
) -> Result<()> {
    let mut base: Vec<f64> = Vec::new();
    for lambda in lambdas {
        let rates = (0..seeds).map(|seed| rate(seed, lambda)).collect::<Result<Vec<f64>>>()?;
        let Some(lambda) = lambda else {
            base = rates;
            println!("{name:14} R_T              {}", summary(&base, false));
            continue;
        };
        let more: Vec<f64> = rates.iter().zip(&base).map(|(rate, base)| rate - base).collect();
        println!("{name:14} R_P lambda {lambda:<5} {}", summary(&more, true));
    }
    Ok(())
}

/// In percent.
fn summary(x: &[f64], signed: bool) -> String {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt();
    let least = x.iter().copied().fold(f64::INFINITY, f64::min);
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let [mean, deviation, least, most] = [mean, deviation, least, most].map(|x| 100.0 * x);
    if signed {
        format!("{mean:>+8.3} +- {deviation:.3}  ({least:+.3} to {most:+.3})")
    } else {
        format!("{mean:>8.3} +- {deviation:.3}  ({least:.3} to {most:.3})")
    }
}

fn lru(budget: u32) -> Eviction {
    Eviction::new(Lru::default(), Budget::Tokens(budget))
}

fn router(lambda: Option<f32>, shape: Shape) -> Result<Box<dyn Router>> {
    Ok(match lambda {
        Some(lambda) => Box::new(CacheAware::default().lambda(lambda).router(shape)?),
        None => Box::new(TopK.router(shape)?),
    })
}

/// Logits of a token whose experts are drawn as [`Skewed`] says, from the likeliest on: the largest of `ln(weight)` and a draw of
/// Gumbel's are experts drawn by their weights without putting back.
pub fn logits(by_rank: &[u16], skew: f64, random: &mut SplitMix) -> Vec<f32> {
    let mut logits = vec![0.0; by_rank.len()];
    for (rank, expert) in by_rank.iter().enumerate() {
        let gumbel = -(-random.unit().clamp(1e-12, 1.0 - 1e-12).ln()).ln();
        logits[usize::from(*expert)] = (gumbel - skew * (rank as f64 + 1.0).ln()) as f32;
    }
    logits
}

/// Of a stream whose experts a router ranks by [`logits`].
fn skewed(seed: u64, lambda: Option<f32>) -> Result<f64> {
    let options = Skewed::default().seed(seed);
    let (experts, top_k, budget) = (options.experts, options.top_k, TOKENS / 4);
    let config = replay::config(budget).experts(experts, top_k).hits(hits(budget)).evict(lru(budget));
    let cache = Cache::new(config)?;
    let sink = Arc::new(Collector::new(experts as usize));
    let routers = vec![router(lambda, Shape::new(experts, top_k))?];
    let mut pikv = ClosedLoop::new(cache.clone(), routers)?.sink(sink.clone());
    let (mut sequence, mut rows, mut random) = (cache.sequence(), options.rows()?, SplitMix(seed));
    for position in 0..TOKENS as usize {
        let logits = logits(rows.by_rank(), options.skew, &mut random);
        let query = rows.next().map(|row| look(&row.wanted)).unwrap_or_default();
        let mut step = pikv.begin([(&mut sequence, 1)])?;
        step.append(0, &key(position), &[0.0])?;
        step.route(0, &logits)?;
        step.attend(0, &query, &Attend::new(8.0).read(Read::Experts), Output::new(&mut [0.0]))?;
        step.commit()?;
    }
    Ok(sink.totals().hit_rate_of_all().unwrap_or(1.0))
}
