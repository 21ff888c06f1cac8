//! A layer of a sequence: filing of tokens that leave the ring in runs of pages, and its undo. The rule that assigns
//! a token to a run is in [`sharing`](crate::config::sharing).

pub mod save;

use crate::base::deque::first_if;
use crate::base::error::Error;
use crate::config::HeadCodecs;
use crate::config::shape::CacheShape;
use crate::config::sharing::Sharing;
use crate::memory::arena::{Page, Reservation};
use crate::memory::pool::Pool;
use crate::pages::entry::{Entry, PageState};
use crate::pages::ghosts::Ghosts;
use crate::pages::head::{Filed, HeadPages};
use crate::pages::past::Past;
use crate::pages::runs::Runs;
use crate::pages::sealed::Sealed;
use crate::pages::tags::Tags;
use crate::pages::tiles::Tiles;
use crate::policy::rule::Rule;
use crate::policy::state::TokenStates;
use pikv_core::page::{PAGE, Position, Slot};
use pikv_core::plan::{LayerShape, StoreShape};
use pikv_lanes::fetch;
use std::collections::VecDeque;
use std::sync::Arc;

/// Location of a packed page that has another form too, and the position that packed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Original {
    head: usize,
    run: usize,
    ordinal: u32,
    by: u32,
}

/// Shared pages that a step copied before it wrote to them: the head, the run (or the ring if `None`), and the original, which is put
/// back if the step is dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Undo(Vec<(usize, Option<usize>, Page)>);

impl Undo {
    /// Notes the original of a page of a head's ring, if it was copied.
    pub fn note_ring(&mut self, head: usize, original: Option<Page>) {
        self.0.extend(original.map(|page| (head, None, page)));
    }

    /// Notes the original of a page of a run, if it was copied.
    fn note_run(&mut self, head: usize, run: usize, original: Option<Page>) {
        self.0.extend(original.map(|page| (head, Some(run), page)));
    }

    /// Drops the originals, because the step was committed.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Bytes of the list, from its capacity.
    fn table_bytes(&self) -> usize {
        self.0.capacity() * size_of::<(usize, Option<usize>, Page)>()
    }
}

/// One layer of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct LayerPages {
    pub heads: Vec<HeadPages>,
    /// Number of KV heads in the layers before this one.
    pub first_head: u32,
    /// Rules by which it takes pages.
    pub store: StoreShape,
    /// First tile of each head's ring.
    pub first_tile: u32,
    /// Tokens that left the ring: positions `0..filed` are in the runs, or evicted.
    pub filed: u32,
    /// Experts of tokens, up to those of the step under way.
    pub tags: Tags,
    /// Tokens before this position are in runs of their own experts.
    pub own_until: u32,
    /// Packed pages with an original, by ascending `by`.
    pub originals: VecDeque<Original>,
    /// Pages with both the first and the second codec's form, by ascending `by`.
    pub aging: VecDeque<Original>,
    /// The heads' codecs.
    pub codecs: HeadCodecs,
    /// Shared pages that the step under way copied.
    pub undo: Undo,
    /// Eviction of the layer.
    pub rule: Option<Arc<Rule>>,
    /// Evictions and compactions that a rollback undoes.
    pub past: Past,
    /// Heads and runs whose compaction failed, to try again.
    pub owed: Vec<(usize, usize)>,
    /// Pages in which tokens of the ring were filed ahead.
    pub sealed: Option<Sealed>,
}

impl LayerPages {
    pub fn new(
        shape: &LayerShape,
        first_head: u32,
        store: StoreShape,
        codecs: HeadCodecs,
        rule: Option<Arc<Rule>>,
    ) -> LayerPages {
        let own = rule.as_ref().map_or(0, |rule| rule.head_words * rule.versions);
        let states = rule.as_deref().map_or_else(TokenStates::default, Rule::kept);
        let kept = rule.as_ref().map_or((0, 0), |rule| (rule.words, rule.versions));
        let runs = Runs::new(store.experts, kept);
        let head =
            HeadPages { ring: Tiles::new(states), runs, own: vec![0.0; own], ghosts: Ghosts::default() };
        LayerPages {
            heads: vec![head; shape.kv_heads as usize],
            first_head,
            store,
            first_tile: 0,
            filed: 0,
            tags: Tags::default(),
            own_until: 0,
            originals: VecDeque::new(),
            aging: VecDeque::new(),
            codecs,
            undo: Undo::default(),
            rule,
            past: Past::default(),
            owed: Vec::new(),
            sealed: None,
        }
    }

