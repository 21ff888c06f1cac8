//! R_A against each of its arms alone, and R_P against R_T, over several seeds.

use crate::policies::Row;
use crate::replay::{self, key, look};
use crate::{Result, Text, evaluate, hits};
use indicatif::ProgressBar;
use pikv::metrics::Collector;
use pikv::policy::{Budget, Eviction, Lru};
use pikv::router::{Adaptive, CacheAware, Router, Shape, TopK};
use pikv::trace::Skewed;
use pikv::{Attend, AttendOutput, Cache, ClosedLoop, ReadPages};
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;
use std::sync::Arc;

const SEEDS: usize = 6;
/// Tokens of a made-up stream.
const TOKENS: u32 = 8192;
/// Penalty of R_A's reward per unit of imbalance, its default.
const IMBALANCE: f64 = 0.1;

const COLUMNS: &str = "stream,tokens,seed,router,hit_rate,imbalance,reward,nats";

/// A router of the table.
#[derive(Clone)]
enum Kind {
    TopK,
    CacheAware(f32),
    Arm(usize),
    Adaptive,
}

impl Kind {
    fn all(arms: usize) -> Vec<Kind> {
        let mut all = vec![Kind::TopK, Kind::CacheAware(0.05), Kind::CacheAware(1.4)];
        all.extend((0..arms).map(Kind::Arm));
        all.push(Kind::Adaptive);
        all
    }

    /// Name of the row; that of an arm has its weights and the number of experts that it fetches.
    fn name(&self, top_k: u32) -> String {
        match self {
            Kind::TopK => "R_T".to_owned(),
            Kind::CacheAware(lambda) => format!("R_P lambda {lambda}"),
            Kind::Arm(arm) => {
                let arm = Adaptive::default_arms(top_k)[*arm];
                let of = arm.coefficients;
                let (alpha, lambda, beta) = (of.alpha, of.lambda, of.beta);
                format!("arm alpha {alpha} lambda {lambda} beta {beta} fetch {}", arm.fetch)
            }
            Kind::Adaptive => "R_A".to_owned(),
        }
    }

    fn router(&self, shape: Shape, seed: u64) -> Result<Box<dyn Router>> {
        let adaptive = Adaptive::new(shape.top_k, seed);
        Ok(match self {
            Kind::TopK => Box::new(TopK.router(shape)?),
            Kind::CacheAware(lambda) => Box::new(CacheAware::default().lambda(*lambda).router(shape)?),
            Kind::Arm(arm) => {
                let arm = Adaptive::default_arms(shape.top_k)[*arm];
                Box::new(adaptive.arms(vec![arm]).router(shape)?)
            }
            Kind::Adaptive => Box::new(adaptive.router(shape)?),
        })
    }
}

pub fn run(subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let mut sheet = Sheet::new(results::file("adaptive.csv"), COLUMNS, "loop")?;
    let top_k = Skewed::default().top_k;
    let kinds = Kind::all(Adaptive::default_arms(top_k).len());
    let bar = ProgressBar::new((2 * SEEDS * kinds.len()) as u64);
    for seed in 0..SEEDS as u64 {
        for kind in &kinds {
            let (hits, imbalance) = skewed(kind, seed)?;
            let reward = hits - IMBALANCE * imbalance;
            let name = kind.name(top_k);
            sheet.row(&format!("skewed,{TOKENS},{seed},{name},{hits:.5},{imbalance:.5},{reward:.5},"))?;
            bar.inc(1);
        }
    }
    let window = subject.window();
    let budget = (window / 4) as u32;
    let (experts, top_k) = subject.experts;
    let kinds = Kind::all(Adaptive::default_arms(top_k).len());
    for seed in 0..SEEDS {
        for kind in &kinds {
            let row = Row::evicting("LRU", Eviction::new(Lru::default(), Budget::Tokens(budget)));
            let shape = Shape::new(experts, top_k);
            let routers: Result<_> =
                (0..subject.layers).map(|l| kind.router(shape, (seed * subject.layers + l) as u64)).collect();
            let text = Text { ids: &ids[seed * window..=(seed + 1) * window], window };
            let routed = ("R_A", routers?);
            let o =
                evaluate(subject, routed, budget, &row, ReadPages::Experts, text, &ProgressBar::hidden())?;
            let (name, reward) = (kind.name(top_k), o.hit_rate - IMBALANCE * o.imbalance);
            sheet.row(&format!(
                "{},{window},{seed},{name},{:.5},{:.5},{reward:.5},{:.6}",
                subject.name(),
                o.hit_rate,
                o.imbalance,
                o.nats
            ))?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Hit rate and imbalance of a skewed stream under LRU at a quarter.
fn skewed(kind: &Kind, seed: u64) -> Result<(f64, f64)> {
    let options = Skewed::default().seed(seed);
    let (experts, top_k, budget) = (options.experts, options.top_k, TOKENS / 4);
    let lru = Eviction::new(Lru::default(), Budget::Tokens(budget));
    let cache = Cache::new(replay::config(budget).experts(experts, top_k).hits(hits(budget)).evict(lru))?;
    let sink = Arc::new(Collector::new(experts as usize));
    let routers = vec![kind.router(Shape::new(experts, top_k), seed)?];
    let mut pikv = ClosedLoop::new(cache.clone(), routers)?.sink(sink.clone());
    let (mut sequence, mut rows, mut random) = (cache.sequence(), options.rows()?, SplitMix(seed));
    let mut filed = vec![0; experts as usize];
    for position in 0..TOKENS as usize {
        let logits = replay::logits(rows.by_rank(), options.skew, &mut random);
        let query = rows.next().map(|row| look(&row.wanted)).unwrap_or_default();
        let mut step = pikv.begin([(&mut sequence, 1)])?;
        step.append(0, &key(position), &[1.0])?;
        let routes = step.route(0, &logits)?;
        filed[usize::from(routes.filing().experts[0])] += 1;
        step.attend(0, &query, &Attend::new(8.0).read(ReadPages::Experts), AttendOutput::new(&mut [0.0]))?;
        step.commit()?;
    }
    Ok((sink.totals().hit_rate_of_all().unwrap_or(1.0), crate::imbalance(&filed)))
}
