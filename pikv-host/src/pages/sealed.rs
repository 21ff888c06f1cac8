//! Tokens of the ring, filed ahead for forks to share.
//!
//! What a token that leaves the ring finds of its run is known before it leaves: its page, its lane, and what a codec will make of the
//! page. So the pages can be made once, and a sequence that files the token takes such a page in place of one of its own. What is read is
//! told by lanes, so a page that has tokens which are still in the ring reads as one that has not.

use crate::base::error::Error;
use crate::config::shape::CacheShape;
use crate::memory::arena::{Page, Reservation};
use crate::pages::chain::{Chain, Closed, Entry, Held, find};
use crate::pages::filing::{Head, Layer};
use pikv_core::page::PAGE;
use pikv_core::plan::{LayerShape, StoreShape};
use std::collections::VecDeque;
use std::sync::Arc;

/// Pages in which tokens lie that are still in the ring.
#[derive(Clone, Debug)]
pub(crate) struct Sealed {
    /// Tokens before this position are in them: those from here on were not there, or were taken back since.
    pub until: u32,
    /// Of each head, by ascending chain.
    heads: Arc<[Vec<Run>]>,
}

/// The last pages of a run.
#[derive(Debug)]
struct Run {
    chain: usize,
    entries: VecDeque<Entry>,
}

impl Sealed {
    fn entry(&self, head: usize, chain: usize, ordinal: u32) -> Option<&Entry> {
        let runs = self.heads.get(head)?;
        let run = &runs[runs.binary_search_by_key(&chain, |run| run.chain).ok()?];
        let guess = ordinal.checked_sub(run.entries.front()?.ordinal)? as usize;
        find(&run.entries, guess, ordinal).map(|i| &run.entries[i])
    }

    /// The page at `ordinal` of a run as its tokens came, if the token at `position` is at `lane` of it.
    pub fn page(&self, head: usize, chain: usize, ordinal: u32, lane: u32, position: u32) -> Option<&Page> {
        let entry = self.entry(head, chain, ordinal).filter(|_| position < self.until)?;
        let page = match &entry.held {
            Held::Open(page) => page,
            Held::Closed(closed) => closed.original.as_ref()?,
            Held::Gone { .. } | Held::Away(_) => return None,
        };
        (lane < entry.fill && page.positions()[lane as usize] == position).then_some(page)
    }

    /// The page at `ordinal` of a run, packed by the token at `by`.
    pub fn packed(&self, head: usize, chain: usize, ordinal: u32, by: u32) -> Option<&Page> {
        match &self.entry(head, chain, ordinal).filter(|_| by < self.until)?.held {
            Held::Closed(Closed { packed, by: at, old: false, .. }) if *at == by => Some(packed),
            _ => None,
        }
    }

    /// The pages that are held.
    pub fn pages(&self) -> impl Iterator<Item = &Page> {
        let entries = self.heads.iter().flatten().flat_map(|run| &run.entries);
        entries.flat_map(|entry| entry.held.pages())
    }

    /// Bytes of the lists; forks that share them count each.
    pub fn table_bytes(&self) -> u64 {
        let run = |run: &Run| run.entries.capacity() * size_of::<Entry>() + size_of::<Run>();
        self.heads.iter().flatten().map(run).sum::<usize>() as u64
    }

    /// The pages of `runs`, of each head, as of `until` tokens. Those of a run come from its chain from the page on that `from` gives.
    pub fn of<'a>(
        until: u32,
        heads: impl Iterator<Item = &'a [Chain]>,
        from: impl Fn(usize, usize) -> u32,
        newer: Option<&Sealed>,
    ) -> Sealed {
        let run = |h: usize, c: usize, chain: &Chain| {
            let from = from(h, c);
            let known = |ordinal| newer.and_then(|newer| newer.entry(h, c, ordinal));
            let own = chain.from(from).map(|entry| known(entry.ordinal).unwrap_or(entry));
            let more = (chain.next.max(from)..).map_while(known);
            let first = |entry: &&Entry| entry.position(None, 0).is_none_or(|first| first < until);
            let bare = |entry: &Entry| Entry { bounds: None, ..entry.clone() };
            let entries: VecDeque<Entry> = own.chain(more).take_while(first).map(bare).collect();
            (!entries.is_empty()).then_some(Run { chain: c, entries })
        };
        let heads = heads
            .enumerate()
            .map(|(h, chains)| chains.iter().enumerate().filter_map(|(c, chain)| run(h, c, chain)).collect());
        Sealed { until, heads: heads.collect() }
    }
}

