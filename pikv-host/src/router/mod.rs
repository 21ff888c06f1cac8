//! Routers: choose, from a token's logits, the experts that its KV is filed under and fetched by.
//!
//! One router serves one layer. By default it does not change the model: it returns its own ranking ([`Routes::filing`]) and the model's
//! plain top-k ([`Routes::model`]). Weights in both are the softmax over the chosen raw logits. With `model_choice` set, the model's
//! choice is the ranking too.
//!
//! In a step, call [`Router::route`] for each sequence, [`Step::route`](crate::Step::route) with the filing, then the fetch, then
//! [`Router::observe`] with the pages wanted and missed. Only `observe` changes the ranking, so rows may be routed in any number of
//! calls. Scores are those of [`pikv_core::score`]; they, and every result, have the same bits on all lanes.
//!
//! | id | options | ranks by |
//! |---|---|---|
//! | R_B | [`Hashed`] | a hash of the position, or round robin |
//! | R_T | [`TopK`] | logits |
//! | R_LB | [`LoadBalanced`] | logits minus a penalty on loaded experts |
//! | R_P | [`CacheAware`] | logits minus a penalty on experts whose pages miss |
//! | R_E | [`EntropyPenalised`] | logits minus a penalty on experts about which the gate is undecided |
//! | R_A | [`Adaptive`] | one of the above, chosen by a bandit |
//! | R_H | [`Hierarchical`] | logits inside the best groups |
//!
//! Names and ids are those of arXiv 2508.06526; the methods are those of their own papers, named in each file.
//!
//! ```
//! # use pikv_host as pikv;
//! use pikv::Position;
//! use pikv::router::{CacheAware, PageFeedback, Router, Routes, Shape};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut router = CacheAware::default().router(Shape::new(4, 2))?;
//! let mut routes = Routes::default();
//! router.route(Position(0), &[1.0, 0.98, 0.97, -2.0], &mut routes)?;
//! assert_eq!(routes.filing().experts, [0, 1]);
//! router.observe(&PageFeedback::new(&[8, 8, 8, 0], &[0, 8, 0, 0]))?;  // the pages of expert 1 missed
//! routes.clear();
//! for _ in 0..8 {
//!     router.observe(&PageFeedback::new(&[8, 8, 8, 0], &[0, 8, 0, 0]))?;
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
pub(crate) mod tickets;

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
use pikv_lanes::Lanes;
use pikv_lanes::route::{rank, weigh};
use std::fmt;
use std::ops::Range;

/// The largest accepted weight of a part of a bias: no score overflows with it.
pub const MAX_COEFFICIENT: f32 = 1e6;

/// Number of experts of a layer and of a token, and the lanes to compute with. Checked when a router is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shape {
    /// Experts, 1..=1024.
    pub experts: u32,
    /// Experts a token, 1..=experts; usually 2.
    pub top_k: u32,
    /// Lanes to compute with; results have the same bits on all.
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

    /// Checks that `chosen` is whole rows of experts below `experts`.
    fn check_chosen(&self, chosen: &[u16]) -> Result<(), RouteError> {
        let top_k = self.top_k as usize;
        length("chosen", chosen.len(), chosen.len() / top_k * top_k, "rows * top_k")?;
        match chosen.iter().position(|expert| u32::from(*expert) >= self.experts) {
            Some(i) => Err(RouteError::Expert { row: i / top_k, expert: chosen[i], experts: self.experts }),
            None => Ok(()),
        }
    }

    /// Number of rows of `logits`, `[rows][experts]`, which must be finite.
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

/// The kind of a router: whose state it saves and restores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RouterKind {
    /// R_B, [`Hashed`].
    Hash,
    /// R_T, [`TopK`].
    TopK,
    /// R_LB, [`LoadBalanced`].
    LoadBalanced,
    /// R_P, [`CacheAware`].
    CacheAware,
    /// R_E, [`EntropyPenalised`].
    Entropy,
    /// R_A, [`Adaptive`].
    Adaptive,
    /// R_H, [`Hierarchical`].
    Hierarchical,
    /// A router of your own, with a number that no other of yours has: the state of one is refused by another.
    Custom(u8),
}

