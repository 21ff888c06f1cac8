//! Eviction: policies and budgets that choose the tokens a KV head holds (PiKV, arXiv 2508.06526, section "scheduling").
//!
//! Three independent choices:
//!
//! * a [`Policy`] gives each token a *utility*;
//! * a [`Budget`] limits the tokens of a head; [`Eviction::adaptive`] lets the heads of a layer share their budgets (AdaKV);
//! * [`Eviction::by_page`] evicts whole pages in place of tokens, which frees memory where pages are packed by a codec.
//!
//! After every step, tokens that left the ring are evicted until each head is within its budget: first those that a sliding window hides,
//! then those of lowest utility, of equals the older. The ring, the sinks and pinned tokens ([`Sequence::pin`](crate::Sequence::pin))
//! are never evicted. Evicted tokens are not read. Pages of one expert that have lost tokens are compacted, so the budget also bounds
//! bytes. Positions never change.
//!
//! A rollback over whole steps restores the tokens and scores that those steps evicted or changed; a rollback into a step gives the state
//! of a step that ended there. Evicted tokens and the pages freed by compaction therefore keep their bytes until no rollback can reach
//! them. With a rollback of 0 nothing is kept.

pub(crate) mod ada_kv;
mod ada_kv_lit;
mod budget;
mod candidates;
mod chunks;
mod duo;
mod duo_lit;
mod expected_attention;
mod fast_v;
mod h2o;
mod key_norm;
pub(crate) mod lru;
mod lru_plus;
pub(crate) mod page;
mod pyramid_kv;
mod quest_lit;
pub(crate) mod rule;
mod scores;
mod seen;
mod snap_kv;
pub(crate) mod state;
mod streaming_llm;
mod tova;
mod worst;

pub use crate::base::error::OptionError;
pub use ada_kv_lit::AdaKvLit;
pub use budget::Budget;
pub use candidates::Candidates;
pub(crate) use candidates::{Candidate, Source, pinned};
pub use chunks::{ChunkKv, Chunks};
pub use duo::{Duo, DuoError};
pub use duo_lit::DuoLit;
pub use expected_attention::ExpectedAttention;
pub use fast_v::{FastV, FastVFollows, FastVReceived, fast_v};
pub use h2o::H2o;
pub use key_norm::KeyNorm;
pub use lru::Lru;
pub use lru_plus::LruPlus;
pub use pyramid_kv::PyramidKv;
pub use quest_lit::{Dense, QuestLit, QuestLitError};
pub use seen::{HeadSeen, Positions, Seen};
pub use snap_kv::SnapKv;
pub use streaming_llm::StreamingLlm;
pub use tova::Tova;
pub(crate) use worst::{order_bits, worst};

use pikv_core::page::Position;
use pikv_core::rope::Rope;
use pikv_core::warp::LANES;
use std::fmt;
use std::sync::Arc;

/// A utility in the form that is compared: NaN is below every number, and -0.0 equals 0.0.
pub(crate) fn worth(utility: f32) -> f32 {
    if utility.is_nan() { f32::NEG_INFINITY } else { utility + 0.0 }
}

/// Attention mass that a policy gets after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MassFeedback {
    /// None: attention runs as fast as without a policy.
    None,
    /// The mass of every token, summed over all rows.
    All,
    /// The mass of every token, from the given number of last rows of a step. Also from each row that can be rolled back, because a rollback
    /// may make it the last.
    LastRows(u32),
}

/// Gives tokens their utilities. One value serves all layers and heads; state is kept for each token and each head.
///
/// Only [`name`](Policy::name) and [`rank`](Policy::rank) are required. A policy that wraps another forwards all its methods;
/// `#[deny(clippy::missing_trait_methods)]` on its `impl` finds one that it forgets. A policy that keeps all its state in `state` is
/// forked and rolled back by the cache.
pub trait Policy: fmt::Debug + Send + Sync {
    /// Name of the policy in reports.
    fn name(&self) -> &str;

    /// Checks its options. Building a cache calls it.
    ///
    /// # Errors
    /// An option out of range.
    fn check(&self) -> Result<(), OptionError> {
        Ok(())
    }

    /// The attention mass that it needs. Mass costs
    ///
    /// * time: a second pass over the scores;
    /// * during a call 4 bytes a row, query head and token, for the scores;
    /// * from one step to the next 4 bytes a layer, KV head and token, once for the step's rows and once for each row that can be rolled
    ///   back.
    fn feedback(&self) -> MassFeedback {
        MassFeedback::None
    }

    /// Whether it reads [`HeadSeen::hits`] and [`HeadSeen::misses`], which are counted only then ([`Hits`](crate::rules::Hits)).
    fn wants_hits(&self) -> bool {
        false
    }

    /// The rotation of keys that it assumes, if it depends on one. In a layer that stores keys before rotation it must equal the layer's
    /// ([`ConfigError::PolicyRope`](crate::ConfigError)).
    fn rotation(&self) -> Option<Rope> {
        None
    }

    /// First positions to keep as sinks, filed apart from the experts. Used if the configuration sets no sinks
    /// ([`CacheConfig::sinks`](crate::CacheConfig)).
    fn sinks(&self) -> u32 {
        0
    }

    /// Calls `to` with the bytes of its parameters, for the fingerprint of saved sequences. A saved sequence is restored only under a
    /// policy of the same [`name`](Policy::name) and parameters. A policy without parameters does not call it.
    fn parameters(&self, _to: &mut dyn FnMut(&[u8])) {}

