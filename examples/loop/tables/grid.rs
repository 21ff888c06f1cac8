//! Every router with codes and policies, at a quarter of the window.

use super::{CODES, codec, evictions};
use crate::policies::Row;
use crate::{Result, Text, evaluate, routers};
use indicatif::ProgressBar;
use pikv::ReadPages;
use pikv::policy::Eviction;
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;

const COLUMNS: &str =
    "model,tokens,router,code,policy,budget,nats,delta_nats,bytes,hit_rate,residency,balance,time_ratio";

pub fn run(subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let window = subject.window();
    let budget = (window / 4) as u32;
    let text = Text { ids: &ids[..=window], window };
    let mut sheet = Sheet::new(results::file("grid.csv"), COLUMNS, "loop")?;
    let bar = ProgressBar::new((routers::NAMES.len() * CODES.len() * evictions(budget).len()) as u64);
    let (experts, top_k) = subject.experts;
    let mut first = None;
    // R_T with bf16 and without a policy comes first: the others are relative to it.
    let mut names = routers::NAMES;
    names.sort_by_key(|name| *name != "R_T");
    for router in names {
        for code in CODES {
            for (policy, eviction) in evictions(budget) {
                // By whole pages: packed pages are not merged.
                let eviction = eviction.map(Eviction::by_page);
                let row = Row::of(policy, eviction.is_some(), move |mut config| {
                    if let Some(codec) = codec(code) {
                        config = config.compress(codec);
                    }
                    match &eviction {
                        Some(eviction) => config.evict(eviction.clone()),
                        None => config,
                    }
                });
                let routed = (router, routers::routers(router, experts, top_k, subject.layers)?);
                let hidden = ProgressBar::hidden();
                let o = evaluate(subject, routed, budget, &row, ReadPages::Experts, text, &hidden)?;
                let (nats, time) = *first.get_or_insert((o.nats, o.time));
                sheet.row(&format!(
                    "{},{window},{router},{},{policy},{},{:.6},{:.6},{},{:.5},{:.5},{:.4},{:.3}",
                    subject.name(),
                    code.name(),
                    o.budget,
                    o.nats,
                    o.nats - nats,
                    o.bytes,
                    o.hit_rate,
                    o.residency,
                    o.balance,
                    o.time.as_secs_f64() / time.as_secs_f64()
                ))?;
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(())
}
