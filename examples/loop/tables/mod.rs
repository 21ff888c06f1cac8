//! Tables of the paper's code without a counterpart in its article: one file of `benches/results` each.
//!
//! All run on one thread, and times are CPU times over that of another row of the same run, so other load on the machine hardly matters.
//! The model was trained for 2,048 tokens: tables of longer contexts have no nats, but memory, reads and time of a made-up
//! stream.

mod adaptive;
mod experts;
mod grid;
mod lengths;
mod made_up;
mod mixed;
mod modules;
mod reads;

use crate::Result;
use pikv::codec::{Code, Codec, Coding};
use pikv::policy::{Budget, Eviction, H2o, Lru, SnapKv, StreamingLlm};
use pikv_engine::measure::subject::Subject;

/// A function that writes a table.
type Table = fn(&mut Subject, &[u32]) -> Result<()>;

const TABLES: [(&str, Table); 7] = [
    ("experts", experts::run),
    ("modules", modules::run),
    ("reads", reads::run),
    ("mixed", mixed::run),
    ("lengths", lengths::run),
    ("grid", grid::run),
    ("adaptive", adaptive::run),
];

/// Writes `benches/results/NAME.csv`, or all of them for `all`.
pub fn run(name: &str, subject: &mut Subject, ids: &[u32]) -> Result<()> {
    let wanted: Vec<_> = TABLES.iter().filter(|(table, _)| name == "all" || name == *table).collect();
    if wanted.is_empty() {
        let names = TABLES.map(|(name, _)| name).join(", ");
        return Err(format!("--table {name}: there are {names}, all").into());
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    for (name, table) in wanted {
        pool.install(|| table(subject, ids).map_err(|e| e.to_string()))?;
        println!("written to benches/results/{name}.csv");
    }
    Ok(())
}

/// K and V in one code; none for bf16.
fn codec(code: Code) -> Option<Codec> {
    (code != Code::Bf16).then(|| Codec::new(Coding::new(code), Coding::new(code)))
}

/// Codes of the tables.
const CODES: [Code; 4] = [Code::Bf16, Code::Int8, Code::Int4, Code::Int2];

/// Policies of the tables that can evict whole pages, at a budget of tokens per KV head; `none` evicts nothing.
fn evictions(budget: u32) -> Vec<(&'static str, Option<Eviction>)> {
    let tokens = Budget::Tokens(budget);
    vec![
        ("none", None),
        ("SL", Some(Eviction::new(StreamingLlm, tokens.clone()))),
        ("LRU", Some(Eviction::new(Lru::default(), tokens.clone()))),
        ("H2O", Some(Eviction::new(H2o, tokens.clone()))),
        ("SnapKV", Some(Eviction::new(SnapKv::default(), tokens))),
    ]
}
