//! Sends pages to ranks.

use super::front::Front;
use super::link::{Link, List, RankWork};
use super::wire;
use crate::base::chunks::Common;
use crate::base::error::Error;
use crate::base::error::FabricError;
use crate::base::ids::block_of;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use crate::memory::arena::Page;
use crate::memory::pool::Pool;
use crate::pages::entry::{Closed, Entry, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::run::Run;
use crate::tiers::StoredPage;
use crate::tiers::replica::{Block, Copies, Copy, Mirror, Mirrors, RankPage, RunId};
use pikv_core::attend::BLOCK;
use pikv_core::page::{Layout, PAGE};
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::sync::Arc;

/// Work by rank.
#[derive(Default)]
pub(super) struct ByRank(Vec<(u32, RankWork)>);

impl ByRank {
    pub fn of(&mut self, rank: u32) -> &mut RankWork {
        let at = match self.0.iter().position(|(of, _)| *of == rank) {
            Some(at) => at,
            None => {
                self.0.push((rank, RankWork::default()));
                self.0.len() - 1
            }
        };
        &mut self.0[at].1
    }

    pub fn into_list(self) -> Vec<(u32, RankWork)> {
        self.0.into_iter().filter(|(_, work)| !work.is_empty()).collect()
    }
}

impl List {
    pub fn id(&mut self, id: u64) {
        self.items += 1;
        wire::push_u64(&mut self.words, id);
    }

    /// Appends a whole page.
    pub fn page(&mut self, id: u64, words: &[u32]) {
        self.id(id);
        self.words.push(words.len() as u32);
        self.words.extend_from_slice(words);
    }

    /// Appends a request for the room of a page of that many words.
    pub fn room(&mut self, id: u64, words: u32) {
        self.id(id);
        self.words.push(words | wire::ROOM);
    }

    /// Appends tokens of a page in the head's dtype.
    fn tokens(&mut self, id: u64, layer: usize, layout: &Layout, words: &[u32], lanes: std::ops::Range<u32>) {
        self.id(id);
        self.words.extend([layer as u32, lanes.start, lanes.len() as u32]);
        lanes.for_each(|lane| wire::push_token(layout, words, lane, &mut self.words));
    }
}

/// A page that a rank has, to replace the one on the front.
#[derive(Debug)]
pub(crate) struct Sent {
    layer: usize,
    head: usize,
    run: usize,
    ordinal: u32,
    slot: Arc<StoredPage>,
}

/// Whether a page on the front may be sent to its rank, with positions below `kept` safe from rollback: it takes no more tokens, and no
/// other sequence holds it, unless the run's list is shared. The caller checks for tied pages.
fn may_go(entry: &Entry, codec: bool, kept: u32) -> bool {
    let page = match &entry.held {
        PageState::Gone { .. } | PageState::Away(_) => return false,
        PageState::Open(_) if codec || entry.fill < PAGE => return false,
        PageState::Open(page) => entry.last().filter(|last| *last < kept).map(|_| page),
        PageState::Closed(Closed { packed, by, .. }) => (*by < kept).then_some(packed),
    };
    entry.pending == 0 && page.is_some_and(|page| !page.is_shared())
}

impl Run {
    /// Pages on the front that were not sent: those not examined yet, and those that had to stay.
    fn unsent(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.from(self.sent()).map(|entry| (entry.ordinal, entry))
    }

    /// The ranks that have all remote pages of a block; `None` if it has no remote pages.
    fn ranks_of(&self, link: &Link, block: u32) -> Option<Result<Vec<u32>, FabricError>> {
        let (from, to) = (self.before(block * BLOCK as u32), self.before((block + 1) * BLOCK as u32));
        let mut common: Option<Result<Vec<u32>, FabricError>> = None;
        for entry in self.entries.range(from..to) {
            let PageState::Away(away) = &entry.held else { continue };
            let Some(kept) = away.slot.rank_page() else { continue };
            let copies = kept.copies();
            let alive = copies.iter().map(|copy| copy.rank).filter(|rank| link.check(*rank).is_ok());
            common = Some(match common {
                None => Ok(alive.collect()),
                Some(Ok(ranks)) => Ok(alive.filter(|rank| ranks.contains(rank)).collect()),
                Some(lost) => lost,
            });
            if common.as_ref().is_some_and(|common| common.as_ref().is_ok_and(Vec::is_empty)) {
                // A move leaves each page on at least one rank; without a common rank, one was lost.
                match super::front::first_alive(link, &copies) {
                    Ok(copy) => common = Some(Ok(vec![copy.rank])),
                    Err(error) => common = Some(Err(error)),
                }
            }
        }
        common
    }

    /// Marks the leading pages that were sent, so that they are not examined again.
    fn pass_sent(&mut self) {
        let mut at = self.sent();
        for entry in self.from(at) {
            match entry.held {
                PageState::Away(_) => at = entry.ordinal + 1,
                PageState::Gone { .. } => {}
                _ => break,
            }
        }
        self.pass_until(at);
        let mirrors = std::mem::take(&mut self.mirrors);
        if let Some(mut list) = mirrors.list() {
            list.retain(|mirror| match self.entry(mirror.ordinal) {
                Some(entry) => entry.page().is_some(),
                None => mirror.ordinal == self.next,
            });
        }
        self.mirrors = mirrors;
    }

    /// Queues what `rank` lacks of the local page at `ordinal`, and returns its copy there.
    pub(super) fn mirror(
        &self,
        front: &Front,
        run: RunId,
        (layout, codec): (&Layout, bool),
        ordinal: u32,
        (rank, epoch): (u32, u64),
        work: &mut RankWork,
    ) -> Option<Arc<Copy>> {
        let entry = self.entry(ordinal)?;
        let words = entry.page()?.words();
        let mut list = self.mirrors.open(run, &front.mirrors);
        let at = match list.iter().position(|mirror| mirror.ordinal == ordinal) {
            Some(at) if list[at].copy.rank == rank => at,
            other => {
                if let Some(at) = other {
                    list.swap_remove(at);
                }
                list.push(Mirror { ordinal, copy: front.copy(rank), synced: 0, epoch });
                list.len() - 1
            }
        };
        let mirror = &mut list[at];
        mirror.renew(epoch);
        let (id, until) = (mirror.copy.id, if codec { PAGE } else { entry.fill });
        // A fork that shares the copy may have sent it in the same message.
        let sent = work.synced.iter().rev().find(|(of, _)| *of == id).map_or(0, |(_, until)| *until);
        mirror.synced = mirror.synced.max(sent.min(until));
        if mirror.synced < until {
            match codec {
                // A packed page does not change, unless a rollback unpacks it.
                true => work.puts.page(id, words),
                false => work.writes.tokens(id, run.layer as usize, layout, words, mirror.synced..until),
            }
            mirror.synced = until;
            work.synced.push((id, until));
        }
        Some(mirror.copy.clone())
    }

    /// The copy of the page at `ordinal` on a rank, unless a fork shares that copy and the page was written since.
    fn own<'a>(&self, list: &'a [Mirror], ordinal: u32) -> Option<&'a Mirror> {
        let mirror = list.iter().find(|mirror| mirror.ordinal == ordinal)?;
        let Some(entry) = self.entry(ordinal) else { return Some(mirror) };
        // A packed page is sent whole.
        let needed = if matches!(entry.held, PageState::Closed(_)) { PAGE } else { entry.fill };
        // A page that is also shared on the front was not written since.
        let shared = Arc::strong_count(&mirror.copy) > 1;
        let same = self.shares_at(ordinal) || entry.page().is_some_and(Page::is_shared);
        let written = mirror.synced < needed && !same;
        Some(mirror).filter(|_| !(shared && written))
    }

    /// Requests room on `rank` for the page at `ordinal`, which may be the next page of the run: if the rank has no room for it, or if a
    /// fork shares the copy there and the page is to be written. Returns the mirror to record once the rank has the room.
    fn set_aside(
        &self,
        front: &Front,
        ordinal: u32,
        (rank, epoch): (u32, u64),
        words: u32,
        work: &mut RankWork,
    ) -> Option<Mirror> {
        let list = self.mirrors.list();
        let own =
            list.as_ref().and_then(|list| self.own(list, ordinal)).filter(|mirror| mirror.copy.rank == rank);
        let copy = match own {
            Some(mirror) if mirror.epoch == epoch => return None,
            Some(mirror) => mirror.copy.clone(),
            None => front.copy(rank),
        };
        work.puts.room(copy.id, words);
        Some(Mirror { ordinal, copy, synced: 0, epoch })
    }
}

