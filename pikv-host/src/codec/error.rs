//! Errors of maps, fits and selections; each carries the rejected value.

use pikv_core::page::MAX_DIM;
use thiserror::Error;

/// A map that cannot be made.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum MapError {
    /// A width outside 1..=256, or `narrow` above `wide`.
    #[error(
        "a map from {wide} channels to {narrow}; they must be 1..={MAX_DIM}, and the latter at most the former"
    )]
    Width {
        /// Channels of a row.
        wide: u32,
        /// Channels that are stored.
        narrow: u32,
    },
    /// A slice of the wrong length.
    #[error("{what} has {len} values; {wanted} are needed")]
    Length {
        /// Name of the slice.
        what: &'static str,
        /// Values in it.
        len: usize,
        /// Values needed.
        wanted: usize,
    },
    /// A value that is NaN or infinite.
    #[error("{what}[{index}] is {value}; it must be finite")]
    NotFinite {
        /// Name of the slice.
        what: &'static str,
        /// Index in the slice.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A channel at or above `wide`, or listed twice.
    #[error("channel {channel} of {wide}: it must be below that and named once")]
    Channel {
        /// Index of the channel.
        channel: u32,
        /// Channels of a row.
        wide: u32,
    },
    /// A level of means outside 1..=3.
    #[error("means of level {level}; it must be 1..=3, for runs of 2, 4 or 8 tokens")]
    Level {
        /// The level.
        level: u32,
    },
    /// Means in a code that has scales.
    #[error("means in {code}; a code without scales is needed: f32, f16 or bf16")]
    Scaled {
        /// The code's name.
        code: &'static str,
    },
    /// A rank of a page's own basis outside 1..=31.
    #[error("a page of 32 tokens in {rank} vectors of its own; they must be 1..=31")]
    Rank {
        /// The rank.
        rank: u32,
    },
    /// A scale of a low-rank update that is 0 or not finite.
    #[error("alpha {0}: it must be finite and not 0")]
    Alpha(f32),
}

/// A fit that cannot be made. The fitter and its moments stay unchanged.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum FitError {
    /// The fitted map is not valid.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A count of layers or heads that is 0, or query heads that are not a multiple of the KV heads.
    #[error(
        "{layers} layers, {query_heads} query heads over {kv_heads} KV heads; each must be at least 1, and the query heads \
         a multiple of the KV heads"
    )]
    Heads {
        /// Number of layers.
        layers: u32,
        /// Query heads of a layer.
        query_heads: u32,
        /// KV heads of a layer.
        kv_heads: u32,
    },
    /// A layer or head out of range.
    #[error("head {head} of layer {layer}; there are {layers} layers of {kv_heads} KV heads")]
    Head {
        /// Index of the layer.
        layer: u32,
        /// Index of the KV head.
        head: u32,
        /// Layers of the model.
        layers: u32,
        /// KV heads of a layer.
        kv_heads: u32,
    },
    /// A slice whose length is not `rows * width`.
    #[error("{what} has {len} values: that is not {rows} rows of {width}")]
    Rows {
        /// Name of the slice.
        what: &'static str,
        /// Values in it.
        len: usize,
        /// Rows of the call.
        rows: usize,
        /// Values of one row.
        width: usize,
    },
    /// A value that is NaN or infinite.
    #[error("{what}[{index}] is {value}; only finite rows can be fitted")]
    NotFinite {
        /// Name of the slice.
        what: &'static str,
        /// Index in the slice.
        index: usize,
        /// The value.
        value: f32,
    },
    /// An energy that is negative or not finite.
    #[error("{what}[{index}] is {value}; an energy is finite and at least 0")]
    Energy {
        /// Name of the slice.
        what: &'static str,
        /// Index in the slice.
        index: usize,
        /// The value.
        value: f64,
    },
    /// A width that does not match the others.
    #[error("{what} has {got} channels; {wanted} are needed")]
    Width {
        /// Name of the argument.
        what: &'static str,
        /// Channels given.
        got: u32,
        /// Accepted width, in channels.
        wanted: u32,
    },
    /// Too few rows or segments to fit.
    #[error("{have} {what} to fit to; at least {least} are needed")]
    TooFew {
        /// `"rows"` or `"segments"`.
        what: &'static str,
        /// Number given.
        have: u64,
        /// Smallest accepted number.
        least: u64,
    },
    /// A number of channels to keep that whole rotation pairs and single channels cannot make up.
    #[error(
        "{keep} channels cannot be kept of {pairs} rotation pairs and {singles} channels that do not turn; pairs stay \
         whole: {} would do",
        possible(*.below, *.above)
    )]
    Keep {
        /// The number to keep.
        keep: u32,
        /// Rotation pairs.
        pairs: u32,
        /// Channels that do not rotate.
        singles: u32,
        /// The next smaller number that is possible, or 0.
        below: u32,
        /// The next larger number that is possible, or 0.
        above: u32,
    },
    /// A rank outside `1..=dim`.
    #[error("rank {rank} of {dim} channels; it must be 1..={dim}")]
    Rank {
        /// The rank.
        rank: u32,
        /// Channels of a row.
        dim: u32,
    },
    /// A rotary width that is odd, 0 or above `wide`.
    #[error("a rotation of {rotary_dim} of {wide} channels; it must be even, at least 2 and at most all")]
    Rotary {
        /// Channels that rotate.
        rotary_dim: u32,
        /// Channels of a row.
        wide: u32,
    },
    /// An option out of range.
    #[error("{name} {value}: it must be {range}")]
    Setting {
        /// Name of the option.
        name: &'static str,
        /// The value.
        value: f64,
        /// Accepted values.
        range: &'static str,
    },
    /// The eigenvalue iteration did not converge.
    #[error("the eigenvalues of a second moment of {dim} channels did not converge; largest entry {largest}")]
    Eigen {
        /// Rows of the matrix.
        dim: u32,
        /// Largest magnitude of its entries.
        largest: f64,
    },
}

