//! What a sequence is made of: layers, heads, runs of pages; and how tokens get there and leave again.

use crate::arena::{Page, Reservation};
use crate::cache::Inner;
use crate::error::Error;
use crate::sequence::chain_place;
use pikv_core::page::{Layout, PAGE, Position, Slot};
use pikv_core::plan::LayerShape;
use std::collections::VecDeque;

/// A page of a run. `page` is `None` where it was evicted; its tokens are still counted, so that rollback knows them.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub page: Option<Page>,
    /// Lanes written, from lane 0.
    pub fill: u32,
}

/// Pages of one expert (or the sinks) of one head, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chain {
    /// Ordinal of the first entry.
    pub first: u32,
    pub entries: VecDeque<Entry>,
}

/// One KV head of one layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head {
    /// Tiles by position, from the layer's `first_tile`.
    pub ring: VecDeque<Page>,
    /// The sinks, then each expert.
    pub chains: Vec<Chain>,
}

/// One layer of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub heads: Vec<Head>,
    /// Tile of the front of each head's ring.
    pub first_tile: u32,
    /// Tokens that left the ring: positions `0..filed` are in the chains, or gone.
    pub filed: u32,
    /// Experts of positions `tags_from..`, `top_k` each.
    pub tags: VecDeque<u16>,
    pub tags_from: u32,
    /// Pages that the step under way copied because they were shared: the head, the chain (or the ring), and the original, to
    /// be put back if the step is dropped.
    pub undo: Vec<(usize, Option<usize>, Page)>,
}

impl Chain {
    /// Drops pages that were evicted, or whose full page is `gone`, from the front. Evicted ones further on stay, so that a
    /// token that is filed next starts a page of its own.
    pub fn trim(&mut self, gone: impl Fn(&Page) -> bool) {
        let gone = |entry: &Entry| entry.page.as_ref().is_none_or(|page| entry.fill == PAGE && gone(page));
        while self.entries.front().is_some_and(gone) {
            self.entries.pop_front();
            self.first += 1;
        }
    }

    /// Where the next token goes, if that is in the last page.
    pub fn room(&self) -> Option<&Entry> {
        self.entries.back().filter(|entry| entry.page.is_some() && entry.fill < PAGE)
    }

    /// Takes back the token that was filed last. A run of pages that is empty already had it evicted.
    fn pop(&mut self) {
        if let Some(entry) = self.entries.back_mut() {
            entry.fill -= 1;
            if entry.fill == 0 {
                self.entries.pop_back();
            }
        }
    }
}

impl Layer {
    pub fn new(shape: &LayerShape, experts: u32) -> Layer {
        let head = Head { ring: VecDeque::new(), chains: vec![Chain::default(); experts as usize + 1] };
        Layer {
            heads: vec![head; shape.kv_heads as usize],
            first_tile: 0,
            filed: 0,
            tags: VecDeque::new(),
            tags_from: 0,
            undo: Vec::new(),
        }
    }

    /// The chain that the token at `position` is filed in; `None` if nobody will see it again.
    pub fn chain_of(&self, inner: &Inner, shape: &LayerShape, position: u32) -> Option<usize> {
        if position < inner.store.sinks {
            return Some(0);
        }
        inner.store.files(shape, position).then(|| 1 + usize::from(self.home(inner, position)))
    }

    /// First choice of the token at `position`; expert 0 where there is just one.
    fn home(&self, inner: &Inner, position: u32) -> u16 {
        if inner.config.experts == 1 {
            return 0;
        }
        let at = (position - self.tags_from) as usize * inner.config.top_k as usize;
        self.tags[at]
    }

    /// Files the tokens that leave the ring at `left` tokens filed; their experts must be known.
    pub fn file(
        &mut self,
        inner: &Inner,
        shape: &LayerShape,
        left: u32,
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        while self.filed < left {
            let position = self.filed;
            if let Some(c) = self.chain_of(inner, shape, position) {
                let Slot { tile, lane } = Position(position).into();
                let tile = (tile - self.first_tile) as usize;
                for h in 0..self.heads.len() {
                    // A head that runs out leaves the earlier ones with a token more: undone here, so that all agree.
                    let mut shared = None;
                    let filed = self.heads[h].file(inner, shape, c, tile, lane, h, pages, &mut shared);
                    self.undo.extend(shared.map(|page| (h, Some(c), page)));
                    if let Err(error) = filed {
                        self.heads[..h].iter_mut().for_each(|head| head.chains[c].pop());
                        return Err(error);
                    }
                }
            }
            self.filed += 1;
        }
        Ok(())
    }

