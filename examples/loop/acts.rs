//! Whether each rule acts: every router at its defaults against R_T, every policy against StreamingLLM (and that one against LRU).
//!
//! Two streams: the MoE over the novel, and a made-up one of skewed experts without a model (one layer, one KV head). The table has
//!
//! * for a router, the share of rows whose ranking differs from R_T's, the plain top-k of the same logits;
//! * for a policy, the share of (step, layer, KV head) in which the head holds other tokens than under its baseline;
//! * if the stream has them, the changes against the baseline: nats per token, the hit rate (share of the pages wanted by rows that were
//!   held) and the residency (share of all tokens of the rows' experts that were held).

use crate::looped::Looped;
use crate::policies::{self, Row, Setup};
use crate::replay::{self, key, look};
use crate::{Result, SINKS, far, ring, routers};
use indicatif::ProgressBar;
use pikv::metrics::Collector;
use pikv::report::Place;
use pikv::router::{Router, Routes};
use pikv::trace::Skewed;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, ReadPages, Sequence};
use pikv_engine::common::cache::{Cache as _, Keys};
use pikv_engine::common::sample::{SplitMix, nats};
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Rows of a router's ranking that differ from the model's own, and all rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranked {
    pub differ: u64,
    pub rows: u64,
}

impl Ranked {
    /// Adds the rows of a layer.
    pub fn count(&mut self, routes: &Routes, top_k: usize) {
        let rows =
            routes.filing().experts.chunks_exact(top_k).zip(routes.model().experts.chunks_exact(top_k));
        self.rows += routes.rows() as u64;
        self.differ += rows.filter(|(filing, model)| filing != model).count() as u64;
    }
}

/// Results of one run.
struct Run {
    ranked: Ranked,
    /// Hash of the positions that each (step, layer, KV head) held.
    held: Vec<u64>,
    nats: Option<f64>,
    /// Shares that were held: of wanted pages, and of the tokens of the rows' experts.
    hits: f64,
    residency: f64,
}

/// A line of the file.
struct Act {
    row: String,
    baseline: &'static str,
    stream: String,
    share: f64,
    nats: Option<f64>,
    hits: f64,
    residency: f64,
}

impl Act {
    fn router(id: &str, stream: &str, run: &Run, base: &Run) -> Act {
        let share = run.ranked.differ as f64 / run.ranked.rows.max(1) as f64;
        Act::new(id, "R_T", stream, share, run, base)
    }

    fn policy(name: &str, baseline: &'static str, stream: &str, run: &Run, base: &Run) -> Act {
        let differ = run.held.iter().zip(&base.held).filter(|(a, b)| a != b).count();
        Act::new(name, baseline, stream, differ as f64 / run.held.len().max(1) as f64, run, base)
    }

    fn new(row: &str, baseline: &'static str, stream: &str, share: f64, run: &Run, base: &Run) -> Act {
        let nats = run.nats.zip(base.nats).map(|(run, base)| run - base);
        Act {
            row: row.to_owned(),
            baseline,
            stream: stream.to_owned(),
            share,
            nats,
            hits: run.hits - base.hits,
            residency: run.residency - base.residency,
        }
    }
}

/// Writes `benches/results/acts.csv`, and prints it.
pub fn run(subject: &Subject, ids: &[u32], tokens: usize) -> Result<()> {
    let mut acts = model(subject, ids, tokens)?;
    acts.extend(skewed(4096)?);
    let columns = "row,baseline,stream,differs_share,nats_delta,hit_delta,residency_delta";
    let mut sheet = Sheet::new(results::file("acts.csv"), columns, "loop")?;
    for Act { row, baseline, stream, share, nats, hits, residency } in &acts {
        println!("{row:18} {baseline:13} {stream:12} {share:.4} {hits:+.4}");
        let nats = nats.map_or(String::new(), |nats| format!("{nats:.6}"));
        sheet.row(&format!("{row},{baseline},{stream},{share:.5},{nats},{hits:.5},{residency:.5}"))?;
    }
    let idle: Vec<&str> = acts.iter().filter(|act| act.share == 0.0).map(|act| &*act.row).collect();
    if idle.is_empty() { Ok(()) } else { Err(format!("these differ in nothing: {}", idle.join(", ")).into()) }
}

