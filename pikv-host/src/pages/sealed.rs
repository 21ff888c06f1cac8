//! Pages in which tokens of the ring were filed ahead, for forks to share; [`seal`](super::seal) creates them.
//!
//! The place of a token in its run is known before it leaves the ring: its page, its lane, and the packed form of the
//! page. So these pages can be built once, and a sequence that files the token takes the shared page instead of one of its own. Rows read
//! pages by lanes, so a page with tokens that are still in the ring reads like one without them.

use crate::base::chunks::Chunks;
use crate::memory::arena::Page;
use crate::pages::entry::{Closed, Entry, PageState};
use crate::pages::find::find;
use crate::pages::run::Run;
use crate::pages::runs::Runs;
use std::sync::Arc;

/// Pages with tokens that are still in the ring.
#[derive(Clone, Debug)]
pub(crate) struct Sealed {
    /// The pages are valid for tokens before this position: later ones were not filed, or were rolled back since.
    pub until: u32,
    /// For each head, by ascending run.
    heads: Arc<[Vec<RunEnd>]>,
}

/// Last pages of a run.
#[derive(Debug)]
struct RunEnd {
    /// Index of the run.
    run: usize,
    entries: Chunks<Entry>,
}

impl Sealed {
    fn entry(&self, head: usize, run: usize, ordinal: u32) -> Option<&Entry> {
        let ends = self.heads.get(head)?;
        let entries = &ends[ends.binary_search_by_key(&run, |end| end.run).ok()?].entries;
        let guess = ordinal.checked_sub(entries.front()?.ordinal)? as usize;
        find(entries, guess, ordinal).map(|i| &entries[i])
    }

    /// The page at `ordinal` of a run in the dtype of its layer, if the token at `position` is at `lane` of it.
    pub fn page(&self, head: usize, run: usize, ordinal: u32, lane: u32, position: u32) -> Option<&Page> {
        let entry = self.entry(head, run, ordinal).filter(|_| position < self.until)?;
        let page = match &entry.held {
            PageState::Open(page) => page,
            PageState::Closed(closed) => closed.original.as_ref()?,
            PageState::Gone { .. } | PageState::Away(_) => return None,
        };
        (lane < entry.fill && page.positions()[lane as usize] == position).then_some(page)
    }

    /// The page at `ordinal` of a run, packed by the token at `by`.
    pub fn packed(&self, head: usize, run: usize, ordinal: u32, by: u32) -> Option<&Page> {
        match &self.entry(head, run, ordinal).filter(|_| by < self.until)?.held {
            PageState::Closed(Closed { packed, by: at, old: false, .. }) if *at == by => Some(packed),
            _ => None,
        }
    }

    /// Address of the lists, and the number of sequences that share them.
    pub fn holders(&self) -> (usize, usize) {
        (Arc::as_ptr(&self.heads) as *const Vec<RunEnd> as usize, Arc::strong_count(&self.heads))
    }

    /// The lists of pages.
    pub fn lists(&self) -> impl Iterator<Item = &Chunks<Entry>> {
        self.heads.iter().flatten().map(|end| &end.entries)
    }

    /// The pages in the first tier.
    pub fn pages(&self) -> impl Iterator<Item = &Page> {
        self.held().flat_map(PageState::pages)
    }

    /// Storage of all pages.
    pub fn held(&self) -> impl Iterator<Item = &PageState> {
        self.heads.iter().flatten().flat_map(|end| &end.entries).map(|entry| &entry.held)
    }

    /// Bytes of the lists; each fork counts shared lists in full.
    pub fn table_bytes(&self) -> u64 {
        let end = |end: &RunEnd| end.entries.bytes() + size_of::<RunEnd>();
        self.heads.iter().flatten().map(end).sum::<usize>() as u64
    }

    /// The last pages of all runs, as of `until` tokens; `from` gives the first page of each run. Pages of `newer` replace those of the
    /// run.
    pub fn of<'a>(
        until: u32,
        heads: impl Iterator<Item = &'a Runs>,
        from: impl Fn(usize, usize) -> u32,
        newer: Option<&Sealed>,
    ) -> Sealed {
        let end = |h: usize, c: usize, run: &Run| {
            let from = from(h, c);
            let known = |ordinal| newer.and_then(|newer| newer.entry(h, c, ordinal));
            let own = run.from(from).map(|entry| known(entry.ordinal).unwrap_or(entry));
            let more = (run.next.max(from)..).map_while(known);
            let first = |entry: &&Entry| entry.position(None, 0).is_none_or(|first| first < until);
            let bare = |entry: &Entry| Entry { bounds: None, ..entry.clone() };
            let entries: Chunks<Entry> = own.chain(more).take_while(first).map(bare).collect();
            (!entries.is_empty()).then_some(RunEnd { run: c, entries })
        };
        let heads =
            heads.enumerate().map(|(h, runs)| runs.iter().filter_map(|(c, run)| end(h, c, run)).collect());
        Sealed { until, heads: heads.collect() }
    }
}