    /// Undoes what was written past `len` tokens.
    pub fn truncate(&mut self, inner: &Inner, shape: &LayerShape, len: u32) {
        let left = inner.store.ring.left(len);
        while self.filed > left {
            self.filed -= 1;
            if let Some(c) = self.chain_of(inner, shape, self.filed) {
                self.heads.iter_mut().for_each(|head| head.chains[c].pop());
            }
        }
        let tiles = len.div_ceil(PAGE).saturating_sub(self.first_tile) as usize;
        self.heads.iter_mut().for_each(|head| head.ring.truncate(tiles));
        if inner.config.experts > 1 {
            let tags = len.saturating_sub(self.tags_from) as usize * inner.config.top_k as usize;
            self.tags.truncate(tags);
        }
    }

    /// Undoes a step: back to `len` tokens, on the pages that were there.
    pub fn abort(&mut self, inner: &Inner, shape: &LayerShape, len: u32) {
        self.truncate(inner, shape, len);
        // What was copied was not full, so once the step's tokens are gone it is the last of its run again.
        for (head, chain, original) in self.undo.drain(..) {
            let head = &mut self.heads[head];
            let page = match chain {
                None => head.ring.back_mut(),
                Some(c) => head.chains[c].entries.back_mut().and_then(|entry| entry.page.as_mut()),
            };
            if let Some(page) = page {
                *page = original;
            }
        }
    }

    /// Frees what nobody can see or take back at `len` tokens.
    pub fn release(&mut self, inner: &Inner, shape: &LayerShape, len: u32) {
        let ring = inner.store.ring;
        let first = ring.tiles(len, len).start;
        while self.first_tile < first {
            self.heads.iter_mut().for_each(|head| drop(head.ring.pop_front()));
            self.first_tile += 1;
        }
        let Some(window) = shape.window else { return };
        // The oldest row that can still be asked for, one before `len - slack`, sees from here.
        let seen = len.saturating_sub(window.saturating_add(ring.slack()));
        for head in &mut self.heads {
            // Only full pages (or evicted ones): which page a token is filed in must not depend on when the window moved on.
            for chain in &mut head.chains[1..] {
                chain.trim(|page| page.words()[PAGE as usize - 1] < seen);
            }
        }
        if inner.config.experts > 1 {
            let keep = seen.min(ring.kept_from(len));
            while self.tags_from < keep {
                self.tags.drain(..inner.config.top_k as usize);
                self.tags_from += 1;
            }
        }
    }
}

impl Head {
    /// Copies the token at `lane` of ring tile `tile` to the end of chain `c`.
    #[allow(clippy::too_many_arguments)]
    fn file(
        &mut self,
        inner: &Inner,
        shape: &LayerShape,
        c: usize,
        tile: usize,
        lane: u32,
        head: usize,
        pages: &mut Reservation,
        shared: &mut Option<Page>,
    ) -> Result<(), Error> {
        let layout = &shape.layout;
        let chain = &mut self.chains[c];
        if chain.room().is_none() {
            let ordinal = chain.first + chain.entries.len() as u32;
            let shard = inner.shard_of(chain_place(c), ordinal, head);
            let page = pages.take(shard, layout.words())?;
            chain.entries.push_back(Entry { page: Some(page), fill: 0 });
        }
        let Some(Entry { page: Some(page), fill }) = chain.entries.back_mut() else {
            unreachable!("there is room, or a page was just pushed")
        };
        let words = own(page, layout, *fill, pages, shared)?;
        layout.copy(self.ring[tile].words(), lane, words, *fill);
        *fill += 1;
        Ok(())
    }
}

/// The words of a page to be written, after its first `fill` lanes were copied if it is shared; the original is then left
/// in `shared`.
pub(crate) fn own<'a>(
    page: &'a mut Page,
    layout: &Layout,
    fill: u32,
    pages: &mut Reservation,
    shared: &mut Option<Page>,
) -> Result<&'a mut [u32], Error> {
    if page.is_shared() {
        let mut copy = pages.take(page.shard(), layout.words())?;
        if let Some(words) = copy.words_mut() {
            for lane in 0..fill {
                layout.copy(page.words(), lane, words, lane);
            }
        }
        *shared = Some(std::mem::replace(page, copy));
    }
    match page.words_mut() {
        Some(words) => Ok(words),
        None => unreachable!("the page was just taken, and its sequence is borrowed mutably"),
    }
}
