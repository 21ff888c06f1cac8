//! What can go wrong in a router, with the value that was wrong.

use super::RouterKind;
use pikv_core::page::Position;
use pikv_core::score::{MAX_EXPERTS, MAX_GROUPS};
use thiserror::Error;

/// Version of the bytes of a [`RouterState`](super::RouterState).
pub(super) const STATE_VERSION: u16 = 2;

/// Why a router could not be built or a call was refused. The router and what it was to write to are as before the call.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RouteError {
    /// Experts.
    #[error("{0} experts; there must be 1..={MAX_EXPERTS}")]
    Experts(u32),
    /// Experts a token.
    #[error("{top_k} of {experts} experts a token; it must be 1..=experts")]
    TopK {
        /// Experts a token.
        top_k: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// A weight of the bias.
    #[error("{name} {value}: it must be {least} and at most {most}", most = super::MAX_COEFFICIENT)]
    Coefficient {
        /// Which one.
        name: &'static str,
        /// As given.
        value: f64,
        /// The lower end.
        least: &'static str,
    },
    /// What of an average stays in each update.
    #[error("{name} {value}: it must be at least 0 and below 1")]
    Decay {
        /// Which average.
        name: &'static str,
        /// As given.
        value: f64,
    },
    /// A cap that is not a number above 0.
    #[error("cap {0}: it must be finite and above 0")]
    Cap(f32),
    /// The model is to follow a biased ranking without a bound on the bias.
    #[error("model_choice lets the bias change what the model computes: set cap")]
    Uncapped,
    /// A stride that comes back to an expert too soon.
    #[error(
        "a stride of {stride} over {experts} experts gives {distinct} different ones, {top_k} are needed; 1 always does"
    )]
    Stride {
        /// As given.
        stride: u32,
        /// Experts of the layer.
        experts: u32,
        /// Different experts that it gives.
        distinct: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// Groups that do not divide the experts.
    #[error(
        "{groups} groups of {experts} experts; there must be 1..={MAX_GROUPS}, and they must divide the experts"
    )]
    Groups {
        /// As given.
        groups: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// Groups that do not hold the experts of a token, or are not there.
    #[error("{kept} of {groups} groups of {size} experts kept, for {top_k} experts a token")]
    Kept {
        /// As given.
        kept: u32,
        /// Groups there are.
        groups: u32,
        /// Experts of a group.
        size: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// Groups that leave the ranking as it is.
    #[error(
        "{kept} of {groups} groups kept, their score the sum of {best} shares, {top_k} experts a token: this always ranks as R_T; \
         keep fewer groups than there are, and sum at least 2 shares or keep fewer groups than experts a token"
    )]
    Idle {
        /// Groups there are.
        groups: u32,
        /// Groups that are kept.
        kept: u32,
        /// Shares in a group's score.
        best: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// More scores a group than it has experts.
    #[error("a group's score is made of {best} of its {size} experts; it must be 1..=size")]
    Best {
        /// As given.
        best: u32,
        /// Experts of a group.
        size: u32,
    },
    /// A bandit without arms.
    #[error("no arms; there must be at least 1")]
    NoArms,
    /// Two arms that are the same.
    #[error("arms {first} and {second} have the same coefficients and fetch as many experts: leave one out")]
    SameArms {
        /// One of them.
        first: usize,
        /// The other, after it.
        second: usize,
    },
    /// An arm that fetches nothing, or more than there is.
    #[error("arm {arm} fetches {fetch} experts a token; it must be 1..={top_k}")]
    Fetch {
        /// The arm.
        arm: usize,
        /// As given.
        fetch: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// A slice of the wrong length.
    #[error("{what}: {got} elements, expected {expected} ({shape})")]
    Length {
        /// Which argument.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The right one, or the next lower one.
        expected: usize,
        /// What the length is made of.
        shape: &'static str,
    },
    /// A logit that is not finite.
    #[error("logit of row {row}, expert {expert}: {value} is not finite")]
    Logit {
        /// Row of the call.
        row: usize,
        /// The expert.
        expert: usize,
        /// The value.
        value: f32,
    },
    /// No such expert.
    #[error("expert {expert} of row {row}: there are {experts}")]
    Expert {
        /// Row of the call.
        row: usize,
        /// As given.
        expert: u16,
        /// Experts of the layer.
        experts: u32,
    },
    /// The rows pass the last position.
    #[error("position {position}: the last one is {max}", max = Position::MAX.0)]
    Position {
        /// The last row's.
        position: u64,
    },
    /// Routes that hold rows of another width.
    #[error(
        "the routes hold rows of {held} experts, {held_fetch} fetched; these have {top_k}, {fetch} fetched: clear them \
         first"
    )]
    Routes {
        /// Experts a token of the rows that are there.
        held: usize,
        /// How many of them are fetched.
        held_fetch: usize,
        /// Experts a token of the rows to be added.
        top_k: usize,
        /// How many of them are fetched.
        fetch: usize,
    },
    /// More misses than pages.
    #[error("expert {expert}: {missed} pages missed of {wanted} wanted")]
    Feedback {
        /// The expert.
        expert: usize,
        /// Pages missed.
        missed: u32,
        /// Pages wanted.
        wanted: u32,
    },
    /// A router that chooses on the host only: give [`LoopStep::route`](crate::closed_loop::LoopStep::route) logits of the host.
    #[error("{router} chooses on the host only: {why}; route the layer by logits of the host")]
    HostOnly {
        /// The router.
        router: RouterKind,
        /// Why.
        why: &'static str,
    },
    /// A router that cannot be saved ([`Router::saves`](super::Router::saves)).
    #[error("{router} cannot be saved: {why}; save its sequences alone, by Sequence::save")]
    Unsaved {
        /// The router.
        router: RouterKind,
        /// Why.
        why: &'static str,
    },
    /// A state that cannot be restored.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Why a saved state was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum StateError {
    /// Bytes of something else.
    #[error("not the state of a router")]
    Magic,
    /// Bytes of another version.
    #[error("state of version {0}; this is version {version}", version = STATE_VERSION)]
    Version(u16),
    /// No such router.
    #[error("state of router number {0}, which is not known")]
    Kind(u16),
    /// Bytes that end too early or too late.
    #[error("a state of {got} bytes, expected {expected}")]
    Bytes {
        /// As given.
        got: u64,
        /// What its header asks for.
        expected: u64,
    },
    /// The state of another router.
    #[error("state of {got}, expected {expected}")]
    Router {
        /// The state's.
        got: RouterKind,
        /// The router's.
        expected: RouterKind,
    },
    /// Another number of something.
    #[error("{what} of the state: {got}, expected {expected}")]
    Shape {
        /// Of what.
        what: &'static str,
        /// The state's.
        got: usize,
        /// The router's.
        expected: usize,
    },
    /// A value that no router comes to.
    #[error("{what} {index} of the state: {value}")]
    Value {
        /// What it is.
        what: &'static str,
        /// Its index.
        index: usize,
        /// As given.
        value: f64,
    },
}
