//! Routers: from a token's logits to the experts that its KV is filed under and fetched by.
//!
//! One router serves one layer. A router *ranks*; it does not change the model: beside its own ranking
//! ([`Routes::filing`]) it gives the model's plain top-k ([`Routes::model`]), and in both the weights are the softmax over
//! the chosen raw logits. Where `model_choice` is set, the model follows the ranking too.
//!
//! A step goes: [`Router::route`] for each sequence, [`Step::route`](crate::Step::route) with the filing, the fetch, then
//! [`Router::observe`] with what the fetch met. What rows are ranked by changes in `observe` alone, so rows may be routed in any
//! number of calls. Scores are those of [`pikv_core::score`], and with them every result, are the same bits on all lanes.
//!
//! | id | options | ranks by |
//! |---|---|---|
//! | R_B | [`Hashed`] | a hash of the position, or round robin |
//! | R_T | [`TopK`] | logits |
//! | R_LB | [`LoadBalanced`] | logits less what loaded experts pay |
//! | R_P | [`CacheAware`] | logits less what experts pay whose pages miss |
//! | R_E | [`EntropyPenalised`] | logits less what experts pay about which the gate is undecided |
//! | R_A | [`Adaptive`] | the above, chosen by a bandit |
//! | R_H | [`Hierarchical`] | logits inside the best groups |
//!
//! Names and ids are those of arXiv 2508.06526; meanings are those of the methods' own papers, named in each file.
//!
//! ```
//! # use pikv_host as pikv;
//! use pikv::Position;
//! use pikv::router::{CacheAware, Feedback, Router, Routes, Shape};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut router = CacheAware::default().router(Shape::new(4, 2))?;
//! let mut routes = Routes::default();
//! router.route(Position(0), &[1.0, 0.98, 0.97, -2.0], &mut routes)?;
//! assert_eq!(routes.filing().experts, [0, 1]);
//! router.observe(&Feedback::new(&[8, 8, 8, 0], &[0, 8, 0, 0]))?;  // the pages of expert 1 were not there
//! routes.clear();
//! for _ in 0..8 {
//!     router.observe(&Feedback::new(&[8, 8, 8, 0], &[0, 8, 0, 0]))?;
//! }
//! router.route(Position(1), &[1.0, 0.98, 0.97, -2.0], &mut routes)?;
//! assert_eq!(routes.filing().experts, [0, 2]);
//! assert_eq!(routes.model().experts, [0, 1]);
//! # Ok(())
//! # }
//! ```

mod auxiliary;
mod biased;
mod eplb;
mod error;
pub(crate) mod learnt;
pub(crate) mod met;
pub(crate) mod on_device;
mod r_a;
mod r_b;
mod r_e;
mod r_h;
mod r_lb;
mod r_p;
mod r_t;
mod solve;
mod state;

pub use auxiliary::{Auxiliary, auxiliary};
pub use biased::{Biased, Misses};
pub use eplb::{Eplb, EplbError, Placement};
pub use error::{RouteError, StateError};
pub use on_device::DevicePlan;
pub use pikv_core::score::Coefficients;
pub use r_a::{Adaptive, Arm, Bandit};
pub use r_b::{HashRouter, Hashed, Start};
pub use r_e::EntropyPenalised;
pub use r_h::Hierarchical;
pub use r_lb::LoadBalanced;
pub use r_p::CacheAware;
pub use r_t::TopK;
pub use state::{ArmState, BanditState, RouterState};

use pikv_core::page::Position;
use pikv_core::score::{MAX_EXPERTS, Ranking};
use pikv_lanes::{Lanes, route::rank};
use std::fmt;
use std::ops::Range;

/// The largest weight of a part of a bias: with it no score overflows.
pub const MAX_COEFFICIENT: f32 = 1e6;

/// Experts of a layer, and what to compute with. Checked when a router is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shape {
    /// Experts, 1..=1024.
    pub experts: u32,
    /// Experts a token, 1..=experts; usually 2.
    pub top_k: u32,
    /// Lanes to compute with; they do not change a bit.
    pub lanes: Lanes,
}

