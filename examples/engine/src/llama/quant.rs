//! Tensor formats of GGUF files, and their conversion to f32.
//!
//! A quantised row is split into blocks. A block has its scales first or last, and its integers packed: the low halves of some bytes before
//! their high halves. Scales are f16; a value is `scale * integer` in f32, minus or plus a minimum in some formats.

use half::{bf16, f16};

/// A format, by its name in ggml.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(non_camel_case_types, reason = "the names that ggml gives them")]
pub enum Kind {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// Number in GGUF, and weights and bytes of a block, for each format.
const KINDS: [(u32, Kind, (usize, usize)); 11] = [
    (0, Kind::F32, (1, 4)),
    (1, Kind::F16, (1, 2)),
    (30, Kind::BF16, (1, 2)),
    (2, Kind::Q4_0, (32, 18)),
    (3, Kind::Q4_1, (32, 20)),
    (6, Kind::Q5_0, (32, 22)),
    (7, Kind::Q5_1, (32, 24)),
    (8, Kind::Q8_0, (32, 34)),
    (12, Kind::Q4_K, (256, 144)),
    (13, Kind::Q5_K, (256, 176)),
    (14, Kind::Q6_K, (256, 210)),
];

impl Kind {
    pub fn new(number: u32) -> Result<Self, String> {
        let known = KINDS.iter().find(|known| known.0 == number);
        known.map(|known| known.1).ok_or_else(|| {
            let all: Vec<String> = KINDS.iter().map(|(n, kind, _)| format!("{n} ({kind:?})")).collect();
            format!("form {number} is not read; {} are", all.join(", "))
        })
    }

    /// Weights and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        KINDS[self as usize].2
    }

    /// Converts whole blocks to f32; an incomplete block at the end is dropped.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        let (weights, size) = self.block();
        let mut out = vec![0.0; bytes.len() / size * weights];
        let blocks = bytes.chunks_exact(size).zip(out.chunks_exact_mut(weights));
        match self {
            Kind::F32 => blocks.for_each(|(b, x)| x[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Kind::F16 => blocks.for_each(|(b, x)| x[0] = half(b, 0)),
            Kind::BF16 => blocks.for_each(|(b, x)| x[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            Kind::Q4_0 => blocks.for_each(|(b, x)| fours(&b[2..], x, |_, q| half(b, 0) * (q - 8.0))),
            Kind::Q4_1 => blocks.for_each(|(b, x)| fours(&b[4..], x, |_, q| half(b, 0) * q + half(b, 2))),
            Kind::Q5_0 => blocks.for_each(|(b, x)| {
                fours(&b[6..], x, |i, q| half(b, 0) * (q + fifth(&b[2..], i) - 16.0));
            }),
            Kind::Q5_1 => blocks.for_each(|(b, x)| {
                fours(&b[8..], x, |i, q| half(b, 0) * (q + fifth(&b[4..], i)) + half(b, 2));
            }),
            Kind::Q8_0 => blocks.for_each(|(b, x)| {
                x.iter_mut().zip(&b[2..]).for_each(|(x, q)| *x = half(b, 0) * f32::from(*q as i8));
            }),
            Kind::Q4_K => blocks.for_each(|(b, x)| k4_5(b, &b[16..], x, |_, _| 0.0)),
            Kind::Q5_K => blocks.for_each(|(b, x)| {
                // Bit s of byte i of the fifth bits belongs to weight i of sub-block s.
                k4_5(b, &b[48..], x, |sub, i| f32::from(b[16 + i] >> sub & 1) * 16.0);
            }),
            Kind::Q6_K => blocks.for_each(|(b, x)| k6(b, x)),
        }
        out
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// 32 weights from 16 bytes: the low halves of all bytes, then the high halves.
fn fours(packed: &[u8], out: &mut [f32], value: impl Fn(usize, f32) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for i in 0..16 {
        low[i] = value(i, f32::from(packed[i] & 15));
        high[i] = value(i + 16, f32::from(packed[i] >> 4));
    }
}

/// Value of the fifth bit of weight `i`.
fn fifth(bits: &[u8], i: usize) -> f32 {
    f32::from(bits[i / 8] >> (i % 8) & 1) * 16.0
}

/// Q4_K and Q5_K: 8 sub-blocks of 32, each with a 6-bit scale and a 6-bit minimum, in units of a scale and a minimum of the block. Two
/// sub-blocks share 32 bytes, the even one in the low halves.
fn k4_5(block: &[u8], packed: &[u8], out: &mut [f32], fifth: impl Fn(usize, usize) -> f32) {
    let (d, min, six) = (half(block, 0), half(block, 2), &block[4..16]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        // 12 bytes: the low 6 bits of bytes 0..4 and 4..8 are scales and minima 0..4; of 4..8, bytes 8..12 hold the low
        // 4 bits, and the top 2 bits of bytes 0..8 the rest.
        let (scale, least) = if sub < 4 {
            (six[sub] & 63, six[sub + 4] & 63)
        } else {
            let low = six[sub + 4];
            (low & 15 | six[sub - 4] >> 6 << 4, low >> 4 | six[sub] >> 6 << 4)
        };
        let (scale, least) = (d * f32::from(scale), min * f32::from(least));
        for (i, x) in out.iter_mut().enumerate() {
            let q = packed[sub / 2 * 32 + i] >> (sub % 2 * 4) & 15;
            *x = scale * (f32::from(q) + fifth(sub, i)) - least;
        }
    }
}

/// Q6_K: two halves of 128 weights; each has 64 bytes of low halves, 32 bytes of top bit pairs, and a signed scale for every 16 weights.
fn k6(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (n, x) in out.iter_mut().enumerate() {
        // Weight 32 j + i of its half: the nibbles of byte 32 (j % 2) + i, low for j < 2; bits 2 j of byte i.
        let (part, j, i) = (n / 128, n % 128 / 32, n % 32);
        let nibble = low[part * 64 + j % 2 * 32 + i] >> (j / 2 * 4) & 15;
        let pair = high[part * 32 + i] >> (2 * j) & 3;
        let q = i32::from(nibble | pair << 4) - 32;
        *x = d * f32::from(scales[n / 16] as i8) * q as f32;
    }
}
