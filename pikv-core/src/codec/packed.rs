//! Layout of a packed page.
//!
//! ```text
//! [16 words]                  low halves of the positions: token i in the low half of word i, token 16 + i in the high one
//! [k_cols][32] words          K scales, one a channel (none if the code has none; below for codes in blocks)
//! [k_rows][32] words          K: lane = token, as in a full page; of codes of several planes, the rows of one after those of the other
//! [v_groups][32] words        V scales: lane = token, a row a group of channels (none if the code has none; below for codes in blocks)
//! [v_rows][v_stride] words    V, float codes: a row a token; part j of word w is channel j * v_stride + w
//!                             V, others: each row has as many tokens as a word has codes; planes lie one after the other;
//!                             code j of word w is channel w of token j of them
//! ```
//! A K group is a channel of the 32 tokens, a V group about 32 channels of a token (KIVI, arXiv 2402.02750). A group's scale is
//! multiplied into the softmax weight of the token, once for the group; codes are not scaled one by one. So each part of a row of V has one
//! scale: a group of a float code is one part of all words of a row, channels that lie side by side, and parts lie `v_stride` channels
//! apart. A word of integers has codes of one channel, for as many tokens as one product of bytes adds
//! ([`Warp::dot4`](crate::warp::Warp::dot4)), and a group is 32 words.
//!
//! [`Code::place`] gives the bits of each code in a word, [`Code::plane`] the planes.
//!
//! K or V can be two [factors](Side) instead: [`factors`](super::factors) describes how they are read.
//!
//! ```text
//! means:  K is [k_rows][32] words of the means' channels, as a table (below) of `PAGE >> level` slots; V is a row a mean
//! basis:  K and V as above, of coefficients; after each the basis in f16 and the mean as its last row: K's as a table of k_slots
//!         slots, V's as [v_table_rows][v_table stride] words, as V of an f16 code lies
//! table:  lane j * slots + i of row w is word w * (32 / slots) + j of slot i's channels
//! ```
//!
//! Codes in blocks have a byte for the scale of each block instead, four to a word. A block of K is a channel of 32 tokens, or of
//! 16 (lanes 0..16 or lanes 16..32); a block of V is 32 or 16 channels of a token.
//!
//! ```text
//! [8] words                   the page's scale and seven zeros, for codes that have one
//! [k_cols][blocks][8] words   K: byte c of them is the scale of channel c of 32, of one half of the tokens and then of the other
//! [v_cols][blocks][8] words   V: byte t of them is the scale of token t
//! ```
//!
//! The last position is kept beside the page and gives the high halves of the others; a page whose tokens span more than
//! 65,536 positions cannot be packed ([`Packed::spans`]).

use super::code::{Code, Scale};
use crate::page::{MAX_DIM, PAGE};
use crate::warp::LANES;

/// Words of a packed page that hold positions.
pub const TAGS: u32 = PAGE / 2;

/// Words of the scales of 32 blocks.
pub(super) const BYTES: u32 = PAGE / 4;

/// Most scale groups of a value.
pub const V_GROUPS: usize = 8;

/// Most groups of 32 channels of a key.
pub const K_COLS: usize = MAX_DIM as usize / LANES;

/// Meaning of the rows of K or V in a packed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Side {
    /// One token each.
    Tokens,
    /// The mean of a run of `2^level` tokens each, level 1..=3, in a code without a scale. Every token of a run is read as its mean.
    Means {
        /// Log2 of the tokens per mean.
        level: u32,
    },
    /// One token each, as coefficients (at most 31) in a basis that the page stores.
    Basis {
        /// Channels of a basis vector and of the mean, 1..=256.
        wide: u32,
    },
}

/// Widths and codes of one head's packed pages; they determine every address.
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
    /// Meaning of the rows of K.
    pub k_side: Side,
    /// Meaning of the rows of V.
    pub v_side: Side,
}

impl Packed {
    /// A layout with `k_dim` and `v_dim` stored channels of every token.
    #[inline(always)]
    pub const fn new(k_dim: u32, v_dim: u32, k: Code, v: Code) -> Packed {
        Packed { k_dim, v_dim, k, v, k_side: Side::Tokens, v_side: Side::Tokens }
    }