impl Shape {
    /// `top_k` of `experts`, on the fastest lanes of this machine.
    pub fn new(experts: u32, top_k: u32) -> Shape {
        Shape { experts, top_k, lanes: Lanes::detect() }
    }

    /// Sets the lanes.
    pub fn lanes(mut self, lanes: Lanes) -> Shape {
        self.lanes = lanes;
        self
    }

    fn check(self) -> Result<Shape, RouteError> {
        let Shape { experts, top_k, .. } = self;
        if experts == 0 || experts as usize > MAX_EXPERTS {
            return Err(RouteError::Experts(experts));
        }
        if top_k == 0 || top_k > experts {
            return Err(RouteError::TopK { top_k, experts });
        }
        Ok(self)
    }

    /// That `chosen` is whole rows of experts that are there.
    fn check_chosen(&self, chosen: &[u16]) -> Result<(), RouteError> {
        let top_k = self.top_k as usize;
        length("chosen", chosen.len(), chosen.len() / top_k * top_k, "rows * top_k")?;
        match chosen.iter().position(|expert| u32::from(*expert) >= self.experts) {
            Some(i) => Err(RouteError::Expert { row: i / top_k, expert: chosen[i], experts: self.experts }),
            None => Ok(()),
        }
    }

    /// Rows of `logits`, `[rows][experts]`, which must be finite.
    fn rows(&self, logits: &[f32]) -> Result<usize, RouteError> {
        let experts = self.experts as usize;
        let rows = logits.len() / experts;
        length("logits", logits.len(), rows * experts, "rows * experts")?;
        match logits.iter().position(|x| !x.is_finite()) {
            Some(i) => Err(RouteError::Logit { row: i / experts, expert: i % experts, value: logits[i] }),
            None => Ok(rows),
        }
    }
}

/// Which router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u16)]
pub enum RouterKind {
    /// R_B, [`Hashed`].
    Hash = 0,
    /// R_T, [`TopK`].
    TopK = 1,
    /// R_LB, [`LoadBalanced`].
    LoadBalanced = 2,
    /// R_P, [`CacheAware`].
    CacheAware = 3,
    /// R_E, [`EntropyPenalised`].
    Entropy = 4,
    /// R_A, [`Adaptive`].
    Adaptive = 5,
    /// R_H, [`Hierarchical`].
    Hierarchical = 6,
}

impl RouterKind {
    /// All of them.
    pub const ALL: [RouterKind; 7] = [
        RouterKind::Hash,
        RouterKind::TopK,
        RouterKind::LoadBalanced,
        RouterKind::CacheAware,
        RouterKind::Entropy,
        RouterKind::Adaptive,
        RouterKind::Hierarchical,
    ];

    /// The paper's id, as `"R_LB"`.
    pub const fn id(self) -> &'static str {
        match self {
            RouterKind::Hash => "R_B",
            RouterKind::TopK => "R_T",
            RouterKind::LoadBalanced => "R_LB",
            RouterKind::CacheAware => "R_P",
            RouterKind::Entropy => "R_E",
            RouterKind::Adaptive => "R_A",
            RouterKind::Hierarchical => "R_H",
        }
    }
}

impl fmt::Display for RouterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// Experts of some rows, and their weights.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// `[rows][top_k]`, the best first, as [`Step::route`](crate::Step::route) wants them.
    pub experts: Vec<u16>,
    /// `[rows][top_k]`, of the same experts: the softmax over the row's chosen raw logits. A row's sum is 1, up to rounding.
    pub weights: Vec<f32>,
}

/// What routers chose. Rows are added by each [`Router::route`], so that a batch of sequences ends up in one piece.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    model: Choice,
    filing: Choice,
    top_k: usize,
    fetch: usize,
    /// Experts that rank behind the `top_k`: as many for each row as it may fetch more at most, and of each row how many it does.
    more: Vec<u16>,
    counts: Vec<u8>,
}

