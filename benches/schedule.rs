//! What the closed loop costs beside attention, and what an eviction costs among few pages and among many.
//!
//! `cargo bench -p pikv-benches --bench schedule [-- --quick] [--hits]`
//!
//! *The loop*: one layer, 32 query heads over 8 KV heads of 128 channels in bf16, 8 experts, 32,768 tokens held. A step of one token
//! with a router and a policy is timed in turn with one of a cache that has neither, stage by stage. Times are parts of attention's time
//! without a policy: `stages` is the additional time of all but attention; `evict` is the time to rank and drop tokens, spread over the steps
//! from one eviction to the next; `attend` is attention with the policy, which sums weights for some policies.
//!
//! *Eviction*: one head that holds 10^3 pages, and 10^6. The additional time of a step that evicts, over the steps before it, divided by
//! the number of pages that the evicted tokens would fill. Before such steps 64 MiB of other memory are read, as attention would do.
//!
//! *Hits*: the same layer with one expert, once with hits counted and once without, in turn. `attend` is attention's time with them over
//! that without, over as many steps as lie between two rows whose hits are counted; `stages` is the time at commit to keep the extremes of
//! keys, over 32 steps, as a part of attention's time; `ratio` is the bytes of ghosts over those of pages. `--hits` measures this alone.
//!
//! Every cache is checked to hold what its budget says. The results of a whole run go to `benches/results/schedule.csv`.

#[allow(dead_code, reason = "the limits are for other benches")]
mod machine;

use machine::median;
use pikv::policy::{Budget, Eviction, H2o, Lru, SnapKv, StreamingLlm};
use pikv::router::{CacheAware, LoadBalanced, Router, Shape, TopK};
use pikv::rules::Hits;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape, Sequence, StepReport};
use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const HEAD_DIM: usize = 128;
const KV_HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
/// Tokens of a step while a cache is filled.
const STEP: u32 = 512;

fn main() -> Result<()> {
    let given = |option: &str| std::env::args().any(|argument| argument == option);
    let (quick, only_hits) = (given("--quick"), given("--hits"));
    let name = machine::name();
    println!("{name}\n");
    let when = machine::when("cargo bench -p pikv-benches --bench schedule")?;
    let mut csv =
        vec!["machine,what,case,tokens,attend_ratio,stages,evict,ratio,date,commit,command".to_owned()];
    let (context, samples) = if quick { (4096, 5) } else { (32_768, 101) };
    println!("{:28} {:>8} {:>8} {:>8} {:>8}", "hits", "tokens", "attend", "stages", "bytes");
    for every in [1, 4] {
        let HitCosts { attend, stages, bytes } = hit_costs(context, every, samples)?;
        let label = format!("every {every}");
        let (stages_percent, percent) = (stages * 100.0, bytes * 100.0);
        println!("{label:28} {context:>8} {attend:>8.4} {stages_percent:>6.2} % {percent:>6.2} %");
        csv.push(format!("{name},hits,{label},{context},{attend:.4},{stages:.5},,{bytes:.5},{when}"));
    }
    if only_hits {
        return Ok(());
    }
    println!();
    println!("{:28} {:>8} {:>8} {:>8} {:>8}", "the loop", "tokens", "attend", "stages", "evict");
    for case in cases(context)? {
        let label = case.name;
        let Costs { attend, stages, evict } = costs(case, context, samples)?;
        println!("{label:28} {context:>8} {attend:>8.3} {:>6.2} % {:>6.2} %", stages * 100.0, evict * 100.0);
        csv.push(format!("{name},loop,{label},{context},{attend:.4},{stages:.5},{evict:.5},,{when}"));
    }
    let sizes = if quick { [1_000u32, 30_000] } else { [1_000, 1_000_000] };
    println!("\n{:28} {:>10} {:>10}  us a page", "eviction", "pages", "ratio");
    for (label, eviction) in [
        ("StreamingLLM", Eviction::new(StreamingLlm, Budget::Tokens(0))),
        ("LRU", Eviction::new(Lru::default(), Budget::Tokens(0))),
        ("LRU whole pages", Eviction::new(Lru::default(), Budget::Tokens(0)).by_page()),
    ] {
        let mut first = None;
        for pages in sizes {
            let cost = eviction_cost(&eviction, pages)?;
            let ratio = cost / *first.get_or_insert(cost);
            println!("{label:28} {pages:>10} {ratio:>10.2}  {:.2}", cost * 1e6);
            csv.push(format!("{name},eviction,{label},{},,,,{ratio:.3},{when}", u64::from(pages) * 32));
        }
    }
    if !quick {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/results/schedule.csv");
        writeln!(std::fs::File::create(path)?, "{}", csv.join("\n"))?;
        println!("\nwritten to benches/results/schedule.csv");
    }
    Ok(())
}

