//! Moves and copies pages to other ranks, while they are read.

use super::file::ByRank;
use super::front::{Front, fetched, first_alive};
use super::link::{Link, RankWork};
use crate::base::error::FabricError;
use crate::base::ids::block_of;
use crate::router::Eplb;
use crate::tiers::StoredPage;
use crate::tiers::replica::{Block, Copies, Copy};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, Weak};

/// Pages that a rebalance moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moves {
    /// Pages moved to another rank.
    pub moved: u64,
    /// Pages copied to a further rank.
    pub replicated: u64,
    /// Bytes transferred: each page is read from one rank and written to another.
    pub bytes: u64,
}

/// Balance of bytes between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Skew {
    /// Bytes on the fullest rank divided by the mean; 1 is even.
    pub fullest: f64,
    /// The fullest rank.
    pub rank: u32,
}

impl Front {
    /// Copies the pages of a block to the rank of the first.
    pub(super) fn unite<'a>(
        &self,
        link: &mut Link,
        pages: impl Iterator<Item = &'a Arc<StoredPage>>,
    ) -> Result<u32, FabricError> {
        let pages: Vec<&Arc<StoredPage>> = pages.collect();
        let Some(first) = pages.first().and_then(|slot| slot.rank_page()) else {
            return Err(FabricError::Nobody);
        };
        let rank = first_alive(link, &first.copies())?.rank;
        self.copy_to(link, &pages, rank)?;
        Ok(rank)
    }

    /// Copies pages to `rank`; returns the number copied.
    fn copy_to(&self, link: &mut Link, pages: &[&Arc<StoredPage>], rank: u32) -> Result<u64, FabricError> {
        let (mut fetch, mut missing) = (ByRank::default(), Vec::new());
        for slot in pages {
            let Some(kept) = slot.rank_page() else { continue };
            let copies = kept.copies();
            if copies.iter().any(|copy| copy.rank == rank) {
                continue;
            }
            let copy = first_alive(link, &copies)?.clone();
            fetch.of(copy.rank).fetches.id(copy.id);
            missing.push((copy, kept, slot.words()));
        }
        if missing.is_empty() {
            return Ok(0);
        }
        let answers = self.work(link, fetch.into_list())?;
        let mut work = RankWork::default();
        let mut at = vec![0; answers.len()];
        let mut copies = Vec::new();
        for (from, kept, words) in &missing {
            let Some(i) = answers.iter().position(|answer| answer.rank == from.rank) else { continue };
            let copy = self.copy(rank);
            work.puts.page(copy.id, fetched(&answers[i], at[i], *words)?);
            at[i] += words;
            copies.push((kept, copy));
        }
        self.work(link, vec![(rank, work)])?;
        for (kept, copy) in copies {
            kept.copies.write().unwrap_or_else(PoisonError::into_inner).push(copy);
        }
        Ok(missing.len() as u64)
    }

    /// Blocks of a layer that have pages.
    fn blocks(&self, layer: usize) -> Vec<Block> {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.retain(|_, pages| {
            pages.retain(|page| page.strong_count() > 0);
            !pages.is_empty()
        });
        let mut blocks: Vec<Block> =
            book.keys().filter(|block| block.layer as usize == layer).copied().collect();
        blocks.sort_unstable();
        blocks
    }

    /// The pages of a block, on any rank; none are added while the link is locked.
    fn pages(&self, _link: &Link, block: &Block) -> Vec<Arc<StoredPage>> {
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.get(block).into_iter().flatten().filter_map(Weak::upgrade).collect()
    }

    /// Reserves room on the first of `ranks` for local pages of a block, of any sequence, that are read with it, unless one of `ranks` has
    /// room. The next read sends them again.
    fn move_mirrors(
        &self,
        link: &mut Link,
        block: &Block,
        words: usize,
        ranks: &[u32],
    ) -> Result<(), FabricError> {
        let lists = self.mirrors.of(block.run());
        let mut work = ByRank::default();
        // By the id of the replaced copy, which forks may share.
        let mut new: HashMap<u64, Arc<Copy>> = HashMap::new();
        for list in &lists {
            let list = list.lock().unwrap_or_else(PoisonError::into_inner);
            let of_block = || list.iter().filter(|mirror| block_of(mirror.ordinal) == block.block);
            let stays = of_block().map(|mirror| mirror.copy.rank).find(|rank| ranks.contains(rank));
            let rank = stays.unwrap_or(ranks[0]);
            for mirror in of_block().filter(|mirror| mirror.copy.rank != rank) {
                new.entry(mirror.copy.id).or_insert_with(|| {
                    let copy = self.copy(rank);
                    work.of(rank).puts.room(copy.id, words as u32);
                    copy
                });
            }
        }
        let work = work.into_list();
        if work.is_empty() {
            return Ok(());
        }
        self.work(link, work)?;
        for list in &lists {
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            for mirror in &mut *list {
                if let Some(copy) = new.get(&mirror.copy.id) {
                    (mirror.copy, mirror.synced, mirror.epoch) = (copy.clone(), 0, link.epoch);
                }
            }
        }
        Ok(())
    }

    /// Moves or copies a block to exactly `ranks`.
    fn bring_block_to(&self, link: &mut Link, block: &Block, ranks: &[u32]) -> Result<Moves, FabricError> {
        let pages = self.pages(link, block);
        let mut moves = Moves::default();
        // Pages of a lost rank cannot be copied.
        let all: Vec<&Arc<StoredPage>> = pages
            .iter()
            .filter(|slot| slot.rank_page().is_some_and(|kept| first_alive(link, &kept.copies()).is_ok()))
            .collect();
        if let Some(page) = all.first() {
            self.move_mirrors(link, block, page.words(), ranks)?;
        }
        let mut came = 0;
        for rank in ranks {
            came += self.copy_to(link, &all, *rank)?;
        }
        let mut left = 0;
        for kept in all.iter().filter_map(|slot| slot.rank_page()) {
            let mut copies = kept.copies.write().unwrap_or_else(PoisonError::into_inner);
            let before = copies.len();
            // A read in progress holds its copies until it ends.
            copies.retain(|copy| ranks.contains(&copy.rank));
            left += (before - copies.len()) as u64;
            let order = |rank: u32| ranks.iter().position(|r| *r == rank);
            let sorted: &mut Copies = &mut copies;
            sorted.sort_by_key(|copy| order(copy.rank));
        }
        moves.moved = came.min(left);
        moves.replicated = came - moves.moved;
        moves.bytes = all.first().map_or(0, |slot| 2 * came * slot.bytes());
        Ok(moves)
    }
}

