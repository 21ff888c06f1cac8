//! Packs 32 tokens of a full page. Rows come with lane = token; V is written with lane = channel.

use super::code::{Code, Scale, field};
use super::encode::{Group, encode, fp8, magnitude};
use super::packed::{BYTES, Packed, Side, TAGS};
use crate::attend::filled;
use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::page::{Layout, PAGE};
use crate::warp::{LANES, Warp, shifted_left};

/// A linear map of a row of channels, applied by lanes to 32 tokens at once.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Turn<'a> {
    /// The orthonormal Walsh-Hadamard transform of every `block` channels, a power of two.
    Hadamard {
        /// Channels of a block.
        block: usize,
    },
    /// The given channels, in that order.
    Select {
        /// Channels of the row, each below its width.
        channels: &'a [u32],
    },
    /// `encode (x - bias)`, each output a chain of fused multiply-adds over the input channels in order, from 0.
    Dense {
        /// `[narrow][wide]`
        encode: &'a [f32],
        /// `[wide]`; empty for 0.
        bias: &'a [f32],
    },
}

/// 2^23
const STARTS: f32 = 8_388_608.0;

/// Reads the first `fill` tokens of a full page, given as f32 of the bits of its words: channel rows of K into `k` (`k_dim`), of V into
/// `v` (`v_dim`). Lanes after them repeat the last token.
///
/// # Panics
/// If a slice is too short.
#[inline(always)]
pub fn unpack<W: Warp>(
    w: W,
    layout: &Layout,
    page: &[f32],
    fill: u32,
    k: &mut [[f32; LANES]],
    v: &mut [[f32; LANES]],
) {
    let keys: &[[f32; LANES]] = page[Layout::K_BASE as usize..layout.v_base() as usize].as_chunks().0;
    let n = layout.k.per_word() as usize;
    for (c, row) in k.iter_mut().enumerate() {
        let x = channel(w, layout.k, w.bits(w.load_f(&keys[c / n])), c % n);
        w.store(repeated(w, x, fill), row);
    }
    let values = &page[layout.v_base() as usize..layout.words() as usize];
    let n = layout.v.per_word() as usize;
    // The first word of each lane's token: an integer below 2^23, exact as f32; added to 2^23 it stands in the low bits.
    let token = w.select(w.mask(filled(fill)), w.to_f(w.lane_id()), w.splat((fill - 1) as f32));
    let starts = w.bits(w.fma(token, w.splat(layout.v_stride() as f32), w.splat(STARTS)));
    let starts = w.sub_u(starts, w.splat_u(STARTS.to_bits()));
    for (c, row) in v.iter_mut().enumerate() {
        let word = w.bits(w.gather(values, w.add_u(starts, w.splat_u((c / n) as u32))));
        w.store(channel(w, layout.v, word, c % n), row);
    }
}

/// `x`, with lane `fill - 1` repeated in the lanes after it.
#[inline(always)]
fn repeated<W: Warp>(w: W, x: W::F, fill: u32) -> W::F {
    if fill == LANES as u32 {
        return x;
    }
    w.select(w.mask(filled(fill)), x, w.splat(w.lane(x, fill as usize - 1)))
}

#[inline(always)]
fn channel<W: Warp>(w: W, dtype: Dtype, word: W::U, j: usize) -> W::F {
    match dtype {
        Dtype::F32 => F32::channel(w, word, j),
        Dtype::F16 => F16::channel(w, word, j),
        Dtype::Bf16 => Bf16::channel(w, word, j),
    }
}

