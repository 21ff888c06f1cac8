//! The closed loop on a real model: every router with every policy, at several budgets.
//!
//! `cargo run --release -p pikv-examples --bin loop [-- --tokens N] [--router ID] [--policy NAME] [--out FILE]`
//! `cargo run --release -p pikv-examples --bin loop -- --gguf FILE [--tokens N] [--policy NAME] [--wanted PAGES]`
//! `cargo run --release -p pikv-examples --bin loop -- --trace FILE|skewed [--tokens N]`
//! `cargo run --release -p pikv-examples --bin loop -- --record FILE [--tokens N]`
//! `cargo run --release -p pikv-examples --bin loop -- --acts [--tokens N]`
//! `cargo run --release -p pikv-examples --bin loop -- --table NAME`
//!
//! The first form runs the MoE of `examples/models` over a novel outside its training data, in windows of 2048 bytes: rows are routed by
//! the logits of the layer's gate before they attend, and read the pages of the experts that their router names; the model's own
//! choice of experts is left alone. With `--gguf` a dense Llama runs in windows of 1024 tokens; only policies matter then. With `--trace`
//! no model runs: a stream of experts and of positions that queries look for is replayed, from a file or made up; `--record` writes one
//! from the MoE. `--acts` compares every router with R_T and every policy with StreamingLLM, and writes how often they differ to
//! `benches/results/acts.csv`. `--table` writes one of the tables of `tables/mod.rs`.
//!
//! A row wants as many pages of a KV head as the budget holds, or with `--wanted` so many: hits are counted among these.
//!
//! Prints one table; a run over everything writes `benches/results/loop*.csv`. `--out` writes the rows of any run to a file of that
//! form, from which `benches/ranks` computes how well hits predict nats.

mod acts;
mod far;
mod looped;
mod policies;
mod replay;
mod routers;
mod tables;

use indicatif::{ProgressBar, ProgressStyle};
use looped::Looped;
use pikv::router::Router;
use pikv::rules::Hits;
use pikv::shape::PAGE;
use pikv::{Attend, Cache, CacheConfig, ClosedLoop, Dtype, ReadPages};
use pikv_engine::common::cache::Keys;
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;
use policies::{Row, Setup};
use rayon::prelude::*;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SINKS: u32 = 4;

const HELP: &str = "options: --gguf FILE | --trace FILE (or skewed) | --record FILE | --table NAME | --acts, --tokens N, --router ID, --policy NAME, --wanted PAGES, --out FILE";

/// Results of one cell of the table.
struct Outcome {
    router: String,
    policy: String,
    /// Tokens per KV head.
    budget: u32,
    nats: f64,
    /// Bytes of pages at the end of the last window.
    bytes: u64,
    /// Bytes of pages on the fullest shard.
    fullest: u64,
    /// Share of the pages wanted by rows that were held; 1 if none was wanted.
    hit_rate: f64,
    /// Share of the tokens of the rows' experts that were held.
    residency: f64,
    /// Share of the tokens up to its own that a row reads, if it reads its experts' pages; 1 if it reads all.
    sees: f64,
    /// Misses of each expert.
    misses: Vec<f64>,
    balance: f64,
    imbalance: f64,
    time: Duration,
}