/// The rows that evict tokens; StreamingLLM first.
fn evicting(setup: &Setup<'_>) -> Result<Vec<Row>> {
    let mut rows = policies::rows(setup)?;
    rows.retain(|row| row.bounded);
    rows.sort_by_key(|row| row.name != "SL");
    Ok(rows)
}

/// Runs each policy and its baseline, and compares them.
fn compared(stream: &str, rows: Vec<Row>, run: impl Fn(&Row) -> Result<Run>) -> Result<Vec<Act>> {
    let mut acts = Vec::new();
    let mut streaming = None;
    for row in &rows {
        let this = run(row)?;
        match &streaming {
            None => streaming = Some(this),
            Some(streaming) => {
                if row.name == "LRU" {
                    acts.push(Act::policy("SL", "LRU", stream, streaming, &this));
                }
                acts.push(Act::policy(row.name, "StreamingLLM", stream, &this, streaming));
            }
        }
    }
    Ok(acts)
}

/// The MoE over the first `tokens` of `ids`, at a budget of a quarter of its window.
fn model(subject: &Subject, ids: &[u32], tokens: usize) -> Result<Vec<Act>> {
    let (experts, top_k) = subject.experts;
    let window = subject.window().min(tokens) as u32;
    let budget = window / 4;
    let far = far::far(subject, &ids[ids.len() - window as usize..])?;
    let setup = Setup {
        layers: subject.layers,
        budget,
        fixed: ring(budget) + SINKS,
        window,
        far: &far,
        rope: Some(subject.rope),
    };
    let rows = evicting(&setup)?;
    let bar = ProgressBar::new((routers::NAMES.len() + rows.len()) as u64);
    let go = |id: &str, row: &Row| {
        let routers = routers::routers(id, experts, top_k, subject.layers)?;
        let run = over(subject, routers, row, budget, &ids[..=tokens]);
        bar.inc(1);
        run
    };
    let lru = rows.iter().find(|row| row.name == "LRU").ok_or("there is no LRU")?;
    let base = go("R_T", lru)?;
    let mut acts = Vec::new();
    for id in routers::NAMES.into_iter().filter(|id| *id != "R_T") {
        acts.push(Act::router(id, subject.name(), &go(id, lru)?, &base));
    }
    acts.extend(compared(subject.name(), rows, |row| go("R_T", row))?);
    bar.finish_and_clear();
    Ok(acts)
}

/// One run of the MoE, window by window.
fn over(
    subject: &Subject,
    routers: Vec<Box<dyn Router>>,
    row: &Row,
    budget: u32,
    ids: &[u32],
) -> Result<Run> {
    let layers = vec![subject.layer(Dtype::Bf16, Keys::Rotated); subject.layers];
    let heads = layers[0].kv_heads as usize;
    let (experts, top_k) = subject.experts;
    let config = CacheConfig::new(layers, 4 << 30).ring(ring(budget)).sinks(SINKS).experts(experts, top_k);
    let cache = Cache::new(row.config(config.hits(crate::hits(budget))))?;
    let attend = Attend::new(1.0 / (subject.head_dim as f32).sqrt());
    let attend = (0..subject.layers).map(|l| attend.read(row.read(l, ReadPages::Experts))).collect();
    let mut looped = Looped::new(ClosedLoop::new(cache, routers)?, attend);
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    let (vocab, mut logits, mut loss, mut held) = (subject.vocab(), Vec::new(), 0.0, Vec::new());
    let step = ring(budget).clamp(1, 64) as usize;
    for (inputs, targets) in inputs.chunks(subject.window()).zip(targets.chunks(subject.window())) {
        looped.clear();
        for (inputs, targets) in inputs.chunks(step).zip(targets.chunks(step)) {
            subject.forward(inputs, &mut looped, &mut logits)?;
            let rows = logits.chunks_exact(vocab).zip(targets);
            loss += rows.map(|(row, next)| nats(row, *next as usize)).sum::<f64>();
            for layer in 0..subject.layers {
                for head in 0..heads {
                    held.push(positions(&looped.sequence, layer, head)?);
                }
            }
        }
    }
    let (ranked, (hits, residency)) = (looped.ranked, rates(&looped.sink));
    Ok(Run { ranked, held, nats: Some(loss / inputs.len() as f64), hits, residency })
}

