//! Compaction: merges pages of a run that lost tokens.

use crate::base::deque::first_if;
use crate::base::error::Error;
use crate::base::ids::{Place, run_place};
use crate::memory::arena::{Near, Page};
use crate::memory::pool::Pool;
use crate::pages::entry::{Away, Entry, PageState};
use crate::pages::homes::Homes;
use crate::pages::past::{Before, Compacted, Was, Went};
use crate::pages::run::Run;
use crate::tiers::StoredPage;
use pikv_core::attend::filled;
use pikv_core::page::{Layout, PAGE};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use std::collections::VecDeque;
use std::sync::Arc;

/// The run of a compaction.
#[derive(Clone, Copy)]
pub(crate) struct CompactedRun<'a> {
    pub pool: &'a Pool,
    pub shape: &'a LayerShape,
    /// Index of the KV head over all layers.
    pub head: u32,
    /// Index of the run.
    pub run: usize,
}

/// Destination of merged tokens.
enum Target {
    /// The page itself.
    There,
    /// A new page that replaces it.
    Fresh(Page),
    /// A lower tier, after the tokens are merged on the host.
    Lower,
}

impl Target {
    /// Whether the target is in the first tier.
    fn is_here(&self) -> bool {
        !matches!(self, Target::Lower)
    }

    /// Whether a token is already at its destination.
    fn is_at(&self, to: usize, moved: &Move) -> bool {
        matches!(self, Target::There) && (moved.from, moved.lane) == (to, moved.to_lane)
    }
}

/// A move of a token; moves are listed from the newest token back.
struct Move {
    from: usize,
    lane: u32,
    /// Index of the target.
    at: usize,
    to_lane: u32,
}

/// All moves of a compaction.
struct Plan {
    /// Number of leading pages whose tokens move.
    end: usize,
    /// Pages that remain, newest first: the page of the run that each replaces.
    targets: Vec<(usize, Target)>,
    /// From the newest token back; 32 for each target except the last.
    moves: Vec<Move>,
    /// Live lanes of each target.
    filled: Vec<u32>,
}

/// Data that a compaction reads and writes before the run changes.
struct Ready {
    /// Words of each page that was read from a lower tier or a device.
    away: Vec<Option<Box<[u32]>>>,
    /// Targets in a lower tier, in their order.
    lower: VecDeque<(Vec<u32>, StoredPage)>,
    /// Bounds of targets on a device, in their order.
    bounds: VecDeque<Option<Box<[[f32; LANES]]>>>,
}

impl CompactedRun<'_> {
    /// Whether pages lie on a device.
    fn is_far(&self) -> bool {
        !self.pool.shape.config.backend.is_cpu()
    }
}

impl Run {
    /// Moves tokens of pages towards the newest of these pages, and frees pages that are then empty, if at least a fifth of all lanes
    /// is evicted. Pages with tokens at or after `kept`, which a rollback can reach, and packed pages do not change.
    ///
    /// Blocks, and so shards, depend on ordinals: a token moves to a page on the shard of its new ordinal.
    /// Pages in lower tiers are compacted like others, so that results do not depend on tiers. `O(tokens)` of the run, which
    /// is amortised by the evicted tokens. With `noted` returns the former pages, if any changed.
    ///
    /// # Errors
    /// No memory for a copy of a shared page; a failed lower tier or device. The run is then unchanged.
    pub fn compact(
        &mut self,
        whose: &CompactedRun<'_>,
        kept: u32,
        noted: bool,
    ) -> Result<Option<Compacted>, Error> {
        let Some((end, live)) = self.thinned(kept) else { return Ok(None) };
        let mut plan = self.plan(whose, end, live)?;
        // Everything that can fail comes before the run changes.
        let ready = self.prepare(whose, &plan)?;
        let before = noted.then(|| self.before_moves(&plan));
        let homes = self.homes_after(whose, &plan);
        self.move_tokens(whose, &mut plan, &ready.away);
        self.take_targets(whose, plan, ready, homes);
        self.dead = self.count_dead();
        self.moved_before(self.entries.get(end).map_or(self.next, |entry| entry.ordinal));
        self.sweep(kept);
        Ok(before)
    }

