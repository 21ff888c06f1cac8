//! Rows of one sequence in a call.

use crate::attend::hits::Fetched;
use crate::attend::options::ReadPages;
use crate::config::shape::CacheShape;
use crate::pages::filing::LayerPages;
use crate::policy::MassFeedback;
use crate::policy::rule::Rule;
use std::ops::Range;

/// Rows of one sequence in one layer.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub layer: &'a LayerPages,
    /// Index of the sequence in the call, and of the view's first row among the sequence's rows.
    pub sequence: usize,
    pub row: u32,
    /// Position of the first row.
    pub first: u32,
    pub rows: u32,
    /// Tokens written to the ring.
    pub len: u32,
    /// Pages that the rows read, and whether sinks are treated as adjacent to the oldest held token.
    pub read: ReadPages,
    pub closed_gaps: bool,
    /// Experts of each row whose pages it reads.
    pub fetched: Fetched<'a>,
    /// Index of the first row among the rows of the call, which are those of the step.
    pub start: usize,
}

impl<'a> View<'a> {
    /// One view for each row.
    pub fn rows(&self) -> impl Iterator<Item = View<'a>> + use<'a> {
        let view = *self;
        let row = move |i| View {
            row: view.row + i,
            first: view.first + i,
            rows: 1,
            start: view.start + i as usize,
            ..view
        };
        (0..view.rows).map(row)
    }

    /// Whether all rows were routed.
    pub fn routed(&self, inner: &CacheShape) -> bool {
        self.layer.tags.has(inner, self.first, u64::from(self.first) + u64::from(self.rows))
    }

    /// Experts whose pages the first row reads.
    pub fn experts(&self, inner: &CacheShape) -> Vec<u16> {
        let wanted = self.fetched.first.map_or(usize::MAX, |n| n as usize);
        let more = self.fetched.more(self.start).iter().copied();
        self.layer.experts(inner, self.first).take(wanted).chain(more).collect()
    }

    /// Rows whose weights the layer's policy needs, as sets that are summed separately.
    pub fn cuts(&self, rule: Option<&Rule>) -> impl Iterator<Item = Range<u32>> + use<> {
        let rule = rule.filter(|rule| rule.feedback != MassFeedback::None);
        let (first, end) = (self.first, self.first + self.rows);
        let cuts = rule.map(|rule| rule.cuts(first, end)).into_iter().flatten();
        cuts.map(move |(_, told)| told.start - first..told.end - first)
    }
}
