//! Rotary positions (arXiv 2104.09864) for keys that are stored before the rotation.
//!
//! A key that is stored as it left its projection can be read at any position; the rotation is done in the lanes
//! while the page is read, from a table of cosines and sines that both sides share.

/// Which channels a rotation turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pairs {
    /// `i` with `i + rotary_dim / 2`, as Hugging Face's Llama and Mixtral do.
    Halves,
    /// `2 i` with `2 i + 1`, as GPT-J does.
    Neighbours,
}

/// Parameters of a rotation of queries and keys by their position, where keys are stored unrotated.
///
/// ```
/// # mod pikv { pub use pikv_core::{dtype::Dtype, plan::LayerShape, rope::Rope}; }
/// use pikv::{Dtype, LayerShape, Rope};
///
/// let rope = Rope::new(500_000.0, 128);
/// let layer = LayerShape::new(8, 32, 128, Dtype::Bf16).rope(rope);
/// assert_eq!(rope.pair(3), (3, 67));                      // the channels that turn together
/// # let _ = layer;
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// Base of the frequencies, at least 1: pair `i` turns by `theta^(-2 i / rotary_dim)` a position.
    pub theta: f64,
    /// Channels that turn, the first of the head; the others pass. Even, at most `k_dim`.
    pub rotary_dim: u32,
    /// Which channels turn together.
    pub pairs: Pairs,
}

impl Rope {
    /// A rotation of the first `rotary_dim` channels in [`Pairs::Halves`]: `rope_theta` of `config.json`, and `head_dim`, or the
    /// part of it that `partial_rotary_factor` says.
    #[inline(always)]
    pub const fn new(theta: f64, rotary_dim: u32) -> Rope {
        Rope { theta, rotary_dim, pairs: Pairs::Halves }
    }

    /// The same with other channels that turn together.
    #[inline(always)]
    pub const fn pairs(self, pairs: Pairs) -> Rope {
        Rope { pairs, ..self }
    }

    /// The two channels of pair `i`.
    #[inline(always)]
    pub const fn pair(&self, i: usize) -> (usize, usize) {
        match self.pairs {
            Pairs::Halves => (i, i + self.rotary_dim as usize / 2),
            Pairs::Neighbours => (2 * i, 2 * i + 1),
        }
    }
}

/// A rotation with its table.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// The parameters.
    pub rope: Rope,
    /// `[rotary_dim / 2][2][capacity]`: for each pair the cosines of positions 0.., then the sines.
    pub table: &'a [f32],
    /// Positions in the table, a power of two.
    pub capacity: u32,
}

impl Rotation<'_> {
    /// Cosine and sine of pair `i` at `position`.
    ///
    /// # Panics
    /// If the position lies outside the table.
    #[inline]
    pub fn at(&self, i: usize, position: u32) -> (f32, f32) {
        let n = self.capacity as usize;
        let pair = &self.table[i * 2 * n..(i + 1) * 2 * n];
        (pair[position as usize], pair[n + position as usize])
    }

    /// Rotates one row in place, in the arithmetic that pages are read with.
    pub fn rotate(&self, row: &mut [f32], position: u32) {
        for i in 0..self.rope.rotary_dim as usize / 2 {
            let (a, b) = self.rope.pair(i);
            let (cos, sin) = self.at(i, position);
            let (x, y) = (row[a], row[b]);
            row[a] = crate::portable::fma(x, cos, -(y * sin));
            row[b] = crate::portable::fma(y, cos, x * sin);
        }
    }
}
