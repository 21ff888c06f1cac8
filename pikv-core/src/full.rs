//! Full pages: token by token, in a [`Dtype`], as they come from the model.

pub use crate::turned::Query;

use crate::attend::{Form, Sight};
use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::page::Layout;
use crate::turned::{self, Words};
use crate::warp::{LANES, Routine, Warp};
use core::marker::PhantomData;

/// A page of the list, and which of its lanes are read.
#[derive(Clone, Copy, Debug)]
pub struct PageRef<'a> {
    /// The page's words.
    pub words: &'a [u32],
    /// Bit `t` is set if there is a token to be read at lane `t`.
    pub live: u32,
}

/// Full pages of a block, and what is read with them.
#[derive(Clone, Copy, Debug)]
pub struct Full<'a, const R: usize> {
    /// Where everything lies.
    pub layout: &'a Layout,
    /// The pages, at most [`BLOCK`](crate::attend::BLOCK).
    pub pages: &'a [PageRef<'a>],
    /// The pages that will be read after these, for the prefetch; empty if there are none.
    pub next: [&'a [u32]; 2],
    /// The queries.
    pub query: Query<'a, R>,
}

impl<W: Warp, const R: usize> Form<W, R> for Full<'_, R> {
    #[inline(always)]
    fn pages(&self) -> usize {
        self.pages.len()
    }

    #[inline(always)]
    fn acc_rows(&self) -> usize {
        self.layout.acc_rows() as usize
    }

    #[inline(always)]
    fn seen(&self, w: W, i: usize, sight: &[Sight; R]) -> [u32; R] {
        let page = &self.pages[i];
        sights(w, w.load_part(&page.words[..LANES]), page.live, sight)
    }

    // Lanes that fetch ahead wait for memory, and two pages are two streams of it; a device has other warps for that.
    const PAIRS: bool = W::FETCHES && 2 * R <= W::ROWS;

    #[inline(always)]
    fn scores(&mut self, w: W, i: usize) -> [W::F; R] {
        w.call(Scores(self, i))
    }

    #[inline(always)]
    fn pair(&mut self, w: W, i: usize) -> [[W::F; R]; 2] {
        w.call(Pair(self, i))
    }

    #[inline(always)]
    fn weigh(&mut self, w: W, i: usize, seen: &[u32; R], p: &[W::Slot; R], acc: &mut [[f32; LANES]]) {
        let (layout, ahead) = (self.layout, self.after_values(i));
        let v = &self.pages[i].words[layout.v_base() as usize..];
        if alike(seen) {
            w.call(Weigh { layout, v, ahead, seen: seen[0], p, acc });
        } else {
            let stride = layout.acc_rows() as usize;
            for r in 0..R {
                let acc = &mut acc[r * stride..];
                w.call(Weigh { layout, v, ahead, seen: seen[r], p: &[p[r]], acc });
            }
        }
    }

    #[inline(always)]
    fn finish(&mut self, _: W, _: &mut [[f32; LANES]]) {}
}

/// How many half pages (keys, then values) ahead of the one that is read are fetched: enough where two are read together.
const LEAD: usize = 2;

impl<const R: usize> Full<'_, R> {
    #[inline(always)]
    fn keys(&self, i: usize) -> &[[u32; LANES]] {
        k_of(self.layout, self.pages[i].words)
    }

    /// What is fetched while the keys of page `i` are read.
    #[inline(always)]
    fn after_keys(&self, i: usize) -> &[[u32; LANES]] {
        match (self.pages.get(i + LEAD), self.pages.get((i + LEAD).wrapping_sub(self.pages.len()))) {
            (Some(page), _) => k_of(self.layout, page.words),
            (None, Some(page)) => page.words[self.layout.v_base() as usize..].as_chunks().0,
            (None, None) => &[],
        }
    }

    /// What is fetched while the values of page `i` are read.
    #[inline(always)]
    fn after_values(&self, i: usize) -> &[u32] {
        match self.pages.get(i + LEAD) {
            Some(page) => &page.words[self.layout.v_base() as usize..],
            // With fewer pages than the lead, those after the next two: not worth telling apart.
            None => {
                let next = self.next[(i + LEAD - self.pages.len()).min(1)];
                next.get(Layout::K_BASE as usize..).unwrap_or_default()
            }
        }
    }
}

