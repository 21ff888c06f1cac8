//! The forward pass of a byte-level MoE in f32, generic over the cache that holds its keys and values.

use crate::common::cache::{Cache, Keys, Step};
use crate::common::layers::{Matrix, Products, Rotation, add, frequencies, rms_norm, split_qkv, swiglu};
use gemm_common::Parallelism;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::{error::Error, fs, num::NonZeroUsize, path::Path};

/// Model dimensions from `config.json`.
#[derive(Clone, Debug)]
pub struct Config {
    pub hidden: usize,
    pub ffn: usize,
    pub layers: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub experts: usize,
    pub top_k: usize,
    pub context: usize,
    pub rms_eps: f32,
    pub rope_theta: f64,
}

impl Config {
    fn load(path: &Path) -> Result<Self, Box<dyn Error>> {
        let json: serde_json::Value = serde_json::from_slice(&read(path)?)?;
        let real = |name: &str| json[name].as_f64().ok_or_else(|| format!("{name}: missing or no number"));
        let whole = |name: &str| match json[name].as_u64() {
            Some(x) if x > 0 => Ok(x as usize),
            _ => Err(format!("{name}: missing or no positive integer")),
        };
        let config = Self {
            hidden: whole("hidden_size")?,
            ffn: whole("intermediate_size")?,
            layers: whole("num_hidden_layers")?,
            query_heads: whole("num_attention_heads")?,
            kv_heads: whole("num_key_value_heads")?,
            head_dim: whole("head_dim")?,
            experts: whole("num_local_experts")?,
            top_k: whole("num_experts_per_tok")?,
            context: whole("max_position_embeddings")?,
            rms_eps: real("rms_norm_eps")? as f32,
            rope_theta: real("rope_theta")?,
        };
        if whole("vocab_size")? != VOCAB {
            return Err(format!("vocab_size: {}, must be {VOCAB} (bytes)", json["vocab_size"]).into());
        }
        if !config.query_heads.is_multiple_of(config.kv_heads) || !config.head_dim.is_multiple_of(2) {
            return Err("query heads must be a multiple of KV heads, and head_dim even".into());
        }
        if config.top_k > config.experts || config.experts > usize::from(u16::MAX) {
            return Err(format!("top {} of {} experts", config.top_k, config.experts).into());
        }
        Ok(config)
    }
}

/// Size of the vocabulary: one token a byte.
pub const VOCAB: usize = 256;

struct Layer {
    attention_norm: Vec<f32>,
    /// Outputs: queries, keys, values.
    qkv: Matrix,
    o: Matrix,
    moe_norm: Vec<f32>,
    router: Matrix,
    experts: Vec<Expert>,
}

struct Expert {
    /// Outputs: gate (`w1`), up (`w3`).
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
    /// Threads of matrix products; the logits' bits do not depend on it.
    pub parallelism: Parallelism,
    /// Rows of a matrix product ([`Products::rows`]); all at once by default.
    pub rows: Option<NonZeroUsize>,
    /// Form of the keys passed to the cache.
    pub keys: Keys,
}

