//! Lists and reads the pages of a sequence.

use crate::base::error::Error;
use crate::base::ids::{PageId, Place, run_place};
use crate::cache::sequence::Sequence;
use crate::codec::HeadCodec;
use crate::memory::arena::Page;
use crate::pages::entry::{Away, Entry, PageState};
use crate::tiers::StoredPage;
use pikv_core::attend::filled;
use pikv_core::page::{PAGE, Position};
use std::sync::Arc;

/// A page of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageInfo {
    /// Identity of the page.
    pub id: PageId,
    /// Tokens of the sequence in the page; 0 if all were evicted and the page is kept for a rollback.
    pub tokens: u32,
    /// Position of the first token; if `tokens` is 0, of the first that a rollback would restore.
    pub first: Position,
    /// Position of the last token, likewise.
    pub last: Position,
    /// Tier of the page; 0 is the first tier, limited by the budget.
    pub tier: usize,
    /// Shard of the page; for a page in a lower tier, its shard in the first tier.
    pub shard: u32,
    /// Whether another sequence shares the page.
    pub shared: bool,
    /// Whether the page takes more tokens: the last page of a run or of the ring, while it is not full.
    pub open: bool,
    /// Whether the head's codec packed its tokens.
    pub packed: bool,
    /// Whether the codec of [`CacheConfig::age`](crate::CacheConfig::age) packed them again.
    pub aged: bool,
    /// Whether the page lies on a rank of a fabric instead of in this process.
    pub remote: bool,
    /// Bytes of the page, including the unpacked original of a packed page while a rollback can still need it.
    pub bytes: u64,
}

impl Sequence {
    /// Lists the held pages of a layer's KV head, in all tiers: sinks, experts, ring, each in order.
    ///
    /// The first pages of the ring also list tokens that left it, until the page is freed: those below `next_position - in_ring`. Attention
    /// reads these from the pool, or not at all if they were evicted there. So the pages together list more than [`Sequence::resident`]
    /// tokens.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::KvHead`].
    pub fn pages(&self, layer: usize, kv_head: usize) -> Result<impl Iterator<Item = PageInfo>, Error> {
        let (held, leaked) = match self.stepping {
            false => (Some(self.held(layer, kv_head)?), Vec::new()),
            true => (None, self.repaired().held(layer, kv_head)?.collect()),
        };
        Ok(held.into_iter().flatten().chain(leaked))
    }

    /// [`Sequence::pages`], including tokens of a step under way.
    fn held(&self, layer: usize, kv_head: usize) -> Result<impl Iterator<Item = PageInfo>, Error> {
        let head = self.head(layer, kv_head)?;
        let state = &self.layers[layer];
        let (first_tile, codec) = (state.first_tile, state.codecs[kv_head].as_ref());
        let global_head = state.first_head + kv_head as u32;
        let in_common = state.is_shared();
        let runs = head.runs.iter().flat_map(move |(c, run)| {
            run.entries.iter().enumerate().filter_map(move |(i, entry)| {
                let id = PageId { place: run_place(c), ordinal: entry.ordinal };
                let away = match &entry.held {
                    PageState::Away(away) => away.slot.rank_page().map(|kept| kept.rank()),
                    _ => None,
                };
                let shard =
                    away.unwrap_or_else(|| self.inner.shape.shard_of(id.place, id.ordinal, global_head));
                Some(Found::new(entry, codec)?.info(id, shard, in_common || run.shares(i)))
            })
        });
        let ring = head.ring.iter().enumerate().filter_map(move |(i, page)| {
            let tile = first_tile + i as u32;
            let fill = self.len.saturating_sub(tile * PAGE).min(PAGE);
            let id = PageId { place: Place::Ring, ordinal: tile };
            (fill > 0).then(|| Found::ring(page, fill).info(id, page.shard(), in_common))
        });
        Ok(runs.chain(ring))
    }

    /// The tokens of a held page: the lane, which indexes the weights of [`PageMass`](crate::report::PageMass), and the position. A token
    /// moves to another page when it leaves the ring, and when pages that a policy has thinned out are merged.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::KvHead`], [`Error::NoPage`].
    pub fn positions(
        &self,
        layer: usize,
        kv_head: usize,
        page: PageId,
    ) -> Result<impl Iterator<Item = (u32, Position)>, Error> {
        let missing = Error::NoPage { layer, kv_head, page };
        let found = self.find(layer, kv_head, page)?.ok_or(missing.clone())?;
        let live = match self.stepping {
            false => found.live,
            true => self.repaired().find(layer, kv_head, page)?.ok_or(missing)?.live,
        };
        Ok((0..PAGE).filter(move |lane| live >> lane & 1 == 1).map(move |lane| (lane, found.position(lane))))
    }

