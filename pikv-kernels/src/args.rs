//! What kernels are given: plain words, the same on host and device.

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

/// A tensor of an engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct TensorArg {
    /// Address of its first element.
    pub at: u64,
    /// Index of its dtype in [`Dtype::ALL`].
    pub dtype: u32,
    /// Nothing.
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
    /// What rows of K are.
    pub k_side: SideArg,
    /// What rows of V are.
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

/// A rotation of keys as they are read; `rotary_dim` 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct RopeArg {
    /// Channels that turn.
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

/// One block of pages for one bundle of query rows, which a warp attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct TaskArg {
    /// Where the partial result goes, in f32 from the start of all.
    pub part: u64,
    /// Where the weights go, if they are kept.
    pub raw: u64,
    /// The bundle's queries, in f32 from the start of all.
    pub q: u32,
    /// The block's first page in the list.
    pub pages: u32,
    /// Its pages, at most 8.
    pub count: u32,
    /// The bundle's first sight in the list.
    pub sights: u32,
}

/// Two partial results that are joined in the left one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct PairArg {
    /// The lower leaves, in f32 from the start of all partial results.
    pub left: u64,
    /// The higher ones.
    pub right: u64,
    /// Rows of each.
    pub rows: u32,
    /// Rows of lanes that one of them takes.
    pub acc_rows: u32,
}

/// A map of channels, one way; `form` 0 where channels are stored as they are.
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
    /// Address of the matrix, or of the channels' numbers.
    pub table: u64,
    /// Address of the bias, 0 for none.
    pub bias: u64,
}

/// How the values of a head are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct HeadArg {
    /// Its packed pages.
    pub packed: PackedArg,
    /// The map of its values.
    pub map: MapArg,
}

/// How a head's tokens are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct CodecArg {
    /// Its packed pages.
    pub packed: PackedArg,
    /// The map of its keys, from the head's channels to what is stored: its matrix is `[narrow][wide]`.
    pub k: MapArg,
    /// That of its values.
    pub v: MapArg,
}

/// A page to be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct PackArg {
    /// Address of the page.
    pub page: u64,
    /// Address of the page that gets its tokens.
    pub packed: u64,
    /// Tokens, from lane 0.
    pub fill: u32,
    /// The codec's place in the list.
    pub codec: u32,
}

/// One row of a partial result over packed pages, to be taken back to the head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct BackArg {
    /// The partial result over packed pages, in f32 from the start of all partial results.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// Rows of each.
    pub rows: u32,
    /// Which of them.
    pub row: u32,
    /// The head's place in the list.
    pub head: u32,
    /// Nothing.
    pub pad: u32,
}

/// One row of a partial result that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct RowArg {
    /// The partial result, in f32 from the start of all.
    pub part: u64,
    /// Its rows.
    pub rows: u32,
    /// Which of them.
    pub row: u32,
    /// Row of the output.
    pub out: u32,
    /// Nothing.
    pub pad: u32,
}

/// Rows whose weights lie together, in all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct WeighedArg {
    /// Where they begin, in f32 from the start of all weights.
    pub raw: u64,
    /// The rows' whole result, in f32 from the start of all partial results.
    pub part: u64,
    /// Rows.
    pub width: u32,
    /// Nothing.
    pub pad: u32,
}

/// The mass of one page from some rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct MassArg {
    /// Block of the page.
    pub block: u32,
    /// Place in the block.
    pub page: u32,
    /// First of the rows in the list.
    pub first: u32,
    /// Entries of the list.
    pub count: u32,
    /// Token of the first row.
    pub token: u32,
    /// Tokens that count.
    pub from: u32,
    /// Past the last of them.
    pub to: u32,
    /// Row of the output, of 32 lanes.
    pub out: u32,
}

/// A token to be written into a page of a ring, at the lane of its position ([`Slot`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct WriteArg {
    /// Address of the page.
    pub page: u64,
    /// Position of the token.
    pub position: u32,
    /// Which row of the keys and values it is.
    pub row: u32,
}

/// A query that is put into a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct QueryArg {
    /// Where the bundle begins, in f32 from the start of all.
    pub bundle: u64,
    /// Which row of the queries it is.
    pub query: u32,
    /// The position that it is turned to.
    pub position: u32,
    /// Its row of the bundle.
    pub row: u32,
    /// Rows of the bundle.
    pub width: u32,
}

/// A query that is folded through the map of a codec's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct FoldArg {
    /// Where it goes, in f32 from the start of all.
    pub to: u64,
    /// Where that goes which its scores start from.
    pub start: u64,
    /// Which row of the queries it is.
    pub query: u32,
    /// The map's place in the list.
    pub map: u32,
}

