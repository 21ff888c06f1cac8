//! A page: 32 tokens of one layer and one KV head, in 32-bit words.
//!
//! ```text
//! [32 words]                 position of each token, -1 where none was written
//! [k_dim / V][32] words      K: lane = token; a row is 128 contiguous bytes, a dot product crosses no lanes
//! [32][v_dim / V'] words     V: token-major; lane = word of the row
//! ```
//! V and V' are the channels in a word of K and of V, whose dtypes may differ. Rows of V are padded to 8 words (a 32-byte
//! sector of a device, a vector of a CPU); every figure of bytes includes the padding.

use crate::dtype::{Dtype, round_bf16, round_f16};
use crate::warp::LANES;
use core::fmt;

/// Tokens of a page.
pub const PAGE: u32 = LANES as u32;

/// Position word of a lane without a token.
pub const NO_POSITION: u32 = u32::MAX;

/// Largest head_dim of K or V.
pub const MAX_DIM: u32 = 256;

/// Absolute index of a token in its sequence, counted from 0. Evictions do not change it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u32);

impl Position {
    /// Upper limit of positions: they are compared as signed words.
    pub const MAX: Position = Position(i32::MAX as u32 - 1);
}

/// The index alone: `Position(7)` is `7`.
impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of tokens held; not a position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resident(pub u32);

/// Place of a token: a tile (page) and the lane in it; not a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// Page of the run that holds the token.
    pub tile: u32,
    /// Lane in the page.
    pub lane: u32,
}

impl From<Position> for Slot {
    /// The place of a token in a run of pages that starts at position 0.
    fn from(p: Position) -> Slot {
        Slot { tile: p.0 / PAGE, lane: p.0 % PAGE }
    }
}

/// A value that its dtype cannot hold: infinite or NaN, before or after rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unstorable {
    /// True for a channel of the key, false for a channel of the value.
    pub key: bool,
    /// Channel of the row.
    pub channel: u32,
    /// The value.
    pub value: f32,
}

/// Widths and dtypes of one head's pages; they determine every address. `k_dim` and `v_dim` are 1 to 256.
///
/// ```
/// # mod pikv { pub use pikv_core::{dtype::Dtype, page::Layout}; }
/// use pikv::{Dtype, Layout};
///
/// let layout = Layout::new(128, Dtype::Bf16);
/// assert_eq!(layout.bytes(), 32 * (128 + 128) * 2 + 32 * 4);   // 32 tokens, and their positions
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Layout {
    /// Channels of a key: its head_dim.
    pub k_dim: u32,
    /// Channels of a value: its head_dim.
    pub v_dim: u32,
    /// Dtype of stored keys.
    pub k: Dtype,
    /// Dtype of stored values.
    pub v: Dtype,
}

impl Layout {
    /// First word of K.
    pub const K_BASE: u32 = PAGE;

    /// Layout of keys and values of `dim` channels of `dtype`.
    #[inline(always)]
    pub const fn new(dim: u32, dtype: Dtype) -> Layout {
        Layout { k_dim: dim, v_dim: dim, k: dtype, v: dtype }
    }

    /// This layout with values of `v_dim` channels of `v`.
    ///
    /// ```
    /// # mod pikv { pub use pikv_core::{dtype::Dtype, page::Layout}; }
    /// use pikv::{Dtype, Layout};
    ///
    /// let layout = Layout::new(192, Dtype::Bf16).values(128, Dtype::F16);
    /// assert_eq!((layout.k_dim, layout.v_dim), (192, 128));
    /// ```
    #[inline(always)]
    pub const fn values(self, v_dim: u32, v: Dtype) -> Layout {
        Layout { v_dim, v, ..self }
    }

    /// Rows of 32 words that K takes in a page.
    pub const fn k_rows(&self) -> u32 {
        self.k_dim.div_ceil(self.k.per_word())
    }

    /// Channels of K's rows: `k_dim` rounded up to whole words.
    pub const fn k_channels(&self) -> u32 {
        self.k_rows() * self.k.per_word()
    }

    /// Words of a value, without padding.
    pub const fn v_words(&self) -> u32 {
        self.v_dim.div_ceil(self.v.per_word())
    }

    /// Words of a value, padding included: the distance from one token's value to the next.
    pub const fn v_stride(&self) -> u32 {
        self.v_words().next_multiple_of(8)
    }

