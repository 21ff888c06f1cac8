//! A slow form of packed pages, written from their description: IEEE and OCP formats by definition, scales and codes group by group, an
//! address for every channel. It does not call the code under test.

use pikv::codec::Code;

/// Widths and codes of a packed page.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub k_dim: usize,
    pub v_dim: usize,
    pub k: Code,
    pub v: Code,
}

pub fn bits(code: Code) -> usize {
    match code {
        Code::F32 => 32,
        Code::F16 | Code::Bf16 => 16,
        Code::Int2 => 2,
        Code::Int3 => 3,
        Code::Int4 | Code::Mxfp4 | Code::Nvfp4 => 4,
        Code::Int5 => 5,
        Code::Int6 => 6,
        _ => 8,
    }
}

/// Bits of each plane of a code, and the bit of the code that its lowest is.
fn planes(code: Code) -> &'static [(usize, usize)] {
    match code {
        Code::F32 => &[(32, 0)],
        Code::F16 | Code::Bf16 => &[(16, 0)],
        Code::Int2 => &[(2, 0)],
        Code::Int3 => &[(2, 0), (1, 2)],
        Code::Int4 | Code::Mxfp4 | Code::Nvfp4 => &[(4, 0)],
        Code::Int5 => &[(4, 0), (1, 4)],
        Code::Int6 => &[(4, 0), (2, 4)],
        _ => &[(8, 0)],
    }
}

/// Position of some bits of a code in a page.
struct Bits {
    word: usize,
    shift: usize,
    bits: usize,
    /// The bit of the code that the lowest is.
    low: usize,
}

impl Bits {
    fn mask(&self) -> u32 {
        u32::MAX >> (32 - self.bits)
    }
}

fn put(words: &mut [u32], at: &[Bits], code: u32) {
    for bits in at {
        words[bits.word] |= (code >> bits.low & bits.mask()) << bits.shift;
    }
}

fn got(words: &[u32], at: &[Bits]) -> u32 {
    at.iter().map(|bits| (words[bits.word] >> bits.shift & bits.mask()) << bits.low).sum()
}

/// The largest code, as a number.
pub fn top(code: Code) -> f32 {
    match code {
        Code::Int2 => 3.0,
        Code::Int3 => 7.0,
        Code::Int4 => 15.0,
        Code::Int5 => 31.0,
        Code::Int6 => 63.0,
        Code::Int8 => 255.0,
        Code::E4m3 => 448.0,
        Code::E5m2 => 57344.0,
        Code::Mxfp4 | Code::Nvfp4 => 6.0,
        _ => panic!("no scale"),
    }
}

pub fn integer(code: Code) -> bool {
    matches!(code, Code::Int2 | Code::Int3 | Code::Int4 | Code::Int5 | Code::Int6 | Code::Int8)
}

/// Whether scales are bytes.
pub fn blocked(code: Code) -> bool {
    matches!(code, Code::Mxfp4 | Code::Nvfp4)
}

/// Blocks of 32 numbers.
fn blocks(code: Code) -> usize {
    if code == Code::Nvfp4 { 2 } else { 1 }
}

/// Words of the scales of `groups` runs of 32 numbers; of those in blocks, the scale of the page first.
fn scale_words(code: Code, groups: usize) -> usize {
    match code {
        Code::Nvfp4 => 8 + groups * 2 * 8,
        Code::Mxfp4 => groups * 8,
        _ if scaled(code) => groups * 32,
        _ => 0,
    }
}

/// The least power of two, at least 2^-100, under which no block's scale is past 448.
fn page_scale(values: impl Iterator<Item = f32>) -> f32 {
    let most = values.fold(0f32, |m, x| m.max(x.abs()));
    (-100..128).map(|e| 2f64.powi(e) as f32).find(|scale| most / 2688.0 <= *scale).unwrap()
}

/// The byte of a block's scale.
fn block(code: Code, values: impl Iterator<Item = f32>, page: f32) -> u32 {
    let most = values.fold(0f32, |m, x| m.max(x.abs()));
    if code == Code::Nvfp4 {
        return nearest(|b| number(b, 4, 3), 0x7e, 7, most / (6.0 * page));
    }
    // OCP MX 1.0, 6.3: the exponent of the largest less that of the largest number, 4.
    if most == 0.0 { 0 } else { (f64::from(most).log2().floor() as i32 - 2 + 127).max(0) as u32 }
}

fn block_scale(code: Code, byte: u32, page: f32) -> f64 {
    if code == Code::Nvfp4 { number(byte, 4, 3) * f64::from(page) } else { 2f64.powi(byte as i32 - 127) }
}

/// Whether a word of V has codes of several tokens.
fn across(code: Code) -> bool {
    integer(code) || blocked(code)
}

