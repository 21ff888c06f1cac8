//! A page of a run, and what is left of it: as its tokens came, packed, in a lower tier, or evicted.

use crate::codec::HeadCodec;
use crate::memory::arena::Page;
use crate::policy::page::TokenPage;
use crate::tiers::Stored;
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
    pub held: Held,
    /// Lanes written, from lane 0.
    pub fill: u32,
    /// Bit `t` is set if the token at lane `t` is read: it was written, and not evicted.
    pub live: u32,
    /// Evicted lanes that a rollback would bring back; the page is kept for them.
    pub pending: u32,
    /// Whether a rollback would move tokens back to it, so that it has to stay in the first tier.
    pub tied: bool,
    /// The extremes of the keys of a page that takes no more tokens, if the cache keeps them.
    pub bounds: Option<Box<[[f32; LANES]]>>,
}

/// What is left of a page of a run.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    /// Nothing: it was evicted. It is listed as long as a rollback can reach its tokens, the last of which is at `last`.
    Gone { last: u32 },
    /// As its tokens came.
    Open(Page),
    /// Packed.
    Closed(Closed),
    /// In a lower tier. No rollback reaches it.
    Away(Away),
}

/// A page in a lower tier; forks share it.
#[derive(Clone, Debug)]
pub(crate) struct Away {
    pub slot: Arc<Stored>,
    /// The position that packed it, if it is packed.
    pub by: Option<u32>,
}

/// A packed page. It was packed when the token at position `by` left the ring: its own last one, or, where its tokens would
/// have spanned more positions than a packed page can, the next of its run.
#[derive(Clone, Debug)]
pub(crate) struct Closed {
    pub packed: Page,
    /// As its tokens came; kept as long as the one at `by` can be taken back, and for rows of a step that come before it.
    pub original: Option<Page>,
    /// Position of the last token.
    pub last: u32,
    pub by: u32,
    /// Whether `packed` is what the head's second codec left of it; `by` is then the position that it was packed at again.
    pub old: bool,
    /// The same, while rows (or a rollback to where there are such) still read `packed`.
    pub next: Option<Page>,
}

impl Closed {
    /// As the first or the second codec packed it, if it is held so: the page, from which position on rows read it, and from which
    /// on they read the other.
    pub fn form(&self, codec: &HeadCodec, old: bool) -> Option<(&Page, u32, Option<u32>)> {
        match (&self.next, old) {
            (None, _) => (self.old == old).then_some((&self.packed, self.by, None)),
            (Some(_), false) => Some((&self.packed, self.by, codec.ages_at(self.by))),
            (Some(next), true) => Some((next, codec.ages_at(self.by)?, None)),
        }
    }

    /// The page that newer rows read, and its codec.
    pub fn newest<'a>(&'a self, codec: &'a HeadCodec) -> (&'a Page, &'a HeadCodec) {
        match (&codec.aged, &self.next) {
            (Some(aged), Some(next)) => (next, &aged.codec),
            (Some(aged), None) if self.old => (&self.packed, &aged.codec),
            _ => (&self.packed, codec),
        }
    }

    /// Nobody reads it as the first codec left it any more.
    pub fn settle(&mut self, codec: &HeadCodec) {
        if let (Some(next), Some(by)) = (self.next.take(), codec.ages_at(self.by)) {
            *self = Closed { packed: next, original: None, last: self.last, by, old: true, next: None };
        }
    }
}

impl Entry {
    /// A page that no token was written to.
    pub fn open(ordinal: u32, page: Page) -> Entry {
        Entry { ordinal, held: Held::Open(page), fill: 0, live: 0, pending: 0, tied: false, bounds: None }
    }

    /// A page of which nothing is left.
    pub fn gone(ordinal: u32) -> Entry {
        let held = Held::Gone { last: 0 };
        Entry { ordinal, held, fill: PAGE, live: 0, pending: 0, tied: false, bounds: None }
    }

    /// Frees the page. Its tokens are still counted.
    pub fn free(&mut self) {
        if let Some(last) = self.last() {
            self.held = Held::Gone { last };
        }
        (self.live, self.pending, self.bounds) = (0, 0, None);
    }

    /// Takes the extremes of the keys of a page as they came, if the host has them.
    pub fn bound(&mut self, layout: &Layout, rope: Option<&Rope>) {
        if let Held::Open(page) = &self.held
            && page.is_near()
        {
            self.bounds = Some(Entry::bounds_of(self.live, page.words(), layout, rope));
        }
    }