    /// This layout with rows of other meanings.
    #[inline(always)]
    pub const fn sides(mut self, k: Side, v: Side) -> Packed {
        (self.k_side, self.v_side) = (k, v);
        self
    }

    /// Whether K or V is stored as two factors.
    #[inline(always)]
    pub const fn factored(&self) -> bool {
        !matches!((self.k_side, self.v_side), (Side::Tokens, Side::Tokens))
    }

    /// Whether 32 tokens from position `first` to `last` can share a packed page.
    #[inline(always)]
    pub const fn spans(first: u32, last: u32) -> bool {
        last - first <= u16::MAX as u32
    }

    /// Words of a row of K.
    #[inline(always)]
    const fn k_words(&self) -> u32 {
        // The first plane, and the second if there is one.
        let first = 32 / self.k.per_word();
        self.k_plane_words(first) + self.k_plane_words(self.k.bits() - first)
    }

    /// Words of a row of K in a plane of `bits` bits.
    #[inline(always)]
    pub(super) const fn k_plane_words(&self, bits: u32) -> u32 {
        (self.k_dim * bits).div_ceil(32)
    }

    /// Rows of 32 words that K takes, without its basis.
    #[inline(always)]
    pub(super) const fn k_rows(&self) -> u32 {
        match self.k_side {
            Side::Means { level } => self.k_words().div_ceil(1 << level),
            _ => self.k_words(),
        }
    }

    /// Groups of 32 stored channels of a key.
    #[inline(always)]
    pub(super) const fn k_cols(&self) -> u32 {
        self.k_dim.div_ceil(PAGE)
    }

    /// Channels of a query for these keys.
    #[inline(always)]
    pub const fn query_dim(&self) -> u32 {
        match self.k_side {
            Side::Basis { wide } => wide,
            _ => self.k_dim,
        }
    }

    /// Groups of 32 channels of a query for these keys.
    #[inline(always)]
    pub const fn query_cols(&self) -> u32 {
        self.query_dim().div_ceil(PAGE)
    }

    /// Slots of K's table: means, or basis vectors and the mean after them.
    #[inline(always)]
    pub(super) const fn k_slots(&self) -> u32 {
        match self.k_side {
            Side::Tokens => PAGE,
            Side::Means { level } => PAGE >> level,
            Side::Basis { .. } => match (self.k_dim + 1).next_power_of_two() {
                0..=4 => 4,
                slots => slots,
            },
        }
    }

    /// Code of K's table.
    #[inline(always)]
    pub(super) const fn k_table_code(&self) -> Code {
        match self.k_side {
            Side::Basis { .. } => Code::F16,
            _ => self.k,
        }
    }

    /// First word of K's table.
    #[inline(always)]
    pub(super) const fn k_table(&self) -> u32 {
        match self.k_side {
            Side::Basis { .. } => self.k_base() + self.k_rows() * PAGE,
            _ => self.k_base(),
        }
    }

    /// Rows of 32 words of K's table.
    #[inline(always)]
    pub(super) const fn k_table_rows(&self) -> u32 {
        match self.k_side {
            Side::Basis { wide } => wide.div_ceil(Code::F16.per_word()).div_ceil(PAGE / self.k_slots()),
            _ => self.k_rows(),
        }
    }

    /// Place of channel `c` of slot `slot` of K's table: the word, and the part in it.
    #[inline(always)]
    pub(super) const fn k_table_at(&self, slot: u32, c: u32) -> (u32, u32) {
        let (n, together) = (self.k_table_code().per_word(), PAGE / self.k_slots());
        let (word, part) = (c / n, c % n);
        (self.k_table() + word / together * PAGE + word % together * self.k_slots() + slot, part)
    }

    /// Words that K's scales take.
    #[inline(always)]
    pub(super) const fn k_scale_words(&self) -> u32 {
        match self.k.scale() {
            Scale::None => 0,
            Scale::Block => self.k.page_words() + self.k_cols() * self.k.blocks() * BYTES,
            _ => self.k_cols() * PAGE,
        }
    }