/// Whether groups have a scale of a word.
pub fn scaled(code: Code) -> bool {
    integer(code) || matches!(code, Code::E4m3 | Code::E5m2)
}

/// The number in `bits`, with `mantissa` bits of fraction, `exponent` bits with the usual bias, and a sign; infinities and NaN are not
/// treated apart.
fn number(bits: u32, exponent: u32, mantissa: u32) -> f64 {
    let bias = (1 << (exponent - 1)) - 1;
    let m = f64::from(bits & ((1 << mantissa) - 1));
    let e = (bits >> mantissa & ((1 << exponent) - 1)) as i32;
    let one = f64::from(1u32 << mantissa);
    let x = if e == 0 { m / one * 2f64.powi(1 - bias) } else { (1.0 + m / one) * 2f64.powi(e - bias) };
    if bits >> (exponent + mantissa) & 1 == 1 { -x } else { x }
}

pub fn half(bits: u32) -> f64 {
    number(bits, 5, 10)
}

/// The value of an OCP 8-bit or 4-bit float; `None` if it is not finite.
pub fn fp8(code: Code, bits: u32) -> Option<f64> {
    match code {
        _ if blocked(code) => Some(number(bits, 2, 1)),
        Code::E4m3 => (bits & 0x7f != 0x7f).then(|| number(bits, 4, 3)),
        _ => (bits & 0x7c != 0x7c).then(|| number(bits, 5, 2)),
    }
}

/// The first of `0..=last + 1` with a value of at least `x`; `value` rises.
fn first(value: impl Fn(u32) -> f64, last: u32, x: f64) -> u32 {
    let (mut low, mut high) = (0, last + 1);
    while low < high {
        let mid = (low + high) / 2;
        if value(mid) >= x { high = mid } else { low = mid + 1 }
    }
    low
}

/// The code nearest to `x`, half to even, with its sign in bit `sign`; past the last it is the last.
fn nearest(value: impl Fn(u32) -> f64, last: u32, sign: u32, x: f32) -> u32 {
    let m = f64::from(x.abs());
    let above = first(&value, last, m);
    let code = match above {
        0 => 0,
        above if above > last => last,
        above => {
            let (low, high) = (m - value(above - 1), value(above) - m);
            if low < high || low == high && above % 2 == 1 { above - 1 } else { above }
        }
    };
    code | u32::from(x.is_sign_negative()) << sign
}

const HALVES: u32 = 0x7bff;

/// The largest f16 that is not above `x`.
fn below(x: f32) -> u32 {
    let x = f64::from(x);
    let at = first(half, HALVES, x.abs());
    match x < 0.0 {
        true => 0x8000 | at,
        false if half(at) == x => at,
        false => at - 1,
    }
}

/// Scale word, scale and minimum of a group.
fn group(code: Code, values: impl Iterator<Item = f32>) -> (u32, f32, f32) {
    let values: Vec<f32> = values.collect();
    if values.is_empty() {
        return (0, 0.0, 0.0);
    }
    if !integer(code) {
        let scale = values.iter().fold(0f32, |m, x| m.max(x.abs())) / top(code);
        return (scale.to_bits(), scale, 0.0);
    }
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = below(low);
    let least = half(min) as f32;
    let scale = first(half, HALVES, f64::from((high - least) / top(code)));
    (scale | min << 16, half(scale) as f32, least)
}

fn encode(code: Code, x: f32, scale: f32, min: f32) -> u32 {
    match code {
        Code::F32 => x.to_bits(),
        Code::F16 => nearest(half, HALVES, 15, x),
        Code::Bf16 => nearest(|b| f64::from(f32::from_bits(b << 16)), 0x7f7f, 15, x),
        _ if scale == 0.0 => 0,
        Code::E4m3 => nearest(|b| number(b, 4, 3), 0x7e, 7, x / scale),
        Code::E5m2 => nearest(|b| number(b, 5, 2), 0x7b, 7, x / scale),
        _ if blocked(code) => nearest(|b| number(b, 2, 1), 7, 3, x / scale),
        _ => ((x - min) / scale).clamp(0.0, top(code)).round_ties_even() as u32,
    }
}

impl Shape {
    fn k_rows(&self) -> usize {
        planes(self.k).iter().map(|(bits, _)| self.k_dim.div_ceil(32 / bits)).sum()
    }

    fn k_base(&self) -> usize {
        16 + scale_words(self.k, self.k_dim.div_ceil(32))
    }

    /// Word and shift of the first plane of channel `c` of the key at lane `t`.
    pub fn k_at(&self, t: usize, c: usize) -> (usize, usize) {
        let at = &self.k_bits(t, c)[0];
        (at.word, at.shift)
    }

