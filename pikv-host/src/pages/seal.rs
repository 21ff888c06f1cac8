//! Files the tokens of a layer's ring ahead of time, on pages that forks share: [`Sealed`].

use crate::base::error::Error;
use crate::config::shape::CacheShape;
use crate::memory::arena::Reservation;
use crate::pages::entry::{Entry, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::head::HeadPages;
use crate::pages::run::Run;
use crate::pages::sealed::Sealed;
use pikv_core::page::PAGE;
use pikv_core::plan::{LayerShape, StoreShape};

impl LayerPages {
    /// Most bytes that [`LayerPages::seal`] takes.
    pub fn seal_bytes(&self, inner: &CacheShape, shape: &LayerShape, len: u32) -> u64 {
        if self.sealed.as_ref().is_some_and(|sealed| sealed.until == len) {
            return 0;
        }
        let mut known = vec![0u32; self.store.experts as usize + 1];
        for run in (self.filed..len).filter_map(|position| self.run_at(inner, shape, position)) {
            known[run] += 1;
        }
        // In each span of 2^16 positions an expert packs at most one page early, and starts another in its place.
        let early = 1 + u64::from((len - self.filed) >> 16);
        let mut bytes = 0;
        for (head, codec) in self.heads.iter().zip(self.codecs.iter()) {
            let aliases = self.aliases(inner, head);
            let runs = known.iter().enumerate().map(|(c, n)| (&head.runs[c], *n));
            for (run, n) in runs.filter(|(_, n)| *n > 0) {
                let fill = run.room().map_or(0, |(_, fill)| fill);
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

    /// Whether pages of a head's ring can also be pages of its run: with one expert, the same lanes and one shard.
    fn aliases(&self, inner: &CacheShape, head: &HeadPages) -> bool {
        let at = |run: &Run| run.room().map_or(0, |(_, fill)| fill);
        let open = if self.filed < self.store.sinks { &head.runs[0] } else { &head.runs[1] };
        let level = at(open) == self.filed % PAGE && self.store.sinks.is_multiple_of(PAGE);
        inner.config.experts == 1 && inner.config.shards.shards() == 1 && level
    }

    /// Files the tokens of the ring ahead, on pages of `pages`. The layer does not change until [`LayerPages::take_sealed`].
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
        let from = |h: usize, c: usize| self.heads[h].runs[c].next_place(false).0;
        Ok(Sealed::of(len, ahead.heads.iter().map(|head| &head.runs), from, None))
    }

    /// Uses the pages of [`LayerPages::seal`] for the open pages and for later tokens.
    pub fn take_sealed(&mut self, sealed: Sealed) {
        for (h, head) in self.heads.iter_mut().enumerate() {
            for (c, run) in head.runs.iter_mut() {
                let Some(Entry { ordinal, fill, held: PageState::Open(page), .. }) = run.entries.back_mut()
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
