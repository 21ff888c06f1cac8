//! The pages of each KV head that a call reads, in the order of the reduction.

use crate::attend::forest::{Forest, ListedPage, PACKED_RUN};
use crate::attend::job::Job;
use crate::attend::options::ReadPages;
use crate::attend::select::{self, Selection};
use crate::attend::view::View;
use crate::base::ids::{PageId, Place, run_place};
use crate::base::parallel::{MANY, each_mut};
use crate::codec::HeadCodec;
use crate::memory::arena::Page;
use crate::pages::entry::{Away, Closed, Entry, PageState};
use crate::pages::head::HeadPages;
use crate::pages::run::Run;
use crate::tiers::StoredPage;
use pikv_core::attend::filled;
use pikv_core::bound;
use pikv_core::page::PAGE;
use std::sync::Arc;

/// An entry that is read.
struct ReadEntry<'a> {
    id: PageId,
    /// Lanes that are read, a bit each.
    live: u32,
    entry: &'a Entry,
}

impl<'a> Job<'a> {
    /// Lists the pages of every forest.
    pub fn grow(&self, forests: &mut [Forest<'a>]) {
        let pages = |forest: &Forest<'_>| -> usize {
            let View { layer, .. } = self.views[forest.view];
            layer.heads[forest.head].runs.iter().map(|(_, run)| run.entries.len()).sum()
        };
        if forests.iter().map(pages).sum::<usize>() >= MANY {
            each_mut(forests, |_, forest| self.list(forest));
        } else {
            forests.iter_mut().for_each(|forest| self.list(forest));
        }
    }

    /// Lists the pages of one forest, in the order of the reduction.
    fn list(&self, forest: &mut Forest<'a>) {
        let (view, head) = (forest.view, forest.head);
        let View { layer, len, .. } = self.views[view];
        let HeadPages { runs, ring, .. } = &layer.heads[head];
        let selection = self.selection(view, head);
        let read = |c: usize, run| entries(c, run, selection.as_ref());
        let ring_run = match layer.codecs[head].as_ref() {
            None => {
                for (c, run) in runs.iter() {
                    forest.push_run(c as u32, read(c, run).filter_map(whole));
                }
                runs.most() as u32
            }
            Some(codec) => {
                for old in [false, true] {
                    let before = forest.runs.len();
                    for (c, run) in runs.experts() {
                        let packed = read(c, run).filter_map(|of| packed(of, codec, old));
                        forest.push_run(c as u32 - 1, packed);
                    }
                    forest.packed[usize::from(old)] = forest.runs.len() - before;
                    if codec.aged.is_none() {
                        break;
                    }
                }
                forest.push_run(0, read(0, &runs[0]).filter_map(whole));
                let open = runs.experts().flat_map(|(c, run)| {
                    let from = open_from(run);
                    let late = read(c, run).skip_while(move |of| of.id.ordinal < from);
                    late.filter_map(move |of| Some((c as u32 - 1, open(of)?)))
                });
                forest.push_run(PACKED_RUN[0] + 1, open);
                PACKED_RUN[0] + 2
            }
        };
        let tiles = ring.iter().enumerate().map(|(i, page)| {
            let tile = layer.first_tile + i as u32;
            let id = PageId { place: Place::Ring, ordinal: tile };
            (tile, plain(page, filled(len.saturating_sub(tile * PAGE).min(PAGE)), id))
        });
        forest.push_run(ring_run, tiles);
    }

    /// Expert pages of a head that a row reads; `None` for all of them.
    fn selection(&self, view: usize, head: usize) -> Option<Selection> {
        let of = &self.views[view];
        let pages = match of.read {
            ReadPages::All => return None,
            ReadPages::Experts => return Some(Selection::Experts(of.experts(self.inner))),
            ReadPages::Quest { pages } => pages as usize,
        };
        let (k_dim, group) = (self.shape.layout.k_dim as usize, self.group());
        let rows = bound::rows(self.shape.layout.k_dim);
        let own = self.q.part(self.row_of(view, 0, head * group) * k_dim, group * k_dim);
        let (mut wide, mut queries) = (Vec::new(), Vec::new());
        select::folded(self.shape, self.stretch, own.wide(&mut wide), &mut queries);
        let floor = (of.first + 1).saturating_sub(self.inner.store.ring.window()).min(of.layer.filed);
        let (codec, head) = (of.layer.codecs[head].as_ref(), &of.layer.heads[head]);
        let sight = (self.lo(of.first), floor);
        let asked = select::BoundQueries { lanes: self.inner.config.lanes, queries: &queries, rows };
        Some(select::highest(head, codec, sight, &asked, pages))
    }

