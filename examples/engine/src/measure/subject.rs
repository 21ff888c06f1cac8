//! A model to measure: the MoE of this repository or a Llama from a GGUF file, behind one interface.

use crate::common::cache::{Cache as AnyCache, Keys};
use crate::llama::{gguf::Gguf, model::Model as Llama, tensors::Weights, tokenizer::Tokenizer};
use crate::moe::model::Model as Moe;
use pikv::{Dtype, LayerShape, Rope};
use std::error::Error;
use std::path::Path;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

enum Kind {
    Moe(Box<Moe>),
    Llama(Box<Llama>, Box<Tokenizer>),
}

pub struct Subject {
    kind: Kind,
    name: String,
    pub layers: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub experts: (u32, u32),
    /// Most tokens that the model was trained for.
    pub context: usize,
    pub rope: Rope,
    window: usize,
}

impl Subject {
    /// The model of a file, or the MoE, with weights in f32.
    pub fn load(gguf: Option<&Path>) -> Result<Subject> {
        Self::load_as(gguf, Weights::F32)
    }

    /// As [`load`](Self::load), with the matrices of a file as `weights` says.
    pub fn load_as(gguf: Option<&Path>, weights: Weights) -> Result<Subject> {
        let threads = gemm_common::Parallelism::Rayon(0);
        let Some(path) = gguf else {
            let mut model = Moe::load(&crate::example("models/austen-moe"))?;
            model.parallelism = threads;
            let c = model.config().clone();
            let rope = Rope::new(c.rope_theta, c.head_dim as u32);
            return Ok(Subject {
                kind: Kind::Moe(Box::new(model)),
                name: "austen-moe".into(),
                layers: c.layers,
                query_heads: c.query_heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                experts: (c.experts as u32, c.top_k as u32),
                context: c.context,
                rope,
                window: 2048,
            });
        };
        let gguf = Gguf::open(path)?;
        let tokenizer = Tokenizer::new(&gguf)?;
        let mut model = Llama::load_as(&gguf, weights)?;
        model.parallelism = threads;
        let (c, rope) = (model.config().clone(), model.rope()?);
        let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().replace(',', " "));
        Ok(Subject {
            kind: Kind::Llama(Box::new(model), Box::new(tokenizer)),
            name,
            layers: c.layers,
            query_heads: c.query_heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            experts: (1, 1),
            context: c.context,
            rope,
            window: 1024,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text in tokens.
    pub fn tokens(&self) -> Result<Vec<u32>> {
        let path = crate::example("text/northangerabbey.txt");
        Ok(match &self.kind {
            Kind::Moe(_) => std::fs::read(path)?.into_iter().map(u32::from).collect(),
            Kind::Llama(_, tokenizer) => tokenizer.encode(&std::fs::read_to_string(path)?)?,
        })
    }

    /// Tokens of a window, each with an empty cache.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Other windows than the 2,048 tokens of the MoE and the 1,024 of a Llama.
    ///
    /// # Errors
    /// 0, or more tokens than the model was trained for.
    pub fn set_window(&mut self, tokens: usize) -> Result<()> {
        if tokens == 0 || tokens > self.context {
            return Err(format!("a window of {tokens} tokens: 1 to {}", self.context).into());
        }
        self.window = tokens;
        Ok(())
    }

    pub fn vocab(&self) -> usize {
        match &self.kind {
            Kind::Moe(_) => crate::moe::model::VOCAB,
            Kind::Llama(model, _) => model.config().vocab,
        }
    }

    /// Sets the form of keys passed to the cache.
    pub fn keys(&mut self, keys: Keys) {
        match &mut self.kind {
            Kind::Moe(model) => model.keys = keys,
            Kind::Llama(model, _) => model.keys = keys,
        }
    }

    pub fn forward<C: AnyCache>(&self, ids: &[u32], cache: &mut C, logits: &mut Vec<f32>) -> Result<()> {
        match &self.kind {
            Kind::Moe(model) => {
                let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
                model.forward(&bytes, cache, logits)?;
            }
            Kind::Llama(model, _) => model.forward(ids, cache, logits)?,
        }
        Ok(())
    }

    /// As [`forward`](Self::forward), with the logits after the last token alone.
    pub fn forward_last<C: AnyCache>(&self, ids: &[u32], cache: &mut C, logits: &mut Vec<f32>) -> Result<()> {
        match &self.kind {
            Kind::Moe(model) => {
                let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
                model.forward_last(&bytes, cache, logits)?;
            }
            Kind::Llama(model, _) => model.forward_last(ids, cache, logits)?,
        }
        Ok(())
    }

    pub fn layer(&self, dtype: Dtype, keys: Keys) -> LayerShape {
        let dim = self.head_dim as u32;
        LayerShape::new(self.kv_heads as u32, self.query_heads as u32, dim, dtype)
            .rope((keys == Keys::Unrotated).then_some(self.rope))
    }
}
