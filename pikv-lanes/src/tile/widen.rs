//! Pages in f32, and prefetching of those that come next.

use super::{RUN, Row};
use crate::attend::Common;
use pikv_core::dtype::{Bf16, Dtype, Element, F16, F32};
use pikv_core::full::PageRef;
use pikv_core::page::Layout;
use pikv_core::rope::Rotation;
use pikv_core::warp::{LANES, Routine, Warp};

/// K of a page, as rows of lanes.
#[inline(always)]
pub(super) fn keys_of<'a>(layout: &Layout, words: &'a [u32]) -> &'a [[u32; LANES]] {
    words[Layout::K_BASE as usize..layout.v_base() as usize].as_chunks().0
}

/// V of a page, as rows of words.
#[inline(always)]
fn values_of<'a>(layout: &Layout, words: &'a [u32]) -> &'a [[u32; LANES]] {
    words[layout.v_base() as usize..].as_chunks().0
}

/// What is read after the keys of page `i`: the keys of the next page, or the first values.
#[inline(always)]
pub(super) fn after_keys<'a>(layout: &Layout, pages: &[PageRef<'a>], i: usize) -> [&'a [[u32; LANES]]; RUN] {
    match pages.get(i + 1) {
        Some(page) => [keys_of(layout, page.words), &[], &[], &[]],
        None => first_values(layout, pages),
    }
}

/// What is read after the values of the pages before `end`: the values of those that follow, or the first page of `next`.
#[inline(always)]
pub(super) fn after_values<'a>(
    layout: &Layout,
    pages: &[PageRef<'a>],
    end: usize,
    next: [&'a [u32]; 2],
) -> [&'a [[u32; LANES]]; RUN] {
    match pages.get(end..) {
        Some(after @ [_, ..]) => first_values(layout, after),
        _ => [next[0].get(Layout::K_BASE as usize..).unwrap_or_default().as_chunks().0, &[], &[], &[]],
    }
}

/// The values of the first pages of `pages`.
#[inline(always)]
fn first_values<'a>(layout: &Layout, pages: &[PageRef<'a>]) -> [&'a [[u32; LANES]]; RUN] {
    let mut ahead: [&[[u32; LANES]]; RUN] = [&[]; RUN];
    for (ahead, page) in ahead.iter_mut().zip(pages) {
        *ahead = values_of(layout, page.words);
    }
    ahead
}

/// Rows of words that are read after these; each row of a tile prefetches an equal part.
pub(super) struct Ahead<'a> {
    words: [&'a [[u32; LANES]]; RUN],
    each: usize,
}

impl<'a> Ahead<'a> {
    /// `rows` is the number of rows that prefetch a part each.
    #[inline(always)]
    pub(super) fn new(words: [&'a [[u32; LANES]]; RUN], rows: usize) -> Self {
        let all: usize = words.iter().map(|words| words.len()).sum();
        Ahead { words, each: all.div_ceil(rows) }
    }

    /// Prefetches the parts of `rows` rows.
    #[inline(always)]
    pub(super) fn fetch<W: Warp>(&mut self, w: W, rows: usize) {
        if W::FETCHES {
            let mut most = self.each * rows;
            for words in &mut self.words {
                let (now, left) = words.split_at(most.min(words.len()));
                for words in now {
                    w.prefetch(words);
                }
                most -= now.len();
                *words = left;
            }
        }
    }
}

/// K of a page in f32: one channel per row, rotated if `common` has a rotation.
pub(super) struct Keys<'a> {
    pub(super) common: &'a Common<'a>,
    pub(super) words: &'a [u32],
    pub(super) wide: &'a mut [Row],
}

