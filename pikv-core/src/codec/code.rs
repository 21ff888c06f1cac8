//! How a channel is coded in the words of a packed page.

use crate::dtype::{Bf16, Dtype, Element, F16, F32};
use crate::warp::Warp;

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
    /// Four integers 0..=255 a word, with a scale and a minimum a group.
    Int8,
    /// Eight integers 0..=15 a word, with a scale and a minimum a group.
    Int4,
    /// Four FP8 numbers of 4 exponent and 3 mantissa bits a word (OCP E4M3: no infinity, at most 448), with a scale a group.
    E4m3,
    /// Four FP8 numbers of 5 exponent and 2 mantissa bits a word (OCP E5M2, at most 57344), with a scale a group.
    E5m2,
}

/// What a group's scale word holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// There is none: a code is the value.
    None,
    /// An f32 that a code is multiplied by.
    Float,
    /// Two f16: the scale in the low half, the minimum in the high one; a value is `scale * code + minimum`.
    Affine,
}

impl Code {
    /// All codes.
    pub const ALL: [Code; 7] =
        [Code::F32, Code::F16, Code::Bf16, Code::Int8, Code::Int4, Code::E4m3, Code::E5m2];

    /// Its index in [`Code::ALL`].
    #[inline]
    pub const fn index(self) -> u32 {
        match self {
            Code::F32 => 0,
            Code::F16 => 1,
            Code::Bf16 => 2,
            Code::Int8 => 3,
            Code::Int4 => 4,
            Code::E4m3 => 5,
            Code::E5m2 => 6,
        }
    }

    /// Channels in a word.
    #[inline]
    pub const fn per_word(self) -> u32 {
        match self {
            Code::F32 => 1,
            Code::F16 | Code::Bf16 => 2,
            Code::Int8 | Code::E4m3 | Code::E5m2 => 4,
            Code::Int4 => 8,
        }
    }

    /// Bits of a channel.
    #[inline]
    pub const fn bits(self) -> u32 {
        32 / self.per_word()
    }

    /// The form of its scales.
    #[inline]
    pub const fn scale(self) -> Scale {
        match self {
            Code::F32 | Code::F16 | Code::Bf16 => Scale::None,
            Code::E4m3 | Code::E5m2 => Scale::Float,
            Code::Int8 | Code::Int4 => Scale::Affine,
        }
    }

    /// The largest magnitude that a channel may have, so that its code and its group's scale are finite.
    #[inline]
    pub const fn limit(self) -> f32 {
        match self {
            Code::F32 | Code::E4m3 | Code::E5m2 => f32::MAX,
            Code::F16 | Code::Int8 | Code::Int4 => 65504.0,
            // The largest bfloat16.
            Code::Bf16 => f32::from_bits(0x7f7f_0000),
        }
    }

    /// The largest code as a number: 15, 255, 448, 57344; 0 for codes without a scale.
    #[inline]
    pub const fn top(self) -> f32 {
        match self {
            Code::F32 | Code::F16 | Code::Bf16 => 0.0,
            Code::Int8 => 255.0,
            Code::Int4 => 15.0,
            Code::E4m3 => 448.0,
            Code::E5m2 => 57344.0,
        }
    }

    /// The field's name for it: `f32`, `f16`, `bf16`, `int8`, `int4`, `e4m3`, `e5m2`.
    pub const fn name(self) -> &'static str {
        match self {
            Code::F32 => "f32",
            Code::F16 => "f16",
            Code::Bf16 => "bf16",
            Code::Int8 => "int8",
            Code::Int4 => "int4",
            Code::E4m3 => "e4m3",
            Code::E5m2 => "e5m2",
        }
    }

    /// Where code `j` of a word lies, counted in codes from the low bits. Of 4-bit codes the first four are the low halves of the
    /// bytes, the others the high halves: masked, they are bytes as 8-bit codes are.
    #[inline(always)]
    pub const fn place(self, j: u32) -> u32 {
        match self {
            Code::Int4 => j % 4 * 2 + j / 4,
            _ => j,
        }
    }

    /// The number that the low bits of `bits` code, before any scale.
    pub fn decode(self, bits: u32) -> f32 {
        match self {
            Code::F32 => f32::from_bits(bits),
            Code::F16 => Dtype::F16.decode(bits & 0xffff),
            Code::Bf16 => Dtype::Bf16.decode(bits & 0xffff),
            Code::Int8 => (bits & 0xff) as f32,
            Code::Int4 => (bits & 0xf) as f32,
            Code::E4m3 => {
                f32::from_bits((bits & 0x80) << 24 | (bits & 0x7f) << 20) * f32::from_bits((127 + 120) << 23)
            }
            Code::E5m2 => {
                f32::from_bits((bits & 0x80) << 24 | (bits & 0x7f) << 21) * f32::from_bits((127 + 112) << 23)
            }
        }
    }

    /// The number that part `part` of each lane's word codes, exactly, before any scale.
    #[inline(always)]
    pub fn part<W: Warp>(self, w: W, word: W::U, part: usize) -> W::F {
        match self {
            Code::F32 => F32::channel(w, word, part),
            Code::F16 => F16::channel(w, word, part),
            Code::Bf16 => Bf16::channel(w, word, part),
            Code::Int8 => w.byte(word, part),
            Code::Int4 => w.nibble(word, part),
            // Sign, exponent and mantissa moved to their places in an f32 have the value times a power of two, subnormals
            // included.
            Code::E4m3 => {
                let placed = w.and(w.sra::<4>(topped(w, word, part)), w.splat_u(0x87f0_0000));
                w.mul(w.from_bits(placed), w.splat(f32::from_bits((127 + 120) << 23)))
            }
            Code::E5m2 => {
                let placed = w.and(w.sra::<3>(topped(w, word, part)), w.splat_u(0x8fe0_0000));
                w.mul(w.from_bits(placed), w.splat(f32::from_bits((127 + 112) << 23)))
            }
        }
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