/// Maps 32 tokens: channel rows `x` to channel rows `out`.
///
/// # Panics
/// If a slice is too short.
#[inline(always)]
pub fn turn<W: Warp>(w: W, turn: &Turn<'_>, x: &[[f32; LANES]], out: &mut [[f32; LANES]]) {
    match *turn {
        Turn::Hadamard { block } => {
            for (x, out) in x.iter().zip(out.iter_mut()) {
                w.store(w.load_f(x), out);
            }
            for rows in out[..x.len()].chunks_exact_mut(block) {
                hadamard(w, rows);
            }
        }
        Turn::Select { channels } => {
            for (channel, out) in channels.iter().zip(out) {
                w.store(w.load_f(&x[*channel as usize]), out);
            }
        }
        Turn::Dense { encode, bias } => {
            for (out, weights) in out.iter_mut().zip(encode.chunks_exact(x.len())) {
                let mut sum = w.splat(0.0);
                for (c, (x, weight)) in x.iter().zip(weights).enumerate() {
                    let mut x = w.load_f(x);
                    if let Some(b) = bias.get(c) {
                        x = w.sub(x, w.splat(*b));
                    }
                    sum = w.fma(x, w.splat(*weight), sum);
                }
                w.store(sum, out);
            }
        }
    }
}

/// The orthonormal transform of one block of rows: butterflies over distances 1, 2, 4, .., then one product by
/// sqrt(1 / block).
#[inline(always)]
fn hadamard<W: Warp>(w: W, rows: &mut [[f32; LANES]]) {
    let mut distance = 1;
    while distance < rows.len() {
        for pair in rows.chunks_exact_mut(2 * distance) {
            let (a, b) = pair.split_at_mut(distance);
            for (a, b) in a.iter_mut().zip(b) {
                let (x, y) = (w.load_f(a), w.load_f(b));
                w.store(w.add(x, y), a);
                w.store(w.sub(x, y), b);
            }
        }
        distance *= 2;
    }
    let scale = w.splat(orthonormal(rows.len()));
    for row in rows {
        w.store(w.mul(w.load_f(row), scale), row);
    }
}

/// The square root of `1 / block`, rounded to nearest; `block` is a power of two. (A library's square root would be a call
/// on a device, and kernels must not call.)
#[inline(always)]
pub(super) fn orthonormal(block: usize) -> f32 {
    let power = block.trailing_zeros();
    let half = f32::from_bits((127 - power / 2) << 23);
    if power.is_multiple_of(2) { half } else { half * core::f32::consts::FRAC_1_SQRT_2 }
}

/// Writes a packed page of the tokens at `positions` (1 to 32, ascending), from channel rows of K and V; lanes without a token
/// repeat the last. The page is given as f32 of the bits of its words, because lanes scatter f32; `v` is overwritten.
///
/// Scales and minima are f16, the scale rounded up and the minimum down, so that every channel lies between the first code
/// and the last and is at most half a scale from its own. Codes round half to even.
///
/// For a [`Side`] with a basis, the rows are coefficients; for means there are no rows. Both also need [`pack_tables`].
///
/// # Panics
/// If a slice is too short.
#[inline(always)]
pub fn pack<W: Warp>(
    w: W,
    packed: &Packed,
    positions: &[u32],
    k: &[[f32; LANES]],
    v: &mut [[f32; LANES]],
    page: &mut [f32],
) {
    for (i, word) in page[..TAGS as usize].iter_mut().enumerate() {
        *word = f32::from_bits(Packed::tag(positions, i));
    }
    if !matches!(packed.k_side, Side::Means { .. }) {
        let end = packed.k_base() + packed.k_rows() * PAGE;
        pack_keys(w, packed, &k[..packed.k_dim as usize], &mut page[TAGS as usize..end as usize]);
    }
    if !matches!(packed.v_side, Side::Means { .. }) {
        let end = packed.v_base() + packed.v_stride() * packed.v_rows();
        pack_values(w, packed, v, &mut page[packed.v_scales() as usize..end as usize]);
    }
}

