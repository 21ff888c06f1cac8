//! Arguments of kernels: plain words, the same on host and device.

use bytemuck::{Pod, Zeroable};
use pikv_core::attend::Sight;
use pikv_core::codec::code::Code;
use pikv_core::codec::packed::{Packed, Side};
use pikv_core::dtype::Dtype;
use pikv_core::page::{Layout, Position, Slot};
use pikv_core::rope::{Pairs, Rope};

/// A [`Layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct LayoutArg {
    /// Channels of a key.
    pub k_dim: u32,
    /// Channels of a value.
    pub v_dim: u32,
    /// Index of K's dtype in [`Dtype::ALL`].
    pub k: u32,
    /// Index of V's dtype in [`Dtype::ALL`].
    pub v: u32,
}

/// A tensor of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct TensorArg {
    /// Address of the first element.
    pub at: u64,
    /// Index of the dtype in [`Dtype::ALL`].
    pub dtype: u32,
    /// Padding, 0.
    pub pad: u32,
}

/// A [`Packed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct PackedArg {
    /// Stored channels of a key.
    pub k_dim: u32,
    /// Stored channels of a value.
    pub v_dim: u32,
    /// Index of K's code in [`Code::ALL`].
    pub k: u32,
    /// Index of V's code in [`Code::ALL`].
    pub v: u32,
    /// Meaning of the rows of K.
    pub k_side: SideArg,
    /// Meaning of the rows of V.
    pub v_side: SideArg,
}

/// A [`Side`]; both 0 for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct SideArg {
    /// Level of means.
    pub level: u32,
    /// Channels of a basis vector.
    pub wide: u32,
}

/// A rotation of keys when they are read; `rotary_dim` is 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct RopeArg {
    /// Channels that are rotated.
    pub rotary_dim: u32,
    /// 0 for halves, 1 for neighbours.
    pub neighbours: u32,
    /// Positions in the table, a power of two.
    pub capacity: u32,
}

/// A [`Sight`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct SightArg {
    /// [`Sight::floor`]
    pub floor: u32,
    /// [`Sight::lo`]
    pub lo: u32,
    /// [`Sight::sinks`]
    pub sinks: u32,
    /// [`Sight::hi`]
    pub hi: i32,
}

/// One block of pages for one bundle of query rows: the task of a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct TaskArg {
    /// Partial result, in f32 from the start of all.
    pub part: u64,
    /// Weights of the task, if they are kept, in f32 from the start of all.
    pub raw: u64,
    /// Queries of the bundle, in f32 from the start of all.
    pub q: u32,
    /// First page of the block in the list.
    pub pages: u32,
    /// Pages of the block, at most 8.
    pub count: u32,
    /// First sight of the bundle in the list.
    pub sights: u32,
}

/// A join of two partial results, or a map of one to the head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct JoinArg {
    /// Partial result that is written, in f32 from the start of all: of a merge the one of the lower leaves, which is read too.
    pub left: u64,
    /// Partial result that is only read: of a merge the one of the higher leaves, of a map the one over packed pages.
    pub right: u64,
    /// Rows of lanes per row of both partial results of a merge.
    pub acc_rows: u32,
    /// [`JoinArg::MERGE`], or for a map the index of the head in the list.
    pub head: u32,
}

/// A map of channels in one direction; `form` is 0 if channels are stored unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct MapArg {
    /// 1 for the Walsh-Hadamard transform, 2 for a selection of channels, 3 for a matrix.
    pub form: u32,
    /// Channels of the head.
    pub wide: u32,
    /// Channels that are stored.
    pub narrow: u32,
    /// Channels of a block of the transform.
    pub block: u32,
    /// Address of the matrix, or of the channel numbers.
    pub table: u64,
    /// Address of the bias, 0 for none.
    pub bias: u64,
}

/// Packed form of a head's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct HeadArg {
    /// Layout of the head's packed pages.
    pub packed: PackedArg,
    /// Map of the values.
    pub map: MapArg,
}

/// Packed form of a head's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct CodecArg {
    /// Layout of the head's packed pages.
    pub packed: PackedArg,
    /// Map of the keys, from the head's channels to the stored ones: its matrix is `[narrow][wide]`.
    pub k: MapArg,
    /// Map of the values, likewise.
    pub v: MapArg,
}

/// A page to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct PackArg {
    /// Address of the page.
    pub page: u64,
    /// Address of the packed page to write.
    pub packed: u64,
    /// Tokens, from lane 0.
    pub fill: u32,
    /// Index of the codec in the list.
    pub codec: u32,
}

/// One row of a bundle: the joins of its tree, and its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct RowArg {
    /// The partial result that is complete after the joins, in f32 from the start of all.
    pub part: u64,
    /// Rows of the bundle, and of each of its partial results.
    pub rows: u32,
    /// The row.
    pub row: u32,
    /// Row of the output.
    pub out: u32,
    /// First of the bundle's bounds in the list: joins of level `i` are those from bound `i` to bound `i + 1`.
    pub bounds: u32,
    /// Levels of the bundle's tree; it has one more bound.
    pub levels: u32,
    /// Padding, 0.
    pub pad: u32,
}