    /// Number of leading pages to compact, and their live tokens; `None` if it is not worth it.
    fn thinned(&mut self, kept: u32) -> Option<(usize, u32)> {
        if self.dead < PAGE || self.dead * 4 < self.live() {
            return None;
        }
        self.dead = self.count_dead();
        let still = |entry: &&Entry| match &entry.held {
            PageState::Gone { .. } => true,
            PageState::Open(_) | PageState::Away(Away { by: None, .. }) => {
                entry.fill == PAGE && entry.pending == 0
            }
            PageState::Closed(_) | PageState::Away(_) => false,
        };
        let mut end = self.entries.iter().take_while(still).count();
        // Positions ascend, so pages that a rollback can reach are at the end: the search stops at the first other page.
        for i in (0..end).rev() {
            match self.entries[i].last() {
                None => {}
                Some(last) if last < kept => break,
                Some(_) => end = i,
            }
        }
        let live: u32 = self.entries.range(..end).map(|entry| entry.live.count_ones()).sum();
        let pages = self.entries.range(..end).filter(|entry| !entry.is_gone()).count();
        let dead = pages as u32 * PAGE - live;
        (dead >= PAGE && dead * 4 >= self.live()).then_some((end, live))
    }

    /// Plans the moves of the `live` tokens of the first `end` pages.
    ///
    /// # Errors
    /// No memory for a page that is needed.
    fn plan(&self, whose: &CompactedRun<'_>, end: usize, live: u32) -> Result<Plan, Error> {
        let targets = self.targets(whose, end, live.div_ceil(PAGE) as usize)?;
        // From the newest token back: a destination is never before its source, so no token is overwritten before it moves.
        let mut moves = Vec::with_capacity(live as usize);
        for from in (0..end).rev() {
            let live = self.entries[from].live;
            for lane in (0..PAGE).rev().filter(|lane| live >> lane & 1 == 1) {
                let n = moves.len() as u32;
                moves.push(Move { from, lane, at: (n / PAGE) as usize, to_lane: PAGE - 1 - n % PAGE });
            }
        }
        let mut filled = vec![0u32; targets.len()];
        moves.iter().for_each(|to| filled[to.at] |= 1 << to.to_lane);
        Ok(Plan { end, targets, moves, filled })
    }

    /// Reads pages that the host does not have, writes targets in lower tiers, and lets a device move its tokens. The lists of the run do
    /// not change.
    ///
    /// # Errors
    /// A failed lower tier or device.
    fn prepare(&self, whose: &CompactedRun<'_>, plan: &Plan) -> Result<Ready, Error> {
        let Plan { end, targets, moves, filled } = plan;
        let (shape, layout, rope) = (&whose.pool.shape, &whose.shape.layout, whose.shape.rope.as_ref());
        // A device moves tokens itself, unless a page is in a lower tier or the host needs keys for bounds.
        let near = self.entries.range(..end).all(|entry| !matches!(entry.held, PageState::Away(_)));
        let far = whose.is_far();
        let fetches = far && (shape.config.key_bounds || !near || !targets.iter().all(|(_, t)| t.is_here()));
        let away = self.entries.range(..end).map(|entry| match &entry.held {
            PageState::Away(Away { slot, .. }) if entry.live != 0 => slot.read().map(Some),
            PageState::Open(page) if fetches && entry.live != 0 => {
                page.fetch().map(|words| Some(words.into_owned().into_boxed_slice()))
            }
            _ => Ok(None),
        });
        let away = away.collect::<Result<Vec<_>, _>>()?;
        let lower = self.lower(whose, targets, moves, &away)?;
        let mut bounds = VecDeque::new();
        if far {
            let assembled = fetches.then(|| self.assembled(layout, targets.len(), moves, &away));
            self.move_far(whose, targets, moves, assembled.as_deref())?;
            let whole = filled.iter().zip(assembled.iter().flatten());
            let of = |(live, words): (&u32, &Vec<u32>)| Some(Entry::bounds_of(*live, words, layout, rope));
            bounds.extend(whole.filter(|_| shape.config.key_bounds).map(of));
        }
        Ok(Ready { away, lower, bounds })
    }