impl RouterKind {
    /// The kinds of pikv's routers.
    pub const ALL: [RouterKind; 7] = [
        RouterKind::Hash,
        RouterKind::TopK,
        RouterKind::LoadBalanced,
        RouterKind::CacheAware,
        RouterKind::Entropy,
        RouterKind::Adaptive,
        RouterKind::Hierarchical,
    ];

    /// The paper's id, as `"R_LB"`; `"custom"` for a router of your own.
    pub const fn id(self) -> &'static str {
        match self {
            RouterKind::Hash => "R_B",
            RouterKind::TopK => "R_T",
            RouterKind::LoadBalanced => "R_LB",
            RouterKind::CacheAware => "R_P",
            RouterKind::Entropy => "R_E",
            RouterKind::Adaptive => "R_A",
            RouterKind::Hierarchical => "R_H",
            RouterKind::Custom(_) => "custom",
        }
    }
}

impl fmt::Display for RouterKind {
    /// The [`id`](RouterKind::id); for a router of your own also its number, as `custom 3`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RouterKind::Custom(number) => write!(f, "{} {number}", self.id()),
            _ => f.write_str(self.id()),
        }
    }
}

/// Experts of some rows, and their weights.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// `[rows][top_k]`, the best first: the form that [`Step::route`](crate::Step::route) takes.
    pub experts: Vec<u16>,
    /// `[rows][top_k]`, of the same experts: the softmax over the row's chosen raw logits. A row's sum is 1, up to rounding.
    pub weights: Vec<f32>,
}

/// Choices of routers. Each [`Router::route`] appends its rows, so the rows of a batch of sequences are contiguous.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    model: Choice,
    filing: Choice,
    top_k: usize,
    fetch: usize,
    /// Experts ranked after the `top_k`, the same number for each row, and for each row how many of them to fetch.
    more: Vec<u16>,
    counts: Vec<u8>,
}

impl Routes {
    /// The experts that the model mixes: its own top-k, or the filing where `model_choice` is set.
    pub fn model(&self) -> &Choice {
        &self.model
    }

    /// The experts that KV is filed under and fetched by: the router's ranking.
    pub fn filing(&self) -> &Choice {
        &self.filing
    }

    /// Number of experts of each row whose pages to fetch, from the best on: `top_k`, or the number of R_A's arm in use.
    pub fn fetch(&self) -> usize {
        self.fetch
    }

    /// All experts whose pages to fetch for row `row`, the best first: the first [`fetch`](Routes::fetch) of its filing, and those that R_E
    /// adds where its gate is undecided ([`EntropyPenalised::more`]). Empty for a row at or above [`rows`](Routes::rows).
    pub fn fetched(&self, row: usize) -> impl Iterator<Item = u16> {
        let own = self.filing.experts.chunks_exact(self.top_k.max(1)).nth(row).unwrap_or_default();
        let width = self.more.len().checked_div(self.counts.len()).unwrap_or(0);
        let count = self.counts.get(row).map_or(0, |count| usize::from(*count));
        let more = self.more.get(row * width..row * width + count).unwrap_or_default();
        own[..self.fetch.min(own.len())].iter().chain(more).copied()
    }

    /// For each row, the experts after its own that it may fetch, and how many of them it does fetch.
    pub(crate) fn more(&self) -> (&[u16], &[u8]) {
        (&self.more, &self.counts)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.filing.experts.len().checked_div(self.top_k).unwrap_or(0)
    }

    /// Removes all rows.
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

    /// Inserts rows of zeros at `gaps`, ascending ranges of the resulting rows: the rows of sequences left out of a step.
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

