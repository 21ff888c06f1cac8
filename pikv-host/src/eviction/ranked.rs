//! Candidates for eviction in a head, and their utility by its policy.

use crate::base::huge_pages;
use crate::base::scratch::emptied;
use crate::eviction::evict::OverBudget;
use crate::pages::entry::{Entry, PageState};
use crate::policy::{Candidate, Candidates, Source, order_bits, pinned, worst, worth};
use pikv_core::page::PAGE;
use pikv_lanes::fetch;
use std::mem;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Buffers of a ranking: 12 bytes for each token, 52 for each page.
#[derive(Debug, Default)]
pub(crate) struct RankingBuffers {
    pages: Vec<Source<'static>>,
    tokens: Vec<Candidate>,
    utility: Vec<f32>,
    lanes: Vec<u32>,
}

/// Buffers of a cache, as large as its largest rankings, so that the system does not map memory for each
/// ranking.
#[derive(Debug, Default)]
pub(crate) struct Rooms(Mutex<Vec<RankingBuffers>>);

impl Rooms {
    /// Takes all buffers that no other thread has taken.
    pub fn take(&self) -> Vec<RankingBuffers> {
        mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns buffers; if another thread returned some meanwhile, the longer list is kept.
    pub fn give(&self, rooms: Vec<RankingBuffers>) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if rooms.len() > held.len() {
            *held = rooms;
        }
    }
}

/// Number of pages to prefetch positions ahead: they lie in their pages, at addresses that the hardware cannot predict.
pub(crate) const AHEAD: usize = 8;

/// Tokens of one page to evict: index of the run, ordinal of the page, lanes.
pub(crate) type Gone = (usize, u32, u32);

/// Candidates for eviction in a head.
pub(crate) struct HeadRanking<'a> {
    pub excess: &'a OverBudget<'a>,
    pub head: usize,
    pub tokens: Candidates<'a>,
    pub utility: Vec<f32>,
    /// For each page, the lanes to evict.
    pub lanes: Vec<u32>,
    /// Tokens to evict in a head that was not ranked.
    pub unranked: Vec<Gone>,
}

