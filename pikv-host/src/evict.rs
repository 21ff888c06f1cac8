//! Eviction of tokens from the pages of a sequence, by the rankings of its layers' policies.

use crate::cache::Inner;
use crate::compact::Whose;
use crate::filing::Layer;
use crate::job::each;
use crate::metrics::Evicted;
use crate::observe::Rule;
use crate::policy::{Budget, Candidate, Candidates, Scope, Source, ada_kv, order_bits, worst, worth};
use pikv_core::page::PAGE;
use pikv_core::plan::{LayerShape, StoreShape};
use smallvec::SmallVec;
use std::ops::Range;

/// Tokens of a page that were evicted and can still come back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Killed {
    /// Tokens of the sequence then.
    pub by: u32,
    pub head: usize,
    pub chain: usize,
    pub ordinal: u32,
    pub lanes: u32,
}

impl Layer {
    /// Makes final what no rollback brings back any more, and puts the pages together that lost tokens.
    pub fn settle(&mut self, inner: &Inner, shape: &LayerShape, len: u32) {
        if self.rule.is_none() {
            return;
        }
        let slack = inner.store.ring.slack();
        let mut thinned: SmallVec<[(usize, usize); 8]> = SmallVec::new();
        while let Some(Killed { head, chain, ordinal, lanes, .. }) =
            self.killed.pop_front_if(|killed| killed.by.saturating_add(slack) <= len)
        {
            self.heads[head].chains[chain].settle(ordinal, lanes);
            if !thinned.contains(&(head, chain)) {
                thinned.push((head, chain));
            }
        }
        for (head, chain) in thinned {
            let whose = Whose { inner, shape, head, chain };
            self.heads[head].chains[chain].compact(&whose, inner.store.ring.kept_from(len));
        }
    }

    /// How many tokens of its pages (sinks apart) a head may keep at `len`.
    fn quota(&self, inner: &Inner, shape: &LayerShape, rule: &Rule, head: usize, len: u32) -> u32 {
        let ring = inner.store.ring;
        let fixed = ring.resident(len).0 + self.heads[head].chains[0].live;
        match rule.eviction.budget.tokens(rule.layer, head, len) {
            Some(tokens) => tokens.saturating_sub(fixed),
            None => {
                let Budget::Bytes(bytes) = rule.eviction.budget else { return u32::MAX };
                let full = shape.layout.bytes();
                let experts = u64::from(inner.config.experts);
                let sinks = StoreShape::run_pages(inner.store.sinks, 0);
                let ring = u64::from(ring.window() + ring.slack()).div_ceil(u64::from(PAGE)) + 1;
                let heads = u64::from(shape.kv_heads);
                // Of each expert the newest page, and one that is not worth putting together.
                let fixed = heads * full * (ring + sinks + 2 * experts);
                let page: u64 =
                    self.codecs.iter().map(|c| c.as_ref().map_or(full, |c| c.packed.bytes())).sum();
                // A chain is put together once a fifth of its lanes are empty.
                let pages = bytes.saturating_sub(fixed) / page * 4 / 5;
                u32::try_from(pages * u64::from(PAGE)).unwrap_or(u32::MAX)
            }
        }
    }
}

/// What may go from a head.
struct Ranked<'a> {
    tokens: Candidates<'a>,
    utility: Vec<f32>,
}

impl<'a> Ranked<'a> {
    /// A head without tokens that may go.
    fn none(e: &Excess<'a>, h: usize, len: u32) -> Ranked<'a> {
        let (rule, layer) = (e.rule, e.layer);
        let tokens = Candidates {
            layer: rule.layer,
            kv_head: h,
            now: len,
            layout: &e.shape.layout,
            codec: layer.codecs[h].as_ref(),
            pages: Vec::new(),
            tokens: Vec::new(),
            head: layer.own(rule, h, len),
            group: e.shape.group(),
            away: Default::default(),
        };
        Ranked { tokens, utility: Vec::new() }
    }

    /// Marks the `n` worst tokens, of equals the older.
    fn worst(&self, n: usize, lanes: &mut [u32]) {
        worst(&self.utility, n, |i| mark(lanes, self.tokens.tokens[i]));
    }

    /// Marks whole pages, the worst first (of equals the one with the oldest token), until at least `n` tokens go.
    fn worst_pages(&self, n: usize, lanes: &mut [u32]) {
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
            // None of its tokens is left to count.
            let count = std::mem::take(&mut sums[page as usize].1);
            left = left.saturating_sub(count as usize);
        }
        let tokens = self.tokens.tokens.iter().filter(|token| sums[token.page()].1 == 0);
        tokens.for_each(|token| mark(lanes, *token));
    }
}

