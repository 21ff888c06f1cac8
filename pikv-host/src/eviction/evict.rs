//! Evicts tokens from the pages of a sequence, by the rankings of its layers' policies.

use crate::base::chunks::Common;
use crate::base::parallel::each_mut;
use crate::config::shape::CacheShape;
use crate::eviction::oldest::oldest;
use crate::eviction::ranked::{Gone, HeadRanking, RankingBuffers, Rooms};
use crate::metrics::Evicted;
use crate::pages::filing::LayerPages;
use crate::policy::rule::Rule;
use crate::policy::{Budget, Eviction, Scope, ada_kv};
use pikv_core::page::PAGE;
use pikv_core::plan::{LayerShape, StoreShape};
use smallvec::SmallVec;
use std::ops::Range;

impl LayerPages {
    /// Most tokens in pages outside the sinks that a head may keep at `len`; `own` is the sequence's own budget for a head.
    fn quota(
        &self,
        inner: &CacheShape,
        shape: &LayerShape,
        rule: &Rule,
        head: usize,
        (len, own): (u32, Option<u32>),
    ) -> u32 {
        let ring = inner.store.ring;
        let fixed = ring.resident(len).0 + self.heads[head].runs[0].live();
        let own = own.map_or(u32::MAX, |tokens| tokens.saturating_sub(fixed));
        let quota = match rule.eviction.budget.tokens(rule.layer, head, len) {
            Some(tokens) => tokens.saturating_sub(fixed),
            None => {
                let Budget::Bytes(bytes) = rule.eviction.budget else { return u32::MAX };
                let full = shape.layout.bytes();
                let runs = u64::from(self.sharing(inner, shape).most(0, ring.left(len)));
                let sinks = StoreShape::run_pages(self.store.sinks, 0);
                let pages = u64::from(ring.window() + ring.slack()).div_ceil(u64::from(PAGE)) + 1;
                let heads = u64::from(shape.kv_heads);
                // For each run: its newest page, and one page of evicted lanes, below the threshold of compaction.
                let fixed = heads * full * (pages + sinks + 2 * runs);
                let page: u64 =
                    self.codecs.iter().map(|c| c.as_ref().map_or(full, |c| c.packed.bytes())).sum();
                // A run is compacted once a fifth of its lanes are evicted.
                let pages = bytes.saturating_sub(fixed) / page * 4 / 5;
                u32::try_from(pages * u64::from(PAGE)).unwrap_or(u32::MAX)
            }
        };
        quota.min(own)
    }
}

/// Heads of a layer that are over their budgets.
pub(crate) struct OverBudget<'a> {
    pub layer: &'a LayerPages,
    pub shape: &'a LayerShape,
    pub rule: &'a Rule,
    /// For each head: quota of tokens in pages, and live tokens there.
    quota: SmallVec<[u32; 16]>,
    pub held: SmallVec<[u32; 16]>,
    /// Tokens below this utility are evicted whatever the budget.
    limit: SmallVec<[Option<f32>; 16]>,
    /// If heads share the sum of their quotas and exceed it: the tokens that each may keep.
    parts: Option<SmallVec<[u32; 16]>>,
    shares: bool,
}

