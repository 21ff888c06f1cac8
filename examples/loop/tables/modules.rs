//! The parts of PiKV, each alone, all together, and all but one.

use super::codec;
use crate::policies::Row;
use crate::{Result, Text, evaluate, routers};
use indicatif::ProgressBar;
use pikv::codec::Code;
use pikv::policy::{Budget, Eviction, SnapKv};
use pikv::shard::ShardMap;
use pikv::{CacheConfig, ReadPages};
use pikv_engine::measure::results::{self, Sheet};
use pikv_engine::measure::subject::Subject;

/// R_P for R_T; pages of the row's experts instead of all; int8 instead of bf16; SnapKV at a quarter of the tokens, by whole pages;
/// 8 shards instead of 1.
const MODULES: [&str; 5] = ["routing", "expert reads", "compression", "scheduling", "sharding"];
const SHARDS: u32 = 8;
/// Windows of the model.
const WINDOWS: usize = 2;

const COLUMNS: &str = "model,tokens,what,routing,expert_reads,compression,scheduling,sharding,nats,delta_nats,bytes,bytes_of_none,\
                       bytes_fullest,hit_rate,time_ratio";

pub fn run(subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let window = subject.window();
    let tokens = WINDOWS * window;
    let budget = (window / 4) as u32;
    let mut rows = vec![("none".to_owned(), [false; 5]), ("all".to_owned(), [true; 5])];
    for (i, name) in MODULES.iter().enumerate() {
        rows.push((format!("{name} alone"), std::array::from_fn(|j| i == j)));
    }
    for (i, name) in MODULES.iter().enumerate() {
        rows.push((format!("all but {name}"), std::array::from_fn(|j| i != j)));
    }
    let mut sheet = Sheet::new(results::file("modules.csv"), COLUMNS, "loop")?;
    let (experts, top_k) = subject.experts;
    let mut first = None;
    for (name, on) in rows {
        let [routing, reads, compression, scheduling, sharding] = on;
        let row = Row::of("modules", scheduling, move |mut config: CacheConfig| {
            if let Some(codec) = codec(if compression { Code::Int8 } else { Code::Bf16 }) {
                config = config.compress(codec);
            }
            if scheduling {
                config = config.evict(Eviction::new(SnapKv::default(), Budget::Tokens(budget)).by_page());
            }
            match ShardMap::spread(SHARDS) {
                Ok(map) if sharding => config.shards(map),
                _ => config,
            }
        });
        let id = if routing { "R_P" } else { "R_T" };
        let routed = (id, routers::routers(id, experts, top_k, subject.layers)?);
        let read = if reads { ReadPages::Experts } else { ReadPages::All };
        let text = Text { ids: &ids[..=tokens], window };
        let o = evaluate(subject, routed, budget, &row, read, text, &ProgressBar::hidden())?;
        let (nats, bytes, time) = *first.get_or_insert((o.nats, o.bytes, o.time));
        let flags = on.map(|on| u8::from(on).to_string()).join(",");
        sheet.row(&format!(
            "{},{tokens},{name},{flags},{:.6},{:.6},{},{:.4},{},{:.5},{:.3}",
            subject.name(),
            o.nats,
            o.nats - nats,
            o.bytes,
            o.bytes as f64 / bytes as f64,
            o.fullest,
            o.hit_rate,
            o.time.as_secs_f64() / time.as_secs_f64()
        ))?;
    }
    Ok(())
}