    /// f32 of state for each token; initially 0. Each takes 4 bytes a token and KV head, times one more than the tokens that can be rolled
    /// back.
    fn words(&self) -> usize {
        0
    }

    /// f32 of state for each KV head with `k_dim` channels in a key and `group` query heads; initially 0.
    fn head_words(&self, _k_dim: usize, _group: usize) -> usize {
        0
    }

    /// The heads that evict the same tokens: the utilities of [`rank`](Policy::rank) are added by position over one head, all heads of a
    /// layer, or all layers with a policy of this name.
    fn scope(&self) -> Scope {
        Scope::Head
    }

    /// Whether [`born`](Policy::born) reads keys or values. If not, tensors in device memory
    /// ([`Step::append_device`](crate::Step::append_device)) stay there and `born` gets empty slices; else they are copied to the host, and
    /// `born` is called at commit.
    fn reads_tokens(&self) -> bool {
        true
    }

    /// Called for each appended token; `state` is its [`words`](Policy::words).
    fn born(&self, _token: &Token<'_>, _state: &mut [f32]) {}

    /// Called after commit for each page that some rows attended, sinks apart; `state` is [`words`](Policy::words) rows of 32. Rows that
    /// can be rolled back come in calls of one row. Heads may be processed in parallel; the pages of one head come in a fixed order.
    fn observe(&self, _seen: &Seen<'_>, _state: &mut [[f32; LANES]]) {}

    /// The same once a head; `state` has [`head_words`](Policy::head_words) values.
    fn observe_head(&self, _seen: &HeadSeen<'_>, _state: &mut [f32]) {}

    /// Writes the utilities of the tokens that may be evicted to `utility`. NaN is below every number.
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]);

    /// Whether older tokens always have lower utilities. The oldest tokens of a head are then evicted without a call of
    /// [`rank`](Policy::rank), at a cost independent of the tokens held. (Evicting whole pages, or budgets shared between heads, still
    /// rank.)
    fn oldest_first(&self) -> bool {
        false
    }

    /// Whether the heads of a layer share the sum of their budgets, and with which weight: if they hold more than the sum, a head keeps a
    /// part in proportion to its own budget times `2^lean`, at least a fifth of its own. `head` is the state of the head. Either all
    /// heads of a layer return a value or none does. Ignored with [`Eviction::adaptive`].
    fn lean(&self, _head: &[f32]) -> Option<f32> {
        None
    }

    /// Utility below which tokens are evicted even within the budget; `head` is the state of the head.
    fn threshold(&self, _head: &[f32]) -> Option<f32> {
        None
    }
}

/// The heads over which utilities are added before tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scope {
    /// Each head by itself.
    Head,
    /// All heads of a layer.
    Layer,
    /// All layers that have the policy.
    Sequence,
}

/// An appended token.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Token<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Index of the KV head.
    pub kv_head: usize,
    /// Position in the sequence.
    pub position: Position,
    /// Key as appended, `k_dim` channels; empty if it lies in device memory and [`Policy::reads_tokens`] is false.
    pub key: &'a [f32],
    /// Value as appended, `v_dim` channels; empty in the same case.
    pub value: &'a [f32],
}

/// The eviction rule of a layer. Set by [`CacheConfig::evict`](crate::CacheConfig::evict).
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, H2o};
/// use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let eviction = Eviction::new(H2o, Budget::Tokens(48)).batch(1);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(16).sinks(4).evict(eviction))?;
/// let mut sequence = cache.sequence();
/// for _ in 0..100 {
///     let mut step = cache.begin([(&mut sequence, 1)])?;
///     step.append(0, &[0.5; 4], &[0.25; 4])?;
///     step.attend(0, &[1.0; 8], &Attend::new(0.5), AttendOutput::new(&mut [0.0; 8]))?;
///     step.commit()?;
/// }
/// assert_eq!(sequence.resident(0, 0)?.0, 48);             // layer 0, KV head 0
/// assert_eq!(sequence.next_position().0, 100);            // positions are not used again
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Eviction {
    /// Gives tokens their utilities.
    pub policy: Arc<dyn Policy>,
    /// Tokens that a head may hold.
    pub budget: Budget,
    /// Tokens to evict at once, at least 1: a head over its budget evicts until it is `batch - 1` tokens below it, and is ranked again
    /// when it is over the budget once more. A batch above the budget leaves sinks and ring. `None`: a 16th of the budget.
    pub batch: Option<u32>,
    /// Evicts whole pages, the page of the lowest mean utility first.
    pub by_page: bool,
    /// Heads of a layer share their budgets (AdaKV): the best tokens of all heads are kept, and each head keeps at least this share of
    /// its own budget.
    pub adaptive: Option<f32>,
}

impl Eviction {
    /// Keeps the tokens that `policy` ranks highest, within `budget`.
    pub fn new(policy: impl Policy + 'static, budget: Budget) -> Eviction {
        Eviction { policy: Arc::new(policy), budget, batch: None, by_page: false, adaptive: None }
    }

    /// Sets the tokens to evict at once; default a 16th of the budget, at least 1. A ranking takes time in proportion to the tokens
    /// held, so a batch in proportion makes the cost of an evicted token independent of the cache's size.
    pub fn batch(mut self, tokens: u32) -> Eviction {
        self.batch = Some(tokens);
        self
    }

    /// Evicts whole pages.
    pub fn by_page(mut self) -> Eviction {
        self.by_page = true;
        self
    }

    /// Lets the heads of a layer share their budgets, each keeping at least the share `floor` of its own.
    pub fn adaptive(mut self, floor: f32) -> Eviction {
        self.adaptive = Some(floor);
        self
    }
}
