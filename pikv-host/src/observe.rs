//! What a layer's policy keeps of tokens and heads, and what it is told after a step.

use crate::cache::Inner;
use crate::chain::Chain;
use crate::error::ConfigError;
use crate::filing::{Head, Layer};
use crate::mass::Weighed;
use crate::metrics::Reused;
use crate::policy::lru::used;
use crate::policy::{Eviction, Feedback, HeadSeen, Seen, State, Token};
use crate::sequence::{PageId, Place, chain_place};
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ops::Range;

/// How a layer evicts.
#[derive(Debug)]
pub(crate) struct Rule {
    pub layer: usize,
    pub eviction: Eviction,
    /// f32 kept of a token, and of a head.
    pub words: usize,
    pub head_words: usize,
    /// Lengths of a sequence that can be gone back to, the present one among them.
    pub versions: usize,
}

/// What attention over a head saw in a step.
#[derive(Debug)]
pub(crate) struct Feed {
    pub head: usize,
    /// Tokens that had been filed then.
    pub filed: u32,
    pub pages: Vec<Weighed>,
    /// `[rows][group][k_dim]`, if something is kept of heads.
    pub queries: Vec<f32>,
}

impl Rule {
    pub fn new(
        layer: usize,
        shape: &LayerShape,
        eviction: &Eviction,
        rollback: u32,
    ) -> Result<Rule, ConfigError> {
        eviction.budget.check(layer, shape.kv_heads)?;
        if eviction.batch == Some(0) {
            return Err(ConfigError::TokenBudget { layer, why: "a batch must be at least 1" });
        }
        if eviction.adaptive.is_some_and(|floor| !(0.0..=1.0).contains(&floor)) {
            return Err(ConfigError::TokenBudget {
                layer,
                why: "the floor of a head's share must be in 0..=1",
            });
        }
        if eviction.adaptive.is_some() && eviction.by_page {
            let why = "heads can share budgets by tokens, not by whole pages";
            return Err(ConfigError::TokenBudget { layer, why });
        }
        let policy = &eviction.policy;
        let (words, k_dim) = (policy.words(), shape.layout.k_dim as usize);
        let head_words = policy.head_words(k_dim, shape.group() as usize);
        Ok(Rule { layer, eviction: eviction.clone(), words, head_words, versions: rollback as usize + 1 })
    }

    /// What is kept of a page without tokens.
    pub fn state(&self) -> State {
        (self.words > 0).then(|| vec![[0.0; LANES]; self.words * self.versions].into())
    }

    /// Which version holds at `len` tokens.
    pub fn version(&self, len: u32) -> usize {
        len as usize % self.versions
    }

    /// The rows of a step from `old` to `new` tokens, cut where the policy is told of them apart: those that can be taken back
    /// are single. Beside each cut the rows whose attention it wants to know of: of single ones each, as it may turn out to
    /// be the last.
    pub fn cuts(&self, old: u32, new: u32) -> impl Iterator<Item = (Range<u32>, Range<u32>)> + use<> {
        let single = new - (self.versions as u32 - 1).min(new - old);
        let (from, told) = match self.eviction.policy.feedback() {
            Feedback::None => (single, false),
            Feedback::Mass => (old, true),
            Feedback::LastMass(rows) => (new.saturating_sub(rows), true),
        };
        let many = old..single;
        let first = (!many.is_empty()).then(|| (many, from.clamp(old, single)..single));
        first.into_iter().chain((single..new).map(move |row| {
            let start = if told { row } else { row + 1 };
            (row..row + 1, start..row + 1)
        }))
    }

    /// Writes what is kept of a new token into lane `lane` of its tile.
    pub fn born(&self, token: &Token<'_>, state: &mut [[f32; LANES]], lane: usize) {
        let mut words: SmallVec<[f32; 8]> = SmallVec::from_elem(0.0, self.words);
        self.eviction.policy.born(token, &mut words);
        for version in state.chunks_exact_mut(self.words) {
            for (row, word) in version.iter_mut().zip(&words) {
                row[lane] = *word;
            }
        }
    }

    fn turn(&self, state: &mut [[f32; LANES]], from: u32, to: u32) {
        let (from, to) = (self.version(from) * self.words, self.version(to) * self.words);
        state.copy_within(from..from + self.words, to);
    }
}

/// A token that a step moved from the ring to a page.
#[derive(Clone, Copy, Debug)]
struct Moved {
    position: u32,
    chain: usize,
    ordinal: u32,
    lane: u32,
}

