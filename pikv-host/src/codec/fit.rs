//! Statistics of a model's keys and values for the fits, gathered while the model runs.

use super::moments::finite;
use super::{FitError, FittedSide, Map, Moments};
use pikv_core::hash;

/// Number and widths of the layers and heads to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct FitShape {
    /// Attention layers, all of the same shape.
    pub layers: u32,
    /// Query heads of a layer, a multiple of `kv_heads`; query head `h` reads KV head `h / group`, with `group = query_heads / kv_heads`.
    pub query_heads: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Channels of a key and a query.
    pub k_dim: u32,
    /// Channels of a value.
    pub v_dim: u32,
}

impl FitShape {
    /// Layers with `head_dim` channels in keys and values.
    pub const fn new(layers: u32, kv_heads: u32, query_heads: u32, head_dim: u32) -> FitShape {
        FitShape { layers, query_heads, kv_heads, k_dim: head_dim, v_dim: head_dim }
    }

    /// Sets the channels of a value.
    pub const fn v_dim(self, v_dim: u32) -> FitShape {
        FitShape { v_dim, ..self }
    }

    fn group(&self) -> usize {
        (self.query_heads / self.kv_heads) as usize
    }

    /// The index of a head among `[layers][kv_heads]`.
    ///
    /// # Errors
    /// [`FitError::Head`] for a layer or head out of range.
    pub(super) fn at(&self, layer: u32, head: u32) -> Result<usize, FitError> {
        let FitShape { layers, kv_heads, .. } = *self;
        if layer >= layers || head >= kv_heads {
            return Err(FitError::Head { layer, head, layers, kv_heads });
        }
        Ok(layer as usize * kv_heads as usize + head as usize)
    }
}

/// Consecutive rows of one KV head in a sequence, and the queries of its group.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
#[cfg(feature = "fit")]
pub struct Segment {
    /// `[rows][group][k_dim]`.
    pub q: Vec<f32>,
    /// `[rows][k_dim]`.
    pub k: Vec<f32>,
    /// `[rows][v_dim]`.
    pub v: Vec<f32>,
}

impl Segment {
    /// Queries `[rows][group][k_dim]`, keys `[rows][k_dim]` and values `[rows][v_dim]` of the same tokens.
    pub fn new(q: Vec<f32>, k: Vec<f32>, v: Vec<f32>) -> Segment {
        Segment { q, k, v }
    }
}

/// Gathers second moments of queries, keys and values of each layer and KV head, and a bounded sample of whole segments.
///
/// Needs the feature `fit`.
///
/// Moments take `8 (2 k_dim^2 + v_dim^2)` bytes a head, and a row costs about half as many multiply-adds. The sample is held once a
/// layer. The result depends on the calls and the seed alone.
#[derive(Clone, Debug)]
#[cfg(feature = "fit")]
pub struct Fitter {
    shape: FitShape,
    q: Vec<Moments>,
    k: Vec<Moments>,
    v: Vec<Moments>,
    layers: Vec<Sample>,
    segments: usize,
    tokens: usize,
    seed: u64,
}

/// Segments of a layer, all heads together: a uniform sample of those offered.
#[derive(Clone, Debug, Default)]
struct Sample {
    kept: Vec<Segment>,
    offered: u64,
}

impl Fitter {
    /// An empty fitter that samples up to 16 segments of up to 128 tokens of each layer.
    ///
    /// # Errors
    /// [`FitError::Heads`] for no layers or heads, or query heads that are not a multiple of the KV heads; a width outside 1..=256.
    pub fn new(shape: FitShape) -> Result<Fitter, FitError> {
        let FitShape { layers, query_heads, kv_heads, k_dim, v_dim } = shape;
        let grouped = kv_heads > 0 && query_heads > 0 && query_heads.is_multiple_of(kv_heads);
        if layers == 0 || !grouped {
            return Err(FitError::Heads { layers, query_heads, kv_heads });
        }
        let heads = layers as usize * kv_heads as usize;
        let (k, v) = (vec![Moments::new(k_dim)?; heads], vec![Moments::new(v_dim)?; heads]);
        let layers = vec![Sample::default(); layers as usize];
        Ok(Fitter { shape, q: k.clone(), k, v, layers, segments: 16, tokens: 128, seed: 0 })
    }

    /// Sets the number of segments to sample of each layer, the most tokens of a segment, and the seed of the sample. If either number is
    /// 0, no segments are sampled. Segments sampled before stay.
    pub fn sample(mut self, segments: usize, tokens: usize, seed: u64) -> Fitter {
        (self.segments, self.tokens, self.seed) = (segments, tokens, seed);
        self
    }

