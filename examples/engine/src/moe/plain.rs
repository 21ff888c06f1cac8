//! The plain cache: contiguous keys and values in f32, without pikv. It defines the canonical attention: every operation is rounded to f32
//! once, in this order; other implementations must give the same bits.

use crate::common::cache::{Cache, Step};
use rayon::prelude::*;
use std::convert::Infallible;

/// Tokens of a tile: token `t` is in lane `t % 32` of tile `t / 32`.
const TILE: usize = 32;
/// Tokens of a block; each block is reduced on its own, and blocks are merged by a binary tree.
const BLOCK: usize = 8 * TILE;

/// Keys and values of one KV head of one layer.
#[derive(Clone, Default)]
struct Head {
    /// `[tile][head_dim]` of 32 tokens.
    k: Vec<[f32; TILE]>,
    /// `[token][head_dim / 32]` of 32 channels, the last padded with zeros.
    v: Vec<[f32; TILE]>,
}

/// Keys and values of all layers, `[layer][kv_head]`.
pub struct PlainCache {
    heads: Vec<Head>,
    kv_heads: usize,
    head_dim: usize,
    len: usize,
}

impl PlainCache {
    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.heads.iter().map(|head| (head.k.len() + head.v.len()) * size_of::<[f32; TILE]>()).sum()
    }

    pub fn new(layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { heads: vec![Head::default(); layers * kv_heads], kv_heads, head_dim, len: 0 }
    }
}

impl Cache for PlainCache {
    type Error = Infallible;
    type Step<'a> = &'a mut PlainCache;

    fn begin(&mut self, n: usize) -> Result<&mut PlainCache, Infallible> {
        for head in &mut self.heads {
            head.k.resize((self.len + n).div_ceil(TILE) * self.head_dim, [0.0; TILE]);
            head.v.resize((self.len + n) * self.head_dim.div_ceil(TILE), [0.0; TILE]);
        }
        Ok(self)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn clear(&mut self) {
        *self = Self::new(self.heads.len() / self.kv_heads, self.kv_heads, self.head_dim);
    }
}

impl Step for &mut PlainCache {
    type Error = Infallible;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Infallible> {
        let (d, first) = (self.head_dim, self.len);
        let heads = &mut self.heads[layer * self.kv_heads..][..self.kv_heads];
        for (i, (k, v)) in k.chunks_exact(d).zip(v.chunks_exact(d)).enumerate() {
            let (token, head) = (first + i / self.kv_heads, &mut heads[i % self.kv_heads]);
            for c in 0..d {
                head.k[token / TILE * d + c][token % TILE] = k[c];
                head.v[token * d.div_ceil(TILE) + c / TILE][c % TILE] = v[c];
            }
        }
        let group = q.len() / k.len().max(1); // Query heads of a KV head.
        q.par_chunks_exact(d).zip(out.par_chunks_exact_mut(d)).enumerate().for_each(|(i, (q, out))| {
            let i = i / group;
            attend(q, &heads[i % heads.len()], first + i / heads.len() + 1, out);
        });
        Ok(())
    }

    fn experts(&mut self, _layer: usize, _experts: &[u16]) -> Result<(), Infallible> {
        Ok(())
    }

    fn commit(self) -> Result<(), Infallible> {
        self.len = self.heads[0].v.len() / self.head_dim.div_ceil(TILE);
        Ok(())
    }
}

/// Attends one query to the first `visible` tokens (at least one).
fn attend(q: &[f32], head: &Head, visible: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        // The same code for processors with FMA instructions.
        #[target_feature(enable = "avx2,fma")]
        fn attend_fma(q: &[f32], head: &Head, visible: usize, out: &mut [f32]) {
            attend_lanes(q, head, visible, out);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has AVX2 and FMA, checked above.
            return unsafe { attend_fma(q, head, visible, out) };
        }
    }
    attend_lanes(q, head, visible, out);
}

