//! Models with candle's cache and with pikv, of one shape, behind one call.

use crate::{llama, mixtral, weights};
use candle::{DType, Device, Result, Tensor};
use candle_transformers::models as own;
use pikv_candle::KvCache;
use pikv_candle::pikv::{CacheConfig, Dtype, LayerShape};
use serde::de::DeserializeOwned;

/// Runs tokens, `[batch, tokens]`, from a position on, and returns the logits of the last.
pub type Model = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// Shape of a model; its hidden size is `heads * head_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Size of the vocabulary.
    pub vocabulary: u32,
    /// Attention layers.
    pub layers: usize,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Width of its MLPs.
    pub intermediate: u32,
    /// Positions in the table of rotations.
    pub positions: usize,
    /// Mixtral: experts of a layer; each token takes two.
    pub experts: u32,
    /// Mixtral: `sliding_window` of its configuration.
    pub window: usize,
}

impl Shape {
    /// pikv's configuration for this shape as a dense model; for Mixtral add `experts(shape.experts, 2)`.
    pub fn cache(&self, dtype: Dtype, budget: u64) -> CacheConfig {
        let layer = LayerShape::new(self.kv_heads, self.heads, self.head_dim, dtype);
        CacheConfig::new(vec![layer; self.layers], budget)
    }

    /// Llama of candle-transformers, with its own cache.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn own_llama(&self, dtype: DType) -> Result<Model> {
        let config = self.config::<own::llama::LlamaConfig>()?.into_config(false);
        let mut cache = own::llama::Cache::new(true, dtype, &config, &Device::Cpu)?;
        let model = own::llama::Llama::load(weights(dtype), &config)?;
        Ok(Box::new(move |tokens, position| model.forward(tokens, position, &mut cache)))
    }

    /// Llama of candle-transformers, patched to use pikv.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn llama(&self, dtype: DType, kv: &KvCache) -> Result<Model> {
        let config = self.config::<llama::LlamaConfig>()?.into_config(false);
        let mut cache = llama::Cache::new(true, dtype, &config, &Device::Cpu)?;
        cache.kv = Some(kv.clone());
        let model = llama::Llama::load(weights(dtype), &config)?;
        Ok(Box::new(move |tokens, position| model.forward(tokens, position, &mut cache)))
    }

    /// Mixtral of candle-transformers in f32, with its own cache.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn own_mixtral(&self) -> Result<Model> {
        let mut model = own::mixtral::Model::new(&self.config()?, weights(DType::F32))?;
        Ok(Box::new(move |tokens, position| model.forward(tokens, position)))
    }

    /// Mixtral of candle-transformers in f32, patched to use pikv.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn mixtral(&self, kv: &KvCache) -> Result<Model> {
        let mut model = mixtral::Model::new(&self.config()?, weights(DType::F32))?;
        model.set_kv_cache(kv);
        Ok(Box::new(move |tokens, position| model.forward(tokens, position)))
    }

    /// A configuration of candle-transformers, as `config.json` gives it.
    fn config<T: DeserializeOwned>(&self) -> Result<T> {
        let json = serde_json::json!({
            "vocab_size": self.vocabulary, "hidden_size": self.heads * self.head_dim,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0, "max_position_embeddings": self.positions, "hidden_act": "silu",
            "sliding_window": self.window, "num_experts_per_tok": 2, "num_local_experts": self.experts,
            "use_flash_attn": false,
        });
        serde_json::from_value(json).map_err(candle::Error::wrap)
    }
}
