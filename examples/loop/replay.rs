//! Replays a stream of experts and of positions that queries look for, without a model: the share that each policy still holds.

use crate::policies::{self, Setup};
use crate::{Result, SINKS, ring};
use indicatif::ProgressBar;
use pikv::report::{PageMass, Place};
use pikv::trace::{Reader, Row, Skewed, TraceFile, Writer};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, Position, Sequence};
use pikv_engine::common::cache::Keys;
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::subject::Subject;
use pikv_engine::measure::watched::{Watch, Watched};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Width of the made-up keys.
const DIM: usize = 64;

/// Replays a trace under every policy at three budgets, and prints the share of wanted tokens that was still held.
pub fn run(trace: &str, tokens: usize) -> Result<()> {
    let (experts, rows): (u32, Vec<Row>) = if trace == "skewed" {
        let skewed = Skewed::default();
        (skewed.experts, skewed.rows()?.take(tokens).collect())
    } else {
        let reader = Reader::new(BufReader::new(File::open(trace).map_err(|e| format!("{trace}: {e}"))?))?;
        (reader.experts(), reader.take(tokens).collect::<std::result::Result<_, _>>()?)
    };
    let window = rows.len() as u32;
    let Some(top_k) = rows.first().map(|row| row.experts.len() as u32) else {
        return Err(format!("{trace}: no rows").into());
    };
    let budgets = [8, 4, 2].map(|part| window / part);
    let far = vec![vec![0.0]];
    println!(
        "{trace}: {window} tokens, {top_k} of {experts} experts a token; wanted tokens that are held, by budget\n"
    );
    println!("{:17} {}", "policy", budgets.map(|budget| format!("{budget:>9}")).join(" "));
    let names: Vec<&str> = rows_of(budgets[0], window, &far)?.iter().map(|row| row.name).collect();
    let bar = ProgressBar::new((names.len() * budgets.len()) as u64);
    // Budgets by layer or head, pages chosen by query, and norms are meaningless with one layer and one head of made-up keys.
    let silent = ["AdaKV", "Duo", "Duo-lit", "C_Py", "QUEST", "key norm"];
    let told = |name: &&str| !silent.contains(name);
    for name in names.iter().filter(|name| told(name)) {
        let mut cells = Vec::new();
        for budget in budgets {
            let rows_of = rows_of(budget, window, &far)?;
            let Some(row) = rows_of.into_iter().find(|row| row.name == *name) else { continue };
            let cache = Cache::new(row.config(config(budget).experts(experts, top_k)))?;
            cells.push(format!("{:>8.2}%", 100.0 * replay(&cache, &rows)?));
            bar.inc(1);
        }
        bar.suspend(|| println!("{name:17} {}", cells.join(" ")));
    }
    bar.finish_and_clear();
    Ok(())
}

/// One layer with one head, and a ring and sinks for a budget.
pub fn config(budget: u32) -> CacheConfig {
    let layer = LayerShape::new(1, 1, DIM as u32, Dtype::Bf16).values(1, Dtype::Bf16);
    CacheConfig::new(vec![layer], 1 << 30).ring(ring(budget)).sinks(SINKS)
}

fn rows_of(budget: u32, window: u32, far: &[Vec<f32>]) -> Result<Vec<policies::Row>> {
    policies::rows(&Setup { layers: 1, budget, fixed: ring(budget) + SINKS, window, far, rope: None })
}

/// Share of the wanted tokens that were held at the time of their query.
pub fn replay(cache: &Cache, rows: &[Row]) -> Result<f64> {
    let mut sequence = cache.sequence();
    let (mut wanted, mut found) = (0u64, 0u64);
    let mut held = vec![false; rows.len()];
    for (position, row) in rows.iter().enumerate() {
        hold(&sequence, &mut held)?;
        wanted += row.wanted.len() as u64;
        found += row.wanted.iter().filter(|p| held[**p as usize]).count() as u64;
        let query = look(&row.wanted);
        let mut step = cache.begin([(&mut sequence, 1)])?;
        step.append(0, &key(position), &[0.0])?;
        // Wanted positions exceed the others by some nats.
        step.attend(0, &query, &Attend::new(8.0), AttendOutput::new(&mut [0.0]))?;
        step.route(0, &row.experts)?;
        step.commit()?;
    }
    Ok(if wanted == 0 { 1.0 } else { found as f64 / wanted as f64 })
}

