//! Configurations that no cache can be built from.

use pikv_core::page::{MAX_DIM, Position};
use thiserror::Error;

/// Shards of a cache at most. Each has an arena for every page size.
pub(crate) const MAX_SHARDS: u32 = 1 << 16;

/// A configuration that no cache can be built from.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// There are no layers.
    #[error("a cache needs at least 1 layer")]
    NoLayers,
    /// A layer's heads.
    #[error(
        "layer {layer}: {query_heads} query heads over {kv_heads} KV heads; both must be at least 1, and the former a \
         multiple of the latter"
    )]
    Heads {
        /// The layer.
        layer: usize,
        /// Its KV heads.
        kv_heads: u32,
        /// Its query heads.
        query_heads: u32,
    },
    /// A layer's widths.
    #[error("layer {layer}: k_dim {k_dim}, v_dim {v_dim}; each must be 1..={MAX_DIM}")]
    Dim {
        /// The layer.
        layer: usize,
        /// Channels of a key.
        k_dim: u32,
        /// Channels of a value.
        v_dim: u32,
    },
    /// A sliding window of 0 tokens, or of more than there are positions.
    #[error("layer {layer}: a sliding window of {window} tokens; it must be 1..={max}", max = Position::MAX.0)]
    Window {
        /// The layer.
        layer: usize,
        /// Its window.
        window: u32,
    },
    /// Invalid rope parameters.
    #[error(
        "layer {layer}: rope with theta {theta} over {rotary_dim} of {k_dim} channels; theta must be finite and at least 1, \
         the channels even, at least 2 and at most k_dim"
    )]
    Rope {
        /// The layer.
        layer: usize,
        /// Base of the frequencies.
        theta: f64,
        /// Channels that turn.
        rotary_dim: u32,
        /// Channels there are.
        k_dim: u32,
    },
    /// Frequencies of a layer that is not there.
    #[error("frequencies of layer {layer}; the cache has {layers} layers")]
    FrequencyLayer {
        /// The layer.
        layer: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// Frequencies of another number of pairs than the layer's rope turns, or the policy's where keys come rotated.
    #[error(
        "layer {layer}: {got} frequencies, and its rope turns {pairs} pairs of channels; one for each is needed"
    )]
    Frequencies {
        /// The layer.
        layer: usize,
        /// Frequencies given.
        got: usize,
        /// Pairs that the layer's rope turns, or its policy's; 0 without one.
        pairs: u32,
    },
    /// A policy that turns keys by another rotation than the layer's.
    #[error(
        "layer {layer}: the policy {policy} was given another rope than the layer's; give it that of LayerShape::rope"
    )]
    PolicyRope {
        /// The layer.
        layer: usize,
        /// The policy's name.
        policy: String,
    },
    /// More rollback than there is memory for under a policy that keeps something of tokens or heads.
    #[error(
        "layer {layer}: a rollback of {rollback} tokens under the policy {policy}, which keeps numbers of each token or head for each \
         length that can be gone back to; at most {limit} tokens can be taken back"
    )]
    PolicyRollback {
        /// The layer.
        layer: usize,
        /// The policy's name.
        policy: String,
        /// Tokens of rollback.
        rollback: u32,
        /// The most there can be.
        limit: u32,
    },
    /// A ring of 0 tokens, or of more than there are positions.
    #[error("a ring of {ring} tokens with {rollback} more for rollback; the ring must hold at least 1, both at most {max}", max = Position::MAX.0)]
    Ring {
        /// Tokens of the ring.
        ring: u32,
        /// Tokens of rollback.
        rollback: u32,
    },
    /// Experts.
    #[error("{top_k} of {experts} experts a token; experts must be 1..={max}, and top_k 1..=experts", max = u16::MAX)]
    Experts {
        /// Experts of the model.
        experts: u32,
        /// Experts a token.
        top_k: u32,
    },
    /// More shards than make sense.
    #[error("{shards} shards; at most {max}", max = MAX_SHARDS)]
    Shards {
        /// As given.
        shards: u32,
    },
    /// Sinks.
    #[error("{sinks} sinks; at most {max}", max = Position::MAX.0)]
    Sinks {
        /// First positions that stay.
        sinks: u32,
    },
    /// A map of a codec that does not fit the head.
    #[error("layer {layer}: the map of {what} takes rows of {wide} channels, the head has {dim}")]
    Map {
        /// The layer.
        layer: usize,
        /// K or V.
        what: &'static str,
        /// Channels that the map takes.
        wide: u32,
        /// Channels of the head.
        dim: u32,
    },
    /// A codec for a layer or KV head that does not exist.
    #[error("{}", no_place("a codec", *layer, *kv_head, *layers, *kv_heads))]
    CodecRule {
        /// The layer as given.
        layer: Option<usize>,
        /// The KV head as given.
        kv_head: Option<usize>,
        /// Layers of the cache.
        layers: usize,
        /// The fewest KV heads of the layers meant; 0 if there are none.
        kv_heads: u32,
    },
    /// A second codec that cannot act.
    #[error("layer {layer}, KV head {kv_head}: pages that are packed again after {after} tokens: {why}")]
    Age {
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Tokens as given.
        after: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// Single tokens that are evicted out of means, which would go on to hold them.
    #[error("layer {layer} stores means of tokens and evicts single ones; set Eviction::by_page")]
    MeansEvicted {
        /// The layer.
        layer: usize,
    },
    /// Something that a cache over a fabric does not do.
    #[error("a cache over a fabric has no {what} yet; {instead} would do")]
    Fabric {
        /// What it lacks.
        what: &'static str,
        /// What would do.
        instead: &'static str,
    },
    /// A budget or an option of an eviction rule that cannot act.
    #[error("layer {layer}: its eviction rule: {why}")]
    TokenBudget {
        /// The layer.
        layer: usize,
        /// What is wrong, with the value that was given.
        why: String,
    },
    /// Hits of no pages, or of no rows.
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
        /// As given.
        layer: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// Not even one token fits.
    #[error(
        "a budget of {budget} bytes; the first token alone takes {needed} (one page a layer and KV head)"
    )]
    Budget {
        /// Bytes as given.
        budget: u64,
        /// Bytes of one page of every layer and head.
        needed: u64,
    },
}

/// That a rule names a layer or a KV head that is not there.
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
