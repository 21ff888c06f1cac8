//! Errors of maps, fits and selections, each with the value that was wrong.

use pikv_core::page::MAX_DIM;
use thiserror::Error;

/// A map that is none.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum MapError {
    /// Widths.
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
        /// Which one.
        what: &'static str,
        /// Values in it.
        len: usize,
        /// Values needed.
        wanted: usize,
    },
    /// A value that is NaN or infinite.
    #[error("{what}[{index}] is {value}; it must be finite")]
    NotFinite {
        /// In which slice.
        what: &'static str,
        /// Where.
        index: usize,
        /// As given.
        value: f32,
    },
    /// A channel that is not there, or was named before.
    #[error("channel {channel} of {wide}: it must be below that and named once")]
    Channel {
        /// As given.
        channel: u32,
        /// Channels of a row.
        wide: u32,
    },
    /// A level of means.
    #[error("means of level {level}; it must be 1..=3, for runs of 2, 4 or 8 tokens")]
    Level {
        /// As given.
        level: u32,
    },
    /// Means in a code that has scales.
    #[error("means in {code}; a code without scales is needed: f32, f16 or bf16")]
    Scaled {
        /// The code's name.
        code: &'static str,
    },
    /// Vectors of a page's own basis.
    #[error("a page of 32 tokens in {rank} vectors of its own; they must be 1..=31")]
    Rank {
        /// As given.
        rank: u32,
    },
    /// The scale of a low-rank update.
    #[error("alpha {0}: it must be finite and not 0")]
    Alpha(f32),
}

/// A fit that cannot be made. What was being fitted is as before the call.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum FitError {
    /// The map that would come out.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Heads or layers of the model.
    #[error(
        "{layers} layers, {query_heads} query heads over {kv_heads} KV heads; each must be at least 1, and the query heads \
         a multiple of the KV heads"
    )]
    Heads {
        /// Layers.
        layers: u32,
        /// Query heads of a layer.
        query_heads: u32,
        /// KV heads of a layer.
        kv_heads: u32,
    },
    /// A head that is not there.
    #[error("head {head} of layer {layer}; there are {layers} layers of {kv_heads} KV heads")]
    Head {
        /// The layer asked for.
        layer: u32,
        /// The KV head asked for.
        head: u32,
        /// Layers there are.
        layers: u32,
        /// KV heads there are.
        kv_heads: u32,
    },
    /// Rows of unlike number, or a part of one.
    #[error("{what} has {len} values: that is not {rows} rows of {width}")]
    Rows {
        /// Which slice.
        what: &'static str,
        /// Values in it.
        len: usize,
        /// Rows that the call brings.
        rows: usize,
        /// Values of one row.
        width: usize,
    },
    /// A value that is NaN or infinite.
    #[error("{what}[{index}] is {value}; only finite rows can be fitted")]
    NotFinite {
        /// In which slice.
        what: &'static str,
        /// Where.
        index: usize,
        /// As given.
        value: f32,
    },
    /// An energy that is none.
    #[error("{what}[{index}] is {value}; an energy is finite and at least 0")]
    Energy {
        /// In which slice.
        what: &'static str,
        /// Where.
        index: usize,
        /// As given.
        value: f64,
    },
    /// Widths that do not go together.
    #[error("{what} has {got} channels; {wanted} are needed")]
    Width {
        /// Which argument.
        what: &'static str,
        /// As given.
        got: u32,
        /// What goes with the rest.
        wanted: u32,
    },
    /// Nothing to fit to.
    #[error("{have} {what} to fit to; at least {least} are needed")]
    TooFew {
        /// Of what.
        what: &'static str,
        /// As given.
        have: u64,
        /// The least.
        least: u64,
    },
    /// A rank that rotation pairs, or the channels there are, cannot make.
    #[error(
        "{keep} channels cannot be kept of {pairs} rotation pairs and {singles} channels that do not turn; pairs stay \
         whole: {} would do",
        possible(*.below, *.above)
    )]
    Keep {
        /// As given.
        keep: u32,
        /// Pairs that turn together.
        pairs: u32,
        /// Other channels.
        singles: u32,
        /// The next smaller number that is possible, or 0.
        below: u32,
        /// The next larger number that is possible, or 0.
        above: u32,
    },
    /// A rank that is none.
    #[error("rank {rank} of {dim} channels; it must be 1..={dim}")]
    Rank {
        /// As given.
        rank: u32,
        /// Channels there are.
        dim: u32,
    },
    /// A rotation that is not one.
    #[error("a rotation of {rotary_dim} of {wide} channels; it must be even, at least 2 and at most all")]
    Rotary {
        /// Channels that turn.
        rotary_dim: u32,
        /// Channels there are.
        wide: u32,
    },
    /// An option out of range.
    #[error("{name} {value}: it must be {range}")]
    Setting {
        /// Which one.
        name: &'static str,
        /// As given.
        value: f64,
        /// What would have worked.
        range: &'static str,
    },
    /// The eigenvalues of a second moment were not found.
    #[error("the eigenvalues of a second moment of {dim} channels did not converge; largest entry {largest}")]
    Eigen {
        /// Its size.
        dim: u32,
        /// Its largest magnitude.
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
        /// The token.
        token: usize,
        /// As given.
        value: f32,
    },
    /// An option out of range.
    #[error("{name} {value}: it must be {range}")]
    Setting {
        /// Which one.
        name: &'static str,
        /// As given.
        value: f64,
        /// What would have worked.
        range: &'static str,
    },
    /// A capacity that the newest tokens fill alone.
    #[error(
        "a capacity of {capacity} tokens a layer with a window of {window}; it must be more than the window"
    )]
    Capacity {
        /// Tokens a layer on average.
        capacity: u32,
        /// Newest tokens that stay.
        window: u32,
    },
    /// A layer that is not there.
    #[error("layer {layer} of {layers}; it must be below that")]
    Layer {
        /// As given.
        layer: u32,
        /// Layers there are.
        layers: u32,
    },
    /// Rows that are no whole number of them.
    #[error("{len} values are not rows of {width}")]
    Rows {
        /// Values given.
        len: usize,
        /// Values of one row.
        width: usize,
    },
    /// A row's value that is NaN or infinite.
    #[error("value {value} of channel {channel} of row {row}; it must be finite")]
    NotFinite {
        /// The row.
        row: usize,
        /// The channel.
        channel: usize,
        /// As given.
        value: f32,
    },
    /// A head with nothing to choose from.
    #[error("head {head} has no codings to choose from; it needs at least 1")]
    NoCodings {
        /// Its index.
        head: usize,
    },
    /// An error or an importance that is no cost.
    #[error("{what} {value} of head {head}; it must be finite and at least 0")]
    Cost {
        /// Which of the two.
        what: &'static str,
        /// The head.
        head: usize,
        /// As given.
        value: f64,
    },
    /// Not even the smallest codings fit.
    #[error("a budget of {budget} bytes; the smallest coding of every head takes {needed}")]
    Budget {
        /// As given.
        budget: u64,
        /// The least.
        needed: u64,
    },
}