    /// Index of the run for the token at `position`; `None` if no row can see it after it leaves the ring.
    pub fn run_at(&self, inner: &CacheShape, shape: &LayerShape, position: u32) -> Option<usize> {
        if position < self.store.sinks {
            return Some(0);
        }
        let run = || self.sharing(inner, shape).run(self.home(inner, position), position);
        self.store.files(shape, position).then(|| 1 + usize::from(run()))
    }

    /// The runs in which it files tokens.
    pub fn sharing(&self, inner: &CacheShape, shape: &LayerShape) -> Sharing {
        inner.sharing(shape, self.own_until)
    }

    /// Experts of the token at `position`, first choice first; none if they are not known. Expert 0 for a model with one
    /// expert.
    pub fn experts(&self, inner: &CacheShape, position: u32) -> impl Iterator<Item = u16> + use<'_> {
        self.tags.experts(inner, position)
    }

    /// Home expert of the token at `position`; 0 for a model with one expert.
    pub fn home(&self, inner: &CacheShape, position: u32) -> u16 {
        self.tags.home(inner, position)
    }

    /// Adds the experts of the step's tokens, `[tokens][top_k]`, under which they are filed.
    pub fn route(&mut self, chosen: &[u16]) {
        self.tags.add(chosen);
    }

    /// Files the tokens before position `left`; their experts must be known.
    pub fn file(
        &mut self,
        inner: &CacheShape,
        shape: &LayerShape,
        left: u32,
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        self.file_tokens(inner, shape, left, false, pages)?;
        self.age(inner, shape, pages)
    }

    /// [`LayerPages::file`] without the second codec. `aliased` allows a page of the ring to be a page of a run too if both have the same
    /// tokens at the same lanes; such a page must not be written.
    pub fn file_tokens(
        &mut self,
        inner: &CacheShape,
        shape: &LayerShape,
        left: u32,
        aliased: bool,
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        let sealed = self.sealed.take();
        let filed = self.file_until(inner, shape, left, (sealed.as_ref(), aliased), pages);
        self.sealed = sealed;
        filed
    }

    /// Prefetches the tables of the heads' newest pages: a pointer of every head, then the next of every head, so that the misses of the
    /// heads overlap.
    pub fn fetch_tables(&self) {
        self.heads.iter().for_each(fetch);
        for head in &self.heads {
            head.ring.front().into_iter().chain(head.ring.back()).for_each(fetch);
        }
        for step in 0..5 {
            self.heads.iter().for_each(|head| head.runs.fetch_newest(step));
        }
    }

    fn file_until(
        &mut self,
        inner: &CacheShape,
        shape: &LayerShape,
        left: u32,
        (sealed, aliased): (Option<&Sealed>, bool),
        pages: &mut Reservation,
    ) -> Result<(), Error> {
        // More tokens share what they miss. In a step of many sequences, the caches have lost the tables since the ring was written.
        let fetches = left.checked_sub(self.filed) == Some(1) && inner.config.backend.is_cpu();
        if fetches {
            self.fetch_tables();
        }
        while self.filed < left {
            let position = self.filed;
            if let Some(c) = self.run_at(inner, shape, position) {
                let home = (c > 0).then(|| self.home(inner, position));
                for h in 0..self.heads.len() {
                    // If a head runs out of memory, the token is removed from the heads before it, so that all heads agree.
                    let mut shared = None;
                    let (head, first_tile) = (self.first_head + h as u32, self.first_tile);
                    if let Some(next) = self.heads.get(h + 1).filter(|_| fetches) {
                        let Slot { tile, lane } = Position(position).into();
                        next.fetch(&shape.layout, c, ((tile - first_tile) as usize, lane));
                    }
                    let ahead = sealed.map(|sealed| (sealed, h));
                    let token =
                        Filed { inner, shape, run: c, home, position, head, first_tile, ahead, aliased };
                    let codec = self.codecs[h].as_ref().filter(|_| c > 0);
                    let filed = self.heads[h].file(&token, codec, pages, &mut shared);
                    self.undo.note_run(h, c, shared);
                    if let Err(error) = filed {
                        for head in &mut self.heads[..h] {
                            if let Some((page, lane)) = head.runs[c].newest() {
                                pages.forget_copy(page, lane);
                            }
                            head.runs[c]
                                .packed_by(position)
                                .for_each(|(_, packed)| pages.forget_pack(packed));
                            // A repeated append needs these bytes.
                            pages.regain(head.runs[c].take_back(position));
                        }
                        while self.originals.back().is_some_and(|kept| kept.by == position) {
                            self.originals.pop_back();
                        }
                        return Err(error);
                    }
                    let packed = self.heads[h].runs[c].packed_by(position);
                    let original = |(ordinal, _)| Original { head: h, run: c, ordinal, by: position };
                    self.originals.extend(packed.map(original));
                }
            }
            self.filed += 1;
        }
        Ok(())
    }

    /// Packs pages again that are due.
    fn age(&mut self, inner: &CacheShape, shape: &LayerShape, pages: &mut Reservation) -> Result<(), Error> {
        let known = self.aging.len();
        for (head, state) in self.heads.iter_mut().enumerate() {
            let Some(codec) = self.codecs[head].as_ref().filter(|codec| codec.aged.is_some()) else {
                continue;
            };
            for (c, run) in state.runs.experts_mut() {
                let told = |ordinal, by| self.aging.push_back(Original { head, run: c, ordinal, by });
                run.age(codec, inner.config.lanes, &shape.layout, self.filed, pages, told)?;
            }
        }
        self.aging.make_contiguous()[known..].sort_by_key(|page| page.by);
        Ok(())
    }

    /// Computes the bounds of full pages on a device, if the cache keeps bounds.
    ///
    /// # Errors
    /// A failed device. The next call computes the rest.
    pub fn bound(&mut self, inner: &CacheShape, shape: &LayerShape) -> Result<(), Error> {
        if let Some(device) = inner.config.backend.device().filter(|_| inner.config.key_bounds) {
            let (mut due, mut places) = (Vec::new(), Vec::new());
            // Positions and keys.
            let words = shape.layout.v_base() as usize;
            for (h, head) in self.heads.iter().enumerate() {
                for (c, run) in head.runs.experts() {
                    let newest = run.entries.iter().rev().take_while(|entry| entry.bounds.is_none());
                    for (entry, page) in newest.filter_map(|entry| Some((entry, entry.unbounded()?))) {
                        places.push((page.address(), words));
                        due.push((h, c, entry.ordinal));
                    }
                }
            }
            let heads = &mut self.heads;
            device.read_all(&places, |read| {
                for ((h, c, ordinal), words) in due.into_iter().zip(read.chunks_exact(words)) {
                    if let Some(entry) = heads[h].runs[c].entry_mut(ordinal) {
                        let bounds = Entry::bounds_of(entry.live, words, &shape.layout, shape.rope.as_ref());
                        entry.bounds = Some(bounds);
                    }
                }
            })?;
        }
        Ok(())
    }

    /// Removes the tokens after `len`. [`LayerPages::rewind`] must have undone evictions before.
    pub fn truncate(&mut self, inner: &CacheShape, shape: &LayerShape, len: u32) {
        if let Some(sealed) = &mut self.sealed {
            sealed.until = sealed.until.min(len);
        }
        let left = inner.store.ring.left(len);
        while self.filed > left {
            self.filed -= 1;
            if let Some(c) = self.run_at(inner, shape, self.filed) {
                let position = self.filed;
                self.heads.iter_mut().for_each(|head| head.runs[c].pop(position));
            }
        }
        while self.originals.back().is_some_and(|kept| kept.by >= self.filed) {
            self.originals.pop_back();
        }
        while self.aging.back().is_some_and(|page| page.by >= self.filed) {
            self.aging.pop_back();
        }
        for (head, codec) in self.heads.iter_mut().zip(self.codecs.iter()) {
            let Some(codec) = codec.as_ref().filter(|codec| codec.aged.is_some()) else { continue };
            head.runs.experts_mut().for_each(|(_, run)| run.rejuvenate(codec, self.filed));
        }
        let tiles = len.div_ceil(PAGE).saturating_sub(self.first_tile) as usize;
        for head in &mut self.heads {
            head.ring.truncate_tiles(tiles);
        }
        self.tags.truncate(inner, len);
    }

    /// Undoes a step: removes the tokens after `len`, and puts original pages back.
    pub fn abort(&mut self, inner: &CacheShape, shape: &LayerShape, len: u32) {
        self.truncate(inner, shape, len);
        // A copied page was not full, so it is the last of its run again once the step's tokens are removed; unless the page is one that
        // was filed ahead. The first copy is undone last.
        for (head, run, original) in self.undo.0.drain(..).rev() {
            let head = &mut self.heads[head];
            let page = match run {
                None => head.ring.newest_mut(),
                Some(c) => match head.runs[c].entries.back_mut() {
                    Some(Entry { held: PageState::Open(page), .. }) => Some(page),
                    _ => None,
                },
            };
            if let Some(page) = page.filter(|page| page.positions()[0] == original.positions()[0]) {
                *page = original;
            }
        }
    }

    /// Frees pages that no row sees and no rollback reaches at `len` tokens.
    pub fn release(&mut self, pool: &Pool, shape: &LayerShape, len: u32) {
        let ring = pool.shape.store.ring;
        let first = ring.tiles(len, len).start;
        while self.first_tile < first {
            for head in &mut self.heads {
                head.ring.pop_tile();
            }
            self.first_tile += 1;
        }
        let kept = ring.kept_from(len);
        self.sealed.take_if(|sealed| sealed.until <= kept);
        while let Some(&Original { head, run, ordinal, .. }) =
            self.originals.front().filter(|original| original.by < kept)
        {
            let entry = self.heads[head].runs[run].entry_mut(ordinal);
            if let Some(Entry { held: PageState::Closed(closed), .. }) = entry {
                closed.original = None;
            }
            self.originals.pop_front();
        }
        while let Some(Original { head, run, ordinal, .. }) = first_if(&mut self.aging, |page| page.by < kept)
        {
            let entry = self.heads[head].runs[run].entry_mut(ordinal);
            if let (Some(Entry { held: PageState::Closed(closed), .. }), Some(codec)) =
                (entry, &self.codecs[head])
            {
                closed.finish_aging(codec);
            }
        }
        while let Some((head, run)) = self.past.forget(len, ring.slack()) {
            self.tie(head, run);
        }
        self.tidy(pool, shape, len);
    }

    /// Frees pages that left the window, and settles evictions, as of `len` tokens. The result depends on no later token.
    pub fn tidy(&mut self, pool: &Pool, shape: &LayerShape, len: u32) {
        let ring = pool.shape.store.ring;
        if let Some(seen) = seen_from(&pool.shape, shape, len) {
            self.slide(seen, ring.kept_from(len), len, self.rule.is_some() && ring.slack() > 0);
        }
        // A rollback needs the experts known at its target; those of a partial tile stay, because bounds of its pages are still to be
        // computed.
        let known = self.known_from(&pool.shape, shape, len).saturating_sub(ring.slack());
        self.tags.forget(&pool.shape, known - known % PAGE);
        self.settle(pool, shape, len);
    }

    /// Frees pages with all tokens before `seen`, which no row sees at `len` tokens. Records them if `noted`, because a policy counts them.
    fn slide(&mut self, seen: u32, kept: u32, len: u32, noted: bool) {
        for h in 0..self.heads.len() {
            // Only full (or evicted) pages: the page in which a token is filed must not depend on when the window moved.
            let codec = self.codecs[h].as_ref();
            for (c, run) in self.heads[h].runs.experts_mut() {
                while let Some((entry, rows)) = run.slide(seen, kept, codec, noted) {
                    if noted {
                        self.past.note_slid((len, h, c), run.dead, entry, rows);
                    }
                }
                run.tighten();
            }
        }
    }

    /// First position with known experts at `len` tokens.
    pub fn known_from(&self, inner: &CacheShape, shape: &LayerShape, len: u32) -> u32 {
        let kept = inner.store.ring.kept_from(len);
        match (seen_from(inner, shape, len), &self.rule) {
            (Some(seen), _) => kept.min(seen),
            (None, Some(_)) => kept,
            (None, None) => 0,
        }
    }

    /// Bytes of the layer's lists, from their capacities. `O(experts + pages)`.
    pub fn table_bytes(&self) -> u64 {
        let head = |head: &HeadPages| {
            let own = head.own.capacity() * size_of::<f32>();
            head.ring.table_bytes() + own as u64 + head.ghosts.table_bytes() + head.runs.table_bytes()
        };
        let lists = self.heads.capacity() * size_of::<HeadPages>()
            + self.tags.bytes()
            + (self.originals.capacity() + self.aging.capacity()) * size_of::<Original>()
            + self.undo.table_bytes()
            + self.owed.capacity() * size_of::<(usize, usize)>();
        let sealed = self.sealed.as_ref().map_or(0, Sealed::table_bytes);
        lists as u64 + sealed + self.past.table_bytes() + self.heads.iter().map(head).sum::<u64>()
    }
}

/// First position in the window of any row that can still be computed: the oldest such row is at `len` less the rollback. `None` without
/// a window.
fn seen_from(inner: &CacheShape, shape: &LayerShape, len: u32) -> Option<u32> {
    Some(len.saturating_sub(shape.window?.saturating_add(inner.store.ring.slack())))
}
