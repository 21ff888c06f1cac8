//! Moves pages of a sequence between tiers.

use crate::base::error::Error;
use crate::base::ids::chain_place;
use crate::cache::inner::Inner;
use crate::cache::sequence::Sequence;
use crate::codec::HeadCodec;
use crate::memory::arena::Near;
use crate::pages::entry::{Away, Closed, Entry, Held};
use crate::tiers::ahead::Levels;
use crate::tiers::level::Level;
use pikv_core::page::PAGE;
use pikv_core::warp::LANES;
use std::ops::Range;
use std::sync::Arc;

/// A page in a lower tier, or one that may move there.
#[derive(Clone, Copy, Debug)]
struct Movable {
    /// Position of its last token.
    last: u32,
    layer: usize,
    head: usize,
    chain: usize,
    ordinal: u32,
    bytes: u64,
    /// Tier of the page.
    tier: usize,
}

impl Entry {
    /// Whether the page lies in the first tier and may be moved down: it takes no more tokens, no rollback to a length that keeps positions
    /// below `kept` changes it, and no other sequence holds it by itself, so moving it frees its bytes. The caller checks for shared lists
    /// and tied pages.
    fn may_go(&self, codec: Option<&HeadCodec>, kept: u32) -> bool {
        match &self.held {
            Held::Gone { .. } | Held::Away(_) => false,
            Held::Open(page) => {
                let done =
                    codec.is_none() && self.fill == PAGE && self.last().is_some_and(|last| last < kept);
                done && self.pending == 0 && !page.is_shared()
            }
            Held::Closed(Closed { packed, original, by, .. }) => {
                original.is_none() && *by < kept && self.pending == 0 && !packed.is_shared()
            }
        }
    }

    /// Moves the page to `level`; on an error it stays where it was.
    fn lower(&mut self, codec: Option<&HeadCodec>, level: &Arc<Level>) -> Result<(), Error> {
        let mut positions = [u32::MAX; LANES];
        for (lane, to) in (0..self.fill).zip(&mut positions) {
            *to = self.position(codec, lane).unwrap_or(u32::MAX);
        }
        let by = match &self.held {
            Held::Closed(closed) => Some(closed.by),
            Held::Away(away) => away.by,
            _ => None,
        };
        let slot = match &self.held {
            Held::Gone { .. } => return Ok(()),
            Held::Open(page) | Held::Closed(Closed { packed: page, .. }) => {
                level.put(&page.fetch()?, positions)?
            }
            Held::Away(Away { slot, .. }) => match slot.in_place() {
                Some(words) => level.put(words, positions)?,
                None => level.put(&slot.read()?, positions)?,
            },
        };
        self.held = Held::Away(Away { slot: Arc::new(slot), by });
        Ok(())
    }
}

impl Sequence {
    /// Pages of some layers that lie in lower tiers or may move there, oldest first.
    fn movable(&self, layers: Range<usize>) -> Vec<Movable> {
        let mut found = Vec::new();
        for layer in layers {
            // Pages of a layer shared with a fork may not move.
            let in_common = self.layers[layer].is_shared();
            let codecs = &self.layers[layer].codecs;
            for (head, state) in self.layers[layer].heads.iter().enumerate() {
                for (chain, run) in state.chains.experts() {
                    for (i, entry) in run.entries.iter().enumerate() {
                        let may_go = || {
                            let own = !in_common && !run.shares(i) && !run.is_tied(entry.ordinal);
                            own && entry.may_go(codecs[head].as_ref(), self.kept)
                        };
                        let (tier, bytes) = match &entry.held {
                            Held::Away(Away { slot, .. }) => (slot.level.index, slot.bytes()),
                            _ if may_go() => (0, entry.bytes()),
                            _ => continue,
                        };
                        let last = entry.last().unwrap_or(0);
                        let ordinal = entry.ordinal;
                        found.push(Movable { last, layer, head, chain, ordinal, bytes, tier });
                    }
                }
            }
        }
        found.sort_unstable_by_key(|page| (page.last, page.layer, page.head, page.chain));
        found
    }

    fn lower(&mut self, page: &Movable, level: &Arc<Level>) -> Result<(), Error> {
        let Sequence { layers, .. } = self;
        let codecs = layers[page.layer].codecs.clone();
        let chain = &mut layers[page.layer].heads[page.head].chains[page.chain];
        chain.entry_mut(page.ordinal).map_or(Ok(()), |entry| entry.lower(codecs[page.head].as_ref(), level))
    }