/// Writes the tables of a packed page that has them: rows of means, or a basis followed by its mean.
///
/// # Panics
/// If a slice is too short.
pub fn pack_tables(packed: &Packed, k: &[f32], v: &[f32], page: &mut [u32]) {
    let coded = |code: Code, x: f32| {
        let dtype = match code {
            Code::F16 => Dtype::F16,
            Code::Bf16 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        dtype.encode(x.clamp(-code.limit(), code.limit())).unwrap_or(0)
    };
    if packed.k_side != Side::Tokens {
        let code = packed.k_table_code();
        page[packed.k_table() as usize..packed.v_scales() as usize].fill(0);
        for (slot, row) in (0..).zip(k.chunks_exact(packed.query_dim() as usize)) {
            for (c, x) in (0..).zip(row) {
                let (word, part) = packed.k_table_at(slot, c);
                page[word as usize] |= coded(code, *x) << (part * code.bits());
            }
        }
    }
    if packed.v_side != Side::Tokens {
        let out = packed.v_out();
        let words = &mut page[packed.v_table() as usize..packed.words() as usize];
        words.fill(0);
        for (i, row) in (0..).zip(v.chunks_exact(packed.out_dim() as usize)) {
            for (c, x) in (0..).zip(row) {
                let (word, part) = out.row_at(i, c);
                words[word as usize] |= coded(out.v, *x) << (part * out.v.bits());
            }
        }
    }
}

#[inline(always)]
fn pack_keys<W: Warp>(w: W, packed: &Packed, k: &[[f32; LANES]], words: &mut [f32]) {
    let (words, rows) = words.split_at_mut(packed.k_scale_words() as usize);
    let (scales, rows) = (words, rows.as_chunks_mut::<LANES>().0);
    let (page, scales) = page_scale(w, packed.k, k, scales);
    // 32 channels at a time; one group per lane while scales are computed from the extremes.
    for (col, k) in k.chunks(LANES).enumerate() {
        let (mut scale, mut min) = (w.park(w.splat(0.0)), w.park(w.splat(0.0)));
        if packed.k.scale() == Scale::Block {
            let to = &mut scales[col * (packed.k.blocks() * BYTES) as usize..];
            [scale, min] = key_blocks(w, packed.k, k, page, to).map(|scale| w.park(scale));
        } else if packed.k.scale() != Scale::None {
            let (mut low, mut high) = (w.splat(0.0), w.splat(0.0));
            for (c, x) in k.iter().enumerate() {
                let x = w.load_f(x);
                let (least, most) = (-w.reduce_max(w.sub(w.splat(-0.0), x)), w.reduce_max(x));
                low = w.select(w.mask(1 << c), w.splat(least), low);
                high = w.select(w.mask(1 << c), w.splat(most), high);
            }
            let group = Group::of(w, packed.k, low, high);
            (scale, min) = (w.park(group.scale), w.park(group.min));
            w.store_part(w.from_bits(group.word), &mut scales[col * LANES..(col + 1) * LANES]);
        }
        let (mut shift, mut first) = (0, 0);
        while let Some(bits) = packed.k.plane(shift) {
            let n = LANES >> bits.trailing_zeros();
            for (i, x) in k.chunks(n).enumerate() {
                let mut word = w.splat_u(0);
                for (j, x) in x.iter().enumerate() {
                    let c = i * n + j;
                    let (mut scale, min) = (w.bcast(&scale, c), w.bcast(&min, c));
                    if packed.k.scale() == Scale::Block {
                        scale = w.select(w.mask(0xffff), scale, min);
                    }
                    let code = encode(w, packed.k, w.load_f(x), scale, min);
                    let code = plane_of(w, packed.k, code, shift, bits);
                    word = w.or(word, shifted_left(w, code, packed.k.place(j as u32, bits)));
                }
                w.store(w.from_bits(word), &mut rows[(first + col as u32 * bits) as usize + i]);
            }
            first += packed.k_plane_words(bits);
            shift += bits;
        }
    }
}

/// Scale of a page's blocks of channels `x`. Writes it to the start of `words`, and returns the rest for the scales of the blocks.
#[inline(always)]
fn page_scale<'a, W: Warp>(
    w: W,
    code: Code,
    x: &[[f32; LANES]],
    words: &'a mut [f32],
) -> (f32, &'a mut [f32]) {
    if code.page_words() == 0 {
        return (1.0, words);
    }
    let most = x.iter().fold(w.splat(0.0), |most, x| w.max(most, magnitude(w, w.load_f(x))));
    let scale = code.page_scale(w.reduce_max(most));
    let (page, blocks) = words.split_at_mut(code.page_words() as usize);
    w.store_part(w.select(w.mask(1), w.splat(scale), w.splat(0.0)), page);
    (scale, blocks)
}