impl Front {
    /// Balance of pages over the ranks that are not lost.
    ///
    /// # Errors
    /// A rank that is lost during the call.
    pub fn skew(&self) -> Result<Skew, FabricError> {
        let alive: Vec<_> = self.usage()?.into_iter().filter(|rank| rank.lost.is_none()).collect();
        let sum = alive.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.bytes));
        let most = alive.iter().max_by_key(|rank| rank.bytes).ok_or(FabricError::Nobody)?;
        let mean = sum as f64 / alive.len() as f64;
        Ok(Skew { fullest: if sum == 0 { 1.0 } else { most.bytes as f64 / mean }, rank: most.rank })
    }

    /// Places the experts of a layer by load, and moves their pages: [`Cache::rebalance`](crate::Cache::rebalance).
    ///
    /// # Errors
    /// The same as of [`Cache::rebalance`](crate::Cache::rebalance).
    pub fn rebalance(&self, layer: usize, eplb: &Eplb, loads: Option<&[f64]>) -> Result<Moves, FabricError> {
        let read;
        let loads = match loads {
            Some(loads) => loads,
            None => {
                read = self.reads(layer);
                &read
            }
        };
        let experts = self.experts;
        if loads.len() != experts {
            return Err(FabricError::Count { what: "loads", got: loads.len(), wanted: experts });
        }
        let ranks = self.link().lost.len();
        if eplb.devices as usize != ranks {
            let got = eplb.devices as usize;
            return Err(FabricError::Count { what: "devices", got, wanted: ranks });
        }
        let placement = eplb.place(loads)?;
        let slots = eplb.replicas / eplb.devices;
        let ranks_of: Vec<Vec<u32>> =
            placement.slots_of.iter().map(|of| of.iter().map(|slot| slot / slots).collect()).collect();
        self.placed.write().unwrap_or_else(PoisonError::into_inner)[layer] = Some(ranks_of);
        self.forget_reads(layer);
        let mut all = Moves::default();
        for block in self.blocks(layer) {
            // One block at a time, so that concurrent attention does not wait long.
            let mut link = self.link();
            let rank = self.rank_of(&link, &block)?;
            let moves = self.bring_block_to(&mut link, &block, &[rank])?;
            all.add(&moves);
            link.traffic.moved += moves.moved;
        }
        Ok(all)
    }

    /// Copies each page of an expert to `copies` ranks in all: [`Cache::replicate`](crate::Cache::replicate).
    ///
    /// # Errors
    /// The same as of [`Cache::replicate`](crate::Cache::replicate).
    pub fn replicate(&self, layer: usize, expert: u16, copies: u32) -> Result<Moves, FabricError> {
        let alive: Vec<u32> = self.link().alive().collect();
        if copies == 0 || copies as usize > alive.len() {
            return Err(FabricError::Count { what: "copies", got: copies as usize, wanted: alive.len() });
        }
        let mut all = Moves::default();
        for block in self.blocks(layer).into_iter().filter(|block| block.expert == expert) {
            let mut link = self.link();
            let pages = self.pages(&link, &block);
            let Some(kept) = pages.first().and_then(|slot| slot.rank_page()) else { continue };
            let Ok(first) = first_alive(&link, &kept.copies()).map(|copy| copy.rank) else { continue };
            let at = alive.iter().position(|rank| *rank == first).unwrap_or(0) + block.block as usize % 2;
            // The first rank keeps the block; further copies go to the next ranks, which spreads the copies of many blocks.
            let mut ranks = vec![first];
            let others =
                (0..alive.len()).map(|i| alive[(at + i) % alive.len()]).filter(|rank| *rank != first);
            ranks.extend(others.take(copies as usize - 1));
            let moves = self.bring_block_to(&mut link, &block, &ranks)?;
            all.add(&moves);
            link.traffic.moved += moves.moved;
            link.traffic.replicated += moves.replicated;
        }
        Ok(all)
    }
}

impl Moves {
    fn add(&mut self, other: &Moves) {
        self.moved += other.moved;
        self.replicated += other.replicated;
        self.bytes += other.bytes;
    }
}