struct Case {
    name: &'static str,
    router: Box<dyn Router>,
    eviction: Option<Eviction>,
}

fn cases(context: u32) -> Result<Vec<Case>> {
    let shape = Shape::new(EXPERTS as u32, TOP_K as u32);
    let budget = Budget::Tokens(context);
    let aware = || -> Result<Box<dyn Router>> { Ok(Box::new(CacheAware::default().router(shape)?)) };
    let balanced = Box::new(LoadBalanced::default().router(shape)?);
    let evicting = |name, router, eviction| Case { name, router, eviction: Some(eviction) };
    Ok(vec![
        Case { name: "R_T + none", router: Box::new(TopK.router(shape)?), eviction: None },
        evicting("R_LB + SL", balanced, Eviction::new(StreamingLlm, budget.clone())),
        evicting("R_P + LRU", aware()?, Eviction::new(Lru::default(), budget.clone())),
        evicting("R_P + H2O", aware()?, Eviction::new(H2o, budget.clone())),
        evicting("R_P + SnapKV", aware()?, Eviction::new(SnapKv::default(), budget)),
    ])
}

/// Keys, values and queries of the bench, and the experts of its tokens.
struct Rows {
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
    logits: Vec<f32>,
}

impl Rows {
    fn new(seed: u64, rows: usize) -> Rows {
        let mut noise = machine::noise(seed);
        let mut take = |n: usize, factor: f32| noise.by_ref().take(n).map(|x| factor * x).collect();
        let kv = rows * KV_HEADS * HEAD_DIM;
        Rows {
            k: take(kv, 1.0),
            v: take(kv, 1.0),
            q: take(rows * QUERY_HEADS * HEAD_DIM, 4.0),
            logits: take(rows * EXPERTS, 4.0),
        }
    }
}

/// The experts with the highest logits of each row.
fn routes(logits: &[f32]) -> Vec<u16> {
    let top = |row: &[f32]| {
        let mut order: Vec<u16> = (0..EXPERTS as u16).collect();
        order.sort_by(|a, b| row[usize::from(*b)].total_cmp(&row[usize::from(*a)]));
        order.truncate(TOP_K);
        order
    };
    logits.chunks_exact(EXPERTS).flat_map(top).collect()
}

fn config() -> CacheConfig {
    let dim = HEAD_DIM as u32;
    let layer = LayerShape::new(KV_HEADS as u32, QUERY_HEADS as u32, dim, Dtype::Bf16);
    CacheConfig::new(vec![layer], 1 << 30).ring(STEP).experts(EXPERTS as u32, TOP_K as u32)
}

/// Adds `tokens` tokens without attention.
fn fill(cache: &Cache, sequence: &mut Sequence, tokens: u32, rows: &Rows) -> Result<()> {
    let routes = routes(&rows.logits);
    let mut left = tokens;
    while left > 0 {
        let n = left.min(STEP);
        let kv = n as usize * KV_HEADS * HEAD_DIM;
        let mut step = cache.begin([(&mut *sequence, n)])?;
        step.append(0, &rows.k[..kv], &rows.v[..kv])?;
        step.route(0, &routes[..n as usize * TOP_K])?;
        step.commit()?;
        left -= n;
    }
    Ok(())
}