    /// Groups of 32 words in a value; the last may be partial.
    pub const fn v_cols(&self) -> u32 {
        self.v_words().div_ceil(PAGE)
    }

    /// Rows of 32 f32 in which one query row's output is summed: one for each channel of a word, for each group of words.
    pub const fn acc_rows(&self) -> u32 {
        self.v_cols() * self.v.per_word()
    }

    /// First word of V.
    pub const fn v_base(&self) -> u32 {
        Self::K_BASE + self.k_rows() * PAGE
    }

    /// Words of a page.
    pub const fn words(&self) -> u32 {
        self.v_base() + self.v_stride() * PAGE
    }

    /// Bytes of a page, positions and padding included.
    pub const fn bytes(&self) -> u64 {
        self.words() as u64 * 4
    }

    /// First word of page `page` in an arena of pages of this layout.
    pub const fn page_word(&self, page: u64) -> u64 {
        page * self.words() as u64
    }

    /// Word that holds `channel` of the key at `lane`, counted from the first word of page 0.
    pub const fn k_word(&self, page: u64, channel: u32, lane: u32) -> u64 {
        self.page_word(page) + (Self::K_BASE + channel / self.k.per_word() * PAGE + lane) as u64
    }

    /// Word that holds `channel` of the value at `lane`, counted from the first word of page 0.
    pub const fn v_word(&self, page: u64, channel: u32, lane: u32) -> u64 {
        self.page_word(page) + (self.v_base() + lane * self.v_stride() + channel / self.v.per_word()) as u64
    }

    /// Writes one token. `key` has `k_dim` channels, `value` `v_dim`; `words` is the page.
    ///
    /// # Errors
    /// [`Unstorable`]: the first value that its dtype cannot hold, K before V. Nothing is written then.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn write(
        &self,
        words: &mut [u32],
        lane: u32,
        position: Position,
        key: &[f32],
        value: &[f32],
    ) -> Result<(), Unstorable> {
        let (key, value) = (&key[..self.k_dim as usize], &value[..self.v_dim as usize]);
        self.check(key, value)?;
        let at = lane as usize;
        assert!(at < LANES);
        let (rows, _) = words[Self::K_BASE as usize..self.v_base() as usize].as_chunks_mut::<LANES>();
        pack(self.k, key, |first, packed| {
            rows[first..].iter_mut().zip(packed).for_each(|(row, word)| row[at] = *word);
        });
        let start = self.v_word(0, 0, lane) as usize;
        let row = &mut words[start..start + self.v_stride() as usize];
        row.fill(0);
        pack(self.v, value, |first, packed| row[first..][..packed.len()].copy_from_slice(packed));
        words[lane as usize] = position.0;
        Ok(())
    }

    /// Checks that [`Layout::write`] would accept the values.
    ///
    /// # Errors
    /// [`Unstorable`]: the first value that its dtype cannot hold, K before V.
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn check(&self, key: &[f32], value: &[f32]) -> Result<(), Unstorable> {
        let unstorable = |key| move |(channel, value)| Unstorable { key, channel, value };
        fits(self.k, &key[..self.k_dim as usize]).map_err(unstorable(true))?;
        fits(self.v, &value[..self.v_dim as usize]).map_err(unstorable(false))
    }

    /// Copies the token at lane `from` of `source` to lane `to` of `target`, position included.
    ///
    /// # Panics
    /// If a page is too short or a lane is not below 32.
    pub fn copy(&self, source: &[u32], from: u32, target: &mut [u32], to: u32) {
        let (from, to) = (from as usize, to as usize);
        assert!(from < LANES && to < LANES);
        let rows = self.v_base() as usize;
        let (lanes, _) = source[..rows].as_chunks::<LANES>();
        let (target_lanes, _) = target[..rows].as_chunks_mut::<LANES>();
        target_lanes.iter_mut().zip(lanes).for_each(|(to_row, row)| to_row[to] = row[from]);
        let stride = self.v_stride() as usize;
        target[rows + to * stride..][..stride].copy_from_slice(&source[rows + from * stride..][..stride]);
    }

    /// Position of the token at `lane`; `None` if the lane is empty.
    pub fn position(&self, words: &[u32], lane: u32) -> Option<Position> {
        let p = words[lane as usize];
        (p != NO_POSITION).then_some(Position(p))
    }

    /// Reads the key at `lane` into `key`, `k_dim` channels.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn read_key(&self, words: &[u32], lane: u32, key: &mut [f32]) {
        let start = self.k_word(0, 0, lane) as usize;
        unpack(self.k, &mut key[..self.k_dim as usize], |i| words[start + i * LANES]);
    }

    /// Reads the value at `lane` into `value`, `v_dim` channels.
    ///
    /// # Panics
    /// If a slice is too short or `lane` is not below 32.
    pub fn read_value(&self, words: &[u32], lane: u32, value: &mut [f32]) {
        let start = self.v_word(0, 0, lane) as usize;
        unpack(self.v, &mut value[..self.v_dim as usize], |i| words[start + i]);
    }
}

