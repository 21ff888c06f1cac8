//! Builds a layer as it was at an earlier length, from existing pages.
//!
//! If no token was packed, evicted or freed behind a window, every token before that length is in a run in the dtype of its layer. The
//! runs are cut to the tokens that had left the ring, on the same pages; the ring is rebuilt from the other tokens.

use crate::base::error::Error;
use crate::base::ids::{Place, run_place};
use crate::codec::HeadCodec;
use crate::memory::arena::{Near, Page, Reservation};
use crate::memory::pool::Pool;
use crate::pages::entry::{Away, Entry, PageState};
use crate::pages::filing::{LayerPages, Undo};
use crate::pages::head::HeadPages;
use crate::pages::past::Past;
use crate::pages::run::Run;
use crate::pages::sealed::Sealed;
use pikv_core::attend::filled;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;
use std::collections::VecDeque;

/// Parameters of a cut.
pub(crate) struct Cut<'a> {
    pub pool: &'a Pool,
    pub shape: &'a LayerShape,
    /// Length after the cut, in tokens.
    pub len: u32,
}

impl Cut<'_> {
    /// Tokens outside the ring after the cut.
    fn left(&self) -> u32 {
        self.pool.shape.store.ring.left(self.len)
    }

    /// First tile of the ring after the cut.
    fn first_tile(&self) -> u32 {
        self.pool.shape.store.ring.tiles(self.len, self.len).start
    }

    /// Tiles of the ring after the cut that a layer's ring does not have any more.
    fn missing(&self, layer: &LayerPages) -> std::ops::Range<u32> {
        let first = self.first_tile();
        first..layer.first_tile.min(self.len.div_ceil(PAGE)).max(first)
    }
}