impl<'a> OverBudget<'a> {
    fn new(
        layer: &'a LayerPages,
        shape: &'a LayerShape,
        inner: &CacheShape,
        len: u32,
        own: Option<u32>,
    ) -> Option<OverBudget<'a>> {
        let rule = layer.rule.as_deref()?;
        let heads = 0..layer.heads.len();
        let quota = heads.clone().map(|h| layer.quota(inner, shape, rule, h, (len, own))).collect();
        let held = layer.heads.iter().map(|head| head.runs.experts().map(|(_, c)| c.live()).sum()).collect();
        let limit = heads.map(|h| rule.eviction.policy.threshold(layer.own(rule, h, len)));
        let limit = limit.map(|limit| limit.filter(|limit| !limit.is_nan())).collect();
        let heads = 0..layer.heads.len();
        let lean = heads.map(|h| rule.eviction.policy.lean(layer.own(rule, h, len)));
        let lean: Option<SmallVec<[f32; 16]>> = lean.collect();
        let lean = lean.filter(|_| rule.eviction.adaptive.is_none());
        let mut excess =
            OverBudget { layer, shape, rule, quota, held, limit, parts: None, shares: lean.is_some() };
        let all = total(&excess.quota);
        if let Some(lean) = lean.filter(|_| total(&excess.held) > all) {
            excess.parts = Some(parts(&excess.quota, &excess.held, &lean, excess.target(all)));
        }
        Some(excess)
    }

    /// Whether tokens of a head may have to be evicted.
    fn over(&self, head: usize) -> bool {
        let over = match (self.rule.eviction.adaptive, &self.parts) {
            (Some(_), _) => total(&self.held) > total(&self.quota),
            (None, Some(parts)) => self.held[head] > parts[head],
            (None, None) => !self.shares && self.held[head] > self.quota[head],
        };
        over || self.limit[head].is_some()
    }

    /// Whether tokens may have to be evicted: most steps ask only this.
    fn any(&self) -> bool {
        (0..self.held.len()).any(|head| self.over(head))
    }

    /// Tokens of a quota that stay after an eviction: a batch fewer, so that the next ranking is not due at once.
    fn target(&self, quota: u64) -> u64 {
        let batch = self.rule.eviction.batch.map_or((quota / 16).max(1), u64::from);
        (quota + 1).saturating_sub(batch)
    }

    /// Whether the policy always evicts the oldest tokens, so that no ranking is needed.
    fn by_age(&self) -> bool {
        let Rule { eviction: Eviction { by_page, adaptive, .. }, oldest_first, scope, .. } = self.rule;
        *oldest_first && !by_page && adaptive.is_none() && *scope == Scope::Head
    }

    /// Number of tokens to evict from a head, independent of other heads.
    fn surplus(&self, h: usize) -> usize {
        let (held, quota) = (self.held[h], self.quota[h]);
        if let Some(parts) = &self.parts {
            return held.saturating_sub(parts[h]) as usize;
        }
        if self.shares {
            return 0;
        }
        let over = self.rule.eviction.adaptive.is_none() && held > quota;
        if over { (u64::from(held) - self.target(u64::from(quota))) as usize } else { 0 }
    }

    /// Marks the tokens to evict in the layer's heads.
    fn victims(&self, ranked: &mut [HeadRanking<'_>]) {
        each_mut(ranked, |h, ranked| {
            let n = self.surplus(h);
            if n > 0 {
                match self.rule.eviction.by_page {
                    true => ranked.worst_pages(n),
                    false => ranked.worst(n),
                }
            }
            if let Some(limit) = self.limit[h] {
                ranked.below(limit);
            }
        });
        let floor = self.rule.eviction.adaptive.filter(|_| total(&self.held) > total(&self.quota));
        if let Some(floor) = floor {
            let gone = self.shared(ranked, floor);
            for (ranked, gone) in ranked.iter_mut().zip(gone) {
                gone.into_iter().for_each(|i| ranked.mark(i));
            }
        }
    }
}

impl OverBudget<'_> {
    /// The tokens to evict if the heads share their budgets by Ada-KV, as indices for each head.
    fn shared(&self, ranked: &[HeadRanking<'_>], floor: f32) -> Vec<Vec<usize>> {
        let quota = total(&self.quota);
        let target = self.target(quota);
        let mut pinned_of_all = 0;
        let heads: Vec<ada_kv::HeadTokens<'_>> = ranked
            .iter()
            .enumerate()
            .map(|(h, ranked)| {
                let pinned = self.held[h] as usize - ranked.utility.len();
                pinned_of_all += pinned as u64;
                // Relative to `target`, so that a large batch does not take the sure tokens of some heads.
                let share = target as f64 / quota.max(1) as f64;
                let sure = (f64::from(self.quota[h]) * f64::from(floor) * share) as usize;
                let positions = ranked.tokens.tokens.iter().map(|token| token.position).collect();
                ada_kv::HeadTokens { utility: &ranked.utility, positions, sure: sure.saturating_sub(pinned) }
            })
            .collect();
        ada_kv::victims(&heads, target.saturating_sub(pinned_of_all))
    }
}

/// Least share of its own quota that a head keeps when heads share their quotas.
const SURE: f64 = 0.2;

