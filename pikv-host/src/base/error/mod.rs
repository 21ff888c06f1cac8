//! Errors, each with the value that was wrong.

mod config;
mod cuda;
mod fabric;
mod save;

pub use self::{
    config::ConfigError,
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
pub enum TierOperation {
    /// Make a store.
    Open,
    /// Take a page.
    Write,
    /// Give a page.
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

/// The largest value of the dtype of that name.
fn largest(dtype: &str) -> f32 {
    Dtype::ALL.into_iter().find(|of| of.name() == dtype).map_or(f32::MAX, Dtype::largest)
}

/// The lengths at which a sequence can be forked.
fn forks(oldest: u32, len: u32, checkpoints: &[u32]) -> String {
    let mut text = format!("lengths that would do: {oldest} to {len}");
    if !checkpoints.is_empty() {
        text += &format!(", and those of checkpoints: {checkpoints:?}");
    }
    text
}

/// Why a call was refused. Whatever the cause, the cache and every sequence are as they were before the call, or, inside a
/// step, as they are once the step is dropped.
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
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The step, or what is restored, would pass the budget.
    #[error(
        "out of budget: up to {needed} bytes of pages are needed, {available} are left; begin with fewer tokens, drop or evict \
         sequences, or raise the budget"
    )]
    OutOfBudget {
        /// The most bytes that it can take.
        needed: u64,
        /// Bytes left.
        available: u64,
    },
    /// The system (or the device) has no memory for pages that the budget would allow, or for a table of rotations.
    #[error("the system refused {bytes} bytes for pages or tables")]
    OutOfMemory {
        /// Bytes asked of the system.
        bytes: u64,
    },
    /// The device, or its driver. What was appended in a step that is under way may be lost then: drop the step.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// Another rank of the cache's fabric. The call can be made again; what lay on a rank that is lost is gone.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A sequence could not be saved, or what was saved not restored.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A tier beneath the first failed. Its pages, and those that were to go there, are where they were; the call can be made again.
    #[error("{operation} of {bytes} bytes, tier {tier}: {kind}")]
    Tier {
        /// What was tried.
        operation: TierOperation,
        /// The tier's name.
        tier: String,
        /// Bytes of the page; of the whole tier, where it could not be opened.
        bytes: u64,
        /// What the system says.
        kind: std::io::ErrorKind,
    },
    /// A tier that has no room for a page, or none in one piece.
    #[error("tier {tier} has no room for a page of {needed} bytes; {available} are free")]
    TierFull {
        /// The tier's name.
        tier: String,
        /// Bytes of the page.
        needed: u64,
        /// Bytes that are free, perhaps not next to each other.
        available: u64,
    },
    /// More pages to be read from files by one call than can be staged.
    #[error(
        "layer {layer}: the call reads {needed} bytes of pages from files, and stages {staging}; set Tiers::staging to that, attend \
         fewer sequences at a time, or promote pages"
    )]
    Staging {
        /// The layer.
        layer: usize,
        /// Bytes of pages.
        needed: u64,
        /// Bytes of the staging area.
        staging: u64,
    },
    /// Moving pages in a cache without tiers.
    #[error("the cache has no tiers; set CacheConfig::tiers")]
    NoTiers,
    /// Shares of tiers that do not sum to 1, or are not one for each tier.
    #[error(
        "{got} shares for {tiers} tiers, which add up to {sum}; each tier needs one in 0..=1, and the sum must be 1"
    )]
    Shares {
        /// Shares given.
        got: usize,
        /// Tiers of the cache, the first counted.
        tiers: usize,
        /// Their sum.
        sum: f64,
    },
    /// A slice of the wrong length.
    #[error("{what}: {got} elements, expected {expected} ({shape})")]
    Length {
        /// Which argument.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The right one.
        expected: usize,
        /// What the length is made of.
        shape: &'static str,
    },
    /// A tensor of the device that kernels cannot read or write.
    #[error("{what} on the device, at {address:#x}: {why}")]
    DeviceTensor {
        /// Which argument.
        what: &'static str,
        /// Its address.
        address: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Tensors of the device where the host has to see them.
    #[error("layer {layer}: tensors of the device do not go with {what}; use slices of the host")]
    HostTensors {
        /// The layer.
        layer: usize,
        /// What they do not go with.
        what: &'static str,
    },
    /// No such layer.
    #[error("layer {layer}: the cache has layers 0..{layers}")]
    Layer {
        /// As given.
        layer: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// No such KV head.
    #[error("KV head {kv_head}: layer {layer} has KV heads 0..{kv_heads}")]
    KvHead {
        /// The layer.
        layer: usize,
        /// As given.
        kv_head: usize,
        /// KV heads of the layer.
        kv_heads: u32,
    },
    /// A value that the layer's dtype cannot hold.
    #[error(
        "{what} of layer {layer}, KV head {kv_head}, row {row}, channel {channel}: {value}; largest for {dtype}{codec}: {limit}",
        codec = if *limit < largest(dtype) { " and the head's codec" } else { "" }
    )]
    Unstorable {
        /// K or V.
        what: &'static str,
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Row of the call, over all its sequences.
        row: usize,
        /// Channel of the row.
        channel: u32,
        /// The value.
        value: f32,
        /// The stored form.
        dtype: &'static str,
        /// The largest magnitude that would do: the form's, or what the head's codec holds
        /// ([`Limits`](crate::codec::Limits)).
        limit: f32,
    },
    /// A row that the map of the head's codec could turn into more than its code holds.
    #[error(
        "{what} of layer {layer}, KV head {kv_head}, row {row}: channels of length {length}, the largest of them channel {channel} \
         with {value}; longest for the head's codec: {limit}"
    )]
    RowTooLong {
        /// K or V.
        what: &'static str,
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// Row of the call, over all its sequences.
        row: usize,
        /// The largest channel of those whose length counts.
        channel: u32,
        /// Its value.
        value: f32,
        /// The root of the sum of the squares.
        length: f32,
        /// The largest that would do ([`Limits::length`](crate::codec::Limits::length)).
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
    /// Scores beyond 2^24 (the products overflowed, or no softmax can tell them apart), or values whose sum overflows.
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
        /// The scale as given.
        scale: f32,
    },
    /// A result that the dtype of the tensor it goes to cannot hold.
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
        /// The tensor's form.
        dtype: &'static str,
    },
    /// A scale that is not a number above 0.
    #[error("scale {0}: it must be finite and above 0, over the softcap too; usually 1 / sqrt(head_dim)")]
    Scale(f32),
    /// A cap that is not a number above 0.
    #[error("softcap {0}: it must be above 0 and below 2^23")]
    Softcap(f32),
    /// A split that is no power of two.
    #[error("split of {0} blocks: it must be a power of two")]
    Split(u32),
    /// A step over nothing.
    #[error("a step needs at least 1 sequence")]
    NoSequences,
    /// A step that adds nothing to a sequence.
    #[error("sequence {index} of the step: 0 tokens; leave it out instead")]
    NoTokens {
        /// Index in the step.
        index: usize,
    },
    /// A sequence that a panic of a policy or of a tier's store left half changed.
    #[error(
        "a panic of a policy or of a tier's store left the sequence half changed; clear or drop it, and append its tokens again"
    )]
    Poisoned,
    /// A budget of a sequence that could not act.
    #[error("a sequence with a budget of {tokens} tokens a head: {why}")]
    SequenceBudget {
        /// Tokens as given.
        tokens: u32,
        /// Why not.
        why: &'static str,
    },
    /// A sequence that is not in the step.
    #[error("sequence {sequence} of the step; it began with {sequences} sequences, counted from 0")]
    NotInStep {
        /// Its place among them, as given.
        sequence: usize,
        /// Sequences that the step began with.
        sequences: usize,
    },
    /// A sequence of another cache.
    #[error("sequence {index} belongs to another cache; take sequences from this one by Cache::sequence")]
    ForeignSequence {
        /// Index in the call.
        index: usize,
    },
    /// The sequence would pass the last position.
    #[error("position {position}: the last one is {max}", max = Position::MAX.0)]
    PositionOverflow {
        /// The position asked for.
        position: u64,
    },
    /// A query row at a position that the sequence has not reached or that its ring no longer resolves.
    #[error("query rows {first}..{end} of a sequence of {len} tokens: rows must lie in {oldest}..={len}")]
    QueryPosition {
        /// First row's position.
        first: u64,
        /// Past the last row's.
        end: u64,
        /// The oldest position that can still be asked.
        oldest: u32,
        /// Tokens of the sequence.
        len: u32,
    },
    /// Pages chosen by their bounds, in a cache that keeps none.
    #[error("Read::Quest in a cache without bounds; set CacheConfig::bounds")]
    NoBounds,
    /// Gaps closed where keys come rotated.
    #[error(
        "closed gaps in layer {layer}, whose keys come rotated; set LayerShape::rope and append them unrotated"
    )]
    NoRotation {
        /// The layer.
        layer: usize,
    },
    /// Rows that are to read the pages of their experts, which are not known.
    #[error(
        "row {row} of layer {layer} reads the pages of its experts before it was routed; call Step::route first"
    )]
    NotRouted {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
    },
    /// A layer was written twice in a step.
    #[error("layer {layer} was already {what} in this step; each layer is once")]
    Twice {
        /// The layer.
        layer: usize,
        /// What was done.
        what: &'static str,
    },
    /// Attending a layer before it was written.
    #[error("layer {layer} is attended before its keys and values were appended; call Step::append first")]
    NotAppended {
        /// The layer.
        layer: usize,
    },
    /// A step that is committed before every layer was written.
    #[error("commit before layer {layer} was {what}; a step that is dropped instead changes nothing")]
    Incomplete {
        /// The first such layer.
        layer: usize,
        /// What is missing.
        what: &'static str,
    },
    /// No such expert.
    #[error("expert {expert} of row {row}, layer {layer}: the cache has experts 0..{experts}")]
    Expert {
        /// The layer.
        layer: usize,
        /// Row of the call.
        row: usize,
        /// As given.
        expert: u16,
        /// Experts of the cache.
        experts: u32,
    },
    /// The same expert twice for one token.
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
    /// Taking back more than is kept.
    #[error(
        "rollback of {asked} tokens: at most {limit} can be taken back now; CacheConfig::rollback sets how many are kept"
    )]
    RollbackTooFar {
        /// As given.
        asked: u32,
        /// The most that would do.
        limit: u32,
    },
    /// A fork at an earlier length that cannot be had to the bit.
    #[error("a fork at {asked} of {len} tokens: {why}; {}", forks(*oldest, *len, checkpoints))]
    Cut {
        /// As given.
        asked: u32,
        /// Tokens of the sequence.
        len: u32,
        /// What stands in the way.
        why: &'static str,
        /// The least length from which on any would do.
        oldest: u32,
        /// Lengths of checkpoints, which would do too.
        checkpoints: Vec<u32>,
    },
    /// Something that a cache over a fabric does not do.
    #[error("{what} in a cache over a fabric: {why}")]
    OverFabric {
        /// What was asked.
        what: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// No such page.
    #[error("{page} is not there in layer {layer}, KV head {kv_head}; Sequence::pages lists those that are")]
    NoPage {
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// As given.
        page: crate::base::ids::PageId,
    },
    /// Evicting what must stay.
    #[error("{page} cannot be evicted: the ring holds what can be rolled back")]
    Pinned {
        /// As given.
        page: crate::base::ids::PageId,
    },
}

/// That a slice of `got` elements has the `expected` ones that `shape` says.
///
/// # Errors
/// [`Error::Length`].
pub(crate) fn length(
    what: &'static str,
    got: usize,
    expected: usize,
    shape: &'static str,
) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected, shape }) }
}