/// Marks a token in the lanes of its page.
fn mark(lanes: &mut [u32], token: Candidate) {
    lanes[token.page()] |= 1 << token.lane();
}

/// What a layer holds too much of.
struct Excess<'a> {
    layer: &'a Layer,
    shape: &'a LayerShape,
    rule: &'a Rule,
    /// Of each head: tokens of its pages that may stay, and that are there.
    quota: SmallVec<[u32; 16]>,
    held: SmallVec<[u32; 16]>,
    /// Tokens below this utility go in any case.
    limit: SmallVec<[Option<f32>; 16]>,
}

impl<'a> Excess<'a> {
    fn new(layer: &'a Layer, shape: &'a LayerShape, inner: &Inner, len: u32) -> Option<Excess<'a>> {
        let rule = layer.rule.as_deref()?;
        let heads = 0..layer.heads.len();
        let quota = heads.clone().map(|h| layer.quota(inner, shape, rule, h, len)).collect();
        let held = layer.heads.iter().map(|head| head.chains[1..].iter().map(|c| c.live).sum()).collect();
        let limit = heads.map(|h| rule.eviction.policy.threshold(layer.own(rule, h, len)));
        let limit = limit.map(|limit| limit.filter(|limit| !limit.is_nan())).collect();
        Some(Excess { layer, shape, rule, quota, held, limit })
    }

    /// Whether anything of a head may have to go.
    fn over(&self, head: usize) -> bool {
        let over = match self.rule.eviction.adaptive {
            Some(_) => total(&self.held) > total(&self.quota),
            None => self.held[head] > self.quota[head],
        };
        over || self.limit[head].is_some()
    }

    /// Whether anything may have to go: what most steps ask, and nothing more.
    fn any(&self) -> bool {
        (0..self.held.len()).any(|head| self.over(head))
    }

    /// Tokens that stay of a quota, so that the next ranking is not due at once.
    fn target(&self, quota: u64) -> u64 {
        let batch = self.rule.eviction.batch.map_or((quota / 16).max(1), u64::from);
        (quota + 1).saturating_sub(batch)
    }

    /// Who goes, of every head: lanes of each of its pages.
    fn victims(&self, ranked: &[Ranked<'_>]) -> Vec<Vec<u32>> {
        let heads: Vec<usize> = (0..ranked.len()).collect();
        let mut victims = each(&heads, |h| self.of_head(*h, &ranked[*h]));
        let floor = self.rule.eviction.adaptive.filter(|_| total(&self.held) > total(&self.quota));
        if let Some(floor) = floor {
            for ((lanes, ranked), gone) in victims.iter_mut().zip(ranked).zip(self.shared(ranked, floor)) {
                gone.into_iter().for_each(|i| mark(lanes, ranked.tokens.tokens[i]));
            }
        }
        victims
    }

    /// Who goes of a head whatever the others have.
    fn of_head(&self, h: usize, ranked: &Ranked<'_>) -> Vec<u32> {
        let eviction = &self.rule.eviction;
        let mut lanes = vec![0; ranked.tokens.pages.len()];
        let (held, quota) = (self.held[h], self.quota[h]);
        if eviction.adaptive.is_none() && held > quota {
            let n = (u64::from(held) - self.target(u64::from(quota))) as usize;
            match eviction.by_page {
                true => ranked.worst_pages(n, &mut lanes),
                false => ranked.worst(n, &mut lanes),
            }
        }
        if let Some(limit) = self.limit[h] {
            let tokens = ranked.tokens.tokens.iter().zip(&ranked.utility);
            let below = tokens.filter(|(_, utility)| worth(**utility) < limit);
            below.for_each(|(token, _)| mark(&mut lanes, *token));
        }
        lanes
    }
}

