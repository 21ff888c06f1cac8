//! Values of a full page, summed by their weights.

use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::page::Layout;
use crate::warp::{LANES, Routine, Warp};
use core::marker::PhantomData;

/// The values of a page under the weights of `N` rows that see the same tokens.
pub(super) struct Weigh<'a, W: Warp, const N: usize> {
    pub layout: &'a Layout,
    /// Values of the page, and words to prefetch while they are read.
    pub v: &'a [u32],
    pub ahead: &'a [u32],
    pub seen: u32,
    pub p: &'a [W::Slot; N],
    pub acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, const N: usize> Routine<W> for Weigh<'_, W, N> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Weigh { layout, v, ahead, seen, p, acc } = self;
        match layout.v {
            Dtype::F32 => weigh::<W, F32, N>(w, layout, v, seen, p, acc, ahead),
            Dtype::F16 => weigh::<W, F16, N>(w, layout, v, seen, p, acc, ahead),
            Dtype::Bf16 => weigh::<W, Bf16, N>(w, layout, v, seen, p, acc, ahead),
        }
    }
}

/// One group of 32 words of every value of a page. (Not a closure: a closure does not inherit the instruction set of the
/// function around it, and this is read in the innermost loop.)
#[derive(Clone, Copy)]
struct Column<'a> {
    /// The values from the group's first word on.
    v: &'a [u32],
    /// Words from one value to the next.
    row: u32,
    /// Words of the group.
    words: u32,
    ahead: &'a [u32],
}

impl Column<'_> {
    /// The words of token `t`; `WHOLE` if there are 32.
    #[inline(always)]
    fn read<W: Warp, const WHOLE: bool>(&self, w: W, t: usize) -> W::U {
        let at = t * self.row as usize;
        if WHOLE {
            if let Some(Some(next)) = self.ahead.get(at..).map(<[u32]>::first_chunk) {
                w.prefetch(next);
            }
            if let Some(row) = self.v[at..].first_chunk() {
                return w.load(row);
            }
        }
        w.load_part(&self.v[at..at + self.words as usize])
    }
}

/// The set bits of a word, lowest first.
pub(super) struct Bits(pub u32);

impl Iterator for Bits {
    type Item = usize;
    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let t = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        (t < u32::BITS).then_some(t as usize)
    }
}

/// Adds `p v` of the tokens in `seen` to the sums of `R` rows; `acc` is `[R][acc_rows]` rows of lanes.
#[inline(always)]
fn weigh<W: Warp, V: Element, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    ahead: &[u32],
) {
    let stride = layout.acc_rows() as usize;
    let (end, row) = (layout.v_words() as usize, layout.v_stride() as usize);
    let mut col = 0;
    if W::FETCHES && seen == u32::MAX && row.is_multiple_of(LANES) {
        let rows =
            Rows { v: v.as_chunks().0, row: row / LANES, whole: end / LANES, ahead: ahead.as_chunks().0 };
        // Takes together as many groups as the registers hold sums for: a value's words are then read in one pass, in memory order.
        col = weigh_all::<W, V, R, 4>(w, rows, col, p, acc, stride);
        col = weigh_all::<W, V, R, 2>(w, rows, col, p, acc, stride);
        col = weigh_all::<W, V, R, 1>(w, rows, col, p, acc, stride);
    }
    for col in col..layout.v_cols() as usize {
        let first = col * LANES;
        let ahead = ahead.get(first..).unwrap_or_default();
        let column = Column { v: &v[first..], row: row as u32, words: (end - first) as u32, ahead };
        let acc = &mut acc[col * V::PER_WORD..];
        // A device lane reads its word or does not: whether there are 32 makes no difference to it.
        if W::FETCHES && end - first >= LANES {
            weigh_column::<W, V, R, true>(w, column, seen, p, acc, stride);
        } else {
            weigh_column::<W, V, R, false>(w, column, seen, p, acc, stride);
        }
    }
}

/// The sums of `C` groups of words for `R` rows.
struct Sums<W, V, const R: usize, const C: usize>(PhantomData<(W, V)>);

impl<W: Warp, V: Element, const R: usize, const C: usize> Sums<W, V, R, C> {
    /// Whether the registers hold the sums. A branch on this constant alone leaves the other side uncompiled.
    const HELD: bool = C * R * V::PER_WORD <= W::ROWS;
    /// Whether the registers hold the sums, and a word is two channels.
    const PAIRED: bool = Self::HELD && V::PER_WORD == 2;
}