impl LayerPages {
    /// The reason why the layer cannot be cut at a length that no rollback reaches; `None` if it can.
    pub fn uncut(&self, cut: &Cut<'_>) -> Option<&'static str> {
        if self.rule.is_some() {
            return Some("a policy evicts");
        }
        if self.codecs.iter().any(Option::is_some) {
            return Some("a codec packed its tokens");
        }
        if cut.pool.hits().is_some() {
            return Some("hits are counted");
        }
        let live = |head: &HeadPages| head.runs.iter().map(|(_, run)| run.live()).sum::<u32>();
        // Ordinals that are missing belong to evicted pages whose tokens were rolled back.
        let gaps = |head: &HeadPages| head.runs.iter().any(|(_, run)| run.entries.len() != run.next as usize);
        if self.heads.iter().any(|head| live(head) != self.filed || gaps(head)) {
            return Some("tokens were evicted, or left a window");
        }
        self.forgot(cut)
    }

    /// Why the experts of tokens that a ring of that length would have are not known, if they are not.
    pub fn forgot(&self, cut: &Cut<'_>) -> Option<&'static str> {
        let Cut { pool, shape, len } = *cut;
        let slack = pool.shape.store.ring.slack();
        let known = self.known_from(&pool.shape, shape, len).saturating_sub(slack);
        let forgot = pool.shape.config.experts > 1 && self.tags.from() > known - known % PAGE;
        forgot.then_some("the experts of tokens that left a window are forgotten")
    }

    /// Bytes that [`LayerPages::cut`] takes.
    pub fn cut_bytes(&self, cut: &Cut<'_>) -> u64 {
        let (left, missing) = (cut.left(), cut.missing(self));
        let pages: u64 = self
            .heads
            .iter()
            .zip(self.first_head..)
            .map(|(head, global)| {
                let ring = missing.clone().filter(|tile| head.tile(cut, *tile, global).is_none()).count();
                let away = head.runs.iter().filter(|(_, run)| run.cut_away(left)).count();
                (ring + away) as u64
            })
            .sum();
        pages * cut.shape.layout.bytes()
    }

    /// The layer at the cut, on pages of `pages` and pages shared with this layer. [`LayerPages::uncut`] must have returned `None`.
    ///
    /// # Errors
    /// A failed device or lower tier.
    pub fn cut(&self, cut: &Cut<'_>, pages: &mut Reservation) -> Result<LayerPages, Error> {
        let inner = &cut.pool.shape;
        let heads = self.heads.iter().zip(self.first_head..);
        let heads = heads.map(|(head, global)| head.cut(cut, (global, self.first_tile), pages));
        let heads = heads.collect::<Result<Vec<HeadPages>, Error>>()?;
        // Tokens of the new ring that this layer filed, or filed ahead, are shared in those pages. Pages filed ahead for fewer tokens than
        // have left the ring since have other tokens after that point.
        let ahead = self.sealed.as_ref().filter(|sealed| sealed.until > self.filed);
        let known = ahead.map_or(self.filed, |sealed| sealed.until);
        let from = |h: usize, c: usize| heads[h].runs[c].next_place(false).0;
        let runs = self.heads.iter().map(|head| &head.runs);
        let sealed = Sealed::of(cut.len.min(known), runs, from, ahead);
        let sealed = (sealed.until > cut.left()).then_some(sealed);
        Ok(LayerPages {
            heads,
            first_head: self.first_head,
            store: self.store,
            first_tile: cut.first_tile(),
            filed: cut.left(),
            tags: self.tags.first(inner, cut.len),
            own_until: self.own_until,
            originals: VecDeque::new(),
            aging: VecDeque::new(),
            codecs: self.codecs.clone(),
            undo: Undo::default(),
            rule: None,
            past: Past::default(),
            owed: Vec::new(),
            sealed,
        })
    }
}

impl LayerPages {
    /// Replaces pages of tokens before the cut by those of `other`, a layer with the same tokens there.
    pub fn share(&mut self, other: &LayerPages, cut: &Cut<'_>) {
        self.sealed = None;
        let (first, other_first, heads) = (self.first_tile, other.first_tile, self.first_head..);
        for (h, (head, global)) in self.heads.iter_mut().zip(heads).enumerate() {
            let (theirs, codec) = (&other.heads[h], self.codecs[h].as_ref());
            for (tile, page) in
                (first..).zip(head.ring.pages_mut()).take_while(|(tile, _)| (tile + 1) * PAGE <= cut.len)
            {
                let ring = tile.checked_sub(other_first).and_then(|at| theirs.ring.get(at as usize));
                let same = ring.filter(|ring| ring.positions() == page.positions()).cloned();
                if let Some(same) = same.or_else(|| theirs.tile(cut, tile, global)) {
                    *page = same;
                }
            }
            for (c, run) in head.runs.iter_mut() {
                let sealed = other.sealed.as_ref();
                let ahead = |entry: &Entry, last| sealed?.page(h, c, entry.ordinal, entry.fill - 1, last);
                for i in (0..run.entries.len()).filter(|i| run.entries[*i].fill > 0).collect::<Vec<_>>() {
                    let entry = &run.entries[i];
                    let Some(last) = entry.last().filter(|last| *last < cut.len) else { continue };
                    let (known, ahead) = (theirs.runs[c].entry(entry.ordinal), ahead(entry, last));
                    run.entries[i].share(known, ahead, codec);
                }
            }
        }
    }
}

impl Entry {
    /// Takes the page of an entry with the same tokens, or the page `ahead` in which they were filed ahead.
    fn share(&mut self, known: Option<&Entry>, ahead: Option<&Page>, codec: Option<&HeadCodec>) {
        let positions =
            |of: &Entry| -> Vec<_> { (0..self.fill).map(|lane| of.position(codec, lane)).collect() };
        let equal = known.is_some_and(|known| known.fill >= self.fill && positions(known) == positions(self));
        let written = ..self.fill as usize;
        match (&mut self.held, known.filter(|_| equal).map(|known| &known.held)) {
            (PageState::Open(page), Some(PageState::Open(other))) => *page = other.clone(),
            (PageState::Open(page), _) => {
                let same = |other: &&Page| other.positions()[written] == page.positions()[written];
                if let Some(other) = ahead.filter(same) {
                    *page = other.clone();
                }
            }
            (PageState::Closed(own), Some(PageState::Closed(other)))
                if (own.by, own.last, own.old) == (other.by, other.last, other.old) =>
            {
                own.packed = other.packed.clone();
            }
            _ => {}
        }
    }
}

impl HeadPages {
    /// `global` is the head's index over all layers, `tiles` the first tile of this head's ring.
    fn cut(
        &self,
        cut: &Cut<'_>,
        (global, tiles): (u32, u32),
        pages: &mut Reservation,
    ) -> Result<HeadPages, Error> {
        let runs = self.runs.map(|c, run| run.cut(cut, (global, c), pages))?;
        let mut ring = VecDeque::new();
        for tile in cut.first_tile()..cut.len.div_ceil(PAGE) {
            ring.push_back(match tile.checked_sub(tiles) {
                Some(at) => self.ring[at as usize].clone(),
                None => match self.tile(cut, tile, global) {
                    Some(page) => page,
                    None => self.gathered(cut, tile, global, pages)?,
                },
            });
        }
        let ring = self.ring.of_pages(ring);
        Ok(HeadPages { ring, runs, own: self.own.clone(), ghosts: Default::default() })
    }

    /// A page of a run with the tokens of a ring tile at the same lanes, on the same shard.
    fn tile(&self, cut: &Cut<'_>, tile: u32, global: u32) -> Option<Page> {
        let shard = cut.pool.shape.shard_of(Place::Ring, tile, global);
        self.runs.iter().find_map(|(_, run)| {
            let i = run.first_of(tile * PAGE);
            let Entry { held: PageState::Open(page), fill: PAGE, .. } = run.entries.get(i)? else {
                return None;
            };
            let is = page.positions().iter().zip(tile * PAGE..).all(|(position, wanted)| *position == wanted);
            (is && page.shard() == shard).then(|| page.clone())
        })
    }

    /// Copies the tokens of a tile from their pages to a new page.
    fn gathered(
        &self,
        cut: &Cut<'_>,
        tile: u32,
        global: u32,
        pages: &mut Reservation,
    ) -> Result<Page, Error> {
        let layout = &cut.shape.layout;
        let shard = cut.pool.shape.shard_of(Place::Ring, tile, global);
        let mut target = pages.take(shard, layout.words(), Near::Any)?;
        let positions = tile * PAGE..(tile + 1) * PAGE;
        let near = |entry: &&Entry| entry.position(None, 0).is_some_and(|first| first < positions.end);
        let sources = || {
            self.runs.iter().flat_map(|(_, run)| {
                let from = run.first_of(positions.start).saturating_sub(1);
                run.entries.range(from..).take_while(near)
            })
        };
        let away = |entry: &Entry| matches!(entry.held, PageState::Away(_));
        // A device copies tokens between its pages; pages of lower tiers are assembled on the host.
        let mut words = sources().any(away).then(|| vec![u32::MAX; layout.words() as usize]);
        for entry in sources() {
            let lanes = (0..entry.fill).filter_map(|lane| Some((lane, entry.position(None, lane)?)));
            let lanes = lanes.filter(|(_, position)| positions.contains(position));
            match (&mut words, &entry.held) {
                (None, PageState::Open(page)) => {
                    lanes.for_each(|(lane, at)| pages.copy(layout, page, lane, &mut target, at % PAGE));
                }
                (Some(words), PageState::Open(page)) => {
                    let read = page.fetch()?;
                    lanes.for_each(|(lane, at)| layout.copy(&read, lane, words, at % PAGE));
                }
                (Some(words), PageState::Away(Away { slot, .. })) => {
                    let read = slot.read()?;
                    lanes.for_each(|(lane, at)| layout.copy(&read, lane, words, at % PAGE));
                }
                _ => {}
            }
        }
        if let Some(words) = words {
            target.put(&words)?;
        }
        Ok(target)
    }
}

impl Run {
    /// Index of the first page whose first token is at `position` or later. `O(log pages)`.
    fn first_of(&self, position: u32) -> usize {
        self.entries.partition_point(|entry| entry.position(None, 0).is_some_and(|first| first < position))
    }

    /// Number of tokens before `left` in page `i`.
    fn tokens_of(&self, i: usize, left: u32) -> u32 {
        let entry = &self.entries[i];
        let before = |lane: &u32| entry.position(None, *lane).is_some_and(|position| position < left);
        (0..entry.fill).take_while(before).count() as u32
    }

    /// Whether the page that is partial after a cut at `left` tokens is in a lower tier.
    fn cut_away(&self, left: u32) -> bool {
        let Some(last) = self.first_of(left).checked_sub(1) else { return false };
        let entry = &self.entries[last];
        matches!(entry.held, PageState::Away(_)) && self.tokens_of(last, left) < entry.fill
    }

    /// The run with the tokens that are outside the ring at the cut; it is run `c` of head `global`.
    fn cut(&self, cut: &Cut<'_>, (global, c): (u32, usize), pages: &mut Reservation) -> Result<Run, Error> {
        let left = cut.left();
        let pages_of_it = self.first_of(left);
        // Nothing was evicted and there is no policy state, so whole pages are unchanged.
        let mut entries = self.entries.first(pages_of_it);
        let Some(last) = pages_of_it.checked_sub(1) else { return Ok(Run::default()) };
        // All tokens of a page come before those of the next.
        let fill = self.tokens_of(last, left);
        if fill < entries[last].fill {
            let entry = &mut entries[last];
            (entry.fill, entry.live, entry.bounds) = (fill, filled(fill), None);
            if let PageState::Away(Away { slot, .. }) = &entry.held {
                let shard = cut.pool.shape.shard_of(run_place(c), entry.ordinal, global);
                let mut page = pages.take(shard, slot.words() as u32, Near::Any)?;
                page.put(&slot.read()?)?;
                entry.held = PageState::Open(page);
            }
        }
        Ok(Run::of_entries(entries))
    }
}