impl Layer {
    /// Tells the policy what the rows of a step saw, once the tokens that left the ring are filed. It is told of each row as if
    /// the step had ended with it: which tokens lie in the ring, and in which page, is what it would have been then.
    pub fn observe(
        &mut self,
        inner: &Inner,
        shape: &LayerShape,
        old: u32,
        new: u32,
        feeds: Vec<Feed>,
        mut reused: Option<&mut Vec<Reused>>,
    ) {
        let Some(rule) = self.rule.clone() else { return };
        if rule.words == 0 && rule.head_words == 0 {
            return;
        }
        let mut by_head: Vec<Option<Feed>> = (0..self.heads.len()).map(|_| None).collect();
        for feed in feeds {
            let head = feed.head;
            by_head[head] = Some(feed);
        }
        let ring = inner.store.ring;
        for (h, mut feed) in by_head.into_iter().enumerate() {
            let moved = self.moved(h, ring.left(old));
            let mut before = old;
            for (cut, (rows, told)) in rule.cuts(old, new).enumerate() {
                self.turn(&rule, h, before, rows.end);
                let left = ring.left(rows.end);
                let (done, late) = moved.split_at(moved.partition_point(|token| token.position < left));
                let since = done.partition_point(|token| token.position < ring.left(before));
                self.carry(&rule, h, &done[since..], rows.end);
                before = rows.end;
                let Some(feed) = &mut feed else { continue };
                let (hits, misses) = self.residency(inner, h, rows.clone(), late);
                let group = shape.group();
                let width = group as usize * shape.layout.k_dim as usize;
                let at = (rows.start - old) as usize * width..(rows.end - old) as usize * width;
                let seen = HeadSeen {
                    layer: rule.layer,
                    kv_head: h,
                    group,
                    first: Position(rows.start),
                    rows: rows.len() as u32,
                    queries: feed.queries.get(at).unwrap_or_default(),
                    hits,
                    misses,
                };
                let own = &mut self.heads[h].own[rule.version(rows.end) * rule.head_words..];
                rule.eviction.policy.observe_head(&seen, &mut own[..rule.head_words]);
                if rule.words > 0 && !told.is_empty() {
                    // From here on the first of the rows found tokens in the ring.
                    let floor = (told.start + 1).saturating_sub(ring.window()).min(feed.filed);
                    feed.follow(cut, &done[done.partition_point(|token| token.position < floor)..]);
                    let filed: u32 = self.heads[h].chains.iter().map(|chain| chain.live).sum();
                    let sinks = |left: u32| left.min(inner.store.sinks);
                    let late = late.len() as u32 + sinks(self.filed) - sinks(left);
                    let resident = ring.resident(rows.end).0 + filed - late;
                    for page in feed.pages.iter().filter(|page| page.read[cut]) {
                        let base = Seen {
                            layer: rule.layer,
                            kv_head: h,
                            group,
                            first: Position(told.start),
                            rows: told.len() as u32,
                            page: page.page,
                            live: 0,
                            positions: &[0; LANES],
                            mass: &page.cuts[cut],
                            resident,
                        };
                        self.observe_page(&rule, base, left, rows.end, reused.as_deref_mut());
                    }
                }
            }
        }
    }

    /// The tokens from position `from` on that lie in pages of experts by now, by position.
    fn moved(&self, head: usize, from: u32) -> Vec<Moved> {
        let codec = self.codecs[head].as_ref();
        let mut moved = Vec::new();
        for (c, chain) in self.heads[head].chains.iter().enumerate().skip(1) {
            let lanes = chain.entries.iter().enumerate().rev().flat_map(|(i, entry)| {
                (0..entry.fill).rev().map(move |lane| (chain.first + i as u32, lane, entry))
            });
            let tokens = lanes.map_while(|(ordinal, lane, entry)| {
                let position = entry.position(codec, lane).filter(|position| *position >= from)?;
                Some(Moved { position, chain: c, ordinal, lane })
            });
            moved.extend(tokens);
        }
        moved.sort_unstable_by_key(|token| token.position);
        moved
    }

    /// Starts the version of `to` tokens from that of `from`.
    fn turn(&mut self, rule: &Rule, head: usize, from: u32, to: u32) {
        if rule.versions == 1 {
            return;
        }
        let head = &mut self.heads[head];
        let states = head.chains.iter_mut().flat_map(|chain| &mut chain.entries);
        let states = states.filter_map(|entry| entry.state.as_mut());
        states.chain(&mut head.states).for_each(|state| rule.turn(state, from, to));
        let (from, to, words) = (rule.version(from), rule.version(to), rule.head_words);
        head.own.copy_within(from * words..(from + 1) * words, to * words);
    }

    /// Takes what is kept of tokens of the ring along to their pages, as of `len` tokens.
    fn carry(&mut self, rule: &Rule, head: usize, moved: &[Moved], len: u32) {
        let Head { chains, states, .. } = &mut self.heads[head];
        let rows = rule.version(len) * rule.words..(rule.version(len) + 1) * rule.words;
        for token in moved {
            let from = states.get((token.position / PAGE - self.first_tile) as usize);
            let to = chains[token.chain].entry_mut(token.ordinal).and_then(|entry| entry.state.as_mut());
            let (Some(from), Some(to)) = (from, to) else { continue };
            for (to, from) in to[rows.clone()].iter_mut().zip(&from[rows.clone()]) {
                to[token.lane as usize] = from[(token.position % PAGE) as usize];
            }
        }
    }