    /// Moves tokens to their targets one by one; after a device moved them, only their positions on the host.
    fn move_tokens(&mut self, whose: &CompactedRun<'_>, plan: &mut Plan, away: &[Option<Box<[u32]>>]) {
        let (layout, far) = (&whose.shape.layout, whose.is_far());
        let mut token = vec![0; if far { 1 } else { layout.words() as usize }];
        for moved in &plan.moves {
            let Move { from, lane, at, to_lane } = *moved;
            let (to, target) = &mut plan.targets[at];
            if target.is_at(*to, moved) {
                continue;
            }
            if target.is_here()
                && let Some(words) = self.source(from, away)
            {
                match far {
                    true => token[0] = words[lane as usize],
                    false => layout.copy(words, lane, &mut token, 0),
                }
            }
            let entry = &mut self.entries[*to];
            match (target, &mut entry.held) {
                (Target::Lower, _) => {}
                (Target::Fresh(page), _) | (Target::There, PageState::Open(page)) => {
                    let Some(words) = page.words_mut() else { unreachable!("nobody shares targets") };
                    match far {
                        true => words[to_lane as usize] = token[0],
                        false => layout.copy(&token, 0, words, to_lane),
                    }
                }
                _ => unreachable!("what is there is open"),
            }
            self.kept.shift((from, lane), (*to, to_lane));
        }
    }

    /// Home experts of the tokens of each target after the moves.
    fn homes_after(&self, whose: &CompactedRun<'_>, plan: &Plan) -> Vec<Homes> {
        let mut homes = vec![Homes::default(); plan.targets.len()];
        if let Place::Run(run) = run_place(whose.run) {
            for Move { from, lane, at, to_lane } in &plan.moves {
                homes[*at].set(run, *to_lane, self.entries[*from].homes.get(run, *lane));
            }
        }
        homes
    }

    /// Lists the targets with the homes of their tokens, and frees the other pages.
    fn take_targets(&mut self, whose: &CompactedRun<'_>, plan: Plan, ready: Ready, homes: Vec<Homes>) {
        let Plan { end, targets, filled, .. } = plan;
        let Ready { mut lower, mut bounds, .. } = ready;
        let (layout, rope) = (&whose.shape.layout, whose.shape.rope.as_ref());
        let bounded = whose.pool.shape.config.key_bounds;
        let targets = targets.into_iter().zip(filled).zip(homes);
        let mut left: VecDeque<(usize, Target, u32, Homes)> =
            targets.map(|(((to, target), live), homes)| (to, target, live, homes)).collect();
        for i in (0..end).rev() {
            let Some((_, target, live, homes)) = first_if(&mut left, |(to, ..)| *to == i) else {
                self.free(i);
                continue;
            };
            let entry = &mut self.entries[i];
            (entry.live, entry.fill, entry.homes) = (live, PAGE, homes);
            let known = bounds.pop_front().flatten();
            match target {
                Target::There => {}
                Target::Fresh(page) => entry.held = PageState::Open(page),
                Target::Lower => {
                    let Some((words, slot)) = lower.pop_front() else { unreachable!("one for each target") };
                    entry.held = PageState::Away(Away { slot: Arc::new(slot), by: None });
                    if bounded {
                        entry.bounds = Some(Entry::bounds_of(live, &words, layout, rope));
                    }
                }
            }
            if bounded {
                entry.bound(layout, rope);
            }
            if known.is_some() {
                entry.bounds = known;
            }
        }
    }

    /// The pages of a plan before its moves.
    fn before_moves(&self, plan: &Plan) -> Compacted {
        let Plan { end, targets, moves, .. } = plan;
        let mut there = vec![false; *end];
        targets.iter().for_each(|(to, target)| there[*to] = matches!(target, Target::There));
        let mut pages = Vec::with_capacity(*end);
        for (i, entry) in self.entries.range(..end).enumerate().filter(|(_, entry)| !entry.is_gone()) {
            let was = match &entry.held {
                PageState::Open(page) if there[i] => Was::Rewritten(*page.positions()),
                held => Was::Replaced(held.clone()),
            };
            let Entry { ordinal, fill, live, ref bounds, ref homes, .. } = *entry;
            pages.push(Before { ordinal, fill, live, bounds: bounds.clone(), homes: homes.clone(), was });
        }
        let at = |i: usize| self.entries[i].ordinal;
        let went = |moved: &Move| Went {
            from: (at(moved.from), moved.lane),
            to: (at(targets[moved.at].0), moved.to_lane),
        };
        Compacted { pages, moves: moves.iter().map(went).collect() }
    }

    /// Number of evicted lanes in pages that still have tokens.
    fn count_dead(&self) -> u32 {
        let left = self.entries.iter().filter(|entry| !entry.is_gone());
        left.map(|entry| (filled(entry.fill) & !(entry.live | entry.pending)).count_ones()).sum()
    }

    /// The words of page `i`; from `away` if the host does not have them.
    fn source<'a>(&'a self, i: usize, away: &'a [Option<Box<[u32]>>]) -> Option<&'a [u32]> {
        away[i].as_deref().or_else(|| self.entries[i].page().map(Page::words))
    }

