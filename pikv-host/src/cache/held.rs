//! The pages that a sequence holds, listed and read.

use crate::base::error::Error;
use crate::base::ids::{PageId, Place, chain_place};
use crate::cache::sequence::Sequence;
use crate::codec::HeadCodec;
use crate::memory::arena::Page;
use crate::pages::entry::{Away, Entry, Held};
use crate::tiers::Stored;
use pikv_core::attend::filled;
use pikv_core::page::{PAGE, Position};
use std::sync::Arc;

/// One page that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageInfo {
    /// Which one.
    pub id: PageId,
    /// Tokens in it that belong to the sequence; 0 if all were evicted, and it is kept as a rollback would bring them back.
    pub tokens: u32,
    /// Position of the first of them, or of those that would come back.
    pub first: Position,
    /// Position of the last of them.
    pub last: Position,
    /// The tier that it lies in: 0 is the first, which the budget bounds.
    pub tier: usize,
    /// The shard that holds it, or would in the first tier.
    pub shard: u32,
    /// Whether another sequence reads it too.
    pub shared: bool,
    /// Whether tokens will be added to it: the last page of a run, or of the ring, before it is full.
    pub open: bool,
    /// Whether its tokens were packed by the head's codec.
    pub packed: bool,
    /// Whether they were packed again, by the codec of [`CacheConfig::age`](crate::CacheConfig::age).
    pub aged: bool,
    /// Whether a rank of a fabric holds it, and not this process.
    pub remote: bool,
    /// Bytes that it holds, with the original of a packed page while that can still be asked for.
    pub bytes: u64,
}

impl Sequence {
    /// The pages of a layer's KV head that are held, in whatever tier: sinks, experts, ring, each in order.
    ///
    /// The first pages of the ring also list tokens that left it, until their page is free: those below
    /// `next_position - in_ring`, which attention reads from the pool (or not at all, if they were evicted there). So the positions of
    /// all pages are more than [`Sequence::resident`] tokens.
    ///
    /// # Errors
    /// No such layer or KV head.
    pub fn pages(&self, layer: usize, kv_head: usize) -> Result<impl Iterator<Item = PageInfo>, Error> {
        let (held, leaked) = match self.stepping {
            false => (Some(self.held(layer, kv_head)?), Vec::new()),
            true => (None, self.repaired().held(layer, kv_head)?.collect()),
        };
        Ok(held.into_iter().flatten().chain(leaked))
    }

    /// [`Sequence::pages`] with what a step wrote.
    fn held(&self, layer: usize, kv_head: usize) -> Result<impl Iterator<Item = PageInfo>, Error> {
        let head = self.head(layer, kv_head)?;
        let state = &self.layers[layer];
        let (first_tile, codec) = (state.first_tile, state.codecs[kv_head].as_ref());
        let global_head = state.first_head + kv_head as u32;
        let in_common = state.is_shared();
        let chains = head.chains.iter().flat_map(move |(c, chain)| {
            chain.entries.iter().enumerate().filter_map(move |(i, entry)| {
                let id = PageId { place: chain_place(c), ordinal: entry.ordinal };
                let away = match &entry.held {
                    Held::Away(away) => away.slot.kept().map(|kept| kept.rank()),
                    _ => None,
                };
                let shard =
                    away.unwrap_or_else(|| self.inner.shape.shard_of(id.place, id.ordinal, global_head));
                Some(Found::new(entry, codec)?.info(id, shard, in_common || chain.shares(i)))
            })
        });
        let ring = head.ring.iter().enumerate().filter_map(move |(i, page)| {
            let tile = first_tile + i as u32;
            let fill = self.len.saturating_sub(tile * PAGE).min(PAGE);
            let id = PageId { place: Place::Ring, ordinal: tile };
            (fill > 0).then(|| Found::ring(page, fill).info(id, page.shard(), in_common))
        });
        Ok(chains.chain(ring))
    }

