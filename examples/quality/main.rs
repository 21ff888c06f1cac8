//! Cost of every codec on a real model: bytes, nats, KL of the logits, error of stored pages, time to attend.
//!
//! `cargo run --release -p pikv-examples --bin quality [-- --gguf FILE] [--tokens N] [--window N] [--row NAME]... [--csv FILE] [--codes]`
//!
//! Without `--gguf` it runs the MoE of `examples/models` over a novel outside its training data, in windows of 2048 bytes; with it any
//! dense Llama, in windows of 1024 tokens; `--window` has other ones. Maps are fitted on a later part of the text than the evaluated one. Prints one table, of all
//! rows or of those with the names or ids given; a run over all rows writes `benches/results/quality.csv` (`quality-llama.csv` for a GGUF)
//! and a plot beside it.
//!
//! With `--codes` the rows are codes of 2 to 8 bits, with rings of two lengths, and bytes count the whole cache; a run over all of
//! them writes `benches/results/codes.csv` (`codes-llama.csv`).

mod capture;
mod codes;
mod held;
mod plot;
mod rows;
mod trained;

use capture::Capture;
use indicatif::{ProgressBar, ProgressStyle};
use pikv::codec::{Code, Codec, Coding};
use pikv_engine::common::cache::{Cache as _, Keys};
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;
use rayon::prelude::*;
use rows::{Row, rows};
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

/// Tokens of a prefill step, and of the ring.
const RING: usize = 128;
const SINKS: u32 = 4;

const HELP: &str = "options: --gguf FILE, --tokens N (a multiple of the window), --window N, --row NAME or id (as often as you like), --csv FILE, --codes";

/// Results of one row.
struct Outcome {
    ratio: f64,
    nats: f64,
    kl: f64,
    error: f64,
    bytes: u64,
    time: Duration,
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { gguf, tokens, window, only, csv, codes } = arguments()?;
    let mut subject = Subject::load(gguf.as_deref())?;
    if let Some(window) = window {
        subject.set_window(window)?;
    }
    let ids = subject.tokens()?;
    let window = subject.window();
    let tokens = tokens.unwrap_or(if gguf.is_some() { 8 * window } else { 16 * window });
    if !tokens.is_multiple_of(window) || tokens + 4 * window > ids.len() {
        return Err(format!(
            "--tokens {tokens}: must be a multiple of {window}, and leave {} of {} for the fits; {HELP}",
            4 * window,
            ids.len()
        )
        .into());
    }
    if codes {
        return few_bits(&mut subject, &ids[..=tokens], &only, csv, gguf.is_some());
    }
    let calibration = &ids[ids.len() - 4 * window..];
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{msg}")?);
    let mut capture = |keys, message| {
        bar.set_message(message);
        Capture::run(&mut subject, keys, calibration)
    };
    let rotated = capture(Keys::Rotated, "fitting: keys after their rotation")?;
    let plain = capture(Keys::Unrotated, "fitting: keys before their rotation")?;
    let wanted = |id: &str, name: &str| only.is_empty() || only.iter().any(|o| o == id || o == name);
    let few = rows::small(&subject);
    let importance = match wanted("C_Hy", "") && few {
        true => Some(importance(&mut subject, &rotated, &calibration[..=window], &bar)?),
        false => None,
    };
    let trains = wanted("C_Dis", "") || wanted("C_Lo", "");
    let all = rows(&subject, &rotated, &plain, trains, importance.as_deref(), &bar)?;
    bar.finish_and_clear();

