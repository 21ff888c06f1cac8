//! A run of pages of one head: the sinks, or the tokens of experts that share it.

pub mod save;

use crate::base::chunks::Chunks;
use crate::base::error::Error;
use crate::base::ids::{Place, run_place};
use crate::codec::HeadCodec;
use crate::memory::arena::{Near, Page, Reservation};
use crate::pages::entry::{Away, Closed, Entry, PageState};
use crate::pages::find::find;
use crate::policy::state::{Apart, TokenStates};
use crate::tiers::StoredPage;
use crate::tiers::replica::Mirrors;
use pikv_core::attend::filled;
use pikv_core::page::{Layout, PAGE};
use pikv_lanes::Lanes;

/// Pages of a run of experts (or of the sinks) of one head, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    /// Ordinal of the next page.
    pub next: u32,
    /// Ordinal of the first entry that the head's second codec has not packed yet.
    pub aged: u32,
    /// Pages with tokens, and evicted pages that a rollback can reach, by ascending ordinal. New tokens are filed in the last page or after
    /// it; earlier pages are full, packed or evicted. Forks share the list in chunks: a page in a shared chunk has one handle but several
    /// sequences, so code that writes a page must check [`Run::shares`].
    pub entries: Chunks<Entry>,
    /// The policy's state of each entry's tokens.
    pub kept: TokenStates,
    /// Tokens that are read: the sum over the entries.
    live: u32,
    /// Tokens filed, including evicted ones.
    pub filed: u32,
    /// Ordinals of pages to which a rollback moves tokens back, so that they must stay in the first tier.
    pub tied: Vec<u32>,
    /// Upper bound of the evicted lanes in pages that still have tokens.
    pub dead: u32,
    /// Over a fabric: pages before this ordinal are on their ranks, or evicted, and need not be examined again.
    sent: u32,
    /// Over a fabric: copies on ranks of pages of this process.
    pub mirrors: Mirrors,
}

impl Run {
    /// A run without pages; `kept` has no page either.
    pub fn new(kept: TokenStates) -> Run {
        Run { kept, ..Run::default() }
    }

    /// A run of `entries` with tokens that no policy has seen, of which none was evicted.
    pub fn of_entries(entries: Chunks<Entry>) -> Run {
        let next = entries.back().map_or(0, |entry| entry.ordinal + 1);
        let filed = entries.iter().map(|entry| entry.fill).sum();
        Run { next, entries, live: filed, filed, ..Run::default() }
    }

    /// Tokens that are read.
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Over a fabric: first ordinal of the pages that may have to be sent.
    pub fn sent(&self) -> u32 {
        self.sent
    }

    /// Over a fabric: notes that pages before `ordinal` are on their ranks, or evicted.
    pub fn pass_until(&mut self, ordinal: u32) {
        self.sent = ordinal;
    }

    /// Over a fabric: has all pages examined again, as one may be back on the front. Copies on ranks are still right.
    pub fn examine_again(&mut self) {
        self.sent = 0;
    }

    /// Over a fabric: notes that tokens moved in pages before `ordinal`. Copies of these pages on ranks are void.
    pub fn moved_before(&mut self, ordinal: u32) {
        self.examine_again();
        self.mirrors.forget(ordinal);
    }