    /// First word of K's scales.
    #[inline(always)]
    pub(super) const fn k_scales(&self) -> u32 {
        TAGS
    }

    /// First word of K.
    #[inline(always)]
    pub(super) const fn k_base(&self) -> u32 {
        TAGS + self.k_scale_words()
    }

    /// Whether a word of V has codes of one channel of several tokens.
    #[inline(always)]
    pub(super) const fn v_across(&self) -> bool {
        matches!(self.v.scale(), Scale::Affine | Scale::Block)
    }

    /// Words from one row of V to the next: enough for a value's channels, and 4, 8, 16 or a multiple of 8.
    #[inline(always)]
    pub(super) const fn v_stride(&self) -> u32 {
        if self.v_across() {
            return self.v_dim.next_multiple_of(8);
        }
        match self.v_dim.div_ceil(self.v.per_word()) {
            0..=4 => 4,
            words @ 5..=16 => words.next_power_of_two(),
            words => words.next_multiple_of(8),
        }
    }

    /// Words of 32 that belong to one row: the stride if the lanes read several rows at once, else 32.
    #[inline(always)]
    pub(super) const fn v_words(&self) -> u32 {
        match self.v_stride() {
            words @ 0..=16 if !self.v_across() => words,
            _ => PAGE,
        }
    }

    /// Groups of 32 words in a row of V.
    #[inline(always)]
    pub(super) const fn v_cols(&self) -> u32 {
        self.v_stride().div_ceil(PAGE)
    }

    /// Parts of a word of V that hold channels.
    #[inline(always)]
    pub(super) const fn v_parts(&self) -> u32 {
        self.v_dim.div_ceil(self.v_stride())
    }

    /// Parts that share a scale: about 32 channels.
    #[inline(always)]
    pub(super) const fn v_group_parts(&self) -> u32 {
        match self.v_stride() {
            // A power of two. (A device's compiler may hoist a division to where the stride differs, and divide by 0.)
            words @ 0..=16 => PAGE >> words.trailing_zeros(),
            _ => 1,
        }
    }

    /// Scale groups of a value in one group of 32 words.
    #[inline(always)]
    pub(super) const fn v_col_groups(&self) -> u32 {
        self.v_parts().div_ceil(self.v_group_parts())
    }

    /// Groups of channels of a value that have a scale.
    #[inline(always)]
    pub(super) const fn v_groups(&self) -> u32 {
        match self.v.scale() {
            Scale::None => 0,
            Scale::Block => self.v_cols() * self.v.blocks(),
            _ => self.v_cols() * self.v_col_groups(),
        }
    }

    /// Words that V's scales take.
    #[inline(always)]
    pub(super) const fn v_scale_words(&self) -> u32 {
        match self.v.scale() {
            Scale::Block => self.v.page_words() + self.v_groups() * BYTES,
            _ => self.v_groups() * PAGE,
        }
    }

    /// First word of V's scales.
    #[inline(always)]
    pub(super) const fn v_scales(&self) -> u32 {
        self.k_table() + self.k_table_rows() * PAGE
    }

    /// First word of V.
    #[inline(always)]
    pub(super) const fn v_base(&self) -> u32 {
        self.v_scales() + self.v_scale_words()
    }

    /// Rows of V, without its basis: means, or rows for all tokens; a multiple of the rows that the lanes read at once.
    #[inline(always)]
    pub(super) const fn v_rows(&self) -> u32 {
        match self.v_side {
            Side::Means { level } => (PAGE >> level).next_multiple_of(PAGE / self.v_words()),
            // 32 bits of a channel fill a word.
            _ if self.v_across() => self.v.bits(),
            _ => PAGE,
        }
    }

    /// Layout of V's table and of the output sums, as V of this layout: V itself unless it has a basis.
    #[inline(always)]
    pub const fn v_out(&self) -> Packed {
        match self.v_side {
            Side::Basis { wide } => Packed::new(1, wide, Code::F32, Code::F16),
            _ => Packed::new(1, self.v_dim, Code::F32, self.v),
        }
    }