    /// Copies the key and value of the token at `lane` of a held page, decoded to f32 (of a packed page: with the loss of its codec), and
    /// returns the position. A page in a lower tier is read as a whole.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::KvHead`], [`Error::NoPage`], [`Error::Length`] for slices that do not have `k_dim` and `v_dim` elements,
    /// [`Error::Device`], [`Error::Tier`].
    pub fn read(
        &self,
        layer: usize,
        kv_head: usize,
        page: PageId,
        lane: u32,
        key: &mut [f32],
        value: &mut [f32],
    ) -> Result<Position, Error> {
        let layout = self.inner.shape.layer(layer)?.layout;
        let length =
            |what, got, expected: u32, shape| Error::Length { what, got, expected: expected as usize, shape };
        if key.len() != layout.k_dim as usize {
            return Err(length("key", key.len(), layout.k_dim, "k_dim"));
        }
        if value.len() != layout.v_dim as usize {
            return Err(length("value", value.len(), layout.v_dim, "v_dim"));
        }
        let missing = Error::NoPage { layer, kv_head, page };
        let found = self.find(layer, kv_head, page)?.ok_or_else(|| missing.clone())?;
        let live = match self.stepping {
            false => found.live,
            true => self.repaired().find(layer, kv_head, page)?.map_or(0, |found| found.live),
        };
        if lane >= PAGE || live >> lane & 1 == 0 {
            return Err(missing);
        }
        let (fetched, away);
        let words: &[u32] = match found.at {
            At::Page(page) => {
                fetched = page.fetch()?;
                &fetched
            }
            At::Slot(slot) => match slot.in_place() {
                Some(words) => words,
                None => {
                    away = slot.read()?;
                    &away
                }
            },
        };
        match found.packed {
            Some((codec, last)) => Ok(codec.read(words, lane, last, key, value)),
            None => {
                layout.read_key(words, lane, key);
                layout.read_value(words, lane, value);
                layout.position(words, lane).ok_or(missing)
            }
        }
    }

    fn find(&self, layer: usize, kv_head: usize, page: PageId) -> Result<Option<Found<'_>>, Error> {
        let head = self.head(layer, kv_head)?;
        let PageId { place, ordinal } = page;
        let state = &self.layers[layer];
        let run = match place {
            Place::Ring => {
                let at = ordinal.checked_sub(state.first_tile);
                let page = at.and_then(|at| head.ring.get(at as usize));
                let fill = self.len.saturating_sub(ordinal.saturating_mul(PAGE)).min(PAGE);
                return Ok(page.map(|page| Found::ring(page, fill)));
            }
            Place::Sinks => head.runs.get(0),
            Place::Run(e) => head.runs.get(usize::from(e) + 1),
        };
        let entry = run.and_then(|run| run.entry(ordinal));
        Ok(entry.and_then(|entry| Found::new(entry, state.codecs[kv_head].as_ref())))
    }
}

/// Memory of a page.
#[derive(Clone, Copy)]
enum At<'a> {
    Page(&'a Page),
    Slot(&'a Arc<StoredPage>),
}

/// A held page.
struct Found<'a> {
    at: At<'a>,
    live: u32,
    /// Lanes that `first` and `last` of [`PageInfo`] are taken from.
    spans: u32,
    /// Codec and last position, if the page is packed.
    packed: Option<(&'a HeadCodec, u32)>,
    /// Whether it takes more tokens.
    open: bool,
    aged: bool,
    bytes: u64,
}

impl<'a> Found<'a> {
    /// A ring page with `fill` tokens.
    fn ring(page: &'a Page, fill: u32) -> Found<'a> {
        let (live, open, bytes) = (filled(fill), fill < PAGE, page.bytes());
        Found { at: At::Page(page), live, spans: live, packed: None, open, aged: false, bytes }
    }

    fn new(entry: &'a Entry, codec: Option<&'a HeadCodec>) -> Option<Found<'a>> {
        let packed = match &entry.held {
            PageState::Closed(closed) => codec.map(|codec| (closed.newest(codec).1, closed.last)),
            PageState::Away(Away { by: Some(_), .. }) => codec.zip(entry.last()),
            _ => None,
        };
        let (at, bytes) = match &entry.held {
            PageState::Away(Away { slot, .. }) => (At::Slot(slot), slot.bytes()),
            _ => (At::Page(entry.page()?), entry.bytes()),
        };
        // A lane that lost its token for good may have the position of another token.
        let spans = if entry.live != 0 { entry.live } else { entry.pending };
        if spans == 0 {
            return None;
        }
        let aged = matches!(&entry.held, PageState::Closed(closed) if closed.old);
        let open = matches!(entry.held, PageState::Open(_)) && entry.fill < PAGE;
        Some(Found { at, live: entry.live, spans, packed, open, aged, bytes })
    }

    fn position(&self, lane: u32) -> Position {
        match (self.at, self.packed) {
            (At::Slot(slot), _) => Position(slot.positions[lane as usize]),
            (At::Page(page), Some((codec, last))) => codec.packed.position(page.words(), lane, last),
            (At::Page(page), None) => Position(page.words()[lane as usize]),
        }
    }

    /// `in_common`: whether a fork shares the list that the page is in.
    fn info(&self, id: PageId, shard: u32, in_common: bool) -> PageInfo {
        let (tier, shard, shared, remote) = match self.at {
            At::Page(page) => (0, page.shard(), page.is_shared(), false),
            At::Slot(slot) => {
                (slot.level.index, shard, Arc::strong_count(slot) > 1, slot.rank_page().is_some())
            }
        };
        let shared = in_common || shared;
        PageInfo {
            id,
            tokens: self.live.count_ones(),
            first: self.position(self.spans.trailing_zeros().min(PAGE - 1)),
            last: self.position(self.spans.checked_ilog2().unwrap_or(0)),
            tier,
            shard,
            shared,
            open: self.open,
            packed: self.packed.is_some(),
            aged: self.aged,
            remote,
            bytes: self.bytes,
        }
    }
}
