//! A tiny Llama of candle-transformers, patched to use pikv: a batch, a fork, a reset. Its weights and its text are random.
//!
//! `cargo run -p pikv-candle-models --example tiny_llama [-- TOKENS]`, in `pikv-candle`.

use candle::{DType, Device, Result, Tensor};
use pikv_candle::KvCache;
use pikv_candle::pikv::{Cache, CacheConfig, Dtype, LayerShape};
use pikv_candle_models::{llama, weights};
use std::error::Error;

/// In the form of a model's `config.json`: 8 query heads of 16 channels share 2 KV heads.
const CONFIG: &str = r#"{"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096}"#;

/// A model, and the cache of its keys and values.
struct Engine {
    model: llama::Llama,
    cache: llama::Cache,
    kv: KvCache,
}

impl Engine {
    fn new(budget: u64) -> std::result::Result<Engine, Box<dyn Error>> {
        let config = serde_json::from_str::<llama::LlamaConfig>(CONFIG)?.into_config(false);
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let layer =
            LayerShape::new(kv_heads as u32, heads as u32, (config.hidden_size / heads) as u32, Dtype::Bf16);
        let kv = KvCache::new(Cache::new(CacheConfig::new(vec![layer; config.num_hidden_layers], budget))?);
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        cache.kv = Some(kv.clone());
        Ok(Engine { model: llama::Llama::load(weights(DType::F32), &config)?, cache, kv })
    }

    /// Likeliest next token of each sequence of the batch, `[batch, tokens]`.
    fn next(&mut self, tokens: &[Vec<u32>]) -> Result<Vec<u32>> {
        let tokens = Tensor::from_vec(tokens.concat(), (tokens.len(), tokens[0].len()), &Device::Cpu)?;
        let logits = self.model.forward(&tokens, self.kv.current_seq_len(), &mut self.cache)?;
        logits.argmax(1)?.to_vec1()
    }

    /// Generates `n` tokens after the prompts.
    fn generate(&mut self, prompts: &[Vec<u32>], n: usize) -> Result<Vec<Vec<u32>>> {
        let mut texts = vec![Vec::new(); prompts.len()];
        let mut given = prompts.to_vec();
        for _ in 0..n {
            let next = self.next(&given)?;
            given = next.iter().map(|token| vec![*token]).collect();
            texts.iter_mut().zip(next).for_each(|(text, token)| text.push(token));
        }
        Ok(texts)
    }

    fn held(&self) -> String {
        let taken = self.kv.cache().usage().taken;
        format!("{} tokens a sequence, {taken} bytes of pages", self.kv.current_seq_len())
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let n = std::env::args().nth(1).map_or(Ok(16), |n| n.parse())?;
    let mut engine = Engine::new(16 << 20)?;
    let prompts = [vec![1, 15, 43, 7, 99, 120], vec![1, 300, 2, 8, 44, 17]];

    // A batch: prompts of one length, then one token of each in every pass.
    let both = engine.generate(&prompts, n)?;
    println!("two in a batch   {both:?}\n                 {}", engine.held());

    // Two continuations of one prompt, whose pages they share.
    engine.kv.reset();
    engine.next(&prompts[..1])?;
    let other = engine.kv.fork();
    for first in [5, 6] {
        let text = engine.generate(&[vec![first]], n)?;
        println!("after {first}          {text:?}");
        engine.kv.swap(&other);
    }
    println!("                 {}", engine.held());
    drop(other);

    // A new batch of one sequence: it generates the same tokens as beside another.
    engine.kv.reset();
    println!("after a reset    {}", engine.held());
    let alone = engine.generate(&prompts[..1], n)?;
    println!("the first alone  {alone:?}");
    Ok(())
}
