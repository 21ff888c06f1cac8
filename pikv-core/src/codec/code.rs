//! Codes of channels in the words of a packed page.

use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::warp::{Warp, shifted_right};

/// The code of K or V in a packed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// One f32 a word.
    F32,
    /// Two IEEE binary16 a word.
    F16,
    /// Two bfloat16 a word.
    Bf16,
    /// Four integers 0..=255 a word, with a scale and a minimum per group.
    Int8,
    /// Eight integers 0..=15 a word, with a scale and a minimum per group.
    Int4,
    /// Four FP8 numbers of 4 exponent and 3 mantissa bits a word (OCP E4M3: no infinity, at most 448), with a scale per group.
    E4m3,
    /// Four FP8 numbers of 5 exponent and 2 mantissa bits a word (OCP E5M2, at most 57344), with a scale per group.
    E5m2,
    /// Integers 0..=3, sixteen a word, with a scale and a minimum per group.
    Int2,
    /// Integers 0..=7 in planes of 2 bits and 1 bit, with a scale and a minimum per group.
    Int3,
    /// Integers 0..=31 in planes of 4 bits and 1 bit, with a scale and a minimum per group.
    Int5,
    /// Integers 0..=63 in planes of 4 and 2 bits, with a scale and a minimum per group.
    Int6,
    /// Eight FP4 numbers of 2 exponent bits and 1 mantissa bit a word (OCP E2M1, at most 6), in blocks of 32 with a power of two as
    /// scale (E8M0), as in OCP MXFP4: the exponent of the block's largest magnitude less 2. Values past 6 under that scale
    /// become 6.
    Mxfp4,
    /// Eight E2M1 numbers a word, in blocks of 16 with an E4M3 scale, and one more scale for all blocks of K, or of V, of a page, as in
    /// NVFP4. The page's scale is a power of two, so that every value is exact as f32.
    Nvfp4,
}

/// Content of a group's scale word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// No scale: a code is the value.
    None,
    /// An f32 that a code is multiplied by.
    Float,
    /// Two f16: the scale in the low half, the minimum in the high one; a value is `scale * code + minimum`.
    Affine,
    /// A byte per block, four to a word, that codes the f32 by which a code is multiplied: see [`Code::block_scale`].
    Block,
}

impl Code {
    /// All codes.
    pub const ALL: [Code; 13] = [
        Code::F32,
        Code::F16,
        Code::Bf16,
        Code::Int8,
        Code::Int4,
        Code::E4m3,
        Code::E5m2,
        Code::Int2,
        Code::Int3,
        Code::Int5,
        Code::Int6,
        Code::Mxfp4,
        Code::Nvfp4,
    ];

    /// Index in [`Code::ALL`].
    #[inline(always)]
    pub const fn index(self) -> u32 {
        match self {
            Code::F32 => 0,
            Code::F16 => 1,
            Code::Bf16 => 2,
            Code::Int8 => 3,
            Code::Int4 => 4,
            Code::E4m3 => 5,
            Code::E5m2 => 6,
            Code::Int2 => 7,
            Code::Int3 => 8,
            Code::Int5 => 9,
            Code::Int6 => 10,
            Code::Mxfp4 => 11,
            Code::Nvfp4 => 12,
        }
    }

    /// Codes in a word of the first plane.
    #[inline(always)]
    pub const fn per_word(self) -> u32 {
        match self.bits() {
            32 => 1,
            16 => 2,
            8 => 4,
            4..=7 => 8,
            _ => 16,
        }
    }

