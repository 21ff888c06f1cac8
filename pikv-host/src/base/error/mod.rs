//! Errors, each with the invalid value.

mod config;
mod cuda;
mod fabric;
mod save;

pub use self::{
    config::{ConfigError, OptionError},
    cuda::CudaError,
    fabric::FabricError,
    save::{SaveError, SaveOperation},
};

pub(crate) use self::config::MAX_SHARDS;

use pikv_core::dtype::Dtype;
use pikv_core::page::Position;
use thiserror::Error;

/// An operation of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TierOperation {
    /// Create a store.
    Open,
    /// Write a page.
    Write,
    /// Read a page.
    Read,
}

impl std::fmt::Display for TierOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TierOperation::Open => "opening",
            TierOperation::Write => "writing",
            TierOperation::Read => "reading",
        })
    }
}

/// Largest value of the dtype with this name.
fn largest(dtype: &str) -> f32 {
    Dtype::ALL.into_iter().find(|of| of.name() == dtype).map_or(f32::MAX, Dtype::largest)
}

/// Text with the lengths at which a sequence can be forked.
fn forks(oldest: u32, len: u32, checkpoints: &[u32]) -> String {
    let mut text = format!("lengths that would do: {oldest} to {len}");
    if !checkpoints.is_empty() {
        text += &format!(", and those of checkpoints: {checkpoints:?}");
    }
    text
}