    /// Position of the oldest token that a head holds outside the sinks.
    pub fn oldest(&self, forest: &Forest<'_>) -> u32 {
        let View { layer, .. } = self.views[forest.view];
        let codec = self.codec(forest);
        let first = |(_, run): (usize, &Run)| {
            let entry = run.entries.iter().find(|entry| entry.live != 0)?;
            entry.position(codec, entry.live.trailing_zeros())
        };
        let filed = layer.heads[forest.head].runs.experts().filter_map(first).min();
        filed.unwrap_or(layer.filed)
    }
}

/// A page of the first tier in the dtype of its layer.
fn plain(page: &Page, live: u32, id: PageId) -> ListedPage<'_> {
    let (words, address) = (page.words(), page.address());
    ListedPage { words, address, slot: None, live, last: 0, by: 0, original: false, until: None, id }
}

/// A page in a lower tier or on a rank.
fn away(slot: &Arc<StoredPage>, live: u32, id: PageId) -> ListedPage<'_> {
    let words = slot.in_place().unwrap_or_default();
    ListedPage { words, address: 0, slot: Some(slot), live, last: 0, by: 0, original: false, until: None, id }
}

/// A page of a head without a codec, or of the sinks.
fn whole(ReadEntry { id, live, entry }: ReadEntry<'_>) -> Option<(u32, ListedPage<'_>)> {
    let listed = match &entry.held {
        PageState::Away(Away { slot, .. }) => away(slot, live, id),
        _ => plain(entry.page()?, live, id),
    };
    Some((id.ordinal, listed))
}

/// A page packed by the head's first codec, or, if `old`, by the second.
fn packed<'a>(of: ReadEntry<'a>, codec: &HeadCodec, old: bool) -> Option<(u32, ListedPage<'a>)> {
    let ReadEntry { id, live, entry } = of;
    match &entry.held {
        PageState::Closed(closed) => {
            let (page, by, until) = closed.form(codec, old)?;
            let listed = plain(page, live, id);
            Some((id.ordinal, ListedPage { last: closed.last, by, until, ..listed }))
        }
        PageState::Away(Away { slot, by: Some(by) }) if !old => {
            let listed = away(slot, live, id);
            Some((id.ordinal, ListedPage { last: entry.last()?, by: *by, ..listed }))
        }
        _ => None,
    }
}

/// The open page of a run, or the original of a packed page.
fn open(ReadEntry { id, live, entry }: ReadEntry<'_>) -> Option<ListedPage<'_>> {
    match &entry.held {
        PageState::Gone { .. } | PageState::Away(_) => None,
        PageState::Open(page) => Some(plain(page, live, id)),
        PageState::Closed(Closed { original, by, .. }) => {
            let listed = plain(original.as_ref()?, live, id);
            Some(ListedPage { by: *by, original: true, ..listed })
        }
    }
}

/// Ordinal of the first page that may be open or have an original; all of these are at the end of a run.
fn open_from(run: &Run) -> u32 {
    let packed = |entry: &&Entry| match &entry.held {
        PageState::Closed(closed) => closed.original.is_none(),
        PageState::Away(_) => true,
        _ => false,
    };
    run.entries.iter().rev().find(packed).map_or(0, |entry| entry.ordinal + 1)
}

/// Entries of run `c` that are read.
fn entries<'a>(c: usize, run: &'a Run, selection: Option<&Selection>) -> impl Iterator<Item = ReadEntry<'a>> {
    let lanes = move |entry: &Entry| selection.map_or(entry.live, |s| s.lanes(c, entry));
    let read = move |entry: &'a Entry| ReadEntry {
        id: PageId { place: run_place(c), ordinal: entry.ordinal },
        live: lanes(entry),
        entry,
    };
    run.entries.walk().map(read).filter(|of| of.live != 0)
}
