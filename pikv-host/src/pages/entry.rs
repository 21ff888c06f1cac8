//! A page of a run: open, packed, in a lower tier, or evicted.

use crate::codec::HeadCodec;
use crate::memory::arena::Page;
use crate::pages::homes::Homes;
use crate::policy::page::TokenPage;
use crate::tiers::StoredPage;
use pikv_core::bound;
use pikv_core::page::{Layout, MAX_DIM, PAGE};
use pikv_core::rope::Rope;
use pikv_core::warp::LANES;
use std::sync::Arc;

/// A page of a run.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Ordinal of the page in its run: ascending, with gaps where pages were evicted.
    pub ordinal: u32,
    pub held: PageState,
    /// Lanes written, from lane 0.
    pub fill: u32,
    /// Bit `t` is set if the token at lane `t` is read: it was written, and not evicted.
    pub live: u32,
    /// Evicted lanes that a rollback can revive; the page is kept for them.
    pub pending: u32,
    /// Least and largest keys of a full page, if the cache keeps them.
    pub bounds: Option<Box<[[f32; LANES]]>>,
    /// Home experts of the tokens.
    pub homes: Homes,
}

/// Storage of a page.
#[derive(Clone, Debug)]
pub(crate) enum PageState {
    /// Evicted. The entry stays while a rollback can reach its tokens, the last of which is at `last`.
    Gone { last: u32 },
    /// In the dtype of its layer.
    Open(Page),
    /// Packed.
    Closed(Closed),
    /// In a lower tier. No rollback reaches its tokens.
    Away(Away),
}

/// A page in a lower tier; forks share it.
#[derive(Clone, Debug)]
pub(crate) struct Away {
    pub slot: Arc<StoredPage>,
    /// For a packed page, the position whose token packed it.
    pub by: Option<u32>,
}

/// A packed page. It was packed when the token at position `by` left the ring: its own last token, or the next token of its run if that
/// token would have made the page span more positions than a packed page can.
#[derive(Clone, Debug)]
pub(crate) struct Closed {
    pub packed: Page,
    /// In the dtype of its layer; kept while a rollback can reach `by`, and for rows of a step before that position.
    pub original: Option<Page>,
    /// Position of the last token.
    pub last: u32,
    pub by: u32,
    /// Whether `packed` is by the head's second codec; `by` is then the position that packed it again.
    pub old: bool,
    /// The page by the second codec, while rows (or rows after a rollback) still read `packed`.
    pub next: Option<Page>,
}

impl Closed {
    /// The form of the first or the second codec, if the page has it: the page, the first position whose row reads it, and the first whose
    /// row reads the other.
    pub fn form(&self, codec: &HeadCodec, old: bool) -> Option<(&Page, u32, Option<u32>)> {
        match (&self.next, old) {
            (None, _) => (self.old == old).then_some((&self.packed, self.by, None)),
            (Some(_), false) => Some((&self.packed, self.by, codec.ages_at(self.by))),
            (Some(next), true) => Some((next, codec.ages_at(self.by)?, None)),
        }
    }

    /// The form that the newest rows read, and its codec.
    pub fn newest<'a>(&'a self, codec: &'a HeadCodec) -> (&'a Page, &'a HeadCodec) {
        match (&codec.aged, &self.next) {
            (Some(aged), Some(next)) => (next, &aged.codec),
            (Some(aged), None) if self.old => (&self.packed, &aged.codec),
            _ => (&self.packed, codec),
        }
    }

    /// Drops the form of the first codec, which no row reads any more.
    pub fn finish_aging(&mut self, codec: &HeadCodec) {
        if let (Some(next), Some(by)) = (self.next.take(), codec.ages_at(self.by)) {
            *self = Closed { packed: next, original: None, last: self.last, by, old: true, next: None };
        }
    }
}

impl Entry {
    /// A page without tokens.
    pub fn open(ordinal: u32, page: Page) -> Entry {
        Entry { held: PageState::Open(page), fill: 0, ..Entry::gone(ordinal) }
    }

    /// An evicted page without tokens.
    pub fn gone(ordinal: u32) -> Entry {
        let held = PageState::Gone { last: 0 };
        let homes = Homes::default();
        Entry { ordinal, held, fill: PAGE, live: 0, pending: 0, bounds: None, homes }
    }

    /// Frees the page. Its tokens stay counted in `fill`.
    pub fn free(&mut self) {
        if let Some(last) = self.last() {
            self.held = PageState::Gone { last };
        }
        (self.live, self.pending, self.bounds, self.homes) = (0, 0, None, Homes::default());
    }

    /// Computes the bounds of the keys of an open page in host memory.
    pub fn bound(&mut self, layout: &Layout, rope: Option<&Rope>) {
        if let PageState::Open(page) = &self.held
            && page.is_near()
        {
            self.bounds = Some(Entry::bounds_of(self.live, page.words(), layout, rope));
        }
    }

    /// A full page on a device without bounds, in the dtype of its layer.
    pub fn unbounded(&self) -> Option<&Page> {
        let page = match &self.held {
            PageState::Open(page) => Some(page),
            PageState::Closed(closed) => closed.original.as_ref(),
            PageState::Gone { .. } | PageState::Away(_) => None,
        };
        page.filter(|_| self.fill == PAGE && self.bounds.is_none())
    }

