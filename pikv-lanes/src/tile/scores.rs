//! Scores of a page, and the weights of a block.

use super::half::{Halved, part, store};
use super::widen::Ahead;
use super::{Row, is_seen};
use crate::attend::{Common, Rows};
use pikv_core::attend::BLOCK;
use pikv_core::math;
use pikv_core::rope::Pairs;
use pikv_core::warp::{LANES, Routine, Warp};

/// The scores of all lanes of a page, uncapped.
pub(super) struct ScorePage<'a> {
    pub(super) common: &'a Common<'a>,
    pub(super) wide: &'a [[f32; LANES]],
    pub(super) page: usize,
    pub(super) p: &'a mut [Row],
    pub(super) seen: &'a [[u32; BLOCK]],
    pub(super) ahead: Ahead<'a>,
}

impl ScorePage<'_> {
    /// The scores of `N` bundles of `S` rows.
    #[inline(always)]
    fn score<W: Warp, const N: usize, const S: usize, const PART: usize>(&mut self, w: W, row: usize) {
        let q = std::array::from_fn(|n| self.common.query::<S>(row + n * S).q);
        let p = &mut self.p[row * BLOCK..(row + N * S) * BLOCK];
        let halves = halves(self.common);
        w.call(Scores::<N, S, PART> { wide: self.wide, q, halves, p, page: self.page });
    }
}

impl Rows for ScorePage<'_> {
    #[inline(always)]
    fn rows<W: Warp, const R: usize>(&mut self, w: W, row: usize) {
        self.ahead.fetch(w, R);
        if !is_seen(&self.seen[row..row + R], self.page) {
            return;
        }
        if Halved::<W, R>::YES {
            self.score::<W, 3, 2, { part::LOW }>(w, row);
            self.score::<W, 3, 2, { part::HIGH }>(w, row);
        } else {
            self.score::<W, 1, R, { part::ALL }>(w, row);
        }
    }
}

/// Number of first channels of a key that the chain takes alternately with as many after them; the others follow in order.
#[inline(always)]
fn halves(common: &Common<'_>) -> usize {
    let rope = common.rotation.map(|rotation| rotation.rope).filter(|rope| rope.pairs == Pairs::Halves);
    rope.map_or(0, |rope| rope.rotary_dim as usize / 2)
}

struct Scores<'a, const N: usize, const S: usize, const PART: usize> {
    wide: &'a [[f32; LANES]],
    /// `[N][channels][S]`
    q: [&'a [[f32; S]]; N],
    halves: usize,
    /// `[N S][BLOCK]`
    p: &'a mut [Row],
    page: usize,
}

impl<W: Warp, const N: usize, const S: usize, const PART: usize> Routine<W> for Scores<'_, N, S, PART> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Scores { wide, q, halves, p, page } = self;
        let mut s = [[w.splat(0.0); S]; N];
        let q = q.map(|q| &q[..wide.len()]);
        for c in 0..halves {
            chain(w, &wide[c], &q, c, &mut s);
            chain(w, &wide[halves + c], &q, halves + c, &mut s);
        }
        for (c, x) in wide.iter().enumerate().skip(2 * halves) {
            chain(w, x, &q, c, &mut s);
        }
        for (n, s) in s.iter().enumerate() {
            for (i, s) in s.iter().enumerate() {
                store::<W, PART>(w, *s, &mut p[(n * S + i) * BLOCK + page].0);
            }
        }
    }
}

/// One channel of the chains.
#[inline(always)]
fn chain<W: Warp, const N: usize, const S: usize>(
    w: W,
    x: &[f32; LANES],
    q: &[&[[f32; S]]; N],
    c: usize,
    s: &mut [[W::F; S]; N],
) {
    let x = w.load_f(x);
    for (s, q) in s.iter_mut().zip(q) {
        for (s, q) in s.iter_mut().zip(&q[c]) {
            *s = w.fma(x, w.splat(*q), *s);
        }
    }
}

/// Turns scores into weights, exponents and sums, row by row.
pub(super) struct Weights<'a> {
    pub(super) pages: usize,
    pub(super) softcap: Option<f32>,
    pub(super) p: &'a mut [Row],
    pub(super) seen: &'a [[u32; BLOCK]],
    pub(super) m: &'a mut [f32],
    pub(super) l: &'a mut [f32],
}

impl<W: Warp> Routine<W> for Weights<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Weights { pages, softcap, p, seen, m, l } = self;
        let none = w.splat(f32::NEG_INFINITY);
        let rows = p.chunks_exact_mut(BLOCK).zip(seen).zip(m.iter_mut().zip(l));
        for ((p, seen), (m, l)) in rows {
            let (p, seen) = (&mut p[..pages], &seen[..pages]);
            let (mut top, mut saw) = (none, 0);
            for (p, seen) in p.iter_mut().zip(seen).filter(|(_, seen)| **seen != 0) {
                if softcap.is_some() || *seen != u32::MAX {
                    let mut s = w.load_f(&p.0);
                    if let Some(cap) = softcap {
                        s = w.mul(math::tanh(w, s), w.splat(cap));
                    }
                    w.store(w.select(w.mask(*seen), s, none), &mut p.0);
                }
                saw |= *seen;
                top = w.max(w.load_f(&p.0), top);
            }
            let mut base = 0.0;
            *m = match w.reduce_max(top) {
                f32::NEG_INFINITY if saw == 0 => f32::NEG_INFINITY,
                f32::NEG_INFINITY => f32::INFINITY,
                top => {
                    base = math::ceil(top);
                    base
                }
            };
            let mut sum = w.splat(0.0);
            for (p, seen) in p.iter_mut().zip(seen) {
                let mut x = w.splat(0.0);
                if *seen != 0 {
                    x = math::exp2_nonpos(w, w.sub(w.load_f(&p.0), w.splat(base)));
                    sum = w.add(sum, x);
                }
                w.store(x, &mut p.0);
            }
            *l = w.reduce_sum(sum);
        }
    }
}
