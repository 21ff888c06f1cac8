//! Scores of keys that are rotated when read.

use crate::dtype::Element;
use crate::rope::Rotation;
use crate::warp::{LANES, Warp};
use core::marker::PhantomData;

/// `R` queries that are read together.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a, const R: usize> {
    /// Queries of the rows, channel by channel, scaled to base 2; `k_rows * PER_WORD` channels, the padding 0.
    pub q: &'a [[f32; R]],
    /// Channels of a key.
    pub k_dim: usize,
    /// Rotation of the keys, if they are stored before it.
    pub rotation: Option<Rotation<'a>>,
}

/// Keys of a page before their rotation.
pub(crate) trait Keys<W: Warp> {
    /// Channel `c` of the 32 keys.
    fn channel(&self, w: W, c: usize) -> W::F;
}

/// Keys of a full page, of dtype `K`.
pub(crate) struct Words<'a, K>(pub &'a [[u32; LANES]], pub PhantomData<K>);

impl<W: Warp, K: Element> Keys<W> for Words<'_, K> {
    #[inline(always)]
    fn channel(&self, w: W, c: usize) -> W::F {
        K::channel(w, w.load(&self.0[c / K::PER_WORD]), c % K::PER_WORD)
    }
}

/// Keys of a packed page, rebuilt; one row per channel.
impl<W: Warp> Keys<W> for [[f32; LANES]] {
    #[inline(always)]
    fn channel(&self, w: W, c: usize) -> W::F {
        w.load_f(&self[c])
    }
}

/// Scores of the 32 tokens of a page against `R` queries, K rotated to `position` when read. The chain of each
/// query takes the pairs in order, first channel then second, then the channels that are not rotated.
#[inline(always)]
pub(crate) fn scores<W: Warp, K: Keys<W> + ?Sized, const R: usize>(
    w: W,
    rotation: &Rotation<'_>,
    keys: &K,
    query: &Query<'_, R>,
    position: W::U,
) -> [W::F; R] {
    let n = rotation.capacity as usize;
    // Lanes without a token hold any word; the mask keeps the look-up inside the table, and their scores are not read.
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