/// Requests for room on ranks, and the mirrors to record once they are granted.
#[derive(Default)]
struct Aside<'a> {
    work: ByRank,
    noted: Vec<(&'a Mirrors, RunId, Mirror)>,
}

/// The head and run of some pages.
#[derive(Clone, Copy)]
struct HeadRun<'a> {
    run: RunId,
    layout: &'a Layout,
    codec: Option<&'a HeadCodec>,
}

impl Front {
    /// Reserves room on the ranks for local pages of a layer whose blocks are read there, so that later reads of the layer do not
    /// allocate on a rank.
    ///
    /// # Errors
    /// A rank without memory, or one that fails.
    pub fn set_aside<'a>(
        &self,
        inner: &CacheShape,
        l: usize,
        layers: impl Iterator<Item = &'a LayerPages>,
    ) -> Result<(), Error> {
        let mut link = self.link();
        let mut aside = Aside::default();
        for layer in layers {
            for (h, head) in layer.heads.iter().enumerate() {
                let (layout, codec) = (&inner.config.layers[l].layout, layer.codecs[h].as_ref());
                for (c, run) in head.runs.experts() {
                    let whose = HeadRun { run: run_id(l, h, c), layout, codec };
                    self.set_aside_of(&link, run, whose, &[], &mut aside);
                }
            }
        }
        let work = aside.work.into_list();
        if !work.is_empty() {
            link.unsure = true;
            self.work(&mut link, work)?;
            link.unsure = false;
        }
        self.note_mirrors(aside.noted);
        Ok(())
    }

    fn note_mirrors(&self, noted: Vec<(&Mirrors, RunId, Mirror)>) {
        noted.into_iter().for_each(|(mirrors, run, mirror)| mirrors.note(run, &self.mirrors, mirror));
    }

    /// The same for all layers with a policy, which may just have compacted pages, of several sequences. A rank without room refuses reads
    /// until it has room.
    pub fn set_aside_thinned(&self, pool: &Pool, sequences: &[&[Common<LayerPages>]]) {
        for (l, _) in pool.shape.rules.iter().enumerate().filter(|(_, rule)| rule.is_some()) {
            if self.set_aside(&pool.shape, l, sequences.iter().map(|layers| &*layers[l])).is_err() {
                pool.failures.uncompacted();
            }
        }
    }

    /// The same for one run, of which some pages are about to be sent.
    fn set_aside_of<'a>(
        &self,
        link: &Link,
        run: &'a Run,
        whose: HeadRun<'_>,
        going: &[(u32, Copies)],
        aside: &mut Aside<'a>,
    ) {
        let HeadRun { run: id, layout, codec } = whose;
        let here = run.unsent().filter(|(ordinal, entry)| {
            let read = match entry.held {
                PageState::Open(_) => codec.is_none(),
                PageState::Closed(_) => true,
                PageState::Gone { .. } | PageState::Away(_) => false,
            };
            read && going.iter().all(|(gone, _)| gone != ordinal)
        });
        let words = codec.map_or(layout.words(), |codec| codec.packed.words());
        for ordinal in here.map(|(ordinal, _)| ordinal).chain([run.next]) {
            let block = block_of(ordinal);
            let known = run.mirrors.rank(block * BLOCK as u32..(block + 1) * BLOCK as u32);
            let new = going.iter().rfind(|(gone, _)| block_of(*gone) == block);
            let rank = match new {
                Some((_, copies)) => copies.first().map(|copy| copy.rank),
                None => match run.ranks_of(link, block) {
                    Some(Ok(ranks)) => known.filter(|rank| ranks.contains(rank)).or(ranks.first().copied()),
                    // Its pages are all on the front, or are lost.
                    None | Some(Err(_)) => None,
                },
            };
            if let Some(rank) = rank {
                let mirror = run.set_aside(self, ordinal, (rank, link.epoch), words, aside.work.of(rank));
                aside.noted.extend(mirror.map(|mirror| (&run.mirrors, id, mirror)));
            }
        }
    }

    /// Sends pages that may be sent once sequences have that many tokens, of which those before `kept` are safe from rollback, and waits
    /// until the ranks have them.
    pub fn send<'a>(
        self: &Arc<Self>,
        inner: &CacheShape,
        parts: impl Iterator<Item = (&'a [Common<LayerPages>], u32)>,
    ) -> Result<Vec<Vec<Sent>>, Error> {
        let mut link = self.link();
        link.unsure = true;
        let sent = self.send_through(&mut link, inner, parts)?;
        link.unsure = false;
        Ok(sent)
    }

    fn send_through<'a>(
        self: &Arc<Self>,
        link: &mut Link,
        inner: &CacheShape,
        parts: impl Iterator<Item = (&'a [Common<LayerPages>], u32)>,
    ) -> Result<Vec<Vec<Sent>>, FabricError> {
        let mut aside = Aside::default();
        let mut all = Vec::new();
        for (layers, kept) in parts {
            let mut sent = Vec::new();
            for (l, layer) in layers.iter().enumerate() {
                for (h, head) in layer.heads.iter().enumerate() {
                    let codec = layer.codecs[h].as_ref();
                    for (c, run) in head.runs.experts() {
                        let mut going: SmallVec<[(u32, Copies); 4]> = SmallVec::new();
                        for (ordinal, entry) in run.unsent().filter(|(ordinal, entry)| {
                            let stays = run.shares_at(*ordinal) || run.is_tied(*ordinal);
                            !stays && may_go(entry, codec.is_some(), kept)
                        }) {
                            let at = At { layer: l, head: h, run: c, ordinal };
                            let leaving = Leaving { run, entry, codec, at };
                            let slot = self.send_page(inner, link, leaving, &mut aside.work)?;
                            going.extend(slot.rank_page().map(|kept| (ordinal, kept.copies())));
                            sent.push(Sent { layer: l, head: h, run: c, ordinal, slot });
                        }
                        let whose =
                            HeadRun { run: run_id(l, h, c), layout: &inner.config.layers[l].layout, codec };
                        self.set_aside_of(link, run, whose, &going, &mut aside);
                    }
                }
            }
            all.push(sent);
        }
        let work = aside.work.into_list();
        if !work.is_empty() {
            self.work(link, work)?;
        }
        self.note_mirrors(aside.noted);
        // After the ranks have them, because a move requests the pages that are listed.
        for slot in all.iter().flatten().map(|sent: &Sent| &sent.slot) {
            if let Some(kept) = slot.rank_page() {
                self.note(kept.block, slot);
            }
        }
        Ok(all)
    }

    fn send_page(
        self: &Arc<Self>,
        inner: &CacheShape,
        link: &Link,
        page: Leaving<'_>,
        work: &mut ByRank,
    ) -> Result<Arc<StoredPage>, FabricError> {
        let Leaving { run, entry, codec, at: At { layer, head, run: c, ordinal } } = page;
        let layout = &inner.config.layers[layer].layout;
        let id = run_id(layer, head, c);
        let block = Block { layer: id.layer, head: id.head, expert: id.expert, block: block_of(ordinal) };
        let ranks = match run.ranks_of(link, block.block) {
            Some(ranks) => ranks?,
            None => vec![self.rank_of(link, &block)?],
        };
        let mirrored = match run.mirrors.list() {
            Some(list) => run.own(&list, ordinal).map(|mirror| mirror.copy.rank),
            None => None,
        };
        let mirrored = mirrored.filter(|rank| ranks.contains(rank));
        let words = entry.page().map_or(&[][..], |page| page.words());
        let mut copies = Copies::new();
        for rank in ranks {
            let work = work.of(rank);
            let mirror = mirrored.filter(|mirrored| *mirrored == rank);
            let mirror = mirror.and_then(|_| {
                run.mirror(self, id, (layout, codec.is_some()), ordinal, (rank, link.epoch), work)
            });
            match mirror {
                Some(copy) => {
                    work.keeps.id(copy.id);
                    copies.push(copy);
                }
                None => {
                    let copy = self.copy(rank);
                    work.puts.page(copy.id, words);
                    copies.push(copy);
                }
            }
        }
        let mut positions = [u32::MAX; LANES];
        for (lane, to) in (0..entry.fill).zip(&mut positions) {
            *to = entry.position(codec, lane).unwrap_or(u32::MAX);
        }
        let kept = RankPage::new(self.clone(), block, copies);
        Ok(Arc::new(StoredPage::on_ranks(self.level.clone(), kept, words, positions)))
    }

    /// Replaces local pages by the copies on ranks.
    pub fn place(&self, layers: &mut [Common<LayerPages>], sent: Vec<Sent>, kept: u32) {
        for Sent { layer, head, run, ordinal, slot } in sent {
            let codecs = layers[layer].codecs.clone();
            let codec = codecs[head].as_ref();
            let run = &mut layers[layer].heads[head].runs[run];
            // A policy may have evicted from the page, or it may have other tokens: it then stays until the next step.
            let same = |entry: &Entry| {
                let mut lanes = (0..entry.fill).filter(|lane| entry.live >> lane & 1 == 1);
                lanes.all(|lane| entry.position(codec, lane) == Some(slot.positions[lane as usize]))
            };
            let tied = run.is_tied(ordinal);
            let entry = run.entry_mut(ordinal).filter(|_| !tied);
            if let Some(entry) = entry.filter(|entry| may_go(entry, codec.is_some(), kept) && same(entry)) {
                let by = match &entry.held {
                    PageState::Closed(closed) => Some(closed.by),
                    _ => None,
                };
                entry.held = PageState::Away(crate::pages::entry::Away { slot, by });
            }
            run.pass_sent();
        }
    }
}

/// The run with index `c` of a head; the first is the sinks', which stay on the front.
pub(super) fn run_id(layer: usize, head: usize, c: usize) -> RunId {
    RunId { layer: layer as u32, head: head as u32, expert: c as u16 - 1 }
}

/// A page that is sent to its ranks.
struct Leaving<'a> {
    run: &'a Run,
    entry: &'a Entry,
    codec: Option<&'a HeadCodec>,
    at: At,
}

/// Position of a page.
#[derive(Clone, Copy)]
struct At {
    layer: usize,
    head: usize,
    run: usize,
    ordinal: u32,
}