impl Layer {
    /// The most bytes that [`Layer::seal`] takes.
    pub fn seal_bytes(&self, inner: &CacheShape, shape: &LayerShape, len: u32) -> u64 {
        if self.sealed.as_ref().is_some_and(|sealed| sealed.until == len) {
            return 0;
        }
        let mut known = vec![0u32; self.store.experts as usize + 1];
        for chain in (self.filed..len).filter_map(|position| self.chain_of(inner, shape, position)) {
            known[chain] += 1;
        }
        // Within this many positions each expert packs a page early at most, and starts another in its place.
        let early = 1 + u64::from((len - self.filed) >> 16);
        let mut bytes = 0;
        for (head, codec) in self.heads.iter().zip(self.codecs.iter()) {
            let aliases = self.aliases(inner, head);
            for (chain, &n) in head.chains.iter().zip(&known).filter(|(_, n)| **n > 0) {
                let fill = chain.room().map_or(0, |(_, fill)| fill);
                let mut pages = StoreShape::run_pages(n, if fill > 0 { PAGE - fill } else { 0 }) + 1;
                if let Some(codec) = codec {
                    pages += early;
                    bytes += (u64::from((fill + n) / PAGE) + early) * codec.packed.bytes();
                }
                bytes += if aliases { 0 } else { pages * shape.layout.bytes() };
            }
        }
        bytes
    }

    /// Whether the pages of a head's ring can be those of its run too: of one expert, at the same lanes, on the same shard.
    fn aliases(&self, inner: &CacheShape, head: &Head) -> bool {
        let at = |chain: &Chain| chain.room().map_or(0, |(_, fill)| fill);
        let open = if self.filed < self.store.sinks { &head.chains[0] } else { &head.chains[1] };
        let level = at(open) == self.filed % PAGE && self.store.sinks.is_multiple_of(PAGE);
        inner.config.experts == 1 && inner.config.shards.shards() == 1 && level
    }

    /// Files the tokens of the ring ahead, on pages of `pages`. Nothing changes before [`Layer::take_sealed`].
    ///
    /// # Errors
    /// No memory.
    pub fn seal(
        &self,
        inner: &CacheShape,
        shape: &LayerShape,
        len: u32,
        pages: &mut Reservation,
    ) -> Result<Sealed, Error> {
        if let Some(sealed) = self.sealed.as_ref().filter(|sealed| sealed.until == len) {
            return Ok(sealed.clone());
        }
        let mut ahead = self.clone();
        ahead.file_tokens(inner, shape, len, inner.config.experts == 1, pages)?;
        let from = |h: usize, c: usize| self.heads[h].chains[c].next_place(false).0;
        Ok(Sealed::of(len, ahead.heads.iter().map(|head| &head.chains[..]), from, None))
    }

    /// Has tokens filed in the pages of [`Layer::seal`], from those that are open now on.
    pub fn take_sealed(&mut self, sealed: Sealed) {
        for (h, head) in self.heads.iter_mut().enumerate() {
            for (c, chain) in head.chains.iter_mut().enumerate() {
                let Some(Entry { ordinal, fill, held: Held::Open(page), .. }) = chain.entries.back_mut()
                else {
                    continue;
                };
                let lane = fill.saturating_sub(1);
                if let Some(ahead) = sealed.page(h, c, *ordinal, lane, page.positions()[lane as usize]) {
                    *page = ahead.clone();
                }
            }
        }
        self.sealed = Some(sealed);
    }
}