impl<'a> HeadRanking<'a> {
    /// An empty list of candidates for a head.
    pub fn new(excess: &'a OverBudget<'a>, head: usize, len: u32, room: RankingBuffers) -> HeadRanking<'a> {
        let (rule, layer) = (excess.rule, excess.layer);
        let RankingBuffers { pages, mut tokens, mut utility, mut lanes } = room;
        tokens.clear();
        utility.clear();
        lanes.clear();
        let tokens = Candidates {
            layer: rule.layer,
            kv_head: head,
            now: len,
            layout: &excess.shape.layout,
            codec: layer.codecs[head].as_ref(),
            pages: emptied(pages),
            tokens,
            head: layer.own(rule, head, len),
            group: excess.shape.group(),
            frequencies: rule.frequencies.as_ref(),
            away: Default::default(),
        };
        HeadRanking { excess, head, tokens, utility, lanes, unranked: Vec::new() }
    }

    /// Returns the buffers for reuse.
    pub fn room(self) -> RankingBuffers {
        let Candidates { pages, tokens, .. } = self.tokens;
        RankingBuffers { pages: emptied(pages), tokens, utility: self.utility, lanes: self.lanes }
    }

    /// Lists the tokens that are not pinned, and calls the policy for their utility.
    pub fn rank(&mut self, pins: &[Range<u32>]) {
        let HeadRanking { excess: e, tokens, utility, .. } = self;
        let (head, version) = (&e.layer.heads[self.head], e.rule.version(tokens.now));
        let held = e.held[self.head] as usize;
        huge_pages::reserve(&mut tokens.tokens, held);
        huge_pages::reserve(utility, held);
        let mut runs = 0;
        for (c, run) in head.runs.experts() {
            runs += usize::from(run.live() > 0);
            for (i, entry) in run.entries.walk().enumerate().filter(|(_, entry)| entry.live != 0) {
                if let Some(Entry { held: PageState::Open(page), .. }) = run.entries.get(i + AHEAD) {
                    fetch(page.positions());
                }
                let rows = run.kept.rows(i, version).unwrap_or_default();
                let page = Source { run: c as u32, ordinal: entry.ordinal, page: entry, rows };
                push(tokens, entry, page, pins);
            }
        }
        if runs > 1 {
            // Each run ascends already, so the sort merges runs.
            tokens.tokens.sort_by_key(|token| token.position);
        }
        utility.resize(tokens.len(), 0.0);
        self.lanes.resize(tokens.pages.len(), 0);
        e.rule.eviction.policy.rank(tokens, utility);
        // Tokens outside the window are evicted first: no row sees them, but their page is not freed before all of it leaves the window.
        if let Some(window) = e.shape.window.filter(|_| !e.rule.eviction.by_page) {
            let first = (tokens.now + 1).saturating_sub(window);
            let unseen = tokens.tokens.partition_point(|token| token.position < first);
            utility[..unseen].fill(f32::NEG_INFINITY);
        }
    }

    /// Marks token `i` for eviction.
    pub fn mark(&mut self, i: usize) {
        mark(&mut self.lanes, self.tokens.tokens[i]);
    }

    /// Marks the tokens with a utility below `limit`.
    pub fn below(&mut self, limit: f32) {
        let HeadRanking { tokens, utility, lanes, .. } = self;
        let below = tokens.tokens.iter().zip(utility).filter(|(_, utility)| worth(**utility) < limit);
        below.for_each(|(token, _)| mark(lanes, *token));
    }

    /// Marks the `n` tokens with the lowest utility; the older one first in a tie.
    pub fn worst(&mut self, n: usize) {
        let HeadRanking { tokens, utility, lanes, .. } = self;
        worst(utility, n, |i| mark(lanes, tokens.tokens[i]));
    }

    /// Marks whole pages by mean utility, lowest first (in a tie the page with the oldest token), until at least `n` tokens are marked.
    pub fn worst_pages(&mut self, n: usize) {
        let mut sums: Vec<(f32, u32, u32)> = vec![(0.0, 0, 0); self.tokens.pages.len()];
        for (token, utility) in self.tokens.tokens.iter().zip(&self.utility) {
            let (sum, count, oldest) = &mut sums[token.page()];
            if *count == 0 {
                *oldest = token.position;
            }
            (*sum, *count) = (*sum + utility, *count + 1);
        }
        let order = |(i, (sum, count, oldest)): (usize, &(f32, u32, u32))| {
            let mean = order_bits(*sum / *count as f32);
            (u64::from(mean) << 32 | u64::from(*oldest), i as u32)
        };
        let mut pages: Vec<(u64, u32)> = sums.iter().enumerate().map(order).collect();
        pages.sort_unstable();
        let mut left = n;
        for (_, page) in pages {
            if left == 0 {
                break;
            }
            // A count of 0 marks the page for eviction.
            let count = mem::take(&mut sums[page as usize].1);
            left = left.saturating_sub(count as usize);
        }
        let tokens = self.tokens.tokens.iter().filter(|token| sums[token.page()].1 == 0);
        tokens.for_each(|token| mark(&mut self.lanes, *token));
    }

    /// The tokens to evict.
    pub fn gone(&self) -> impl Iterator<Item = Gone> {
        let pages = self.tokens.pages.iter().zip(&self.lanes).filter(|(_, lanes)| **lanes != 0);
        let of = |(page, lanes): (&Source<'_>, &u32)| (page.run as usize, page.ordinal, *lanes);
        pages.map(of).chain(self.unranked.iter().copied())
    }
}

/// Adds a page and its live tokens that are not pinned; positions of a run ascend.
fn push<'a>(to: &mut Candidates<'a>, entry: &'a Entry, page: Source<'a>, pins: &[Range<u32>]) {
    let lanes = entry.live;
    let first = to.pages.len() as u32 * PAGE;
    let before = to.tokens.len();
    if let (PageState::Open(held), u32::MAX) = (&entry.held, lanes) {
        let all = (first..).zip(held.positions());
        to.tokens.extend(all.map(|(at, position)| Candidate { position: *position, at }));
    } else {
        let held = (0..PAGE).filter(|lane| lanes >> lane & 1 == 1);
        let token = |lane| {
            let position = entry.position(to.codec, lane)?;
            Some(Candidate { position, at: first + lane })
        };
        to.tokens.extend(held.filter_map(token));
    }
    if !pins.is_empty() {
        let mut kept = before;
        for i in before..to.tokens.len() {
            let position = to.tokens[i].position;
            if !pinned(pins, position) {
                to.tokens[kept] = to.tokens[i];
                kept += 1;
            }
        }
        to.tokens.truncate(kept);
    }
    if to.tokens.len() > before {
        to.pages.push(page);
    }
}

/// Adds a token to the marked lanes of its page.
fn mark(lanes: &mut [u32], token: Candidate) {
    lanes[token.page()] |= 1 << token.lane();
}