    /// A full page on a device whose extremes are not known yet, as its tokens came.
    #[cfg(feature = "cuda")]
    pub fn unbounded(&self) -> Option<&Page> {
        let page = match &self.held {
            Held::Open(page) => Some(page),
            Held::Closed(closed) => closed.original.as_ref(),
            Held::Gone { .. } | Held::Away(_) => None,
        };
        page.filter(|_| self.fill == PAGE && self.bounds.is_none())
    }

    /// The extremes of the keys in `words`, of the lanes in `live`.
    pub fn bounds_of(live: u32, words: &[u32], layout: &Layout, rope: Option<&Rope>) -> Box<[[f32; LANES]]> {
        let mut bounds = vec![[f32::INFINITY; LANES]; 2 * bound::rows(layout.k_dim)].into_boxed_slice();
        bounds.iter_mut().skip(1).step_by(2).for_each(|most| most.fill(f32::NEG_INFINITY));
        let mut key = [0.0; MAX_DIM as usize];
        let key = &mut key[..layout.k_dim as usize];
        for lane in (0..PAGE).filter(|lane| live >> lane & 1 == 1) {
            layout.read_key(words, lane, key);
            bound::widen(&mut bounds, key, rope);
        }
        // The padding of the last row.
        let pad = layout.k_dim as usize % LANES;
        if let (1.., [.., least, most]) = (pad, &mut bounds[..]) {
            least[pad..].fill(0.0);
            most[pad..].fill(0.0);
        }
        bounds
    }

    /// The position at each lane that was written.
    pub fn position(&self, codec: Option<&HeadCodec>, lane: u32) -> Option<u32> {
        match (&self.held, codec) {
            (Held::Open(page), _) => Some(page.positions()[lane as usize]),
            (Held::Closed(closed), Some(codec)) => {
                Some(codec.packed.position(closed.packed.words(), lane, closed.last).0)
            }
            (Held::Away(away), _) => Some(away.slot.positions[lane as usize]),
            _ => None,
        }
    }

    /// The page that newer rows read, in the first tier.
    pub fn page(&self) -> Option<&Page> {
        match &self.held {
            Held::Gone { .. } | Held::Away(_) => None,
            Held::Open(page) | Held::Closed(Closed { packed: page, next: None, .. }) => Some(page),
            Held::Closed(Closed { next: Some(page), .. }) => Some(page),
        }
    }

    /// Whether nothing is left of it.
    pub fn is_gone(&self) -> bool {
        matches!(self.held, Held::Gone { .. })
    }

    /// Position of the last token.
    pub fn last(&self) -> Option<u32> {
        match &self.held {
            Held::Gone { .. } => None,
            Held::Open(page) => Some(page.positions()[self.fill as usize - 1]),
            Held::Closed(closed) => Some(closed.last),
            Held::Away(away) => Some(away.slot.positions[self.fill as usize - 1]),
        }
    }

    /// Bytes that it holds in the first tier.
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Bytes of those of its pages in the first tier that nobody else holds.
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
            (None, Held::Away(Away { slot, .. })) => slot.read().ok().map(Arc::from),
            _ => None,
        }
    }

    fn packing<'a>(&'a self, codec: Option<&'a HeadCodec>) -> Option<(&'a HeadCodec, u32)> {
        let codec = match &self.held {
            Held::Closed(closed) => Some(closed.newest(codec?).1),
            Held::Away(Away { by: Some(_), .. }) => codec,
            _ => None,
        };
        codec.zip(self.last())
    }
}

impl Held {
    /// Its pages in the first tier.
    pub fn pages(&self) -> impl Iterator<Item = &Page> {
        let (page, closed) = match self {
            Held::Gone { .. } | Held::Away(_) => (None, None),
            Held::Open(page) => (Some(page), None),
            Held::Closed(closed) => (Some(&closed.packed), Some(closed)),
        };
        let beside = closed.into_iter().flat_map(|closed| closed.original.iter().chain(&closed.next));
        page.into_iter().chain(beside)
    }

    /// Bytes that it takes in the first tier.
    pub fn bytes(&self) -> u64 {
        self.pages().map(Page::bytes).sum()
    }
}

/// What the README says of host tables.
const _: () = assert!(size_of::<Entry>() <= 128);
