//! Errors of configurations.

use pikv_core::page::{MAX_DIM, Position};
use thiserror::Error;

/// Most shards of a cache. Each has an arena for every page size.
pub(crate) const MAX_SHARDS: u32 = 1 << 16;

/// An option of a policy that is out of range.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{name} {value}; it must be {range}")]
#[non_exhaustive]
pub struct OptionError {
    /// Name of the option.
    pub name: &'static str,
    /// Value given.
    pub value: f64,
    /// Accepted values.
    pub range: &'static str,
}

impl OptionError {
    /// Option `name` was given `value`; it must be `range`.
    pub const fn new(name: &'static str, value: f64, range: &'static str) -> OptionError {
        OptionError { name, value, range }
    }
}

/// An invalid configuration.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No layers.
    #[error("a cache needs at least 1 layer")]
    NoLayers,
    /// A number of heads is 0, or `query_heads` is not a multiple of `kv_heads`.
    #[error(
        "layer {layer}: {query_heads} query heads over {kv_heads} KV heads; both must be at least 1, and the former a \
         multiple of the latter"
    )]
    Heads {
        /// The layer.
        layer: usize,
        /// KV heads of the layer.
        kv_heads: u32,
        /// Query heads of the layer.
        query_heads: u32,
    },
    /// `k_dim` or `v_dim` is 0 or too large.
    #[error("layer {layer}: k_dim {k_dim}, v_dim {v_dim}; each must be 1..={MAX_DIM}")]
    Dim {
        /// The layer.
        layer: usize,
        /// Channels of a key.
        k_dim: u32,
        /// Channels of a value.
        v_dim: u32,
    },
    /// A sliding window of 0 tokens, or of more tokens than there are positions.
    #[error("layer {layer}: a sliding window of {window} tokens; it must be 1..={max}", max = Position::MAX.0)]
    Window {
        /// The layer.
        layer: usize,
        /// Window in tokens.
        window: u32,
    },
    /// Invalid RoPE parameters.
    #[error(
        "layer {layer}: rope with theta {theta} over {rotary_dim} of {k_dim} channels; theta must be finite and at least 1, \
         the channels even, at least 2 and at most k_dim"
    )]
    Rope {
        /// The layer.
        layer: usize,
        /// Base of the frequencies.
        theta: f64,
        /// Channels that are rotated.
        rotary_dim: u32,
        /// Channels of a key.
        k_dim: u32,
    },
    /// RoPE frequencies for a layer that does not exist.
    #[error("frequencies of layer {layer}; the cache has {layers} layers")]
    FrequencyLayer {
        /// The layer.
        layer: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// The number of frequencies is not that of rotated pairs in the layer's RoPE, or in its policy's if the layer receives rotated keys.
    #[error(
        "layer {layer}: {got} frequencies, and its rope turns {pairs} pairs of channels; one for each is needed"
    )]
    Frequencies {
        /// The layer.
        layer: usize,
        /// Frequencies given.
        got: usize,
        /// Rotated pairs of the layer's RoPE, or of its policy's; 0 without one.
        pairs: u32,
    },
    /// A policy with another RoPE than its layer.
    #[error(
        "layer {layer}: the policy {policy} was given another rope than the layer's; give it that of LayerShape::rope"
    )]
    PolicyRope {
        /// The layer.
        layer: usize,
        /// The policy's name.
        policy: String,
    },
    /// A policy with an option out of range, by [`Policy::check`](crate::policy::Policy::check).
    #[error("layer {layer}: the policy {policy} with {option}")]
    PolicyOption {
        /// The layer.
        layer: usize,
        /// The policy's name.
        policy: String,
        /// The option and its value.
        option: OptionError,
    },
    /// More rollback than there is memory for, with a policy that keeps state per token or head.
    #[error(
        "layer {layer}: a rollback of {rollback} tokens under the policy {policy}, which keeps numbers of each token or head for each \
         length that can be gone back to; at most {limit} tokens can be taken back"
    )]
    PolicyRollback {
        /// The layer.
        layer: usize,
        /// The policy's name.
        policy: String,
        /// Tokens of rollback given.
        rollback: u32,
        /// Most tokens accepted.
        limit: u32,
    },
    /// A ring of 0 tokens, or of more tokens than there are positions.
    #[error("a ring of {ring} tokens with {rollback} more for rollback; the ring must hold at least 1, both at most {max}", max = Position::MAX.0)]
    Ring {
        /// Tokens of the ring.
        ring: u32,
        /// Tokens of rollback.
        rollback: u32,
    },
    /// `experts` or `top_k` is 0, `top_k` is above `experts`, or there are more than 65,535 experts.
    #[error("{top_k} of {experts} experts a token; experts must be 1..={max}, and top_k 1..=experts", max = u16::MAX)]
    Experts {
        /// Experts of the model.
        experts: u32,
        /// Experts of each token.
        top_k: u32,
    },
    /// More shards than a cache can have.
    #[error("{shards} shards; at most {max}", max = MAX_SHARDS)]
    Shards {
        /// Shards given.
        shards: u32,
    },
    /// More sinks than there are positions.
    #[error("{sinks} sinks; at most {max}", max = Position::MAX.0)]
    Sinks {
        /// Sinks given.
        sinks: u32,
    },
    /// A codec's map of another width than the head.
    #[error("layer {layer}: the map of {what} takes rows of {wide} channels, the head has {dim}")]
    Map {
        /// The layer.
        layer: usize,
        /// `k` or `v`.
        what: &'static str,
        /// Channels of the map.
        wide: u32,
        /// Channels of the head.
        dim: u32,
    },
    /// A codec for a layer or KV head that does not exist.
    #[error("{}", no_place("a codec", *layer, *kv_head, *layers, *kv_heads))]
    CodecRule {
        /// Layer given.
        layer: Option<usize>,
        /// KV head given.
        kv_head: Option<usize>,
        /// Layers of the cache.
        layers: usize,
        /// Fewest KV heads of the layers of the rule; 0 if there are none.
        kv_heads: u32,
    },
    /// A second codec that cannot be applied: without a first codec or a smaller form, with `after` 0, or with tiers.
    #[error("layer {layer}, KV head {kv_head}: pages that are packed again after {after} tokens: {why}")]
    Age {
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Tokens given.
        after: u32,
        /// Reason.
        why: &'static str,
    },
    /// Eviction of single tokens from means, which would still contain them.
    #[error("layer {layer} stores means of tokens and evicts single ones; set Eviction::by_page")]
    MeansEvicted {
        /// The layer.
        layer: usize,
    },
    /// A feature that a cache over a fabric does not support.
    #[error("a cache over a fabric has no {what} yet; {instead} would do")]
    Fabric {
        /// The feature.
        what: &'static str,
        /// Supported alternative.
        instead: &'static str,
    },
    /// An invalid budget or option of an eviction rule.
    #[error("layer {layer}: its eviction rule: {why}")]
    TokenBudget {
        /// The layer.
        layer: usize,
        /// Reason, with the value given.
        why: String,
    },
    /// Hits with 0 wanted pages, or at every 0 positions.
    #[error("hits: {pages} wanted pages at every {every} positions; both must be at least 1")]
    Hits {
        /// [`Hits::pages`](crate::rules::Hits::pages).
        pages: u32,
        /// [`Hits::every`](crate::rules::Hits::every).
        every: u32,
    },
    /// An eviction policy for a layer that does not exist.
    #[error("a policy for layer {layer}; there are {layers} layers")]
    PolicyLayer {
        /// Layer given.
        layer: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// The budget does not hold one token.
    #[error(
        "a budget of {budget} bytes; the first token alone takes {needed} (one page a layer and KV head)"
    )]
    Budget {
        /// Bytes given.
        budget: u64,
        /// Bytes of one page for every layer and KV head.
        needed: u64,
    },
}

/// Text for a rule of a missing layer or KV head.
fn no_place(
    what: &str,
    layer: Option<usize>,
    kv_head: Option<usize>,
    layers: usize,
    kv_heads: u32,
) -> String {
    match (layer, kv_head) {
        (Some(layer), _) if layer >= layers => {
            format!("{what} for layer {layer}; the cache has layers 0..{layers}")
        }
        (Some(layer), Some(head)) => {
            format!("{what} for KV head {head} of layer {layer}, which has KV heads 0..{kv_heads}")
        }
        (_, Some(head)) => {
            format!("{what} for KV head {head} of all layers, of which one has KV heads 0..{kv_heads}")
        }
        (_, None) => format!("{what} in a cache of {layers} layers"),
    }
}