/// Checks that a dtype holds every value of a row. The error has the first channel that it does not hold, and its value.
fn fits(dtype: Dtype, row: &[f32]) -> Result<(), (u32, f32)> {
    // Without the sign, bits order as the values do, and those of infinities and NaN are the largest. A difference is negative where a
    // value is beyond the limit; differences are joined by their bits, which takes fewer instructions than a maximum.
    let limit = dtype.limit().to_bits() as i32;
    let room = |x: &f32| limit - (x.to_bits() & 0x7fff_ffff) as i32;
    if row.iter().map(room).fold(0, |all, room| all | room) >= 0 {
        return Ok(());
    }
    let beyond = (0..).zip(row).find(|(_, x)| dtype.encode(**x).is_none());
    beyond.map_or(Ok(()), |(channel, x)| Err((channel, *x)))
}

/// Packs channels that the dtype holds into words, the first channel in the low bits; a partial last word is filled with zeros. `put` gets
/// words that follow each other, and the index of the first.
#[inline]
fn pack(dtype: Dtype, row: &[f32], mut put: impl FnMut(usize, &[u32])) {
    match dtype {
        Dtype::F32 => put(0, bytemuck::cast_slice(row)),
        Dtype::F16 => pack_pairs(row, round_f16, put),
        Dtype::Bf16 => pack_pairs(row, round_bf16, put),
    }
}

/// [`pack`] of a dtype with two channels a word, whose bits `round` returns.
#[inline(always)]
fn pack_pairs(row: &[f32], round: impl Fn(f32) -> u32, mut put: impl FnMut(usize, &[u32])) {
    for (i, channels) in row.chunks(2 * LANES).enumerate() {
        let mut words = [0; LANES];
        let (pairs, last) = channels.as_chunks::<2>();
        words.iter_mut().zip(pairs).for_each(|(word, [a, b])| *word = round(*a) | round(*b) << 16);
        if let [x] = last {
            words[pairs.len()] = round(*x);
        }
        put(i * LANES, &words[..channels.len().div_ceil(2)]);
    }
}

fn unpack(dtype: Dtype, row: &mut [f32], get: impl Fn(usize) -> u32) {
    let n = dtype.per_word() as usize;
    for (i, group) in row.chunks_mut(n).enumerate() {
        for (j, x) in group.iter_mut().enumerate() {
            let bits = get(i) >> (j as u32 * dtype.bits());
            *x = dtype.decode(if n == 1 { bits } else { bits & 0xffff });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_beyond_the_limit_is_named() {
        let next = |x: f32| f32::from_bits(x.to_bits() + 1);
        for dtype in Dtype::ALL {
            let limit = dtype.limit();
            for width in [1, 3, 8, 64, 67] {
                let mut row: [f32; 68] = core::array::from_fn(|i| [limit, -limit, 0.0, -1.0][i % 4]);
                assert_eq!(fits(dtype, &row[..width]), Ok(()), "{}", dtype.name());
                for bad in [next(limit), -next(limit), f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN]
                {
                    for at in 0..width {
                        let kept = core::mem::replace(&mut row[at], bad);
                        let last = core::mem::replace(&mut row[width - 1], bad);
                        let (channel, value) = fits(dtype, &row[..width]).unwrap_err();
                        assert_eq!(
                            (channel as usize, value.to_bits()),
                            (at, bad.to_bits()),
                            "{}",
                            dtype.name()
                        );
                        row[width - 1] = last;
                        row[at] = kept;
                    }
                }
            }
        }
    }
}