/// Splits `target` tokens, fewer than the heads hold, among the heads: in proportion to quota times `2^lean`, and at least [`SURE`] of the
/// quota's part; the others get the tokens that a head does not need.
fn parts(quota: &[u32], held: &[u32], lean: &[f32], target: u64) -> SmallVec<[u32; 16]> {
    let mut parts: SmallVec<[u32; 16]> = held.into();
    let mut open: SmallVec<[usize; 16]> = (0..held.len()).collect();
    let mut left = target;
    loop {
        // NaN counts as 0. The largest weight is the head's quota, so that no power overflows.
        let lean = |h: usize| if lean[h].is_nan() { 0.0 } else { f64::from(lean[h]).clamp(-1e6, 1e6) };
        let most = open.iter().map(|h| lean(*h)).fold(f64::NEG_INFINITY, f64::max);
        let own = |h: usize| f64::from(quota[h].max(1));
        let weight = |h: usize| own(h) * libm::exp2(lean(h) - most);
        let owns: f64 = open.iter().map(|h| own(*h)).sum();
        let weights: f64 = open.iter().map(|h| weight(*h)).sum();
        let share = |h: usize| left as f64 * (SURE * own(h) / owns + (1.0 - SURE) * weight(h) / weights);
        let needs: SmallVec<[usize; 16]> =
            open.iter().copied().filter(|h| f64::from(held[*h]) <= share(*h)).collect();
        if needs.is_empty() || needs.len() == open.len() {
            open.iter().for_each(|h| parts[*h] = share(*h) as u32);
            let given: u64 = open.iter().map(|h| u64::from(parts[*h])).sum();
            let rest = open.iter().copied().cycle().take(left.saturating_sub(given) as usize);
            rest.for_each(|h| parts[h] += 1);
            return parts;
        }
        left -= total(&needs.iter().map(|h| held[*h]).collect::<SmallVec<[u32; 16]>>());
        open.retain(|h| !needs.contains(h));
    }
}

fn total(of: &[u32]) -> u64 {
    of.iter().map(|n| u64::from(*n)).sum()
}

/// Evicts tokens over the budgets of a sequence of `len` tokens, and over the sequence's `own` budget, in tokens of a head.
pub(crate) fn enforce(
    layers: &mut [Common<LayerPages>],
    inner: &CacheShape,
    rooms: &Rooms,
    (len, own): (u32, Option<u32>),
    pins: &[Range<u32>],
    mut report: Option<&mut Vec<Evicted>>,
) {
    let shapes = &inner.config.layers;
    let mut excess =
        layers.iter().zip(shapes).filter_map(|(layer, shape)| OverBudget::new(layer, shape, inner, len, own));
    if !excess.any(|e| e.any()) {
        return;
    }
    for (layer, h, (c, ordinal, lanes)) in choose(layers, inner, rooms, (len, own), pins) {
        let state = Common::own(&mut layers[layer]);
        let run = &mut state.heads[h].runs[c];
        if let (Some(report), Some(entry)) = (&mut report, run.entry(ordinal)) {
            let newest = entry.position(state.codecs[h].as_ref(), lanes.ilog2());
            report.push(Evicted {
                layer: layer as u32,
                kv_head: h as u32,
                tokens: lanes.count_ones(),
                bytes: if entry.live & !lanes == 0 { entry.bytes() } else { 0 },
                age: newest.map_or(0, |newest| len - 1 - newest),
            });
        }
        run.kill(ordinal, lanes);
        state.past.kill(len, h, c, ordinal, lanes);
    }
}

/// The tokens to evict, with layer and head; none if a page could not be read for a ranking (the next step tries again).
fn choose(
    layers: &[Common<LayerPages>],
    inner: &CacheShape,
    all: &Rooms,
    (len, own): (u32, Option<u32>),
    pins: &[Range<u32>],
) -> Vec<(usize, usize, Gone)> {
    let shapes = &inner.config.layers;
    let excess: Vec<Option<OverBudget<'_>>> = layers
        .iter()
        .zip(shapes)
        .map(|(layer, shape)| OverBudget::new(layer, shape, inner, len, own))
        .collect();
    let mut rooms = all.take();
    let mut gone = Vec::new();
    let sound = (0..layers.len()).all(|l| choose_of(&excess, l, len, pins, &mut rooms, &mut gone));
    all.give(rooms);
    if !sound {
        return Vec::new();
    }
    // Layers that rank together were listed at the first of them.
    gone.sort_by_key(|(layer, ..)| *layer);
    gone
}

