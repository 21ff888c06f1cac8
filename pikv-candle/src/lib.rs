#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod error;
mod pass;
mod tensors;

pub use error::Error;
pub use pikv;

use crate::pass::Held;
use crate::tensors::{Given, Rows, rows, zeros};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use pikv::{Attend, Cache, AttendOutput, Sequence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Keys and values of a batch of sequences, for all layers of a model: a [`pikv::Cache`] behind calls that take and return
/// tensors. Clones are handles of the same batch.
///
/// A model's pass is a [`pikv::Step`]. The first [`attend`](KvCache::attend) of a pass begins it, and adds as many tokens to each sequence
/// as the tensors have. The last layer's `attend` commits it, or, in a cache with experts, the last layer's [`route`](KvCache::route). If a
/// call fails, the whole pass is undone. If the model fails between calls, the next pass undoes the unfinished one first. The batch is then
/// as it was before the pass.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use pikv_candle::KvCache;
/// use pikv_candle::pikv::{Attend, Cache, CacheConfig, Dtype, LayerShape};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = LayerShape::new(2, 8, 64, Dtype::Bf16);        // 2 KV heads, 8 query heads, head_dim 64
/// let kv = KvCache::new(Cache::new(CacheConfig::new(vec![layer; 4], 64 << 20))?);
/// for tokens in [5, 1, 1] {                                  // a prompt, then two tokens more
///     let x = |heads| Tensor::ones((1, heads, tokens, 64), DType::BF16, &Device::Cpu);
///     for layer in 0..4 {
///         let y = kv.attend(layer, &x(8)?, &x(2)?, &x(2)?, &Attend::new(0.125))?;
///         assert_eq!((y.dims(), y.dtype()), (&[1, 8, tokens, 64][..], DType::BF16));
///     }
/// }
/// assert_eq!(kv.current_seq_len(), 7);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct KvCache {
    cache: Cache,
    held: Arc<Mutex<Held>>,
}

impl KvCache {
    /// An empty batch of `cache`; the first pass sets the number of sequences.
    pub fn new(cache: Cache) -> KvCache {
        KvCache { cache, held: Arc::new(Mutex::new(Held::default())) }
    }

    /// Cache of the sequences: its budget, its usage, its configuration.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// A handle of one layer, for the attention block that owns it. The index is checked when the handle is used.
    pub fn layer(&self, layer: usize) -> LayerCache {
        LayerCache { kv: self.clone(), layer }
    }