/// Why a call failed. A failed call changes neither the cache nor any sequence; for a call inside a step this holds once the step is
/// dropped.
///
/// ```
/// # use pikv_host as pikv;
/// use pikv::{Cache, CacheConfig, Dtype, Error, LayerShape};
///
/// let layer = LayerShape::new(1, 2, 4, Dtype::F32);
/// let cache = Cache::new(CacheConfig::new(vec![layer], 1 << 16))?;
/// let mut sequence = cache.sequence();
/// match cache.begin([(&mut sequence, 1_000_000)]) {
///     Err(Error::OutOfBudget { needed, available }) => assert!(needed > available),
///     other => panic!("{other:?}"),
/// }
/// let mut step = cache.begin([(&mut sequence, 1)])?;
/// let error = step.append(0, &[f32::NAN; 4], &[0.0; 4]).unwrap_err();
/// assert!(matches!(error, Error::Unstorable { .. }), "{error}");
/// step.append(0, &[0.5; 4], &[0.0; 4])?;                  // the layer may be appended again
/// step.commit()?;
/// # Ok::<(), pikv::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The pages of the step, or of a restored sequence, would exceed the budget.
    #[error(
        "out of budget: up to {needed} bytes of pages are needed, {available} are left; begin with fewer tokens, drop or evict \
         sequences, or raise the budget"
    )]
    OutOfBudget {
        /// Upper bound of the bytes needed.
        needed: u64,
        /// Bytes left.
        available: u64,
    },
    /// The system, or the device, has no memory for pages within the budget or for a RoPE table.
    #[error("the system refused {bytes} bytes for pages or tables")]
    OutOfMemory {
        /// Bytes asked of the system.
        bytes: u64,
    },
    /// The device or its driver failed. Tokens appended in the current step may be lost: drop the step.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// Another rank of the cache's fabric failed. The call can be repeated; the pages of a lost rank are gone.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A sequence could not be saved or restored.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A tier below the first failed. Pages stay where they were; the call can be repeated.
    #[error("{operation} of {bytes} bytes, tier {tier}: {kind}")]
    Tier {
        /// The operation that failed.
        operation: TierOperation,
        /// The tier's name.
        tier: String,
        /// Bytes of the page, or of the whole tier if it could not be opened.
        bytes: u64,
        /// Error kind of the system.
        kind: std::io::ErrorKind,
    },
    /// A tier has no contiguous room for a page.
    #[error("tier {tier} has no room for a page of {needed} bytes; {available} are free")]
    TierFull {
        /// The tier's name.
        tier: String,
        /// Bytes of the page.
        needed: u64,
        /// Free bytes, not necessarily contiguous.
        available: u64,
    },
    /// One call reads more pages from files than the staging area holds.
    #[error(
        "layer {layer}: the call reads {needed} bytes of pages from files, and stages {staging}; set Tiers::staging to that, attend \
         fewer sequences at a time, or promote pages"
    )]
    Staging {
        /// The layer.
        layer: usize,
        /// Bytes of pages to read.
        needed: u64,
        /// Bytes of the staging area.
        staging: u64,
    },
    /// An operation on tiers in a cache without tiers.
    #[error("the cache has no tiers; set CacheConfig::tiers")]
    NoTiers,
    /// The shares of tiers do not sum to 1, or their number is not that of the tiers.
    #[error(
        "{got} shares for {tiers} tiers, which add up to {sum}; each tier needs one in 0..=1, and the sum must be 1"
    )]
    Shares {
        /// Shares given.
        got: usize,
        /// Tiers of the cache, including the first.
        tiers: usize,
        /// Sum of the shares.
        sum: f64,
    },
    /// A slice of the wrong length.
    #[error("{what}: {got} elements, expected {expected} ({shape})")]
    Length {
        /// The argument.
        what: &'static str,
        /// Elements given.
        got: usize,
        /// Elements needed.
        expected: usize,
        /// Formula of `expected`.
        shape: &'static str,
    },
    /// A device tensor that kernels cannot read or write.
    #[error("{what} on the device, at {address:#x}: {why}")]
    DeviceTensor {
        /// The argument.
        what: &'static str,
        /// Device address.
        address: u64,
        /// Reason.
        why: &'static str,
    },
    /// Device tensors where only host tensors are supported.
    #[error("layer {layer}: tensors of the device do not go with {what}; use slices of the host")]
    HostTensors {
        /// The layer.
        layer: usize,
        /// The feature that needs host tensors.
        what: &'static str,
    },
    /// No such layer.
    #[error("layer {layer}: the cache has layers 0..{layers}")]
    Layer {
        /// Layer given.
        layer: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// No such KV head.
    #[error("KV head {kv_head}: layer {layer} has KV heads 0..{kv_heads}")]
    KvHead {
        /// The layer.
        layer: usize,
        /// KV head given.
        kv_head: usize,
        /// KV heads of the layer.
        kv_heads: u32,
    },
    /// A value that the layer's dtype or the head's codec cannot store.
    #[error(
        "{what} of layer {layer}, KV head {kv_head}, row {row}, channel {channel}: {value}; largest for {dtype}{codec}: {limit}",
        codec = if *limit < largest(dtype) { " and the head's codec" } else { "" }
    )]
    Unstorable {
        /// `k` or `v`.
        what: &'static str,
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Row of the call, counted over all its sequences.
        row: usize,
        /// Channel of the row.
        channel: u32,
        /// The value.
        value: f32,
        /// Dtype of the layer.
        dtype: &'static str,
        /// Largest magnitude accepted: that of the dtype or of the head's codec
        /// ([`Limits`](crate::codec::Limits)).
        limit: f32,
    },
    /// A row that the map of the head's codec could take out of the range of its code.
    #[error(
        "{what} of layer {layer}, KV head {kv_head}, row {row}: channels of length {length}, the largest of them channel {channel} \
         with {value}; longest for the head's codec: {limit}"
    )]
    RowTooLong {
        /// `k` or `v`.
        what: &'static str,
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Row of the call, counted over all its sequences.
        row: usize,
        /// Channel with the largest magnitude among those that the limit covers.
        channel: u32,
        /// Value of that channel.
        value: f32,
        /// Euclidean norm of those channels.
        length: f32,
        /// Largest norm accepted ([`Limits::length`](crate::codec::Limits::length)).
        limit: f32,
    },
    /// A query that is not finite.
    #[error("q of layer {layer}, row {row}, query head {head}, channel {channel}: {value} is not finite")]
    Query {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
        /// The query head.
        head: usize,
        /// Channel of the row.
        channel: usize,
        /// The value.
        value: f32,
    },
    /// Scores of 2^24 or more (a product overflowed, or softmax cannot tell them apart), or weighted values that overflow.
    #[error(
        "layer {layer}, row {row}, query head {head}: scores reach 2^24 and more, or the weighted values overflow; is the \
         scale {scale} right?"
    )]
    ScoreOverflow {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
        /// The query head.
        head: usize,
        /// Scale of the options.
        scale: f32,
    },
    /// A result that overflows the dtype of the output.
    #[error(
        "out of layer {layer}, row {row}, query head {head}, channel {channel}: {value} is not finite as {dtype}"
    )]
    Output {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
        /// The query head.
        head: usize,
        /// Channel of the row.
        channel: usize,
        /// The value.
        value: f32,
        /// Dtype of the output.
        dtype: &'static str,
    },
    /// A scale that is not finite and above 0, or not after division by the softcap.
    #[error("scale {0}: it must be finite and above 0, over the softcap too; usually 1 / sqrt(head_dim)")]
    Scale(f32),
    /// A softcap that is not above 0 and below 2^23.
    #[error("softcap {0}: it must be above 0 and below 2^23")]
    Softcap(f32),
    /// A split that is not a power of two.
    #[error("split of {0} blocks: it must be a power of two")]
    Split(u32),
    /// A step without sequences.
    #[error("a step needs at least 1 sequence")]
    NoSequences,
    /// A step with 0 tokens for a sequence.
    #[error("sequence {index} of the step: 0 tokens; leave it out instead")]
    NoTokens {
        /// Index in the step.
        index: usize,
    },
    /// A panic of a policy or of a tier's store left the sequence half changed.
    #[error(
        "a panic of a policy or of a tier's store left the sequence half changed; clear or drop it, and append its tokens again"
    )]
    Poisoned,
    /// A budget of a sequence that has no effect, or is 0.
    #[error("a sequence with a budget of {tokens} tokens a head: {why}")]
    SequenceBudget {
        /// Tokens given.
        tokens: u32,
        /// Reason.
        why: &'static str,
    },
    /// A sequence index that the step does not have.
    #[error("sequence {sequence} of the step; it began with {sequences} sequences, counted from 0")]
    NotInStep {
        /// Index given.
        sequence: usize,
        /// Sequences of the step.
        sequences: usize,
    },
    /// A sequence of another cache.
    #[error("sequence {index} belongs to another cache; take sequences from this one by Cache::sequence")]
    ForeignSequence {
        /// Index in the call.
        index: usize,
    },
    /// The sequence would exceed the last position.
    #[error("position {position}: the last one is {max}", max = Position::MAX.0)]
    PositionOverflow {
        /// The position asked for.
        position: u64,
    },
    /// Query rows after the end of the sequence, or older than its ring.
    #[error("query rows {first}..{end} of a sequence of {len} tokens: rows must lie in {oldest}..={len}")]
    QueryPosition {
        /// Position of the first row.
        first: u64,
        /// Position after the last row.
        end: u64,
        /// Oldest position accepted.
        oldest: u32,
        /// Tokens of the sequence.
        len: u32,
    },
    /// [`ReadPages::Quest`](crate::attend::options::ReadPages::Quest) in a cache without bounds.
    #[error("ReadPages::Quest in a cache without bounds; set CacheConfig::key_bounds")]
    NoBounds,
    /// Closed gaps in a layer that receives rotated keys.
    #[error(
        "closed gaps in layer {layer}, whose keys come rotated; set LayerShape::rope and append them unrotated"
    )]
    NoRotation {
        /// The layer.
        layer: usize,
    },
    /// Rows that read the pages of their experts, before they were routed.
    #[error(
        "row {row} of layer {layer} reads the pages of its experts before it was routed; call Step::route first"
    )]
    NotRouted {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
    },
    /// A layer was routed or written twice in a step.
    #[error("layer {layer} was already {what} in this step; each layer is once")]
    Twice {
        /// The layer.
        layer: usize,
        /// The operation done before.
        what: &'static str,
    },
    /// A layer was attended before its keys and values were appended.
    #[error("layer {layer} is attended before its keys and values were appended; call Step::append first")]
    NotAppended {
        /// The layer.
        layer: usize,
    },
    /// A commit before every layer was routed and written.
    #[error("commit before layer {layer} was {what}; a step that is dropped instead changes nothing")]
    Incomplete {
        /// First layer that is not complete.
        layer: usize,
        /// Missing operation.
        what: &'static str,
    },
    /// No such expert.
    #[error("expert {expert} of row {row}, layer {layer}: the cache has experts 0..{experts}")]
    Expert {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
        /// Expert given.
        expert: u16,
        /// Experts of the cache.
        experts: u32,
    },
    /// An expert was named twice for one token.
    #[error(
        "expert {expert} is named twice for row {row} of layer {layer}; a row takes top_k different ones"
    )]
    ExpertTwice {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
        /// The expert.
        expert: u16,
    },
    /// A rollback of more tokens than are kept.
    #[error(
        "rollback of {asked} tokens: at most {limit} can be taken back now; CacheConfig::rollback sets how many are kept"
    )]
    RollbackTooFar {
        /// Tokens given.
        asked: u32,
        /// Most tokens accepted.
        limit: u32,
    },
    /// A fork at a length whose exact state is not kept.
    #[error("a fork at {asked} of {len} tokens: {why}; {}", forks(*oldest, *len, checkpoints))]
    Cut {
        /// Length given.
        asked: u32,
        /// Tokens of the sequence.
        len: u32,
        /// Reason.
        why: &'static str,
        /// Every length from this one to `len` is accepted.
        oldest: u32,
        /// Accepted lengths of checkpoints.
        checkpoints: Vec<u32>,
    },
    /// An operation that a cache over a fabric does not support.
    #[error("{what} in a cache over a fabric: {why}")]
    OverFabric {
        /// The operation.
        what: &'static str,
        /// Reason.
        why: &'static str,
    },
    /// No such page.
    #[error("{page} is not there in layer {layer}, KV head {kv_head}; Sequence::pages lists those that are")]
    NoPage {
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Page given.
        page: crate::base::ids::PageId,
    },
    /// Eviction of a page of the ring, which must stay for rollback.
    #[error("{page} cannot be evicted: the ring holds what can be rolled back")]
    Pinned {
        /// Page given.
        page: crate::base::ids::PageId,
    },
}

/// Checks that a slice of `got` elements has `expected` ones; `shape` is the formula.
///
/// # Errors
/// [`Error::Length`] if not.
pub(crate) fn length(
    what: &'static str,
    got: usize,
    expected: usize,
    shape: &'static str,
) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected, shape }) }
}