    /// Appends the rows of a router of your own, which ranks by itself: `filing`, `[rows][top_k]`, are each row's experts, the best first and
    /// each once. [`model`](Routes::model) gets the plain top-k of `logits`, `[rows][experts]`, and both get their weights.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::router::{Routes, Shape};
    ///
    /// # fn main() -> Result<(), pikv::router::RouteError> {
    /// let mut routes = Routes::default();
    /// routes.push(&Shape::new(4, 2), &[0.1, 0.9, 0.3, -1.0], &[3, 0])?;
    /// assert_eq!(routes.filing().experts, [3, 0]);
    /// assert_eq!(routes.model().experts, [1, 2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RouteError::Length`] for logits that are not whole rows or a `filing` of other rows, [`RouteError::Logit`] for a value that is not
    /// finite, [`RouteError::Expert`] for an expert that there is not, [`RouteError::Routes`] for routes with rows of another width.
    pub fn push(&mut self, shape: &Shape, logits: &[f32], filing: &[u16]) -> Result<(), RouteError> {
        let (rows, top_k) = (shape.check()?.rows(logits)?, shape.top_k as usize);
        length("filing", filing.len(), rows * top_k, "rows * top_k")?;
        shape.check_chosen(filing)?;
        self.place(shape, logits, rows, |i| filing[i], false)
    }

    /// Appends `rows` rows whose experts are `expert` of their index in `[rows][top_k]`. The model's are the same if `model_choice`, else the
    /// plain top-k.
    fn place(
        &mut self,
        shape: &Shape,
        logits: &[f32],
        rows: usize,
        expert: impl Fn(usize) -> u16,
        model_choice: bool,
    ) -> Result<(), RouteError> {
        let (experts, top_k) = (shape.experts as usize, shape.top_k as usize);
        let old = self.grow(rows, top_k, top_k)?;
        let Routes { model, filing, .. } = self;
        let (chosen, weights) = (&mut filing.experts[old..], &mut filing.weights[old..]);
        chosen.iter_mut().enumerate().for_each(|(i, to)| *to = expert(i));
        weigh(shape.lanes, logits, experts, top_k, chosen, weights);
        if model_choice {
            model.experts[old..].copy_from_slice(chosen);
            model.weights[old..].copy_from_slice(weights);
        } else {
            shape.rank(logits, Ranking::default(), &mut model.experts[old..], &mut model.weights[old..]);
        }
        Ok(())
    }

    /// Makes room for `rows` more rows; returns the number of elements before.
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

/// Pages that a step wanted and missed, over all rows routed since the last feedback.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PageFeedback<'a> {
    /// `[experts]` pages of each expert that rows wanted, fetched or not, summed over rows and KV heads
    /// ([`StepReport`](crate::StepReport) defines wanted pages), in units of `1 /` [`of_page`](PageFeedback::of_page) page.
    pub wanted: &'a [u32],
    /// `[experts]` those of them that were evicted, remote, in a lower tier, or of an expert that was not fetched.
    pub missed: &'a [u32],
    /// Units of both counts in a page; 1 by default, 32 from a [`ClosedLoop`](crate::ClosedLoop).
    pub of_page: u32,
    /// Bytes read from other devices or lower tiers. Used by R_A alone.
    pub remote_bytes: u64,
}

impl<'a> PageFeedback<'a> {
    /// Pages wanted and missed, both `[experts]`; no remote bytes.
    pub fn new(wanted: &'a [u32], missed: &'a [u32]) -> PageFeedback<'a> {
        PageFeedback { wanted, missed, of_page: 1, remote_bytes: 0 }
    }

    /// Sets the units of both counts in a page.
    pub fn of_page(mut self, parts: u32) -> PageFeedback<'a> {
        self.of_page = parts;
        self
    }

    /// Sets the remote bytes.
    pub fn remote_bytes(mut self, bytes: u64) -> PageFeedback<'a> {
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
/// use pikv::router::{PageFeedback, LoadBalanced, Router, Routes, Shape, TopK};
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
///     router.observe(&PageFeedback::new(&[0, 8, 8, 0], &[0, 0, 2, 0]))?; // after the step: pages wanted, and missed
/// }
/// # Ok(())
/// # }
/// ```
pub trait Router: fmt::Debug + Send + Sync {
    /// The kind of router; errors name it. A router of your own returns [`RouterKind::Custom`], or the kind of the router that it wraps if its
    /// [`state`](Router::state) is that router's.
    fn kind(&self) -> RouterKind;

    /// Experts and lanes.
    fn shape(&self) -> Shape;