/// A map of keys that queries are folded through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct FoldMapArg {
    /// The map back: its matrix is `[wide][narrow]`.
    pub map: MapArg,
    /// Channels that are left.
    pub narrow: u32,
    /// Rows of lanes that they take.
    pub cols: u32,
}

/// A token to be copied from page to page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct CopyArg {
    /// Address of the page that has it.
    pub source: u64,
    /// Address of the page that gets it.
    pub target: u64,
    /// Lane in the first.
    pub from: u32,
    /// Lane in the second.
    pub to: u32,
}

/// Rows of logits, and where their experts go. An address of 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct RouteArg {
    /// `[rows][experts]` f32: the gate's logits.
    pub logits: u64,
    /// What is taken from all rows' logits, `[rows of 32 experts][32]` f32; none where rows are ranked by their logits.
    pub fixed: u64,
    /// `[rows][top_k]` u32: the experts, the best first.
    pub chosen: u64,
    /// `[rows][top_k]` f32: their weights.
    pub weights: u64,
    /// As `chosen`, of the plain top-k; none where it is the same.
    pub model: u64,
    /// As `weights`, of the plain top-k.
    pub model_weights: u64,
    /// `[experts]` u64: choices are added.
    pub counts: u64,
    /// `[rows][experts]` f32: the gate's entropy about each expert.
    pub entropies: u64,
    /// A word of 64 bits in which the first logit is noted that is not finite.
    pub fault: u64,
    /// `[rows]` u32: positions, unless rows are ranked.
    pub positions: u64,
    /// Rows.
    pub rows: u32,
    /// Experts.
    pub experts: u32,
    /// Experts of a row.
    pub top_k: u32,
    /// What is taken from logits is held within so much; 0 for no bound.
    pub cap: f32,
    /// Groups of experts, 0 for none.
    pub groups: u32,
    /// Groups that are kept.
    pub kept: u32,
    /// Shares of the softmax in a group's score.
    pub best: u32,
    /// [`RouteArg::RANKED`], [`RouteArg::HASHED`], or by the position itself.
    pub start: u32,
    /// From one expert of a row to its next, unless rows are ranked.
    pub stride: u32,
    /// Nothing.
    pub pad: u32,
}

impl RouteArg {
    /// [`RouteArg::start`] of rows that are ranked by their logits.
    pub const RANKED: u32 = 0;
    /// [`RouteArg::start`] of rows whose experts start at a hash of the position.
    pub const HASHED: u32 = 1;
    /// [`RouteArg::start`] of rows whose experts start at the position.
    pub const ROBIN: u32 = 2;
}

/// Averages of a router, and what a step brings. An address of 0 is none: what it says of is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct LearnArg {
    /// What is taken from logits, `[rows of 32 experts][32]` f32: it is worked out anew.
    pub fixed: u64,
    /// `[experts]` u64: choices of the step, which become 0.
    pub counts: u64,
    /// `[experts]` f32: averages of the load.
    pub load: u64,
    /// `[experts]` f32: averages or counts of misses.
    pub miss: u64,
    /// `[experts]` f32: averages of the gate's entropy.
    pub entropy: u64,
    /// `[experts]` f32: the same with the step in it.
    pub next: u64,
    /// `[experts]` u32: parts of pages that the step wanted.
    pub wanted: u64,
    /// `[experts]` u32: those of them that it missed.
    pub missed: u64,
    /// Experts.
    pub experts: u32,
    /// Parts of a page.
    pub of_page: u32,
    /// 0 for the rate of misses, 1 for their count.
    pub count_misses: u32,
    /// How much of the load's averages stays.
    pub keep_load: f32,
    /// How much of the misses' averages stays.
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
    /// One in `dtype` that begins at an address.
    pub fn new(at: u64, dtype: Dtype) -> Self {
        TensorArg { at, dtype: dtype.index(), pad: 0 }
    }

    /// What its elements are.
    #[inline(always)]
    pub fn dtype(&self) -> Dtype {
        Dtype::ALL[self.dtype as usize]
    }

    /// Whether they are f32, which has kernels of its own.
    pub fn wide(&self) -> bool {
        self.dtype() == Dtype::F32
    }
}

impl WriteArg {
    /// The token's place in its ring: the lane of the page.
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
    /// The layout, where rows are of tokens.
    #[inline(always)]
    pub fn packed(&self) -> Packed {
        Packed::new(self.k_dim, self.v_dim, Code::ALL[self.k as usize], Code::ALL[self.v as usize])
    }

    /// The layout, whatever rows are.
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

    /// The rotation, but for its frequencies, which are in the table.
    #[inline(always)]
    pub fn rope(&self) -> Option<Rope> {
        let pairs = if self.neighbours == 0 { Pairs::Halves } else { Pairs::Neighbours };
        (self.rotary_dim > 0).then_some(Rope::new(0.0, self.rotary_dim).pairs(pairs))
    }
}
