//! Evictions and compactions of a layer's pages, for rollback.
//!
//! Which tokens a policy ranks, and their order in pages, must depend only on the tokens of a sequence, and not on tokens that were rolled
//! back. So every change that a commit makes to earlier tokens is recorded with the sequence's length, while a rollback can
//! reach that length. A rollback undoes the changes recorded after its target, newest first.

mod save;

use crate::base::deque::{first_if, last_if};
use crate::base::error::Error;
use crate::base::ids::run_place;
use crate::memory::arena::{Near, Page, Reservation};
use crate::memory::pool::Pool;
use crate::pages::compact::CompactedRun;
use crate::pages::entry::{Entry, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::homes::Homes;
use crate::pages::run::Run;
use crate::policy::state::Apart;
use pikv_core::attend::filled;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use std::collections::VecDeque;

/// Evicted tokens of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Killed {
    /// Length of the sequence at the eviction.
    pub by: u32,
    pub head: usize,
    pub run: usize,
    pub ordinal: u32,
    pub lanes: u32,
    /// Id of the next recorded change at that time.
    pub after: u64,
}

/// A change of one run of pages.
#[derive(Clone, Debug)]
struct Noted {
    id: u64,
    /// Length of the sequence at the change.
    at: u32,
    head: usize,
    run: usize,
    /// [`Run::dead`] before the change.
    dead: u32,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// An eviction became final.
    Final(Killed),
    /// A page was freed, because none of its tokens is read.
    Freed(Box<Entry>),
    /// A page left the layer's window; with the policy's state of its tokens.
    Slid(Box<Entry>, Apart),
    /// Pages were compacted.
    Compacted(Compacted),
}

impl Noted {
    /// Storage that the change keeps: a page, or pages.
    fn pages(&self) -> (Option<&PageState>, &[Before]) {
        match &self.what {
            What::Final(_) => (None, &[]),
            What::Freed(entry) | What::Slid(entry, _) => (Some(&entry.held), &[]),
            What::Compacted(compacted) => (None, &compacted.pages),
        }
    }
}

/// A compaction of a run.
#[derive(Clone, Debug)]
pub(crate) struct Compacted {
    /// By ascending ordinal, without pages that were evicted.
    pub pages: Vec<Before>,
    /// Moves of tokens, by descending place.
    pub moves: Vec<Went>,
}

/// A page before a compaction.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    pub ordinal: u32,
    pub fill: u32,
    pub live: u32,
    pub bounds: Option<Box<[[f32; LANES]]>>,
    pub homes: Homes,
    pub was: Was,
}

#[derive(Clone, Debug)]
pub(crate) enum Was {
    /// Storage that was replaced or freed.
    Replaced(PageState),
    /// The page is the same, but has other tokens; these are the former positions of its lanes.
    Rewritten([u32; PAGE as usize]),
}

/// A move of a token, from (ordinal, lane) to (ordinal, lane).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Went {
    pub from: (u32, u32),
    pub to: (u32, u32),
}

/// Changes of a layer's pages that a rollback undoes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    /// Evictions that are not final, by ascending length of the sequence.
    pub killed: VecDeque<Killed>,
    /// Oldest first.
    noted: VecDeque<Noted>,
    /// Id of the next recorded change.
    next: u64,
}

impl Past {
    /// Records an eviction at `by` tokens of the sequence.
    pub fn kill(&mut self, by: u32, head: usize, run: usize, ordinal: u32, lanes: u32) {
        self.killed.push_back(Killed { by, head, run, ordinal, lanes, after: self.next });
    }

    fn note(&mut self, at: u32, head: usize, run: usize, dead: u32, what: What) {
        self.noted.push_back(Noted { id: self.next, at, head, run, dead, what });
        self.next += 1;
    }

    /// Records that a page of a head's run left the window at `at` tokens of the sequence.
    pub fn note_slid(&mut self, (at, head, run): (u32, usize, usize), dead: u32, entry: Entry, rows: Apart) {
        self.note(at, head, run, dead, What::Slid(Box::new(entry), rows));
    }

