//! Shapes of well-known models.

use crate::config::CacheConfig;
use pikv_core::dtype::Dtype;
use pikv_core::plan::LayerShape;

/// The attention shape of a Mixture-of-Experts model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// Name of the model.
    pub name: &'static str,
    /// Attention layers, including layers with a dense FFN.
    pub layers: u32,
    /// Query heads of a layer.
    pub query_heads: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Channels of a head, of K and of V.
    pub head_dim: u32,
    /// Routed experts of a layer.
    pub experts: u32,
    /// Routed experts a token.
    pub top_k: u32,
    /// Largest context of the model, in tokens.
    pub max_context: u32,
}

impl Geometry {
    /// A dense model: one expert, no limit on its context.
    pub const fn new(
        name: &'static str,
        layers: u32,
        kv_heads: u32,
        query_heads: u32,
        head_dim: u32,
    ) -> Geometry {
        Geometry {
            name,
            layers,
            query_heads,
            kv_heads,
            head_dim,
            experts: 1,
            top_k: 1,
            max_context: u32::MAX,
        }
    }
}

setters!(Geometry { layers: u32, experts: u32, top_k: u32, max_context: u32 });

/// Mixtral 8x7B: `config.json` of mistralai/Mixtral-8x7B-Instruct-v0.1; arXiv 2401.04088, table 1.
pub const MIXTRAL_8X7B: Geometry = Geometry {
    name: "Mixtral-8x7B",
    layers: 32,
    query_heads: 32,
    kv_heads: 8,
    head_dim: 128,
    experts: 8,
    top_k: 2,
    max_context: 32768,
};

/// Qwen1.5-MoE-A2.7B: `config.json` of Qwen/Qwen1.5-MoE-A2.7B-Chat; the base model's context is 8192. Besides the routed experts it has a
/// shared one, which every token uses.
pub const QWEN1_5_MOE_A2_7B: Geometry = Geometry {
    name: "Qwen1.5-MoE-A2.7B",
    layers: 24,
    query_heads: 16,
    kv_heads: 16,
    head_dim: 128,
    experts: 60,
    top_k: 4,
    max_context: 32768,
};

/// OLMoE-1B-7B: `config.json` of allenai/OLMoE-1B-7B-0924; arXiv 2409.02060.
pub const OLMOE_1B_7B: Geometry = Geometry {
    name: "OLMoE-1B-7B",
    layers: 16,
    query_heads: 16,
    kv_heads: 16,
    head_dim: 128,
    experts: 64,
    top_k: 8,
    max_context: 4096,
};

/// DeepSeekMoE 16B: `config.json` of deepseek-ai/deepseek-moe-16b-chat; arXiv 2401.06066. Its first layer's FFN is dense, and every token
/// uses two shared experts besides the routed ones.
pub const DEEPSEEK_MOE_16B: Geometry = Geometry {
    name: "DeepSeekMoE-16B",
    layers: 28,
    query_heads: 16,
    kv_heads: 16,
    head_dim: 128,
    experts: 64,
    top_k: 6,
    max_context: 4096,
};

/// Qwen3-30B-A3B: `config.json` of Qwen/Qwen3-30B-A3B; arXiv 2505.09388. Without its optional scaling of positions.
pub const QWEN3_30B_A3B: Geometry = Geometry {
    name: "Qwen3-30B-A3B",
    layers: 48,
    query_heads: 32,
    kv_heads: 4,
    head_dim: 128,
    experts: 128,
    top_k: 8,
    max_context: 40960,
};

impl Geometry {
    /// The models above.
    pub const ALL: [Geometry; 5] =
        [MIXTRAL_8X7B, QWEN1_5_MOE_A2_7B, OLMOE_1B_7B, DEEPSEEK_MOE_16B, QWEN3_30B_A3B];

    /// The shape of one layer, with K stored as `k` and V as `v`.
    pub const fn layer(&self, k: Dtype, v: Dtype) -> LayerShape {
        let Geometry { query_heads, kv_heads, head_dim, .. } = *self;
        LayerShape::new(kv_heads, query_heads, head_dim, k).values(head_dim, v)
    }

    /// A cache of `budget` bytes for the model and its experts, with the other defaults of [`CacheConfig::new`].
    pub fn config(&self, k: Dtype, v: Dtype, budget: u64) -> CacheConfig {
        CacheConfig::new(vec![self.layer(k, v); self.layers as usize], budget)
            .experts(self.experts, self.top_k)
    }

    /// Bytes of the keys and values of `tokens` tokens, `bits` a channel, without pages, padding and positions.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::planner::Geometry;
    /// // The paper's "> 24 GB": 24 layers of 16 KV heads of 128 channels in fp16, 128K tokens. The experts do not show.
    /// let model = pikv::planner::QWEN1_5_MOE_A2_7B.layers(24);
    /// assert_eq!(model.raw_bytes(131072, 16), 24 << 30);
    /// ```
    pub const fn raw_bytes(&self, tokens: u32, bits: u32) -> u64 {
        let channels = 2 * self.layers as u64 * self.kv_heads as u64 * self.head_dim as u64;
        channels * tokens as u64 * bits as u64 / 8
    }
}
