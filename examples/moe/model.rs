//! The forward pass of a Mixtral-layout byte model in f32, generic over the cache that holds its keys and values.

use gemm::Parallelism;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::{error::Error, fs, path::Path};

/// Where a model puts its keys and values, and reads attention from.
pub trait Cache {
    type Error: Error + 'static;
    type Step<'a>: Step<Error = Self::Error>
    where
        Self: 'a;
    /// `n` new tokens follow the ones already there.
    fn begin(&mut self, n: usize) -> Result<Self::Step<'_>, Self::Error>;
    /// Tokens so far: the next token's position.
    fn len(&self) -> usize;
    /// Forgets everything.
    fn clear(&mut self);
}

/// New tokens on their way through the layers.
pub trait Step {
    type Error;
    /// `q`: `[n][query_heads][head_dim]`, `k`, `v`: `[n][kv_heads][head_dim]`; keys and queries come rotated. Writes
    /// `out`, shaped as `q`.
    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Self::Error>;
    /// The experts that the router chose, `[n][top_k]`, first choice first.
    fn experts(&mut self, layer: usize, experts: &[u16]) -> Result<(), Self::Error>;
    /// All layers are written.
    fn commit(self) -> Result<(), Self::Error>;
}

/// The figures of `config.json`.
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
    pub rope_theta: f32,
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
            rope_theta: real("rope_theta")? as f32,
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

/// The vocabulary: bytes.
pub const VOCAB: usize = 256;

/// `[inputs][outputs]`: the transpose of a checkpoint's `[outputs][inputs]`, so that outputs are contiguous.
struct Matrix {
    inputs: usize,
    outputs: usize,
    weights: Vec<f32>,
}

impl Matrix {
    /// The named matrices, of these numbers of outputs, side by side.
    fn load(file: &SafeTensors, inputs: usize, parts: &[(String, usize)]) -> Result<Self, Box<dyn Error>> {
        let outputs = parts.iter().map(|part| part.1).sum();
        let mut weights = vec![0.0; inputs * outputs];
        let mut first = 0;
        for (name, rows) in parts {
            for (o, row) in tensor(file, name, &[*rows, inputs])?.chunks_exact(inputs).enumerate() {
                for (i, &w) in row.iter().enumerate() {
                    weights[i * outputs + first + o] = w;
                }
            }
            first += rows;
        }
        Ok(Self { inputs, outputs, weights })
    }