    /// Drops the oldest change if no rollback of up to `slack` tokens from `len` can undo it; returns its run.
    pub fn forget(&mut self, len: u32, slack: u32) -> Option<(usize, usize)> {
        let noted = first_if(&mut self.noted, |noted| noted.at.saturating_add(slack) <= len)?;
        Some((noted.head, noted.run))
    }

    /// Pages kept for rollback.
    pub fn pages(&self) -> impl Iterator<Item = &PageState> {
        self.noted.iter().map(Noted::pages).flat_map(|(page, pages)| {
            page.into_iter().chain(pages.iter().filter_map(|page| match &page.was {
                Was::Replaced(held) => Some(held),
                Was::Rewritten(_) => None,
            }))
        })
    }

    /// Bytes of the lists, from their capacities.
    pub fn table_bytes(&self) -> u64 {
        let apart = |noted: &Noted| match &noted.what {
            What::Final(_) => 0,
            What::Freed(entry) => size_of::<Entry>() + entry.homes.bytes(),
            What::Slid(entry, rows) => size_of::<Entry>() + entry.homes.bytes() + rows.bytes(),
            What::Compacted(Compacted { pages, moves }) => {
                let bounds = pages.iter().filter_map(|page| page.bounds.as_deref()).map(size_of_val);
                let homes = pages.iter().map(|page| page.homes.bytes());
                bounds.chain(homes).sum::<usize>()
                    + pages.capacity() * size_of::<Before>()
                    + moves.capacity() * size_of::<Went>()
            }
        };
        let apart: usize = self.noted.iter().map(apart).sum();
        (self.killed.capacity() * size_of::<Killed>() + self.noted.capacity() * size_of::<Noted>() + apart)
            as u64
    }

    /// Ordinals of the pages of a run to which a rollback moves tokens back.
    fn tied(&self, head: usize, run: usize) -> impl Iterator<Item = u32> {
        let of = self.noted.iter().filter(move |noted| (noted.head, noted.run) == (head, run));
        let compacted = of.filter_map(|noted| match &noted.what {
            What::Compacted(compacted) => Some(&compacted.pages),
            _ => None,
        });
        let pages = compacted.flatten().filter(|page| matches!(page.was, Was::Rewritten(_)));
        pages.map(|page| page.ordinal)
    }

    /// Drops the tokens of a page that was freed for good, in all recorded changes.
    pub fn lose(&mut self, head: usize, run: usize, ordinal: u32) {
        let mut lost = vec![(ordinal, u32::MAX)];
        for noted in self.noted.iter_mut().rev().filter(|noted| (noted.head, noted.run) == (head, run)) {
            let What::Compacted(Compacted { pages, moves }) = &mut noted.what else { continue };
            let is_lost = |lost: &[(u32, u32)], (page, lane): (u32, u32)| {
                lost.iter().any(|(other, lanes)| *other == page && lanes >> lane & 1 == 1)
            };
            let mut earlier = Vec::new();
            moves.retain(|went| {
                let gone = is_lost(&lost, went.to);
                if gone {
                    earlier.push((went.from.0, 1 << went.from.1));
                }
                !gone
            });
            for page in pages.iter_mut() {
                let of = earlier.iter().filter(|(ordinal, _)| *ordinal == page.ordinal);
                page.live &= !of.fold(0, |lanes, (_, lane)| lanes | lane);
            }
            // Pages that the compaction did not touch stay lost before it.
            lost.retain(|(ordinal, _)| pages.iter().all(|page| page.ordinal != *ordinal));
            lost.extend(earlier);
        }
    }

    /// Drops the changes of a run whose pages were all freed for good.
    pub fn lose_all(&mut self, head: usize, run: usize) {
        self.noted.retain(|noted| (noted.head, noted.run) != (head, run));
    }
}