impl Routes {
    /// What the model mixes: its own top-k, or the filing where `model_choice` is set.
    pub fn model(&self) -> &Choice {
        &self.model
    }

    /// What KV is filed under and fetched by: the router's ranking.
    pub fn filing(&self) -> &Choice {
        &self.filing
    }

    /// Experts of each row whose pages are to be fetched, from the best on: all of them, or what R_A's arm says.
    pub fn fetch(&self) -> usize {
        self.fetch
    }

    /// All experts whose pages row `row` is to fetch, the best first: [`fetch`](Routes::fetch) of its filing, and those behind them that
    /// R_E adds where its gate is undecided ([`EntropyPenalised::more`]). None for a row that is not there.
    pub fn fetched(&self, row: usize) -> impl Iterator<Item = u16> {
        let own = self.filing.experts.chunks_exact(self.top_k.max(1)).nth(row).unwrap_or_default();
        let width = self.more.len().checked_div(self.counts.len()).unwrap_or(0);
        let count = self.counts.get(row).map_or(0, |count| usize::from(*count));
        let more = self.more.get(row * width..row * width + count).unwrap_or_default();
        own[..self.fetch.min(own.len())].iter().chain(more).copied()
    }

    /// Of each row the experts behind its own that it may fetch, and how many it does.
    pub(crate) fn more(&self) -> (&[u16], &[u8]) {
        (&self.more, &self.counts)
    }

    /// Rows that are there.
    pub fn rows(&self) -> usize {
        self.filing.experts.len().checked_div(self.top_k).unwrap_or(0)
    }

    /// Takes all rows out.
    pub fn clear(&mut self) {
        for choice in [&mut self.model, &mut self.filing] {
            choice.experts.clear();
            choice.weights.clear();
        }
        self.more.clear();
        self.counts.clear();
    }

    /// Takes the place of all rows with `chosen`, `[rows][top_k]`, whose weights lie on a device.
    pub(crate) fn brought(&mut self, chosen: &[u16], top_k: usize, fetch: usize) {
        self.clear();
        (self.top_k, self.fetch) = (top_k, fetch);
        self.filing.experts.extend_from_slice(chosen);
    }

    /// Adds rows of zeros at `gaps`, ranges of the rows that there are then, ascending: those of sequences that were left out of a step.
    pub(crate) fn spread(&mut self, gaps: impl Iterator<Item = Range<usize>>, top_k: usize) {
        let width = self.more.len().checked_div(self.counts.len());
        self.top_k = top_k;
        for gap in gaps {
            for choice in [&mut self.model, &mut self.filing] {
                zeros(&mut choice.experts, &gap, top_k);
                zeros(&mut choice.weights, &gap, top_k);
            }
            if let Some(width) = width {
                zeros(&mut self.more, &gap, width);
                zeros(&mut self.counts, &gap, 1);
            }
        }
    }

    /// Room for `rows` more; gives the number of elements there were.
    fn grow(&mut self, rows: usize, top_k: usize, fetch: usize) -> Result<usize, RouteError> {
        let held = self.filing.experts.len();
        if held > 0 && (self.top_k, self.fetch) != (top_k, fetch) {
            return Err(RouteError::Routes { held: self.top_k, held_fetch: self.fetch, top_k, fetch });
        }
        (self.top_k, self.fetch) = (top_k, fetch);
        for choice in [&mut self.model, &mut self.filing] {
            choice.experts.resize(held + rows * top_k, 0);
            choice.weights.resize(held + rows * top_k, 0.0);
        }
        Ok(held)
    }
}

/// What the fetch of a step met, over all rows that were routed since the last feedback.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Feedback<'a> {
    /// `[experts]` pages of each expert that rows wanted, fetched or not, summed over rows and KV heads;
    /// [`StepReport`](crate::StepReport) says what is wanted. In parts of a page, [`of_page`](Feedback::of_page) to one.
    pub wanted: &'a [u32],
    /// `[experts]` those of them that were evicted, remote, in a lower tier, or of an expert that was not fetched.
    pub missed: &'a [u32],
    /// Parts of a page that the two count; 1 by default, 32 from a [`ClosedLoop`](crate::ClosedLoop).
    pub of_page: u32,
    /// Bytes that came from other devices or lower tiers. R_A alone reads it.
    pub remote_bytes: u64,
}

