//! Removal of rolled-back tokens from routers that learnt from them.
//!
//! A router learns once a step, from the rows of all its sequences. To be able to remove some of these rows, a
//! [`ClosedLoop`](super::ClosedLoop) keeps each step as long as one of its tokens can be rolled back: the routers' state before it, its
//! logits, and the pages wanted and missed. After a rollback the routers are restored to that state and learn the step again without the
//! removed rows, and then the later steps. Without a rollback only the step in progress is kept, since sequences may be left out of it.

pub(super) mod save;

use crate::router::met::Met;
use crate::router::tickets::TokensLeft;
use crate::router::{PageFeedback, RouteError, Router, RouterState, Routes};
use pikv_core::page::{PAGE, Position};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// Most steps that are kept, besides four for each token that can be rolled back. Older steps are not removed from routers; an average
/// with factor .9 has a thousandth of them left by then.
const STEPS: usize = 64;

/// Steps that are kept at most where so many tokens can be taken back.
fn most_steps(slack: u32) -> usize {
    STEPS + 4 * slack as usize
}

/// The rows of a sequence in a step.
#[derive(Debug)]
struct SequenceRows {
    left: Arc<TokensLeft>,
    /// Position of the first row that is kept, and the number of rows before it, which cannot be rolled back.
    first: Position,
    firm: u32,
    /// Rows that the routers have learnt, including the firm ones, and rows of the step.
    learnt: u32,
    rows: u32,
}

/// A layer of a kept step.
#[derive(Debug, Default)]
struct KeptLayer {
    /// The router's state before the rows that are kept.
    before: Option<RouterState>,
    /// Whether the layer's router has routed its rows.
    routed: bool,
    /// Logits of those rows: `[rows][experts]`.
    logits: Vec<f32>,
    /// Pages wanted and held, by index of the sequence, then by row; rows that cannot be rolled back are added to row 0.
    met: Vec<(usize, Met)>,
    experts: usize,
    remote: u64,
}

/// A step that is kept so that routers can learn it again.
#[derive(Debug, Default)]
struct KeptStep {
    parts: Vec<SequenceRows>,
    layers: Vec<KeptLayer>,
}

/// The steps of a loop that routers may have to unlearn, the newest last.
#[derive(Debug, Default)]
pub(super) struct Learnt {
    steps: VecDeque<KeptStep>,
    /// The step in progress.
    now: KeptStep,
    /// Lists of finished steps, for reuse.
    spare: Vec<KeptStep>,
    /// Most tokens that can be rolled back.
    slack: u32,
    none: Arc<TokensLeft>,
    routes: Routes,
    wanted: Vec<u32>,
    missed: Vec<u32>,
}

impl Learnt {
    pub fn new(slack: u32) -> Learnt {
        Learnt { slack, ..Learnt::default() }
    }

    /// Number of steps that are kept.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Whether steps are kept after commit.
    pub fn is_on(&self) -> bool {
        self.slack > 0
    }

    /// Starts a step of `layers` layers over sequences with these first positions and rows.
    pub fn begin(&mut self, layers: usize, parts: impl Iterator<Item = (Position, usize)>) {
        self.now.parts.clear();
        for (first, rows) in parts {
            // Replaced by the sequence's own at commit.
            let (rows, left) = (rows as u32, self.none.clone());
            self.now.parts.push(SequenceRows { left, first, firm: 0, learnt: rows, rows });
        }
        // The firm rows of a long first step of one sequence are not learnt again.
        let first = self.is_on() && self.steps.is_empty();
        if let ([part], true) = (&mut self.now.parts[..], first) {
            part.firm = part.rows.saturating_sub(self.slack);
            part.first = Position(part.first.0 + part.firm);
        }
        self.now.layers.resize_with(layers, KeptLayer::default);
        self.now.layers.iter_mut().for_each(|layer| (layer.before, layer.routed) = (None, false));
    }

    /// Rows of the step's only sequence that cannot be rolled back, to be routed apart from the others.
    pub fn firm(&self) -> usize {
        self.now.parts.first().map_or(0, |part| part.firm as usize)
    }