    /// The tokens of a resident page: the lane, where [`PageMass`](crate::report::PageMass) has its weight, and the position. A token
    /// changes its page when it leaves the ring, and when pages that a policy has thinned out are put together.
    ///
    /// # Errors
    /// No such layer, KV head or page.
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

    /// Key and value of the token at `lane` of a resident page, as stored, decoded to f32 (of a packed page, what its codec
    /// left of them). Of a page in a lower tier, the whole is read for it.
    ///
    /// # Errors
    /// No such layer, KV head or page, slices that do not have `k_dim` and `v_dim` elements, a device that fails, or
    /// [`Error::Tier`].
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
        let chain = match place {
            Place::Ring => {
                let at = ordinal.checked_sub(state.first_tile);
                let page = at.and_then(|at| head.ring.get(at as usize));
                let fill = self.len.saturating_sub(ordinal.saturating_mul(PAGE)).min(PAGE);
                return Ok(page.map(|page| Found::ring(page, fill)));
            }
            Place::Sinks => head.chains.get(0),
            Place::Expert(e) => head.chains.get(usize::from(e) + 1),
        };
        let entry = chain.and_then(|chain| chain.entry(ordinal));
        Ok(entry.and_then(|entry| Found::new(entry, state.codecs[kv_head].as_ref())))
    }
}

/// Where a page lies.
#[derive(Clone, Copy)]
enum At<'a> {
    Page(&'a Page),
    Slot(&'a Arc<Stored>),
}

/// A page that is there.
struct Found<'a> {
    at: At<'a>,
    live: u32,
    /// The lanes from the first to the last of which it reaches.
    spans: u32,
    /// Its codec and its last position, if it is packed.
    packed: Option<(&'a HeadCodec, u32)>,
    /// Whether it has room, and whether it was packed again.
    open: bool,
    aged: bool,
    bytes: u64,
}

impl<'a> Found<'a> {
    /// A page of the ring with so many tokens.
    fn ring(page: &'a Page, fill: u32) -> Found<'a> {
        let (live, open, bytes) = (filled(fill), fill < PAGE, page.bytes());
        Found { at: At::Page(page), live, spans: live, packed: None, open, aged: false, bytes }
    }

    fn new(entry: &'a Entry, codec: Option<&'a HeadCodec>) -> Option<Found<'a>> {
        let packed = match &entry.held {
            Held::Closed(closed) => codec.map(|codec| (closed.newest(codec).1, closed.last)),
            Held::Away(Away { by: Some(_), .. }) => codec.zip(entry.last()),
            _ => None,
        };
        let (at, bytes) = match &entry.held {
            Held::Away(Away { slot, .. }) => (At::Slot(slot), slot.bytes()),
            _ => (At::Page(entry.page()?), entry.bytes()),
        };
        // Lanes that lost their token for good may hold another one's position by now.
        let spans = if entry.live != 0 { entry.live } else { entry.pending };
        if spans == 0 {
            return None;
        }
        let aged = matches!(&entry.held, Held::Closed(closed) if closed.old);
        let open = matches!(entry.held, Held::Open(_)) && entry.fill < PAGE;
        Some(Found { at, live: entry.live, spans, packed, open, aged, bytes })
    }

    fn position(&self, lane: u32) -> Position {
        match (self.at, self.packed) {
            (At::Slot(slot), _) => Position(slot.positions[lane as usize]),
            (At::Page(page), Some((codec, last))) => codec.packed.position(page.words(), lane, last),
            (At::Page(page), None) => Position(page.words()[lane as usize]),
        }
    }

    /// `in_common` says that a fork has the list in which it stands.
    fn info(&self, id: PageId, shard: u32, in_common: bool) -> PageInfo {
        let (tier, shard, shared, remote) = match self.at {
            At::Page(page) => (0, page.shard(), page.is_shared(), false),
            At::Slot(slot) => (slot.level.index, shard, Arc::strong_count(slot) > 1, slot.kept().is_some()),
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
