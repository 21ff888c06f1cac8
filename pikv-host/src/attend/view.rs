//! What a call reads: the rows of each sequence, and the pages of each KV head that they see.

use crate::attend::Read;
use crate::attend::forest::{Forest, Listed, PACKED_RUN};
use crate::attend::hits::Fetched;
use crate::attend::job::Job;
use crate::attend::select;
use crate::attend::select::Selection;
use crate::base::ids::{PageId, Place, chain_place};
use crate::base::parallel::MANY;
use crate::base::parallel::each_mut;
use crate::config::shape::CacheShape;
use crate::memory::arena::Page;
use crate::pages::chain::{Away, Chain, Closed, Entry, Held};
use crate::pages::filing::Layer;
use crate::policy::Feedback;
use crate::policy::rule::Rule;
use crate::tiers::Stored;
use pikv_core::attend::filled;
use pikv_core::bound;
use pikv_core::page::PAGE;
use std::ops::Range;
use std::sync::Arc;

/// Rows of one sequence in one layer.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub layer: &'a Layer,
    /// Index of the sequence in the call, and the first row's among its rows.
    pub sequence: usize,
    pub row: u32,
    /// Position of the first row.
    pub first: u32,
    pub rows: u32,
    /// Tokens written to the ring.
    pub len: u32,
    /// Which of a row's experts it reads.
    pub fetched: Fetched<'a>,
    /// Place of its first row among those of the step.
    pub of_step: usize,
}

impl<'a> View<'a> {
    /// Row by row.
    pub fn rows(&self) -> impl Iterator<Item = View<'a>> + use<'a> {
        let view = *self;
        let row = move |i| View {
            row: view.row + i,
            first: view.first + i,
            rows: 1,
            of_step: view.of_step + i as usize,
            ..view
        };
        (0..view.rows).map(row)
    }

    /// Whether the experts of all rows are known.
    pub fn routed(&self, inner: &CacheShape) -> bool {
        let known = self.layer.tags.len() / inner.config.top_k as usize;
        let from = self.layer.tags_from;
        let end = u64::from(self.first) + u64::from(self.rows);
        inner.config.experts == 1 || (self.first >= from && end <= u64::from(from) + known as u64)
    }

    /// The experts of the first row.
    fn experts(&self, inner: &CacheShape) -> Vec<u16> {
        let wanted = self.fetched.first.map_or(usize::MAX, |n| n as usize);
        let more = self.fetched.more(self.of_step).iter().copied();
        self.layer.experts(inner, self.first).take(wanted).chain(more).collect()
    }

    /// The rows that the layer's policy wants to be told of, apart.
    pub fn cuts(&self, rule: Option<&Rule>) -> impl Iterator<Item = Range<u32>> + use<> {
        let rule = rule.filter(|rule| rule.feedback != Feedback::None);
        let (first, end) = (self.first, self.first + self.rows);
        let cuts = rule.map(|rule| rule.cuts(first, end)).into_iter().flatten();
        cuts.map(move |(_, told)| told.start - first..told.end - first)
    }
}

impl<'a> Job<'a> {
    /// Lists the pages of each forest's KV head.
    pub fn grow(&self, forests: &mut [Forest<'a>]) {
        let pages = |forest: &Forest<'_>| -> usize {
            let View { layer, .. } = self.views[forest.view];
            layer.heads[forest.head].chains.iter().map(|chain| chain.entries.len()).sum()
        };
        if forests.iter().map(pages).sum::<usize>() >= MANY {
            each_mut(forests, |_, forest| self.list(forest));
        } else {
            forests.iter_mut().for_each(|forest| self.list(forest));
        }
    }

