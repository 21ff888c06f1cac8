//! Rotary positions (arXiv 2104.09864) for keys that are stored before the rotation.
//!
//! A key that is stored unrotated can be read at any position. The lanes rotate it while they read the page, from a
//! table of cosines and sines that host and device share.

/// Pairing of the channels that a rotation turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pairs {
    /// `i` with `i + rotary_dim / 2`, as in Hugging Face's Llama and Mixtral.
    Halves,
    /// `2 i` with `2 i + 1`, as in GPT-J.
    Neighbours,
}

/// Parameters of a rotation of queries and keys by their position, for layers that store keys unrotated.
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
    /// Number of channels that are rotated, the first of the head; the others are left as they are. Even, at most `k_dim`.
    pub rotary_dim: u32,
    /// Pairing of the channels.
    pub pairs: Pairs,
}

impl Rope {
    /// A rotation of the first `rotary_dim` channels in [`Pairs::Halves`]. `theta` is `rope_theta` of `config.json`; `rotary_dim` is
    /// `head_dim`, times `partial_rotary_factor` if there is one.
    #[inline(always)]
    pub const fn new(theta: f64, rotary_dim: u32) -> Rope {
        Rope { theta, rotary_dim, pairs: Pairs::Halves }
    }

    /// This rotation with another pairing of channels.
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
    /// Parameters of the rotation.
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

    /// Rotates one row in place, with the arithmetic of page reads.
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