/// Rows whose weights are stored together, in all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct WeighedArg {
    /// First weight, in f32 from the start of all weights.
    pub raw: u64,
    /// Merged result of the rows, in f32 from the start of all partial results.
    pub part: u64,
    /// Rows.
    pub width: u32,
    /// Padding, 0.
    pub pad: u32,
}

/// The mass of one page from some rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct MassArg {
    /// Block of the page.
    pub block: u32,
    /// Index of the page in the block.
    pub page: u32,
    /// First entry of the page in the list of rows.
    pub first: u32,
    /// Entries of the page in the list.
    pub count: u32,
    /// Token of the first row.
    pub token: u32,
    /// First token that counts.
    pub from: u32,
    /// End of the tokens that count, exclusive.
    pub to: u32,
    /// Row of the output, of 32 lanes.
    pub out: u32,
}

/// A token to write into a page of a ring, at the lane of its position ([`Slot`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct WriteArg {
    /// Address of the page.
    pub page: u64,
    /// Position of the token.
    pub position: u32,
    /// Row of the keys and values.
    pub row: u32,
}

/// A query to write into a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct QueryArg {
    /// Start of the bundle, in f32 from the start of all.
    pub bundle: u64,
    /// Row of the queries.
    pub query: u32,
    /// Position to which the query is rotated.
    pub position: u32,
    /// Row of the bundle.
    pub row: u32,
    /// Rows of the bundle.
    pub width: u32,
}

/// A query to fold through the map of a codec's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct FoldArg {
    /// Folded query, in f32 from the start of all.
    pub to: u64,
    /// Start of its scores, in f32 from the start of all.
    pub start: u64,
    /// Row of the queries.
    pub query: u32,
    /// Index of the map in the list.
    pub map: u32,
}

/// A map of keys that queries are folded through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct FoldMapArg {
    /// Inverse map: its matrix is `[wide][narrow]`.
    pub map: MapArg,
    /// Channels of a folded query.
    pub narrow: u32,
    /// Rows of lanes of a folded query.
    pub cols: u32,
}

/// A token to copy from page to page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct CopyArg {
    /// Address of the source page.
    pub source: u64,
    /// Address of the target page.
    pub target: u64,
    /// Lane in the source page.
    pub from: u32,
    /// Lane in the target page.
    pub to: u32,
}

/// Rows of logits, and outputs for their experts. An address of 0 stands for none.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct RouteArg {
    /// `[rows][experts]` f32: the gate's logits.
    pub logits: u64,
    /// Bias of all rows' logits, `[rows of 32 experts][32]` f32; none if rows are ranked by their logits alone.
    pub fixed: u64,
    /// `[rows][top_k]` u32: the experts, the best first.
    pub chosen: u64,
    /// `[rows][top_k]` f32: their weights.
    pub weights: u64,
    /// `chosen` of the plain top-k; none if it is the same.
    pub model: u64,
    /// `weights` of the plain top-k.
    pub model_weights: u64,
    /// `[experts]` u64: choices are added to them.
    pub counts: u64,
    /// `[rows][experts]` f32: the gate's entropy about each expert.
    pub entropies: u64,
    /// A 64-bit word that records the first logit that is not finite.
    pub fault: u64,
    /// `[rows]` u32: positions, for rows that are not ranked.
    pub positions: u64,
    /// Rows.
    pub rows: u32,
    /// Experts.
    pub experts: u32,
    /// Experts per row.
    pub top_k: u32,
    /// The bias is clamped to this magnitude; 0 for no limit.
    pub cap: f32,
    /// Groups of experts, 0 for none.
    pub groups: u32,
    /// Groups that are kept.
    pub kept: u32,
    /// Shares of the softmax in a group's score.
    pub best: u32,
    /// [`RouteArg::RANKED`], [`RouteArg::HASHED`], or by the position itself.
    pub start: u32,
    /// Distance from one expert of a row to the next, for rows that are not ranked.
    pub stride: u32,
    /// Padding, 0.
    pub pad: u32,
}

impl RouteArg {
    /// [`RouteArg::start`] for rows that are ranked by their logits.
    pub const RANKED: u32 = 0;
    /// [`RouteArg::start`] for rows whose experts start at a hash of the position.
    pub const HASHED: u32 = 1;
    /// [`RouteArg::start`] for rows whose experts start at the position.
    pub const ROBIN: u32 = 2;
}