    /// Bits of a channel.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        match self {
            Code::F32 => 32,
            Code::F16 | Code::Bf16 => 16,
            Code::Int8 | Code::E4m3 | Code::E5m2 => 8,
            Code::Int2 => 2,
            Code::Int3 => 3,
            Code::Int4 | Code::Mxfp4 | Code::Nvfp4 => 4,
            Code::Int5 => 5,
            Code::Int6 => 6,
        }
    }

    /// Bits of the plane that starts at bit `shift` of a code; none if `shift` is [`Code::bits`].
    ///
    /// A word holds codes of 32, 16, 8, 4, 2 or 1 bit. A code of another width is split into planes of these widths, the widest first:
    /// 3 bits are a plane of 2 and one of 1, 5 are 4 and 1, 6 are 4 and 2. `shift` is the sum of the bits of the planes before.
    #[inline(always)]
    pub const fn plane(self, shift: u32) -> Option<u32> {
        match self.bits() - shift {
            0 => None,
            left => Some((1 << 31) >> left.leading_zeros()),
        }
    }

    /// Form of the code's scales.
    #[inline(always)]
    pub const fn scale(self) -> Scale {
        match self {
            Code::F32 | Code::F16 | Code::Bf16 => Scale::None,
            Code::E4m3 | Code::E5m2 => Scale::Float,
            Code::Mxfp4 | Code::Nvfp4 => Scale::Block,
            Code::Int2 | Code::Int3 | Code::Int4 | Code::Int5 | Code::Int6 | Code::Int8 => Scale::Affine,
        }
    }

    /// Largest magnitude of a channel for which its code and its group's scale are finite.
    #[inline(always)]
    pub const fn limit(self) -> f32 {
        match self {
            Code::F32 | Code::E4m3 | Code::E5m2 | Code::Mxfp4 => f32::MAX,
            // The block's scale may be rounded up.
            Code::Nvfp4 => f32::MAX / 2.0,
            // The largest bfloat16.
            Code::Bf16 => f32::from_bits(0x7f7f_0000),
            // The largest f16: the code itself, or the scale and the minimum.
            _ => 65504.0,
        }
    }

    /// The largest code as a number: `2^bits - 1` of integers, 448, 57344, 6; 0 for codes without a scale.
    #[inline(always)]
    pub const fn top(self) -> f32 {
        match self {
            Code::F32 | Code::F16 | Code::Bf16 => 0.0,
            Code::E4m3 => 448.0,
            Code::E5m2 => 57344.0,
            Code::Mxfp4 | Code::Nvfp4 => 6.0,
            Code::Int2 => 3.0,
            Code::Int3 => 7.0,
            Code::Int4 => 15.0,
            Code::Int5 => 31.0,
            Code::Int6 => 63.0,
            Code::Int8 => 255.0,
        }
    }

    /// Usual name: `f32`, `f16`, `bf16`, `int8`, `int4`, `e4m3`, `e5m2`, `int2`, `int3`, `int5`, `int6`,
    /// `mxfp4`, `nvfp4`.
    pub const fn name(self) -> &'static str {
        match self {
            Code::F32 => "f32",
            Code::F16 => "f16",
            Code::Bf16 => "bf16",
            Code::Int8 => "int8",
            Code::Int4 => "int4",
            Code::E4m3 => "e4m3",
            Code::E5m2 => "e5m2",
            Code::Int2 => "int2",
            Code::Int3 => "int3",
            Code::Int5 => "int5",
            Code::Int6 => "int6",
            Code::Mxfp4 => "mxfp4",
            Code::Nvfp4 => "nvfp4",
        }
    }

    /// First bit in a word of code `j` of a plane of `bits` bits. Floats lie in order. Of integers, each four codes are the
    /// same bits of the four bytes, the first four the lowest: shifted and masked, they are bytes like 8-bit codes.
    #[inline(always)]
    pub const fn place(self, j: u32, bits: u32) -> u32 {
        match self.scale() {
            Scale::Affine => j % 4 * 8 + j / 4 * bits,
            _ => j * bits,
        }
    }

    /// Number coded by the low bits of `bits`, before any scale.
    pub fn decode(self, bits: u32) -> f32 {
        match self {
            Code::F32 => f32::from_bits(bits),
            Code::F16 => Dtype::F16.decode(bits & 0xffff),
            Code::Bf16 => Dtype::Bf16.decode(bits & 0xffff),
            Code::E4m3 => {
                f32::from_bits((bits & 0x80) << 24 | (bits & 0x7f) << 20) * f32::from_bits((127 + 120) << 23)
            }
            Code::E5m2 => {
                f32::from_bits((bits & 0x80) << 24 | (bits & 0x7f) << 21) * f32::from_bits((127 + 112) << 23)
            }
            Code::Mxfp4 | Code::Nvfp4 => {
                f32::from_bits((bits & 8) << 28 | (bits & 7) << 22) * f32::from_bits((127 + 126) << 23)
            }
            _ => (bits & (u32::MAX >> (32 - self.bits()))) as f32,
        }
    }

    /// Number coded by part `part` of each lane's word, exactly, before any scale; for a code of several planes, the first plane's
    /// share.
    #[inline(always)]
    pub fn part<W: Warp>(self, w: W, word: W::U, part: usize) -> W::F {
        match self {
            Code::Int8 => w.byte(word, part),
            Code::Int4 => w.nibble(word, part),
            Code::Int2 | Code::Int3 | Code::Int5 | Code::Int6 => {
                let bits = 32 / self.per_word();
                w.to_f(field(w, word, self.place(part as u32, bits), bits))
            }
            Code::Mxfp4 | Code::Nvfp4 => fp4(w, word, part),
            _ => self.float_part(w, word, part),
        }
    }

    /// [`Code::part`] for codes without a scale or with [`Scale::Float`]; compiled without the other codes.
    #[inline(always)]
    pub(super) fn float_part<W: Warp>(self, w: W, word: W::U, part: usize) -> W::F {
        match self {
            // Sign, exponent and mantissa, moved to their places in an f32, give the value times a power of two, subnormals
            // included.
            Code::E4m3 => {
                let placed = w.and(w.sra::<4>(topped(w, word, part)), w.splat_u(0x87f0_0000));
                w.mul(w.from_bits(placed), w.splat(f32::from_bits((127 + 120) << 23)))
            }
            Code::E5m2 => {
                let placed = w.and(w.sra::<3>(topped(w, word, part)), w.splat_u(0x8fe0_0000));
                w.mul(w.from_bits(placed), w.splat(f32::from_bits((127 + 112) << 23)))
            }
            _ => self.plain_part(w, word, part),
        }
    }

    /// [`Code::part`] for codes without a scale; compiled without the other codes.
    #[inline(always)]
    pub(super) fn plain_part<W: Warp>(self, w: W, word: W::U, part: usize) -> W::F {
        match self {
            Code::F32 => F32::channel(w, word, part),
            Code::F16 => F16::channel(w, word, part),
            _ => Bf16::channel(w, word, part),
        }
    }
}