/// A query for some positions.
pub fn look(wanted: &[u32]) -> Vec<f32> {
    let mut query = vec![0.0; DIM];
    for p in wanted {
        query.iter_mut().zip(key(*p as usize)).for_each(|(q, k)| *q += k);
    }
    query
}

/// A separate direction for each position.
pub fn key(position: usize) -> Vec<f32> {
    let mut random = SplitMix(position as u64);
    let mut key: Vec<f32> = (0..DIM).map(|_| random.unit() as f32 - 0.5).collect();
    let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
    key.iter_mut().for_each(|x| *x /= norm);
    key
}

/// Logits of a token whose experts are drawn like [`Skewed`], likeliest first: the largest of `ln(weight)` plus a Gumbel draw
/// are experts drawn by their weights without replacement.
pub fn logits(by_rank: &[u16], skew: f64, random: &mut SplitMix) -> Vec<f32> {
    let mut logits = vec![0.0; by_rank.len()];
    for (rank, expert) in by_rank.iter().enumerate() {
        let gumbel = -(-random.unit().clamp(1e-12, 1.0 - 1e-12).ln()).ln();
        logits[usize::from(*expert)] = (gumbel - skew * (rank as f64 + 1.0).ln()) as f32;
    }
    logits
}

fn hold(sequence: &Sequence, held: &mut [bool]) -> Result<()> {
    held.fill(false);
    let ring = sequence.next_position().0 - sequence.in_ring().0;
    for page in sequence.pages(0, 0)?.filter(|page| page.id.place != Place::Ring) {
        for (_, Position(p)) in sequence.positions(0, 0, page.id)? {
            held[p as usize] = true;
        }
    }
    held[ring as usize..sequence.next_position().0 as usize].fill(true);
    Ok(())
}

/// Positions per row that are recorded.
const WANTED: usize = 8;

/// Runs the MoE, and writes its tokens, the experts of its first layer, and the positions with most attention of KV head 0 in its middle
/// layer.
pub fn record(subject: &Subject, ids: &[u32], file: &Path) -> Result<()> {
    let (experts, top_k) = subject.experts;
    let layers = vec![subject.layer(Dtype::F32, Keys::Rotated); subject.layers];
    let cache = Cache::new(CacheConfig::new(layers, 4 << 30).ring(ids.len() as u32).experts(experts, top_k))?;
    let recorder = Recorder { layer: subject.layers / 2, experts: Vec::new(), wanted: Vec::new() };
    let mut watched = Watched::new(cache, subject.head_dim, recorder);
    let out = TraceFile::create(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut writer = Writer::new(out, experts)?;
    let (bar, mut logits) = (ProgressBar::new(ids.len() as u64), Vec::new());
    for id in ids {
        subject.forward(&[*id], &mut watched, &mut logits)?;
        let recorder = &mut watched.watch;
        let (experts, wanted) = (std::mem::take(&mut recorder.experts), std::mem::take(&mut recorder.wanted));
        writer.write(&Row::new(*id, experts, wanted))?;
        bar.inc(1);
    }
    writer.finish()?;
    bar.finish_and_clear();
    println!("{} rows written to {}", ids.len(), file.display());
    Ok(())
}

/// The experts of a token, and the positions that it attends to.
struct Recorder {
    layer: usize,
    experts: Vec<u16>,
    wanted: Vec<u32>,
}

impl Watch for Recorder {
    fn layer(&self, layer: usize) -> bool {
        layer == self.layer
    }

    fn mass(&mut self, _: usize, first: u32, mass: &[PageMass]) {
        // Everything is in the ring: lane `t` of tile `i` is position `32 i + t`.
        let mut seen: Vec<(f32, u32)> = Vec::new();
        for page in mass.iter().filter(|page| page.kv_head == 0) {
            let tile = page.page.ordinal * pikv::shape::PAGE;
            seen.extend((tile..).zip(page.tokens).filter(|(p, _)| *p < first).map(|(p, m)| (m, p)));
        }
        seen.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        self.wanted = seen.into_iter().take(WANTED).filter(|(mass, _)| *mass > 0.0).map(|(_, p)| p).collect();
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) {
        if layer == 0 {
            self.experts = experts.to_vec();
        }
    }
}