/// Averages of a router, and the counts of a step. An address of 0 stands for none: that average is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct LearnArg {
    /// Bias of the logits, `[rows of 32 experts][32]` f32, to be recomputed.
    pub fixed: u64,
    /// `[experts]` u64: choices of the step; they are set to 0.
    pub counts: u64,
    /// `[experts]` f32: averages of the load.
    pub load: u64,
    /// `[experts]` f32: averages or counts of misses.
    pub miss: u64,
    /// `[experts]` f32: averages of the gate's entropy.
    pub entropy: u64,
    /// `[experts]` f32: averages of the gate's entropy after the step.
    pub next: u64,
    /// `[experts]` u32: parts of pages that the step wanted.
    pub wanted: u64,
    /// `[experts]` u32: wanted parts that the step missed.
    pub missed: u64,
    /// Experts.
    pub experts: u32,
    /// Parts per page.
    pub of_page: u32,
    /// 0 for the rate of misses, 1 for their count.
    pub count_misses: u32,
    /// Factor that keeps the averages of the load.
    pub keep_load: f32,
    /// Factor that keeps the averages of the misses.
    pub keep_miss: f32,
    /// Weight of the load.
    pub alpha: f32,
    /// Weight of the misses.
    pub lambda: f32,
    /// Weight of the entropy.
    pub beta: f32,
}

impl From<Layout> for LayoutArg {
    fn from(l: Layout) -> Self {
        LayoutArg { k_dim: l.k_dim, v_dim: l.v_dim, k: l.k.index(), v: l.v.index() }
    }
}

impl LayoutArg {
    /// The layout.
    #[inline(always)]
    pub fn layout(&self) -> Layout {
        Layout::new(self.k_dim, Dtype::ALL[self.k as usize]).values(self.v_dim, Dtype::ALL[self.v as usize])
    }
}

impl TensorArg {
    /// A tensor of `dtype` at address `at`.
    pub fn new(at: u64, dtype: Dtype) -> Self {
        TensorArg { at, dtype: dtype.index(), pad: 0 }
    }

    /// Dtype of the elements.
    #[inline(always)]
    pub fn dtype(&self) -> Dtype {
        Dtype::ALL[self.dtype as usize]
    }

    /// Whether the elements are f32, which has kernels of its own.
    pub fn wide(&self) -> bool {
        self.dtype() == Dtype::F32
    }
}

impl WriteArg {
    /// Place of the token in its ring: the lane of the page.
    #[inline(always)]
    pub fn lane(&self) -> u32 {
        Slot::from(Position(self.position)).lane
    }
}

impl From<Packed> for PackedArg {
    fn from(p: Packed) -> Self {
        let (k_side, v_side) = (SideArg::from(p.k_side), SideArg::from(p.v_side));
        PackedArg { k_dim: p.k_dim, v_dim: p.v_dim, k: p.k.index(), v: p.v.index(), k_side, v_side }
    }
}

impl PackedArg {
    /// The layout, for rows of tokens.
    #[inline(always)]
    pub fn packed(&self) -> Packed {
        Packed::new(self.k_dim, self.v_dim, Code::ALL[self.k as usize], Code::ALL[self.v as usize])
    }

    /// The layout, for any rows.
    #[inline(always)]
    pub fn factored(&self) -> Packed {
        self.packed().sides(self.k_side.side(), self.v_side.side())
    }
}

impl From<Side> for SideArg {
    fn from(side: Side) -> Self {
        match side {
            Side::Means { level } => SideArg { level, wide: 0 },
            Side::Basis { wide } => SideArg { level: 0, wide },
            _ => SideArg { level: 0, wide: 0 },
        }
    }
}

impl SideArg {
    #[inline(always)]
    fn side(&self) -> Side {
        match *self {
            SideArg { level: 0, wide: 0 } => Side::Tokens,
            SideArg { level: 0, wide } => Side::Basis { wide },
            SideArg { level, .. } => Side::Means { level },
        }
    }
}

impl From<Sight> for SightArg {
    fn from(s: Sight) -> Self {
        SightArg { floor: s.floor, lo: s.lo, sinks: s.sinks, hi: s.hi }
    }
}

impl SightArg {
    /// The sight.
    #[inline(always)]
    pub fn sight(&self) -> Sight {
        Sight { floor: self.floor, lo: self.lo, sinks: self.sinks, hi: self.hi }
    }
}

impl JoinArg {
    /// [`JoinArg::head`] of a merge.
    pub const MERGE: u32 = u32::MAX;
}

impl MapArg {
    /// No map.
    pub const NONE: MapArg = MapArg { form: 0, wide: 0, narrow: 0, block: 0, table: 0, bias: 0 };
    /// [`MapArg::form`] of the transform.
    pub const HADAMARD: u32 = 1;
    /// [`MapArg::form`] of a selection.
    pub const SELECT: u32 = 2;
    /// [`MapArg::form`] of a matrix.
    pub const DENSE: u32 = 3;
}

impl RopeArg {
    /// No rotation.
    pub const NONE: RopeArg = RopeArg { rotary_dim: 0, neighbours: 0, capacity: 1 };

    /// `rope` with a table of `capacity` positions.
    pub fn new(rope: &Rope, capacity: u32) -> Self {
        let neighbours = u32::from(rope.pairs == Pairs::Neighbours);
        RopeArg { rotary_dim: rope.rotary_dim, neighbours, capacity }
    }

    /// The rotation without its frequencies, which are in the table.
    #[inline(always)]
    pub fn rope(&self) -> Option<Rope> {
        let pairs = if self.neighbours == 0 { Pairs::Halves } else { Pairs::Neighbours };
        (self.rotary_dim > 0).then_some(Rope::new(0.0, self.rotary_dim).pairs(pairs))
    }
}