fn possible(below: u32, above: u32) -> String {
    match (below, above) {
        (0, above) => above.to_string(),
        (below, 0) => below.to_string(),
        (below, above) => format!("{below} or {above}"),
    }
}

/// A choice of tokens, budgets or codings that cannot be made.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SelectError {
    /// A score that is NaN or infinite.
    #[error("score {value} of token {token}; it must be finite")]
    Score {
        /// Index of the token.
        token: usize,
        /// The score.
        value: f32,
    },
    /// An option out of range.
    #[error("{name} {value}: it must be {range}")]
    Setting {
        /// Name of the option.
        name: &'static str,
        /// The value.
        value: f64,
        /// Accepted values.
        range: &'static str,
    },
    /// A capacity that is not above the window.
    #[error(
        "a capacity of {capacity} tokens a layer with a window of {window}; it must be more than the window"
    )]
    Capacity {
        /// Tokens a layer on average.
        capacity: u32,
        /// Newest tokens that are always kept.
        window: u32,
    },
    /// A layer or level out of range.
    #[error("layer {layer} of {layers}; it must be below that")]
    Layer {
        /// Index of the layer.
        layer: u32,
        /// Number of layers.
        layers: u32,
    },
    /// A length that is not a whole number of rows.
    #[error("{len} values are not rows of {width}")]
    Rows {
        /// Values given.
        len: usize,
        /// Values of one row.
        width: usize,
    },
    /// A value that is NaN or infinite.
    #[error("value {value} of channel {channel} of row {row}; it must be finite")]
    NotFinite {
        /// Index of the row.
        row: usize,
        /// Index of the channel.
        channel: usize,
        /// The value.
        value: f32,
    },
    /// A head without codings to choose from.
    #[error("head {head} has no codings to choose from; it needs at least 1")]
    NoCodings {
        /// Index of the head.
        head: usize,
    },
    /// An error or importance that is negative or not finite.
    #[error("{what} {value} of head {head}; it must be finite and at least 0")]
    Cost {
        /// `"error"` or `"importance"`.
        what: &'static str,
        /// Index of the head.
        head: usize,
        /// The value.
        value: f64,
    },
    /// The smallest codings do not fit in the budget.
    #[error("a budget of {budget} bytes; the smallest coding of every head takes {needed}")]
    Budget {
        /// The budget, in bytes.
        budget: u64,
        /// Bytes of the smallest codings.
        needed: u64,
    },
}
