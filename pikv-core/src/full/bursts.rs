//! Scores and sums of full pages on lanes that read in bursts ([`Warp::BURSTS`]): the words of a burst are loaded before the first of
//! them is multiplied. The order of the multiply-adds, and so the bits, are those of the other loops. Loops over arrays are by index,
//! as the compiler leaves an iterator over an array in the memory of a lane.

use super::values::Bits;
use super::{Query, k_of};
use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::page::Layout;
use crate::warp::{LANES, Warp};

/// Rows of K in a burst, of each of two pages.
const KEYS: usize = 8;

/// Tokens in a burst of V.
const VALUES: usize = 16;

/// Scores of two pages with the same layout, whose keys are not rotated when read.
#[inline(always)]
pub(super) fn scores<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    pages: [&[u32]; 2],
    query: &Query<'_, R>,
) -> [[W::F; R]; 2] {
    let k = [k_of(layout, pages[0]), k_of(layout, pages[1])];
    match layout.k {
        Dtype::F32 => scores_of::<W, F32, R>(w, k, query),
        Dtype::F16 => scores_of::<W, F16, R>(w, k, query),
        Dtype::Bf16 => scores_of::<W, Bf16, R>(w, k, query),
    }
}

#[inline(always)]
fn scores_of<W: Warp, K: Element, const R: usize>(
    w: W,
    k: [&[[u32; LANES]]; 2],
    query: &Query<'_, R>,
) -> [[W::F; R]; 2] {
    let mut s = [[w.splat(0.0); R]; 2];
    let ((first, end), (second, other_end)) = (k[0].as_chunks::<KEYS>(), k[1].as_chunks::<KEYS>());
    let mut queries = query.q.chunks_exact(KEYS * K::PER_WORD);
    for ((first, second), q) in first.iter().zip(second).zip(queries.by_ref()) {
        let mut words = [[w.splat_u(0); 2]; KEYS];
        for i in 0..KEYS {
            words[i] = [w.load(&first[i]), w.load(&second[i])];
        }
        // The compiler moves no load past a step of the whole warp, so all stand before the products. Nor does it unroll a loop that has
        // one: several bursts at once need more registers than there are.
        w.sync();
        for i in 0..KEYS {
            add_keys::<W, K, R>(w, words[i], &q[i * K::PER_WORD..(i + 1) * K::PER_WORD], &mut s);
        }
    }
    for ((first, second), q) in end.iter().zip(other_end).zip(queries.remainder().chunks_exact(K::PER_WORD)) {
        add_keys::<W, K, R>(w, [w.load(first), w.load(second)], q, &mut s);
    }
    s
}

/// Adds the products of a word of keys of each of two pages with the queries' channels.
#[inline(always)]
fn add_keys<W: Warp, K: Element, const R: usize>(
    w: W,
    words: [W::U; 2],
    q: &[[f32; R]],
    s: &mut [[W::F; R]; 2],
) {
    for j in 0..K::PER_WORD {
        let x = [K::channel(w, words[0], j), K::channel(w, words[1], j)];
        for r in 0..R {
            let q = w.splat(q[j][r]);
            s[0][r] = w.fma(x[0], q, s[0][r]);
            s[1][r] = w.fma(x[1], q, s[1][r]);
        }
    }
}

/// Adds `p v` of the tokens in `seen`, the same for all `R` rows, to their sums; `acc` is `[R][acc_rows]`. A burst of tokens
/// that are all in `seen` is loaded whole; of the others each is loaded when its turn comes.
#[inline(always)]
pub(super) fn weigh<W: Warp, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
) {
    match layout.v {
        Dtype::F32 => weigh_of::<W, F32, R>(w, layout, v, seen, p, acc),
        Dtype::F16 => weigh_of::<W, F16, R>(w, layout, v, seen, p, acc),
        Dtype::Bf16 => weigh_of::<W, Bf16, R>(w, layout, v, seen, p, acc),
    }
}

#[inline(always)]
fn weigh_of<W: Warp, V: Element, const R: usize>(
    w: W,
    layout: &Layout,
    v: &[u32],
    seen: u32,
    p: &[W::Slot; R],
    acc: &mut [[f32; LANES]],
) {
    let (end, stride) = (layout.v_words() as usize, layout.v_stride() as usize);
    let acc_rows = layout.acc_rows() as usize;
    for col in 0..layout.v_cols() as usize {
        let width = (end - col * LANES).min(LANES);
        let acc = &mut acc[col * V::PER_WORD..];
        let mut a = [[w.splat(0.0); 2]; R];
        for r in 0..R {
            for j in 0..V::PER_WORD {
                a[r][j] = w.load_f(&acc[r * acc_rows + j]);
            }
        }
        let (mut left, mut first) = (seen, 0);
        while left != 0 {
            let now = left & BURST;
            if now == BURST {
                let words: [_; VALUES] = w.load_rows(&v[first * stride + col * LANES..], stride, width);
                for t in 0..VALUES {
                    add_value::<W, V, R>(w, &words, t, p, first, &mut a);
                }
            } else {
                // Tokens that are not seen may never have been written: they are not read.
                for t in Bits(now) {
                    let words = w.load_rows::<1>(&v[(first + t) * stride + col * LANES..], stride, width);
                    add_value::<W, V, R>(w, &words, 0, p, first + t, &mut a);
                }
            }
            left >>= VALUES;
            first += VALUES;
        }
        for r in 0..R {
            for j in 0..V::PER_WORD {
                w.store(a[r][j], &mut acc[r * acc_rows + j]);
            }
        }
    }
}