    /// The pages of all targets, assembled on the host.
    fn assembled(
        &self,
        layout: &Layout,
        targets: usize,
        moves: &[Move],
        away: &[Option<Box<[u32]>>],
    ) -> Vec<Vec<u32>> {
        let mut pages = vec![vec![u32::MAX; layout.words() as usize]; targets];
        for Move { from, lane, at, to_lane } in moves {
            if let Some(words) = self.source(*from, away) {
                layout.copy(words, *lane, &mut pages[*at], *to_lane);
            }
        }
        pages
    }

    /// Launches the moves on a device, from `assembled` pages if there are any. All moves are done or none, unless the device
    /// is lost.
    fn move_far(
        &self,
        whose: &CompactedRun<'_>,
        targets: &[(usize, Target)],
        moves: &[Move],
        assembled: Option<&[Vec<u32>]>,
    ) -> Result<(), Error> {
        if let Some(device) = whose.pool.shape.config.backend.device() {
            let address = |i: usize| self.entries[i].page().map_or(0, Page::address);
            let moved = moves.iter().filter(|moved| {
                let (to, target) = &targets[moved.at];
                !target.is_at(*to, moved) && target.is_here()
            });
            let moved = moved.map(|Move { from, lane, at, to_lane }| {
                let target = match &targets[*at] {
                    (_, Target::Fresh(page)) => page.address(),
                    (to, _) => address(*to),
                };
                crate::memory::cuda::MovedToken {
                    source: address(*from),
                    from: *lane,
                    at: *at,
                    to: *to_lane,
                    target,
                }
            });
            return device.compact(&whose.shape.layout, &moved.collect::<Vec<_>>(), targets.len(), assembled);
        }
        Ok(())
    }

    /// Stores the targets of lower tiers, in the order of `targets`.
    fn lower(
        &self,
        whose: &CompactedRun<'_>,
        targets: &[(usize, Target)],
        moves: &[Move],
        away: &[Option<Box<[u32]>>],
    ) -> Result<VecDeque<(Vec<u32>, StoredPage)>, Error> {
        let layout = &whose.shape.layout;
        let mut lower = VecDeque::new();
        for (tokens, (_, target)) in moves.chunk_by(|a, b| a.at == b.at).zip(targets) {
            if let (Target::Lower, Some(tiers)) = (target, &whose.pool.tiers) {
                let mut words = vec![0; layout.words() as usize];
                words[..LANES].fill(u32::MAX);
                for Move { from, lane, to_lane, .. } in tokens {
                    if let Some(source) = self.source(*from, away) {
                        layout.copy(source, *lane, &mut words, *to_lane);
                    }
                }
                let positions = std::array::from_fn(|lane| words[lane]);
                let slot = tiers.put(&words, positions)?;
                lower.push_back((words, slot));
            }
        }
        Ok(lower)
    }

    /// The newest `n` of the first `end` pages to which tokens can move, newest first.
    ///
    /// # Errors
    /// No memory for a page that is needed.
    fn targets(&self, whose: &CompactedRun<'_>, end: usize, n: usize) -> Result<Vec<(usize, Target)>, Error> {
        let words = whose.shape.layout.words();
        let lower = || whose.pool.tiers.is_some().then_some(Target::Lower);
        let fresh = |i: usize| {
            let pages = whose.pool.arenas.reserve(u64::from(words) * 4);
            let place = run_place(whose.run);
            let shard = whose.pool.shape.shard_of(place, self.entries[i].ordinal, whose.head);
            let fresh = pages.and_then(|mut pages| pages.take(shard, words, Near::Any)).map(Target::Fresh);
            fresh.or_else(|error| lower().ok_or(error))
        };
        let mut targets = Vec::new();
        for i in (0..end).rev() {
            if targets.len() == n {
                break;
            }
            match &self.entries[i].held {
                PageState::Open(_) if !self.shares_page(i) => targets.push((i, Target::There)),
                // Tokens of older pages cannot skip this page: they would then follow newer tokens.
                PageState::Open(_) => targets.push((i, fresh(i)?)),
                PageState::Away(away) if away.slot.rank_page().is_some() => targets.push((i, fresh(i)?)),
                PageState::Away(_) => targets.push((i, Target::Lower)),
                PageState::Gone { .. } | PageState::Closed(_) => {}
            }
        }
        Ok(targets)
    }
}