    /// First word of V's table: rows of [`Packed::v_out`]'s stride.
    #[inline(always)]
    pub(super) const fn v_table(&self) -> u32 {
        match self.v_side {
            Side::Basis { .. } => self.v_base() + self.v_stride() * self.v_rows(),
            _ => self.v_base(),
        }
    }

    /// Rows of V's table.
    #[inline(always)]
    pub(super) const fn v_table_rows(&self) -> u32 {
        match self.v_side {
            Side::Basis { .. } => (self.v_dim + 1).next_multiple_of(PAGE / self.v_out().v_words()),
            _ => self.v_rows(),
        }
    }

    /// Words of a page.
    #[inline(always)]
    pub const fn words(&self) -> u32 {
        self.v_table() + self.v_out().v_stride() * self.v_table_rows()
    }

    /// Bytes of a page: codes, scales, positions and padding.
    #[inline(always)]
    pub const fn bytes(&self) -> u64 {
        self.words() as u64 * 4
    }

    /// Multiply-adds of a query row per token, for key and value, on average over a page.
    pub const fn products(&self) -> u32 {
        let k = match self.k_side {
            Side::Tokens => self.k_dim,
            Side::Means { level } => self.k_dim >> level,
            Side::Basis { wide } => self.k_dim + self.k_slots() * wide / PAGE,
        };
        k + match self.v_side {
            Side::Tokens => self.v_dim,
            Side::Means { level } => self.v_dim >> level,
            Side::Basis { wide } => self.v_dim + self.v_table_rows() * wide / PAGE,
        }
    }

    /// Rows of 32 f32 in which one query row's output is summed: lane `i` of row `col * v_parts + j` is channel
    /// `j * v_stride + col * 32 + i`.
    #[inline(always)]
    pub const fn acc_rows(&self) -> u32 {
        self.v_out().stored_acc_rows()
    }

    /// [`acc_rows`](Packed::acc_rows) of the stored channels.
    #[inline(always)]
    pub(super) const fn stored_acc_rows(&self) -> u32 {
        self.v_cols() * self.v_parts()
    }

    /// Channels of an output row.
    #[inline(always)]
    pub const fn out_dim(&self) -> u32 {
        self.v_out().v_dim
    }

    /// Place where channel `c` of an output row is summed: the acc row and the lane in it.
    #[inline(always)]
    pub const fn acc_place(&self, c: u32) -> (u32, u32) {
        self.v_out().stored_acc_place(c)
    }

    /// [`acc_place`](Packed::acc_place) of stored channel `c`.
    #[inline(always)]
    pub(super) const fn stored_acc_place(&self, c: u32) -> (u32, u32) {
        let (part, word) = (c / self.v_stride(), c % self.v_stride());
        (word / PAGE * self.v_parts() + part, word % PAGE)
    }

    /// The scale group of channel `c` of V.
    #[inline(always)]
    pub(super) const fn v_group(&self, c: u32) -> u32 {
        if matches!(self.v.scale(), Scale::Block) {
            return c * self.v.blocks() / PAGE;
        }
        let (part, word) = (c / self.v_stride(), c % self.v_stride());
        word / PAGE * self.v_col_groups() + part / self.v_group_parts()
    }

    /// Word `i` of the [`TAGS`] of the tokens at `positions`, 1 to 32; lanes without a token repeat the last.
    ///
    /// # Panics
    /// If there are no positions.
    #[inline(always)]
    pub fn tag(positions: &[u32], i: usize) -> u32 {
        let last = positions.len() - 1;
        positions[i.min(last)] & 0xffff | positions[(TAGS as usize + i).min(last)] << 16
    }

    /// Place of channel `c` of row `row` of V in a code without a scale: the word, counted from the first row, and the part in it.
    pub(super) const fn row_at(&self, row: u32, c: u32) -> (u32, u32) {
        (row * self.v_stride() + c % self.v_stride(), c / self.v_stride())
    }
}