/// The scores of a page.
struct Scores<'a, 'b, const R: usize>(&'a Full<'b, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for Scores<'_, '_, R> {
    type Out = [W::F; R];
    #[inline(always)]
    fn run(self, w: W) -> [W::F; R] {
        let Scores(full, i) = self;
        let (layout, words) = (full.layout, full.pages[i].words);
        page_scores(w, layout, words, w.load_part(&words[..LANES]), &full.query, full.after_keys(i))
    }
}

/// The scores of a page and the next.
struct Pair<'a, 'b, const R: usize>(&'a Full<'b, R>, usize);

impl<W: Warp, const R: usize> Routine<W> for Pair<'_, '_, R> {
    type Out = [[W::F; R]; 2];
    #[inline(always)]
    fn run(self, w: W) -> [[W::F; R]; 2] {
        let Pair(full, i) = self;
        if full.query.rotation.is_some() {
            return [Scores(full, i).run(w), Scores(full, i + 1).run(w)];
        }
        let keys = [full.keys(i), full.keys(i + 1)];
        let ahead = [full.after_keys(i), full.after_keys(i + 1)];
        match full.layout.k {
            Dtype::F32 => scores_of_two::<W, F32, R>(w, keys, &full.query, ahead),
            Dtype::F16 => scores_of_two::<W, F16, R>(w, keys, &full.query, ahead),
            Dtype::Bf16 => scores_of_two::<W, Bf16, R>(w, keys, &full.query, ahead),
        }
    }
}

/// The values of a page under the weights of `N` rows that see the same tokens.
struct Weigh<'a, W: Warp, const N: usize> {
    layout: &'a Layout,
    /// Values of the page, and what is fetched while they are read.
    v: &'a [u32],
    ahead: &'a [u32],
    seen: u32,
    p: &'a [W::Slot; N],
    acc: &'a mut [[f32; LANES]],
}

impl<W: Warp, const N: usize> Routine<W> for Weigh<'_, W, N> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Weigh { layout, v, ahead, seen, p, acc } = self;
        page_weigh(w, layout, v, seen, p, acc, layout.acc_rows() as usize, ahead);
    }
}

/// Which tokens at `position` each row sees, of the lanes in `live`.
#[inline(always)]
pub(crate) fn sights<W: Warp, const R: usize>(
    w: W,
    position: W::U,
    live: u32,
    sight: &[Sight; R],
) -> [u32; R] {
    let first = sight[0].mask(w, position, live);
    let mut seen = [first; R];
    for r in 1..R {
        if sight[r] != sight[0] {
            seen[r] = sight[r].mask(w, position, live);
        }
    }
    seen
}

/// The scores of a page's 32 tokens against `R` queries.
#[inline(always)]
fn scores<W: Warp, K: Element, const R: usize>(
    w: W,
    k: &[[u32; LANES]],
    query: &Query<'_, R>,
    ahead: &[[u32; LANES]],
) -> [W::F; R] {
    let mut s = [w.splat(0.0); R];
    for (i, (row, q)) in k.iter().zip(query.q.chunks_exact(K::PER_WORD)).enumerate() {
        if let Some(next) = ahead.get(i) {
            w.prefetch(next);
        }
        let word = w.load(row);
        for (j, q) in q.iter().enumerate() {
            let x = K::channel(w, word, j);
            for r in 0..R {
                s[r] = w.fma(x, w.splat(q[r]), s[r]);
            }
        }
    }
    s
}

/// The scores of two pages: each as [`scores`] gives them, but a query is read once for both.
#[inline(always)]
fn scores_of_two<W: Warp, K: Element, const R: usize>(
    w: W,
    k: [&[[u32; LANES]]; 2],
    query: &Query<'_, R>,
    ahead: [&[[u32; LANES]]; 2],
) -> [[W::F; R]; 2] {
    let mut s = [[w.splat(0.0); R]; 2];
    for (i, ((first, second), q)) in k[0].iter().zip(k[1]).zip(query.q.chunks_exact(K::PER_WORD)).enumerate()
    {
        for ahead in ahead {
            if let Some(next) = ahead.get(i) {
                w.prefetch(next);
            }
        }
        let words = [w.load(first), w.load(second)];
        for (j, q) in q.iter().enumerate() {
            let x = [K::channel(w, words[0], j), K::channel(w, words[1], j)];
            for r in 0..R {
                let q = w.splat(q[r]);
                s[0][r] = w.fma(x[0], q, s[0][r]);
                s[1][r] = w.fma(x[1], q, s[1][r]);
            }
        }
    }
    s
}

/// One group of 32 words of every value of a page. (Not a closure: those do not inherit the instruction set of the
/// function that they stand in, and this is read in the innermost loop.)
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
struct Bits(u32);

