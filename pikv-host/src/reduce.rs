//! The canonical tree over sparse leaves.

use crate::lanes::Lanes;
use pikv_core::merge::{Partial, merge};
use pikv_core::page::Layout;
use pikv_core::warp::{Kernel, Warp};

/// Shape of the partial results of one reduction.
#[derive(Clone, Copy)]
pub(crate) struct Tree<'a> {
    pub lanes: Lanes,
    pub layout: &'a Layout,
    pub rows: usize,
}

/// Writes the partial result of a leaf of the list; the buffers are spare.
pub(crate) type Leaf<'a> = dyn FnMut(usize, &mut [f32], &mut Vec<Vec<f32>>) + 'a;

struct Merge<'a, 'b> {
    left: Partial<'a>,
    right: Partial<'b>,
}

impl Kernel for Merge<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<W: Warp>(mut self, w: W) {
        merge(w, &mut self.left, &self.right);
    }
}

/// Levels of the smallest perfect tree that has leaf `last`.
pub(crate) fn levels(last: u32) -> u32 {
    u32::BITS - last.leading_zeros()
}

impl Tree<'_> {
    pub fn len(&self) -> usize {
        Partial::len(self.rows, self.layout)
    }

    pub fn partial<'b>(&self, buffer: &'b mut [f32]) -> Partial<'b> {
        Partial::new(buffer, self.rows, self.layout)
    }

    /// Reduces the leaves whose indices in the tree are `index` (ascending) into `out`: the subtree of `2^level` leaves from
    /// `base`. `leaf(i, ..)` writes the partial result of `index[i]`, `first` being that of `index[0]` in the whole list.
    /// `spare` holds buffers between calls.
    #[allow(clippy::too_many_arguments)]
    pub fn reduce(
        &self,
        index: &[u32],
        level: u32,
        base: u64,
        first: usize,
        leaf: &mut Leaf<'_>,
        out: &mut [f32],
        spare: &mut Vec<Vec<f32>>,
    ) {
        if index.is_empty() {
            return self.partial(out).clear();
        }
        if level == 0 {
            return leaf(first, out, spare);
        }
        let half = base + (1 << (level - 1));
        let cut = index.partition_point(|i| u64::from(*i) < half);
        if cut == index.len() {
            return self.reduce(index, level - 1, base, first, leaf, out, spare);
        }
        if cut == 0 {
            return self.reduce(index, level - 1, half, first, leaf, out, spare);
        }
        self.reduce(&index[..cut], level - 1, base, first, leaf, out, spare);
        let mut right = spare.pop().unwrap_or_default();
        right.resize(self.len().max(right.len()), 0.0);
        self.reduce(&index[cut..], level - 1, half, first + cut, leaf, &mut right[..self.len()], spare);
        self.lanes.run(Merge { left: self.partial(out), right: self.partial(&mut right[..self.len()]) });
        spare.push(right);
    }
}