/// Values whose words fill rows of lanes.
#[derive(Clone, Copy)]
struct Rows<'a> {
    v: &'a [[u32; LANES]],
    /// Rows of a value, and how many of them are whole groups of words.
    row: usize,
    whole: usize,
    ahead: &'a [[u32; LANES]],
}

/// [`weigh_groups`] for groups from `col` on, `C` at a time, if the registers hold their sums. Returns the group after them.
#[inline(always)]
fn weigh_all<W: Warp, V: Element, const R: usize, const C: usize>(
    w: W,
    rows: Rows<'_>,
    mut col: usize,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
) -> usize {
    if Sums::<W, V, R, C>::HELD {
        while col + C <= rows.whole {
            weigh_groups::<W, V, R, C>(w, rows, col, p, &mut acc[col * V::PER_WORD..], stride);
            col += C;
        }
    }
    col
}

/// [`weigh`] for `C` whole groups of words from `col` on, of a page whose tokens are all seen. It has a loop of its own: any other
/// work in it would delay the loads of later tokens.
#[inline(always)]
fn weigh_groups<W: Warp, V: Element, const R: usize, const C: usize>(
    w: W,
    rows: Rows<'_>,
    col: usize,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
) {
    let mut a = [[[w.splat(0.0); 2]; R]; C];
    for (c, a) in a.iter_mut().enumerate() {
        for (r, a) in a.iter_mut().enumerate() {
            for (j, a) in a[..V::PER_WORD].iter_mut().enumerate() {
                *a = w.load_f(&acc[r * stride + c * V::PER_WORD + j]);
            }
        }
    }
    for (t, value) in (0..LANES).zip(rows.v.chunks_exact(rows.row)) {
        for c in 0..C {
            if let Some(next) = rows.ahead.get(t * rows.row + col + c) {
                w.prefetch(next);
            }
            let word = w.load(&value[col + c]);
            let x = [V::channel(w, word, 0), V::channel(w, word, V::PER_WORD - 1)];
            for (a, p) in a[c].iter_mut().zip(p) {
                let p = w.bcast(p, t);
                for (a, x) in a[..V::PER_WORD].iter_mut().zip(x) {
                    *a = w.fma(x, p, *a);
                }
            }
        }
    }
    for (c, a) in a.iter().enumerate() {
        for (r, a) in a.iter().enumerate() {
            for (j, a) in a[..V::PER_WORD].iter().enumerate() {
                w.store(*a, &mut acc[r * stride + c * V::PER_WORD + j]);
            }
        }
    }
}

/// [`weigh`] for one group of 32 words.
#[inline(always)]
fn weigh_column<W: Warp, V: Element, const R: usize, const WHOLE: bool>(
    w: W,
    column: Column<'_>,
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
) {
    // Both channels of a word together if their sums fit the registers, else one after the other.
    if Sums::<W, V, R, 1>::PAIRED {
        let mut a = [[w.splat(0.0); 2]; R];
        for r in 0..R {
            a[r] = [w.load_f(&acc[r * stride]), w.load_f(&acc[r * stride + 1])];
        }
        for t in Bits(seen) {
            let word = column.read::<W, WHOLE>(w, t);
            let (x, y) = (V::channel(w, word, 0), V::channel(w, word, 1));
            for r in 0..R {
                let p = w.bcast(&p[r], t);
                a[r] = [w.fma(x, p, a[r][0]), w.fma(y, p, a[r][1])];
            }
        }
        for r in 0..R {
            w.store(a[r][0], &mut acc[r * stride]);
            w.store(a[r][1], &mut acc[r * stride + 1]);
        }
    } else {
        for j in 0..V::PER_WORD {
            let mut a = [w.splat(0.0); R];
            for r in 0..R {
                a[r] = w.load_f(&acc[r * stride + j]);
            }
            for t in Bits(seen) {
                let x = V::channel(w, column.read::<W, WHOLE>(w, t), j);
                for r in 0..R {
                    a[r] = w.fma(x, w.bcast(&p[r], t), a[r]);
                }
            }
            for r in 0..R {
                w.store(a[r], &mut acc[r * stride + j]);
            }
        }
    }
}