/// Hash of the positions that a head holds in pages.
fn positions(sequence: &Sequence, layer: usize, head: usize) -> Result<u64> {
    let mut all = Vec::new();
    for page in sequence.pages(layer, head)?.filter(|page| page.id.place != Place::Ring) {
        all.extend(sequence.positions(layer, head, page.id)?.map(|(_, position)| position.0));
    }
    all.sort_unstable();
    let mut hasher = DefaultHasher::new();
    all.hash(&mut hasher);
    Ok(hasher.finish())
}

/// Hit rate and residency.
fn rates(sink: &Collector) -> (f64, f64) {
    let totals = sink.totals();
    (totals.hit_rate_of_all().unwrap_or(1.0), totals.residency().unwrap_or(1.0))
}

/// Policies that need more than one layer with one head of made-up keys.
const SILENT: [&str; 5] = ["AdaKV", "Duo", "Duo-lit", "C_Py", "key norm"];

/// A made-up stream of `tokens`, at a budget of a quarter of it.
fn skewed(tokens: u32) -> Result<Vec<Act>> {
    let (experts, top_k) = (Skewed::default().experts, Skewed::default().top_k);
    let budget = tokens / 4;
    let far = vec![vec![0.0]];
    let setup =
        Setup { layers: 1, budget, fixed: ring(budget) + SINKS, window: tokens, far: &far, rope: None };
    let mut rows = evicting(&setup)?;
    rows.retain(|row| !SILENT.contains(&row.name));
    let go = |id: &str, row: &Row| stream(tokens, routers::routers(id, experts, top_k, 1)?, row, budget);
    let lru = rows.iter().find(|row| row.name == "LRU").ok_or("there is no LRU")?;
    let base = go("R_T", lru)?;
    let mut acts = Vec::new();
    for id in routers::NAMES.into_iter().filter(|id| *id != "R_T") {
        acts.push(Act::router(id, "skewed", &go(id, lru)?, &base));
    }
    acts.extend(compared("skewed", rows, |row| go("R_T", row))?);
    Ok(acts)
}

/// One run of the made-up stream: logits from [`replay::logits`].
fn stream(tokens: u32, routers: Vec<Box<dyn Router>>, row: &Row, budget: u32) -> Result<Run> {
    let options = Skewed::default();
    let (experts, top_k) = (options.experts, options.top_k);
    let config = replay::config(budget).experts(experts, top_k).hits(crate::hits(budget));
    let cache = Cache::new(row.config(config))?;
    let sink = Arc::new(Collector::new(experts as usize));
    let mut pikv = ClosedLoop::new(cache.clone(), routers)?.sink(sink.clone());
    let (mut sequence, mut rows, mut random) = (cache.sequence(), options.rows()?, SplitMix(options.seed));
    let (mut ranked, mut held) = (Ranked::default(), Vec::new());
    for position in 0..tokens as usize {
        let logits = replay::logits(rows.by_rank(), options.skew, &mut random);
        let query = rows.next().map(|row| look(&row.wanted)).unwrap_or_default();
        let mut step = pikv.begin([(&mut sequence, 1)])?;
        // With a value of 0 policies that read values would have nothing to compare.
        step.append(0, &key(position), &[1.0])?;
        ranked.count(step.route(0, &logits)?, top_k as usize);
        step.attend(0, &query, &Attend::new(8.0).read(ReadPages::Experts), AttendOutput::new(&mut [0.0]))?;
        step.commit()?;
        held.push(positions(&sequence, 0, 0)?);
    }
    let (hits, residency) = rates(&sink);
    Ok(Run { ranked, held, nats: None, hits, residency })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_act(acts: &[Act], rows: usize) {
        for act in acts {
            assert!(
                act.share > 0.0,
                "{} differs from {} in nothing on {}",
                act.row,
                act.baseline,
                act.stream
            );
        }
        assert_eq!(acts.len(), rows, "{:?}", acts.iter().map(|act| &*act.row).collect::<Vec<_>>());
    }

    #[test]
    fn every_row_acts_on_a_small_stream() {
        // 6 routers; the policies that differ with a single head; and StreamingLLM itself against LRU.
        all_act(&skewed(512).unwrap(), 6 + 10);
    }

    #[test]
    fn every_row_acts_on_the_model() {
        let mut subject = Subject::load(None).unwrap();
        subject.keys(Keys::Rotated);
        let ids = subject.tokens().unwrap();
        all_act(&model(&subject, &ids, 384).unwrap(), 6 + 16);
    }
}
