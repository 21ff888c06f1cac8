//! Pages read, time and loss of `ReadPages::Experts` and `ReadPages::Quest` against all pages.

use super::made_up::Layer;
use crate::policies::Row;
use crate::{Result, Text, evaluate, routers};
use indicatif::ProgressBar;
use pikv::ReadPages;
use pikv::shape::PAGE;
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;

const COLUMNS: &str =
    "stream,experts,top_k,length,tokens,read,bytes_read,bytes_ratio,time_ratio,reads_share,nats,delta_nats";
/// Tokens of the model for each of its lengths.
const TOKENS: usize = 2048;
const LENGTHS: [usize; 4] = [256, 512, 1024, 2048];
const LONG: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 128 << 10];
/// Decode rows that are timed, and that are counted.
const SAMPLES: usize = 15;

/// Pages that Quest reads: an eighth of the length.
fn quest(length: usize) -> ReadPages {
    ReadPages::Quest { pages: (length as u32 / PAGE / 8).max(1) }
}

pub fn run(subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let mut sheet = Sheet::new(results::file("reads.csv"), COLUMNS, "loop")?;
    for length in LONG {
        for shape in [(8, 1), (8, 2), (8, 4), (64, 2), (64, 8)] {
            long(&mut sheet, length, shape)?;
        }
    }
    let of_model = subject.experts;
    for length in LENGTHS {
        for top_k in [1, 2, 4] {
            // The gate is the model's; its ranking files and fetches as many as this.
            subject.experts = (of_model.0, top_k);
            let run = nats(&mut sheet, subject, ids, length, top_k == of_model.1);
            subject.experts = of_model;
            run?;
        }
    }
    Ok(())
}

fn long(sheet: &mut Sheet, length: u32, (experts, top_k): (u32, u32)) -> Result<()> {
    let mut layer = Layer::new(length, (experts, top_k), None, true)?;
    let reads =
        [("exact", ReadPages::All), ("experts", ReadPages::Experts), ("Quest 1/8", quest(length as usize))];
    let times = layer.times(&reads.map(|(_, read)| read), SAMPLES)?;
    let mut exact = None;
    for ((name, read), time) in reads.into_iter().zip(&times) {
        let bytes = layer.bytes_read(read, SAMPLES)?;
        let ratio = bytes / *exact.get_or_insert(bytes);
        let time = time / times[0];
        sheet.row(&format!(
            "made up,{experts},{top_k},{length},{SAMPLES},{name},{bytes:.0},{ratio:.4},{time:.4},,,"
        ))?;
    }
    Ok(())
}

/// For the MoE: the share of the tokens up to a row's own that is read, and nats.
fn nats(sheet: &mut Sheet, subject: &Subject, ids: &[u32], length: usize, others: bool) -> Result<()> {
    let (experts, top_k) = subject.experts;
    let text = Text { ids: &ids[..=TOKENS], window: length };
    let budget = (length / 4) as u32;
    let selects = |read| Row::of("none", false, |config| config.key_bounds(true)).selecting(read);
    // Quest ignores experts, so one top_k is enough.
    let all = [
        ("exact", selects(ReadPages::All)),
        ("experts", Row::of("none", false, |config| config)),
        ("Quest 1/8", selects(quest(length))),
    ];
    let mut exact = None;
    for (name, row) in all.into_iter().filter(|(name, _)| others || *name != "Quest 1/8") {
        let routed = ("R_T", routers::routers("R_T", experts, top_k, subject.layers)?);
        let o = evaluate(subject, routed, budget, &row, ReadPages::Experts, text, &ProgressBar::hidden())?;
        let (nats, time) = *exact.get_or_insert((o.nats, o.time));
        let share = if name == "Quest 1/8" { String::new() } else { format!("{:.4}", o.sees) };
        sheet.row(&format!(
            "{},{experts},{top_k},{length},{TOKENS},{name},,,{:.4},{share},{:.6},{:.6}",
            subject.name(),
            o.time.as_secs_f64() / time.as_secs_f64(),
            o.nats,
            o.nats - nats
        ))?;
    }
    Ok(())
}