    /// Adds consecutive rows of `layer`, of one sequence: `q`, `[rows][query_heads][k_dim]`, `k`, `[rows][kv_heads][k_dim]`, and `v`,
    /// `[rows][kv_heads][v_dim]`.
    ///
    /// Pass the rows that the cache gets: keys and queries before their rotation if the layer has a
    /// [`rope`](pikv_core::plan::LayerShape::rope), else rotated.
    ///
    /// # Errors
    /// A layer out of range, slices of different numbers of rows, values that are not finite; nothing is added then.
    pub fn observe(&mut self, layer: u32, q: &[f32], k: &[f32], v: &[f32]) -> Result<(), FitError> {
        let FitShape { query_heads, kv_heads, k_dim, v_dim, .. } = self.shape;
        let first = self.shape.at(layer, 0)?;
        let (heads, group) = (kv_heads as usize, self.shape.group());
        let (kd, vd) = (k_dim as usize, v_dim as usize);
        let rows = k.len() / (heads * kd);
        for (what, values, width) in
            [("q", q, query_heads as usize * kd), ("k", k, heads * kd), ("v", v, heads * vd)]
        {
            if values.len() != rows * width {
                return Err(FitError::Rows { what, len: values.len(), rows, width });
            }
            finite(what, values)?;
        }
        for (i, row) in q.chunks_exact(kd).enumerate() {
            self.q[first + i % (heads * group) / group].add(row);
        }
        for (moments, values, width) in [(&mut self.k, k, kd), (&mut self.v, v, vd)] {
            for (i, row) in values.chunks_exact(width).enumerate() {
                moments[first + i % heads].add(row);
            }
        }
        if self.segments == 0 || self.tokens == 0 {
            return Ok(());
        }
        let sample = &mut self.layers[layer as usize];
        for start in (0..rows).step_by(self.tokens) {
            let piece = start..rows.min(start + self.tokens);
            let cut = |values: &[f32], width| values[piece.start * width..piece.end * width].to_vec();
            let segment =
                || Segment { q: cut(q, heads * group * kd), k: cut(k, heads * kd), v: cut(v, heads * vd) };
            sample.offered += 1;
            if sample.kept.len() < self.segments {
                sample.kept.push(segment());
            } else {
                let place = hash::mix(self.seed ^ hash::mix(sample.offered)) % sample.offered;
                if let Some(kept) = sample.kept.get_mut(place as usize) {
                    *kept = segment();
                }
            }
        }
        Ok(())
    }

    /// The shape.
    pub fn shape(&self) -> FitShape {
        self.shape
    }

    /// Moments of the keys of a head.
    ///
    /// # Errors
    /// [`FitError::Head`] for a layer or head out of range.
    pub fn k(&self, layer: u32, head: u32) -> Result<&Moments, FitError> {
        Ok(&self.k[self.shape.at(layer, head)?])
    }

    /// Moments of the values of a head.
    ///
    /// # Errors
    /// [`FitError::Head`] for a layer or head out of range.
    pub fn v(&self, layer: u32, head: u32) -> Result<&Moments, FitError> {
        Ok(&self.v[self.shape.at(layer, head)?])
    }

    /// Moments of the queries that read a KV head, over all query heads of its group.
    ///
    /// # Errors
    /// [`FitError::Head`] for a layer or head out of range.
    pub fn q(&self, layer: u32, head: u32) -> Result<&Moments, FitError> {
        Ok(&self.q[self.shape.at(layer, head)?])
    }

    /// The sampled segments, for one KV head.
    ///
    /// # Errors
    /// [`FitError::Head`] for a layer or head out of range.
    pub fn segments(&self, layer: u32, head: u32) -> Result<Vec<Segment>, FitError> {
        self.shape.at(layer, head)?;
        let FitShape { kv_heads, k_dim, v_dim, .. } = self.shape;
        let (heads, head) = (kv_heads as usize, head as usize);
        let of = |values: &[f32], width: usize| -> Vec<f32> {
            values.chunks_exact(width).skip(head).step_by(heads).flatten().copied().collect()
        };
        let one = |s: &Segment| Segment {
            q: of(&s.q, self.shape.group() * k_dim as usize),
            k: of(&s.k, k_dim as usize),
            v: of(&s.v, v_dim as usize),
        };
        Ok(self.layers[layer as usize].kept.iter().map(one).collect())
    }

    /// Maps for all layers and KV heads from `make(layer, head)`, made by the method with id `method`.
    ///
    /// # Errors
    /// The first error of `make`.
    pub fn side<E>(
        &self,
        method: &str,
        mut make: impl FnMut(u32, u32) -> Result<Map, E>,
    ) -> Result<FittedSide, E> {
        let heads = (0..self.shape.layers).flat_map(|l| (0..self.shape.kv_heads).map(move |h| (l, h)));
        let maps = heads.map(|(layer, head)| make(layer, head)).collect::<Result<_, E>>()?;
        Ok(FittedSide { method: method.to_owned(), maps })
    }
}
