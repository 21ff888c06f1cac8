//! Codes and policies over lengths: nats of the model up to its trained length, then memory and time on a made-up stream.

use super::made_up::Layer;
use super::{CODES, codec, evictions};
use crate::policies::{Row, Setup};
use crate::{Result, Text, evaluate, far, policies, replay, ring, routers};
use indicatif::ProgressBar;
use pikv::trace::Skewed;
use pikv::{Cache, ReadPages};
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;
use std::time::Duration;

const COLUMNS: &str =
    "stream,length,tokens,kind,row,budget,nats,delta_nats,found_share,bytes,bytes_of_bf16,time_ratio";
/// Tokens of the model for each of its lengths.
const TOKENS: usize = 2048;
const LENGTHS: [usize; 4] = [256, 512, 1024, 2048];
const LONG: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 128 << 10];
/// Lengths of the stream, in tokens.
const STREAM: [u32; 5] = [4 << 10, 8 << 10, 16 << 10, 64 << 10, 128 << 10];
const SAMPLES: usize = 9;

pub fn run(subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let mut sheet = Sheet::new(results::file("lengths.csv"), COLUMNS, "loop")?;
    for length in LENGTHS {
        codes(&mut sheet, subject, ids, length)?;
    }
    for length in LONG {
        long_codes(&mut sheet, length)?;
    }
    let far = far::far(subject, &ids[ids.len() - subject.window()..])?;
    for length in LENGTHS {
        model_policies(&mut sheet, subject, ids, length, &far)?;
    }
    for length in STREAM {
        stream_policies(&mut sheet, length)?;
    }
    Ok(())
}

/// All pages are read: only codes are compared.
fn codes(sheet: &mut Sheet, subject: &Subject, ids: &[u32], length: usize) -> Result<()> {
    let mut first = None;
    for code in CODES {
        let row = Row::of("none", false, move |config| match codec(code) {
            Some(codec) => config.compress(codec),
            None => config,
        });
        let row = row.selecting(ReadPages::All);
        let o = plain(subject, ids, length, &row, (length / 4) as u32)?;
        let base = *first.get_or_insert((o.nats, o.bytes, o.time));
        let row = format!("code,{},{length}", code.name());
        sheet.row(&of_model(subject, length, &row, &o, base))?;
    }
    Ok(())
}

fn plain(subject: &Subject, ids: &[u32], length: usize, row: &Row, budget: u32) -> Result<crate::Outcome> {
    let (experts, top_k) = subject.experts;
    let routed = ("R_T", routers::routers("R_T", experts, top_k, subject.layers)?);
    let text = Text { ids: &ids[..=TOKENS], window: length };
    evaluate(subject, routed, budget, row, ReadPages::All, text, &ProgressBar::hidden())
}

/// Cells of an outcome over the model; `row` has kind, row and budget, `base` the nats, bytes and time of the first row.
fn of_model(
    subject: &Subject,
    length: usize,
    row: &str,
    o: &crate::Outcome,
    (nats, bytes, time): (f64, u64, Duration),
) -> String {
    format!(
        "{},{length},{TOKENS},{row},{:.6},{:.6},,{},{:.4},{:.3}",
        subject.name(),
        o.nats,
        o.nats - nats,
        o.bytes,
        o.bytes as f64 / bytes as f64,
        o.time.as_secs_f64() / time.as_secs_f64()
    )
}

fn long_codes(sheet: &mut Sheet, length: u32) -> Result<()> {
    let mut first = None;
    for code in CODES {
        let mut layer = Layer::new(length, (1, 1), codec(code), false)?;
        let time = layer.times(&[ReadPages::All], SAMPLES)?[0];
        let bytes = layer.sequence.bytes();
        let (of_bf16, base) = *first.get_or_insert((bytes, time));
        sheet.row(&format!(
            "made up,{length},{SAMPLES},code,{},{length},,,,{bytes},{:.4},{:.3}",
            code.name(),
            bytes as f64 / of_bf16 as f64,
            time / base
        ))?;
    }
    Ok(())
}

/// Policies at a quarter of the length.
fn model_policies(
    sheet: &mut Sheet,
    subject: &Subject,
    ids: &[u32],
    length: usize,
    far: &[Vec<f32>],
) -> Result<()> {
    let budget = (length / 4) as u32;
    let setup = Setup {
        layers: subject.layers,
        budget,
        fixed: ring(budget) + crate::SINKS,
        window: length as u32,
        far,
        rope: Some(subject.rope),
    };
    let mut first = None;
    for row in policies::rows(&setup)? {
        let o = plain(subject, ids, length, &row, budget)?;
        let base = *first.get_or_insert((o.nats, o.bytes, o.time));
        let row = format!("policy,{},{}", row.name, o.budget);
        sheet.row(&of_model(subject, length, &row, &o, base))?;
    }
    Ok(())
}

/// Share of the wanted tokens of a skewed stream that is still held, at an eighth of the length.
fn stream_policies(sheet: &mut Sheet, length: u32) -> Result<()> {
    let skewed = Skewed::default();
    let rows: Vec<_> = skewed.rows()?.take(length as usize).collect();
    let budget = length / 8;
    for (name, eviction) in evictions(budget) {
        let config = replay::config(budget).experts(skewed.experts, skewed.top_k);
        let cache = Cache::new(match eviction {
            Some(eviction) => config.evict(eviction),
            None => config,
        })?;
        let found = replay::replay(&cache, &rows)?;
        let budget = if name == "none" { length } else { budget };
        sheet.row(&format!("skewed,{length},{length},policy,{name},{budget},,,{found:.5},,,"))?;
    }
    Ok(())
}
