//! The policies of the table, each at a budget of tokens per KV head.

use pikv::policy::{
    AdaKvLit, Budget, Chunks, Duo, DuoLit, Eviction, ExpectedAttention, H2o, KeyNorm, Lru, LruPlus,
    PyramidKv, SnapKv, StreamingLlm, Tova, fast_v,
};
use pikv::rules::Hits;
use pikv::{CacheConfig, ReadPages, Rope};
use std::error::Error;
use std::num::NonZeroU32;

/// Positions of a chunk, as the paper of ChunkKV has it.
const CHUNK: NonZeroU32 = NonZeroU32::new(10).unwrap();

/// First layers, which FastV and Quest leave unchanged.
const DENSE: usize = 2;

/// Configuration of a row of the table.
pub struct Row {
    pub name: &'static str,
    /// False if the row holds everything at any budget.
    pub bounded: bool,
    configure: Box<dyn Fn(CacheConfig) -> CacheConfig>,
    /// Pages that attention reads, if not those that the router fetches; the first [`DENSE`] layers then read all.
    pub selects: Option<ReadPages>,
}

impl Row {
    pub fn config(&self, config: CacheConfig) -> CacheConfig {
        (self.configure)(config)
    }

    /// Pages that a layer's attention reads if the router fetches `fetched`.
    pub fn read(&self, layer: usize, fetched: ReadPages) -> ReadPages {
        match self.selects {
            Some(_) if layer < DENSE => ReadPages::All,
            read => read.unwrap_or(fetched),
        }
    }
}

/// A model and its budget.
pub struct Setup<'a> {
    pub layers: usize,
    /// Tokens per KV head.
    pub budget: u32,
    /// Tokens of the ring and the sinks, of `budget`.
    pub fixed: u32,
    pub window: u32,
    /// `[layers][kv_heads]`, the share of a head's attention on distant tokens.
    pub far: &'a [Vec<f32>],
    /// Rotation of the keys before they are stored.
    pub rope: Option<Rope>,
}

/// A configuration that evicts tokens in all layers.
fn all(eviction: Eviction) -> Box<dyn Fn(CacheConfig) -> CacheConfig> {
    Box::new(move |config| config.evict(eviction.clone()))
}

pub fn rows(setup: &Setup<'_>) -> Result<Vec<Row>, Box<dyn Error>> {
    let Setup { layers, budget, fixed, window, far, rope } = *setup;
    let tokens = Budget::Tokens(budget);
    let mut rows = Vec::new();
    let mut row = |name, configure: Box<dyn Fn(CacheConfig) -> CacheConfig>| {
        rows.push(Row { name, bounded: name != "none", configure, selects: None });
    };
    row("none", Box::new(|config| config));
    row("LRU", all(Eviction::new(Lru::default(), tokens.clone())));
    row("LRU+", all(Eviction::new(LruPlus::default(), tokens.clone())));
    row("H2O", all(Eviction::new(H2o, tokens.clone())));
    row("SL", all(Eviction::new(StreamingLlm, tokens.clone())));
    let newest = all(Eviction::new(StreamingLlm, tokens.clone()));
    row("newest (no sinks)", Box::new(move |config| newest(config.sinks(0))));
    row("SnapKV", all(Eviction::new(SnapKv::default(), tokens.clone())));
    row("TOVA", all(Eviction::new(Tova, tokens.clone())));
    row("key norm", all(Eviction::new(KeyNorm, tokens.clone())));
    let expected = ExpectedAttention::new(rope, rope.is_some());
    row("expected", all(Eviction::new(expected, tokens.clone())));
    row("AdaKV-lit", all(Eviction::new(AdaKvLit::default(), tokens.clone())));
    row("AdaKV", all(Eviction::new(SnapKv::default(), tokens.clone()).adaptive(0.2)));
    let duo = duo(far, budget, fixed, window);
    row("Duo", all(duo.eviction()));
    row("Duo-lit", all(Eviction::new(DuoLit, tokens.clone())));
    let pyramid = PyramidKv::new(budget).capacity(budget).window(fixed);
    let budgets = pyramid.budgets_of(layers as u32, window)?;
    row("C_Py", all(Eviction::new(SnapKv::default(), Budget::Layers(budgets.into()))));
    row("C_Ch", all(Eviction::new(Chunks::new(SnapKv::default(), CHUNK), tokens.clone())));
    if layers > DENSE {
        // The other layers make up for the first two, which hold more.
        let share = (u64::from(budget) * layers as u64).saturating_sub(DENSE as u64 * u64::from(window));
        let rest = u32::try_from(share / (layers - DENSE) as u64)?.max(fixed + 1);
        let fast = fast_v(layers, DENSE, |policy| Eviction::new(policy, Budget::Tokens(rest)))?;
        let rules = move |config| {
            fast.iter().fold(config, |config: CacheConfig, (l, rule)| config.evict_layer(*l, rule.clone()))
        };
        row("C_F", Box::new(rules));
    }
    let pages = (budget.saturating_sub(fixed) / pikv::shape::PAGE).max(1);
    rows.push(Row {
        name: "QUEST",
        bounded: false,
        configure: Box::new(|config| config.key_bounds(true)),
        selects: Some(ReadPages::Quest { pages }),
    });
    Ok(rows)
}

/// Gates for as many retrieval heads, those that look farthest, as the budget allows; streaming heads hold twice the fixed tokens.
fn duo(far: &[Vec<f32>], budget: u32, fixed: u32, window: u32) -> Duo {
    let streaming = (2 * fixed).min(budget);
    let mut order: Vec<(f32, usize, usize)> = Vec::new();
    for (l, heads) in far.iter().enumerate() {
        order.extend(heads.iter().enumerate().map(|(h, far)| (*far, l, h)));
    }
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    let spare = u64::from(budget - streaming) * order.len() as u64;
    let open = (spare / u64::from((window - streaming).max(1))) as usize;
    let mut gates: Vec<Vec<f32>> = far.iter().map(|heads| vec![0.0; heads.len()]).collect();
    for (_, l, h) in order.into_iter().take(open) {
        gates[l][h] = 1.0;
    }
    Duo::new(gates, streaming)
}

impl Row {
    /// A row that evicts tokens in all layers.
    pub fn evicting(name: &'static str, eviction: Eviction) -> Row {
        Row { name, bounded: true, configure: all(eviction), selects: None }
    }

    /// A row with the caches of `configure`, which reads all pages that are fetched.
    pub fn of(
        name: &'static str,
        bounded: bool,
        configure: impl Fn(CacheConfig) -> CacheConfig + 'static,
    ) -> Row {
        Row { name, bounded, configure: Box::new(configure), selects: None }
    }

    /// This row, whose queries want `pages` pages of each KV head.
    pub fn wanting(self, pages: u32) -> Row {
        let configure = self.configure;
        Row { configure: Box::new(move |config| configure(config.hits(Hits::new().pages(pages)))), ..self }
    }

    /// This row, whose attention reads these pages after the first [`DENSE`] layers.
    pub fn selecting(mut self, read: ReadPages) -> Row {
        self.selects = Some(read);
        self
    }

    /// A row that holds and reads everything.
    pub fn everything() -> Row {
        Row {
            name: "none",
            bounded: false,
            configure: Box::new(|config| config),
            selects: Some(ReadPages::All),
        }
    }
}