    /// Chooses the experts of tokens at consecutive positions from `first`, and appends the rows to `out`. `logits` is
    /// `[rows][experts]`, the output of the model's gate before any softmax. The choices, and the averages of the logits, are stored until
    /// [`observe`](Router::observe); the ranking does not change.
    ///
    /// # Errors
    /// [`RouteError::Length`] for `logits` that are not whole rows, [`RouteError::Logit`] for a value that is not finite,
    /// [`RouteError::Position`] for positions past the last, [`RouteError::Routes`] for an `out` with rows of another width.
    fn route(&mut self, first: Position, logits: &[f32], out: &mut Routes) -> Result<(), RouteError>;

    /// Learns from the pages wanted and missed, and from the choices since the last call. Call it once a step, after the fetch.
    ///
    /// # Errors
    /// [`RouteError::Length`] for slices that are not `[experts]`, [`RouteError::Feedback`] for more pages missed than wanted.
    fn observe(&mut self, feedback: &PageFeedback<'_>) -> Result<(), RouteError>;

    /// The data with which a device chooses in this router's place
    /// ([`LoopStep::route_device`](crate::closed_loop::LoopStep::route_device)). A router that wraps one of pikv's forwards this method and
    /// [`routed`](Router::routed); others keep the defaults of both and route on the host.
    ///
    /// # Errors
    /// [`RouteError::HostOnly`] with the reason.
    fn device_plan(&self) -> Result<DevicePlan<'_>, RouteError> {
        Err(RouteError::HostOnly {
            router: self.kind(),
            why: "it has no plan for a device (Router::device_plan)",
        })
    }

    /// Records rows whose experts a device chose by [`device_plan`](Router::device_plan), as [`route`](Router::route) records its own:
    /// `chosen` is `[rows][top_k]`; `entropy`, `[experts]`, is the averages of the gate's entropy including these rows, or empty if they
    /// are not kept.
    ///
    /// # Errors
    /// [`RouteError::Length`], [`RouteError::Expert`], or [`RouteError::HostOnly`] for a router without device support.
    fn routed(&mut self, chosen: &[u16], entropy: &[f32]) -> Result<(), RouteError> {
        let _ = (chosen, entropy);
        let why = "it does not take in what a device chose (Router::routed)";
        Err(RouteError::HostOnly { router: self.kind(), why })
    }

    /// Whether it learns from [`PageFeedback::wanted`]; a [`ClosedLoop`](crate::ClosedLoop) counts hits only then
    /// ([`Hits`](crate::rules::Hits)).
    fn wants_hits(&self) -> bool {
        true
    }

    /// Discards the choices since the last [`observe`](Router::observe), for a dropped step.
    fn discard(&mut self);

    /// Whether [`state`](Router::state) has all that the router has learnt, so that [`ClosedLoop::save`](crate::ClosedLoop::save) can write
    /// it. A router of your own that learns more than a [`RouterState`] holds returns [`RouteError::Unsaved`]; one that wraps another passes it on.
    ///
    /// # Errors
    /// [`RouteError::Unsaved`] with the reason.
    fn saves(&self) -> Result<(), RouteError> {
        Ok(())
    }

    /// The state that the router has learnt. Options are not part of it. A router of your own starts from [`RouterState::new`].
    fn state(&self) -> RouterState;

    /// Continues from `state`, exactly as the router that returned it, with the options of this one.
    ///
    /// # Errors
    /// [`RouteError::State`] for the state of another router or shape, or with values that no router reaches.
    fn restore(&mut self, state: &RouterState) -> Result<(), RouteError>;
}

/// Inserts rows of `width` zeros into a list of rows; at its end if it is shorter than `rows.start` rows.
fn zeros<T: Clone + Default>(list: &mut Vec<T>, rows: &Range<usize>, width: usize) {
    let at = list.len().min(rows.start * width);
    list.splice(at..at, std::iter::repeat_n(T::default(), rows.len() * width));
}

fn length(what: &'static str, got: usize, expected: usize, shape: &'static str) -> Result<(), RouteError> {
    if got == expected { Ok(()) } else { Err(RouteError::Length { what, got, expected, shape }) }
}

/// Checks that `value` is at least 0 (above 0 if `acts`) and at most [`MAX_COEFFICIENT`].
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

/// Checks that the last of `rows` positions from `first` is a valid position.
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
