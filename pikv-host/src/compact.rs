//! Pages of a chain that lost tokens, put together.

use crate::arena::{Page, Reservation};
use crate::cache::Inner;
use crate::chain::{Chain, Entry, Held};
use crate::observe::Rule;
use crate::sequence::chain_place;
use pikv_core::page::PAGE;
use pikv_core::plan::LayerShape;
use std::collections::VecDeque;

/// Whose pages they are.
#[derive(Clone, Copy)]
pub(crate) struct Whose<'a> {
    pub inner: &'a Inner,
    pub shape: &'a LayerShape,
    pub rule: &'a Rule,
    pub head: usize,
    /// Index of the chain.
    pub chain: usize,
}

impl Chain {
    /// Moves the tokens of pages towards the newest of them, and frees those that are left empty, once a fifth of all lanes
    /// are. What a rollback could still touch, which lies at or after `kept`, and packed pages stay as they are; so does
    /// everything where a page is shared and no memory is left for a copy.
    ///
    /// Blocks are cut by ordinals, and shards hold blocks, so tokens move to pages of the shard that their new ordinal says.
    /// O(tokens) of the chain, which is little for each that was evicted.
    pub fn compact(&mut self, whose: &Whose<'_>, kept: u32) {
        let still = |entry: &&Entry| match &entry.held {
            Held::Gone => true,
            Held::Open(_) => {
                entry.fill == PAGE && entry.pending == 0 && entry.last().is_some_and(|last| last < kept)
            }
            Held::Closed(_) | Held::Away(_) => false,
        };
        let end = self.entries.iter().take_while(still).count();
        let live: u32 = self.entries.range(..end).map(|entry| entry.live.count_ones()).sum();
        let pages = self.entries.range(..end).filter(|entry| entry.page().is_some()).count();
        let dead = pages as u32 * PAGE - live;
        if dead < PAGE || dead * 4 < live {
            return;
        }
        let Some(mut targets) = self.targets(whose, end, live.div_ceil(PAGE) as usize) else { return };
        let layout = &whose.shape.layout;
        let mut token = vec![0; layout.words() as usize];
        // From the newest token back: its place is never before its own, so nothing is overwritten that is still to move.
        let (mut at, mut to_lane) = (0, PAGE);
        let mut filled = vec![0u32; targets.len()];
        for from in (0..end).rev() {
            let live = self.entries[from].live;
            for lane in (0..PAGE).rev().filter(|lane| live >> lane & 1 == 1) {
                if to_lane == 0 {
                    (at, to_lane) = (at + 1, PAGE);
                }
                to_lane -= 1;
                filled[at] |= 1 << to_lane;
                let (to, fresh) = &mut targets[at];
                if (from, lane) == (*to, to_lane) && fresh.is_none() {
                    continue;
                }
                if let Held::Open(page) = &self.entries[from].held {
                    layout.copy(page.words(), lane, &mut token, 0);
                }
                let column: Vec<f32> = self.entries[from]
                    .state
                    .iter()
                    .flat_map(|s| s.iter().map(|row| row[lane as usize]))
                    .collect();
                let entry = &mut self.entries[*to];
                let words = match (fresh, &mut entry.held) {
                    (Some(fresh), _) => fresh.words_mut(),
                    (None, Held::Open(page)) => page.words_mut(),
                    _ => None,
                };
                let Some(words) = words else { unreachable!("targets are pages that nobody shares") };
                layout.copy(&token, 0, words, to_lane);
                if entry.state.is_none() {
                    entry.state = whose.rule.state();
                }
                for (row, x) in entry.state.iter_mut().flat_map(|state| state.iter_mut()).zip(&column) {
                    row[to_lane as usize] = *x;
                }
            }
        }
        let mut kept: VecDeque<(usize, Option<Page>, u32)> =
            targets.into_iter().zip(filled).map(|((to, fresh), live)| (to, fresh, live)).collect();
        for i in (0..end).rev() {
            let entry = &mut self.entries[i];
            if let Some((_, fresh, live)) = kept.pop_front_if(|(to, ..)| *to == i) {
                if let Some(page) = fresh {
                    entry.held = Held::Open(page);
                }
                (entry.live, entry.fill) = (live, PAGE);
                if whose.inner.config.bounds {
                    entry.bound(layout, whose.shape.rope.as_ref());
                }
            } else {
                entry.free();
            }
        }
        self.trim(|_| false);
    }

    /// The newest `n` of the first `end` pages that tokens can be moved to, from the newest on, each with the page that takes its
    /// place if it cannot be written.
    fn targets(&self, whose: &Whose<'_>, end: usize, n: usize) -> Option<Vec<(usize, Option<Page>)>> {
        let words = whose.shape.layout.words();
        let fresh = |i: usize| {
            let mut pages: Reservation = whose.inner.arenas.reserve(u64::from(words) * 4).ok()?;
            let place = chain_place(whose.chain);
            let shard = whose.inner.shard_of(place, self.first + i as u32, whose.head);
            pages.take(shard, words).ok()
        };
        let mut targets = Vec::new();
        for i in (0..end).rev() {
            if targets.len() == n {
                break;
            }
            match &self.entries[i].held {
                Held::Open(page) if !page.is_shared() => targets.push((i, None)),
                // Tokens of older pages cannot pass it by: they would come to lie before older ones.
                Held::Open(_) => targets.push((i, Some(fresh(i)?))),
                // A gap is filled if there is memory, and else left.
                _ => targets.extend(fresh(i).map(|page| (i, Some(page)))),
            }
        }
        Some(targets)
    }
}