    /// `x`: `[n][inputs]`; returns `[n][outputs]`.
    fn mul(&self, x: &[f32], threads: Parallelism) -> Vec<f32> {
        let (k, m, n) = (self.inputs, self.outputs, x.len() / self.inputs);
        assert!(x.len() == n * k && self.weights.len() == k * m);
        let mut y = vec![0.0; n * m];
        // gemm's column-major (m × k)(k × n) = (m × n): the weights, x and y as they lie.
        let (w, x, y_ptr) = (self.weights.as_ptr(), x.as_ptr(), y.as_mut_ptr());
        let (cols, k_cols) = (m as isize, k as isize);
        // SAFETY: the asserted lengths are those that the dimensions and strides reach; y is borrowed alone.
        unsafe {
            let no = false;
            gemm::gemm(m, n, k, y_ptr, cols, 1, no, w, cols, 1, x, k_cols, 1, 0.0, 1.0, no, no, no, threads);
        }
        y
    }
}

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
    /// How a matrix product may use threads; the logits' bits do not depend on it.
    pub parallelism: Parallelism,
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
                    gate_up: Matrix::load(&file, hidden, &[w("w1", ffn), w("w3", ffn)])?,
                    down: Matrix::load(&file, ffn, &[w("w2", hidden)])?,
                })
            };
            let qkv = [attention("q", q), attention("k", kv), attention("v", kv)];
            Ok(Layer {
                attention_norm: tensor(&file, &name("input_layernorm"), &[hidden])?,
                qkv: Matrix::load(&file, hidden, &qkv)?,
                o: Matrix::load(&file, q, &[attention("o", hidden)])?,
                moe_norm: tensor(&file, &name("post_attention_layernorm"), &[hidden])?,
                router: Matrix::load(&file, hidden, &[(name("block_sparse_moe.gate"), config.experts)])?,
                experts: (0..config.experts).map(expert).collect::<Result<_, _>>()?,
            })
        };
        Ok(Self {
            embed: tensor(&file, "model.embed_tokens.weight", &[VOCAB, hidden])?,
            layers: (0..config.layers).map(layer).collect::<Result<_, _>>()?,
            norm: tensor(&file, "model.norm.weight", &[hidden])?,
            head: Matrix::load(&file, hidden, &[("lm_head.weight".into(), VOCAB)])?,
            parallelism: Parallelism::None,
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The logits that follow each of `tokens`, `[n][256]`, after what is in the cache; adds them to the cache.
    pub fn forward<C: Cache>(
        &self,
        tokens: &[u8],
        cache: &mut C,
        logits: &mut Vec<f32>,
    ) -> Result<(), C::Error> {
        let (c, threads) = (&self.config, self.parallelism);
        let (q, kv) = (c.query_heads * c.head_dim, c.kv_heads * c.head_dim);
        let embed = |&token: &u8| &self.embed[usize::from(token) * c.hidden..][..c.hidden];
        let mut x = tokens.iter().flat_map(embed).copied().collect::<Vec<f32>>();
        let rope = rope(c, cache.len(), tokens.len());
        let mut out = vec![0.0; tokens.len() * q];
        let mut step = cache.begin(tokens.len())?;
        for (l, layer) in self.layers.iter().enumerate() {
            let h = rms_norm(&x, &layer.attention_norm, c.rms_eps);
            let qkv = layer.qkv.mul(&h, threads);
            let columns = |from: usize, to: usize| -> Vec<f32> {
                qkv.chunks_exact(q + 2 * kv).flat_map(|row| &row[from..to]).copied().collect()
            };
            let (mut queries, mut keys) = (columns(0, q), columns(q, q + kv));
            let values = columns(q + kv, q + 2 * kv);
            rotate(&mut queries, c.query_heads, c, &rope);
            rotate(&mut keys, c.kv_heads, c, &rope);
            step.layer(l, &queries, &keys, &values, &mut out)?;
            add(&mut x, &layer.o.mul(&out, threads), 1.0);

            let h = rms_norm(&x, &layer.moe_norm, c.rms_eps);
            let (chosen, weights) = choose(&layer.router.mul(&h, threads), c);
            step.experts(l, &chosen)?;
            for (e, expert) in layer.experts.iter().enumerate() {
                let slots: Vec<usize> =
                    (0..chosen.len()).filter(|&slot| usize::from(chosen[slot]) == e).collect();
                let row = |slot: &usize| slot / c.top_k * c.hidden..(slot / c.top_k + 1) * c.hidden;
                let h: Vec<f32> = slots.iter().flat_map(|slot| &h[row(slot)]).copied().collect();
                let y = expert.down.mul(&swiglu(&expert.gate_up.mul(&h, threads), c.ffn), threads);
                for (slot, y) in slots.iter().zip(y.chunks_exact(c.hidden)) {
                    add(&mut x[row(slot)], y, weights[*slot]);
                }
            }
        }
        step.commit()?;
        *logits = self.head.mul(&rms_norm(&x, &self.norm, c.rms_eps), threads);
        Ok(())
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

fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
    }
    out
}

/// cos and sin of `n` positions from `first`, `[n][head_dim / 2]`.
fn rope(c: &Config, first: usize, n: usize) -> Vec<(f32, f32)> {
    let exponents = (0..c.head_dim).step_by(2).map(|i| i as f32 / c.head_dim as f32);
    let frequencies: Vec<f32> = exponents.map(|x| 1.0 / c.rope_theta.powf(x)).collect();
    let angles = (first..first + n).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
    angles.map(|angle| (angle.cos(), angle.sin())).collect()
}

/// Rotates `x`, `[n][heads][head_dim]`, channel `i` with `i + head_dim / 2`.
fn rotate(x: &mut [f32], heads: usize, c: &Config, rope: &[(f32, f32)]) {
    for (row, angles) in x.chunks_exact_mut(heads * c.head_dim).zip(rope.chunks_exact(c.head_dim / 2)) {
        for head in row.chunks_exact_mut(c.head_dim) {
            let (a, b) = head.split_at_mut(c.head_dim / 2);
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// `x += scale * y`
fn add(x: &mut [f32], y: &[f32], scale: f32) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += scale * y);
}

/// `silu(gate) * up` of rows `[gate, up]`, `[n][2][ffn]`; `[n][ffn]`.
fn swiglu(rows: &[f32], ffn: usize) -> Vec<f32> {
    let halves = rows.chunks_exact(2 * ffn).map(|row| row.split_at(ffn));
    halves.flat_map(|(g, u)| g.iter().zip(u)).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

/// The `top_k` best of each row of `scores`, `[n][experts]`, and the softmax over them; both `[n][top_k]`.
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

/// What the next byte costs under a row of logits: its negative log-probability.
pub fn nats(logits: &[f32], next: u8) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[usize::from(next)])
}

/// The most likely byte; the first of equals.
pub fn greedy(logits: &[f32]) -> u8 {
    (1..VOCAB).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u8
}

/// A byte drawn from the softmax of `logits / temperature`.
pub fn sample(logits: &[f32], temperature: f32, random: &mut SplitMix) -> u8 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: f32| f64::from((x - max) / temperature).exp();
    let mut left = random.unit() * logits.iter().map(|&x| weight(x)).sum::<f64>();
    for (i, &x) in logits.iter().enumerate() {
        left -= weight(x);
        if left < 0.0 {
            return i as u8;
        }
    }
    greedy(logits)
}

/// SplitMix64.
pub struct SplitMix(pub u64);

impl SplitMix {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// In `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