const OPTIONS: Attend = Attend::new(0.088_388_35);

struct Costs {
    attend: f64,
    stages: f64,
    evict: f64,
}

fn costs(case: Case, context: u32, samples: usize) -> Result<Costs> {
    let many = Rows::new(1, STEP as usize);
    let evicts = case.eviction.is_some();
    let plain = Cache::new(config())?;
    let watched = Cache::new(match case.eviction {
        Some(eviction) => config().evict(eviction),
        None => config(),
    })?;
    // Before the cache is filled, so that pages are known where its router asks for hits.
    let mut pikv = ClosedLoop::new(watched.clone(), vec![case.router])?;
    let (mut a, mut b) = (plain.sequence(), watched.sequence());
    fill(&plain, &mut a, context, &many)?;
    fill(&watched, &mut b, context, &many)?;
    let mut out = vec![0.0; QUERY_HEADS * HEAD_DIM];
    let (mut attend, mut attend_with, mut rest, mut rest_with) = (vec![], vec![], vec![], vec![]);
    for i in 0..samples {
        let Rows { k, v, q, logits } = Rows::new(2 + i as u64, 1);
        let chosen = routes(&logits);
        let start = Instant::now();
        let mut step = plain.begin([(&mut a, 1)])?;
        step.append(0, &k, &v)?;
        let before = Instant::now();
        step.attend(0, &q, &OPTIONS, AttendOutput::new(&mut out))?;
        let took = before.elapsed();
        step.route(0, &chosen)?;
        step.commit()?;
        rest.push((start.elapsed() - took).as_secs_f64());
        attend.push(took.as_secs_f64());
        let start = Instant::now();
        let mut step = pikv.begin([(&mut b, 1)])?;
        step.append(0, &k, &v)?;
        let before = Instant::now();
        step.attend(0, &q, &OPTIONS, AttendOutput::new(&mut out))?;
        let took = before.elapsed();
        step.route(0, &logits)?;
        step.commit()?;
        rest_with.push((start.elapsed() - took).as_secs_f64());
        attend_with.push(took.as_secs_f64());
    }
    let base = median(&attend);
    // From one eviction to the next, in both caches, without attention.
    let period = context / 16;
    let one = Rows::new(9, 1);
    let chosen = routes(&one.logits);
    let steps = |cache: &Cache, sequence: &mut Sequence| -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..period {
            let mut step = cache.begin([(&mut *sequence, 1)])?;
            step.append(0, &one.k, &one.v)?;
            step.route(0, &chosen)?;
            step.commit()?;
        }
        Ok(start.elapsed())
    };
    let without = steps(&plain, &mut a)?.as_secs_f64();
    let with = steps(&watched, &mut b)?.as_secs_f64();
    let held = b.resident(0, 0)?.0;
    let sound =
        if evicts { (context - period..=context).contains(&held) } else { held == b.next_position().0 };
    if !sound {
        return Err(format!("{}: {held} tokens held of a budget of {context}", case.name).into());
    }
    Ok(Costs {
        attend: median(&attend_with) / base,
        stages: (median(&rest_with) - median(&rest)) / base,
        evict: (with - without) / f64::from(period) / base,
    })
}

/// What counting hits costs.
struct HitCosts {
    attend: f64,
    stages: f64,
    bytes: f64,
}

