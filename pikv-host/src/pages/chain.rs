//! A run of pages of one head: sinks, or what one expert's tokens were filed in.

pub mod save;

use crate::base::chunks::Chunks;
use crate::base::error::Error;
use crate::codec::HeadCodec;
use crate::memory::arena::{Near, Page, Reservation};
use crate::pages::entry::{Away, Closed, Entry, Held};
use crate::policy::state::{Apart, Kept};
use crate::tiers::Stored;
use crate::tiers::replica::Mirrors;
use pikv_core::attend::filled;
use pikv_core::page::{Layout, PAGE};
use pikv_lanes::Lanes;

/// Pages of one expert (or the sinks) of one head, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chain {
    /// Ordinal of the page that comes next.
    pub next: u32,
    /// Ordinal of the first entry that the head's second codec has still to come to.
    pub aged: u32,
    /// The pages that are left, and evicted ones that a rollback can reach, by ascending ordinal. A token that is filed next never goes
    /// to a page before the last one: those are full, packed or evicted. Forks share the list by chunks: a page that one of them has by
    /// itself in a chunk that it shares is not its own, so who asks whether a page may be written asks [`Chain::shares`].
    pub entries: Chunks<Entry>,
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
    /// Takes out the first page if it takes no more tokens, none of which is at `seen` or later, and evicted ones before it; with what
    /// is kept of its tokens if `noted`. Pages that the token at `kept` packed, or a later one, stay.
    pub fn slide(
        &mut self,
        seen: u32,
        kept: u32,
        codec: Option<&HeadCodec>,
        noted: bool,
    ) -> Option<(Entry, Apart)> {
        self.drop_gone();
        let old = |by| codec.and_then(|codec| codec.ages_at(by)).unwrap_or(by);
        let unseen = |entry: &Entry| match &entry.held {
            Held::Open(_) if entry.fill < PAGE => false,
            // Packed early, it may be the open page again.
            Held::Closed(closed) if closed.by >= if closed.old { old(kept) } else { kept } => false,
            Held::Away(Away { by: Some(by), .. }) if *by >= kept => false,
            _ => entry.last().is_some_and(|last| last < seen),
        };
        let entry = self.entries.pop_front_if(unseen)?;
        self.filed -= entry.fill;
        self.live -= entry.live.count_ones();
        let rows = if noted { self.kept.rows_of(0) } else { Apart::default() };
        self.kept.pop_front();
        Some((entry, rows))
    }

    /// Drops evicted pages from the front. Nobody knows which of their tokens have left a window since: they count as evicted for good.
    fn drop_gone(&mut self) {
        while self.entries.front().is_some_and(Entry::is_gone) {
            self.entries.pop_front();
            self.kept.pop_front();
        }
    }

    /// Drops evicted pages: those at the front, and of the others those all of whose tokens lie before `kept`, which no rollback
    /// reaches. O(pages).
    pub fn sweep(&mut self, kept: u32) {
        self.drop_gone();
        self.tighten();
        let over = |entry: &Entry| matches!(entry.held, Held::Gone { last } if last < kept);
        if !self.entries.iter().any(over) {
            return;
        }
        self.kept.retain(self.entries.iter().map(|entry| !over(entry)));
        self.entries.retain(|entry| !over(entry));
        self.tighten();
    }

    /// Gives room back where lists hold a quarter of what they once did.
    pub fn tighten(&mut self) {
        self.entries.tighten();
        self.kept.tighten();
    }

    /// Bytes of the lists of its pages, from their capacities. O(pages).
    pub fn table_bytes(&self) -> u64 {
        let beside = |entry: &Entry| match &entry.held {
            Held::Away(_) => size_of::<Stored>(),
            _ => 0,
        };
        let bounds = |entry: &Entry| entry.bounds.as_ref().map_or(0, |bounds| size_of_val(&bounds[..]));
        let apart: usize = self.entries.iter().map(|entry| beside(entry) + bounds(entry)).sum();
        (self.entries.bytes() + apart + self.mirrors.bytes()) as u64 + self.kept.bytes()
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

    /// Ordinal and lane of the next token; `closed` says that the open page, if there is one, takes no more.
    pub fn next_place(&self, closed: bool) -> (u32, u32) {
        match self.room() {
            Some((_, fill)) if !closed => (self.next - 1, fill),
            _ => (self.next, 0),
        }
    }

    /// The token that was filed last, as it came: its page, and the lane.
    pub fn newest(&self) -> Option<(&Page, u32)> {
        let entry = self.entries.back()?;
        let page = match &entry.held {
            Held::Open(page) => page,
            Held::Closed(closed) => closed.original.as_ref()?,
            Held::Gone { .. } | Held::Away(_) => return None,
        };
        Some((page, entry.fill.checked_sub(1)?))
    }

    /// The pages that the token at `by` packed: its own, or the one before.
    pub fn packed_by(&self, by: u32) -> impl Iterator<Item = (u32, &Page)> {
        self.entries.iter().rev().take(2).filter_map(move |entry| match &entry.held {
            Held::Closed(closed) if closed.by == by => Some((entry.ordinal, &closed.packed)),
            _ => None,
        })
    }

    /// Where the page at `ordinal` stands in the list.
    pub fn index(&self, ordinal: u32) -> Option<usize> {
        let first = self.entries.front()?.ordinal;
        find(&self.entries, ordinal.checked_sub(first)? as usize, ordinal)
    }

    /// The pages from `ordinal` on.
    pub fn from(&self, ordinal: u32) -> impl Iterator<Item = &Entry> {
        self.entries.range(self.before(ordinal)..)
    }

    /// How many pages come before `ordinal`.
    pub fn before(&self, ordinal: u32) -> usize {
        self.entries.partition_point(|entry| entry.ordinal < ordinal)
    }

    /// Whether a fork has the list of pages around page `i` in common with this run. Its pages are nobody's to write or to move then,
    /// whatever [`Page::is_shared`] says: to change the list copies that part of it, and all handles there.
    pub fn shares(&self, i: usize) -> bool {
        self.entries.is_shared(i)
    }

    /// [`Chain::shares`] of the page at `ordinal`.
    pub fn shares_at(&self, ordinal: u32) -> bool {
        self.index(ordinal).is_some_and(|i| self.shares(i))
    }

    /// Whether another sequence has page `i`, or nothing is left of it in the first tier.
    pub fn shares_page(&self, i: usize) -> bool {
        self.shares(i) || self.entries[i].page().is_none_or(Page::is_shared)
    }

    /// Whether another sequence has the page that takes the next token, which is copied then.
    pub fn shares_room(&self) -> bool {
        let last = self.entries.len().saturating_sub(1);
        self.room().is_some_and(|(page, _)| self.shares(last) || page.is_shared())
    }

    /// The page at `ordinal`.
    pub fn entry(&self, ordinal: u32) -> Option<&Entry> {
        Some(&self.entries[self.index(ordinal)?])
    }

    /// The page at `ordinal`.
    pub fn entry_mut(&mut self, ordinal: u32) -> Option<&mut Entry> {
        let i = self.index(ordinal)?;
        Some(&mut self.entries[i])
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
                self.next = entry.ordinal;
                self.entries.pop_back();
                self.kept.pop_back();
            }
        }
        // What the token packed is open again.
        if let Some(Entry { held, .. }) = self.entries.back_mut()
            && let Held::Closed(closed) = held
            && closed.by == position
        {
            let last = closed.last;
            *held = closed.original.take().map_or(Held::Gone { last }, Held::Open);
        }
        let last = self.next.saturating_sub(1);
        let held = self.entries.back().filter(|entry| entry.ordinal == last && entry.page().is_some());
        self.mirrors.cut(last, held.map_or(0, |entry| entry.fill.min(PAGE - 1)));
    }

    /// As [`Chain::pop`]; returns the bytes of pages that came free.
    pub fn take_back(&mut self, position: u32) -> u64 {
        // It changes the last two at most. They are taken out of what a fork shares first, so that pages count for all who hold them.
        let from = self.entries.len().saturating_sub(2);
        (from..self.entries.len()).for_each(|i| self.entries.own(i));
        let first = self.entries.get(from).map(|entry| entry.ordinal);
        let held = |run: &Chain| first.map_or(0, |first| run.from(first).map(Entry::own_bytes).sum::<u64>());
        let before = held(self);
        self.pop(position);
        before - held(self)
    }

    /// Adds a page that no token was written to.
    pub fn push(&mut self, page: Page) {
        self.entries.push_back(Entry::open(self.next, page));
        self.next += 1;
        self.kept.push_back();
    }

    /// Frees page `i` of those that are left. Its tokens are still counted.
    pub fn free(&mut self, i: usize) {
        self.entries[i].free();
        self.kept.free(i);
    }

    /// Frees the page at `ordinal`, which no rollback reaches if its tokens lie before `kept`; `false` if there is none.
    pub fn evict(&mut self, ordinal: u32, kept: u32) -> bool {
        let Some(i) = self.index(ordinal).filter(|i| !self.entries[*i].is_gone()) else {
            return false;
        };
        self.live -= self.entries[i].live.count_ones();
        self.free(i);
        self.sweep(kept);
        true
    }

    /// Frees all pages.
    pub fn evict_all(&mut self) {
        (0..self.entries.len()).for_each(|i| self.free(i));
        self.live = 0;
        self.sweep(0);
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

    /// Makes [`Chain::kill`] final, and frees the page if nothing of it is read any more; returns it then.
    pub fn settle(&mut self, ordinal: u32, lanes: u32) -> Option<Entry> {
        let i = self.index(ordinal)?;
        let entry = &mut self.entries[i];
        entry.pending &= !lanes;
        if entry.live | entry.pending != 0 {
            self.dead += lanes.count_ones();
            return None;
        }
        let last = entry.last()?;
        let gone = Entry { held: Held::Gone { last }, ..Entry::gone(ordinal) };
        let entry = std::mem::replace(entry, Entry { fill: entry.fill, ..gone });
        self.kept.free(i);
        Some(entry)
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
        // One that others hold was packed when the sequence was sealed.
        if !packed.is_shared() {
            pages.pack(codec, lanes, layout, page, entry.fill, &mut packed);
        }
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
        let from = self.before(self.aged);
        let mut last = from.checked_sub(1).and_then(|i| self.entries[i].page()).cloned();
        for i in from..self.entries.len() {
            let Entry { fill, ordinal, ref held, .. } = self.entries[i];
            match held {
                Held::Closed(closed) if !closed.old && closed.next.is_none() => {
                    let Some(by) = codec.ages_at(closed.by).filter(|by| *by < filed) else { break };
                    let near = Near::next(last.as_ref());
                    let mut page = pages.take(closed.packed.shard(), aged.codec.packed.words(), near)?;
                    pages.repack(codec, lanes, layout, &closed.packed, fill, closed.last, &mut page);
                    last = Some(page.clone());
                    if let Held::Closed(closed) = &mut self.entries[i].held {
                        closed.next = Some(page);
                    }
                    told(ordinal, by);
                }
                Held::Open(_) => break,
                _ => {}
            }
            self.aged = ordinal + 1;
        }
        Ok(())
    }

    /// Undoes [`Chain::age`] as far as it would not have come at `filed` tokens filed.
    pub fn rejuvenate(&mut self, codec: &HeadCodec, filed: u32) {
        // Pages that were taken back come again under their ordinals.
        self.aged = self.aged.min(self.next);
        let until = self.before(self.aged);
        for i in (0..until).rev() {
            if let Held::Closed(closed) = &self.entries[i].held {
                if closed.old || codec.ages_at(closed.by).is_none_or(|by| by < filed) {
                    break;
                }
                if let Held::Closed(closed) = &mut self.entries[i].held {
                    closed.next = None;
                }
            }
            self.aged = self.entries[i].ordinal;
        }
    }

    /// Pages that [`Chain::age`] will pack again by `filed` tokens filed. O(those).
    pub fn due(&self, codec: &HeadCodec, filed: u32) -> u64 {
        let closed = self.from(self.aged).take_while(|entry| match &entry.held {
            Held::Closed(closed) => codec.ages_at(closed.by).is_some_and(|by| by < filed),
            Held::Open(_) => false,
            _ => true,
        });
        closed.count() as u64
    }
}

/// Where the page at `ordinal` stands in a list by ascending ordinals; looked for at `guess` first, where it stands if none is missing.
pub(crate) fn find(entries: &Chunks<Entry>, guess: usize, ordinal: u32) -> Option<usize> {
    let is = |i: &usize| entries.get(*i).is_some_and(|entry| entry.ordinal == ordinal);
    let found = || entries.partition_point(|entry| entry.ordinal < ordinal);
    Some(guess).filter(is).or_else(|| Some(found()).filter(is))
}
