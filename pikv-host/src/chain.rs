//! A run of pages of one head: sinks, or what one expert's tokens were filed in.

use crate::arena::{Near, Page, Reservation};
use crate::codec::HeadCodec;
use crate::error::Error;
use crate::fabric::Mirrors;
use crate::huge;
use crate::kept::Kept;
use crate::tiers::Stored;
use pikv_core::attend::filled;
use pikv_core::bound;
use pikv_core::page::{Layout, MAX_DIM, PAGE};
use pikv_core::rope::Rope;
use pikv_core::warp::LANES;
use pikv_lanes::Lanes;
use std::collections::VecDeque;
use std::sync::Arc;

/// A page of a run.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub held: Held,
    /// Lanes written, from lane 0.
    pub fill: u32,
    /// Bit `t` is set if the token at lane `t` is read: it was written, and not evicted.
    pub live: u32,
    /// Evicted lanes that a rollback would bring back; the page is kept for them.
    pub pending: u32,
    /// The extremes of the keys of a page that takes no more tokens, if the cache keeps them.
    pub bounds: Option<Box<[[f32; LANES]]>>,
}

/// What is left of a page of a run.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    /// Nothing: it was evicted. Its tokens are still counted, so that rollback knows them.
    Gone,
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
    pub fn open(page: Page) -> Entry {
        Entry { held: Held::Open(page), fill: 0, live: 0, pending: 0, bounds: None }
    }

    /// Frees the page. Its tokens are still counted.
    fn free(&mut self) {
        (self.held, self.live, self.pending, self.bounds) = (Held::Gone, 0, 0, None);
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
            Held::Gone | Held::Away(_) => None,
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
            Held::Gone | Held::Away(_) => None,
            Held::Open(page) | Held::Closed(Closed { packed: page, next: None, .. }) => Some(page),
            Held::Closed(Closed { next: Some(page), .. }) => Some(page),
        }
    }

    /// Whether nothing is left of it.
    pub fn is_gone(&self) -> bool {
        matches!(self.held, Held::Gone)
    }

    /// Position of the last token.
    pub fn last(&self) -> Option<u32> {
        match &self.held {
            Held::Gone => None,
            Held::Open(page) => Some(page.positions()[self.fill as usize - 1]),
            Held::Closed(closed) => Some(closed.last),
            Held::Away(away) => Some(away.slot.positions[self.fill as usize - 1]),
        }
    }

    /// Bytes that it holds in the first tier.
    pub fn bytes(&self) -> u64 {
        match &self.held {
            Held::Gone | Held::Away(_) => 0,
            Held::Open(page) => page.bytes(),
            Held::Closed(closed) => {
                let beside = closed.original.iter().chain(&closed.next).map(|page| page.bytes());
                closed.packed.bytes() + beside.sum::<u64>()
            }
        }
    }
}

/// Pages of one expert (or the sinks) of one head, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chain {
    /// Ordinal of the first entry.
    pub first: u32,
    /// Ordinal of the first entry that the head's second codec has still to come to.
    pub aged: u32,
    pub entries: VecDeque<Entry>,
    /// What the layer's policy keeps of the tokens of each entry.
    pub kept: Kept,
    /// Tokens that are read.
    pub live: u32,
    /// Tokens that would be, had none been evicted.
    pub filed: u32,
    /// Evicted lanes of pages that are left: at most so many.
    pub dead: u32,
    /// Over a fabric: pages before this ordinal are with their ranks, or gone.
    pub settled: u32,
    /// Over a fabric: what ranks know of pages that are here.
    pub mirrors: Mirrors,
}

impl Chain {
    /// Drops pages that were evicted, or take no more tokens and whose last position is `gone`, from the front. Evicted ones
    /// further on stay, so that a token that is filed next starts a page of its own.
    pub fn trim(&mut self, gone: impl Fn(u32) -> bool) {
        let gone = |entry: &Entry| match (&entry.held, entry.last()) {
            (Held::Open(_), _) if entry.fill < PAGE => false,
            // Packed early, it may be the open page again.
            (Held::Closed(closed), _) if closed.original.is_some() => false,
            (_, last) => last.is_none_or(&gone),
        };
        while let Some(entry) = self.entries.front().filter(|entry| gone(entry)) {
            // Of evicted pages nobody knows which tokens have left a window since: they count as evicted for good.
            if !entry.is_gone() {
                self.filed -= entry.fill;
            }
            self.live -= entry.live.count_ones();
            self.entries.pop_front();
            self.kept.pop_front();
            self.first += 1;
        }
    }