impl<'a> Feedback<'a> {
    /// Pages wanted and missed, both `[experts]`; no remote bytes.
    pub fn new(wanted: &'a [u32], missed: &'a [u32]) -> Feedback<'a> {
        Feedback { wanted, missed, of_page: 1, remote_bytes: 0 }
    }

    /// Sets how many parts of a page were counted as one.
    pub fn of_page(mut self, parts: u32) -> Feedback<'a> {
        self.of_page = parts;
        self
    }

    /// Sets the remote bytes.
    pub fn remote_bytes(mut self, bytes: u64) -> Feedback<'a> {
        self.remote_bytes = bytes;
        self
    }

    fn check(&self, shape: &Shape) -> Result<(), RouteError> {
        length("wanted", self.wanted.len(), shape.experts as usize, "experts")?;
        length("missed", self.missed.len(), shape.experts as usize, "experts")?;
        for (expert, (&wanted, &missed)) in self.wanted.iter().zip(self.missed).enumerate() {
            if missed > wanted {
                return Err(RouteError::Feedback { expert, missed, wanted });
            }
        }
        Ok(())
    }
}

/// A router of one layer.
///
/// Object-safe, so that an engine can hold a `Vec<Box<dyn Router>>`, one a layer.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::Position;
/// use pikv::router::{Feedback, LoadBalanced, Router, Routes, Shape, TopK};
///
/// # fn main() -> Result<(), pikv::router::RouteError> {
/// let shape = Shape::new(4, 2);                           // 4 experts, 2 for each token
/// let mut layers: Vec<Box<dyn Router>> = vec![
///     Box::new(TopK::default().router(shape)?),
///     Box::new(LoadBalanced::default().router(shape)?),
/// ];
/// let mut routes = Routes::default();
/// for router in &mut layers {
///     routes.clear();
///     router.route(Position(0), &[0.1, 0.9, 0.3, -1.0], &mut routes)?;
///     assert_eq!(routes.filing().experts, [1, 2]);        // for Step::route
///     router.observe(&Feedback::new(&[0, 8, 8, 0], &[0, 0, 2, 0]))?; // after the step: pages wanted, and missed
/// }
/// # Ok(())
/// # }
/// ```
pub trait Router: fmt::Debug + Send + Sync {
    /// Which router it is.
    fn kind(&self) -> RouterKind;

    /// Its experts.
    fn shape(&self) -> Shape;

    /// Chooses the experts of tokens at consecutive positions from `first`, and adds the rows to `out`. `logits` is
    /// `[rows][experts]`, as the model's gate gives them, before any softmax. The choices, and what averages need of
    /// the logits, are kept for [`observe`](Router::observe); nothing else changes.
    ///
    /// # Errors
    /// `logits` of a length that is not whole rows or with a value that is not finite, positions past the last, or `out` that
    /// holds rows of another width.
    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError>;

    /// Takes in what the fetch met, and the choices since the last call. Call it once a step, after the fetch.
    ///
    /// # Errors
    /// Slices that are not `[experts]`, or more pages missed than wanted.
    fn observe(&mut self, feedback: &Feedback<'_>) -> Result<(), RouteError>;

    /// What a device needs to choose in this router's place ([`LoopStep::route_device`](crate::closed_loop::LoopStep::route_device)). A
    /// router of your own that wraps one of pikv's passes it on, and [`routed`](Router::routed) too; any other leaves both as they are, and
    /// routes on the host.
    ///
    /// # Errors
    /// [`RouteError::HostOnly`] with the reason.
    fn device_plan(&self) -> Result<DevicePlan<'_>, RouteError> {
        Err(RouteError::HostOnly {
            router: self.kind(),
            why: "it has no plan for a device (Router::device_plan)",
        })
    }

