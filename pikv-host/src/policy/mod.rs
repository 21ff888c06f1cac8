//! Eviction: which tokens a KV head goes on holding (PiKV, arXiv 2508.06526, section "scheduling").
//!
//! Three choices that are made apart:
//!
//! * a [`Policy`] says what a token is worth: its *utility*;
//! * a [`Budget`] says how many tokens a head may hold, and [`Eviction::adaptive`] lets the heads of a layer share theirs (AdaKV);
//! * [`Eviction::by_page`] evicts whole pages instead of tokens, which is what frees memory where a codec packs them.
//!
//! After every step, the tokens of lowest utility that have left the ring are evicted until the head is within its budget;
//! of equals the older goes first, and before all others what a sliding window no longer shows. The ring, the sinks and what was
//! pinned ([`Sequence::pin`](crate::Sequence::pin)) stay. Tokens that went are read no more; pages of the same expert that lost
//! some are put together, so the budget bounds bytes too. Positions never change.
//!
//! Rollback brings back what a step evicted, and every score, as if the step had never been; back inside a step, as if it had ended
//! there. So what was evicted keeps its bytes until it can no longer come back, and pages that were put together keep those that came
//! free by it as long. Without a rollback nothing is kept.

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
mod quest_lit;
pub(crate) mod rule;
mod seen;
mod snap_kv;
pub(crate) mod state;
mod streaming_llm;
mod tova;
mod worst;

pub use ada_kv_lit::AdaKvLit;
pub use budget::Budget;
pub use candidates::Candidates;
pub(crate) use candidates::{Candidate, Source, pinned};
pub use chunks::Chunks;
pub use duo::Duo;
pub use duo_lit::DuoLit;
pub use expected_attention::ExpectedAttention;
pub use fast_v::{FastVFollows, FastVReceived, fast_v};
pub use h2o::H2o;
pub use key_norm::KeyNorm;
pub use lru::Lru;
pub use lru_plus::LruPlus;
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

/// A utility as it is compared: what is not a number is worth less than anything, and 0 is 0 whatever its sign.
pub(crate) fn worth(utility: f32) -> f32 {
    if utility.is_nan() { f32::NEG_INFINITY } else { utility + 0.0 }
}

/// What a policy is told after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feedback {
    /// Nothing: attention runs as fast as without a policy.
    None,
    /// The attention mass of every token, from all rows.
    Mass,
    /// The attention mass of every token, from the last so many rows of a step, and from each row that can be taken back (which
    /// may turn out to be the last).
    LastMass(u32),
}

/// What a token is worth. One value serves all layers and heads: what is kept of a token or a head is kept for it.
///
/// Only [`rank`](Policy::rank) has to be written. A policy whose state is a function of what it is told forks and rolls back
/// by itself.
pub trait Policy: fmt::Debug + Send + Sync {
    /// Its name in reports.
    fn name(&self) -> &str;

    /// What it wants to be told. Mass costs a second pass over the scores, which are kept meanwhile: 4 bytes a row, head and token;
    /// and from one step to the next 4 bytes a layer, KV head and token, once for a step's rows and once for each that can be
    /// taken back.
    fn feedback(&self) -> Feedback {
        Feedback::None
    }

    /// Whether it looks at [`HeadSeen::hits`] and [`HeadSeen::misses`]: they are counted then ([`Hits`](crate::rules::Hits)).
    fn wants_hits(&self) -> bool {
        false
    }

    /// How it takes keys to be turned, if it looks at that. In a layer whose keys are stored before their rotation it has to be the layer's
    /// own ([`ConfigError::PolicyRope`](crate::ConfigError)).
    fn rotation(&self) -> Option<Rope> {
        None
    }

    /// First positions that stay in its layers whatever they are worth, filed apart from the experts, where the configuration names no
    /// sinks ([`CacheConfig::sinks`](crate::CacheConfig)).
    fn sinks(&self) -> u32 {
        0
    }

    /// Passes on what it was made with, for the fingerprint of a saved sequence, which is restored under a policy of the same
    /// [`name`](Policy::name) that passes on the same. A policy that has nothing to set passes on nothing.
    fn parameters(&self, _to: &mut dyn FnMut(&[u8])) {}

    /// f32 kept of a token; they start as 0. Each takes 4 bytes a token and KV head, times the tokens that can be rolled back
    /// and one.
    fn words(&self) -> usize {
        0
    }

    /// f32 kept of a KV head whose keys have `k_dim` channels and that `group` query heads read; they start as 0.
    fn head_words(&self, _k_dim: usize, _group: usize) -> usize {
        0
    }

    /// Whether heads agree on who goes: the utilities that [`rank`](Policy::rank) returns are then added over all heads of a
    /// layer, or of all layers whose policies have this name, by position.
    fn scope(&self) -> Scope {
        Scope::Head
    }

