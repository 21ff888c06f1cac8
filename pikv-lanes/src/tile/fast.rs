//! Tiles of bf16 pages by sums of products of bf16 pairs (AVX512-BF16), for [`Common::rounded`](crate::attend::Common::rounded).
//!
//! A word of a key holds two neighbouring channels of a token, so K is multiplied as it lies. A word of a value holds two channels too, but
//! its products are summed over tokens: the words of two neighbouring tokens are turned into a word of each channel first. Queries and
//! weights are rounded to bf16, products are exact, and sums are in f32, where subnormal numbers count as 0. Nothing is widened.
//!
//! Every row takes its tokens two by two in the order of the page, whatever the width of its bundle: results depend on the processor and on whether a
//! row is in a tile at all, but not on threads.

use super::scores::Weights;
use super::widen::{Ahead, after_keys, after_values, keys_of};
use super::{RUN, Row, Tile, copy_weights, grow, is_seen, nothing, see};
use crate::attend::{Block, Common, bundles};
use crate::{Avx512, Lanes};
use core::arch::x86_64::*;
use pikv_core::attend::BLOCK;
use pikv_core::dtype::round_bf16;
use pikv_core::full::PageRef;
use pikv_core::page::Layout;
use pikv_core::warp::{LANES, Warp};
use std::ops::Range;

/// Pairs of tokens in a page.
const PAIRS: usize = LANES / 2;

/// 32 pairs, aligned to cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
struct Words([u32; LANES]);

/// Working memory beside that of [`Tile`].
#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// Weights in pairs of tokens: `[rows][BLOCK][PAIRS]`.
    p: Vec<[u32; PAIRS]>,
    /// Values of a run of pages in pairs of tokens: `[acc_rows][RUN][PAIRS]`, 32 channels each.
    v: Vec<Words>,
}

/// Lanes whose processor has AVX512-BF16: a value exists only where it was detected.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Pairs(Avx512);

impl Bf16Pairs {
    /// These lanes, if their processor has such products.
    pub(crate) fn of(lanes: Lanes) -> Option<Bf16Pairs> {
        match lanes {
            Lanes::Avx512(w) if is_x86_feature_detected!("avx512bf16") => Some(Bf16Pairs(w)),
            _ => None,
        }
    }