/// Codes in blocks, with [`Scale::Block`].
impl Code {
    /// Blocks per 32 numbers, each with a scale: 1 or 2.
    #[inline(always)]
    pub const fn blocks(self) -> u32 {
        match self {
            Code::Nvfp4 => 2,
            _ => 1,
        }
    }

    /// Words before the scales of the blocks: 8, the first of them the f32 of [`Code::page_scale`], or 0.
    #[inline(always)]
    pub const fn page_words(self) -> u32 {
        match self {
            Code::Nvfp4 => 8,
            _ => 0,
        }
    }

    /// Scale that a page's blocks have in common; `most` is the page's largest magnitude. It is the least power of two under which
    /// the scales of the blocks are at most 448, the largest E4M3, and at least 2^-100; 1 for codes without a page scale.
    #[inline]
    pub fn page_scale(self, most: f32) -> f32 {
        if self.page_words() == 0 {
            return 1.0;
        }
        let exponent = ((most / (6.0 * 448.0)).to_bits() + 0x7f_ffff) >> 23;
        f32::from_bits(exponent.max(127 - 100) << 23)
    }

    /// Scale coded by a byte in a page whose scale is `page`.
    #[inline]
    pub fn block_scale(self, byte: u32, page: f32) -> f32 {
        match (self, byte) {
            (Code::Nvfp4, _) => Code::E4m3.decode(byte) * page,
            // 2^-127
            (_, 0) => f32::from_bits(1 << 22),
            _ => f32::from_bits(byte << 23),
        }
    }

    /// [`Code::block_scale`] of the bytes in the low bits.
    #[inline(always)]
    pub(super) fn block_scales<W: Warp>(self, w: W, bytes: W::U, page: f32) -> W::F {
        if self == Code::Nvfp4 {
            return w.mul(Code::E4m3.float_part(w, bytes, 0), w.splat(page));
        }
        let normal = w.ge_i(bytes, w.splat_u(1));
        w.select(normal, w.from_bits(w.shl::<23>(bytes)), w.from_bits(w.splat_u(1 << 22)))
    }
}

impl From<Dtype> for Code {
    fn from(dtype: Dtype) -> Code {
        match dtype {
            Dtype::F32 => Code::F32,
            Dtype::F16 => Code::F16,
            Dtype::Bf16 => Code::Bf16,
        }
    }
}

/// Bits `first..first + bits` of each word; `bits` is below 32.
#[inline(always)]
pub(super) fn field<W: Warp>(w: W, word: W::U, first: u32, bits: u32) -> W::U {
    w.and(shifted_right(w, word, first), w.splat_u((1 << bits) - 1))
}

/// Byte `part` of the word moved to the top.
#[inline(always)]
fn topped<W: Warp>(w: W, word: W::U, part: usize) -> W::U {
    match part {
        0 => w.shl::<24>(word),
        1 => w.shl::<16>(word),
        2 => w.shl::<8>(word),
        _ => word,
    }
}

/// FP4 number `part` of each lane's word: moved to the top, then decoded like FP8 numbers.
#[inline(always)]
pub(super) fn fp4<W: Warp>(w: W, word: W::U, part: usize) -> W::F {
    let top = match part {
        0 => w.shl::<28>(word),
        1 => w.shl::<24>(word),
        2 => w.shl::<20>(word),
        3 => w.shl::<16>(word),
        4 => w.shl::<12>(word),
        5 => w.shl::<8>(word),
        6 => w.shl::<4>(word),
        _ => word,
    };
    let placed = w.and(w.sra::<6>(top), w.splat_u(0x81c0_0000));
    w.mul(w.from_bits(placed), w.splat(f32::from_bits((127 + 126) << 23)))
}
