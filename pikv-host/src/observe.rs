//! What a layer's policy keeps of tokens and heads, and what it is told after a step.

use crate::cache::Inner;
use crate::chain::Chain;
use crate::error::ConfigError;
use crate::filing::Layer;
use crate::mass::Weighed;
use crate::metrics::Reused;
use crate::policy::lru::used;
use crate::policy::{Eviction, Feedback, HeadSeen, Seen, State, Token};
use crate::sequence::{PageId, Place, chain_place};
use pikv_core::page::{PAGE, Position};
use pikv_core::plan::LayerShape;
use pikv_core::warp::LANES;
use smallvec::SmallVec;
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
        let (words, head_words) = (policy.words(), policy.head_words(shape.layout.k_dim as usize));
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
    /// are single. Beside each cut the rows whose attention it wants to know of.
    pub fn cuts(&self, old: u32, new: u32) -> impl Iterator<Item = (Range<u32>, Range<u32>)> + use<> {
        let single = (self.versions as u32 - 1).min(new - old);
        let from = match self.eviction.policy.feedback() {
            Feedback::None => new,
            Feedback::Mass => old,
            Feedback::LastMass(rows) => new.saturating_sub(rows),
        };
        let many = old..new - single;
        let first = (!many.is_empty()).then_some(many);
        let cuts = first.into_iter().chain((new - single..new).map(|row| row..row + 1));
        cuts.map(move |cut| (cut.clone(), cut.start.max(from).min(cut.end)..cut.end))
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

impl Layer {
    /// Tells the policy what the rows of a step saw, once the tokens that left the ring are filed.
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
        let mut feeds: Vec<Option<Feed>> = {
            let mut by_head: Vec<Option<Feed>> = (0..self.heads.len()).map(|_| None).collect();
            for feed in feeds {
                let head = feed.head;
                by_head[head] = Some(feed);
            }
            by_head
        };
        for feed in feeds.iter_mut().flatten() {
            self.follow(inner, shape, feed);
        }
        let mut before = old;
        for (cut, (rows, told)) in rule.cuts(old, new).enumerate() {
            for (h, feed) in feeds.iter().enumerate() {
                let (hits, misses) = self.residency(inner, h, rows.clone());
                let head = &mut self.heads[h];
                if rule.versions > 1 {
                    let states = head.chains.iter_mut().flat_map(|chain| &mut chain.entries);
                    let states = states.filter_map(|entry| entry.state.as_mut());
                    states.chain(&mut head.states).for_each(|state| rule.turn(state, before, rows.end));
                    let (from, to) = (rule.version(before), rule.version(rows.end));
                    let words = rule.head_words;
                    head.own.copy_within(from * words..(from + 1) * words, to * words);
                }
                let Some(feed) = feed else { continue };
                let version = rule.version(rows.end);
                let group = shape.group();
                let width = group as usize * shape.layout.k_dim as usize;
                let at = (rows.start - old) as usize * width..(rows.end - old) as usize * width;
                let seen = HeadSeen {
                    layer: rule.layer,
                    kv_head: h,
                    first: Position(rows.start),
                    rows: rows.len() as u32,
                    queries: feed.queries.get(at).unwrap_or_default(),
                    hits,
                    misses,
                };
                let own = &mut head.own[version * rule.head_words..][..rule.head_words];
                rule.eviction.policy.observe_head(&seen, own);
                if rule.words > 0 && !told.is_empty() {
                    let resident = self.live(inner, h, rows.end);
                    for page in &feed.pages {
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
                        self.observe_page(&rule, base, rows.end, reused.as_deref_mut());
                    }
                }
            }
            before = rows.end;
        }
    }

    /// Tells the policy of one page.
    fn observe_page(&mut self, rule: &Rule, seen: Seen<'_>, len: u32, reused: Option<&mut Vec<Reused>>) {
        let PageId { place, ordinal } = seen.page;
        let codec = self.codecs[seen.kv_head].as_ref();
        let head = &mut self.heads[seen.kv_head];
        let mut positions = [0; LANES];
        let (state, live) = match place {
            Place::Sinks => return,
            Place::Ring => {
                let first = ordinal * PAGE;
                (0..).zip(&mut positions).for_each(|(lane, p)| *p = first + lane);
                let held = |lane: u32| (self.filed..len).contains(&(first + lane));
                let live = (0..PAGE).filter(|lane| held(*lane)).fold(0, |live, lane| live | 1 << lane);
                (head.states.get_mut(ordinal.wrapping_sub(self.first_tile) as usize), live)
            }
            Place::Expert(e) => {
                let entry = head.chains[usize::from(e) + 1].entry_mut(ordinal);
                let Some(entry) = entry.filter(|entry| entry.live != 0) else { return };
                for (lane, position) in (0..entry.fill).zip(&mut positions) {
                    *position = entry.position(codec, lane).unwrap_or_default();
                }
                let seen = Seen { live: entry.live, ..seen };
                if let Some(reused) = reused.filter(|_| used(&seen, 1.0)) {
                    // A page that was never used before was there with its last token.
                    let before =
                        if entry.used == 0 { positions[entry.fill as usize - 1] + 1 } else { entry.used };
                    let (layer, kv_head) = (seen.layer as u32, seen.kv_head as u32);
                    reused.push(Reused { layer, kv_head, gap: len.saturating_sub(before) });
                    entry.used = len;
                }
                (entry.state.as_mut(), entry.live)
            }
        };
        if let Some(state) = state {
            let rows = &mut state[rule.version(len) * rule.words..][..rule.words];
            rule.eviction.policy.observe(&Seen { live, positions: &positions, ..seen }, rows);
        }
    }

    /// Moves what tokens of the ring received to where they were filed since.
    fn follow(&self, inner: &Inner, shape: &LayerShape, feed: &mut Feed) {
        for position in feed.filed..self.filed {
            let (ordinal, lane) = (position / PAGE, (position % PAGE) as usize);
            let ring = PageId { place: Place::Ring, ordinal };
            let Some(from) = feed.pages.iter().position(|page| page.page == ring) else { continue };
            let Some(c) = self.chain_of(inner, shape, position) else { continue };
            let codec = self.codecs[feed.head].as_ref();
            let found = self.heads[feed.head].chains[c].find(codec, position);
            let Some((ordinal, to_lane)) = found else { continue };
            let page = PageId { place: chain_place(c), ordinal };
            let to = feed.pages.iter().rposition(|at| at.page == page).unwrap_or_else(|| {
                let cuts = vec![[0.0; LANES]; feed.pages[from].cuts.len()];
                feed.pages.push(Weighed { page, all: [0.0; LANES], cuts });
                feed.pages.len() - 1
            });
            for cut in 0..feed.pages[from].cuts.len() {
                let mass = std::mem::take(&mut feed.pages[from].cuts[cut][lane]);
                feed.pages[to].cuts[cut][to_lane as usize] = mass;
            }
        }
    }

    /// What the policy keeps of a head at `len`.
    pub fn own(&self, rule: &Rule, head: usize, len: u32) -> &[f32] {
        &self.heads[head].own[rule.version(len) * rule.head_words..][..rule.head_words]
    }

    /// Tokens that a head holds at `len`.
    fn live(&self, inner: &Inner, head: usize, len: u32) -> u32 {
        let filed: u32 = self.heads[head].chains.iter().map(|chain| chain.live).sum();
        inner.store.ring.resident(len).0 + filed
    }

    /// Adds, for each expert, the tokens of its pages that rows at `rows` wanted, over all heads: those that the first
    /// tier holds, and the others.
    pub fn count(&self, inner: &Inner, rows: Range<u32>, fetch: u32, hits: &mut [u64], misses: &mut [u64]) {
        let top_k = inner.config.top_k as usize;
        let wanted = if fetch == 0 { top_k } else { top_k.min(fetch as usize) };
        let mut times = vec![0u64; hits.len()];
        if inner.config.experts == 1 {
            times[0] = rows.len() as u64;
        } else {
            for row in rows {
                let at = row.saturating_sub(self.tags_from) as usize * top_k;
                self.tags.iter().skip(at).take(wanted).for_each(|e| times[usize::from(*e)] += 1);
            }
        }
        for (e, times) in times.into_iter().enumerate().filter(|(_, times)| *times > 0) {
            for chain in self.heads.iter().map(|head| &head.chains[e + 1]) {
                let near = chain.live - if inner.tiers.is_some() { chain.away() } else { 0 };
                hits[e] += times * u64::from(near);
                misses[e] += times * u64::from(chain.filed - near);
            }
        }
    }

    /// Over some rows, the tokens that their experts hold in a head's pages, and those that were evicted.
    pub fn residency(&self, inner: &Inner, head: usize, rows: Range<u32>) -> (u32, u32) {
        let chains = &self.heads[head].chains;
        let count = |chain: &Chain| (chain.live, chain.filed - chain.live);
        if inner.config.experts == 1 {
            let (live, gone) = count(&chains[1]);
            return (live * rows.len() as u32, gone * rows.len() as u32);
        }
        let top_k = inner.config.top_k as usize;
        let at = |row: u32| row.saturating_sub(self.tags_from) as usize * top_k;
        let end = at(rows.end).min(self.tags.len());
        let experts = self.tags.range(at(rows.start).min(end)..end);
        experts.map(|e| count(&chains[usize::from(*e) + 1])).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    }
}
