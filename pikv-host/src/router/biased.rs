//! The common core of R_T, R_LB, R_P, R_E and R_H, with R_A choosing its coefficients.

use super::on_device::{Averages, DeviceChoice, DevicePlan};
use super::{
    Coefficients, PageFeedback, RouteError, Router, RouterKind, RouterState, Routes, Shape, coefficient,
    decay, length, positions,
};
use pikv_core::page::Position;
use pikv_core::score::{self, Bias, Groups, MAX_GROUPS, Ranking};
use pikv_core::warp::LANES;
use pikv_lanes::route::{binary_entropy, penalties};

/// The definition of `m_e` in [`CacheAware`](super::CacheAware).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Misses {
    /// The moving average of the share of the expert's wanted pages that were missed, in [0, 1]. An expert without wanted pages keeps its
    /// average.
    #[default]
    Rate,
    /// The paper's count of missed pages, decayed at each feedback. It grows with the length of the context, and of two experts with the
    /// same miss rate the one used more has the larger count.
    Count,
}

/// Options of the core.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Terms {
    pub coefficients: Coefficients,
    /// Name of the router's own coefficient, which must be above 0.
    pub acts: Option<&'static str>,
    /// Factor of the load average at each feedback, if load is kept.
    pub load: Option<f32>,
    /// Definition of misses, and the factor of their average, if they are kept.
    pub miss: Option<(Misses, f32)>,
    /// Factor of the average of the gate's binary entropy at each token, if it is kept.
    pub entropy: Option<f32>,
    pub cap: Option<f32>,
    pub groups: Option<Groups>,
    pub model_choice: bool,
    /// Most experts beyond the row's own to fetch, where the gate is undecided.
    pub more: u32,
}

impl Terms {
    fn check(&self, shape: &Shape) -> Result<(), RouteError> {
        let Coefficients { alpha, lambda, beta } = self.coefficients;
        for (name, value) in [("alpha", alpha), ("lambda", lambda), ("beta", beta)] {
            coefficient(name, value, self.acts == Some(name))?;
        }
        let miss = self.miss.map(|(_, decay)| decay);
        for (name, value) in
            [("load average", self.load), ("miss average", miss), ("entropy average", self.entropy)]
        {
            value.map_or(Ok(()), |value| decay(name, value))?;
        }
        if let Some(cap) = self.cap
            && !(cap > 0.0 && cap.is_finite())
        {
            return Err(RouteError::Cap(cap));
        }
        let Shape { experts, top_k, .. } = *shape;
        if let Some(Groups { count, kept, best }) = self.groups {
            if count == 0 || count as usize > MAX_GROUPS || !experts.is_multiple_of(count) {
                return Err(RouteError::Groups { groups: count, experts });
            }
            let size = experts / count;
            if kept == 0 || kept > count || kept * size < top_k {
                return Err(RouteError::Kept { kept, groups: count, size, top_k });
            }
            if best == 0 || best > size {
                return Err(RouteError::Best { best, size });
            }
            // The chosen experts lie in at most `top_k` groups; where a group's score is its best expert, those groups rank first.
            if kept == count || (best == 1 && kept >= top_k) {
                return Err(RouteError::Idle { groups: count, kept, best, top_k });
            }
        }
        Ok(())
    }
}

/// A router that subtracts a bias from the logits and ranks the result:
/// `logit_e - alpha (mu_e - mean mu) - lambda ln(1 + m_e) - beta h_e`.
///
/// `mu` is the average of an expert's share of the choices times the number of experts, initially 1; `m` the average of its pages'
/// misses, initially 0; `h` the average over tokens of the gate's binary entropy about the expert, initially 0.5. Built by
/// [`TopK`](super::TopK), [`LoadBalanced`](super::LoadBalanced), [`CacheAware`](super::CacheAware),
/// [`EntropyPenalised`](super::EntropyPenalised) and [`Hierarchical`](super::Hierarchical).
#[derive(Clone, Debug)]
pub struct Biased {
    kind: RouterKind,
    shape: Shape,
    terms: Terms,
    /// `[experts]` if load is kept, else empty; likewise the others.
    load: Vec<f32>,
    miss: Vec<f32>,
    entropy: Vec<f32>,
    /// `entropy` including the rows since the last feedback; used in the ranking from the next feedback on.
    entropy_next: Vec<f32>,
    counts: Vec<u64>,
    /// The bias, which all tokens share.
    fixed: Vec<[f32; LANES]>,
}

