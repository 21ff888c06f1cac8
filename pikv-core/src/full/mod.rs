//! Full pages: single tokens in a [`Dtype`], as the model computed them.

mod bursts;
mod values;

pub use crate::turned::Query;

use self::values::Weigh;
use crate::attend::{Form, Sight};
use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::page::Layout;
use crate::turned::{self, Words};
use crate::warp::{LANES, Routine, Warp};
use core::marker::PhantomData;

/// A page of the list, and the lanes of it that are read.
#[derive(Clone, Copy, Debug)]
pub struct PageRef<'a> {
    /// The page's words.
    pub words: &'a [u32],
    /// Bit `t` is set if the token at lane `t` is read.
    pub live: u32,
}

/// Full pages of a block, and the queries that read them.
#[derive(Clone, Copy, Debug)]
pub struct Full<'a, const R: usize> {
    /// Layout of the pages.
    pub layout: &'a Layout,
    /// The pages, at most [`BLOCK`](crate::attend::BLOCK).
    pub pages: &'a [PageRef<'a>],
    /// Pages that are read after these, to prefetch; empty slices if there are none.
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

    // For lanes that prefetch: they wait for memory, and two pages are two streams of loads. A device hides the wait with other warps.
    const PAIRS: bool = W::FETCHES && 2 * R <= W::ROWS;

    const TWOS: bool = W::BURSTS;

    #[inline(always)]
    fn twos(&self) -> bool {
        self.query.rotation.is_none()
    }

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
        if !alike(seen) {
            let stride = layout.acc_rows() as usize;
            for r in 0..R {
                let acc = &mut acc[r * stride..];
                w.call(Weigh { layout, v, ahead, seen: seen[r], p: &[p[r]], acc });
            }
        } else if W::BURSTS {
            bursts::weigh(w, layout, v, seen[0], p, acc);
        } else {
            w.call(Weigh { layout, v, ahead, seen: seen[0], p, acc });
        }
    }

    #[inline(always)]
    fn finish(&mut self, _: W, _: &mut [[f32; LANES]]) {}
}

/// Half pages (keys, then values) by which the prefetch is ahead: enough if two pages are read together.
const LEAD: usize = 2;

impl<const R: usize> Full<'_, R> {
    #[inline(always)]
    fn keys(&self, i: usize) -> &[[u32; LANES]] {
        k_of(self.layout, self.pages[i].words)
    }

    /// Keys or values to prefetch while the keys of page `i` are read.
    #[inline(always)]
    fn after_keys(&self, i: usize) -> &[[u32; LANES]] {
        match (self.pages.get(i + LEAD), self.pages.get((i + LEAD).wrapping_sub(self.pages.len()))) {
            (Some(page), _) => k_of(self.layout, page.words),
            (None, Some(page)) => page.words[self.layout.v_base() as usize..].as_chunks().0,
            (None, None) => &[],
        }
    }

    /// Words to prefetch while the values of page `i` are read.
    #[inline(always)]
    fn after_values(&self, i: usize) -> &[u32] {
        match self.pages.get(i + LEAD) {
            Some(page) => &page.words[self.layout.v_base() as usize..],
            // With fewer pages than the lead the right page may come after the next two: not worth a special case.
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
        if W::BURSTS {
            let pages = [full.pages[i].words, full.pages[i + 1].words];
            return bursts::scores(w, full.layout, pages, &full.query);
        }
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

/// Tokens at `position` that each row sees, of the lanes in `live`.
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

/// Scores of two pages: each as in [`scores`], but a query is read once for both.
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

/// Whether all rows see the same tokens.
#[inline(always)]
fn alike<const R: usize>(seen: &[u32; R]) -> bool {
    let mut bits = 0;
    for row in seen {
        bits |= row ^ seen[0];
    }
    bits == 0
}
