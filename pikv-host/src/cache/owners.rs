//! Pages that may move between tiers, and moves that every list of these pages takes part in.
//!
//! Sequences share layers, lists of pages and pages. The bytes of a page in the first tier are free once its last handle is dropped, so a page
//! moves down only if all its handles lie in the sequences given. It is written once, and all lists refer to the copy. Layers and lists
//! that were shared are shared afterwards.

use crate::base::chunks::{Common, Rewritten};
use crate::base::error::Error;
use crate::base::ids::run_place;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::codec::HeadCodec;
use crate::memory::arena::{Near, Page};
use crate::pages::entry::{Away, Closed, Entry, PageState};
use crate::pages::filing::LayerPages;
use crate::pages::run::Run;
use crate::tiers::{Level, StoredPage};
use pikv_core::page::PAGE;
use pikv_core::warp::LANES;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A sequence whose pages may move.
pub(crate) struct Owner<'s> {
    pub sequence: &'s mut Sequence,
    /// Pages of owners with lower turns move first; a page of several owners has the highest of their turns. `None` for an owner whose
    /// pages move only if another owner holds them too.
    pub turn: Option<usize>,
}

impl<'s> Owner<'s> {
    /// An owner with the first turn.
    pub fn first(sequence: &'s mut Sequence) -> Owner<'s> {
        Owner { sequence, turn: Some(0) }
    }

    /// The same owner for a shorter time.
    pub fn again(&mut self) -> Owner<'_> {
        Owner { sequence: self.sequence, turn: self.turn }
    }
}

/// References to shared values, counted by address, in the order of the first ones.
pub(crate) struct References<T> {
    index: HashMap<usize, usize>,
    noted: Vec<Noted<T>>,
}

struct Noted<T> {
    seen: usize,
    holders: usize,
    value: T,
}

impl<T> References<T> {
    pub fn new() -> References<T> {
        References { index: HashMap::new(), noted: Vec::new() }
    }

    /// Counts a reference to the value at an address, which has `holders` references in total; returns the value given first.
    pub fn note(&mut self, (at, holders): (usize, usize), value: T) -> &mut T {
        let index = *self.index.entry(at).or_insert(self.noted.len());
        if index == self.noted.len() {
            self.noted.push(Noted { seen: 0, holders, value });
        }
        let noted = &mut self.noted[index];
        noted.seen += 1;
        &mut noted.value
    }

    /// The values, and whether all references to each were counted.
    fn all(self) -> impl Iterator<Item = (bool, T)> {
        self.noted.into_iter().map(|noted| (noted.seen == noted.holders, noted.value))
    }

    /// The values with all references counted: no other sequence holds them.
    pub fn own(self) -> impl Iterator<Item = T> {
        self.all().filter_map(|(own, value)| own.then_some(value))
    }
}

/// A layer of some owners.
struct Shared<'a> {
    layer: &'a LayerPages,
    index: usize,
    /// No rollback of any owner changes pages with positions below this.
    kept: u32,
    turn: Option<usize>,
}

/// A part of the list of a run.
struct List<'a> {
    entries: &'a [Entry],
    run: &'a Run,
    codec: Option<&'a HeadCodec>,
    /// Layer, head and run.
    at: (usize, usize, usize),
    /// Index of the head over all layers.
    global: u32,
    kept: u32,
    turn: Option<usize>,
    /// Whether only owners have layers with this list.
    own: bool,
}

/// A page that lies in a lower tier, or may move there.
pub(crate) struct Movable<'a> {
    entry: &'a Entry,
    run: &'a Run,
    codec: Option<&'a HeadCodec>,
    at: (usize, usize, usize),
    global: u32,
    turn: Option<usize>,
    /// Position of its last token.
    last: u32,
    pub key: usize,
    pub bytes: u64,
    /// Tier of the page.
    pub tier: usize,
}

impl Entry {
    /// Whether the page lies in the first tier and may move down, apart from its other holders: it takes no more tokens, and no rollback to
    /// a length that keeps positions below `kept` changes it.
    fn may_go(&self, codec: Option<&HeadCodec>, kept: u32) -> bool {
        match &self.held {
            PageState::Gone { .. } | PageState::Away(_) => false,
            PageState::Open(_) => {
                let done =
                    codec.is_none() && self.fill == PAGE && self.last().is_some_and(|last| last < kept);
                done && self.pending == 0
            }
            PageState::Closed(Closed { original, by, .. }) => {
                original.is_none() && *by < kept && self.pending == 0
            }
        }
    }