    let chosen = choose(&all, |row| wanted(row.id, &row.name))?;
    let bar = progress(chosen.len(), tokens)?;
    let reference = evaluate(&mut subject, &all[0], &ids[..=tokens], &[], &bar)?;
    let logits = reference.1;
    println!("{}: {tokens} tokens in windows of {window}, ring {RING}, {SINKS} sinks\n", subject.name());
    println!(
        "{:10} {:52} {:>7} {:>7} {:>9} {:>10} {:>9} {:>8} {:>11} {:>8}",
        "row", "what is stored", "budget", "ratio", "nats", "delta", "KL", "error", "bytes", "attend x"
    );
    let stem = if gguf.is_some() { "quality-llama" } else { "quality" };
    let csv = csv.or_else(|| only.is_empty().then(|| results::file(&format!("{stem}.csv"))));
    let mut sheet = csv.map(|path| Sheet::new(path, COLUMNS, "quality")).transpose()?;
    let (mut outcomes, mut base) = (Vec::new(), None);
    for row in chosen {
        bar.set_message(row.name.clone());
        let mut o = evaluate(&mut subject, row, &ids[..=tokens], &logits, &bar)?.0;
        let of = if row.keys == Keys::Rotated { &rotated } else { &plain };
        o.error = of.error(row, &subject)?;
        // f32 comes first, and bf16 second.
        if row.name == "bf16" {
            base = Some(o.time.as_secs_f64());
        }
        let attend = base.map(|base| base / o.time.as_secs_f64());
        let delta = o.nats - reference.0.nats;
        let line = format!(
            "{:10} {:52} {:>7} {:>7.3} {:>9.5} {:>+10.5} {:>9.2e} {:>8.4} {:>11} {:>8}",
            row.id,
            row.name,
            row.budget,
            o.ratio,
            o.nats,
            delta,
            o.kl,
            o.error,
            o.bytes,
            attend.map_or("-".into(), |attend| format!("{attend:.2}"))
        );
        bar.suspend(|| println!("{line}"));
        if let Some(sheet) = &mut sheet {
            let Row { id, name, k, v, budget, .. } = row;
            sheet.row(&format!(
                "{},{tokens},{id},\"{name}\",{k},{v},{budget},{:.4},{:.6},{delta:.6},{:.3e},{:.6},{}",
                subject.name(),
                o.ratio,
                o.nats,
                o.kl,
                o.error,
                attend.map_or(String::new(), |attend| format!("{attend:.3}"))
            ))?;
        }
        outcomes.push((row, o));
    }
    bar.finish_and_clear();
    println!(
        "\nratio: bf16 bytes of what left the ring over those that are left of it, scales and positions included; bytes: all pages at the end of the last \
         window, ring and open pages in bf16; attend x: the CPU time of append and attend of bf16 over the row's"
    );
    if only.is_empty() {
        plot::write(&results::file(&format!("{stem}.svg")), subject.name(), &outcomes, reference.0.nats)?;
        println!("written to benches/results/{stem}.csv and .svg");
    }
    Ok(())
}

/// The rows to run.
///
/// # Errors
/// If no row is wanted: the names of all rows.
fn choose(all: &[Row], wanted: impl Fn(&Row) -> bool) -> Result<Vec<&Row>, String> {
    let chosen: Vec<&Row> = all.iter().filter(|row| wanted(row)).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = all.iter().map(|row| &*row.name).collect();
        return Err(format!("--row: there are {}", names.join(", ")));
    }
    Ok(chosen)
}

/// A progress bar over `tokens` tokens of all rows and of the reference, which comes first.
fn progress(rows: usize, tokens: usize) -> Result<ProgressBar, Box<dyn Error>> {
    let bar = ProgressBar::new(((rows + 1) * tokens) as u64);
    bar.set_style(ProgressStyle::with_template("{msg:32} {bar:36} {percent}% of all, {eta} left")?);
    bar.set_message("f32, nothing packed");
    Ok(bar)
}

/// The rows of [`codes::rows`] over the text `ids`: nats, and all bytes of the cache.
fn few_bits(
    subject: &mut Subject,
    ids: &[u32],
    only: &[String],
    csv: Option<PathBuf>,
    llama: bool,
) -> Result<(), Box<dyn Error>> {
    let (tokens, window) = (ids.len() - 1, subject.window());
    let all = codes::rows(subject)?;
    let chosen = choose(&all, |row| only.is_empty() || only.contains(&row.name))?;
    let bar = progress(chosen.len(), tokens)?;
    let first = Row { dtype: pikv::Dtype::F32, ..all[0].clone() };
    let (reference, logits) = evaluate(subject, &first, ids, &[], &bar)?;
    let file = results::file(if llama { "codes-llama.csv" } else { "codes.csv" });
    let csv = csv.or_else(|| only.is_empty().then_some(file));
    let columns = "model,tokens,window,experts,ring,sinks,stored,k_codec,v_codec,packed_ratio,bytes,bf16_bytes,all_ratio,nats,\
                   delta_nats,perplexity_percent,kl";
    let mut sheet = csv.map(|path| Sheet::new(path, columns, "quality")).transpose()?;
    println!("{columns}");
    for row in chosen {
        bar.set_message(row.name.clone());
        let o = evaluate(subject, row, ids, &logits, &bar)?.0;
        let (plain, delta) = (codes::plain_bytes(subject, window), o.nats - reference.nats);
        let bytes = row.rounded.map_or(o.bytes, |_| (plain as f64 / o.ratio).round() as u64);
        let Row { name, k, v, ring, .. } = row;
        let experts = if row.by_expert { subject.experts.0 } else { 1 };
        let line = format!(
            "{},{tokens},{window},{experts},{ring},{SINKS},\"{name}\",{k},{v},{:.4},{},{plain},{:.4},{:.6},{delta:.6},{:.4},{:.3e}",
            subject.name(),
            o.ratio,
            bytes,
            plain as f64 / bytes as f64,
            o.nats,
            100.0 * delta.exp_m1(),
            o.kl,
        );
        bar.suspend(|| println!("{line}"));
        sheet.iter_mut().try_for_each(|sheet| sheet.row(&line))?;
    }
    bar.finish_and_clear();
    Ok(())
}

const COLUMNS: &str =
    "model,tokens,row,stored,k_codec,v_codec,budget,ratio,nats,delta_nats,kl,rel_error,attend_ratio";

