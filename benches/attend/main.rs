//! Attention beside the machine's limits, measured in one run.
//!
//! `cargo bench -p pikv-benches --bench attend [-- --lanes NAME] [--context N] [--dtype NAME] [--part decode|batch|prefill]`
//!
//! 32 query heads over 8 KV heads of 128 channels. The *roof* is the lower of two rates of KV bytes:
//!
//! * the machine's read bandwidth over a buffer that no cache holds;
//! * the rate that would need all of the machine's measured peak of independent fused multiply-adds; a token takes
//!   2 * head_dim * group of them, for each KV head and row.
//!
//! Three parts: one row against one sequence, one row for each of eight sequences of mixed lengths, and many rows against one
//! sequence. Every configuration is checked against a float64 softmax before it is timed. Rows of `benches/results/attend.csv`
//! that were measured again on the same machine are replaced, others stay.
//!
//! `--serve` takes part in `benches/peers/run`.

#[allow(dead_code, reason = "the other benches use the rest")]
#[path = "../machine/mod.rs"]
mod machine;
mod record;
mod serve;
#[allow(dead_code, reason = "the bench prefill uses the rest")]
mod setup;
mod timing;

use pikv::lanes::Lanes;
use record::{Record, Row};
use setup::{Form, check, grow, queries, rows};
use std::error::Error;
use timing::Timing;

const HEAD_DIM: usize = 128;
const KV_HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const THREADS: [usize; 2] = [1, 2];
/// One batch: 194,272 tokens, of which the longest sequence has two thirds.
const MIXED: [u32; 8] = [7, 100, 1000, 3000, 6013, 20000, 33080, 131_072];
/// Rows of a prefill, against this many tokens, the rows' own among them.
const PREFILL: [u32; 3] = [32, 128, 512];
const PREFILL_CONTEXT: u32 = 8192;

struct Options {
    lanes: Vec<Lanes>,
    contexts: Vec<u32>,
    dtype: Option<String>,
    part: Option<String>,
    serve: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = arguments()?;
    if options.serve {
        return serve::serve(options.lanes[0]);
    }
    let mut record = Record::new()?;
    let wants = |part: &str| options.part.as_deref().is_none_or(|only| only == part);
    for &lanes in &options.lanes {
        for form in Form::all() {
            if options.dtype.as_deref().is_some_and(|only| only != form.name) {
                continue;
            }
            if wants("decode") {
                for &context in &options.contexts {
                    decode(lanes, &form, context, &mut record)?;
                }
            }
            if wants("batch") {
                batch(lanes, &form, &mut record)?;
            }
            if wants("prefill") {
                prefill(lanes, &form, &mut record)?;
            }
        }
    }
    record.write()
}

fn arguments() -> Result<Options, Box<dyn Error>> {
    let mut lanes: Vec<Lanes> = Lanes::available().filter(|lanes| *lanes != Lanes::Portable).collect();
    if lanes.is_empty() {
        lanes.push(Lanes::Portable);
    }
    let contexts = vec![4096, 32768, 131_072];
    let mut options = Options { lanes, contexts, dtype: None, part: None, serve: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} wants a value"));
        match argument.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--lanes" => options.lanes = vec![Lanes::by_name(&value()?)?],
            "--context" => options.contexts = vec![value()?.parse()?],
            "--dtype" => options.dtype = Some(value()?),
            "--part" => options.part = Some(value()?),
            "--serve" => options.serve = true,
            other => {
                let all = "--lanes NAME, --context N, --dtype NAME, --part NAME and --serve";
                return Err(format!("{other}: options are {all}").into());
            }
        }
    }
    let part = options.part.as_deref();
    if part.is_some_and(|part| !["decode", "batch", "prefill"].contains(&part)) {
        return Err(
            format!("--part {}: parts are decode, batch and prefill", part.unwrap_or_default()).into()
        );
    }
    let forms: Vec<_> = Form::all().iter().map(|form| form.name).collect();
    if let Some(dtype) = options.dtype.as_deref().filter(|dtype| !forms.contains(dtype)) {
        return Err(format!("--dtype {dtype}: there are {}", forms.join(", ")).into());
    }
    Ok(options)
}

/// One row against one sequence.
fn decode(lanes: Lanes, form: &Form, context: u32, record: &mut Record) -> Result<(), Box<dyn Error>> {
    let cache = form.cache(lanes, 1)?;
    let sequences = [grow(&cache, context)?];
    let (parts, q) = (rows(&sequences, 1), queries(1));
    check(&cache, &parts, &q, form)?;
    for threads in THREADS {
        let bytes = form.bytes(&sequences[0]);
        let timing = Timing::measure(lanes, threads, bytes, &[], || timing::attend(&cache, &parts, &q))?;
        record.add(Row { lanes, form: form.name, context, batch: 1, rows: 1, threads, bytes, timing });
    }
    Ok(())
}

/// One row for each sequence of a batch; and the longest alone, whose rate predicts the time of all.
fn batch(lanes: Lanes, form: &Form, record: &mut Record) -> Result<(), Box<dyn Error>> {
    let cache = form.cache(lanes, 1)?;
    let sequences = MIXED.iter().map(|&len| grow(&cache, len)).collect::<Result<Vec<_>, _>>()?;
    let (parts, q) = (rows(&sequences, 1), queries(MIXED.len()));
    check(&cache, &parts, &q, form)?;
    let last = parts.len() - 1;
    for threads in THREADS {
        let each: Vec<f64> = sequences.iter().map(|sequence| form.bytes(sequence)).collect();
        let bytes = each.iter().sum();
        let alone = || timing::attend(&cache, &parts[last..], &q[last * QUERY_HEADS * HEAD_DIM..]);
        let mut timing =
            Timing::measure(lanes, threads, bytes, &[&alone], || timing::attend(&cache, &parts, &q))?;
        timing.over_sum = timing.over_others.map(|over| over * each[last] / bytes);
        let (context, batch) = (MIXED.iter().sum(), MIXED.len());
        record.add(Row { lanes, form: form.name, context, batch, rows: 1, threads, bytes, timing });
    }
    Ok(())
}

/// The newest rows of one sequence.
fn prefill(lanes: Lanes, form: &Form, record: &mut Record) -> Result<(), Box<dyn Error>> {
    let cache = form.cache(lanes, PREFILL[PREFILL.len() - 1])?;
    let sequences = [grow(&cache, PREFILL_CONTEXT)?];
    for n in PREFILL {
        let (parts, q) = (rows(&sequences, n), queries(n as usize));
        check(&cache, &parts, &q, form)?;
        for threads in THREADS {
            let bytes = form.bytes(&sequences[0]);
            let timing = Timing::measure(lanes, threads, bytes * f64::from(n), &[], || {
                timing::attend(&cache, &parts, &q)
            })?;
            let context = PREFILL_CONTEXT;
            record.add(Row { lanes, form: form.name, context, batch: 1, rows: n, threads, bytes, timing });
        }
    }
    Ok(())
}