    fn k_bits(&self, t: usize, c: usize) -> Vec<Bits> {
        let mut first = self.k_base();
        let of = |(bits, low): &(usize, usize)| {
            let n = 32 / bits;
            let word = first + c / n * 32 + t;
            first += self.k_dim.div_ceil(n) * 32;
            Bits { word, shift: shift(self.k, c % n, *bits), bits: *bits, low: *low }
        };
        planes(self.k).iter().map(of).collect()
    }

    fn v_stride(&self) -> usize {
        if across(self.v) {
            return self.v_dim.div_ceil(8) * 8;
        }
        let words = self.v_dim.div_ceil(32 / bits(self.v));
        [4, 8, 16].into_iter().find(|n| words <= *n).unwrap_or(words.div_ceil(8) * 8)
    }

    /// Groups of parts in 32 words of a value, and parts in a group.
    fn v_parts(&self) -> (usize, usize) {
        let stride = self.v_stride();
        let together = if stride <= 16 && !across(self.v) { 32 / stride } else { 1 };
        (self.v_dim.div_ceil(stride).div_ceil(together), together)
    }

    fn v_groups(&self) -> usize {
        self.v_stride().div_ceil(32) * self.v_parts().0
    }

    /// The group of channel `c` of a value: by the 32 words that it is in, then by parts.
    fn v_group(&self, c: usize) -> usize {
        if blocked(self.v) {
            return c / (32 / blocks(self.v));
        }
        let (groups, together) = self.v_parts();
        c % self.v_stride() / 32 * groups + c / self.v_stride() / together
    }

    fn v_scales(&self) -> usize {
        self.k_base() + self.k_rows() * 32
    }

    fn v_base(&self) -> usize {
        self.v_scales() + scale_words(self.v, self.v_groups())
    }

    /// Word and shift of the first plane of channel `c` of the value at lane `t`.
    pub fn v_at(&self, t: usize, c: usize) -> (usize, usize) {
        let at = &self.v_bits(t, c)[0];
        (at.word, at.shift)
    }

    /// A word of integers, or of codes in blocks, is as many tokens of one channel.
    fn v_bits(&self, t: usize, c: usize) -> Vec<Bits> {
        let stride = self.v_stride();
        let mut first = self.v_base();
        let of = |(bits, low): &(usize, usize)| {
            let n = 32 / bits;
            if !across(self.v) {
                let (word, shift) = (first + t * stride + c % stride, c / stride * bits);
                return Bits { word, shift, bits: *bits, low: 0 };
            }
            let word = first + t / n * stride + c;
            first += 32 / n * stride;
            Bits { word, shift: shift(self.v, t % n, *bits), bits: *bits, low: *low }
        };
        planes(self.v).iter().map(of).collect()
    }

    pub fn words(&self) -> usize {
        let rows = if across(self.v) { bits(self.v) } else { 32 };
        self.v_base() + rows * self.v_stride()
    }

    /// A page of tokens with rows `k` and `v`; lanes past them repeat the last.
    pub fn pack(&self, positions: &[u32], k: &[Vec<f32>], v: &[Vec<f32>]) -> Vec<u32> {
        let mut words = vec![0; self.words()];
        let at = |t: usize| t.min(positions.len() - 1);
        for t in 0..32 {
            words[t % 16] |= (positions[at(t)] & 0xffff) << (t / 16 * 16);
        }
        let (k_page, v_page) =
            (page_scale(k.iter().flatten().copied()), page_scale(v.iter().flatten().copied()));
        if self.k == Code::Nvfp4 {
            words[16] = k_page.to_bits();
        }
        if self.v == Code::Nvfp4 {
            words[self.v_scales()] = v_page.to_bits();
        }
        for c in 0..self.k_dim {
            let (mut scale, mut min) = (0.0, 0.0);
            if scaled(self.k) {
                (words[16 + c], scale, min) = group(self.k, k.iter().map(|row| row[c]));
            }
            for t in 0..32 {
                if blocked(self.k) {
                    let tokens = 32 / blocks(self.k);
                    let first = t / tokens * tokens;
                    let byte = block(self.k, (first..first + tokens).map(|t| k[at(t)][c]), k_page);
                    let (word, shift) = self.k_byte(t, c);
                    words[word] |= byte << shift;
                    scale = block_scale(self.k, byte, k_page) as f32;
                }
                put(&mut words, &self.k_bits(t, c), encode(self.k, k[at(t)][c], scale, min));
            }
        }
        for t in 0..32 {
            let row = &v[at(t)];
            for g in 0..self.v_groups() * blocks(self.v) {
                let channels = || (0..self.v_dim).filter(|c| self.v_group(*c) == g);
                let (mut scale, mut min) = (0.0, 0.0);
                if scaled(self.v) {
                    let word = &mut words[self.v_scales() + g * 32 + t];
                    (*word, scale, min) = group(self.v, channels().map(|c| row[c]));
                }
                if let Some(c) = channels().next().filter(|_| blocked(self.v)) {
                    let byte = block(self.v, channels().map(|c| row[c]), v_page);
                    let (word, shift) = self.v_byte(t, c);
                    words[word] |= byte << shift;
                    scale = block_scale(self.v, byte, v_page) as f32;
                }
                for c in channels() {
                    put(&mut words, &self.v_bits(t, c), encode(self.v, row[c], scale, min));
                }
            }
        }
        words
    }