/// Blocks are the leaves of a perfect binary tree, in order of index; a block without visible tokens changes nothing.
#[inline(always)]
fn attend_lanes(q: &[f32], head: &Head, visible: usize, out: &mut [f32]) {
    let scale = (1.0 / (q.len() as f32).sqrt()) * std::f32::consts::LOG2_E;
    let q: Vec<f32> = q.iter().map(|x| x * scale).collect();
    let mut stack: Vec<Part> = Vec::new();
    for block in 0..visible.div_ceil(BLOCK) {
        stack.push(reduce(&q, head, block * BLOCK, visible.min((block + 1) * BLOCK)));
        for _ in 0..(block + 1).trailing_zeros() {
            merge_top(&mut stack);
        }
    }
    while stack.len() > 1 {
        merge_top(&mut stack);
    }
    let Part { l, acc, .. } = &stack[0];
    out.iter_mut().zip(acc.as_flattened()).for_each(|(out, acc)| *out = acc / l);
}

/// A partial softmax: sum of weights and weighted sum of values, both divided by 2^`m`; `m` is an integer.
struct Part {
    m: f32,
    l: f32,
    acc: Vec<[f32; TILE]>,
}

/// Tokens `first..end` of one block.
#[inline(always)]
fn reduce(q: &[f32], head: &Head, first: usize, end: usize) -> Part {
    let (n, width) = (end - first, q.len().div_ceil(TILE));
    let (mut p, mut l, tiles) = ([[0.0; TILE]; BLOCK / TILE], [0.0; TILE], n.div_ceil(TILE));
    for (tile, p) in p[..tiles].iter_mut().enumerate() {
        let mut score = [0.0f32; TILE];
        for (k, &q) in head.k[(first / TILE + tile) * q.len()..].iter().zip(q) {
            for t in 0..TILE {
                score[t] = k[t].mul_add(q, score[t]);
            }
        }
        *p = score;
    }
    p.as_flattened_mut()[n..].fill(f32::NEG_INFINITY); // Out of sight: the weight becomes 0.
    let scores = p[..tiles].as_flattened();
    let max = scores.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    let toward_0 = max as i32 as f32;
    let m = if toward_0 < max { toward_0 + 1.0 } else { toward_0 };
    for p in &mut p[..tiles] {
        for t in 0..TILE {
            p[t] = exp2(p[t] - m);
            l[t] += p[t];
        }
    }
    for half in [16, 8, 4, 2, 1] {
        (0..half).for_each(|t| l[t] += l[t + half]);
    }
    let mut acc = Vec::with_capacity(width);
    for j in 0..width {
        let mut sum = [0.0f32; TILE];
        for (v, &p) in head.v[first * width..end * width].chunks_exact(width).zip(p.as_flattened()) {
            for c in 0..TILE {
                sum[c] = v[j][c].mul_add(p, sum[c]);
            }
        }
        acc.push(sum);
    }
    Part { m, l: l[0], acc }
}

/// Merges the two newest parts, the older as the left one.
#[inline(always)]
fn merge_top(stack: &mut Vec<Part>) {
    let (Some(b), Some(a)) = (stack.pop(), stack.last_mut()) else { return };
    // 2^n for an integer n <= 0.
    let power = |n: f32| if n < -126.0 { 0.0 } else { f32::from_bits(((n as i32 + 127) as u32) << 23) };
    let m = if a.m > b.m { a.m } else { b.m };
    let (sa, sb) = (power(a.m - m), power(b.m - m));
    (a.m, a.l) = (m, a.l * sa + b.l * sb);
    for (a, b) in a.acc.as_flattened_mut().iter_mut().zip(b.acc.as_flattened()) {
        *a = *a * sa + b * sb;
    }
}

/// 2^`x` for `x` <= 0; 0 below -126.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    /// 1.5 × 2^23: adding it rounds to an integer, in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// 2^f for |f| <= 1/2, highest power first: a copy of `EXP2_POLY` in pikv-core/src/math.rs.
    const POLY: [f32; 7] =
        [1.559_467_3e-4, 1.340_664_3e-3, 9.617_693e-3, 5.550_310_4e-2, 2.402_265_2e-1, 6.931_472_4e-1, 1.0];
    let y = if x > -127.0 { x } else { -127.0 };
    let rounded = y + ROUND;
    let f = y - (rounded - ROUND);
    let mut p = POLY[0];
    for c in &POLY[1..] {
        p = p.mul_add(f, *c);
    }
    let power = f32::from_bits(p.to_bits().wrapping_add(rounded.to_bits() << 23));
    if x < -126.0 { 0.0 } else { power }
}