impl Iterator for Bits {
    type Item = usize;
    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let t = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        (t < u32::BITS).then_some(t as usize)
    }
}

/// Adds `p v` of the tokens in `seen` to the sums of `R` rows; `acc` is `[R][stride]` rows of lanes.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn weigh<W: Warp, V: Element, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
    ahead: &[u32],
) {
    let (end, row) = (layout.v_words() as usize, layout.v_stride() as usize);
    let mut col = 0;
    if W::FETCHES && seen == u32::MAX && row.is_multiple_of(LANES) {
        let rows =
            Rows { v: v.as_chunks().0, row: row / LANES, whole: end / LANES, ahead: ahead.as_chunks().0 };
        // As many groups together as the registers hold sums of: a value's words are then read in one go, as they lie.
        col = weigh_all::<W, V, R, 4>(w, rows, col, p, acc, stride);
        col = weigh_all::<W, V, R, 2>(w, rows, col, p, acc, stride);
        col = weigh_all::<W, V, R, 1>(w, rows, col, p, acc, stride);
    }
    for col in col..layout.v_cols() as usize {
        let first = col * LANES;
        let ahead = ahead.get(first..).unwrap_or_default();
        let column = Column { v: &v[first..], row: row as u32, words: (end - first) as u32, ahead };
        let acc = &mut acc[col * V::PER_WORD..];
        // A device reads a lane's word or does not: whether there are 32 makes no difference to it.
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
    /// Whether the registers hold them. A branch on it alone leaves the other side uncompiled.
    const HELD: bool = C * R * V::PER_WORD <= W::ROWS;
    /// Whether they do, and a word is two channels.
    const PAIRED: bool = Self::HELD && V::PER_WORD == 2;
}

/// Values whose words fill rows of lanes.
#[derive(Clone, Copy)]
struct Rows<'a> {
    v: &'a [[u32; LANES]],
    /// Rows of a value, and those of them that are whole groups of words.
    row: usize,
    whole: usize,
    ahead: &'a [[u32; LANES]],
}

/// [`weigh_groups`] for the groups from `col` on, as long as there are `C`, if the registers hold their sums; the group after them.
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

/// [`weigh`] for `C` whole groups of words from `col` on, of a page whose tokens are all seen: a loop of its own, as whatever else
/// it did would be instructions that the loads of later tokens wait behind.
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
    // The channels of a word together while their sums fit the registers, else one after the other.
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

/// K of a page, as rows of lanes.
#[inline(always)]
fn k_of<'a>(layout: &Layout, words: &'a [u32]) -> &'a [[u32; LANES]] {
    words[Layout::K_BASE as usize..layout.v_base() as usize].as_chunks().0
}

/// Scores of one page of the list, K in its own dtype.
#[inline(always)]
fn page_scores<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    words: &[u32],
    position: W::U,
    query: &Query<'_, R>,
    ahead: &[[u32; LANES]],
) -> [W::F; R] {
    #[inline(always)]
    fn go<W: Warp, K: Element, const R: usize>(
        w: W,
        k: &[[u32; LANES]],
        position: W::U,
        query: &Query<'_, R>,
        ahead: &[[u32; LANES]],
    ) -> [W::F; R] {
        match &query.rotation {
            Some(rotation) => turned::scores(w, rotation, &Words(k, PhantomData::<K>), query, position),
            None => scores::<W, K, R>(w, k, query, ahead),
        }
    }
    let k = k_of(layout, words);
    match layout.k {
        Dtype::F32 => go::<W, F32, R>(w, k, position, query, ahead),
        Dtype::F16 => go::<W, F16, R>(w, k, position, query, ahead),
        Dtype::Bf16 => go::<W, Bf16, R>(w, k, position, query, ahead),
    }
}

/// [`weigh`], V in its own dtype.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn page_weigh<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
    stride: usize,
    ahead: &[u32],
) {
    match layout.v {
        Dtype::F32 => weigh::<W, F32, R>(w, layout, v, seen, p, acc, stride, ahead),
        Dtype::F16 => weigh::<W, F16, R>(w, layout, v, seen, p, acc, stride, ahead),
        Dtype::Bf16 => weigh::<W, Bf16, R>(w, layout, v, seen, p, acc, stride, ahead),
    }
}

/// Whether all rows see the same tokens.
#[inline(always)]
fn alike<const R: usize>(seen: &[u32; R]) -> bool {
    let mut bits = 0;
    for row in seen {
        bits |= row ^ seen[0];
    }
    bits == 0
}