impl Biased {
    pub(super) fn new(kind: RouterKind, shape: Shape, terms: Terms) -> Result<Biased, RouteError> {
        let shape = shape.check()?;
        terms.check(&shape)?;
        let biased = terms.acts.is_some() || terms.coefficients != Coefficients::default();
        if terms.model_choice && biased && terms.cap.is_none() {
            return Err(RouteError::Uncapped);
        }
        let experts = shape.experts as usize;
        let kept = |average: bool| if average { experts } else { 0 };
        let (loads, misses) = (kept(terms.load.is_some()), kept(terms.miss.is_some()));
        let entropies = kept(terms.entropy.is_some());
        let mut new = Biased {
            kind,
            shape,
            terms,
            load: vec![1.0; loads],
            miss: vec![0.0; misses],
            entropy: vec![0.5; entropies],
            entropy_next: vec![0.5; entropies],
            counts: vec![0; loads],
            fixed: vec![[0.0; LANES]; score::rows(experts)],
        };
        new.update_penalties();
        Ok(new)
    }

    /// Average of each expert's share of the choices, times the number of experts: `[experts]`, or empty if it is not kept.
    pub fn load(&self) -> &[f32] {
        &self.load
    }

    /// Average of each expert's misses: `[experts]`, or empty if it is not kept.
    pub fn miss(&self) -> &[f32] {
        &self.miss
    }

    /// Average over tokens of the gate's binary entropy about each expert, in [0, 1], up to the last feedback: `[experts]`, or empty if it
    /// is not kept.
    pub fn entropy(&self) -> &[f32] {
        &self.entropy
    }

    /// `[experts]` choices since the last feedback.
    pub(super) fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Sets the coefficients of the ranking.
    pub(super) fn steer(&mut self, coefficients: Coefficients) {
        self.terms.coefficients = coefficients;
        self.update_penalties();
    }

    /// Recomputes `fixed`.
    fn update_penalties(&mut self) {
        let Biased { shape, load, miss, entropy, fixed, terms: Terms { coefficients, .. }, .. } = self;
        penalties(shape.lanes, *coefficients, shape.experts as usize, load, miss, entropy, fixed);
    }

    fn ranking(&self) -> Ranking<'_> {
        let Terms { coefficients, cap, groups, .. } = self.terms;
        let bias = Bias { fixed: &self.fixed, cap };
        Ranking { bias: (coefficients != Coefficients::default()).then_some(bias), groups }
    }

    /// [`Router::route`] with `fetch` experts of a row to fetch.
    pub(super) fn route_fetching(
        &mut self,
        first: Position,
        logits: &[f32],
        fetch: u32,
        out: &mut Routes,
    ) -> Result<(), RouteError> {
        let rows = self.shape.rows(logits)?;
        positions(first, rows)?;
        let old = out.grow(rows, self.shape.top_k as usize, fetch as usize)?;
        let ranking = self.ranking();
        let same = self.terms.model_choice || (ranking.bias.is_none() && ranking.groups.is_none());
        let (model, filing) = (&mut out.model, &mut out.filing);
        self.shape.rank(logits, ranking, &mut filing.experts[old..], &mut filing.weights[old..]);
        if same {
            model.experts[old..].copy_from_slice(&filing.experts[old..]);
            model.weights[old..].copy_from_slice(&filing.weights[old..]);
        } else {
            let plain = Ranking::default();
            self.shape.rank(logits, plain, &mut model.experts[old..], &mut model.weights[old..]);
        }
        count(&mut self.counts, &filing.experts[old..]);
        if let Some(keep) = self.terms.entropy {
            binary_entropy(self.shape.lanes, logits, keep, &mut self.entropy_next);
        }
        if self.terms.more > 0 {
            self.fetch_more(logits, out);
        }
        Ok(())
    }

    /// [`Router::device_plan`] with `fetch` experts of a row to fetch.
    pub(super) fn plan_fetching(&self, fetch: u32) -> Result<DevicePlan<'_>, RouteError> {
        let Terms { coefficients, load, miss, entropy, cap, groups, model_choice, more, .. } = self.terms;
        if more > 0 {
            let why = "the experts that it fetches beside its own (EntropyPenalised::more) follow from logarithms in f64, which the host takes";
            return Err(RouteError::HostOnly { router: self.kind, why });
        }
        let biased = coefficients != Coefficients::default();
        let averages = Averages {
            coefficients,
            fixed: &self.fixed,
            load: &self.load,
            miss: &self.miss,
            entropy: &self.entropy,
            entropy_next: &self.entropy_next,
            counts: &self.counts,
            keep_load: load.unwrap_or_default(),
            keep_miss: miss.unwrap_or_default(),
            keep_entropy: entropy.unwrap_or_default(),
        };
        let choice = DeviceChoice::HeadRanking { biased, cap, groups };
        Ok(DevicePlan { choice, fetch, same: model_choice || !(biased || groups.is_some()), averages })
    }

    /// Appends to `out` the experts after the `top_k` of each row, and how many of them to fetch: the gate's entropy relative to a uniform
    /// gate's, in `0..=1`, cut into `more + 1` equal parts.
    fn fetch_more(&self, logits: &[f32], out: &mut Routes) {
        let Shape { experts, top_k, .. } = self.shape;
        let width = self.terms.more.min(experts - top_k);
        let wide = Shape { top_k: top_k + width, ..self.shape };
        let rows = logits.len() / experts as usize;
        let all = rows * wide.top_k as usize;
        let (mut ranked, mut weights) = (vec![0; all], vec![0.0; all]);
        wide.rank(logits, self.ranking(), &mut ranked, &mut weights);
        for (row, ranked) in
            logits.chunks_exact(experts as usize).zip(ranked.chunks_exact(wide.top_k as usize))
        {
            out.more.extend_from_slice(&ranked[top_k as usize..]);
            out.counts.push((entropy(row) * f64::from(width + 1)).min(f64::from(width)) as u8);
        }
    }

    /// [`Router::observe`] of checked feedback.
    pub(super) fn learn(&mut self, feedback: &PageFeedback<'_>) {
        let total: u64 = self.counts.iter().sum();
        if let Some(keep) = self.terms.load
            && total > 0
        {
            for (mu, n) in self.load.iter_mut().zip(&mut self.counts) {
                *mu = score::learn_load(keep, *mu, std::mem::take(n), total, self.shape.experts);
            }
        }
        if let Some((measure, keep)) = self.terms.miss {
            for (m, (wanted, missed)) in self.miss.iter_mut().zip(feedback.wanted.iter().zip(feedback.missed))
            {
                *m = match measure {
                    Misses::Rate => score::learn_rate(keep, *m, *wanted, *missed),
                    Misses::Count => score::learn_count(keep, *m, *missed, feedback.of_page),
                };
            }
        }
        self.entropy.copy_from_slice(&self.entropy_next);
        self.update_penalties();
    }
}