fn main() -> Result<()> {
    let arguments = arguments()?;
    if let Some(trace) = &arguments.trace {
        return replay::run(trace, arguments.tokens.unwrap_or(8192));
    }
    let mut subject = Subject::load(arguments.gguf.as_deref())?;
    subject.keys(Keys::Rotated);
    let ids = subject.tokens()?;
    if let Some(table) = &arguments.table {
        return tables::run(table, &mut subject, &ids);
    }
    let window = subject.window();
    if arguments.acts {
        let tokens = arguments.tokens.unwrap_or(window);
        if tokens < 256 || tokens + window > ids.len() {
            return Err(format!("--tokens {tokens}: 256 to {}", ids.len() - window).into());
        }
        return acts::run(&subject, &ids, tokens);
    }
    let tokens = arguments.tokens.unwrap_or(if arguments.gguf.is_some() { 4 * window } else { 2 * window });
    if tokens == 0 || !tokens.is_multiple_of(window) || tokens + window > ids.len() {
        let most = (ids.len() - window) / window * window;
        return Err(
            format!("--tokens {tokens}: must be a multiple of {window}, at most {most}; {HELP}").into()
        );
    }
    if let Some(file) = &arguments.record {
        return replay::record(&subject, &ids[..tokens], file);
    }
    let far = far::far(&subject, &ids[ids.len() - window..])?;
    let budgets: Vec<u32> = match arguments.gguf {
        Some(_) => vec![128, 256, 512],
        None => [8, 4, 2].map(|part| (window / part) as u32).to_vec(),
    };
    let routers: Vec<&str> = if subject.experts.0 > 1 { routers::NAMES.to_vec() } else { vec!["-"] };
    let routers: Vec<&str> =
        routers.into_iter().filter(|id| arguments.router.as_ref().is_none_or(|only| only == id)).collect();
    if routers.is_empty() {
        return Err(format!("--router: there are {}", routers::NAMES.join(", ")).into());
    }
    let mut cells: Vec<(&str, u32, Row)> = Vec::new();
    for &budget in &budgets {
        for &router in &routers {
            let fixed = ring(budget) + SINKS;
            let (layers, window, rope) = (subject.layers, window as u32, Some(subject.rope));
            let setup = Setup { layers, budget, fixed, window, far: &far, rope };
            let rows = policies::rows(&setup)?;
            let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
            if let Some(only) = arguments.policy.as_ref().filter(|only| !names.contains(&&***only)) {
                return Err(format!("--policy {only}: there are {}", names.join(", ")).into());
            }
            let asked = |row: &Row| arguments.policy.as_ref().is_none_or(|only| only == row.name);
            let wanting = |row: Row| match arguments.wanted {
                Some(pages) => row.wanting(pages),
                None => row,
            };
            cells.extend(rows.into_iter().filter(asked).map(|row| (router, budget, wanting(row))));
        }
    }
    // Without a limit the result is the same at every budget.
    cells.retain(|(_, budget, row)| row.name != "none" || *budget == budgets[0]);
    let bar = ProgressBar::new(((cells.len() + 1) * tokens) as u64);
    bar.set_style(ProgressStyle::with_template("{msg:28} {bar:36} {percent}% of all, {eta} left")?);
    bar.set_message("everything read");
    let all = Row::everything();
    let routed = |id| -> Result<_> {
        let (experts, top_k) = subject.experts;
        Ok((id, routers::routers(id, experts, top_k, subject.layers)?))
    };
    let text = Text { ids: &ids[..=tokens], window };
    let reference = evaluate(&subject, routed("-")?, budgets[0], &all, ReadPages::All, text, &bar)?;
    println!(
        "{}: {tokens} tokens in windows of {window}, {SINKS} sinks, ring a quarter of the budget; everything held and read: {:.5} nats a \
         token, {} bytes\n",
        subject.name(),
        reference.nats,
        reference.bytes
    );
    let fetched = if subject.experts.0 > 1 { ReadPages::Experts } else { ReadPages::All };
    let stem = if arguments.gguf.is_some() { "loop-llama" } else { "loop" };
    let stem = arguments.wanted.map_or(stem.to_owned(), |pages| format!("{stem}-wanted-{pages}"));
    let whole = arguments.router.is_none() && arguments.policy.is_none();
    let file = arguments.out.clone().or_else(|| whole.then(|| results::file(&format!("{stem}.csv"))));
    let mut sheet = file.map(|file| Sheet::new(file, COLUMNS, "loop")).transpose()?;
    let line = |o: &Outcome, policy: &str| line(&subject, o, policy, &reference, tokens);
    sheet.iter_mut().try_for_each(|sheet| sheet.row(&line(&reference, "everything read")))?;
    let mut outcomes = Vec::new();
    for (router, budget, row) in &cells {
        bar.set_message(format!("{router} {} {budget}", row.name));
        let o = evaluate(&subject, routed(router)?, *budget, row, fetched, text, &bar)?;
        sheet.iter_mut().try_for_each(|sheet| sheet.row(&line(&o, row.name)))?;
        outcomes.push(o);
    }
    bar.finish_and_clear();
    table(&subject, &outcomes, &reference);
    Ok(())
}

/// Newest tokens, which are always held.
fn ring(budget: u32) -> u32 {
    budget / 4
}

/// A row wants as many pages of a KV head as its budget holds; one row in four is measured.
fn hits(budget: u32) -> Hits {
    Hits::new().pages((budget / PAGE).max(1))
}

/// `E sum_e share_e^2 - 1` over the experts' shares of filed tokens: 0 if they are even, `E - 1` if one has all.
fn imbalance(filed: &[u64]) -> f64 {
    let all = filed.iter().sum::<u64>().max(1) as f64;
    filed.len() as f64 * filed.iter().map(|n| (*n as f64 / all).powi(2)).sum::<f64>() - 1.0
}