    /// Refers to the moved page.
    fn take(&mut self, moved: &Moved) {
        self.held = match (moved, &self.held) {
            (Moved::PinnedCopy(slot), held) => {
                let by = match held {
                    PageState::Closed(closed) => Some(closed.by),
                    PageState::Away(away) => away.by,
                    PageState::Gone { .. } | PageState::Open(_) => None,
                };
                PageState::Away(Away { slot: slot.clone(), by })
            }
            (Moved::Up(page), PageState::Away(Away { by: Some(by), slot })) => {
                let last = slot.positions[self.fill as usize - 1];
                let packed = page.clone();
                PageState::Closed(Closed { packed, original: None, last, by: *by, old: false, next: None })
            }
            (Moved::Up(page), _) => PageState::Open(page.clone()),
        };
    }
}

/// Pages of some layers that lie in lower tiers, or may move there: by turn, the oldest first. A page is listed once. O(pages).
pub(crate) fn movable<'a>(owners: &'a [Owner<'_>], layers: Range<usize>) -> Vec<Movable<'a>> {
    let (lists, tied) = lists(owners, layers);
    let mut pages: References<Movable<'a>> = References::new();
    for (own, list) in lists.all() {
        for entry in list.entries {
            let Some(key) = entry.key() else { continue };
            // A page is copied back from a lower tier whoever else refers to it there.
            let (tier, bytes, handles) = match (&entry.held, entry.page()) {
                (PageState::Away(Away { slot, .. }), _) => (slot.level.index, slot.bytes(), None),
                (_, Some(page))
                    if own && list.own && entry.may_go(list.codec, list.kept) && !tied.contains(&key) =>
                {
                    (0, entry.bytes(), Some(page.handles() as usize))
                }
                _ => continue,
            };
            let List { run, codec, at, global, turn, .. } = list;
            let last = entry.last().unwrap_or(0);
            let page = Movable { entry, run, codec, at, global, turn, last, key, bytes, tier };
            let noted = pages.note((key, handles.unwrap_or(0)), page);
            noted.turn = noted.turn.max(turn);
        }
    }
    let pages = pages.all().filter_map(|(own, page)| (own || page.tier > 0).then_some(page));
    let mut pages: Vec<Movable<'a>> = pages.filter(|page| page.turn.is_some()).collect();
    pages.sort_by_key(|page| (page.turn, page.last, page.at));
    pages
}

/// The lists of pages of some layers, and the pages that must stay in the first tier for rollbacks.
fn lists<'a>(owners: &'a [Owner<'_>], range: Range<usize>) -> (References<List<'a>>, HashSet<usize>) {
    let mut kept: References<(&Sequence, Option<usize>)> = References::new();
    for Owner { sequence, turn } in owners {
        for checkpoint in &sequence.checkpoints {
            let address = (Arc::as_ptr(checkpoint).addr(), Arc::strong_count(checkpoint));
            let noted = kept.note(address, (checkpoint, *turn));
            noted.1 = noted.1.max(*turn);
        }
    }
    let mut layers: References<Shared<'a>> = References::new();
    for (sequence, turn) in owners.iter().map(|owner| (&*owner.sequence, owner.turn)).chain(kept.own()) {
        for index in range.clone() {
            let (layer, kept) = (&sequence.layers[index], sequence.kept);
            let noted = layers.note(layer.holders(), Shared { layer, index, kept, turn });
            (noted.kept, noted.turn) = (noted.kept.min(kept), noted.turn.max(turn));
        }
    }
    let (mut lists, mut tied) = (References::new(), HashSet::new());
    for (own, Shared { layer, index, kept, turn }) in layers.all() {
        for (h, head) in layer.heads.iter().enumerate() {
            let codec = layer.codecs[h].as_ref();
            for (c, run) in head.runs.experts() {
                tied.extend(run.tied.iter().filter_map(|ordinal| run.entry(*ordinal)?.key()));
                for (holders, entries) in run.entries.parts() {
                    let (at, global) = ((index, h, c), layer.first_head + h as u32);
                    let list = List { entries, run, codec, at, global, kept, turn, own };
                    let noted: &mut List<'a> = lists.note(holders, list);
                    (noted.kept, noted.turn) = (noted.kept.min(kept), noted.turn.max(turn));
                    noted.own &= own;
                }
            }
        }
    }
    (lists, tied)
}

/// A page in the tier to which it moved.
pub(crate) enum Moved {
    PinnedCopy(Arc<StoredPage>),
    Up(Page),
}

impl Movable<'_> {
    /// Copies the page to `level`.
    ///
    /// # Errors
    /// The errors of [`Level::put`]; a failed device or lower tier.
    pub fn lowered(&self, level: &Arc<Level>) -> Result<Arc<StoredPage>, Error> {
        let Movable { entry, codec, .. } = self;
        let mut positions = [u32::MAX; LANES];
        for (lane, to) in (0..entry.fill).zip(&mut positions) {
            *to = entry.position(*codec, lane).unwrap_or(u32::MAX);
        }
        let slot = match (entry.page(), &entry.held) {
            (None, PageState::Away(Away { slot, .. })) => match slot.in_place() {
                Some(words) => level.put(words, positions)?,
                None => level.put(&slot.read()?, positions)?,
            },
            (Some(page), _) => level.put(&page.fetch()?, positions)?,
            (None, _) => unreachable!("evicted pages do not move"),
        };
        Ok(Arc::new(slot))
    }

    /// Copies the page from a lower tier to the first.
    ///
    /// # Errors
    /// [`Error::OutOfBudget`], [`Error::OutOfMemory`]; a failed device or lower tier.
    pub fn raised(&self, inner: &Inner) -> Result<Page, Error> {
        let PageState::Away(Away { slot, .. }) = &self.entry.held else {
            unreachable!("pages of lower tiers move up")
        };
        let ordinal = self.entry.ordinal;
        let before = ordinal.checked_sub(1).and_then(|i| self.run.entry(i)?.page());
        let shard = inner.shape.shard_of(run_place(self.at.2), ordinal, self.global);
        let (mut pages, near) = (inner.pool.arenas.reserve(slot.bytes())?, Near::next(before));
        let mut fresh = pages.take(shard, slot.words() as u32, near)?;
        match fresh.words_mut() {
            Some(words) if inner.shape.config.backend.is_cpu() => slot.read_into(words)?,
            _ => fresh.put(&slot.read()?)?,
        }
        Ok(fresh)
    }
}

