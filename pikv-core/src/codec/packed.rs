//! Where everything lies in a packed page.
//!
//! ```text
//! [16 words]                  low halves of the positions: token i in the low half of word i, token 16 + i in the high one
//! [k_cols][32] words          K scales, one a channel (none if the code has none)
//! [k_rows][32] words          K: lane = token, as in a full page
//! [v_groups][32] words        V scales: lane = token, a row a group of channels (none if the code has none)
//! [v_rows][v_stride] words    V, float codes: a row a token; part j of word w is channel j * v_stride + w
//!                             V, integers: a row 4 tokens (int4: 8); code j of word w is channel w of token j of them
//! ```
//! A K group is a channel of the 32 tokens, a V group about 32 channels of a token (KIVI, arXiv 2402.02750). A group's scale is
//! multiplied into the softmax weight of the token, once for the group, and no code is scaled one by one. So parts of a float word
//! of V lie `v_stride` channels apart: a group is whole parts. A word of integers is codes of one channel, as many tokens as a
//! product of bytes adds at once ([`Warp::dot4`](crate::warp::Warp::dot4)), and a group 32 words.
//!
//! Codes of a word lie in order from the low bits, of int4 as [`Code::place`] says.
//!
//! Positions are whole again with the last of them, which is kept beside the page; a page whose tokens span more than
//! 65,536 positions cannot be packed ([`Packed::spans`]).

use super::code::{Code, Scale};
use crate::page::{MAX_DIM, PAGE, Position};
use crate::warp::LANES;

/// Words of a packed page that hold positions.
pub const TAGS: u32 = PAGE / 2;

/// Scale groups of a value at most.
pub const V_GROUPS: usize = 8;

/// Groups of 32 channels of a key at most.
pub const K_COLS: usize = MAX_DIM as usize / LANES;

/// Widths and codes of one head's packed pages, from which every address follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Packed {
    /// Stored channels of a key, 1..=256.
    pub k_dim: u32,
    /// Stored channels of a value, 1..=256.
    pub v_dim: u32,
    /// Code of K.
    pub k: Code,
    /// Code of V.
    pub v: Code,
}

impl Packed {
    /// The layout of `k_dim` and `v_dim` stored channels.
    #[inline]
    pub const fn new(k_dim: u32, v_dim: u32, k: Code, v: Code) -> Packed {
        Packed { k_dim, v_dim, k, v }
    }

    /// Whether 32 tokens from position `first` to `last` can share a packed page.
    #[inline]
    pub const fn spans(first: u32, last: u32) -> bool {
        last - first <= u16::MAX as u32
    }

    /// Rows of 32 words that K takes.
    #[inline]
    pub const fn k_rows(&self) -> u32 {
        self.k_dim.div_ceil(self.k.per_word())
    }

    /// Groups of 32 channels that a query is read in.
    #[inline]
    pub const fn k_cols(&self) -> u32 {
        (self.k_rows() * self.k.per_word()).div_ceil(PAGE)
    }

    /// Rows of 32 words that K's scales take.
    #[inline]
    pub const fn k_scale_rows(&self) -> u32 {
        match self.k.scale() {
            Scale::None => 0,
            _ => self.k_cols(),
        }
    }

    /// First word of K's scales.
    #[inline]
    pub const fn k_scales(&self) -> u32 {
        TAGS
    }

    /// First word of K.
    #[inline]
    pub const fn k_base(&self) -> u32 {
        TAGS + self.k_scale_rows() * PAGE
    }

    /// Tokens whose codes share a word of V.
    #[inline]
    pub const fn v_tokens(&self) -> u32 {
        match self.v.scale() {
            Scale::Affine => self.v.per_word(),
            _ => 1,
        }
    }

    /// Words from one row of V to the next: enough for a value's channels, and 4, 8, 16 or a multiple of 8.
    #[inline]
    pub const fn v_stride(&self) -> u32 {
        match self.v_dim.div_ceil(self.v.per_word() / self.v_tokens()) {
            words if self.v_tokens() > 1 => words.next_multiple_of(8),
            0..=4 => 4,
            words @ 5..=16 => words.next_power_of_two(),
            words => words.next_multiple_of(8),
        }
    }

    /// Words of 32 that are one row's: the stride where the lanes read several rows at once, else 32.
    #[inline]
    pub const fn v_words(&self) -> u32 {
        match self.v_stride() {
            words @ 0..=16 if self.v_tokens() == 1 => words,
            _ => PAGE,
        }
    }

    /// Groups of 32 words that a row of V is read in.
    #[inline]
    pub const fn v_cols(&self) -> u32 {
        self.v_stride().div_ceil(PAGE)
    }

