//! Rotary positions (arXiv 2104.09864) for keys that are stored before the rotation.
//!
//! A key that is stored as it left its projection can be read at any position; the rotation is done in the lanes
//! while the page is read, from a table of cosines and sines that both sides share.

use crate::dtype::Element;
use crate::full::Query;
use crate::warp::{LANES, Warp};
use core::marker::PhantomData;

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

/// Keys of a page before their rotation.
pub(crate) trait Keys<W: Warp> {
    /// Channel `c` of the 32 keys.
    fn channel(&self, w: W, c: usize) -> W::F;
}

/// Those of a full page, of dtype `K`.
pub(crate) struct Words<'a, K>(pub &'a [[u32; LANES]], pub PhantomData<K>);

impl<W: Warp, K: Element> Keys<W> for Words<'_, K> {
    #[inline(always)]
    fn channel(&self, w: W, c: usize) -> W::F {
        K::channel(w, w.load(&self.0[c / K::PER_WORD]), c % K::PER_WORD)
    }
}

/// Those of a packed page, rebuilt, a channel a row.
impl<W: Warp> Keys<W> for [[f32; LANES]] {
    #[inline(always)]
    fn channel(&self, w: W, c: usize) -> W::F {
        w.load_f(&self[c])
    }
}

/// Scores of the 32 tokens of a page against `R` queries, K rotated to `position` as it is read. The chain of each
/// query takes the pairs in order, first channel then second, then the channels that do not turn.
#[inline(always)]
pub(crate) fn scores<W: Warp, K: Keys<W> + ?Sized, const R: usize>(
    w: W,
    rotation: &Rotation<'_>,
    keys: &K,
    query: &Query<'_, R>,
    position: W::U,
) -> [W::F; R] {
    let n = rotation.capacity as usize;
    // Lanes without a token hold any word; the mask keeps the look-up inside the table, and nobody reads them.
    let at = w.and(position, w.splat_u(rotation.capacity - 1));
    let mut s = [w.splat(0.0); R];
    for i in 0..rotation.rope.rotary_dim as usize / 2 {
        let (a, b) = rotation.rope.pair(i);
        let pair = &rotation.table[i * 2 * n..(i + 1) * 2 * n];
        let (cos, sin) = (w.gather(&pair[..n], at), w.gather(&pair[n..], at));
        let (x, y) = (keys.channel(w, a), keys.channel(w, b));
        let p = w.fma(x, cos, w.sub(w.splat(-0.0), w.mul(y, sin)));
        let q = w.fma(y, cos, w.mul(x, sin));
        for (r, s) in s.iter_mut().enumerate() {
            *s = w.fma(p, w.splat(query.q[a][r]), *s);
            *s = w.fma(q, w.splat(query.q[b][r]), *s);
        }
    }
    for c in rotation.rope.rotary_dim as usize..query.k_dim {
        let x = keys.channel(w, c);
        for (r, s) in s.iter_mut().enumerate() {
            *s = w.fma(x, w.splat(query.q[c][r]), *s);
        }
    }
    s
}