    /// Moves a page up to the first tier.
    fn raise(&mut self, page: &Movable) -> Result<(), Error> {
        let inner = self.inner.clone();
        let head = self.layers[page.layer].first_head + page.head as u32;
        let chain = &mut self.layers[page.layer].heads[page.head].chains[page.chain];
        let before = page.ordinal.checked_sub(1).and_then(|i| chain.entry(i)?.page()).cloned();
        let Some(entry) = chain.entry_mut(page.ordinal) else { return Ok(()) };
        let (Held::Away(Away { slot, by }), Some(last)) = (&entry.held, entry.last()) else { return Ok(()) };
        let shard = inner.shape.shard_of(chain_place(page.chain), page.ordinal, head);
        let (mut pages, near) = (inner.pool.arenas.reserve(slot.bytes())?, Near::next(before.as_ref()));
        let mut fresh = pages.take(shard, slot.words() as u32, near)?;
        match fresh.words_mut() {
            Some(words) if inner.shape.config.backend.is_cpu() => slot.read_into(words)?,
            _ => fresh.put(&slot.read()?)?,
        }
        entry.held = match *by {
            Some(by) => {
                Held::Closed(Closed { packed: fresh, original: None, last, by, old: false, next: None })
            }
            None => Held::Open(fresh),
        };
        Ok(())
    }

    /// Moves pages to lower tiers, the oldest first, each to the first tier with room, until `bytes` of the first tier are free or no more
    /// pages may move; returns the bytes freed. A page may move if it is full, no rollback reaches it (which depends on
    /// [`CacheConfig::ring`](crate::CacheConfig::ring) and [`CacheConfig::rollback`](crate::CacheConfig::rollback)) and no fork shares it.
    /// Attention reads moved pages as before. O(pages).
    ///
    /// # Errors
    /// [`Error::NoTiers`]; [`Error::Poisoned`]; [`Error::Tier`] if a tier failed and fewer than `bytes` were freed. Pages already moved
    /// stay there; no page is lost.
    pub fn demote(&mut self, bytes: u64) -> Result<u64, Error> {
        span!("demote", bytes = bytes);
        self.sound()?;
        self.repair();
        let inner = self.inner.clone();
        let levels = inner.pool.tiers.as_ref().ok_or(Error::NoTiers)?;
        let pages = self.movable(0..self.layers.len());
        let freed = lower_all(levels, &mut [self], pages.into_iter().map(|page| (0, page)).collect(), bytes)?;
        event!("demoted", bytes = freed);
        Ok(freed)
    }