/// Tokens in windows of `window`, each from an empty cache; the last token is read only to score the one before.
#[derive(Clone, Copy)]
struct Text<'a> {
    ids: &'a [u32],
    window: usize,
}

/// Nats per token, and the figures of the cache.
fn evaluate(
    subject: &Subject,
    (router, routers): (&str, Vec<Box<dyn Router>>),
    budget: u32,
    row: &Row,
    fetched: ReadPages,
    Text { ids, window }: Text<'_>,
    bar: &ProgressBar,
) -> Result<Outcome> {
    let layers = vec![subject.layer(Dtype::Bf16, Keys::Rotated); subject.layers];
    let (experts, top_k) = subject.experts;
    let config = CacheConfig::new(layers, 4 << 30).ring(ring(budget)).sinks(SINKS).experts(experts, top_k);
    let cache = Cache::new(row.config(config.hits(hits(budget))))?;
    let attend = Attend::new(1.0 / (subject.head_dim as f32).sqrt());
    let attend = (0..subject.layers).map(|l| attend.read(row.read(l, fetched))).collect();
    let mut looped = Looped::new(ClosedLoop::new(cache, routers)?, attend);
    let (vocab, mut logits) = (subject.vocab(), Vec::new());
    let (mut loss, mut bytes) = (0.0, 0);
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    // Steps are no longer than the ring, so that every row reads the pool of its own time.
    let step = ring(budget).min(64) as usize;
    for (inputs, targets) in inputs.chunks(window).zip(targets.chunks(window)) {
        pikv_engine::common::cache::Cache::clear(&mut looped);
        for (inputs, targets) in inputs.chunks(step).zip(targets.chunks(step)) {
            subject.forward(inputs, &mut looped, &mut logits)?;
            let rows = logits.par_chunks_exact(vocab).zip(targets);
            // Collected first, so that the order of the sum is fixed.
            let nats: Vec<f64> =
                rows.map(|(row, next)| pikv_engine::common::sample::nats(row, *next as usize)).collect();
            loss += nats.iter().sum::<f64>();
            bar.inc(inputs.len() as u64);
        }
        bytes = looped.sequence.bytes();
    }
    let fullest = looped.pikv.cache().usage().shards.into_iter().max().unwrap_or(0);
    let totals = looped.sink.totals();
    // In the ring, as sinks after they left it, and in pages of the row's experts.
    let ring = ring(budget) as usize;
    let always = |tokens: usize| tokens.min(ring) + tokens.saturating_sub(ring).min(SINKS as usize);
    let rows = || (0..inputs.len()).map(|i| i % window + 1);
    let heads = subject.layers as u64 * u64::from(subject.layer(Dtype::Bf16, Keys::Rotated).kv_heads);
    let read = totals.held_tokens + heads * rows().map(always).sum::<usize>() as u64;
    let sees = match row.selects.unwrap_or(fetched) {
        ReadPages::Experts => read as f64 / (heads * rows().sum::<usize>() as u64) as f64,
        _ => 1.0,
    };
    Ok(Outcome {
        router: router.to_owned(),
        policy: row.name.to_owned(),
        budget: if row.bounded || row.selects.is_some() { budget } else { window as u32 },
        nats: loss / inputs.len() as f64,
        bytes,
        fullest,
        hit_rate: totals.hit_rate_of_all().unwrap_or(1.0),
        residency: totals.residency().unwrap_or(1.0),
        sees,
        misses: totals.misses,
        balance: looped.balance(),
        imbalance: imbalance(&looped.filed),
        time: looped.time(),
    })
}