    /// Word and shift of the byte of the scale of channel `c` of the key at lane `t`.
    fn k_byte(&self, t: usize, c: usize) -> (usize, usize) {
        let block = c / 32 * blocks(self.k) + t * blocks(self.k) / 32;
        (16 + scale_words(self.k, 0) + block * 8 + c % 32 / 4, c % 4 * 8)
    }

    /// Word and shift of the byte of the scale of channel `c` of the value at lane `t`.
    fn v_byte(&self, t: usize, c: usize) -> (usize, usize) {
        (self.v_scales() + scale_words(self.v, 0) + self.v_group(c) * 8 + t / 4, t % 4 * 8)
    }

    /// The scale that all blocks of K have in common; 1 without one.
    pub fn k_page(&self, words: &[u32]) -> f64 {
        if self.k == Code::Nvfp4 { f64::from(f32::from_bits(words[16])) } else { 1.0 }
    }

    /// The same of V.
    pub fn v_page(&self, words: &[u32]) -> f64 {
        if self.v == Code::Nvfp4 { f64::from(f32::from_bits(words[self.v_scales()])) } else { 1.0 }
    }

    /// Scale and minimum of channel `c` of the key at lane `t`.
    pub fn k_scale(&self, words: &[u32], t: usize, c: usize) -> (f64, f64) {
        if blocked(self.k) {
            let (word, shift) = self.k_byte(t, c);
            return (block_scale(self.k, words[word] >> shift & 0xff, self.k_page(words) as f32), -0.0);
        }
        scale(self.k, words[16 + c * usize::from(scaled(self.k))])
    }

    /// Scale and minimum of channel `c` of the value at lane `t`.
    pub fn v_scale(&self, words: &[u32], t: usize, c: usize) -> (f64, f64) {
        if blocked(self.v) {
            let (word, shift) = self.v_byte(t, c);
            return (block_scale(self.v, words[word] >> shift & 0xff, self.v_page(words) as f32), -0.0);
        }
        let at = if scaled(self.v) { self.v_scales() + self.v_group(c) * 32 + t } else { 0 };
        scale(self.v, words[at])
    }

    /// Channel `c` of the key at lane `t`.
    pub fn key(&self, words: &[u32], t: usize, c: usize) -> f64 {
        value(self.k, got(words, &self.k_bits(t, c)), self.k_scale(words, t, c))
    }

    /// Channel `c` of the value at lane `t`.
    pub fn value(&self, words: &[u32], t: usize, c: usize) -> f64 {
        value(self.v, got(words, &self.v_bits(t, c)), self.v_scale(words, t, c))
    }

    /// The words with one sign for zero minima, which have no right one.
    pub fn clean(&self, given: &[u32]) -> Vec<u32> {
        let mut words = given.to_vec();
        let k = 16..if integer(self.k) { self.k_base() } else { 16 };
        let v = self.v_scales()..self.v_scales() + if integer(self.v) { self.v_groups() * 32 } else { 0 };
        for i in k.chain(v).filter(|i| given[*i] >> 16 == 0x8000) {
            words[i] &= 0xffff;
        }
        words
    }
}

/// First bit of code `j` in a word of codes with `bits` bits. The first four integers take the lowest bits of the bytes, the next four the
/// bits above them, and so on.
fn shift(code: Code, j: usize, bits: usize) -> usize {
    if integer(code) { j % 4 * 8 + j / 4 * bits } else { j * bits }
}

/// Scale and minimum. Where there is no minimum it is -0, which leaves the sign of a zero as it is.
fn scale(code: Code, word: u32) -> (f64, f64) {
    match code {
        _ if integer(code) => (half(word & 0xffff), half(word >> 16)),
        Code::E4m3 | Code::E5m2 => (f64::from(f32::from_bits(word)), -0.0),
        _ => (1.0, -0.0),
    }
}

fn value(code: Code, bits: u32, (scale, min): (f64, f64)) -> f64 {
    let code = match code {
        Code::F32 => f64::from(f32::from_bits(bits)),
        Code::F16 => half(bits),
        Code::Bf16 => f64::from(f32::from_bits(bits << 16)),
        Code::E4m3 | Code::E5m2 | Code::Mxfp4 | Code::Nvfp4 => {
            fp8(code, bits).expect("a code that is no number")
        }
        _ => f64::from(bits),
    };
    code * scale + min
}
