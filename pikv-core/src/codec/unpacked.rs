//! Reads single tokens of a packed page.

use super::code::{Code, Scale};
use super::packed::{BYTES, Packed, Side, TAGS};
use crate::page::{PAGE, Position};

impl Packed {
    /// Position of the token at `lane`; `last` is the position of the page's last token.
    pub fn position(&self, words: &[u32], lane: u32, last: u32) -> Position {
        let low = words[lane as usize % TAGS as usize] >> (lane / TAGS * 16) & 0xffff;
        Position(last - (last.wrapping_sub(low) & 0xffff))
    }

    /// Reads the key at `lane`, scales applied: the stored channels, or those that a mean or a basis gives.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn read_key(&self, words: &[u32], lane: u32, key: &mut [f32]) {
        let row = |slot, c| {
            let (word, part) = self.k_table_at(slot, c);
            let code = self.k_table_code();
            code.decode(words[word as usize] >> (part * code.bits()))
        };
        match self.k_side {
            Side::Tokens => self.read_stored_key(words, lane, key),
            Side::Means { level } => {
                (0..).zip(&mut key[..self.k_dim as usize]).for_each(|(c, x)| *x = row(lane >> level, c));
            }
            Side::Basis { wide } => {
                let mut stored = [0.0; PAGE as usize];
                self.read_stored_key(words, lane, &mut stored);
                widened(&stored[..self.k_dim as usize], row, &mut key[..wide as usize]);
            }
        }
    }

    fn read_stored_key(&self, words: &[u32], lane: u32, key: &mut [f32]) {
        for (c, x) in (0u32..).zip(&mut key[..self.k_dim as usize]) {
            let mut first = self.k_base();
            let code = self.k.whole(|bits, _| {
                let (word, n) = (first + c / (32 / bits) * PAGE + lane, 32 / bits);
                first += self.k_plane_words(bits) * PAGE;
                words[word as usize] >> self.k.place(c % n, bits)
            });
            *x = self.k.value(code, || self.k_scale(words, lane, c));
        }
    }

    /// Reads the value at `lane`, scales applied: the stored channels, or those that a mean or a basis gives.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn read_value(&self, words: &[u32], lane: u32, value: &mut [f32]) {
        let out = self.v_out();
        let row = |row, c| {
            let (word, part) = out.row_at(row, c);
            out.v.decode(words[(self.v_table() + word) as usize] >> (part * out.v.bits()))
        };
        match self.v_side {
            Side::Tokens => self.read_stored_value(words, lane, value),
            Side::Means { level } => {
                (0..).zip(&mut value[..self.v_dim as usize]).for_each(|(c, x)| *x = row(lane >> level, c));
            }
            Side::Basis { wide } => {
                let mut stored = [0.0; PAGE as usize];
                self.read_stored_value(words, lane, &mut stored);
                widened(&stored[..self.v_dim as usize], row, &mut value[..wide as usize]);
            }
        }
    }

    fn read_stored_value(&self, words: &[u32], lane: u32, value: &mut [f32]) {
        let (base, stride) = (self.v_base(), self.v_stride());
        for (c, x) in (0u32..).zip(&mut value[..self.v_dim as usize]) {
            let code = self.v.whole(|bits, shift| {
                let tokens = 32 / bits;
                if self.v_across() {
                    let row = shift + lane / tokens;
                    words[(base + row * stride + c) as usize] >> self.v.place(lane % tokens, bits)
                } else {
                    words[(base + lane * stride + c % stride) as usize] >> (c / stride * bits)
                }
            });
            *x = self.v.value(code, || self.v_scale(words, lane, c));
        }
    }

    /// Scale word of channel `c` of the key at `lane`; for a block scale, the bits of the f32 that its byte codes.
    pub(super) fn k_scale(&self, words: &[u32], lane: u32, c: u32) -> u32 {
        match self.k.scale() {
            Scale::Block => {
                let block = c / PAGE * self.k.blocks() + lane * self.k.blocks() / PAGE;
                self.k.block_word(&words[self.k_scales() as usize..], block, c % PAGE)
            }
            _ => words[(self.k_scales() + c) as usize],
        }
    }

    /// Scale word of channel `c` of the value at `lane`, likewise.
    fn v_scale(&self, words: &[u32], lane: u32, c: u32) -> u32 {
        match self.v.scale() {
            Scale::Block => self.v.block_word(&words[self.v_scales() as usize..], self.v_group(c), lane),
            _ => words[(self.v_scales() + self.v_group(c) * PAGE + lane) as usize],
        }
    }
}

/// Coefficients times their basis, plus the mean. `row(k, c)` is channel `c` of basis vector `k`; the mean is the row after them.
/// Each channel is a chain of fused multiply-adds from 0, then a sum.
fn widened(stored: &[f32], row: impl Fn(u32, u32) -> f32, out: &mut [f32]) {
    for (c, out) in (0..).zip(out) {
        let terms = (0..).zip(stored);
        let sum = terms.fold(0.0, |sum, (k, x)| crate::portable::fma(*x, row(k, c), sum));
        *out = sum + row(stored.len() as u32, c);
    }
}

impl Code {
    /// Bits of the scale coded by byte `i` of block `block`; the scales start with `words`.
    fn block_word(self, words: &[u32], block: u32, i: u32) -> u32 {
        let page = if self.page_words() == 0 { 1.0 } else { f32::from_bits(words[0]) };
        let word = words[(self.page_words() + block * BYTES + i / 4) as usize];
        self.block_scale(word >> (i % 4 * 8) & 0xff, page).to_bits()
    }

    /// Bits of a code; `word(bits, shift)` has in its low bits those of the plane at `shift`.
    fn whole(self, mut word: impl FnMut(u32, u32) -> u32) -> u32 {
        let (mut code, mut shift) = (0, 0);
        while let Some(bits) = self.plane(shift) {
            code |= (word(bits, shift) & (u32::MAX >> (32 - bits))) << shift;
            shift += bits;
        }
        code
    }

    /// Value of the code `bits` under the scale word of its group.
    fn value(self, bits: u32, scale: impl Fn() -> u32) -> f32 {
        let code = self.decode(bits);
        match self.scale() {
            Scale::None => code,
            Scale::Float | Scale::Block => code * f32::from_bits(scale()),
            Scale::Affine => {
                let word = scale();
                crate::portable::fma(code, Code::F16.decode(word), Code::F16.decode(word >> 16))
            }
        }
    }
}