impl LayerPages {
    /// Records a final eviction, and the page if it was freed.
    pub fn note_final(&mut self, at: u32, dead: u32, killed: Killed, freed: Option<Entry>) {
        let Killed { head, run, .. } = killed;
        self.past.note(at, head, run, dead, What::Final(killed));
        if let Some(entry) = freed {
            self.past.note(at, head, run, dead, What::Freed(Box::new(entry)));
        }
    }

    /// Records a compaction.
    pub fn note_compacted(&mut self, at: u32, head: usize, run: usize, dead: u32, compacted: Compacted) {
        self.past.note(at, head, run, dead, What::Compacted(compacted));
        self.tie(head, run);
    }

    /// Marks the pages of a run to which a rollback moves tokens back, which must stay in the first tier.
    pub fn tie(&mut self, head: usize, run: usize) {
        let tied = self.past.tied(head, run).collect();
        self.heads[head].runs[run].tied = tied;
    }

    /// Bytes that [`LayerPages::rewind`] takes: for pages to which tokens are moved back and that a fork shares.
    pub fn rewind_bytes(&self, shape: &LayerShape, len: u32) -> u64 {
        let mut pages = 0;
        // Pages that later changes replaced, which are restored first: head, run and ordinal, and whether a fork shares the page.
        let mut back: Vec<((usize, usize, u32), bool)> = Vec::new();
        for noted in self.past.noted.iter().rev().take_while(|noted| noted.at > len) {
            let What::Compacted(compacted) = &noted.what else { continue };
            let run = &self.heads[noted.head].runs[noted.run];
            let known = back.len();
            for page in &compacted.pages {
                let of = (noted.head, noted.run, page.ordinal);
                let shared = match &page.was {
                    Was::Replaced(held) => {
                        back.push((of, matches!(held, PageState::Open(page) if page.is_shared())));
                        false
                    }
                    Was::Rewritten(_) => match back[..known].iter().rfind(|(back, _)| *back == of) {
                        Some((_, shared)) => *shared,
                        None => run.index(page.ordinal).is_none_or(|i| run.shares_page(i)),
                    },
                };
                pages += u64::from(shared);
            }
        }
        pages * shape.layout.bytes()
    }

    /// Undoes evictions and compactions after `len` tokens, on pages of `pages` where a fork shares those of the run.
    ///
    /// # Errors
    /// A failed device or lower tier; the layer is then inconsistent.
    pub fn rewind(
        &mut self,
        pool: &Pool,
        shape: &LayerShape,
        len: u32,
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        loop {
            // Undoes the latest entry of both logs, evictions and changes, until the latest is at or before `len`.
            let newest = self.past.noted.back().map(|noted| noted.id);
            let evicted = self.past.killed.back().filter(|killed| newest.is_none_or(|id| killed.after > id));
            if let Some(&Killed { by, head, run, ordinal, lanes, .. }) = evicted {
                if by <= len {
                    return Ok(());
                }
                self.past.killed.pop_back();
                self.heads[head].runs[run].revive(ordinal, lanes);
                continue;
            }
            let Some(noted) = last_if(&mut self.past.noted, |noted| noted.at > len) else { return Ok(()) };
            let Noted { head, run: c, dead, what, .. } = noted;
            let run = &mut self.heads[head].runs[c];
            match what {
                What::Final(killed) => {
                    self.past.killed.push_front(killed);
                    run.unsettle(killed.ordinal, killed.lanes);
                }
                What::Freed(entry) => run.put_back(*entry, None),
                What::Slid(entry, rows) => {
                    run.filed += entry.fill;
                    run.put_back(*entry, Some(&rows));
                }
                What::Compacted(compacted) => {
                    let whose = CompactedRun { pool, shape, head: self.first_head + head as u32, run: c };
                    run.take_apart(&whose, compacted, pages)?;
                    self.tie(head, c);
                }
            }
            self.heads[head].runs[c].dead = dead;
        }
    }
}

impl Run {
    /// Undoes [`Run::settle`], except for a page that it freed.
    fn unsettle(&mut self, ordinal: u32, lanes: u32) {
        if let Some(entry) = self.entry_mut(ordinal).filter(|entry| !entry.is_gone()) {
            entry.pending |= lanes & filled(entry.fill) & !entry.live;
        }
    }