    /// Records the state of a layer's router before it routes, and, sequence by sequence, the logits of the rows that can be rolled
    /// back.
    pub fn routing<'l>(
        &mut self,
        layer: usize,
        router: &dyn Router,
        logits: impl Iterator<Item = &'l [f32]>,
    ) {
        let on = self.is_on();
        if let Some(layer) = self.now.layers.get_mut(layer) {
            (layer.before, layer.routed) = (on.then(|| router.state()), true);
            layer.logits.clear();
            logits.for_each(|own| layer.logits.extend_from_slice(own));
        }
    }

    /// Leaves one sequence, which is not the last, out of the step in progress: routers discard their choices for it.
    ///
    /// # Errors
    /// The first layer whose router refuses rows that it accepted before, with the error. Its choices of the step are discarded.
    ///
    /// # Panics
    /// If a router panics. Its choices are discarded, and the other routers have discarded the sequence.
    pub fn leave_out(
        &mut self,
        sequence: usize,
        routers: &mut [Box<dyn Router>],
    ) -> Result<(), (usize, RouteError)> {
        let Learnt { now: KeptStep { parts, layers }, routes, .. } = self;
        let first: u32 = parts[..sequence].iter().map(|part| part.rows).sum();
        let gone = first as usize..(first + parts[sequence].rows) as usize;
        (parts[sequence].rows, parts[sequence].learnt) = (0, 0);
        let (mut panicked, mut refused) = (None, Ok(()));
        for (l, (layer, router)) in layers.iter_mut().zip(routers).enumerate().filter(|(_, of)| of.0.routed) {
            let experts = router.shape().experts as usize;
            layer.logits.drain(gone.start * experts..gone.end * experts);
            let again = catch_unwind(AssertUnwindSafe(|| {
                router.discard();
                let mut rest = &layer.logits[..];
                routes.clear();
                for part in parts.iter().filter(|part| part.rows > 0) {
                    let (own, others) = rest.split_at(part.rows as usize * experts);
                    rest = others;
                    router.route(part.first, own, routes)?;
                }
                Ok(())
            }));
            if !matches!(again, Ok(Ok(()))) {
                let _ = catch_unwind(AssertUnwindSafe(|| router.discard()));
            }
            match again {
                Ok(again) => refused = refused.and(again.map_err(|error| (l, error))),
                Err(panic) => panicked = panicked.or(Some(panic)),
            }
        }
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        refused
    }

    /// Records the pages that a layer of `experts` experts wanted and held, of each sequence by ascending rows.
    pub fn met(
        &mut self,
        layer: usize,
        experts: usize,
        met: impl Iterator<Item = (usize, Met)>,
        remote: u64,
    ) {
        let KeptStep { parts, layers } = &mut self.now;
        let Some(layer) = layers.get_mut(layer) else { return };
        (layer.experts, layer.remote) = (experts, remote);
        layer.met.clear();
        layer.met.extend(met.map(|(part, met)| match met.row < parts[part].firm {
            true => (part, Met { row: 0, ..met }),
            false => (part, met),
        }));
        layer.met.sort_unstable_by_key(|(part, met)| (*part, met.row, met.expert));
        layer.met.dedup_by(|(next_part, next), (part, kept)| {
            let same = (*next_part, next.row, next.expert) == (*part, kept.row, kept.expert);
            if same {
                (kept.wanted, kept.held) = (kept.wanted + next.wanted, kept.held + next.held);
            }
            same
        });
    }

    /// Ends the step; `tickets` are those of its sequences.
    pub fn committed(&mut self, tickets: &mut Vec<Arc<TokensLeft>>) {
        if !self.is_on() {
            return;
        }
        for (part, left) in self.now.parts.iter_mut().zip(tickets.drain(..)) {
            part.left = left;
        }
        let next = self.spare.pop().unwrap_or_default();
        self.steps.push_back(std::mem::replace(&mut self.now, next));
        let most = most_steps(self.slack);
        // A step of which nobody else holds a ticket cannot be taken back.
        let over = |step: &KeptStep| step.parts.iter().all(|part| Arc::strong_count(&part.left) == 1);
        while self.steps.len() > most || self.steps.front().is_some_and(over) {
            self.spare.extend(self.steps.pop_front());
        }
        self.spare.truncate(2);
    }

    /// Makes the routers unlearn the tokens that were rolled back since they learnt them.
    ///
    /// # Errors
    /// The first layer whose router refuses to restore its own state, with the error. It keeps what it learnt.
    ///
    /// # Panics
    /// If a router panics. Its choices are discarded, and the other routers have learnt.
    pub fn forget(&mut self, routers: &mut [Box<dyn Router>]) -> Result<(), (usize, RouteError)> {
        let rejected = |part: &SequenceRows| part.left.get() < part.learnt;
        let Some(first) = self.steps.iter().position(|step| step.parts.iter().any(rejected)) else {
            return Ok(());
        };
        let (mut panicked, mut refused) = (None, Ok(()));
        let mut steps = std::mem::take(&mut self.steps);
        for (l, router) in routers.iter_mut().enumerate() {
            let again = catch_unwind(AssertUnwindSafe(|| {
                for (i, step) in steps.iter_mut().enumerate().skip(first) {
                    self.learn(step, l, router.as_mut(), i == first)?;
                }
                Ok(())
            }));
            match again {
                Ok(again) => refused = refused.and(again.map_err(|error| (l, error))),
                Err(panic) => {
                    let _ = catch_unwind(AssertUnwindSafe(|| router.discard()));
                    panicked = panicked.or(Some(panic));
                }
            }
        }
        for part in steps.iter_mut().skip(first).flat_map(|step| &mut step.parts) {
            part.learnt = part.learnt.min(part.left.get().max(part.firm));
        }
        steps.retain(|step| step.parts.iter().any(|part| part.learnt > 0));
        self.steps = steps;
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        refused
    }

    /// Makes a layer's router learn a step again, from the state before it if `back`, else from its present state.
    fn learn(
        &mut self,
        step: &mut KeptStep,
        layer: usize,
        router: &mut dyn Router,
        back: bool,
    ) -> Result<(), RouteError> {
        let KeptStep { parts, layers } = step;
        let Some(layer) = layers.get_mut(layer) else { return Ok(()) };
        // A layer without rows has nothing to learn.
        let Some(before) = &mut layer.before else { return Ok(()) };
        if back {
            router.restore(before)?;
        } else {
            *before = router.state();
        }
        let count = layer.experts;
        let (mut wanted, mut missed) = (vec![0u64; count], vec![0u64; count]);
        let mut rest = &layer.logits[..];
        let (mut stay_of_all, mut rows_of_all) = (0u64, 0u64);
        self.routes.clear();
        for (i, part) in parts.iter().enumerate() {
            let kept = (part.rows - part.firm) as usize;
            let stay = part.left.get().min(part.learnt).saturating_sub(part.firm) as usize;
            (stay_of_all, rows_of_all) =
                (stay_of_all + u64::from(part.firm) + stay as u64, rows_of_all + u64::from(part.rows));
            let (own, others) = rest.split_at(kept * count);
            rest = others;
            if stay > 0 && router.route(part.first, &own[..stay * count], &mut self.routes).is_err() {
                router.discard();
            }
            let left = part.firm + stay as u32;
            for (_, met) in layer.met.iter().filter(|(of, met)| *of == i && met.row < left) {
                let e = usize::from(met.expert);
                wanted[e] += u64::from(met.wanted * PAGE);
                missed[e] += u64::from(met.missed());
            }
        }
        if stay_of_all == 0 {
            return Ok(());
        }
        narrow(&wanted, &missed, &mut self.wanted, &mut self.missed);
        let remote = (u128::from(layer.remote) * u128::from(stay_of_all) / u128::from(rows_of_all)) as u64;
        let feedback = PageFeedback::new(&self.wanted, &self.missed).of_page(PAGE).remote_bytes(remote);
        if router.observe(&feedback).is_err() {
            router.discard();
        }
        Ok(())
    }
}

/// Scales counts of pages to 32 bits for routers: where counts are larger, only their ratios matter.
pub(super) fn narrow(wanted: &[u64], missed: &[u64], to_wanted: &mut Vec<u32>, to_missed: &mut Vec<u32>) {
    let most = wanted.iter().copied().max().unwrap_or(0);
    let shift = (64 - most.leading_zeros()).saturating_sub(32);
    for (from, to) in [(wanted, to_wanted), (missed, to_missed)] {
        to.clear();
        to.extend(from.iter().map(|n| (n >> shift) as u32));
    }
}
