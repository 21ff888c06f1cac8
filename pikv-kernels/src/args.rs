//! What kernels are given: plain words, the same on host and device.

use bytemuck::{Pod, Zeroable};
use pikv_core::attend::Sight;
use pikv_core::codec::code::Code;
use pikv_core::codec::packed::{Packed, Side};
use pikv_core::dtype::Dtype;
use pikv_core::page::Layout;
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

/// A token to be written into a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "cust", derive(cust_core::DeviceCopy))]
#[repr(C)]
pub struct WriteArg {
    /// Address of the page.
    pub page: u64,
    /// Lane in the page.
    pub lane: u32,
    /// Position of the token.
    pub position: u32,
    /// Which row of the keys and values it is.
    pub row: u32,
    /// Nothing.
    pub pad: u32,
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
