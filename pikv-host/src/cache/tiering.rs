//! Moves pages of sequences between tiers.

use crate::base::error::Error;
use crate::cache::Cache;
use crate::cache::inner::Inner;
use crate::cache::owners::{Moved, Moves, Owner, apply, movable};
use crate::cache::parkables::ParkingTurn;
use crate::cache::sequence::Sequence;
use crate::pages::entry::{Away, PageState};
use crate::tiers::Levels;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

impl Cache {
    /// Moves pages of several sequences to lower tiers, the oldest first, until `bytes` of the first tier are free or no more pages may
    /// move; returns the bytes freed. Unlike [`Sequence::demote`] of each, it also moves pages that only these sequences share, such as
    /// those of a prompt that all of them are forks of. Each page is written once, and the sequences share it in the lower tier. O(pages).
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::tiers::Tiers;
    /// use pikv::{Cache, CacheConfig, Dtype, LayerShape};
    ///
    /// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
    /// let page = layer.layout.bytes();
    /// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(32).tiers(Tiers::new().host(1 << 20)))?;
    /// let mut prompt = cache.sequence();
    /// let mut step = cache.begin([(&mut prompt, 320)])?;
    /// step.append(0, &[0.5; 320 * 4], &[0.25; 320 * 4])?;
    /// step.commit()?;
    ///
    /// let mut fork = prompt.fork();
    /// assert_eq!(prompt.demote(u64::MAX)?, 0);                // the fork reads the same pages
    /// assert_eq!(cache.demote([&mut prompt, &mut fork], u64::MAX)?, 9 * page);
    /// assert_eq!(cache.usage().tiers[0].bytes, 9 * page);     // the newest 32 tokens are in the ring
    /// # Ok::<(), pikv::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ForeignSequence`], and the errors of [`Sequence::demote`].
    pub fn demote<'s>(
        &self,
        sequences: impl IntoIterator<Item = &'s mut Sequence>,
        bytes: u64,
    ) -> Result<u64, Error> {
        span!("demote", bytes = bytes);
        if self.inner.pool.tiers.is_none() {
            return Err(Error::NoTiers);
        }
        let freed = self.inner.lower(&mut self.owners(sequences)?, bytes, false).done(bytes)?;
        event!("demoted", bytes = freed);
        Ok(freed)
    }

    /// Moves pages of several sequences from lower tiers to the first, the newest first, until `bytes` have moved or the budget is full;
    /// returns the bytes moved. A page that these sequences share is shared in the first tier too, where [`Sequence::promote`] of each
    /// would make a page for each. O(pages).
    ///
    /// # Errors
    /// [`Error::ForeignSequence`], and the errors of [`Sequence::promote`].
    pub fn promote<'s>(
        &self,
        sequences: impl IntoIterator<Item = &'s mut Sequence>,
        bytes: u64,
    ) -> Result<u64, Error> {
        span!("promote", bytes = bytes);
        if self.inner.pool.tiers.is_none() {
            return Err(Error::NoTiers);
        }
        let came = raise(&self.inner, &mut self.owners(sequences)?, bytes)?;
        event!("promoted", bytes = came);
        Ok(came)
    }

    /// Owners of pages that move in one turn.
    fn owners<'s>(
        &self,
        sequences: impl IntoIterator<Item = &'s mut Sequence>,
    ) -> Result<Vec<Owner<'s>>, Error> {
        Ok(self.sound(sequences)?.into_iter().map(Owner::first).collect())
    }

    /// Sequences of one call, repaired after leaked steps.
    ///
    /// # Errors
    /// [`Error::ForeignSequence`]; [`Error::Poisoned`].
    pub(super) fn sound<'s>(
        &self,
        sequences: impl IntoIterator<Item = &'s mut Sequence>,
    ) -> Result<Vec<&'s mut Sequence>, Error> {
        let sound = |(index, sequence): (usize, &'s mut Sequence)| {
            if !Arc::ptr_eq(&sequence.inner, &self.inner) {
                return Err(Error::ForeignSequence { index });
            }
            sequence.sound()?;
            sequence.repair();
            Ok(sequence)
        };
        sequences.into_iter().enumerate().map(sound).collect()
    }
}

impl Sequence {
    /// Moves pages to lower tiers, the oldest first, each to the first tier with room, until `bytes` of the first tier are free or no more
    /// pages may move; returns the bytes freed. Attention reads moved pages as before. O(pages).
    ///
    /// A page may move if it is full, no rollback reaches it (which depends on [`CacheConfig::ring`](crate::CacheConfig::ring) and
    /// [`CacheConfig::rollback`](crate::CacheConfig::rollback)), and no other sequence holds it, apart from the sequence's own checkpoints,
    /// prefixes of a [`PrefixIndex`](crate::prefix::PrefixIndex), and [`Parkable`](crate::save::Parkable) sequences that are not awake:
    /// these refer to the moved page too. Forks that share pages move them together with [`Cache::demote`].
    ///
    /// # Errors
    /// [`Error::NoTiers`]; [`Error::Poisoned`]; [`Error::Tier`] if a tier failed and fewer than `bytes` were freed. Pages already moved
    /// stay there; no page is lost.
    pub fn demote(&mut self, bytes: u64) -> Result<u64, Error> {
        self.cache().demote([self], bytes)
    }