/// Bits of the tokens of a burst.
const BURST: u32 = (1 << VALUES) - 1;

/// Adds the word of token `t` of the burst that begins with token `first`, times its weights.
#[inline(always)]
fn add_value<W: Warp, V: Element, const R: usize>(
    w: W,
    words: &[W::U],
    t: usize,
    p: &[W::Slot; R],
    first: usize,
    a: &mut [[W::F; 2]; R],
) {
    let x = [V::channel(w, words[t], 0), V::channel(w, words[t], V::PER_WORD - 1)];
    for r in 0..R {
        let p = w.bcast(&p[r], first + t);
        for j in 0..V::PER_WORD {
            a[r][j] = w.fma(x[j], p, a[r][j]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::Form;
    use crate::full::values::Weigh;
    use crate::full::{Full, PageRef};
    use crate::hash;
    use crate::page::MAX_DIM;
    use crate::portable::Portable;
    use crate::warp::Routine;

    const R: usize = 4;
    const WORDS: usize = LANES + 2 * LANES * MAX_DIM as usize;
    const W: Portable = Portable;

    /// A number between -4 and 4.
    fn draw(state: &mut u64) -> f32 {
        (hash::next(state) % (1 << 20)) as f32 / 131_072.0 - 4.0
    }

    fn bits<const N: usize>(rows: [<Portable as Warp>::F; N]) -> [[u32; LANES]; N] {
        rows.map(|row| {
            let mut out = [0.0; LANES];
            W.store(row, &mut out);
            out.map(f32::to_bits)
        })
    }

    /// Scores and sums of two pages and queries, drawn from `state`, against those of the loops without bursts.
    fn check(layout: &Layout, state: &mut u64) {
        let word = |dtype: Dtype, state: &mut u64| {
            let parts = [draw(state), draw(state)].map(|x| dtype.encode(x).expect("it fits"));
            if dtype == Dtype::F32 { parts[0] } else { parts[0] | parts[1] << 16 }
        };
        let mut pages = [[0; WORDS]; 2];
        for at in 0..layout.words() as usize {
            let dtype = if at < layout.v_base() as usize { layout.k } else { layout.v };
            for page in &mut pages {
                page[at] = word(dtype, state);
            }
        }
        let [first, second] = &pages;
        let mut q = [[0.0; R]; MAX_DIM as usize];
        q.as_flattened_mut().fill_with(|| draw(state));
        let query =
            Query { q: &q[..layout.k_channels() as usize], k_dim: layout.k_dim as usize, rotation: None };
        let both = scores(W, layout, [first, second], &query);
        for (page, scores) in pages.iter().zip(both) {
            let pages = &[PageRef { words: page, live: u32::MAX }];
            let mut full = Full { layout, pages, next: [&[]; 2], query };
            assert_eq!(bits(scores), bits(full.scores(W, 0)), "{layout:?}");
        }
        let (v, p) = (&first[layout.v_base() as usize..], [(); R].map(|()| W.park(W.splat(draw(state)))));
        let some = hash::next(state) as u32;
        for seen in [u32::MAX, 1, 0xffff, 0xffff_0000, 0x8000_0001, some] {
            let mut got = [[0.5; LANES]; R * MAX_DIM as usize / 16];
            let mut want = got;
            weigh(W, layout, v, seen, &p, &mut got);
            Weigh { layout, v, ahead: &[], seen, p: &p, acc: &mut want }.run(W);
            let bits = |x: &f32| x.to_bits();
            assert!(
                got.as_flattened().iter().map(bits).eq(want.as_flattened().iter().map(bits)),
                "{layout:?}, {seen:x}"
            );
        }
    }

    #[test]
    fn the_bits_are_those_of_the_other_loops() {
        let mut state = 11;
        for k in Dtype::ALL {
            for v in Dtype::ALL {
                for (k_dim, v_dim) in [(1, 1), (33, 70), (128, 64)] {
                    check(&Layout::new(k_dim, k).values(v_dim, v), &mut state);
                }
            }
        }
    }
}