    /// Lists the pages of a forest's KV head, in the order of the reduction.
    fn list(&self, forest: &mut Forest<'a>) {
        let (view, head) = (forest.view, forest.head);
        let View { layer, len, .. } = self.views[view];
        let state = &layer.heads[head];
        let (chains, experts) = (&state.chains, state.chains.len() as u32 - 1);
        let plain = |page: &'a Page, live, id: PageId| {
            let (words, address) = (page.words(), page.address());
            Listed { words, address, slot: None, live, last: 0, by: 0, original: false, until: None, id }
        };
        let away = |slot: &'a Arc<Stored>, live, id: PageId| {
            let words = slot.in_place().unwrap_or_default();
            let slot = Some(slot);
            Listed { words, address: 0, slot, live, last: 0, by: 0, original: false, until: None, id }
        };
        let codec = layer.codecs[head].as_ref();
        let selection = self.selection(view, head);
        let entries = |c, chain| entries(c, chain, selection.as_ref());
        if let Some(codec) = codec {
            for old in [false, true] {
                let before = forest.runs.len();
                for (c, chain) in chains.iter().enumerate().skip(1) {
                    let closed = entries(c, chain).filter_map(|(id, entry)| match &entry.held {
                        Held::Closed(closed) => {
                            let (page, by, until) = closed.form(codec, old)?;
                            let listed = plain(page, entry.live, id);
                            Some((id.ordinal, Listed { last: closed.last, by, until, ..listed }))
                        }
                        Held::Away(Away { slot, by: Some(by) }) if !old => {
                            let listed = away(slot, entry.live, id);
                            Some((id.ordinal, Listed { last: entry.last()?, by: *by, ..listed }))
                        }
                        _ => None,
                    });
                    forest.push_run(c as u32 - 1, closed);
                }
                forest.packed[usize::from(old)] = forest.runs.len() - before;
                if codec.aged.is_none() {
                    break;
                }
            }
        }
        let codec = codec.is_some();
        for (c, chain) in chains.iter().enumerate().take(if codec { 1 } else { chains.len() }) {
            let pages = entries(c, chain).filter_map(|(id, entry)| {
                let listed = match &entry.held {
                    Held::Away(Away { slot, .. }) => away(slot, entry.live, id),
                    _ => plain(entry.page()?, entry.live, id),
                };
                Some((id.ordinal, listed))
            });
            forest.push_run(c as u32, pages);
        }
        if codec {
            let open = chains.iter().enumerate().skip(1).flat_map(|(c, chain)| {
                // What is not packed for good is at the end.
                let packed = |entry: &Entry| match &entry.held {
                    Held::Closed(closed) => closed.original.is_none(),
                    Held::Away(_) => true,
                    _ => false,
                };
                let from =
                    chain.entries.iter().rev().find(|entry| packed(entry)).map_or(0, |e| e.ordinal + 1);
                entries(c, chain).skip_while(move |(id, _)| id.ordinal < from).filter_map(
                    move |(id, entry)| {
                        let listed = match &entry.held {
                            Held::Gone { .. } | Held::Away(_) => return None,
                            Held::Open(page) => plain(page, entry.live, id),
                            Held::Closed(Closed { original, by, .. }) => Listed {
                                by: *by,
                                original: true,
                                ..plain(original.as_ref()?, entry.live, id)
                            },
                        };
                        Some((c as u32 - 1, listed))
                    },
                )
            });
            forest.push_run(PACKED_RUN[0] + 1, open);
        }
        let tiles = state.ring.iter().enumerate().map(|(i, page)| {
            let tile = layer.first_tile + i as u32;
            let id = PageId { place: Place::Ring, ordinal: tile };
            (tile, plain(page, filled(len.saturating_sub(tile * PAGE).min(PAGE)), id))
        });
        forest.push_run(if codec { PACKED_RUN[0] + 2 } else { experts + 1 }, tiles);
    }

    /// What a row reads of a head's expert pages, unless it is everything.
    fn selection(&self, view: usize, head: usize) -> Option<Selection> {
        let of = &self.views[view];
        let pages = match self.read {
            Read::All => return None,
            Read::Experts => return Some(Selection::Experts(of.experts(self.inner))),
            Read::Quest { pages } => pages as usize,
        };
        let (k_dim, group) = (self.shape.layout.k_dim as usize, self.group());
        let rows = bound::rows(self.shape.layout.k_dim);
        let own = &self.q[self.row_of(view, 0, head * group) * k_dim..][..group * k_dim];
        let queries = select::folded(self.shape, self.stretch, own);
        let floor = (of.first + 1).saturating_sub(self.inner.store.ring.window()).min(of.layer.filed);
        let (codec, head) = (of.layer.codecs[head].as_ref(), &of.layer.heads[head]);
        let sight = (self.lo(of.first), floor);
        Some(select::highest(head, codec, sight, self.inner.config.lanes, &queries, rows, pages))
    }

    /// Position of the oldest token that a head holds, sinks apart.
    pub fn oldest(&self, forest: &Forest<'_>) -> u32 {
        let View { layer, .. } = self.views[forest.view];
        let codec = self.codec(forest);
        let first = |chain: &Chain| {
            let entry = chain.entries.iter().find(|entry| entry.live != 0)?;
            entry.position(codec, entry.live.trailing_zeros())
        };
        let filed = layer.heads[forest.head].chains[1..].iter().filter_map(first).min();
        filed.unwrap_or(layer.filed)
    }
}

/// The entries of chain `c` that are read, and their names.
fn entries<'a>(
    c: usize,
    chain: &'a Chain,
    selection: Option<&Selection>,
) -> impl Iterator<Item = (PageId, &'a Entry)> {
    let name = move |entry: &Entry| PageId { place: chain_place(c), ordinal: entry.ordinal };
    let selected = move |entry: &Entry| c == 0 || selection.is_none_or(|s| s.reads(c, entry.ordinal, entry));
    let entries = chain.entries.iter().filter(move |entry| entry.live != 0 && selected(entry));
    entries.map(move |entry| (name(entry), entry))
}