    /// Least and largest keys in `words`, over the lanes in `live`.
    pub fn bounds_of(live: u32, words: &[u32], layout: &Layout, rope: Option<&Rope>) -> Box<[[f32; LANES]]> {
        let mut bounds = vec![[f32::INFINITY; LANES]; 2 * bound::rows(layout.k_dim)].into_boxed_slice();
        bounds.iter_mut().skip(1).step_by(2).for_each(|most| most.fill(f32::NEG_INFINITY));
        let mut key = [0.0; MAX_DIM as usize];
        let key = &mut key[..layout.k_dim as usize];
        for lane in (0..PAGE).filter(|lane| live >> lane & 1 == 1) {
            layout.read_key(words, lane, key);
            bound::widen(&mut bounds, key, rope);
        }
        // Padding of the last row.
        let pad = layout.k_dim as usize % LANES;
        if let (1.., [.., least, most]) = (pad, &mut bounds[..]) {
            least[pad..].fill(0.0);
            most[pad..].fill(0.0);
        }
        bounds
    }

    /// Position of the token at a written lane; `None` if the page is evicted.
    pub fn position(&self, codec: Option<&HeadCodec>, lane: u32) -> Option<u32> {
        match (&self.held, codec) {
            (PageState::Open(page), _) => Some(page.positions()[lane as usize]),
            (PageState::Closed(closed), Some(codec)) => {
                Some(codec.packed.position(closed.packed.words(), lane, closed.last).0)
            }
            (PageState::Away(away), _) => Some(away.slot.positions[lane as usize]),
            _ => None,
        }
    }

    /// The form that the newest rows read, if it is in the first tier.
    pub fn page(&self) -> Option<&Page> {
        match &self.held {
            PageState::Gone { .. } | PageState::Away(_) => None,
            PageState::Open(page) | PageState::Closed(Closed { packed: page, next: None, .. }) => Some(page),
            PageState::Closed(Closed { next: Some(page), .. }) => Some(page),
        }
    }

    /// A number that is equal for entries of one page, in whatever tier it lies, and differs between pages; `None` if the page is evicted.
    pub fn key(&self) -> Option<usize> {
        match &self.held {
            PageState::Gone { .. } => None,
            PageState::Open(page) | PageState::Closed(Closed { packed: page, .. }) => Some(page.key()),
            PageState::Away(Away { slot, .. }) => Some(Arc::as_ptr(slot).addr()),
        }
    }

    /// Whether the page is evicted.
    pub fn is_gone(&self) -> bool {
        matches!(self.held, PageState::Gone { .. })
    }

    /// Position of the last token; `None` if the page is evicted.
    pub fn last(&self) -> Option<u32> {
        match &self.held {
            PageState::Gone { .. } => None,
            PageState::Open(page) => Some(page.positions()[self.fill as usize - 1]),
            PageState::Closed(closed) => Some(closed.last),
            PageState::Away(away) => Some(away.slot.positions[self.fill as usize - 1]),
        }
    }

    /// Bytes in the first tier.
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Bytes in the first tier of pages with no other handle.
    pub fn own_bytes(&self) -> u64 {
        self.held.pages().filter(|page| !page.is_shared()).map(Page::bytes).sum()
    }
}

impl TokenPage for Entry {
    fn position(&self, codec: Option<&HeadCodec>, lane: u32) -> Option<u32> {
        Entry::position(self, codec, lane)
    }

    fn words(&self) -> Option<&[u32]> {
        Some(self.page().filter(|page| page.is_near())?.words())
    }

    fn fetch(&self) -> Option<Arc<[u32]>> {
        match (self.page(), &self.held) {
            (Some(page), _) => Some(Arc::from(page.fetch().ok()?.into_owned())),
            (None, PageState::Away(Away { slot, .. })) => slot.read().ok().map(Arc::from),
            _ => None,
        }
    }

    fn packing<'a>(&'a self, codec: Option<&'a HeadCodec>) -> Option<(&'a HeadCodec, u32)> {
        let codec = match &self.held {
            PageState::Closed(closed) => Some(closed.newest(codec?).1),
            PageState::Away(Away { by: Some(_), .. }) => codec,
            _ => None,
        };
        codec.zip(self.last())
    }
}

impl PageState {
    /// The pages in the first tier.
    pub fn pages(&self) -> impl Iterator<Item = &Page> {
        let (page, closed) = match self {
            PageState::Gone { .. } | PageState::Away(_) => (None, None),
            PageState::Open(page) => (Some(page), None),
            PageState::Closed(closed) => (Some(&closed.packed), Some(closed)),
        };
        let beside = closed.into_iter().flat_map(|closed| closed.original.iter().chain(&closed.next));
        page.into_iter().chain(beside)
    }

    /// Bytes in the first tier.
    pub fn bytes(&self) -> u64 {
        self.pages().map(Page::bytes).sum()
    }
}

/// Lists of pages hold entries by value: this size is what a page costs in tables.
const _: () = assert!(size_of::<Entry>() <= 128);
