//! Sequences of mixed lengths in one batch: AdaKV-lit's budgets, shared by heads, against fixed ones, over several seeds.

use crate::Result;
use pikv::closed_loop::{LoopError, LoopStep};
use pikv::metrics::Collector;
use pikv::policy::{AdaKvLit, Budget, Eviction, H2o, Lru, SnapKv};
use pikv::rules::Hits;
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, Sequence};
use pikv_engine::common::cache::{Cache as AnyCache, Keys, Step as AnyStep};
use pikv_engine::common::sample::nats;
use pikv_engine::measure::results::{self, Sheet, cpu_time};
use pikv_engine::measure::subject::Subject;
use std::sync::Arc;
use std::time::Duration;

/// Tokens of the sequences of a batch.
const LENGTHS: [usize; 4] = [256, 512, 1024, 2048];
/// Tokens of a sequence per step.
const CHUNK: usize = 16;
const SEEDS: usize = 6;
/// Tokens per KV head.
const BUDGET: u32 = 128;

const COLUMNS: &str = "model,tokens,budget,policy,seed,nats,delta_nats,hit_rate,bytes,time_ratio";

fn policies(budget: u32) -> Vec<(&'static str, Option<Eviction>)> {
    let tokens = Budget::Tokens(budget);
    let of = |policy: AdaKvLit| Some(Eviction::new(policy, tokens.clone()));
    vec![
        ("none", None),
        // The smallest step: the threshold stays at 0, and heads keep their own budgets.
        ("AdaKV-lit: fixed", of(AdaKvLit::default().gamma(f32::MIN_POSITIVE))),
        ("AdaKV-lit", of(AdaKvLit::default())),
        ("AdaKV-lit: the paper's sign", of(AdaKvLit::default().gamma(-0.01))),
        ("LRU", Some(Eviction::new(Lru::default(), tokens.clone()))),
        ("H2O", Some(Eviction::new(H2o, tokens.clone()))),
        ("SnapKV", Some(Eviction::new(SnapKv::default(), tokens.clone()))),
        ("AdaKV over SnapKV", Some(Eviction::new(SnapKv::default(), tokens.clone()).adaptive(0.2))),
    ]
}

/// Each seed is another part of the text.
pub fn run(subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let mut sheet = Sheet::new(results::file("mixed.csv"), COLUMNS, "loop")?;
    let tokens: usize = LENGTHS.iter().sum();
    for seed in 0..SEEDS {
        let ids = &ids[seed * 2 * tokens..][..tokens + LENGTHS.len()];
        let mut none = None;
        for (name, eviction) in policies(BUDGET) {
            let found = batch(subject, ids, BUDGET, eviction)?;
            let (nats, time) = *none.get_or_insert((found.nats, found.time));
            sheet.row(&format!(
                "{},{tokens},{BUDGET},{name},{seed},{:.6},{:.6},{:.5},{},{:.3}",
                subject.name(),
                found.nats,
                found.nats - nats,
                found.hits,
                found.bytes,
                found.time.as_secs_f64() / time.as_secs_f64()
            ))?;
        }
    }
    Ok(())
}

struct Found {
    nats: f64,
    hits: f64,
    bytes: u64,
    time: Duration,
}

fn batch(subject: &Subject, ids: &[u32], budget: u32, eviction: Option<Eviction>) -> Result<Found> {
    let layers = vec![subject.layer(Dtype::Bf16, Keys::Rotated); subject.layers];
    let hits = Hits::new().pages((budget / pikv::shape::PAGE).max(1)).every(1);
    let config = CacheConfig::new(layers, 4 << 30).ring(budget / 4).sinks(crate::SINKS).hits(hits);
    let cache = Cache::new(match eviction {
        Some(eviction) => config.evict(eviction),
        None => config,
    })?;
    let sink = Arc::new(Collector::new(1));
    let routers = crate::routers::routers("R_T", 1, 1, subject.layers)?;
    let mut pikv = ClosedLoop::new(cache.clone(), routers)?.sink(sink.clone());
    let mut sequences: Vec<Sequence> = LENGTHS.iter().map(|_| cache.sequence()).collect();
    let mut texts = Vec::new();
    let mut rest = ids;
    for length in LENGTHS {
        let (text, after) = rest.split_at(length + 1);
        texts.push(text);
        rest = after;
    }
    let (mut loss, mut time, mut logits) = (0.0, Duration::ZERO, Vec::new());
    for at in (0..LENGTHS[LENGTHS.len() - 1]).step_by(CHUNK) {
        // The shorter sequences have ended: they stay held, and get no more rows.
        let going: Vec<usize> = (0..LENGTHS.len()).filter(|s| at < LENGTHS[*s]).collect();
        let inputs: Vec<u32> = going.iter().flat_map(|s| &texts[*s][at..at + CHUNK]).copied().collect();
        let parts = sequences.iter_mut().enumerate().filter(|(s, _)| going.contains(s));
        let parts = parts.map(|(_, sequence)| (sequence, CHUNK as u32)).collect();
        let mut rows = Rows { pikv: &mut pikv, parts, first: at, dim: subject.head_dim, time: &mut time };
        subject.forward(&inputs, &mut rows, &mut logits)?;
        let next = going.iter().flat_map(|s| &texts[*s][at + 1..at + 1 + CHUNK]);
        loss += logits
            .chunks_exact(subject.vocab())
            .zip(next)
            .map(|(row, id)| nats(row, *id as usize))
            .sum::<f64>();
    }
    let tokens: usize = LENGTHS.iter().sum();
    Ok(Found {
        nats: loss / tokens as f64,
        hits: sink.totals().hit_rate_of_all().unwrap_or(1.0),
        bytes: sequences.iter().map(Sequence::bytes).sum(),
        time,
    })
}

/// Rows of several sequences, the same number of each.
struct Rows<'a> {
    pikv: &'a mut ClosedLoop,
    parts: Vec<(&'a mut Sequence, u32)>,
    /// Position of the first row of each sequence.
    first: usize,
    dim: usize,
    time: &'a mut Duration,
}

struct Step<'a>(LoopStep<'a>, Attend, &'a mut Duration);

impl AnyCache for Rows<'_> {
    type Error = LoopError;
    type Step<'s>
        = Step<'s>
    where
        Self: 's;

    fn begin(&mut self, _rows: usize) -> std::result::Result<Step<'_>, LoopError> {
        let attend = Attend::new(1.0 / (self.dim as f32).sqrt());
        let parts = self.parts.iter_mut().map(|(sequence, n)| (&mut **sequence, *n));
        Ok(Step(self.pikv.begin(parts)?, attend, self.time))
    }

    fn len(&self) -> usize {
        self.first
    }

    fn position(&self, row: usize) -> usize {
        self.first + row % CHUNK
    }

    fn clear(&mut self) {
        self.parts.iter_mut().for_each(|(sequence, _)| sequence.clear());
    }
}

impl AnyStep for Step<'_> {
    type Error = LoopError;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> std::result::Result<(), LoopError> {
        let start = cpu_time();
        self.0.append(layer, k, v)?;
        self.0.attend(layer, q, &self.1, AttendOutput::new(out))?;
        *self.2 += cpu_time() - start;
        Ok(())
    }

    /// Tokens are filed together.
    fn experts(&mut self, _: usize, _: &[u16]) -> std::result::Result<(), LoopError> {
        Ok(())
    }

    fn commit(self) -> std::result::Result<(), LoopError> {
        let start = cpu_time();
        let Step(step, _, time) = self;
        let result = step.commit();
        *time += cpu_time() - start;
        result
    }
}
