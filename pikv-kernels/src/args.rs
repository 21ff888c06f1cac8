//! What kernels are given: plain words, the same on host and device.

use bytemuck::{Pod, Zeroable};
use pikv_core::attend::Sight;
use pikv_core::dtype::Dtype;
use pikv_core::page::Layout;
use pikv_core::rope::{Pairs, Rope};

/// A [`Layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
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

/// A rotation of keys as they are read; `rotary_dim` 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
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

impl From<Layout> for LayoutArg {
    fn from(l: Layout) -> Self {
        LayoutArg { k_dim: l.k_dim, v_dim: l.v_dim, k: l.k.index(), v: l.v.index() }
    }
}

impl LayoutArg {
    /// The layout.
    #[inline(always)]
    pub fn layout(&self) -> Layout {
        Layout {
            k_dim: self.k_dim,
            v_dim: self.v_dim,
            k: Dtype::ALL[self.k as usize],
            v: Dtype::ALL[self.v as usize],
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
        (self.rotary_dim > 0).then_some(Rope { theta: 0.0, rotary_dim: self.rotary_dim, pairs })
    }
}
