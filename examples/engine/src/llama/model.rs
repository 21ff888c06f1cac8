//! The forward pass of a Llama from a GGUF file in f32, generic over the cache that holds its keys and values.

use super::gguf::Gguf;
use super::tensors::{Part, Tensors, Weights};
use crate::common::cache::{Cache, Keys, Step};
use crate::common::layers::{Matrix, Products, Rotation, add, frequencies, rms_norm, split_qkv, swiglu};
use gemm_common::Parallelism;
use pikv::Rope;
use std::error::Error;
use std::num::NonZeroUsize;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Model dimensions from the file's metadata.
#[derive(Clone, Debug)]
pub struct Config {
    pub vocab: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub layers: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Channels with RoPE, the first of each head.
    pub rotary_dim: usize,
    pub rope_theta: f64,
    pub context: usize,
    pub rms_eps: f32,
}

impl Config {
    fn load(gguf: &Gguf) -> Result<Self> {
        let architecture = gguf.string("general.architecture")?;
        if architecture != "llama" {
            return Err(format!("general.architecture: {architecture:?}; only \"llama\" is run").into());
        }
        let whole = |name: &str| match gguf.whole(&format!("llama.{name}"))? {
            0 => Err(Box::<dyn Error>::from(format!("llama.{name}: must not be 0"))),
            n => Ok(n as usize),
        };
        let or = |name: &str, default: usize| {
            if gguf.has(&format!("llama.{name}")) { whole(name) } else { Ok(default) }
        };
        if gguf.has("llama.expert_count") && gguf.whole("llama.expert_count")? > 0 {
            return Err("llama.expert_count: a mixture of experts; only dense models are run".into());
        }
        let scaling = "llama.rope.scaling.type";
        if gguf.has(scaling) && gguf.string(scaling)? != "none" {
            return Err(format!("{scaling}: {:?}; only \"none\" is run", gguf.string(scaling)?).into());
        }
        let embed = gguf.dims(EMBED).ok_or_else(|| format!("tensor {EMBED:?}: not in the file"))?;
        let &[_, vocab] = embed else { return Err(format!("tensor {EMBED:?}: dimensions {embed:?}").into()) };
        let (hidden, query_heads) = (whole("embedding_length")?, whole("attention.head_count")?);
        let head_dim = or("attention.key_length", hidden / query_heads)?;
        let theta = "llama.rope.freq_base";
        let config = Self {
            vocab,
            hidden,
            ffn: whole("feed_forward_length")?,
            layers: whole("block_count")?,
            query_heads,
            kv_heads: or("attention.head_count_kv", query_heads)?,
            head_dim,
            rotary_dim: or("rope.dimension_count", head_dim)?,
            rope_theta: if gguf.has(theta) { gguf.real(theta)? } else { 10_000.0 },
            context: whole("context_length")?,
            rms_eps: gguf.real("llama.attention.layer_norm_rms_epsilon")? as f32,
        };
        if !config.query_heads.is_multiple_of(config.kv_heads) {
            return Err(format!(
                "llama.attention.head_count: {query_heads}, no multiple of the {} KV heads",
                config.kv_heads
            )
            .into());
        }
        if or("attention.value_length", head_dim)? != head_dim {
            return Err(format!("llama.attention.value_length: must be as the keys', {head_dim}").into());
        }
        if config.rotary_dim == 0 || config.rotary_dim > head_dim || !config.rotary_dim.is_multiple_of(2) {
            let dim = config.rotary_dim;
            return Err(format!(
                "llama.rope.dimension_count: {dim}, must be even, at least 2 and at most {head_dim}"
            )
            .into());
        }
        if !config.rope_theta.is_finite() || config.rope_theta < 1.0 {
            return Err(format!("{theta}: {}, must be at least 1", config.rope_theta).into());
        }
        Ok(config)
    }
}

struct Layer {
    attention_norm: Vec<f32>,
    /// Outputs: queries, keys, values.
    qkv: Matrix,
    o: Matrix,
    ffn_norm: Vec<f32>,
    /// Outputs: gate, up.
    gate_up: Matrix,
    down: Matrix,
}

/// The weights.
pub struct Model {
    config: Config,
    embed: Vec<f32>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Matrix,
    /// RoPE frequencies of the channel pairs, in radians a position.
    frequencies: Vec<f64>,
    /// Whether the frequencies are scaled for a long context (Llama 3), so that they are not powers of one base.
    frequencies_scaled: bool,
    /// Threads of matrix products; the logits' bits do not depend on it.
    pub parallelism: Parallelism,
    /// Rows of a matrix product ([`Products::rows`]); all at once by default.
    pub rows: Option<NonZeroUsize>,
    /// Form of the keys passed to the cache.
    pub keys: Keys,
}

const EMBED: &str = "token_embd.weight";
const HEAD: &str = "output.weight";
const ROPE_FACTORS: &str = "rope_freqs.weight";

impl Model {
    /// Dequantises all weights, once.
    pub fn load(gguf: &Gguf) -> Result<Self> {
        Self::load_as(gguf, Weights::F32)
    }