    /// Attends all rows of `block`, whose queries are rounded.
    pub(crate) fn attend(self, block: Block<'_>, tile: &mut Tile) {
        // SAFETY: `self` exists only where AVX512-BF16 was detected, and the `Avx512` in it only where the others were.
        unsafe { attend(self.0, block, tile) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,avx512bf16")]
fn attend(w: Avx512, block: Block<'_>, tile: &mut Tile) {
    let Block { common, pages, next, mut out, first, mut raw, .. } = block;
    let (rows, acc_rows) = (common.sights.len(), common.layout.acc_rows() as usize);
    assert!(pages.len() <= BLOCK && common.rotation.is_none());
    assert_eq!(
        common.rounded.len(),
        rows * common.layout.k_rows() as usize,
        "a word for each pair of channels"
    );
    tile.fit(rows);
    let Tile { p, seen, pairs, .. } = tile;
    let (p, seen) = (&mut p[..rows * BLOCK], &mut seen[..rows]);
    grow(&mut pairs.p, rows * BLOCK, [0; PAIRS]);
    grow(&mut pairs.v, acc_rows * RUN * PAIRS, Words([0; LANES]));
    if !see(w, &common, pages, seen) {
        return nothing(&mut out, first..first + rows, acc_rows, raw);
    }
    score_pages(w, &common, pages, seen, p);
    let (m, l) = (&mut out.m[first..first + rows], &mut out.l[first..first + rows]);
    w.call(Weights { pages: pages.len(), softcap: common.softcap, p, seen, m, l });
    copy_weights(&mut raw, pages.len(), p);
    p.iter().zip(&mut pairs.p).for_each(|(p, to)| round_weights(p, to));
    let acc = &mut out.acc[first * acc_rows..(first + rows) * acc_rows];
    acc.fill([0.0; LANES]);
    for start in (0..pages.len()).step_by(RUN) {
        let run = start..(start + RUN).min(pages.len());
        if !run.clone().any(|i| is_seen(seen, i)) {
            continue;
        }
        for (at, i) in run.clone().enumerate() {
            let all = seen.iter().fold(0, |all, seen| all | seen[i]);
            pair_values(w, common.layout, &pages[i], all, &mut pairs.v[at * PAIRS..]);
        }
        let ahead = Ahead::new(after_values(common.layout, pages, run.end, next), rows * acc_rows);
        sum_run(w, &common, run, pairs, acc, ahead);
    }
}

/// The scores of all pages that a row sees, `[rows][BLOCK]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,avx512bf16")]
fn score_pages(w: Avx512, common: &Common<'_>, pages: &[PageRef<'_>], seen: &[[u32; BLOCK]], p: &mut [Row]) {
    for (i, page) in pages.iter().enumerate().filter(|(i, _)| is_seen(seen, *i)) {
        let mut ahead = Ahead::new(after_keys(common.layout, pages, i), seen.len());
        let keys = keys_of(common.layout, page.words);
        for (row, width) in bundles(seen.len(), common.most) {
            ahead.fetch(w, width);
            if !is_seen(&seen[row..row + width], i) {
                continue;
            }
            let (q, p) = (&common.rounded[row * keys.len()..], &mut p[row * BLOCK + i..]);
            match width {
                8 => scores::<8>(keys, q, p),
                4 => scores::<4>(keys, q, p),
                2 => scores::<2>(keys, q, p),
                _ => scores::<1>(keys, q, p),
            }
        }
    }
}

/// Adds the values of a run of pages, in pairs, to the sums of all rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,avx512bf16")]
fn sum_run(
    w: Avx512,
    common: &Common<'_>,
    run: Range<usize>,
    pairs: &Pairs,
    acc: &mut [[f32; LANES]],
    mut ahead: Ahead<'_>,
) {
    let acc_rows = common.layout.acc_rows() as usize;
    for (at, v) in pairs.v.chunks_exact(RUN * PAIRS).take(acc_rows).enumerate() {
        let v = &v[..run.len() * PAIRS];
        for (row, width) in bundles(common.sights.len(), common.most) {
            ahead.fetch(w, width);
            let (p, acc) = (&pairs.p[row * BLOCK + run.start..], &mut acc[row * acc_rows + at..]);
            match width {
                8 => sums::<8>(v, p, acc, acc_rows),
                4 => sums::<4>(v, p, acc, acc_rows),
                2 => sums::<2>(v, p, acc, acc_rows),
                _ => sums::<1>(v, p, acc, acc_rows),
            }
        }
    }
}

/// Rounds queries in bundles, `[bundle][2 words][width]`, to pairs of channels.
pub(super) fn pair_queries(q: &[f32], words: usize, most: usize, to: &mut Vec<u32>) {
    let rows = q.len() / (2 * words);
    to.resize(rows * words, 0);
    for (row, width) in bundles(rows, most) {
        let from = &q[row * 2 * words..][..width * 2 * words];
        let to = &mut to[row * words..][..width * words];
        match width {
            8 => round_bundle::<8>(from, to),
            4 => round_bundle::<4>(from, to),
            2 => round_bundle::<2>(from, to),
            _ => round_bundle::<1>(from, to),
        }
    }
}

/// Rounds the queries of `R` rows: from `[channels][R]` to `[words][R]`.
fn round_bundle<const R: usize>(from: &[f32], to: &mut [u32]) {
    for (pair, to) in from.as_chunks::<R>().0.as_chunks::<2>().0.iter().zip(to.as_chunks_mut::<R>().0) {
        for (to, (low, high)) in to.iter_mut().zip(pair[0].iter().zip(pair[1])) {
            *to = round_bf16(*low) | round_bf16(high) << 16;
        }
    }
}

/// Rounds the weights of a page.
#[target_feature(enable = "avx512f,avx512bf16")]
fn round_weights(p: &Row, to: &mut [u32; PAIRS]) {
    // SAFETY: two loads of 16 of the 32 weights, and a store of 16 words.
    unsafe {
        let [low, high] = [0, 16].map(|at| _mm512_loadu_ps(p.0.as_ptr().add(at)));
        _mm512_storeu_si512(to.as_mut_ptr().cast(), as_words(_mm512_cvtne2ps_pbh(high, low)));
    }
}

fn as_words(pairs: __m512bh) -> __m512i {
    // SAFETY: both are 64 bytes that can hold anything.
    unsafe { std::mem::transmute(pairs) }
}

fn as_pairs(words: __m512i) -> __m512bh {
    // SAFETY: as in `as_words`.
    unsafe { std::mem::transmute(words) }
}

/// The two registers of 32 words.
#[target_feature(enable = "avx512f")]
fn load(words: &[u32; LANES]) -> [__m512bh; 2] {
    // SAFETY: two loads of 16 of the 32 words.
    [0, 16].map(|at| as_pairs(unsafe { _mm512_loadu_si512(words.as_ptr().add(at).cast()) }))
}

/// Adds the products of `R` rows' pairs with the same words.
#[target_feature(enable = "avx512f,avx512bf16")]
fn add<const R: usize>(sums: &mut [[__m512; 2]; R], words: &[u32; LANES], pair: impl Fn(usize) -> u32) {
    let [low, high] = load(words);
    for (r, sums) in sums.iter_mut().enumerate() {
        let pair = as_pairs(_mm512_set1_epi32(pair(r) as i32));
        *sums = [_mm512_dpbf16_ps(sums[0], low, pair), _mm512_dpbf16_ps(sums[1], high, pair)];
    }
}

#[target_feature(enable = "avx512f")]
fn store(sums: [__m512; 2], to: &mut [f32; LANES]) {
    // SAFETY: two stores of 16 of the 32 lanes.
    unsafe {
        _mm512_storeu_ps(to.as_mut_ptr(), sums[0]);
        _mm512_storeu_ps(to.as_mut_ptr().add(16), sums[1]);
    }
}

/// The scores of a page, uncapped: `q` is `[words][R]`, and the page's place in `p` is the first of each `BLOCK`.
#[target_feature(enable = "avx512f,avx512bf16")]
fn scores<const R: usize>(keys: &[[u32; LANES]], q: &[u32], p: &mut [Row]) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (words, q) in keys.iter().zip(q.as_chunks::<R>().0) {
        add(&mut sums, words, |r| q[r]);
    }
    for (r, sums) in sums.into_iter().enumerate() {
        store(sums, &mut p[r * BLOCK].0);
    }
}

/// Turns the values of a page into pairs of tokens, `[acc_rows][RUN][PAIRS]`; tokens outside `seen` become 0, whatever lies there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
fn pair_values(w: Avx512, layout: &Layout, page: &PageRef<'_>, seen: u32, to: &mut [Words]) {
    let (words, stride) = (layout.v_words() as usize, layout.v_stride() as usize);
    let low = w.splat_u(0xffff);
    let values = page.words[layout.v_base() as usize..].chunks_exact(2 * stride).enumerate();
    for (t, tokens) in values.take(PAIRS) {
        for (col, (first, second)) in
            tokens[..words].chunks(LANES).zip(tokens[stride..][..words].chunks(LANES)).enumerate()
        {
            let kept = |token: usize, words| {
                let all = if seen >> token & 1 == 1 { u32::MAX } else { 0 };
                w.and(w.load_part(words), w.splat_u(all))
            };
            let (first, second) = (kept(2 * t, first), kept(2 * t + 1, second));
            let even = w.or(w.and(first, low), w.shl::<16>(second));
            let odd = w.or(w.shr::<16>(first), w.shl::<16>(w.shr::<16>(second)));
            for (j, pairs) in [even, odd].into_iter().enumerate() {
                let to = &mut to[(2 * col + j) * RUN * PAIRS + t].0;
                w.store(w.from_bits(pairs), bytemuck::cast_mut(to));
            }
        }
    }
}

/// Adds a run of values, `[pages][PAIRS]`, to 32 channels of the sums of `R` rows, `stride` rows of lanes from one row to the next. `p` is
/// `[R][BLOCK]` from the run's first page on.
#[target_feature(enable = "avx512f,avx512bf16")]
fn sums<const R: usize>(v: &[Words], p: &[[u32; PAIRS]], acc: &mut [[f32; LANES]], stride: usize) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        let from = acc[r * stride].as_ptr();
        // SAFETY: two loads of 16 of the 32 lanes.
        *sums = unsafe { [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))] };
    }
    for (page, v) in v.as_chunks::<PAIRS>().0.iter().enumerate() {
        let p: [&[u32; PAIRS]; R] = std::array::from_fn(|r| &p[r * BLOCK + page]);
        for (t, words) in v.iter().enumerate() {
            add(&mut sums, &words.0, |r| p[r][t]);
        }
    }
    for (r, sums) in sums.into_iter().enumerate() {
        store(sums, &mut acc[r * stride]);
    }
}