/// Adds choices to the `counts` of experts, if they are kept.
fn count(counts: &mut [u64], chosen: &[u16]) {
    if !counts.is_empty() {
        for expert in chosen {
            counts[usize::from(*expert)] += 1;
        }
    }
}

/// Entropy of the softmax of `logits` relative to a uniform one's, in `0..=1`; 0 for a single logit. In f64 in a fixed order, so that it
/// has the same bits everywhere.
fn entropy(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut sum, mut weighted) = (0.0, 0.0);
    for x in logits {
        let below = f64::from(*x) - f64::from(most);
        let weight = libm::exp(below);
        (sum, weighted) = (sum + weight, weighted + weight * below);
    }
    let uniform = libm::log(logits.len() as f64);
    if uniform > 0.0 { ((libm::log(sum) - weighted / sum) / uniform).clamp(0.0, 1.0) } else { 0.0 }
}

impl Router for Biased {
    fn kind(&self) -> RouterKind {
        self.kind
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError> {
        self.route_fetching(first, logits, self.shape.top_k, out)
    }

    fn device_plan(&self) -> Result<DevicePlan<'_>, RouteError> {
        self.plan_fetching(self.shape.top_k)
    }

    fn routed(&mut self, chosen: &[u16], entropy: &[f32]) -> Result<(), RouteError> {
        self.shape.check_chosen(chosen)?;
        length("entropy", entropy.len(), self.entropy_next.len(), "experts where it is kept")?;
        count(&mut self.counts, chosen);
        self.entropy_next.copy_from_slice(entropy);
        Ok(())
    }

    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError> {
        feedback.check(&self.shape)?;
        self.learn(feedback);
        Ok(())
    }

    fn wants_hits(&self) -> bool {
        self.terms.miss.is_some()
    }

    fn discard(&mut self) {
        self.counts.fill(0);
        self.entropy_next.copy_from_slice(&self.entropy);
    }

    fn state(&self) -> RouterState {
        RouterState {
            load: self.load.clone(),
            miss: self.miss.clone(),
            entropy: self.entropy.clone(),
            entropy_next: self.entropy_next.clone(),
            counts: self.counts.clone(),
            ..RouterState::new(self.kind, self.shape.experts)
        }
    }

    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError> {
        state.check_as(&self.state())?;
        self.adopt(state);
        Ok(())
    }
}

impl Biased {
    /// Takes over a checked state.
    pub(super) fn adopt(&mut self, state: &RouterState) {
        self.load.copy_from_slice(&state.load);
        self.miss.copy_from_slice(&state.miss);
        self.entropy.copy_from_slice(&state.entropy);
        self.entropy_next.copy_from_slice(&state.entropy_next);
        self.counts.copy_from_slice(&state.counts);
        self.update_penalties();
    }
}
