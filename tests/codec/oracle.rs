//! Packed pages once more, slowly and from their description: IEEE and OCP formats by their definition, scales and codes group
//! by group, an address for every channel. Nothing here calls the code under test.

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
        Code::Int4 => 4,
        _ => 8,
    }
}

/// The largest code, as a number.
pub fn top(code: Code) -> f32 {
    match code {
        Code::Int8 => 255.0,
        Code::Int4 => 15.0,
        Code::E4m3 => 448.0,
        Code::E5m2 => 57344.0,
        _ => panic!("no scale"),
    }
}

pub fn integer(code: Code) -> bool {
    matches!(code, Code::Int8 | Code::Int4)
}

pub fn scaled(code: Code) -> bool {
    integer(code) || matches!(code, Code::E4m3 | Code::E5m2)
}

/// A number of `mantissa` bits of fraction under `exponent` bits with the usual bias, sign and all; what the format has beside
/// numbers is not told apart.
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

/// OCP 8-bit floats; `None` for what is not a finite number.
pub fn fp8(code: Code, bits: u32) -> Option<f64> {
    match code {
        Code::E4m3 => (bits & 0x7f != 0x7f).then(|| number(bits, 4, 3)),
        _ => (bits & 0x7c != 0x7c).then(|| number(bits, 5, 2)),
    }
}

/// The first of `0..=last + 1` whose value is not below `x`, `value` growing.
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
        _ => ((x - min) / scale).clamp(0.0, top(code)).round_ties_even() as u32,
    }
}

impl Shape {
    fn k_rows(&self) -> usize {
        self.k_dim.div_ceil(32 / bits(self.k))
    }

    fn k_base(&self) -> usize {
        let scales = (self.k_rows() * (32 / bits(self.k))).div_ceil(32) * 32;
        16 + if scaled(self.k) { scales } else { 0 }
    }

    /// Word and shift of channel `c` of the key at lane `t`.
    pub fn k_at(&self, t: usize, c: usize) -> (usize, usize) {
        let n = 32 / bits(self.k);
        (self.k_base() + c / n * 32 + t, shift(self.k, c % n))
    }

    fn v_stride(&self) -> usize {
        if integer(self.v) {
            return self.v_dim.div_ceil(8) * 8;
        }
        let words = self.v_dim.div_ceil(32 / bits(self.v));
        [4, 8, 16].into_iter().find(|n| words <= *n).unwrap_or(words.div_ceil(8) * 8)
    }

    /// Groups of parts in 32 words of a value, and parts in a group.
    fn v_parts(&self) -> (usize, usize) {
        let stride = self.v_stride();
        let together = if stride <= 16 && !integer(self.v) { 32 / stride } else { 1 };
        (self.v_dim.div_ceil(stride).div_ceil(together), together)
    }

    fn v_groups(&self) -> usize {
        self.v_stride().div_ceil(32) * self.v_parts().0
    }

    /// The group of channel `c` of a value: by the 32 words that it is in, then by parts.
    fn v_group(&self, c: usize) -> usize {
        let (groups, together) = self.v_parts();
        c % self.v_stride() / 32 * groups + c / self.v_stride() / together
    }

    fn v_scales(&self) -> usize {
        self.k_base() + self.k_rows() * 32
    }

    /// Word and shift of channel `c` of the value at lane `t`. A word of integers is as many tokens of one channel.
    pub fn v_at(&self, t: usize, c: usize) -> (usize, usize) {
        let stride = self.v_stride();
        let base = self.v_scales() + if scaled(self.v) { self.v_groups() * 32 } else { 0 };
        if integer(self.v) {
            let n = 32 / bits(self.v);
            return (base + t / n * stride + c, shift(self.v, t % n));
        }
        (base + t * stride + c % stride, c / stride * bits(self.v))
    }

    pub fn words(&self) -> usize {
        self.v_at(32, 0).0
    }

    /// A page of the tokens whose rows are `k` and `v`; lanes past them repeat the last.
    pub fn pack(&self, positions: &[u32], k: &[Vec<f32>], v: &[Vec<f32>]) -> Vec<u32> {
        let mut words = vec![0; self.words()];
        let at = |t: usize| t.min(positions.len() - 1);
        for t in 0..32 {
            words[t % 16] |= (positions[at(t)] & 0xffff) << (t / 16 * 16);
        }
        for c in 0..self.k_dim {
            let (mut scale, mut min) = (0.0, 0.0);
            if scaled(self.k) {
                (words[16 + c], scale, min) = group(self.k, k.iter().map(|row| row[c]));
            }
            for t in 0..32 {
                let (word, shift) = self.k_at(t, c);
                words[word] |= encode(self.k, k[at(t)][c], scale, min) << shift;
            }
        }
        for t in 0..32 {
            let row = &v[at(t)];
            for g in 0..self.v_groups() {
                let channels = || (0..self.v_dim).filter(|c| self.v_group(*c) == g);
                let (mut scale, mut min) = (0.0, 0.0);
                if scaled(self.v) {
                    let word = &mut words[self.v_scales() + g * 32 + t];
                    (*word, scale, min) = group(self.v, channels().map(|c| row[c]));
                }
                for c in channels() {
                    let (word, shift) = self.v_at(t, c);
                    words[word] |= encode(self.v, row[c], scale, min) << shift;
                }
            }
        }
        words
    }

    /// Scale and minimum of channel `c` of the keys.
    pub fn k_scale(&self, words: &[u32], c: usize) -> (f64, f64) {
        scale(self.k, words[16 + c * usize::from(scaled(self.k))])
    }

    /// Scale and minimum of channel `c` of the value at lane `t`.
    pub fn v_scale(&self, words: &[u32], t: usize, c: usize) -> (f64, f64) {
        let at = if scaled(self.v) { self.v_scales() + self.v_group(c) * 32 + t } else { 0 };
        scale(self.v, words[at])
    }

    /// Channel `c` of the key at lane `t`.
    pub fn key(&self, words: &[u32], t: usize, c: usize) -> f64 {
        let (word, shift) = self.k_at(t, c);
        value(self.k, words[word] >> shift, self.k_scale(words, c))
    }

    /// Channel `c` of the value at lane `t`.
    pub fn value(&self, words: &[u32], t: usize, c: usize) -> f64 {
        let (word, shift) = self.v_at(t, c);
        value(self.v, words[word] >> shift, self.v_scale(words, t, c))
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

/// Where code `j` of a word starts. Of 4-bit codes the first four are the low halves of the bytes, then come the high ones.
fn shift(code: Code, j: usize) -> usize {
    match code {
        Code::Int4 => j % 4 * 8 + j / 4 * 4,
        _ => j * bits(code),
    }
}

/// Scale and minimum. Where there is no minimum it is -0, which leaves the sign of a zero as it is.
fn scale(code: Code, word: u32) -> (f64, f64) {
    match code {
        Code::Int8 | Code::Int4 => (half(word & 0xffff), half(word >> 16)),
        Code::E4m3 | Code::E5m2 => (f64::from(f32::from_bits(word)), -0.0),
        _ => (1.0, -0.0),
    }
}

fn value(code: Code, word: u32, (scale, min): (f64, f64)) -> f64 {
    let code = match code {
        Code::F32 => f64::from(f32::from_bits(word)),
        Code::F16 => half(word & 0xffff),
        Code::Bf16 => f64::from(f32::from_bits(word << 16)),
        Code::Int8 => f64::from(word & 0xff),
        Code::Int4 => f64::from(word & 0xf),
        _ => fp8(code, word & 0xff).expect("a code that is no number"),
    };
    code * scale + min
}