impl Model {
    /// Reads `config.json` and `model.safetensors`.
    pub fn load(dir: &Path) -> Result<Self, Box<dyn Error>> {
        let config = Config::load(&dir.join("config.json"))?;
        let bytes = read(&dir.join("model.safetensors"))?;
        let file = SafeTensors::deserialize(&bytes)?;
        let (hidden, ffn, head_dim) = (config.hidden, config.ffn, config.head_dim);
        let (q, kv) = (config.query_heads * head_dim, config.kv_heads * head_dim);
        let layer = |l: usize| -> Result<Layer, Box<dyn Error>> {
            let name = |part: &str| format!("model.layers.{l}.{part}.weight");
            let attention = |part: &str, outputs| (name(&format!("self_attn.{part}_proj")), outputs);
            let expert = |e: usize| {
                let w =
                    |part: &str, outputs| (name(&format!("block_sparse_moe.experts.{e}.{part}")), outputs);
                Ok::<_, Box<dyn Error>>(Expert {
                    gate_up: matrix(&file, hidden, &[w("w1", ffn), w("w3", ffn)])?,
                    down: matrix(&file, ffn, &[w("w2", hidden)])?,
                })
            };
            let qkv = [attention("q", q), attention("k", kv), attention("v", kv)];
            Ok(Layer {
                attention_norm: tensor(&file, &name("input_layernorm"), &[hidden])?,
                qkv: matrix(&file, hidden, &qkv)?,
                o: matrix(&file, q, &[attention("o", hidden)])?,
                moe_norm: tensor(&file, &name("post_attention_layernorm"), &[hidden])?,
                router: matrix(&file, hidden, &[(name("block_sparse_moe.gate"), config.experts)])?,
                experts: (0..config.experts).map(expert).collect::<Result<_, _>>()?,
            })
        };
        Ok(Self {
            embed: tensor(&file, "model.embed_tokens.weight", &[VOCAB, hidden])?,
            layers: (0..config.layers).map(layer).collect::<Result<_, _>>()?,
            norm: tensor(&file, "model.norm.weight", &[hidden])?,
            head: matrix(&file, hidden, &[("lm_head.weight".into(), VOCAB)])?,
            parallelism: Parallelism::None,
            rows: None,
            keys: Keys::Rotated,
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Appends `tokens` to the cache and returns the logits after each, `[n][256]`.
    pub fn forward<C: Cache>(
        &self,
        tokens: &[u8],
        cache: &mut C,
        logits: &mut Vec<f32>,
    ) -> Result<(), C::Error> {
        *logits = self.logits(&self.hidden(tokens, cache)?);
        Ok(())
    }

    /// As [`forward`](Self::forward), with the logits after the last token alone, `[256]`.
    pub fn forward_last<C: Cache>(
        &self,
        tokens: &[u8],
        cache: &mut C,
        logits: &mut Vec<f32>,
    ) -> Result<(), C::Error> {
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
    fn hidden<C: Cache>(&self, tokens: &[u8], cache: &mut C) -> Result<Vec<f32>, C::Error> {
        let (c, by) = (&self.config, self.products());
        let (q, kv) = (c.query_heads * c.head_dim, c.kv_heads * c.head_dim);
        let embed = |&token: &u8| &self.embed[usize::from(token) * c.hidden..][..c.hidden];
        let mut x = tokens.iter().flat_map(embed).copied().collect::<Vec<f32>>();
        let rotation = Rotation::new(
            &frequencies(c.rope_theta, c.head_dim),
            (0..tokens.len()).map(|row| cache.position(row)),
        );
        let mut out = vec![0.0; tokens.len() * q];
        let mut step = cache.begin(tokens.len())?;
        for (l, layer) in self.layers.iter().enumerate() {
            let h = rms_norm(&x, &layer.attention_norm, c.rms_eps);
            let [mut queries, mut keys, values] = split_qkv(&layer.qkv.mul(&h, by), q, kv);
            if self.keys == Keys::Rotated {
                rotation.apply(&mut queries, c.query_heads, c.head_dim);
                rotation.apply(&mut keys, c.kv_heads, c.head_dim);
            }
            if C::Step::GATES {
                let h = rms_norm(&x, &layer.moe_norm, c.rms_eps);
                step.gates(l, &layer.router.mul(&h, by))?;
            }
            step.layer(l, &queries, &keys, &values, &mut out)?;
            add(&mut x, &layer.o.mul(&out, by), 1.0);

            let h = rms_norm(&x, &layer.moe_norm, c.rms_eps);
            let (chosen, weights) = choose(&layer.router.mul(&h, by), c);
            step.experts(l, &chosen)?;
            for (e, expert) in layer.experts.iter().enumerate() {
                let slots: Vec<usize> =
                    (0..chosen.len()).filter(|&slot| usize::from(chosen[slot]) == e).collect();
                let row = |slot: &usize| slot / c.top_k * c.hidden..(slot / c.top_k + 1) * c.hidden;
                let h: Vec<f32> = slots.iter().flat_map(|slot| &h[row(slot)]).copied().collect();
                let y = expert.down.mul(&swiglu(&expert.gate_up.mul(&h, by), c.ffn), by);
                for (slot, y) in slots.iter().zip(y.chunks_exact(c.hidden)) {
                    add(&mut x[row(slot)], y, weights[*slot]);
                }
            }
        }
        step.commit()?;
        Ok(x)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn tensor(file: &SafeTensors, name: &str, shape: &[usize]) -> Result<Vec<f32>, Box<dyn Error>> {
    let view = file.tensor(name).map_err(|e| format!("{name}: {e}"))?;
    if view.shape() != shape {
        return Err(format!("{name}: shape {:?}, must be {shape:?}", view.shape()).into());
    }
    let halves = view.data().chunks_exact(2).map(|b| [b[0], b[1]]);
    match view.dtype() {
        Dtype::F16 => Ok(halves.map(|b| f16::from_le_bytes(b).to_f32()).collect()),
        Dtype::BF16 => Ok(halves.map(|b| bf16::from_le_bytes(b).to_f32()).collect()),
        other => Err(format!("{name}: {other:?}, must be F16 or BF16").into()),
    }
}

/// Loads named matrices, given with their numbers of outputs, and joins them side by side.
fn matrix(file: &SafeTensors, inputs: usize, parts: &[(String, usize)]) -> Result<Matrix, Box<dyn Error>> {
    let load = |(name, outputs): &(String, usize)| tensor(file, name, &[*outputs, inputs]);
    Ok(Matrix::new(inputs, &parts.iter().map(load).collect::<Result<Vec<_>, _>>()?))
}

/// The `top_k` highest of each row of `scores`, `[n][experts]`, and the softmax over them; both `[n][top_k]`.
fn choose(scores: &[f32], c: &Config) -> (Vec<u16>, Vec<f32>) {
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for row in scores.chunks_exact(c.experts) {
        let mut order: Vec<usize> = (0..c.experts).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order.truncate(c.top_k);
        let sum: f32 = order.iter().map(|&e| (row[e] - row[order[0]]).exp()).sum();
        weights.extend(order.iter().map(|&e| (row[e] - row[order[0]]).exp() / sum));
        chosen.extend(order.iter().map(|&e| e as u16));
    }
    (chosen, weights)
}