/// KL of the logits per unit of relative error, for each head, with that head alone in int4, over `ids`.
fn importance(
    subject: &mut Subject,
    rotated: &Capture,
    ids: &[u32],
    bar: &ProgressBar,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let hidden = ProgressBar::hidden();
    let row = |codecs| Row::new("C_Hy", "one head", "1", Keys::Rotated, codecs);
    let logits = evaluate(subject, &row(vec![]), ids, &[], &hidden)?.1;
    let int4 = rows::int4(subject)?;
    let errors = rotated.errors(&row(int4.clone()), subject)?;
    let same = || Coding::new(Code::Bf16);
    let mut found = Vec::new();
    for (layer, heads) in int4.iter().enumerate() {
        for (head, codec) in heads.iter().enumerate() {
            bar.set_message(format!("importance of layer {layer}, KV head {head}"));
            bar.tick();
            let mut alone = vec![vec![Codec::new(same(), same()); heads.len()]; int4.len()];
            alone[layer][head] = codec.clone();
            let kl = evaluate(subject, &row(alone), ids, &logits, &hidden)?.0.kl;
            let (wrong, all) = errors[layer][head];
            found.push((kl * all / wrong).max(0.0));
        }
    }
    Ok(found)
}

/// Nats per token, KL to `reference`, and the logits.
fn evaluate(
    subject: &mut Subject,
    row: &Row,
    ids: &[u32],
    reference: &[f32],
    bar: &ProgressBar,
) -> Result<(Outcome, Vec<f32>), Box<dyn Error>> {
    subject.keys(row.keys);
    let mut cache = held::timed(subject, row, SINKS)?;
    let (vocab, mut all, mut logits) = (subject.vocab(), Vec::new(), Vec::new());
    let (mut loss, mut kl, mut at) = (0.0, 0.0, 0);
    let (mut bytes, mut kept, mut packed) = (0, 1.0, f64::NAN);
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    for (inputs, targets) in inputs.chunks(subject.window()).zip(targets.chunks(subject.window())) {
        cache.clear();
        for (inputs, targets) in inputs.chunks(row.ring).zip(targets.chunks(row.ring)) {
            subject.forward(inputs, &mut cache, &mut logits)?;
            let rows = logits.par_chunks_exact(vocab).zip(targets);
            // Collected first, so that the order of the sums is fixed.
            let nats: Vec<f64> =
                rows.map(|(row, next)| pikv_engine::common::sample::nats(row, *next as usize)).collect();
            loss += nats.iter().sum::<f64>();
            match reference.get(at..at + logits.len()) {
                Some(reference) => {
                    let pairs = reference.par_chunks_exact(vocab).zip(logits.par_chunks_exact(vocab));
                    kl += pairs.map(|(p, q)| divergence(p, q)).collect::<Vec<f64>>().iter().sum::<f64>();
                }
                None => all.extend_from_slice(&logits),
            }
            at += logits.len();
            bar.inc(inputs.len() as u64);
        }
        let paged = &cache.paged;
        (bytes, kept, packed) = (paged.sequence.bytes(), held::kept(paged)?, held::packed(paged)?);
    }
    let n = inputs.len() as f64;
    // For pages of two ages, the final ratio.
    let ratio = if row.age.is_some() { packed } else { row.ratio(subject) / kept };
    let outcome = Outcome { ratio, nats: loss / n, kl: kl / n, error: f64::NAN, bytes, time: cache.layers };
    Ok((outcome, all))
}

/// KL(p || q) of two rows of logits.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |x: &[f32]| {
        let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(top) + x.iter().map(|x| f64::from(x - top).exp()).sum::<f64>().ln()
    };
    let (lp, lq) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(p, q)| {
        let (p, q) = (f64::from(*p) - lp, f64::from(*q) - lq);
        p.exp() * (p - q)
    });
    terms.sum()
}

struct Arguments {
    gguf: Option<PathBuf>,
    tokens: Option<usize>,
    window: Option<usize>,
    only: Vec<String>,
    csv: Option<PathBuf>,
    codes: bool,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut parsed =
        Arguments { gguf: None, tokens: None, window: None, only: Vec::new(), csv: None, codes: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name}: without a value; {HELP}"));
        match &*name {
            "--gguf" => parsed.gguf = Some(PathBuf::from(value()?)),
            "--codes" => parsed.codes = true,
            "--row" => parsed.only.push(value()?),
            "--csv" => parsed.csv = Some(PathBuf::from(value()?)),
            "--tokens" | "--window" => {
                let n = value()?;
                let n = Some(n.parse().map_err(|e| format!("{name} {n}: {e}; {HELP}"))?);
                *(if name == "--tokens" { &mut parsed.tokens } else { &mut parsed.window }) = n;
            }
            _ => return Err(format!("{name}: unknown; {HELP}").into()),
        }
    }
    Ok(parsed)
}