    /// Removes the first page, and evicted pages before it, if it takes no more tokens and all its tokens are before `seen`. A page that a
    /// rollback may open again stays: one packed by the token at `kept` or a later one. Returns the page, with its policy state if `noted`.
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
            PageState::Open(_) if entry.fill < PAGE => false,
            // Packed early, it can become the open page again.
            PageState::Closed(closed) if closed.by >= if closed.old { old(kept) } else { kept } => false,
            PageState::Away(Away { by: Some(by), .. }) if *by >= kept => false,
            _ => entry.last().is_some_and(|last| last < seen),
        };
        let entry = self.entries.pop_front_if(unseen)?;
        self.filed -= entry.fill;
        self.live -= entry.live.count_ones();
        let rows = if noted { self.kept.rows_of(0) } else { Apart::default() };
        self.kept.pop_front();
        Some((entry, rows))
    }

    /// Drops evicted pages from the front. Their tokens count as evicted even if a window has passed them since.
    fn drop_gone(&mut self) {
        if self.entries.front().is_some_and(Entry::is_gone) {
            let gone = self.entries.walk().take_while(|entry| entry.is_gone()).count();
            self.entries.drop_front(gone);
            (0..gone).for_each(|_| self.kept.pop_front());
        }
    }

    /// Drops evicted pages: those at the front, and others whose tokens all lie before `kept`, which no rollback
    /// reaches. `O(pages)`.
    pub fn sweep(&mut self, kept: u32) {
        self.drop_gone();
        self.tighten();
        let over = |entry: &Entry| matches!(entry.held, PageState::Gone { last } if last < kept);
        if !self.entries.walk().any(over) {
            return;
        }
        self.kept.retain(self.entries.iter().map(|entry| !over(entry)));
        self.entries.retain(|entry| !over(entry));
        self.tighten();
    }

    /// Shrinks lists that use a quarter of their capacity or less.
    pub fn tighten(&mut self) {
        self.entries.tighten();
        self.kept.tighten();
    }

    /// Bytes of the lists of its pages, from their capacities. `O(pages)`.
    pub fn table_bytes(&self) -> u64 {
        let beside = |entry: &Entry| match &entry.held {
            PageState::Away(_) => size_of::<StoredPage>(),
            _ => 0,
        };
        let bounds = |entry: &Entry| entry.bounds.as_ref().map_or(0, |bounds| size_of_val(&bounds[..]));
        let apart = self.entries.iter().map(|entry| beside(entry) + bounds(entry) + entry.homes.bytes());
        let apart: usize = apart.sum();
        let tied = self.tied.capacity() * size_of::<u32>();
        (self.entries.bytes() + apart + tied + self.mirrors.bytes()) as u64 + self.kept.bytes()
    }

    /// Number of tokens in lower tiers that are read. `O(pages)`.
    pub fn away(&self) -> u32 {
        let lower =
            |entry: &&Entry| matches!(&entry.held, PageState::Away(away) if away.slot.rank_page().is_none());
        let away = self.entries.iter().filter(lower);
        away.map(|entry| entry.live.count_ones()).sum()
    }

    /// The last page and the lane for the next token, if the page has room.
    pub fn room(&self) -> Option<(&Page, u32)> {
        match self.entries.back()? {
            Entry { held: PageState::Open(page), fill, .. } if *fill < PAGE => Some((page, *fill)),
            _ => None,
        }
    }

    /// Ordinal and lane of the next token; `closed` if the open page takes no more tokens.
    pub fn next_place(&self, closed: bool) -> (u32, u32) {
        match self.room() {
            Some((_, fill)) if !closed => (self.next - 1, fill),
            _ => (self.next, 0),
        }
    }

    /// Page (in the dtype of its layer) and lane of the token filed last.
    pub fn newest(&self) -> Option<(&Page, u32)> {
        let entry = self.entries.back()?;
        let page = match &entry.held {
            PageState::Open(page) => page,
            PageState::Closed(closed) => closed.original.as_ref()?,
            PageState::Gone { .. } | PageState::Away(_) => return None,
        };
        Some((page, entry.fill.checked_sub(1)?))
    }

    /// Pages packed when the token at `by` was filed: the one that it filled, or the one before, which it closed early.
    pub fn packed_by(&self, by: u32) -> impl Iterator<Item = (u32, &Page)> {
        self.entries.iter().rev().take(2).filter_map(move |entry| match &entry.held {
            PageState::Closed(closed) if closed.by == by => Some((entry.ordinal, &closed.packed)),
            _ => None,
        })
    }

    /// Whether the page at `ordinal` must stay in the first tier.
    pub fn is_tied(&self, ordinal: u32) -> bool {
        self.tied.contains(&ordinal)
    }

    /// Index of the page at `ordinal` in the list.
    pub fn index(&self, ordinal: u32) -> Option<usize> {
        let first = self.entries.front()?.ordinal;
        find(&self.entries, ordinal.checked_sub(first)? as usize, ordinal)
    }

    /// The pages from `ordinal` on.
    pub fn from(&self, ordinal: u32) -> impl Iterator<Item = &Entry> {
        self.entries.range(self.before(ordinal)..)
    }

    /// Number of pages before `ordinal`.
    pub fn before(&self, ordinal: u32) -> usize {
        self.entries.partition_point(|entry| entry.ordinal < ordinal)
    }

    /// Whether a fork shares the chunk of page `i`. Its pages must then not be written or moved, even if
    /// [`Page::is_shared`] is false: a change of the list first copies the chunk with all its handles.
    pub fn shares(&self, i: usize) -> bool {
        self.entries.is_shared(i)
    }

    /// [`Run::shares`] of the page at `ordinal`.
    pub fn shares_at(&self, ordinal: u32) -> bool {
        self.index(ordinal).is_some_and(|i| self.shares(i))
    }

    /// Whether another sequence shares page `i`, or the page is not in the first tier.
    pub fn shares_page(&self, i: usize) -> bool {
        self.shares(i) || self.entries[i].page().is_none_or(Page::is_shared)
    }

    /// Whether another sequence shares the page for the next token, so that a write copies it.
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

    /// Counts a token that was written to the next lane of the last page. `home` is its home expert if this is not the run of the sinks,
    /// and `c` the index of the run.
    pub fn wrote(&mut self, c: usize, home: Option<u16>) {
        if let Some(entry) = self.entries.back_mut() {
            if let (Place::Run(run), Some(home)) = (run_place(c), home) {
                entry.homes.set(run, entry.fill, home);
            }
            entry.live |= 1 << entry.fill;
            entry.fill += 1;
            self.live += 1;
            self.filed += 1;
        }
    }

    /// Removes the token at `position`, which was filed last. If no page is left, the token had been evicted; only the count changes.
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
        // The page that the token packed is open again.
        if let Some(Entry { held, .. }) = self.entries.back_mut()
            && let PageState::Closed(closed) = held
            && closed.by == position
        {
            let last = closed.last;
            *held = closed.original.take().map_or(PageState::Gone { last }, PageState::Open);
        }
        let last = self.next.saturating_sub(1);
        let held = self.entries.back().filter(|entry| entry.ordinal == last && entry.page().is_some());
        self.mirrors.cut(last, held.map_or(0, |entry| entry.fill.min(PAGE - 1)));
    }

    /// [`Run::pop`]; returns the bytes of pages that it freed.
    pub fn take_back(&mut self, position: u32) -> u64 {
        // It changes the last two pages at most. Their chunks are copied first, so that shared pages have a handle for each sequence.
        let from = self.entries.len().saturating_sub(2);
        (from..self.entries.len()).for_each(|i| self.entries.own(i));
        let first = self.entries.get(from).map(|entry| entry.ordinal);
        let held = |run: &Run| first.map_or(0, |first| run.from(first).map(Entry::own_bytes).sum::<u64>());
        let before = held(self);
        self.pop(position);
        before - held(self)
    }

    /// Adds a page without tokens.
    pub fn push(&mut self, page: Page) {
        self.entries.push_back(Entry::open(self.next, page));
        self.next += 1;
        self.kept.push_back();
    }

    /// Frees the page at index `i`. Its tokens stay counted.
    pub fn free(&mut self, i: usize) {
        self.entries[i].free();
        self.kept.free(i);
    }

    /// Frees the page at `ordinal` and sweeps with `kept`, as in [`Run::sweep`]; `false` if there is no such page.
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

    /// Evicts the lanes in `lanes` of a page; its bytes are kept until [`Run::settle`].
    pub fn kill(&mut self, ordinal: u32, lanes: u32) {
        if let Some(entry) = self.entry_mut(ordinal) {
            let killed = entry.live & lanes;
            entry.live &= !killed;
            entry.pending |= killed;
            self.live -= killed.count_ones();
        }
    }

    /// Undoes [`Run::kill`].
    pub fn revive(&mut self, ordinal: u32, lanes: u32) {
        if let Some(entry) = self.entry_mut(ordinal) {
            let back = entry.pending & lanes;
            entry.pending &= !back;
            entry.live |= back;
            self.live += back.count_ones();
        }
    }

    /// Makes [`Run::kill`] final; frees the page, and returns it, if no lane is live or pending.
    pub fn settle(&mut self, ordinal: u32, lanes: u32) -> Option<Entry> {
        let i = self.index(ordinal)?;
        let entry = &mut self.entries[i];
        entry.pending &= !lanes;
        if entry.live | entry.pending != 0 {
            self.dead += lanes.count_ones();
            return None;
        }
        let last = entry.last()?;
        let gone = Entry { held: PageState::Gone { last }, ..Entry::gone(ordinal) };
        let entry = std::mem::replace(entry, Entry { fill: entry.fill, ..gone });
        self.kept.free(i);
        Some(entry)
    }

    /// Index of the page at `ordinal`; adds an evicted page there if there is none.
    pub fn listed(&mut self, ordinal: u32) -> usize {
        let i = self.before(ordinal);
        if self.entries.get(i).is_none_or(|entry| entry.ordinal != ordinal) {
            self.entries.insert(i, Entry::gone(ordinal));
            self.kept.insert(i);
        }
        i
    }

    /// Puts a page in the place of the one at its ordinal, if there is one, with the policy's state `rows` of its tokens where they were
    /// freed. Tokens filed do not change.
    pub fn put(&mut self, entry: Entry, rows: Option<&Apart>) {
        let i = self.listed(entry.ordinal);
        self.live += entry.live.count_ones();
        self.live -= std::mem::replace(&mut self.entries[i], entry).live.count_ones();
        self.kept.renew(i, rows);
    }

    /// Sets which lanes of page `i` were written, and which of them are read; none is pending. State of its tokens that was freed starts
    /// from 0.
    pub fn set_lanes(&mut self, i: usize, fill: u32, live: u32) {
        let entry = &mut self.entries[i];
        self.live += live.count_ones();
        self.live -= entry.live.count_ones();
        (entry.fill, entry.live, entry.pending) = (fill, live, 0);
        self.kept.renew(i, None);
    }

    /// Packs the last page into `packed`; `by` is the position of the token that packs it.
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
        let (Some(last), PageState::Open(page)) = (entry.last(), &entry.held) else { return };
        // A page with other handles was packed when the sequence was sealed.
        if !packed.is_shared() {
            pages.pack(codec, lanes, layout, page, entry.fill, &mut packed);
        }
        let original = Some(page.clone());
        entry.held = PageState::Closed(Closed { packed, original, last, by, old: false, next: None });
    }

    /// Packs pages again that are due at `filed` filed tokens; calls `told` with the ordinal of each and the position that packed it.
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
                PageState::Closed(closed) if !closed.old && closed.next.is_none() => {
                    let Some(by) = codec.ages_at(closed.by).filter(|by| *by < filed) else { break };
                    let near = Near::next(last.as_ref());
                    let mut page = pages.take(closed.packed.shard(), aged.codec.packed.words(), near)?;
                    pages.repack(codec, lanes, layout, (&closed.packed, fill, closed.last), &mut page);
                    last = Some(page.clone());
                    if let PageState::Closed(closed) = &mut self.entries[i].held {
                        closed.next = Some(page);
                    }
                    told(ordinal, by);
                }
                PageState::Open(_) => break,
                _ => {}
            }
            self.aged = ordinal + 1;
        }
        Ok(())
    }

    /// Undoes [`Run::age`] for pages that are not due at `filed` filed tokens.
    pub fn rejuvenate(&mut self, codec: &HeadCodec, filed: u32) {
        // Ordinals of pages that a rollback removed are used again.
        self.aged = self.aged.min(self.next);
        let until = self.before(self.aged);
        for i in (0..until).rev() {
            if let PageState::Closed(closed) = &self.entries[i].held {
                if closed.old || codec.ages_at(closed.by).is_none_or(|by| by < filed) {
                    break;
                }
                if let PageState::Closed(closed) = &mut self.entries[i].held {
                    closed.next = None;
                }
            }
            self.aged = self.entries[i].ordinal;
        }
    }

    /// Number of pages that [`Run::age`] will pack again up to `filed` filed tokens. `O(such pages)`.
    pub fn due(&self, codec: &HeadCodec, filed: u32) -> u64 {
        let closed = self.from(self.aged).take_while(|entry| match &entry.held {
            PageState::Closed(closed) => codec.ages_at(closed.by).is_some_and(|by| by < filed),
            PageState::Open(_) => false,
            _ => true,
        });
        closed.count() as u64
    }
}