    /// Tokens that are read, in lower tiers. O(pages).
    pub fn away(&self) -> u32 {
        let lower = |entry: &&Entry| matches!(&entry.held, Held::Away(away) if away.slot.kept().is_none());
        let away = self.entries.iter().filter(lower);
        away.map(|entry| entry.live.count_ones()).sum()
    }

    /// Where the next token goes, if that is in the last page.
    pub fn room(&self) -> Option<(&Page, u32)> {
        match self.entries.back()? {
            Entry { held: Held::Open(page), fill, .. } if *fill < PAGE => Some((page, *fill)),
            _ => None,
        }
    }

    /// The token that was filed last, as it came: its page, and the lane.
    pub fn newest(&self) -> Option<(&Page, u32)> {
        let entry = self.entries.back()?;
        let page = match &entry.held {
            Held::Open(page) => page,
            Held::Closed(closed) => closed.original.as_ref()?,
            Held::Gone | Held::Away(_) => return None,
        };
        Some((page, entry.fill.checked_sub(1)?))
    }

    /// The pages that the token at `by` packed: its own, or the one before.
    pub fn packed_by(&self, by: u32) -> impl Iterator<Item = (u32, &Page)> {
        let last = self.entries.iter().enumerate().rev().take(2);
        last.filter_map(move |(i, entry)| match &entry.held {
            Held::Closed(closed) if closed.by == by => Some((self.first + i as u32, &closed.packed)),
            _ => None,
        })
    }

    /// The page at `ordinal`.
    pub fn entry(&self, ordinal: u32) -> Option<&Entry> {
        self.entries.get(ordinal.checked_sub(self.first)? as usize)
    }

    /// The page at `ordinal`.
    pub fn entry_mut(&mut self, ordinal: u32) -> Option<&mut Entry> {
        self.entries.get_mut(ordinal.checked_sub(self.first)? as usize)
    }

    /// Counts the token that was just written to the last page's next lane.
    pub fn wrote(&mut self) {
        if let Some(entry) = self.entries.back_mut() {
            entry.live |= 1 << entry.fill;
            entry.fill += 1;
            self.live += 1;
            self.filed += 1;
        }
    }

    /// Takes back the token at `position`, which was filed last. A run of pages that is empty already had it evicted.
    pub fn pop(&mut self, position: u32) {
        self.filed -= 1;
        if let Some(entry) = self.entries.back_mut() {
            entry.fill -= 1;
            let written = filled(entry.fill);
            self.live -= (entry.live & !written).count_ones();
            entry.live &= written;
            entry.pending &= written;
            entry.bounds = None;
            if entry.fill == 0 {
                self.entries.pop_back();
                self.kept.pop_back();
            }
        }
        // What the token packed is open again.
        if let Some(Entry { held, .. }) = self.entries.back_mut()
            && let Held::Closed(closed) = held
            && closed.by == position
        {
            *held = closed.original.take().map_or(Held::Gone, Held::Open);
        }
        let fill = self
            .entries
            .back()
            .map_or(0, |entry| if entry.page().is_some() { entry.fill.min(PAGE - 1) } else { 0 });
        self.mirrors.cut((self.first + self.entries.len() as u32).saturating_sub(1), fill);
    }

    /// Adds a page that no token was written to.
    pub fn push(&mut self, page: Page) {
        huge::push_back(&mut self.entries, Entry::open(page));
        self.kept.push_back();
    }

    /// Frees page `i` of those that are left. Its tokens are still counted.
    pub fn free(&mut self, i: usize) {
        self.entries[i].free();
        self.kept.free(i);
    }

    /// Frees the page at `ordinal`; `false` if there is none.
    pub fn evict(&mut self, ordinal: u32) -> bool {
        let Some(entry) = self.entry(ordinal).filter(|entry| !entry.is_gone()) else {
            return false;
        };
        let live = entry.live.count_ones();
        self.free((ordinal - self.first) as usize);
        self.live -= live;
        self.trim(|_| false);
        true
    }