/// Adds to `gone` the tokens to evict in layer `l`, and in later layers that rank together with it; returns `false` if a page could not
/// be read.
fn choose_of(
    excess: &[Option<OverBudget<'_>>],
    l: usize,
    len: u32,
    pins: &[Range<u32>],
    rooms: &mut Vec<RankingBuffers>,
    gone: &mut Vec<(usize, usize, Gone)>,
) -> bool {
    let Some(e) = &excess[l] else { return true };
    let Rule { name, scope, .. } = e.rule;
    let scope = *scope;
    let peer = |e: &OverBudget<'_>| e.rule.name == *name;
    let same: SmallVec<[(usize, &OverBudget<'_>); 1]> = match scope {
        Scope::Head | Scope::Layer => [(l, e)].into_iter().collect(),
        Scope::Sequence => {
            let known = excess.iter().enumerate().filter_map(|(l, e)| Some((l, e.as_ref()?)));
            known.filter(|(_, e)| peer(e)).collect()
        }
    };
    // The first layer of a group handles the whole group.
    if same[0].0 != l || !same.iter().any(|(_, e)| e.any()) {
        return true;
    }
    let heads = same.iter().flat_map(|(_, e)| (0..e.held.len()).map(move |h| (*e, h)));
    let mut ranked: Vec<HeadRanking<'_>> =
        heads.map(|(e, h)| HeadRanking::new(e, h, len, rooms.pop().unwrap_or_default())).collect();
    each_mut(&mut ranked, |_, ranked| {
        let (e, h) = (ranked.excess, ranked.head);
        // A head within its budget is ranked only if other heads need its utilities.
        if scope == Scope::Head && !e.over(h) {
            return;
        }
        match e.by_age() && e.limit[h].is_none() {
            true => {
                let (runs, codec) = (&e.layer.heads[h].runs, e.layer.codecs[h].as_ref());
                oldest(runs, codec, e.surplus(h), pins, &mut ranked.unranked);
            }
            false => ranked.rank(pins),
        }
    });
    let sound = !ranked.iter().any(|ranked| ranked.tokens.failed());
    if sound {
        if scope != Scope::Head {
            agree(&mut ranked);
        }
        let mut rest = &mut ranked[..];
        for (l, e) in &same {
            let (own, others) = rest.split_at_mut(e.held.len());
            e.victims(own);
            gone.extend(own.iter().flat_map(|of| of.gone().map(|gone| (*l, of.head, gone))));
            rest = others;
        }
    }
    rooms.extend(ranked.into_iter().map(HeadRanking::room));
    sound
}

/// Replaces utilities by their sums over all heads, by position. Takes up to 8 bytes for each token of each head.
fn agree(ranked: &mut [HeadRanking<'_>]) {
    let tokens = ranked.iter().flat_map(|ranked| &ranked.tokens.tokens);
    let mut positions: Vec<u32> = tokens.map(|token| token.position).collect();
    positions.sort_unstable();
    positions.dedup();
    let mut sums = vec![0.0f32; positions.len()];
    // Tokens of a head ascend in position.
    let place = |at: &mut usize, position: u32| {
        if positions[*at] < position {
            *at += 1;
            *at += positions[*at..].partition_point(|other| *other < position);
        }
        *at
    };
    for ranked in ranked.iter() {
        let mut at = 0;
        for (token, utility) in ranked.tokens.tokens.iter().zip(&ranked.utility) {
            sums[place(&mut at, token.position)] += utility;
        }
    }
    for HeadRanking { tokens, utility, .. } in ranked {
        let mut at = 0;
        for (token, utility) in tokens.tokens.iter().zip(utility) {
            *utility = sums[place(&mut at, token.position)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn parts_of_a_shared_budget_lean_and_add_up() {
        // Without a lean the parts are the quotas.
        assert_eq!(parts(&[100, 100], &[150, 150], &[0.5, 0.5], 200)[..], [100, 100]);
        assert_eq!(parts(&[100, 300], &[200, 400], &[0.0, 0.0], 400)[..], [100, 300]);
        // A fifth is sure; one head gets four times as much of the rest as the other.
        assert_eq!(parts(&[100, 100], &[190, 190], &[0.0, 2.0], 200)[..], [52, 148]);
        // The other head keeps its fifth, however large the lean.
        assert_eq!(parts(&[100, 100], &[190, 190], &[-1e9, 1e9], 200)[..], [20, 180]);
        assert_eq!(parts(&[100, 100], &[190, 190], &[f32::NAN, f32::INFINITY], 200)[..], [20, 180]);
        // The other heads get the tokens that a head does not hold.
        assert_eq!(parts(&[100, 100, 100], &[200, 40, 200], &[0.0, 2.0, 0.0], 300)[..], [130, 40, 130]);
        // The parts add up to the target.
        for target in 0..60u64 {
            let got = parts(&[10, 20, 30], &[20, 40, 60], &[0.3, -0.2, 0.1], target);
            assert_eq!(got.iter().sum::<u32>() as u64, target);
            assert!(got.iter().zip([20, 40, 60]).all(|(part, held)| *part <= held));
        }
    }
}
