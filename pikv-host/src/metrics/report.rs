//! What a step met.

use crate::base::text::{Bytes, Share, Table};
use crate::metrics::{Evicted, Reused};
use crate::router::learnt::Left;
use std::fmt;
use std::sync::Arc;

/// What a step met, once it is committed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    pub(crate) experts: usize,
    pub(crate) hits: Vec<u64>,
    pub(crate) misses: Vec<u64>,
    pub(crate) remote: Vec<u64>,
    /// Bytes that the tokens of the step's sequences would take with nothing evicted, packed, shared or padded.
    pub logical_bytes: u64,
    /// Tokens that policies let go of, page by page.
    pub evicted: Vec<Evicted>,
    /// Pages that were used again, where a policy is told what attention sees: used means that a page got its fair share. Of a
    /// [`ClosedLoop`](crate::ClosedLoop) only where its sink [wants them](crate::metrics::Sink::wants_reused).
    pub reused: Vec<Reused>,
    /// Whether nobody asks for them.
    pub(crate) unasked: bool,
    /// Where a loop asks for it, what each sequence of the step met, `[layers][parts][experts]`, and its ticket.
    pub(crate) by_part: Option<ByPart>,
}

impl fmt::Display for StepReport {
    /// A table: tokens that rows wanted of their experts, found and missed, and bytes from lower tiers, layer by layer; then what was
    /// evicted.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        table.row([&"layer", &"hits", &"misses", &"hit rate", &"from tiers"]);
        let mut row = |name: &dyn fmt::Display, hits: &[u64], misses: &[u64], remote: u64| {
            let (hits, misses): (u64, u64) = (hits.iter().sum(), misses.iter().sum());
            table.row([name, &hits, &misses, &Share(hits, hits + misses), &Bytes(remote)]);
        };
        let layers = self.hits.len().checked_div(self.experts).unwrap_or(0);
        for layer in 0..layers {
            row(&layer, self.hits(layer), self.misses(layer), self.remote_bytes(layer));
        }
        if layers != 1 {
            row(&"all", &self.hits, &self.misses, self.remote.iter().sum());
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

/// What each sequence of a step met.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByPart {
    pub hits: Vec<u64>,
    pub misses: Vec<u64>,
    pub tickets: Vec<Arc<Left>>,
}

impl PartialEq for ByPart {
    /// What a loop notes of a step is no part of the report.
    fn eq(&self, _: &ByPart) -> bool {
        true
    }
}

impl StepReport {
    /// Of each expert, tokens in its pages that rows of the step wanted, and found in the first tier. A row wants, in every KV
    /// head, what its own experts hold.
    pub fn hits(&self, layer: usize) -> &[u64] {
        self.hits.get(layer * self.experts..(layer + 1) * self.experts).unwrap_or_default()
    }

    /// Of each expert, tokens that rows wanted and that were evicted, lay in a lower tier, or were not fetched: of a
    /// [`ClosedLoop`](crate::ClosedLoop), what lies behind a row's first [`Routes::fetch`](crate::router::Routes::fetch) experts.
    pub fn misses(&self, layer: usize) -> &[u64] {
        self.misses.get(layer * self.experts..(layer + 1) * self.experts).unwrap_or_default()
    }

    /// Bytes of pages that attention in a layer read from lower tiers.
    pub fn remote_bytes(&self, layer: usize) -> u64 {
        self.remote.get(layer).copied().unwrap_or(0)
    }

    pub(crate) fn clear(&mut self, layers: usize, experts: usize) {
        self.experts = experts;
        for counts in [&mut self.hits, &mut self.misses] {
            counts.clear();
            counts.resize(layers * experts, 0);
        }
        self.remote.clear();
        self.logical_bytes = 0;
        self.evicted.clear();
        self.reused.clear();
        if let Some(ByPart { hits, misses, tickets }) = &mut self.by_part {
            hits.clear();
            misses.clear();
            tickets.clear();
        }
    }
}