fn hit_costs(context: u32, every: u32, samples: usize) -> Result<HitCosts> {
    let many = Rows::new(1, STEP as usize);
    let plain = Cache::new(config().experts(1, 1))?;
    let counting = Cache::new(config().experts(1, 1).hits(Hits::new().every(every)))?;
    let mut sequences = [plain.sequence(), counting.sequence()];
    for (cache, sequence) in [&plain, &counting].into_iter().zip(&mut sequences) {
        let mut left = context;
        while left > 0 {
            let n = left.min(STEP);
            let kv = n as usize * KV_HEADS * HEAD_DIM;
            let mut step = cache.begin([(&mut *sequence, n)])?;
            step.append(0, &many.k[..kv], &many.v[..kv])?;
            step.commit()?;
            left -= n;
        }
    }
    let (mut out, mut report, mut wanted) = (vec![0.0; QUERY_HEADS * HEAD_DIM], StepReport::default(), 0.0);
    let (mut base, mut ratios, mut commits) = (vec![], vec![], [vec![], vec![]]);
    for i in 0..samples {
        let mut took = [Duration::ZERO; 2];
        for j in 0..every {
            let Rows { k, v, q, .. } = Rows::new(2 + (i as u32 * every + j) as u64, 1);
            // Who comes first has the caches as the other left them: each in turn.
            for at in if (i as u32 + j).is_multiple_of(2) { [0, 1] } else { [1, 0] } {
                let cache = [&plain, &counting][at];
                let mut step = cache.begin([(&mut sequences[at], 1)])?;
                step.append(0, &k, &v)?;
                let start = Instant::now();
                step.attend(0, &q, &OPTIONS, AttendOutput::new(&mut out))?;
                took[at] += start.elapsed();
                let start = Instant::now();
                step.commit_with(&mut report)?;
                commits[at].push(start.elapsed().as_secs_f64());
                wanted += report.hits(0)[0];
            }
        }
        let [without, with] = took.map(|took| took.as_secs_f64());
        base.push(without / f64::from(every));
        ratios.push(with / without);
    }
    let all = samples as f64 * (KV_HEADS as u32 * Hits::new().pages) as f64;
    if wanted != all {
        return Err(format!("{wanted} pages were wanted and found, {all} expected").into());
    }
    // A tile of 32 tokens is taken in at once.
    let [without, with] = commits.map(|of| {
        let whole = &of[..of.len() / 32 * 32];
        whole.iter().sum::<f64>() / whole.len().max(1) as f64
    });
    Ok(HitCosts {
        attend: median(&ratios),
        stages: (with - without) / median(&base),
        bytes: counting.usage().ghosts as f64 / counting.usage().taken as f64,
    })
}

/// Seconds that evicting a page takes, among `pages`: what a step that evicts takes more than those that do not, over the pages'
/// worth of tokens that it evicts.
fn eviction_cost(eviction: &Eviction, pages: u32) -> Result<f64> {
    let layer = LayerShape::new(1, 1, 1, Dtype::Bf16);
    let mut evicting = eviction.clone();
    let budget = pages * 32;
    evicting.budget = Budget::Tokens(budget);
    let cache = Cache::new(CacheConfig::new(vec![layer], 8 << 30).ring(STEP).evict(evicting))?;
    let mut sequence = cache.sequence();
    let values: Vec<f32> = machine::noise(5).take(STEP as usize).collect();
    let (mut held, other) = (0, vec![1u8; 64 << 20]);
    // Whether other things lie in the caches, as after attention; seconds that a step takes, and the tokens that it evicts.
    let mut append = || -> Result<(bool, f64, u32)> {
        let cold = held + 16 * STEP > budget;
        if cold {
            std::hint::black_box(other.iter().map(|x| u64::from(*x)).sum::<u64>());
        }
        let start = Instant::now();
        let mut step = cache.begin([(&mut sequence, STEP)])?;
        step.append(0, &values, &values)?;
        step.commit()?;
        let took = start.elapsed().as_secs_f64();
        let before = std::mem::replace(&mut held, sequence.resident(0, 0)?.0);
        Ok((cold, took, before + STEP - held))
    };
    // The first two find their memory new.
    let (mut plain, mut costs, mut left) = (vec![], vec![], 2 + if pages > 100_000 { 5 } else { 41 });
    while left > 0 {
        let (cold, took, gone) = append()?;
        if gone == 0 {
            plain.extend(cold.then_some(took));
            continue;
        }
        if !(budget / 16..budget / 8 + STEP).contains(&gone) {
            return Err(format!("{gone} tokens evicted at once of a budget of {budget}").into());
        }
        costs.push((took - median(&plain)) / f64::from(gone) * 32.0);
        left -= 1;
    }
    Ok(median(&costs[2..]))
}