    /// Takes in rows whose experts a device chose by [`device_plan`](Router::device_plan), as [`route`](Router::route) takes in those that
    /// it chooses itself: `chosen` is `[rows][top_k]`, `entropy` `[experts]` the averages of the gate's entropy with the rows in them,
    /// empty where they are not kept.
    ///
    /// # Errors
    /// Slices of the wrong length, an expert that is not there, or [`RouteError::HostOnly`] of a router that does not do it.
    fn routed(&mut self, chosen: &[u16], entropy: &[f32]) -> Result<(), RouteError> {
        let _ = (chosen, entropy);
        let why = "it does not take in what a device chose (Router::routed)";
        Err(RouteError::HostOnly { router: self.kind(), why })
    }

    /// Whether it learns from [`Feedback::wanted`]: a [`ClosedLoop`](crate::ClosedLoop) has hits counted then
    /// ([`Hits`](crate::rules::Hits)).
    fn wants_hits(&self) -> bool {
        true
    }

    /// Forgets the choices since the last [`observe`](Router::observe), as when a step is dropped.
    fn discard(&mut self);

    /// Whether [`state`](Router::state) has all that the router has learnt, so that [`ClosedLoop::save`](crate::ClosedLoop::save) can write
    /// it. A router of your own that learns more than a [`RouterState`] holds returns [`RouteError::Unsaved`]; one that wraps another passes it on.
    ///
    /// # Errors
    /// [`RouteError::Unsaved`] with the reason.
    fn saves(&self) -> Result<(), RouteError> {
        Ok(())
    }

    /// What the router has learnt. The options are not part of it.
    fn state(&self) -> RouterState;

    /// Goes on from `state`, exactly as the router that gave it would with the options of this one.
    ///
    /// # Errors
    /// [`RouteError::State`] for the state of another router or shape, or with values that no router comes to.
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError>;
}

/// Adds rows of `width` zeros to a list of rows; at its end if it is shorter than it should be.
fn zeros<T: Clone + Default>(list: &mut Vec<T>, rows: &Range<usize>, width: usize) {
    let at = list.len().min(rows.start * width);
    list.splice(at..at, std::iter::repeat_n(T::default(), rows.len() * width));
}

fn length(what: &'static str, got: usize, expected: usize, shape: &'static str) -> Result<(), RouteError> {
    if got == expected { Ok(()) } else { Err(RouteError::Length { what, got, expected, shape }) }
}

/// `value` is at least 0 (above 0 if `acts`) and not too large.
fn coefficient(name: &'static str, value: f32, acts: bool) -> Result<(), RouteError> {
    let low = if acts { value > 0.0 } else { value >= 0.0 };
    if low && value <= MAX_COEFFICIENT {
        return Ok(());
    }
    let least = if acts { "above 0" } else { "at least 0" };
    Err(RouteError::Coefficient { name, value: value.into(), least })
}

fn decay(name: &'static str, value: f32) -> Result<(), RouteError> {
    if (0.0..1.0).contains(&value) { Ok(()) } else { Err(RouteError::Decay { name, value: value.into() }) }
}

/// `Err` if the last of `rows` positions from `first` is past the end.
fn positions(first: Position, rows: usize) -> Result<(), RouteError> {
    let position = u64::from(first.0) + (rows as u64).saturating_sub(1);
    if position > u64::from(Position::MAX.0) { Err(RouteError::Position { position }) } else { Ok(()) }
}

impl Shape {
    /// Ranks the rows of `logits` into `[rows][top_k]` slices.
    fn rank(&self, logits: &[f32], ranking: Ranking<'_>, chosen: &mut [u16], weights: &mut [f32]) {
        let (experts, top_k) = (self.experts as usize, self.top_k as usize);
        rank(self.lanes, logits, experts, top_k, ranking, chosen, weights);
    }
}