    /// Restores a page, and the policy's state of its tokens.
    fn put_back(&mut self, entry: Entry, rows: Option<&Apart>) {
        self.put(entry, rows);
        self.examine_again();
    }

    /// Undoes [`Run::compact`].
    fn take_apart(
        &mut self,
        whose: &CompactedRun<'_>,
        compacted: Compacted,
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        let Compacted { pages: before, moves } = compacted;
        self.moved_before(before.last().map_or(0, |page| page.ordinal + 1));
        let places: Vec<usize> = before.iter().map(|page| self.listed(page.ordinal)).collect();
        // All reads come before the first write.
        let words = self.rewritten(whose.shape, &before, &places, &moves)?;
        let mut words = words.into_iter();
        for (i, page) in places.into_iter().zip(before) {
            // A page that the caller evicted since, and none of whose tokens was moved elsewhere, stays evicted.
            if matches!(page.was, Was::Rewritten(_))
                && let Some(words) = words.next().flatten()
            {
                self.rewrite(whose, i, &words, pages)?;
            }
            self.set_lanes(i, page.fill, page.live);
            let entry = &mut self.entries[i];
            (entry.bounds, entry.homes) = (page.bounds, page.homes);
            if let Was::Replaced(held) = page.was {
                entry.held = held;
            }
        }
        for Went { from, to } in moves.iter().rev() {
            if let (Some(a), Some(b)) = (self.index(to.0), self.index(from.0)) {
                self.kept.shift((a, to.1), (b, from.1));
            }
        }
        Ok(())
    }

    /// The former words of each page that got other tokens; `None` for an evicted page to which no token is moved back.
    fn rewritten(
        &self,
        shape: &LayerShape,
        before: &[Before],
        places: &[usize],
        moves: &[Went],
    ) -> Result<Vec<Option<Vec<u32>>>, Error> {
        let mut all = Vec::new();
        for (page, i) in before.iter().zip(places) {
            let Was::Rewritten(positions) = &page.was else { continue };
            let mut words = match self.words(*i)? {
                Some(words) => words,
                None if page.live == 0 => {
                    all.push(None);
                    continue;
                }
                None => vec![0; shape.layout.words() as usize],
            };
            let (mut source, mut at) = (None, None);
            for went in moves.iter().filter(|went| went.from.0 == page.ordinal) {
                if at != Some(went.to.0) {
                    at = Some(went.to.0);
                    source = self.index(went.to.0).map(|i| self.words(i)).transpose()?.flatten();
                }
                if let Some(source) = &source {
                    shape.layout.copy(source, went.to.1, &mut words, went.from.1);
                }
            }
            words[..positions.len()].copy_from_slice(positions);
            all.push(Some(words));
        }
        Ok(all)
    }

    /// All words of page `i`, from any tier.
    fn words(&self, i: usize) -> Result<Option<Vec<u32>>, Error> {
        Ok(match &self.entries[i].held {
            PageState::Away(away) => Some(match away.slot.in_place() {
                Some(words) => words.to_vec(),
                None => away.slot.read()?.into_vec(),
            }),
            _ => self.entries[i].page().map(Page::fetch).transpose()?.map(|words| words.into_owned()),
        })
    }

    /// Writes the words of page `i`, to a new page if it is shared or evicted.
    fn rewrite(
        &mut self,
        whose: &CompactedRun<'_>,
        i: usize,
        words: &[u32],
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        let entry = &mut self.entries[i];
        if !matches!(&entry.held, PageState::Open(page) if !page.is_shared()) {
            let shard = whose.pool.shape.shard_of(run_place(whose.run), entry.ordinal, whose.head);
            entry.held = PageState::Open(pages.take(shard, words.len() as u32, Near::Any)?);
        }
        let PageState::Open(page) = &mut entry.held else { return Ok(()) };
        page.put(words)
    }
}