impl<'a, W: Warp> Routine<W> for Keys<'a> {
    type Out = &'a [[f32; LANES]];
    #[inline(always)]
    fn run(self, w: W) -> Self::Out {
        let Keys { common, words, wide } = self;
        let (layout, keys) = (common.layout, keys_of(common.layout, words));
        if layout.k == Dtype::F32 && common.rotation.is_none() {
            return bytemuck::cast_slice(keys);
        }
        let wide = &mut wide[..layout.k_channels() as usize];
        match layout.k {
            Dtype::F32 => widen::<W, F32>(w, keys, wide),
            Dtype::F16 => widen::<W, F16>(w, keys, wide),
            Dtype::Bf16 => widen::<W, Bf16>(w, keys, wide),
            other => unreachable!("{} has no lanes", other.name()),
        }
        let wide = match &common.rotation {
            None => wide,
            Some(rotation) => {
                turn(w, rotation, w.load_part(&words[..LANES]), wide);
                &mut wide[..layout.k_dim as usize]
            }
        };
        flat(wide)
    }
}

/// The rows as arrays of lanes.
#[inline(always)]
pub(super) fn flat(rows: &[Row]) -> &[[f32; LANES]] {
    // SAFETY: `Row` is `repr(C)` over `[f32; LANES]`, 128 bytes, which is its alignment too, so it has no padding and a slice of it is a
    // slice of arrays of the same length; arrays of f32 need a smaller alignment.
    unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), rows.len()) }
}

/// Converts rows of words to rows of channels, in order.
#[inline(always)]
fn widen<W: Warp, E: Element>(w: W, words: &[[u32; LANES]], wide: &mut [Row]) {
    for (words, wide) in words.iter().zip(wide.chunks_exact_mut(E::PER_WORD)) {
        let words = w.load(words);
        for (j, wide) in wide.iter_mut().enumerate() {
            w.store(E::channel(w, words, j), &mut wide.0);
        }
    }
}

/// Rotates the channels of keys to `position`, as [`pikv_core::full`] does when it reads them.
#[inline(always)]
fn turn<W: Warp>(w: W, rotation: &Rotation<'_>, position: W::U, keys: &mut [Row]) {
    let n = rotation.capacity as usize;
    // Lanes without a token hold any word; the mask keeps the look-up inside the table, and their scores are not read.
    let at = w.and(position, w.splat_u(rotation.capacity - 1));
    for i in 0..rotation.rope.rotary_dim as usize / 2 {
        let (a, b) = rotation.rope.pair(i);
        let pair = &rotation.table[i * 2 * n..(i + 1) * 2 * n];
        let (cos, sin) = (w.gather(&pair[..n], at), w.gather(&pair[n..], at));
        let (x, y) = (w.load_f(&keys[a].0), w.load_f(&keys[b].0));
        w.store(w.fma(x, cos, w.sub(w.splat(-0.0), w.mul(y, sin))), &mut keys[a].0);
        w.store(w.fma(y, cos, w.mul(x, sin)), &mut keys[b].0);
    }
}

/// V of a run of pages in f32: `[acc_rows][RUN][LANES]`, with the channels in the order of [`pikv_core::merge::Partial`].
pub(super) struct Values<'a> {
    pub(super) layout: &'a Layout,
    pub(super) pages: &'a [PageRef<'a>],
    pub(super) wide: &'a mut [Row],
}

impl<W: Warp> Routine<W> for Values<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self, w: W) {
        let Values { layout, pages, wide } = self;
        for (i, page) in pages.iter().enumerate() {
            let (v, wide) = (&page.words[layout.v_base() as usize..], &mut wide[i * LANES..]);
            match layout.v {
                Dtype::F32 => widen_values::<W, F32>(w, layout, v, wide),
                Dtype::F16 => widen_values::<W, F16>(w, layout, v, wide),
                Dtype::Bf16 => widen_values::<W, Bf16>(w, layout, v, wide),
                other => unreachable!("{} has no lanes", other.name()),
            }
        }
    }
}

#[inline(always)]
fn widen_values<W: Warp, E: Element>(w: W, layout: &Layout, v: &[u32], wide: &mut [Row]) {
    let (words, stride) = (layout.v_words() as usize, layout.v_stride() as usize);
    for (t, value) in (0..LANES).zip(v.chunks_exact(stride)) {
        for (col, words) in value[..words].chunks(LANES).enumerate() {
            let words = w.load_part(words);
            for j in 0..E::PER_WORD {
                w.store(E::channel(w, words, j), &mut wide[(col * E::PER_WORD + j) * RUN * LANES + t].0);
            }
        }
    }
}