    /// Adds keys and values of a layer to the batch, and attends its queries over all tokens so far. `q` is
    /// `[batch, query_heads, tokens, k_dim]`, `k` `[batch, kv_heads, tokens, k_dim]`, `v` `[batch, kv_heads, tokens, v_dim]`, as in
    /// candle's models, each in f32, f16 or bf16; the result is `[batch, query_heads, tokens, v_dim]` in the dtype of `q`. KV heads must
    /// not be repeated, and there is no mask: a token sees itself and the tokens before it, within the layer's window. The model rotates
    /// keys and queries, unless the layer has a [`Rope`](pikv::Rope).
    ///
    /// pikv reads and writes tensors token by token, `[batch, tokens, heads, dim]`. A tensor whose `transpose(1, 2)` is contiguous is read
    /// in place: any that was transposed from that layout, and any of a single token. Others are copied once. The result is such a view;
    /// transposed back it is contiguous.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`] and [`Error::Device`] for tensors that do not fit the layer, [`Error::Batch`] for another number
    /// of sequences than the batch has, [`Error::Cache`] for errors of the cache, above all
    /// [`pikv::Error::OutOfBudget`]. The pass is undone.
    pub fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &Attend,
    ) -> Result<Tensor, Error> {
        let layers = &self.cache.config().layers;
        let out = self.lock().in_pass(|held| {
            let shape = layers.get(layer).ok_or(pikv::Error::Layer { layer, layers: layers.len() })?;
            let (heads, kv_heads) = (shape.query_heads as usize, shape.kv_heads as usize);
            let (k_dim, v_dim) = (shape.layout.k_dim as usize, shape.layout.v_dim as usize);
            let of = Given::of(q)?;
            let q = of.rows("q", q, heads, k_dim)?;
            let (k, v) = (of.rows("k", k, kv_heads, k_dim)?, of.rows("v", v, kv_heads, v_dim)?);
            held.enter(&self.cache, of, layer)?;
            let out = held.step(|step| {
                rows!(k, |k| rows!(v, |v| step.append(layer, k, v)))?;
                rows!(q, |q| {
                    let mut out = zeros(q, of.batch * of.tokens * heads * v_dim);
                    step.attend(layer, q, options, AttendOutput::new(&mut out))?;
                    Tensor::from_vec(out, (of.batch, of.tokens, heads, v_dim), &Device::Cpu)
                })
            })?;
            held.appended(layer)?;
            Ok(out)
        })?;
        Ok(out.transpose(1, 2)?)
    }

    /// Files the tokens of a layer by experts, in a cache with experts ([`CacheConfig::experts`](pikv::CacheConfig::experts)). `weights`
    /// are the gate's weights or logits, `[rows, experts]` in f32, f16 or bf16, the rows of a pass in the order of its tensors. A token's
    /// experts are its `top_k` largest, the first among equals. Call it after the layer's `attend`. In a cache with one expert it does
    /// nothing.
    ///
    /// # Errors
    /// [`Error::NotAttended`], or as [`attend`](KvCache::attend); the pass is undone.
    pub fn route(&self, layer: usize, weights: &Tensor) -> Result<(), Error> {
        let (experts, top_k) = (self.cache.config().experts as usize, self.cache.config().top_k as usize);
        if experts == 1 {
            return Ok(());
        }
        self.lock().in_pass(|held| {
            let (rows, width) = weights.dims2()?;
            let weights = Rows::plain("weights", weights)?;
            let expected = held.attended(layer)?;
            if (rows, width) != (expected, experts) {
                let (got, expected) = (vec![rows, width], vec![expected, experts]);
                return Err(Error::Shape { what: "weights", got, expected });
            }
            let wide = weights.tensor().to_dtype(DType::F32)?.to_vec2::<f32>()?;
            held.step(|step| Ok(step.route(layer, &largest(&wide, top_k))?))?;
            held.routed(layer)
        })
    }

    /// Tokens of the longest sequence, without those of an unfinished pass.
    pub fn current_seq_len(&self) -> usize {
        self.sequences(|sequences| {
            sequences.iter().map(|of| of.next_position().0 as usize).max().unwrap_or_default()
        })
    }

    /// Drops the batch: the next pass begins a new one, of any number of sequences.
    pub fn reset(&self) {
        self.sequences(Vec::clear);
    }

    /// A fork of the batch, which continues on its own and shares the pages held so far ([`Sequence::fork`]). A model that owns handles of
    /// this batch continues with the fork after [`swap`](KvCache::swap).
    pub fn fork(&self) -> KvCache {
        let forks = self.sequences(|sequences| sequences.iter().map(Sequence::fork).collect());
        KvCache { cache: self.cache.clone(), held: Arc::new(Mutex::new(Held::Rest(forks))) }
    }

    /// Exchanges the batches of two handles of one cache, with all their clones: a model that owns handles can so serve several batches.
    /// Unfinished passes are undone.
    pub fn swap(&self, other: &KvCache) {
        if Arc::ptr_eq(&self.held, &other.held) {
            return;
        }
        // A fixed order of locks, for any two handles.
        let (first, second) =
            if Arc::as_ptr(&self.held) < Arc::as_ptr(&other.held) { (self, other) } else { (other, self) };
        let (mut first, mut second) = (first.lock(), second.lock());
        std::mem::swap(first.rest(), second.rest());
    }

    /// Calls `f` with the sequences of the batch, for all other operations of pikv: save, park, rollback, prefix look-up. An unfinished
    /// pass is undone first. `f` may add and remove sequences of the same cache. It must not use this handle or a clone, which are
    /// locked meanwhile.
    pub fn sequences<T>(&self, f: impl FnOnce(&mut Vec<Sequence>) -> T) -> T {
        f(self.lock().rest())
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cache of one layer, to replace `candle_nn::kv_cache::KvCache` in a model's attention block: [`KvCache::layer`].
#[derive(Clone, Debug)]
pub struct LayerCache {
    kv: KvCache,
    layer: usize,
}

impl LayerCache {
    /// [`KvCache::attend`] of this layer.
    ///
    /// # Errors
    /// The errors of [`KvCache::attend`]: tensors that do not fit the layer, and errors of the cache.
    pub fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, options: &Attend) -> Result<Tensor, Error> {
        self.kv.attend(self.layer, q, k, v, options)
    }

    /// [`KvCache::route`] of this layer.
    ///
    /// # Errors
    /// The errors of [`KvCache::route`]: [`Error::NotAttended`], and those of `attend`.
    pub fn route(&self, weights: &Tensor) -> Result<(), Error> {
        self.kv.route(self.layer, weights)
    }

    /// The cache of all layers that this handle belongs to.
    pub fn all(&self) -> &KvCache {
        &self.kv
    }
}

/// Indices of the `n` largest of each row, the largest first, the first among equals.
fn largest(rows: &[Vec<f32>], n: usize) -> Vec<u16> {
    let (mut order, mut all): (Vec<u16>, Vec<u16>) = (Vec::new(), Vec::new());
    for row in rows {
        order.clear();
        order.extend(0..row.len() as u16);
        order.sort_by(|&a, &b| row[usize::from(b)].total_cmp(&row[usize::from(a)]));
        all.extend_from_slice(&order[..n.min(order.len())]);
    }
    all
}
