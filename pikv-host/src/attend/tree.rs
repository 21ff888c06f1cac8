//! The canonical tree: which partial results are joined, and in which order. Equal bits on every back end depend on it, so it exists once:
//! the CPU joins while it walks the tree ([`Tree::reduce`](crate::attend::reduce::Tree::reduce)), a device gets lists of joins, and each
//! rank joins its own leaves.
//!
//! The tree is a perfect binary tree over leaves 0, 1, 2, .., of which only some exist. A node joins its two halves, the lower leaves on
//! the left; if only one half has leaves, the node is that half.

/// An aligned part of the tree, with its existing leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subtree<'a> {
    /// Indices of the leaves in the tree, ascending.
    index: &'a [u32],
    /// The subtree covers `2^level` leaves of the tree, from leaf `base`.
    level: u32,
    base: u64,
    /// Index of leaf `index[0]` in the caller's list.
    first: usize,
}

/// The parts of a subtree.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Split<'a> {
    /// No leaf.
    Empty,
    /// One leaf: its index in the caller's list.
    Leaf(usize),
    /// The join of two subtrees, neither empty, the lower leaves first.
    Join(Subtree<'a>, Subtree<'a>),
}

impl<'a> Subtree<'a> {
    /// The smallest tree from leaf 0 with all of `index`; `index[0]` is the caller's leaf `first`.
    pub fn whole(index: &'a [u32], first: usize) -> Subtree<'a> {
        let level = index.last().map_or(0, |last| u32::BITS - last.leading_zeros());
        Subtree { index, level, base: 0, first }
    }

    /// The aligned subtree of `2^level` leaves with all of `index`; `index[0]` is the caller's leaf `first`.
    pub fn aligned(index: &'a [u32], level: u32, first: usize) -> Subtree<'a> {
        let base = index.first().map_or(0, |i| u64::from(*i) >> level << level);
        Subtree { index, level, base, first }
    }

    /// Splits the smallest subtree with the same leaves.
    pub fn split(mut self) -> Split<'a> {
        if self.index.is_empty() {
            return Split::Empty;
        }
        while self.level > 0 {
            self.level -= 1;
            let half = self.base + (1 << self.level);
            let cut = self.index.partition_point(|i| u64::from(*i) < half);
            if cut == 0 {
                self.base = half;
            } else if cut < self.index.len() {
                let (left, right) = self.index.split_at(cut);
                let right = Subtree { index: right, base: half, first: self.first + cut, ..self };
                return Split::Join(Subtree { index: left, ..self }, right);
            }
        }
        Split::Leaf(self.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The joins of a subtree as text: `(left right)`, a leaf as its index.
    fn text(tree: Subtree<'_>) -> String {
        match tree.split() {
            Split::Empty => String::new(),
            Split::Leaf(place) => place.to_string(),
            Split::Join(left, right) => format!("({} {})", text(left), text(right)),
        }
    }

    /// The same text, from the perfect tree over all leaves.
    fn perfect(index: &[u32], from: u64, to: u64, first: usize) -> String {
        if to - from == 1 {
            let place = index.iter().position(|i| u64::from(*i) == from);
            return place.map_or(String::new(), |place| (first + place).to_string());
        }
        let half = from + (to - from) / 2;
        let [left, right] = [(from, half), (half, to)].map(|(from, to)| perfect(index, from, to, first));
        match (left.is_empty(), right.is_empty()) {
            (false, false) => format!("({left} {right})"),
            _ => left + &right,
        }
    }

    proptest! {
        #[test]
        fn joins_are_those_of_the_perfect_tree(there in prop::collection::vec(any::<bool>(), 0..70), first in 0..5usize) {
            let index: Vec<u32> = (0..).zip(&there).filter(|(_, there)| **there).map(|(i, _)| i).collect();
            let wide = index.last().map_or(1, |last| (u64::from(*last) + 1).next_power_of_two());
            prop_assert_eq!(text(Subtree::whole(&index, first)), perfect(&index, 0, wide, first));
        }

        #[test]
        fn parts_are_those_of_the_whole(level in 0..5u32, part in 0..6u32, there in prop::collection::vec(any::<bool>(), 1..33)) {
            let base = part << level;
            let there = (base..).zip(&there[..there.len().min(1 << level)]);
            let index: Vec<u32> = there.filter(|(_, there)| **there).map(|(i, _)| i).collect();
            let to = u64::from(base) + (1 << level);
            prop_assert_eq!(text(Subtree::aligned(&index, level, 3)), perfect(&index, base.into(), to, 3));
        }
    }

    #[test]
    fn the_last_leaves_have_room() {
        let index = [0, u32::MAX - 1, u32::MAX];
        assert_eq!(text(Subtree::whole(&index, 0)), "(0 (1 2))");
        assert_eq!(text(Subtree::aligned(&index[1..], 31, 7)), "(7 8)");
    }
}