/// Writes the scales of the blocks of 32 channels of keys, and returns them, lane = channel: for the first half of the tokens and
/// for the second.
#[inline(always)]
fn key_blocks<W: Warp>(w: W, code: Code, k: &[[f32; LANES]], page: f32, words: &mut [f32]) -> [W::F; 2] {
    let mut scales = [w.splat(0.0); 2];
    for (half, to) in words.chunks_mut(BYTES as usize).take(code.blocks() as usize).enumerate() {
        let tokens = match (code.blocks(), half) {
            (1, _) => u32::MAX,
            (_, 0) => 0xffff,
            _ => 0xffff_0000,
        };
        let mut most = w.splat(0.0);
        for (c, x) in k.iter().enumerate() {
            let x = w.select(w.mask(tokens), magnitude(w, w.load_f(x)), w.splat(0.0));
            most = w.select(w.mask(1 << c), w.splat(w.reduce_max(x)), most);
        }
        let scale = blocks(w, code, most, page, to);
        scales[1] = scale;
        if half == 0 {
            scales[0] = scale;
        }
    }
    scales
}

/// Writes the bytes of the scales of 32 blocks, whose largest magnitudes are `most`, and returns the scales that they code.
#[inline(always)]
fn blocks<W: Warp>(w: W, code: Code, most: W::F, page: f32, words: &mut [f32]) -> W::F {
    let bytes = if code == Code::Nvfp4 {
        fp8::<W, 20>(w, w.div(most, w.splat(6.0 * page)), 448.0, 120 << 3, 1.0 / 64.0, 512.0)
    } else {
        // The exponent less 2, at least 0.
        let exponent = w.shr::<23>(w.bits(most));
        let less = w.from_bits(w.sub_u(exponent, w.splat_u(2)));
        w.bits(w.select(w.ge_i(exponent, w.splat_u(2)), less, w.splat(0.0)))
    };
    // Every fourth lane gets the bytes of four lanes, its own first; then those lanes are moved together.
    let next = |x: W::U, lanes: u32| w.bits(w.shfl_xor(w.from_bits(x), lanes));
    let two = w.or(bytes, w.shl::<8>(next(bytes, 1)));
    let four = w.from_bits(w.or(two, w.shl::<16>(next(two, 2))));
    let mut word = w.splat(0.0);
    for i in 0..BYTES as usize {
        word = w.select(w.mask(1 << i), w.splat(w.lane(four, 4 * i)), word);
    }
    w.store_part(word, &mut words[..BYTES as usize]);
    code.block_scales(w, bytes, page)
}

/// Bits of `codes` in the plane of `bits` bits that starts at bit `shift`.
#[inline(always)]
fn plane_of<W: Warp>(w: W, code: Code, codes: W::U, shift: u32, bits: u32) -> W::U {
    if bits == code.bits() { codes } else { field(w, codes, shift, bits) }
}