    /// Moves pages from lower tiers to the first, the newest first, until `bytes` have moved or the budget is full; returns the bytes
    /// moved. O(pages).
    ///
    /// # Errors
    /// [`Error::NoTiers`]; [`Error::Poisoned`]; [`Error::Tier`] if a page could not be read, [`Error::OutOfMemory`]. Pages already moved
    /// stay there; no page is lost.
    pub fn promote(&mut self, bytes: u64) -> Result<u64, Error> {
        span!("promote", bytes = bytes);
        self.sound()?;
        self.repair();
        if self.inner.pool.tiers.is_none() {
            return Err(Error::NoTiers);
        }
        let mut came = 0;
        for page in self.movable(0..self.layers.len()).into_iter().rev().filter(|page| page.tier > 0) {
            if came >= bytes {
                break;
            }
            match self.raise(&page) {
                Ok(()) => came += page.bytes,
                Err(Error::OutOfBudget { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        event!("promoted", bytes = came);
        Ok(came)
    }

    /// Spreads the pages of some layers over the tiers by shares of their bytes: the newest `shares[0]` in the first tier, the next
    /// `shares[1]` in the tier beneath, and so on, as planned by `planner::flexgen`. Pages that may not move (see [`Sequence::demote`])
    /// stay in the first tier and do not count. Later steps and moves do not keep the shares. O(pages).
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::NoTiers`]; [`Error::Shares`] unless there is one share for each tier and they add up to 1;
    /// [`Error::TierFull`] or [`Error::OutOfBudget`] where a share does not fit beside other pages, [`Error::Tier`]. Pages already moved
    /// stay there; no page is lost.
    pub fn arrange(&mut self, layers: Range<usize>, shares: &[f64]) -> Result<(), Error> {
        self.sound()?;
        self.repair();
        let inner = self.inner.clone();
        if layers.start > layers.end || layers.end > self.layers.len() {
            return Err(Error::Layer { layer: layers.start.max(layers.end), layers: self.layers.len() });
        }
        let levels = inner.pool.tiers.as_ref().ok_or(Error::NoTiers)?;
        let sum: f64 = shares.iter().sum();
        let (got, tiers) = (shares.len(), levels.levels.len() + 1);
        let sound = shares.iter().all(|share| (0.0..=1.0).contains(share)) && (sum - 1.0).abs() <= 1e-6;
        if got != tiers || !sound {
            return Err(Error::Shares { got, tiers, sum });
        }
        let pages = self.movable(layers);
        let all: u64 = pages.iter().map(|page| page.bytes).sum();
        let mut before = 0;
        let mut moves = Vec::new();
        for page in pages.iter().rev() {
            // The middle of a page decides its tier.
            let at = (before as f64 + page.bytes as f64 / 2.0) / all as f64;
            before += page.bytes;
            let ends = shares.iter().scan(0.0, |end, share| {
                *end += share;
                Some(*end)
            });
            let last = shares.iter().rposition(|share| *share > 0.0).unwrap_or(0);
            moves.push((*page, ends.take_while(|end| *end <= at).count().min(last)));
        }
        // Pages move down first, to make room for pages that move up.
        for (page, to) in moves.iter().rev().filter(|(page, to)| *to > page.tier) {
            self.lower(page, &levels.levels[to - 1])?;
        }
        for (page, to) in moves.iter().filter(|(page, to)| *to < page.tier) {
            match to.checked_sub(1) {
                None => self.raise(page)?,
                Some(level) => self.lower(page, &levels.levels[level])?,
            }
        }
        Ok(())
    }

    /// Bytes of the sequence's pages in a tier, `1` being the first lower tier, including pages kept only for a rollback. A page shared
    /// with a fork counts in full.
    pub fn bytes_in_tier(&self, tier: usize) -> u64 {
        let heads = self.layers.iter().flat_map(|layer| &layer.heads);
        let entries = heads.flat_map(|head| head.chains.iter()).flat_map(|(_, chain)| &chain.entries);
        let past = self.layers.iter().flat_map(|layer| layer.past.pages());
        let bytes = entries.map(|entry| &entry.held).chain(past).filter_map(|held| match held {
            Held::Away(Away { slot, .. }) if slot.level.index == tier => Some(slot.bytes()),
            _ => None,
        });
        bytes.sum()
    }
}

/// Moves pages of `sequences`, each given with the index of its sequence, down in order until `bytes` are free; returns the bytes freed.
fn lower_all(
    levels: &Levels,
    sequences: &mut [&mut Sequence],
    pages: Vec<(usize, Movable)>,
    bytes: u64,
) -> Result<u64, Error> {
    let mut failed = vec![None; levels.levels.len()];
    let mut freed = 0;
    for (sequence, page) in pages.into_iter().filter(|(_, page)| page.tier == 0) {
        if freed >= bytes {
            return Ok(freed);
        }
        let mut tried = false;
        for (level, failed) in levels.levels.iter().zip(&mut failed) {
            // A tier that failed is not tried again in this call.
            if failed.is_some() {
                continue;
            }
            tried = true;
            match sequences[sequence].lower(&page, level) {
                Ok(()) => {
                    freed += page.bytes;
                    break;
                }
                // A smaller page may still fit.
                Err(Error::TierFull { .. }) => {}
                Err(error) => *failed = Some(error),
            }
        }
        if !tried {
            break;
        }
    }
    match failed.into_iter().flatten().next() {
        Some(error) if freed < bytes => Err(error),
        _ => Ok(freed),
    }
}

/// Moves pages down, the oldest of all `sequences` first, until `bytes` are free; `false` if too few could be freed. Moves nothing if all
/// movable pages together have fewer than `bytes`.
pub(crate) fn make_room(inner: &Inner, sequences: &mut [&mut Sequence], bytes: u64) -> Result<bool, Error> {
    let Some(levels) = &inner.pool.tiers else { return Ok(false) };
    let mut pages: Vec<(usize, Movable)> = Vec::new();
    for (i, sequence) in sequences.iter().enumerate() {
        let movable = sequence.movable(0..sequence.layers.len()).into_iter();
        pages.extend(movable.filter(|page| page.tier == 0).map(|page| (i, page)));
    }
    if pages.iter().map(|(_, page)| page.bytes).sum::<u64>() < bytes {
        return Ok(false);
    }
    pages.sort_by_key(|(_, page)| page.last);
    Ok(lower_all(levels, sequences, pages, bytes)? >= bytes)
}