/// Pages that moved, by their key before.
pub(crate) type Moves = HashMap<usize, Moved>;

/// Makes all lists of the owners refer to moved pages; returns whether each owner changed.
pub(crate) fn apply(owners: &mut [Owner<'_>], moves: &Moves) -> Vec<bool> {
    let mut rewrite = Rewrite { moves, lists: HashMap::new(), layers: HashMap::new(), kept: HashMap::new() };
    owners.iter_mut().map(|owner| !moves.is_empty() && rewrite.sequence(owner.sequence)).collect()
}

/// Layers, lists and checkpoints that were rewritten: each value before, which keeps its address in use, and the one after.
struct Rewrite<'m> {
    moves: &'m Moves,
    lists: Rewritten<Entry>,
    layers: HashMap<usize, (Common<LayerPages>, Common<LayerPages>)>,
    kept: HashMap<usize, (Arc<Sequence>, Arc<Sequence>)>,
}

impl Rewrite<'_> {
    fn is_moved(&self, entry: &Entry) -> bool {
        entry.key().is_some_and(|key| self.moves.contains_key(&key))
    }

    /// Whether the sequence changed.
    fn sequence(&mut self, sequence: &mut Sequence) -> bool {
        let mut changed = false;
        for layer in &mut sequence.layers {
            changed |= self.layer(layer);
        }
        for kept in &mut sequence.checkpoints {
            if let Some(kept) = Arc::get_mut(kept) {
                changed |= self.sequence(kept);
                continue;
            }
            let address = Arc::as_ptr(kept).addr();
            if !self.kept.contains_key(&address) {
                let mut copy = kept.copied();
                let after = if self.sequence(&mut copy) { Arc::new(copy) } else { kept.clone() };
                self.kept.insert(address, (kept.clone(), after));
            }
            let (before, after) = &self.kept[&address];
            changed |= !Arc::ptr_eq(before, after);
            *kept = after.clone();
        }
        changed
    }

    /// Whether the layer changed.
    fn layer(&mut self, layer: &mut Common<LayerPages>) -> bool {
        let (address, holders) = layer.holders();
        if holders > 1
            && let Some((before, after)) = self.layers.get(&address)
        {
            let changed = !before.is(after);
            *layer = after.clone();
            return changed;
        }
        let entries = layer.heads.iter().flat_map(|head| head.runs.experts());
        let changed = entries.flat_map(|(_, run)| &run.entries).any(|entry| self.is_moved(entry));
        let before = (holders > 1).then(|| layer.clone());
        if changed {
            let (moves, lists) = (self.moves, &mut self.lists);
            let moved = |entry: &Entry| entry.key().and_then(|key| moves.get(&key));
            let runs = Common::own(layer).heads.iter_mut().flat_map(|head| head.runs.experts_mut());
            for (_, run) in runs {
                run.entries.rewrite(lists, &|entry| moved(entry).is_some(), &mut |entry| {
                    if let Some(moved) = moved(entry) {
                        entry.take(moved);
                    }
                });
            }
        }
        if let Some(before) = before {
            self.layers.insert(address, (before, layer.clone()));
        }
        changed
    }
}