fn table(subject: &Subject, outcomes: &[Outcome], reference: &Outcome) {
    println!(
        "{:6} {:17} {:>7} {:>9} {:>9} {:>11} {:>6} {:>6} {:>6} {:>8} {:>9}  misses of each expert",
        "router", "policy", "budget", "nats", "delta", "bytes", "hits", "held", "sees", "balance", "overhead"
    );
    for o in outcomes {
        let most = o.misses.iter().copied().fold(1.0, f64::max);
        let share = |n: &f64| format!("{:3.0}", n * 100.0 / most);
        let misses: Vec<String> =
            if o.misses.len() > 1 { o.misses.iter().map(share).collect() } else { vec![] };
        println!(
            "{:6} {:17} {:>7} {:>9.5} {:>+9.5} {:>11} {:>5.1}% {:>5.1}% {:>5.1}% {:>8.3} {:>8.2}x  {}",
            o.router,
            o.policy,
            o.budget,
            o.nats,
            o.nats - reference.nats,
            o.bytes,
            100.0 * o.hit_rate,
            100.0 * o.residency,
            100.0 * o.sees,
            o.balance,
            o.time.as_secs_f64() / reference.time.as_secs_f64(),
            misses.join(" ")
        );
    }
    println!(
        "\nbudget: tokens a KV head; hits: of the pages that rows wanted, as many as the budget holds or --wanted says, those that were there; held: of \
         the tokens that rows' experts were given, those still held; sees: of the tokens up to its own what a row reads, on the mean, \
         where it chooses by experts and fetches all of them; balance: tokens of the \
         least over those of the most used expert; overhead: CPU time in the cache over that of the run that reads everything; misses: in hundredths of \
         the largest"
    );
    if subject.experts.0 > 1 {
        println!(
            "rows read the pages of the {} experts that their router names, sinks and ring",
            subject.experts.1
        );
    }
}

const COLUMNS: &str = "model,tokens,router,policy,budget,seed,nats,bytes,hit_rate,balance,overhead,residency";

fn line(subject: &Subject, o: &Outcome, policy: &str, reference: &Outcome, tokens: usize) -> String {
    format!(
        "{},{tokens},{},{policy},{:.4},{},{:.6},{},{:.5},{:.4},{:.3},{:.5}",
        subject.name(),
        o.router,
        f64::from(o.budget) / subject.window() as f64,
        routers::SEED,
        o.nats,
        o.bytes,
        o.hit_rate,
        o.balance,
        o.time.as_secs_f64() / reference.time.as_secs_f64(),
        o.residency
    )
}

struct Arguments {
    gguf: Option<PathBuf>,
    trace: Option<String>,
    record: Option<PathBuf>,
    table: Option<String>,
    acts: bool,
    tokens: Option<usize>,
    router: Option<String>,
    policy: Option<String>,
    wanted: Option<u32>,
    out: Option<PathBuf>,
}

fn arguments() -> Result<Arguments> {
    let mut parsed = Arguments {
        gguf: None,
        trace: None,
        record: None,
        table: None,
        acts: false,
        tokens: None,
        router: None,
        policy: None,
        wanted: None,
        out: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--acts" {
            parsed.acts = true;
            continue;
        }
        let mut value = || arguments.next().ok_or_else(|| format!("{name}: without a value; {HELP}"));
        match &*name {
            "--gguf" => parsed.gguf = Some(PathBuf::from(value()?)),
            "--trace" => parsed.trace = Some(value()?),
            "--record" => parsed.record = Some(PathBuf::from(value()?)),
            "--router" => parsed.router = Some(value()?),
            "--policy" => parsed.policy = Some(value()?),
            "--table" => parsed.table = Some(value()?),
            "--wanted" => {
                let n = value()?;
                parsed.wanted = Some(n.parse().map_err(|e| format!("--wanted {n}: {e}; {HELP}"))?);
            }
            "--out" => parsed.out = Some(PathBuf::from(value()?)),
            "--tokens" => {
                let n = value()?;
                parsed.tokens = Some(n.parse().map_err(|e| format!("--tokens {n}: {e}; {HELP}"))?);
            }
            _ => return Err(format!("{name}: unknown; {HELP}").into()),
        }
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imbalance_is_0_of_even_shares_and_one_less_than_the_experts_of_one_that_has_all() {
        assert_eq!(imbalance(&[5, 5, 5, 5]), 0.0);
        assert_eq!(imbalance(&[0, 8, 0, 0]), 3.0);
    }

    #[test]
    fn rows_of_results_end_with_where_they_come_from() {
        let path = std::env::temp_dir().join(format!("pikv-sheet-{}.csv", std::process::id()));
        let mut sheet = Sheet::new(path.clone(), "a,b", "loop").unwrap();
        sheet.row("1,\"two, quoted\"").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let [head, row] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert_eq!(head, "a,b,machine,date,commit,command");
        assert!(row.starts_with("1,\"two, quoted\","), "{row}");
        assert!(row.contains(",cargo run --release -p pikv-examples --bin loop"), "{row}");
        let other = std::panic::catch_unwind(move || sheet.row("1,2,3"));
        assert!(other.is_err(), "a cell too many");
    }
}