impl Excess<'_> {
    /// Who goes where the heads share their budgets.
    fn shared(&self, ranked: &[Ranked<'_>], floor: f32) -> Vec<Vec<usize>> {
        let quota = total(&self.quota);
        let target = self.target(quota);
        let mut pinned_of_all = 0;
        let heads: Vec<ada_kv::Head<'_>> = ranked
            .iter()
            .enumerate()
            .map(|(h, ranked)| {
                let pinned = self.held[h] as usize - ranked.utility.len();
                pinned_of_all += pinned as u64;
                // Of what stays in all, so that a large batch is not at the expense of the last heads.
                let share = target as f64 / quota.max(1) as f64;
                let sure = (f64::from(self.quota[h]) * f64::from(floor) * share) as usize;
                let positions = ranked.tokens.tokens.iter().map(|token| token.position).collect();
                ada_kv::Head { utility: &ranked.utility, positions, sure: sure.saturating_sub(pinned) }
            })
            .collect();
        ada_kv::victims(&heads, target.saturating_sub(pinned_of_all))
    }
}

fn total(of: &[u32]) -> u64 {
    of.iter().map(|n| u64::from(*n)).sum()
}

/// Tokens of one page that go: the layer and the head, the chain, the page's ordinal, its lanes.
type Gone = (usize, usize, usize, u32, u32);

/// Evicts from the layers of a sequence of `len` tokens what is over their budgets.
pub(crate) fn enforce(
    layers: &mut [Layer],
    inner: &Inner,
    len: u32,
    pins: &[Range<u32>],
    mut report: Option<&mut Vec<Evicted>>,
) {
    let shapes = &inner.config.layers;
    let excess = |(layer, shape)| Excess::new(layer, shape, inner, len);
    if !layers.iter().zip(shapes).filter_map(excess).any(|e| e.any()) {
        return;
    }
    for (layer, h, c, ordinal, lanes) in choose(layers, inner, len, pins) {
        let state = &mut layers[layer];
        let chain = &mut state.heads[h].chains[c];
        if let (Some(report), Some(entry)) = (&mut report, chain.entry(ordinal)) {
            let newest = entry.position(state.codecs[h].as_ref(), lanes.ilog2());
            report.push(Evicted {
                layer: layer as u32,
                kv_head: h as u32,
                tokens: lanes.count_ones(),
                bytes: if entry.live & !lanes == 0 { entry.bytes() } else { 0 },
                age: newest.map_or(0, |newest| len - 1 - newest),
            });
        }
        chain.kill(ordinal, lanes);
        state.killed.push_back(Killed { by: len, head: h, chain: c, ordinal, lanes });
    }
}