    /// Whether [`born`](Policy::born) looks at keys or values. If not, those of tensors that lie on a device
    /// ([`Step::append_device`](crate::Step::append_device)) stay there, and `born` is given none; else they are copied to the host, and `born` is
    /// called when the step is committed.
    fn reads_tokens(&self) -> bool {
        true
    }

    /// A token was appended: `state` is its [`words`](Policy::words).
    fn born(&self, _token: &Token<'_>, _state: &mut [f32]) {}

    /// Some rows were attended. Called for each page that they read, sinks apart, after the step was committed; `state` is
    /// [`words`](Policy::words) rows of 32. Rows that can be taken back come one by one. Heads may be told in parallel; of one
    /// head, pages come in a fixed order.
    fn observe(&self, _seen: &Seen<'_>, _state: &mut [[f32; LANES]]) {}

    /// The same, once a head: `state` is [`head_words`](Policy::head_words) long.
    fn observe_head(&self, _seen: &HeadSeen<'_>, _state: &mut [f32]) {}

    /// The utilities of the tokens that may be evicted, into `utility`. Not a number is worth less than anything.
    fn rank(&self, tokens: &Candidates<'_>, utility: &mut [f32]);

    /// Whether of any tokens the older are worth less, so that a head's oldest go without a [`rank`](Policy::rank): what that takes
    /// does not depend on how many are held. (Where whole pages go or heads share their budgets there is a ranking all the same.)
    fn oldest_first(&self) -> bool {
        false
    }

    /// Whether the heads of a layer share the sum of their budgets, and how: where they hold more than that, a head keeps a part in
    /// proportion to its own budget times `2^lean`, at least a fifth of its own. `head` is what is kept of the head. All heads of a layer say
    /// something, or none does. Without effect beside [`Eviction::adaptive`].
    fn lean(&self, _head: &[f32]) -> Option<f32> {
        None
    }

    /// Tokens below this utility go even where the budget would hold them; `head` is what is kept of the head.
    fn threshold(&self, _head: &[f32]) -> Option<f32> {
        None
    }
}

/// Over what utilities are added before tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every head for itself.
    Head,
    /// The heads of a layer agree.
    Layer,
    /// All layers that have the policy agree.
    Sequence,
}

/// A token that was appended.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Token<'a> {
    /// The layer.
    pub layer: usize,
    /// The KV head.
    pub kv_head: usize,
    /// Its position.
    pub position: Position,
    /// Its key, `k_dim` channels, as appended; empty where [`Policy::reads_tokens`] is not so and it lies on a device.
    pub key: &'a [f32],
    /// Its value, `v_dim` channels; empty likewise.
    pub value: &'a [f32],
}

/// How a layer evicts. Set by [`CacheConfig::evict`](crate::CacheConfig::evict).
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::policy::{Budget, Eviction, H2o};
/// use pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape, Output};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let eviction = Eviction::new(H2o, Budget::Tokens(48)).batch(1);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 20).ring(16).sinks(4).evict(eviction))?;
/// let mut sequence = cache.sequence();
/// for _ in 0..100 {
///     let mut step = cache.begin([(&mut sequence, 1)])?;
///     step.append(0, &[0.5; 4], &[0.25; 4])?;
///     step.attend(0, &[1.0; 8], &Attend::new(0.5), Output::new(&mut [0.0; 8]))?;
///     step.commit()?;
/// }
/// assert_eq!(sequence.resident(0, 0)?.0, 48);             // layer 0, KV head 0
/// assert_eq!(sequence.next_position().0, 100);            // positions go on
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Eviction {
    /// What a token is worth.
    pub policy: Arc<dyn Policy>,
    /// What a head may hold.
    pub budget: Budget,
    /// How many tokens go at once, at least 1: as soon as a head is over its budget, so many go that it is this less one below,
    /// and the next ranking is due only once they have come again. A batch above the budget leaves sinks and ring.
    pub batch: Option<u32>,
    /// Whole pages go, the one with the lowest mean utility first.
    pub by_page: bool,
    /// Heads of a layer share their budgets: the best tokens of all stay, but each head keeps this share of its own (AdaKV).
    pub adaptive: Option<f32>,
}

impl Eviction {
    /// Keeps the tokens that `policy` ranks highest, as many as `budget` says.
    pub fn new(policy: impl Policy + 'static, budget: Budget) -> Eviction {
        Eviction { policy: Arc::new(policy), budget, batch: None, by_page: false, adaptive: None }
    }

    /// Sets how many tokens go at once; by default a 16th of the budget, and at least 1. A ranking takes
    /// time in proportion to what is held, so that a batch in proportion makes an evicted token cost the same in caches of any size.
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
