//! Values as llama.cpp's quantised caches give them back, to be compared with pikv's codes. A block is 32 channels of a head; llama.cpp
//! rotates other pairs of channels together than this engine, so its blocks are of other channels.

use half::f16;

/// Values of a block.
const BLOCK: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names that ggml gives them")]
pub enum Rounding {
    Q8_0,
    Q5_0,
    Q4_0,
}

impl Rounding {
    pub const fn name(self) -> &'static str {
        match self {
            Rounding::Q8_0 => "q8_0",
            Rounding::Q5_0 => "q5_0",
            Rounding::Q4_0 => "q4_0",
        }
    }

    /// Bytes of `values` values, a multiple of 32: the integers, and a scale of 16 bits a block.
    pub const fn bytes(self, values: usize) -> usize {
        let bits = match self {
            Rounding::Q8_0 => 8,
            Rounding::Q5_0 => 5,
            Rounding::Q4_0 => 4,
        };
        values / BLOCK * (bits * BLOCK / 8 + 2)
    }

    /// Replaces values, whole blocks, with what is read back of them.
    pub fn round(self, values: &mut [f32]) {
        for block in values.as_chunks_mut::<BLOCK>().0 {
            match self {
                Rounding::Q8_0 => {
                    let scale = block.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
                    scaled(block, scale, |x| x.round());
                }
                Rounding::Q5_0 => from_largest(block, 16.0),
                Rounding::Q4_0 => from_largest(block, 8.0),
            }
        }
    }
}

/// Integers from `-half` to `half - 1`; the value of largest magnitude is `-half` times the scale.
fn from_largest(block: &mut [f32; BLOCK], half: f32) {
    let largest = block.iter().fold(0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    scaled(block, largest / -half, |x| (x + half + 0.5).trunc().min(2.0 * half - 1.0) - half);
}

/// `integer` rounds a value over the scale; the scale that multiplies it again is in f16.
fn scaled(block: &mut [f32; BLOCK], scale: f32, integer: impl Fn(f32) -> f32) {
    let over = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = f16::from_f32(scale).to_f32();
    block.iter_mut().for_each(|x| *x = integer(*x * over) * stored);
}