    /// As [`load`](Self::load), with the matrices of products as `weights` says.
    pub fn load_as(gguf: &Gguf, weights: Weights) -> Result<Self> {
        let config = Config::load(gguf)?;
        let &Config { vocab, hidden, ffn, head_dim, rotary_dim, .. } = &config;
        let (q, kv) = (config.query_heads * head_dim, config.kv_heads * head_dim);
        let mut tensors = Tensors::new(gguf, weights);
        let mut layer = |l: usize| -> Result<Layer> {
            let name = |part: &str| format!("blk.{l}.{part}.weight");
            let part = |part: &str, outputs| Part { name: name(part), outputs, turned: None };
            let heads = |name, outputs| Part { turned: Some((head_dim, rotary_dim)), ..part(name, outputs) };
            let qkv = [heads("attn_q", q), heads("attn_k", kv), part("attn_v", kv)];
            let qkv = tensors.matrix(hidden, &qkv)?;
            Ok(Layer {
                attention_norm: tensors.values(&name("attn_norm"), &[hidden])?,
                qkv,
                o: tensors.matrix(q, &[part("attn_output", hidden)])?,
                ffn_norm: tensors.values(&name("ffn_norm"), &[hidden])?,
                gate_up: tensors.matrix(hidden, &[part("ffn_gate", ffn), part("ffn_up", ffn)])?,
                down: tensors.matrix(ffn, &[part("ffn_down", hidden)])?,
            })
        };
        let layers = (0..config.layers).map(&mut layer).collect::<Result<_>>()?;
        let mut frequencies = frequencies(config.rope_theta, rotary_dim);
        let frequencies_scaled = gguf.dims(ROPE_FACTORS).is_some();
        if frequencies_scaled {
            let factors = tensors.values(ROPE_FACTORS, &[rotary_dim / 2])?;
            frequencies.iter_mut().zip(factors).for_each(|(f, factor)| *f /= f64::from(factor));
        }
        let embed = tensors.values(EMBED, &[hidden, vocab])?;
        // Without an output head, logits are products with the embeddings.
        let head = if gguf.dims(HEAD).is_none() { EMBED } else { HEAD };
        let head = tensors.matrix(hidden, &[Part { name: head.into(), outputs: vocab, turned: None }])?;
        let norm = tensors.values("output_norm.weight", &[hidden])?;
        tensors.done()?;
        Ok(Self {
            embed,
            layers,
            norm,
            head,
            frequencies,
            frequencies_scaled,
            parallelism: Parallelism::None,
            rows: None,
            keys: Keys::Rotated,
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// RoPE of unrotated keys, for the layers of a cache.
    ///
    /// # Errors
    /// Scaled frequencies.
    pub fn rope(&self) -> Result<Rope> {
        if self.frequencies_scaled {
            return Err(format!("{ROPE_FACTORS}: keys of this model must come rotated").into());
        }
        let (theta, rotary_dim) = (self.config.rope_theta, self.config.rotary_dim as u32);
        Ok(Rope::new(theta, rotary_dim))
    }

    /// Appends `tokens` to the cache and returns the logits after each, `[n][vocab]`.
    ///
    /// # Panics
    /// If a token is not below `vocab`.
    pub fn forward<C: Cache>(
        &self,
        tokens: &[u32],
        cache: &mut C,
        logits: &mut Vec<f32>,
    ) -> std::result::Result<(), C::Error> {
        *logits = self.logits(&self.hidden(tokens, cache)?);
        Ok(())
    }

    /// As [`forward`](Self::forward), with the logits after the last token alone, `[vocab]`.
    ///
    /// # Panics
    /// If a token is not below `vocab`.
    pub fn forward_last<C: Cache>(
        &self,
        tokens: &[u32],
        cache: &mut C,
        logits: &mut Vec<f32>,
    ) -> std::result::Result<(), C::Error> {
        let x = self.hidden(tokens, cache)?;
        *logits = self.logits(&x[x.len() - self.config.hidden..]);
        Ok(())
    }

    fn products(&self) -> Products {
        Products { threads: self.parallelism, rows: self.rows }
    }

    fn logits(&self, x: &[f32]) -> Vec<f32> {
        self.head.mul(&rms_norm(x, &self.norm, self.config.rms_eps), self.products())
    }

    /// What the last layer gives, `[n][hidden]`.
    fn hidden<C: Cache>(&self, tokens: &[u32], cache: &mut C) -> std::result::Result<Vec<f32>, C::Error> {
        let (c, by) = (&self.config, self.products());
        let (q, kv) = (c.query_heads * c.head_dim, c.kv_heads * c.head_dim);
        let embed = |&token: &u32| &self.embed[token as usize * c.hidden..][..c.hidden];
        let mut x = tokens.iter().flat_map(embed).copied().collect::<Vec<f32>>();
        let rotation = Rotation::new(&self.frequencies, (0..tokens.len()).map(|row| cache.position(row)));
        let mut out = vec![0.0; tokens.len() * q];
        let mut step = cache.begin(tokens.len())?;
        for (l, layer) in self.layers.iter().enumerate() {
            let h = rms_norm(&x, &layer.attention_norm, c.rms_eps);
            let [mut queries, mut keys, values] = split_qkv(&layer.qkv.mul(&h, by), q, kv);
            if self.keys == Keys::Rotated {
                rotation.apply(&mut queries, c.query_heads, c.head_dim);
                rotation.apply(&mut keys, c.kv_heads, c.head_dim);
            }
            step.layer(l, &queries, &keys, &values, &mut out)?;
            add(&mut x, &layer.o.mul(&out, by), 1.0);

            let h = rms_norm(&x, &layer.ffn_norm, c.rms_eps);
            add(&mut x, &layer.down.mul(&swiglu(&layer.gate_up.mul(&h, by), c.ffn), by), 1.0);
        }
        step.commit()?;
        Ok(x)
    }
}
