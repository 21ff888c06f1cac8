//! Errors of routers, each with the rejected value.

use super::RouterKind;
use pikv_core::page::Position;
use pikv_core::score::{MAX_EXPERTS, MAX_GROUPS};
use thiserror::Error;

/// Version of the bytes of a [`RouterState`](super::RouterState).
pub(super) const STATE_VERSION: u16 = 2;

/// An error of a router. The router and its outputs stay as they were before the call.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RouteError {
    /// A number of experts outside the accepted range.
    #[error("{0} experts; there must be 1..={MAX_EXPERTS}")]
    Experts(u32),
    /// `top_k` is 0 or above `experts`.
    #[error("{top_k} of {experts} experts a token; it must be 1..=experts")]
    TopK {
        /// Experts a token.
        top_k: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// A weight of the bias outside the accepted range.
    #[error("{name} {value}: it must be {least} and at most {most}", most = super::MAX_COEFFICIENT)]
    Coefficient {
        /// Name of the weight.
        name: &'static str,
        /// The value.
        value: f64,
        /// Smallest accepted value.
        least: &'static str,
    },
    /// The factor of an average is not in 0..1.
    #[error("{name} {value}: it must be at least 0 and below 1")]
    Decay {
        /// Name of the average.
        name: &'static str,
        /// The value.
        value: f64,
    },
    /// A cap that is not finite and above 0.
    #[error("cap {0}: it must be finite and above 0")]
    Cap(f32),
    /// `model_choice` is set for a biased ranking without a cap on the bias.
    #[error("model_choice lets the bias change what the model computes: set cap")]
    Uncapped,
    /// A stride that repeats an expert within `top_k`.
    #[error(
        "a stride of {stride} over {experts} experts gives {distinct} different ones, {top_k} are needed; 1 always does"
    )]
    Stride {
        /// The stride.
        stride: u32,
        /// Experts of the layer.
        experts: u32,
        /// Different experts with this stride.
        distinct: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// Groups that do not divide the experts.
    #[error(
        "{groups} groups of {experts} experts; there must be 1..={MAX_GROUPS}, and they must divide the experts"
    )]
    Groups {
        /// Number of groups.
        groups: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// Groups to keep that cannot hold `top_k` experts, or exceed the groups.
    #[error("{kept} of {groups} groups of {size} experts kept, for {top_k} experts a token")]
    Kept {
        /// Groups to keep.
        kept: u32,
        /// Number of groups.
        groups: u32,
        /// Experts of a group.
        size: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// Groups that never change the ranking.
    #[error(
        "{kept} of {groups} groups kept, their score the sum of {best} shares, {top_k} experts a token: this always ranks as R_T; \
         keep fewer groups than there are, and sum at least 2 shares or keep fewer groups than experts a token"
    )]
    Idle {
        /// Number of groups.
        groups: u32,
        /// Groups to keep.
        kept: u32,
        /// Shares in a group's score.
        best: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// A number of shares to sum outside `1..=size`.
    #[error("a group's score is made of {best} of its {size} experts; it must be 1..=size")]
    Best {
        /// Shares to sum.
        best: u32,
        /// Experts of a group.
        size: u32,
    },
    /// A bandit without arms.
    #[error("no arms; there must be at least 1")]
    NoArms,
    /// Two equal arms.
    #[error("arms {first} and {second} have the same coefficients and fetch as many experts: leave one out")]
    SameArms {
        /// Index of the first arm.
        first: usize,
        /// Index of the second arm.
        second: usize,
    },
    /// An arm that fetches no experts, or more than `top_k`.
    #[error("arm {arm} fetches {fetch} experts a token; it must be 1..={top_k}")]
    Fetch {
        /// Index of the arm.
        arm: usize,
        /// Experts that it fetches.
        fetch: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// A slice of the wrong length.
    #[error("{what}: {got} elements, expected {expected} ({shape})")]
    Length {
        /// Name of the argument.
        what: &'static str,
        /// Length given.
        got: usize,
        /// The required length; for whole rows, `got` rounded down to rows.
        expected: usize,
        /// Formula of the length.
        shape: &'static str,
    },
    /// A logit that is not finite.
    #[error("logit of row {row}, expert {expert}: {value} is not finite")]
    Logit {
        /// Row of the call.
        row: usize,
        /// Index of the expert.
        expert: usize,
        /// The value.
        value: f32,
    },
    /// An expert at or above the number of experts.
    #[error("expert {expert} of row {row}: there are {experts}")]
    Expert {
        /// Row of the call.
        row: usize,
        /// Index of the expert.
        expert: u16,
        /// Experts of the layer.
        experts: u32,
    },
    /// The rows pass the last position.
    #[error("position {position}: the last one is {max}", max = Position::MAX.0)]
    Position {
        /// Position of the last row.
        position: u64,
    },
    /// Routes that hold rows of another width.
    #[error(
        "the routes hold rows of {held} experts, {held_fetch} fetched; these have {top_k}, {fetch} fetched: clear them \
         first"
    )]
    Routes {
        /// Experts a token of the rows in the routes.
        held: usize,
        /// Experts of them to fetch.
        held_fetch: usize,
        /// Experts a token of the rows to append.
        top_k: usize,
        /// Experts of them to fetch.
        fetch: usize,
    },
    /// An expert with more pages missed than wanted.
    #[error("expert {expert}: {missed} pages missed of {wanted} wanted")]
    Feedback {
        /// Index of the expert.
        expert: usize,
        /// Pages missed.
        missed: u32,
        /// Pages wanted.
        wanted: u32,
    },
    /// A router that chooses on the host only; pass logits in host memory to [`LoopStep::route`](crate::closed_loop::LoopStep::route).
    #[error("{router} chooses on the host only: {why}; route the layer by logits of the host")]
    HostOnly {
        /// The router.
        router: RouterKind,
        /// Reason.
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

/// A saved state that was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum StateError {
    /// Bytes that are not the state of a router.
    #[error("not the state of a router")]
    Magic,
    /// A state of another version.
    #[error("state of version {0}; this is version {version}", version = STATE_VERSION)]
    Version(u16),
    /// An unknown kind of router.
    #[error("state of router number {0}, which is not known")]
    Kind(u16),
    /// Bytes that are too few or too many.
    #[error("a state of {got} bytes, expected {expected}")]
    Bytes {
        /// Bytes given.
        got: u64,
        /// Bytes that the header requires.
        expected: u64,
    },
    /// The state of another router.
    #[error("state of {got}, expected {expected}")]
    Router {
        /// Kind of the state.
        got: RouterKind,
        /// Kind of the router.
        expected: RouterKind,
    },
    /// A list of another length.
    #[error("{what} of the state: {got}, expected {expected}")]
    Shape {
        /// Name of the list.
        what: &'static str,
        /// Length in the state.
        got: usize,
        /// Length in the router.
        expected: usize,
    },
    /// A value that no router reaches.
    #[error("{what} {index} of the state: {value}")]
    Value {
        /// Name of the list or value.
        what: &'static str,
        /// Index in the list.
        index: usize,
        /// The value.
        value: f64,
    },
}