    /// Tells the policy of one page, at `len` tokens of which `left` had left the ring.
    fn observe_page(
        &mut self,
        rule: &Rule,
        seen: Seen<'_>,
        left: u32,
        len: u32,
        reused: Option<&mut Vec<Reused>>,
    ) {
        let PageId { place, ordinal } = seen.page;
        let codec = self.codecs[seen.kv_head].as_ref();
        let head = &mut self.heads[seen.kv_head];
        let mut positions = [0; LANES];
        let (state, live) = match place {
            Place::Sinks => return,
            Place::Ring => {
                let first = ordinal * PAGE;
                (0..).zip(&mut positions).for_each(|(lane, p)| *p = first + lane);
                let held = |lane: u32| (left..len).contains(&(first + lane));
                let live = (0..PAGE).filter(|lane| held(*lane)).fold(0, |live, lane| live | 1 << lane);
                (head.states.get_mut(ordinal.wrapping_sub(self.first_tile) as usize), live)
            }
            Place::Expert(e) => {
                let Some(entry) = head.chains[usize::from(e) + 1].entry_mut(ordinal) else { return };
                for (lane, position) in (0..entry.fill).zip(&mut positions) {
                    *position = entry.position(codec, lane).unwrap_or_default();
                }
                let filed = (0..).zip(&positions).filter(|(_, position)| **position < left);
                let filed = filed.fold(0u32, |filed, (lane, _)| filed | 1 << lane);
                let live = entry.live & filed;
                let seen = Seen { live, ..seen };
                if let Some(reused) = reused.filter(|_| live != 0 && used(&seen, 1.0)) {
                    // A page that was never used before was there with its last token.
                    let before =
                        if entry.used == 0 { positions[entry.fill as usize - 1] + 1 } else { entry.used };
                    let (layer, kv_head) = (seen.layer as u32, seen.kv_head as u32);
                    reused.push(Reused { layer, kv_head, gap: len.saturating_sub(before) });
                    entry.used = len;
                }
                (entry.state.as_mut(), live)
            }
        };
        if live == 0 {
            return;
        }
        if let Some(state) = state {
            let rows = &mut state[rule.version(len) * rule.words..][..rule.words];
            rule.eviction.policy.observe(&Seen { live, positions: &positions, ..seen }, rows);
        }
    }

    /// What the policy keeps of a head at `len`.
    pub fn own(&self, rule: &Rule, head: usize, len: u32) -> &[f32] {
        &self.heads[head].own[rule.version(len) * rule.head_words..][..rule.head_words]
    }

    /// Adds, for each expert, the tokens of its pages that rows at `rows` wanted, over all heads: those that the first
    /// tier holds, and the others.
    pub fn count(
        &self,
        inner: &Inner,
        rows: Range<u32>,
        fetch: Option<u32>,
        hits: &mut [u64],
        misses: &mut [u64],
    ) {
        let wanted = fetch.map_or(usize::MAX, |n| n as usize);
        let mut times = vec![0u64; hits.len()];
        for row in rows {
            self.experts(inner, row).take(wanted).for_each(|e| times[usize::from(e)] += 1);
        }
        for (e, times) in times.into_iter().enumerate().filter(|(_, times)| *times > 0) {
            for chain in self.heads.iter().map(|head| &head.chains[e + 1]) {
                let near = chain.live - if inner.tiers.is_some() { chain.away() } else { 0 };
                hits[e] += times * u64::from(near);
                misses[e] += times * u64::from(chain.filed - near);
            }
        }
    }

    /// Over some rows, the tokens that their experts hold in a head's pages, and those that were evicted; without the `late`
    /// ones, which were in the ring then.
    fn residency(&self, inner: &Inner, head: usize, rows: Range<u32>, late: &[Moved]) -> (u64, u64) {
        let chains = &self.heads[head].chains;
        let count = |c: usize| {
            let Chain { live, filed, .. } = chains[c];
            let late = late.iter().filter(|token| token.chain == c).count() as u64;
            (u64::from(live) - late, u64::from(filed - live))
        };
        let experts = rows.flat_map(|row| self.experts(inner, row));
        experts.map(|e| count(usize::from(e) + 1)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    }
}

impl Feed {
    /// Moves what tokens received in the ring to the pages where they lie by now.
    fn follow(&mut self, cut: usize, moved: &[Moved]) {
        let mut index: HashMap<PageId, usize> =
            self.pages.iter().enumerate().map(|(i, page)| (page.page, i)).collect();
        for token in moved {
            let ring = PageId { place: Place::Ring, ordinal: token.position / PAGE };
            let Some(&from) = index.get(&ring) else { continue };
            let page = PageId { place: chain_place(token.chain), ordinal: token.ordinal };
            let to = *index.entry(page).or_insert_with(|| {
                let n = self.pages[from].cuts.len();
                let (cuts, read) = (vec![[0.0; LANES]; n], vec![false; n]);
                self.pages.push(Weighed { page, all: [0.0; LANES], cuts, read });
                self.pages.len() - 1
            });
            let lane = (token.position % PAGE) as usize;
            let mass = std::mem::take(&mut self.pages[from].cuts[cut][lane]);
            self.pages[to].cuts[cut][token.lane as usize] += mass;
            self.pages[to].read[cut] = true;
        }
    }
}