    /// Parts of a word of V that hold channels.
    #[inline]
    pub const fn v_parts(&self) -> u32 {
        self.v_dim.div_ceil(self.v_stride())
    }

    /// Parts that share a scale: about 32 channels.
    #[inline]
    pub const fn v_group_parts(&self) -> u32 {
        match self.v_stride() {
            words @ 0..=16 => PAGE / words,
            _ => 1,
        }
    }

    /// Scale groups of a value in one group of 32 words.
    #[inline]
    pub const fn v_col_groups(&self) -> u32 {
        self.v_parts().div_ceil(self.v_group_parts())
    }

    /// Rows of 32 words that V's scales take.
    #[inline]
    pub const fn v_scale_rows(&self) -> u32 {
        match self.v.scale() {
            Scale::None => 0,
            _ => self.v_cols() * self.v_col_groups(),
        }
    }

    /// First word of V's scales.
    #[inline]
    pub const fn v_scales(&self) -> u32 {
        self.k_base() + self.k_rows() * PAGE
    }

    /// First word of V.
    #[inline]
    pub const fn v_base(&self) -> u32 {
        self.v_scales() + self.v_scale_rows() * PAGE
    }

    /// Words of a page.
    #[inline]
    pub const fn words(&self) -> u32 {
        self.v_base() + self.v_stride() * (PAGE / self.v_tokens())
    }

    /// Bytes of a page: codes, scales, positions and padding.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        self.words() as u64 * 4
    }

    /// Rows of 32 f32 that hold one query row's output while it is summed: row `col * v_parts + j` has, in lane `i`, channel
    /// `j * v_stride + col * 32 + i`.
    #[inline]
    pub const fn acc_rows(&self) -> u32 {
        self.v_cols() * self.v_parts()
    }

    /// Where channel `c` of V is summed: the acc row and the lane in it.
    #[inline]
    pub const fn acc_place(&self, c: u32) -> (u32, u32) {
        let (part, word) = (c / self.v_stride(), c % self.v_stride());
        (word / PAGE * self.v_parts() + part, word % PAGE)
    }

    /// The scale group of channel `c` of V.
    #[inline]
    pub const fn v_group(&self, c: u32) -> u32 {
        let (part, word) = (c / self.v_stride(), c % self.v_stride());
        word / PAGE * self.v_col_groups() + part / self.v_group_parts()
    }

    /// Word `i` of the [`TAGS`] of the tokens at `positions`, 1 to 32; lanes that have no token repeat the last.
    ///
    /// # Panics
    /// If there are no positions.
    #[inline(always)]
    pub fn tag(positions: &[u32], i: usize) -> u32 {
        let last = positions.len() - 1;
        positions[i.min(last)] & 0xffff | positions[(TAGS as usize + i).min(last)] << 16
    }

    /// Position of the token at `lane`; `last` is the page's last.
    pub fn position(&self, words: &[u32], lane: u32, last: u32) -> Position {
        let low = words[lane as usize % TAGS as usize] >> (lane / TAGS * 16) & 0xffff;
        Position(last - (last.wrapping_sub(low) & 0xffff))
    }

    /// Reads the stored channels of the key at `lane`, scales applied, `k_dim` of them.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn read_key(&self, words: &[u32], lane: u32, key: &mut [f32]) {
        let n = self.k.per_word();
        for (c, x) in (0u32..).zip(&mut key[..self.k_dim as usize]) {
            let word = words[(self.k_base() + c / n * PAGE + lane) as usize];
            let bits = word >> (self.k.place(c % n) * self.k.bits());
            *x = self.k.value(bits, || words[(self.k_scales() + c) as usize]);
        }
    }

    /// Reads the stored channels of the value at `lane`, scales applied, `v_dim` of them.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn read_value(&self, words: &[u32], lane: u32, value: &mut [f32]) {
        let (stride, tokens) = (self.v_stride(), self.v_tokens());
        for (c, x) in (0u32..).zip(&mut value[..self.v_dim as usize]) {
            let word = words[(self.v_base() + lane / tokens * stride + c % stride) as usize];
            let part = if tokens > 1 { self.v.place(lane % tokens) } else { c / stride };
            let bits = word >> (part * self.v.bits());
            *x = self
                .v
                .value(bits, || words[(self.v_scales() + self.v_group(c) * LANES as u32 + lane) as usize]);
        }
    }
}

impl Code {
    /// The value of coded bits under the scale word of their group.
    fn value(self, bits: u32, scale: impl Fn() -> u32) -> f32 {
        let code = self.decode(bits);
        match self.scale() {
            Scale::None => code,
            Scale::Float => code * f32::from_bits(scale()),
            Scale::Affine => {
                let word = scale();
                crate::portable::fma(code, Code::F16.decode(word), Code::F16.decode(word >> 16))
            }
        }
    }
}
