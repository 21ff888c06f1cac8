//! Hits, misses and evictions of a step.

use crate::base::text::{Bytes, Share, Table};
use crate::metrics::{Evicted, Reused};
use crate::router::met::Met;
use crate::router::tickets::TokensLeft;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Hits, misses and evictions of a committed step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    pub(crate) experts: usize,
    pub(crate) hits: Vec<f64>,
    pub(crate) misses: Vec<f64>,
    pub(crate) held: Vec<u64>,
    pub(crate) lost: Vec<u64>,
    pub(crate) remote: Vec<u64>,
    /// Bytes that the tokens of the step's sequences would take with nothing evicted, packed, shared or padded.
    pub logical_bytes: u64,
    /// Evicted tokens, page by page.
    pub evicted: Vec<Evicted>,
    /// Pages that were used again: rows gave the page at least its equal share of attention. Recorded only with a policy that observes
    /// attention; in a [`ClosedLoop`](crate::ClosedLoop) only if its sink [wants them](crate::metrics::Sink::wants_reused).
    pub reused: Vec<Reused>,
    /// Whether `reused` is not recorded.
    pub(crate) unasked: bool,
    /// For a loop: pages wanted by each sequence of the step, and its ticket.
    pub(crate) by_part: Option<ByPart>,
}

impl fmt::Display for StepReport {
    /// A table, layer by layer: pages that rows wanted and that hit or missed, tokens held or lost, and bytes from lower tiers and other
    /// ranks; then evictions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        table.row([&"layer", &"hits", &"misses", &"hit rate", &"held tokens", &"lost", &"fetched"]);
        let mut row = |name: &dyn fmt::Display, all: [&[f64]; 2], tokens: [&[u64]; 2], remote: u64| {
            let [hits, misses] = all.map(|of| of.iter().sum::<f64>());
            let [held, lost] = tokens.map(|of| of.iter().sum::<u64>());
            let [hit, miss] = [hits, misses].map(|pages| format!("{pages:.1}"));
            table.row([name, &hit, &miss, &Share(hits, hits + misses), &held, &lost, &Bytes(remote)]);
        };
        let layers = self.hits.len().checked_div(self.experts).unwrap_or(0);
        for layer in 0..layers {
            let pages = [self.hits(layer), self.misses(layer)];
            let tokens = [self.held_tokens(layer), self.lost_tokens(layer)];
            row(&layer, pages, tokens, self.remote_bytes(layer));
        }
        if layers != 1 {
            row(&"all", [&self.hits, &self.misses], [&self.held, &self.lost], self.remote.iter().sum());
        }
        let (tokens, bytes) = self
            .evicted
            .iter()
            .fold((0, 0), |(tokens, bytes), page| (tokens + u64::from(page.tokens), bytes + page.bytes));
        writeln!(f, "{table}")?;
        let pages = self.evicted.len();
        write!(f, "evicted: {tokens} tokens of {pages} pages, {} given back; ", Bytes(bytes))?;
        write!(f, "tokens as they came: {}", Bytes(self.logical_bytes))
    }
}

/// Hits and misses of each sequence of a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByPart {
    /// Layer, index of the sequence, and the pages that one of its rows wanted over all heads; by layer, sequence, row and expert.
    pub met: Vec<(usize, usize, Met)>,
    pub tickets: Vec<Arc<TokensLeft>>,
}

impl PartialEq for ByPart {
    /// Not compared: a loop's notes are not part of the report.
    fn eq(&self, _: &ByPart) -> bool {
        true
    }
}

impl StepReport {
    /// For each expert, its pages that rows of the step wanted and that lay in the first tier, summed over rows and KV heads, in pages
    /// with a resolution of 1/32: a page that lost tokens counts by those held. [`Hits`](crate::rules::Hits) defines wanted pages and the
    /// rows that are counted; all 0 if no policy, router or sink wants hits.
    pub fn hits(&self, layer: usize) -> &[f64] {
        self.hits.get(self.of(layer)).unwrap_or_default()
    }

    /// For each expert, its pages that rows wanted and that were evicted, lay in a lower tier or on another rank, or were not fetched: in a
    /// [`ClosedLoop`](crate::ClosedLoop), those of a row's experts after the first [`Routes::fetch`](crate::router::Routes::fetch).
    /// Counted as in [`StepReport::hits`].
    pub fn misses(&self, layer: usize) -> &[f64] {
        self.misses.get(self.of(layer)).unwrap_or_default()
    }

    /// Share of the pages wanted by rows, over all layers, that lay in the first tier; `None` for no wanted pages.
    pub fn hit_rate(&self) -> Option<f64> {
        let [hits, misses]: [f64; 2] = [&self.hits, &self.misses].map(|of| of.iter().sum());
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    /// For each expert, tokens of its pages that the first tier holds, wanted or not, summed over KV heads and the rows that chose the
    /// expert.
    pub fn held_tokens(&self, layer: usize) -> &[u64] {
        self.held.get(self.of(layer)).unwrap_or_default()
    }

    /// For each expert, tokens filed in its pages that the first tier does not hold, counted as in
    /// [`StepReport::held_tokens`].
    pub fn lost_tokens(&self, layer: usize) -> &[u64] {
        self.lost.get(self.of(layer)).unwrap_or_default()
    }

    /// Share of the tokens filed in the pages of the rows' experts that the first tier holds, over all layers; 1 for no tokens. It does not
    /// depend on which pages are wanted: policies that hold equally many tokens have the same residency.
    pub fn residency(&self) -> f64 {
        let [held, lost]: [u64; 2] = [&self.held, &self.lost].map(|of| of.iter().sum());
        if held + lost == 0 { 1.0 } else { held as f64 / (held + lost) as f64 }
    }

    fn of(&self, layer: usize) -> Range<usize> {
        layer * self.experts..(layer + 1) * self.experts
    }

    /// Bytes of pages that attention in a layer read from lower tiers, plus those of wanted pages on other ranks of a fabric. The latter count
    /// once for each counted row and KV head.
    pub fn remote_bytes(&self, layer: usize) -> u64 {
        self.remote.get(layer).copied().unwrap_or(0)
    }

    pub(crate) fn clear(&mut self, layers: usize, experts: usize) {
        self.experts = experts;
        for counts in [&mut self.hits, &mut self.misses] {
            counts.clear();
            counts.resize(layers * experts, 0.0);
        }
        for counts in [&mut self.held, &mut self.lost] {
            counts.clear();
            counts.resize(layers * experts, 0);
        }
        self.remote.clear();
        self.logical_bytes = 0;
        self.evicted.clear();
        self.reused.clear();
        if let Some(ByPart { met, tickets }) = &mut self.by_part {
            met.clear();
            tickets.clear();
        }
    }
}