/// What is to go.
fn choose(layers: &[Layer], inner: &Inner, len: u32, pins: &[Range<u32>]) -> Vec<Gone> {
    let shapes = &inner.config.layers;
    let excess: Vec<Option<Excess<'_>>> =
        layers.iter().zip(shapes).map(|(layer, shape)| Excess::new(layer, shape, inner, len)).collect();
    let peers = |a: &Rule, b: &Rule| a.eviction.policy.name() == b.eviction.policy.name();
    let due = |e: &Excess<'_>| match e.rule.eviction.policy.scope() {
        Scope::Sequence => excess.iter().flatten().any(|other| peers(e.rule, other.rule) && other.any()),
        Scope::Head | Scope::Layer => e.any(),
    };
    let mut ranked: Vec<Vec<Ranked<'_>>> = excess
        .iter()
        .map(|e| match e.as_ref().filter(|e| due(e)) {
            None => Vec::new(),
            Some(e) => {
                // A head that keeps all it has is ranked only if others ask it.
                let alone = e.rule.eviction.policy.scope() == Scope::Head;
                let heads: Vec<usize> = (0..e.held.len()).collect();
                each(&heads, |&h| match alone && !e.over(h) {
                    true => Ranked::none(e, h, len),
                    false => rank(e, h, len, pins),
                })
            }
        })
        .collect();
    // A ranking in ignorance is none: the next step tries again.
    if ranked.iter().flatten().any(|ranked| ranked.tokens.failed()) {
        return Vec::new();
    }
    for l in 0..layers.len() {
        let Some(e) = &excess[l] else { continue };
        match e.rule.eviction.policy.scope() {
            Scope::Head => {}
            Scope::Layer => agree(&mut ranked[l..=l], len),
            Scope::Sequence => {
                // The first of its kind stands for all.
                let same: Vec<usize> = (0..layers.len())
                    .filter(|other| excess[*other].as_ref().is_some_and(|o| peers(e.rule, o.rule)))
                    .collect();
                if same.first() == Some(&l) {
                    let mut group: Vec<Vec<Ranked<'_>>> =
                        same.iter().map(|l| std::mem::take(&mut ranked[*l])).collect();
                    agree(&mut group, len);
                    same.iter().zip(group).for_each(|(l, of)| ranked[*l] = of);
                }
            }
        }
    }
    let mut gone = Vec::new();
    for (l, (e, ranked)) in excess.iter().zip(&ranked).enumerate() {
        let Some(e) = e.as_ref().filter(|_| !ranked.is_empty()) else { continue };
        for (h, victims) in e.victims(ranked).into_iter().enumerate() {
            let pages = ranked[h].tokens.pages.iter().zip(victims).filter(|(_, lanes)| *lanes != 0);
            let of = |(page, lanes): (&Source<'_>, u32)| (l, h, page.chain as usize, page.ordinal, lanes);
            gone.extend(pages.map(of));
        }
    }
    gone
}

/// Replaces utilities by their sums over all heads, by position.
fn agree(ranked: &mut [Vec<Ranked<'_>>], len: u32) {
    let mut sums = vec![0.0f32; len as usize];
    for ranked in ranked.iter().flatten() {
        for (token, utility) in ranked.tokens.tokens.iter().zip(&ranked.utility) {
            sums[token.position as usize] += utility;
        }
    }
    for ranked in ranked.iter_mut().flatten() {
        for (token, utility) in ranked.tokens.tokens.iter().zip(&mut ranked.utility) {
            *utility = sums[token.position as usize];
        }
    }
}

/// The tokens of a head that may go, and what they are worth.
fn rank<'a>(e: &Excess<'a>, h: usize, len: u32, pins: &[Range<u32>]) -> Ranked<'a> {
    let head = &e.layer.heads[h];
    let version = e.rule.version(len);
    let mut ranked = Ranked::none(e, h, len);
    let Ranked { tokens, utility } = &mut ranked;
    let held = e.held[h] as usize;
    tokens.tokens.reserve_exact(held);
    let pinned = |position: u32| pins.iter().any(|pin| pin.contains(&position));
    let mut runs = 0;
    for (c, chain) in head.chains.iter().enumerate().skip(1) {
        runs += usize::from(chain.live > 0);
        for (i, entry) in chain.entries.iter().enumerate().filter(|(_, entry)| entry.live != 0) {
            let rows = chain.kept.rows(i, version).unwrap_or_default();
            let page = Source { chain: c as u32, ordinal: chain.first + i as u32, entry, rows };
            tokens.push(page, entry.live, pinned);
        }
    }
    if runs > 1 {
        // The runs ascend already, which this sort makes use of.
        tokens.tokens.sort_by_key(|token| token.position);
    }
    utility.resize(tokens.len(), 0.0);
    e.rule.eviction.policy.rank(tokens, utility);
    // What left the window is in the way until its whole page has.
    if let Some(window) = e.shape.window.filter(|_| !e.rule.eviction.by_page) {
        let first = (len + 1).saturating_sub(window);
        let unseen = tokens.tokens.partition_point(|token| token.position < first);
        utility[..unseen].fill(f32::NEG_INFINITY);
    }
    ranked
}