    /// Frees all pages.
    pub fn evict_all(&mut self) {
        (0..self.entries.len()).for_each(|i| self.free(i));
        self.live = 0;
        self.trim(|_| false);
    }

    /// Has the lanes in `lanes` of a page read no more; its bytes are kept until [`Chain::settle`].
    pub fn kill(&mut self, ordinal: u32, lanes: u32) {
        if let Some(entry) = self.entry_mut(ordinal) {
            let killed = entry.live & lanes;
            entry.live &= !killed;
            entry.pending |= killed;
            self.live -= killed.count_ones();
        }
    }

    /// Undoes [`Chain::kill`].
    pub fn revive(&mut self, ordinal: u32, lanes: u32) {
        if let Some(entry) = self.entry_mut(ordinal) {
            let back = entry.pending & lanes;
            entry.pending &= !back;
            entry.live |= back;
            self.live += back.count_ones();
        }
    }

    /// Makes [`Chain::kill`] final, and frees the page if nothing of it is read any more.
    pub fn settle(&mut self, ordinal: u32, lanes: u32) {
        if let Some(entry) = self.entry_mut(ordinal) {
            entry.pending &= !lanes;
            if entry.live | entry.pending == 0 {
                self.free((ordinal - self.first) as usize);
                self.trim(|_| false);
            } else {
                self.dead += lanes.count_ones();
            }
        }
    }

    /// The last page, packed by the token at `by`, into `packed`.
    pub fn close(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        by: u32,
        mut packed: Page,
        pages: &mut Reservation,
    ) {
        let Some(entry) = self.entries.back_mut() else { return };
        let (Some(last), Held::Open(page)) = (entry.last(), &entry.held) else { return };
        pages.pack(codec, lanes, layout, page, entry.fill, &mut packed);
        let original = Some(page.clone());
        entry.held = Held::Closed(Closed { packed, original, last, by, old: false, next: None });
    }

    /// Packs pages again whose time has come at `filed` tokens filed; tells the ordinal of each, and the position that did it.
    pub fn age(
        &mut self,
        codec: &HeadCodec,
        lanes: Lanes,
        layout: &Layout,
        filed: u32,
        pages: &mut Reservation,
        mut told: impl FnMut(u32, u32),
    ) -> Result<(), Error> {
        let Some(aged) = &codec.aged else { return Ok(()) };
        self.aged = self.aged.max(self.first);
        let mut last = self.aged.checked_sub(1).and_then(|i| self.entry(i)?.page()).cloned();
        while let Some(entry) = self.entry_mut(self.aged) {
            let fill = entry.fill;
            match &mut entry.held {
                Held::Closed(closed) if !closed.old && closed.next.is_none() => {
                    let Some(by) = codec.ages_at(closed.by).filter(|by| *by < filed) else { break };
                    let near = Near::next(last.as_ref());
                    let mut page = pages.take(closed.packed.shard(), aged.codec.packed.words(), near)?;
                    pages.repack(codec, lanes, layout, &closed.packed, fill, closed.last, &mut page);
                    last = Some(page.clone());
                    closed.next = Some(page);
                    let ordinal = self.aged;
                    told(ordinal, by);
                }
                Held::Open(_) => break,
                _ => {}
            }
            self.aged += 1;
        }
        Ok(())
    }

    /// Undoes [`Chain::age`] as far as it would not have come at `filed` tokens filed.
    pub fn rejuvenate(&mut self, codec: &HeadCodec, filed: u32) {
        while self.aged > self.first {
            if let Some(Entry { held: Held::Closed(closed), .. }) = self.entry_mut(self.aged - 1) {
                if closed.old || codec.ages_at(closed.by).is_none_or(|by| by < filed) {
                    break;
                }
                closed.next = None;
            }
            self.aged -= 1;
        }
    }

    /// Pages that [`Chain::age`] will pack again by `filed` tokens filed. O(those).
    pub fn due(&self, codec: &HeadCodec, filed: u32) -> u64 {
        let from = self.aged.saturating_sub(self.first) as usize;
        let closed = self.entries.iter().skip(from).take_while(|entry| match &entry.held {
            Held::Closed(closed) => codec.ages_at(closed.by).is_some_and(|by| by < filed),
            Held::Open(_) => false,
            _ => true,
        });
        closed.count() as u64
    }
}

/// What the README says of host tables.
const _: () = assert!(size_of::<Entry>() <= 128);