#[inline(always)]
fn pack_values<W: Warp>(w: W, packed: &Packed, v: &mut [[f32; LANES]], words: &mut [f32]) {
    let (words, values) = words.split_at_mut(packed.v_scale_words() as usize);
    let across = packed.v_across();
    if packed.v.scale() == Scale::Block {
        value_blocks(w, packed.v, &mut v[..packed.v_dim as usize], words);
        w.sync();
        return join_tokens(w, packed, v.as_flattened(), values);
    }
    let (rows, _) = words.as_chunks_mut::<LANES>();
    if packed.v.scale() != Scale::None {
        for (g, row) in (0u32..).zip(rows.iter_mut()) {
            let (mut low, mut high) = (w.splat(f32::INFINITY), w.splat(f32::NEG_INFINITY));
            for c in (0..packed.v_dim).filter(|c| packed.v_group(*c) == g) {
                let x = w.load_f(&v[c as usize]);
                let minus = w.sub(w.splat(-0.0), x);
                low = w.sub(w.splat(-0.0), w.max(w.sub(w.splat(-0.0), low), minus));
                high = w.max(high, x);
            }
            // A group of padding only has no values.
            let none = w.lt(high, low);
            let (low, high) = (w.select(none, w.splat(0.0), low), w.select(none, w.splat(0.0), high));
            let group = Group::of(w, packed.v, low, high);
            w.store(w.from_bits(group.word), row);
            if across {
                // If tokens share words, channels lie in order, so a group is 32 of them.
                for row in v[..packed.v_dim as usize].iter_mut().skip(g as usize * LANES).take(LANES) {
                    let code = encode(w, packed.v, w.load_f(row), group.scale, group.min);
                    w.store(w.from_bits(code), row);
                }
            }
        }
    }
    let stride = packed.v_stride();
    if across {
        w.sync();
        // From here on lane = channel.
        return join_tokens(w, packed, v.as_flattened(), values);
    }
    for i in 0..stride {
        let mut word = w.splat_u(0);
        for (part, c) in (i..packed.v_dim).step_by(stride as usize).enumerate() {
            let scale = match packed.v.scale() {
                Scale::None => w.splat(0.0),
                _ => w.load_f(&rows[packed.v_group(c) as usize]),
            };
            let code = encode(w, packed.v, w.load_f(&v[c as usize]), scale, w.splat(0.0));
            word = w.or(word, shifted_left(w, code, part as u32 * packed.v.bits()));
        }
        w.scatter(w.from_bits(word), values, i as usize, stride as usize);
    }
}

/// Writes the scales of the blocks of values, and replaces the values by their codes.
#[inline(always)]
fn value_blocks<W: Warp>(w: W, code: Code, v: &mut [[f32; LANES]], words: &mut [f32]) {
    let (page, words) = page_scale(w, code, v, words);
    let block = LANES / code.blocks() as usize;
    for (g, to) in words.chunks_mut(BYTES as usize).enumerate() {
        // The last block may have no channels.
        let (first, end) = ((g * block).min(v.len()), ((g + 1) * block).min(v.len()));
        let v = &mut v[first..end];
        let most = v.iter().fold(w.splat(0.0), |most, x| w.max(most, magnitude(w, w.load_f(x))));
        let scale = blocks(w, code, most, page, to);
        for row in v {
            w.store(w.from_bits(encode(w, code, w.load_f(row), scale, w.splat(0.0))), row);
        }
    }
}

/// Writes V where one word has codes of several tokens. `codes` are `[v_dim][32]` channels and tokens, as f32 of their
/// bits. Lane = channel.
#[inline(always)]
fn join_tokens<W: Warp>(w: W, packed: &Packed, codes: &[f32], values: &mut [f32]) {
    let stride = packed.v_stride();
    let mut shift = 0;
    while let Some(bits) = packed.v.plane(shift) {
        let tokens = LANES as u32 >> bits.trailing_zeros();
        for row in 0..bits {
            for first in (0..stride).step_by(LANES) {
                let channel = w.add_u(w.lane_id(), w.splat_u(first));
                let inside = w.ge_i(w.splat_u(packed.v_dim - 1), channel);
                let at = w.bits(w.select(inside, w.from_bits(w.shl::<5>(channel)), w.splat(0.0)));
                let mut word = w.splat_u(0);
                for t in 0..tokens {
                    let code = w.bits(w.gather(codes, w.add_u(at, w.splat_u(row * tokens + t))));
                    let code = plane_of(w, packed.v, code, shift, bits);
                    word = w.or(word, shifted_left(w, code, packed.v.place(t, bits)));
                }
                let word = w.select(inside, w.from_bits(word), w.splat(0.0));
                let row = shift + row;
                let (start, end) = ((row * stride + first) as usize, ((row + 1) * stride) as usize);
                w.scatter(word, &mut values[..end], start, 1);
            }
        }
        shift += bits;
    }
}