    /// Moves pages from lower tiers to the first, the newest first, until `bytes` have moved or the budget is full; returns the bytes
    /// moved. A fork that shares a page still reads it in the lower tier. O(pages).
    ///
    /// # Errors
    /// [`Error::NoTiers`]; [`Error::Poisoned`]; [`Error::Tier`] if a page could not be read, [`Error::OutOfMemory`]. Pages already moved
    /// stay there; no page is lost.
    pub fn promote(&mut self, bytes: u64) -> Result<u64, Error> {
        self.cache().promote([self], bytes)
    }

    pub(super) fn cache(&self) -> Cache {
        Cache { inner: self.inner.clone() }
    }

    /// Spreads the pages of some layers over the tiers by shares of their bytes: the newest `shares[0]` in the first tier, the next
    /// `shares[1]` in the tier beneath, and so on, as planned by `planner::flexgen`. Pages that may not move (see [`Sequence::demote`]) or
    /// that other sequences hold stay in the first tier and do not count. Later steps and moves do not keep the shares. O(pages).
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
        let owners = &mut [Owner::first(self)];
        let plan = plan(owners, layers.clone(), shares);
        // Pages move down first, to make room for pages that move up; those with the longest way before others.
        let down = (1..tiers).rev().map(|to| (true, to));
        for (down, to) in down.chain((0..tiers - 1).map(|to| (false, to))) {
            let (mut moves, mut failed) = (Moves::new(), None);
            let mut pages = movable(owners, layers.clone());
            pages.retain(|page| {
                plan.get(&page.key) == Some(&to) && if down { page.tier < to } else { page.tier > to }
            });
            if !down {
                pages.reverse();
            }
            for page in &pages {
                let moved = match to.checked_sub(1) {
                    None => page.raised(&inner).map(Moved::Up),
                    Some(level) => page.lowered(&levels.levels[level]).map(Moved::PinnedCopy),
                };
                match moved {
                    Ok(moved) => drop(moves.insert(page.key, moved)),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            apply(owners, &moves);
            failed.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Bytes of the sequence's pages in a tier, `1` being the first lower tier, including pages kept only for a rollback. A page shared
    /// with a fork counts in full.
    pub fn bytes_in_tier(&self, tier: usize) -> u64 {
        let heads = self.layers.iter().flat_map(|layer| &layer.heads);
        let entries = heads.flat_map(|head| head.runs.iter()).flat_map(|(_, run)| &run.entries);
        let past = self.layers.iter().flat_map(|layer| layer.past.pages());
        let bytes = entries.map(|entry| &entry.held).chain(past).filter_map(|held| match held {
            PageState::Away(Away { slot, .. }) if slot.level.index == tier => Some(slot.bytes()),
            _ => None,
        });
        bytes.sum()
    }
}

/// Tier of each movable page, by its key, so that the newest `shares[0]` of the bytes lie in the first tier, and so on.
fn plan(owners: &[Owner<'_>], layers: Range<usize>, shares: &[f64]) -> HashMap<usize, usize> {
    let pages = movable(owners, layers);
    let all: u64 = pages.iter().map(|page| page.bytes).sum();
    let last = shares.iter().rposition(|share| *share > 0.0).unwrap_or(0);
    let mut before = 0;
    let mut plan = HashMap::new();
    for page in pages.iter().rev() {
        // The middle of a page decides its tier.
        let at = (before as f64 + page.bytes as f64 / 2.0) / all as f64;
        before += page.bytes;
        let ends = shares.iter().scan(0.0, |end, share| {
            *end += share;
            Some(*end)
        });
        plan.insert(page.key, ends.take_while(|end| *end <= at).count().min(last));
    }
    plan
}

/// Moves pages from lower tiers to the first, the newest first, until `bytes` have moved or the budget is full; returns the bytes moved.
fn raise(inner: &Inner, owners: &mut [Owner<'_>], bytes: u64) -> Result<u64, Error> {
    let (mut moves, mut came, mut failed) = (Moves::new(), 0, None);
    for page in movable(owners, 0..inner.shape.stores.len()).iter().rev().filter(|page| page.tier > 0) {
        if came >= bytes {
            break;
        }
        match page.raised(inner) {
            Ok(raised) => {
                moves.insert(page.key, Moved::Up(raised));
                came += page.bytes;
            }
            Err(Error::OutOfBudget { .. }) => break,
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    apply(owners, &moves);
    failed.map_or(Ok(came), Err)
}

/// Result of moving pages down.
#[derive(Debug, Default)]
pub(crate) struct Lowered {
    /// Bytes freed in the first tier.
    pub freed: u64,
    /// Key of each moved page in the first tier, and in the lower one.
    pub keys: Vec<(usize, usize)>,
    /// Whether each owner holds moved pages.
    pub changed: Vec<bool>,
    /// [`Parkable::id`](crate::save::Parkable::id) of the sequences whose pages were to move and that hold moved pages.
    pub parkables: Vec<u64>,
    /// First error of a tier.
    pub failed: Option<Error>,
}

impl Lowered {
    /// The bytes freed, or the error that left them fewer than `bytes`.
    pub fn done(self, bytes: u64) -> Result<u64, Error> {
        match self.failed {
            Some(error) if self.freed < bytes => Err(error),
            _ => Ok(self.freed),
        }
    }
}

/// Moves pages down in order, each to the first tier with room, until `bytes` of the first tier are free. With `whole`, moves nothing if
/// all movable pages together have fewer.
pub(crate) fn lower(levels: &Levels, owners: &mut [Owner<'_>], bytes: u64, whole: bool) -> Lowered {
    let layers = owners.first().map_or(0, |owner| owner.sequence.layers.len());
    let mut pages = movable(owners, 0..layers);
    pages.retain(|page| page.tier == 0);
    let mut lowered = Lowered::default();
    if whole && pages.iter().map(|page| page.bytes).sum::<u64>() < bytes {
        return lowered;
    }
    let (mut moves, mut failed) = (Moves::new(), vec![None; levels.levels.len()]);
    for page in &pages {
        // A tier that failed is not tried again in this call.
        if lowered.freed >= bytes || failed.iter().all(Option::is_some) {
            break;
        }
        for (level, failed) in levels.levels.iter().zip(&mut failed).filter(|(_, failed)| failed.is_none()) {
            match page.lowered(level) {
                Ok(slot) => {
                    lowered.keys.push((page.key, Arc::as_ptr(&slot).addr()));
                    moves.insert(page.key, Moved::PinnedCopy(slot));
                    lowered.freed += page.bytes;
                    break;
                }
                // A smaller page may still fit.
                Err(Error::TierFull { .. }) => {}
                Err(error) => *failed = Some(error),
            }
        }
    }
    lowered.failed = failed.into_iter().flatten().next();
    lowered.changed = apply(owners, &moves);
    lowered
}

impl Inner {
    /// Moves pages of `owners` down as [`lower`]: by themselves if that suffices, else with all that share pages with them
    /// ([`Inner::lower_with_idle`]).
    pub fn lower(&self, owners: &mut [Owner<'_>], bytes: u64, whole: bool) -> Lowered {
        let Some(levels) = &self.pool.tiers else { return Lowered::default() };
        let mut lowered = lower(levels, owners, bytes, true);
        if lowered.freed < bytes && lowered.failed.is_none() {
            let missing = bytes - lowered.freed;
            let more = self.lower_with_idle(owners, missing, whole && lowered.freed == 0, |_| false);
            lowered = Lowered { freed: lowered.freed + more.freed, ..more };
        }
        lowered
    }

    /// Moves pages down as [`lower`]: those of `owners` and of the parkable sequences for which `asked` returns true, including those that
    /// they share with other parkable sequences and with prefixes of an index. Sequences that are awake are skipped.
    pub fn lower_with_idle(
        &self,
        owners: &mut [Owner<'_>],
        bytes: u64,
        whole: bool,
        asked: impl Fn(&ParkingTurn) -> bool,
    ) -> Lowered {
        let Some(levels) = &self.pool.tiers else { return Lowered::default() };
        let slots = self.parkables.all();
        let mut idle: Vec<_> = slots.iter().filter_map(|slot| slot.lock(&self.pool)).collect();
        idle.sort_unstable_by_key(|(turn, _)| *turn);
        if owners.is_empty() && !idle.iter().any(|(turn, _)| asked(turn)) {
            return Lowered::default();
        }
        let mut lowered = Lowered::default();
        self.idle.lend(&mut |stored| {
            let parkables = idle.iter_mut().enumerate().map(|(i, (turn, sequence))| {
                sequence.repair();
                Owner { sequence, turn: asked(turn).then_some(i) }
            });
            let stored = stored.into_iter().map(|sequence| Owner { sequence, turn: None });
            let known = owners.iter_mut().map(Owner::again);
            let mut all: Vec<Owner<'_>> = known.chain(parkables).chain(stored).collect();
            lowered = lower(levels, &mut all, bytes, whole);
            lowered.keys.clone()
        });
        let changed = lowered.changed.iter().skip(owners.len());
        let ids = idle.iter().zip(changed).filter(|((turn, _), changed)| **changed && asked(turn));
        lowered.parkables = ids.map(|((turn, _), _)| turn.id).collect();
        lowered
    }
}
