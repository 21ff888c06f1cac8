//! The server's interface to a model: encoding of text, and logits of a batch of sequences.

use crate::{Options, Store};
use pikv::codec::{Codec, Coding};
use pikv::tiers::Tiers;
use pikv::{Cache, CacheConfig, Dtype, LayerShape};
use pikv_engine::Parallelism;
use pikv_engine::llama::{gguf::Gguf, model::Model as Llama, tokenizer::Tokenizer};
use pikv_engine::moe::batch::Batch;
use pikv_engine::moe::model::{Model as Moe, VOCAB};
use std::error::Error;
use std::num::NonZeroUsize;
use std::path::Path;

/// Rows of a matrix product. A fixed number makes a request's logits independent of other requests in the step.
const ROWS: NonZeroUsize = NonZeroUsize::new(8).unwrap();

enum Kind {
    Moe(Box<Moe>),
    Llama(Box<Llama>, Box<Tokenizer>),
}

/// A model with its tokenizer.
pub struct Model {
    pub name: String,
    /// Bytes and time of the file with the weights. Part of the scope of prefixes: those of other weights are not found.
    pub revision: String,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Number of tokens of the vocabulary.
    pub vocab: usize,
    /// The token that ends a text.
    pub end: Option<u32>,
    /// The tokens that begin and end a message, if the model was trained on ChatML.
    pub chat: Option<(u32, u32)>,
    bos: Option<u32>,
    layers: usize,
    /// KV heads, query heads, channels of each.
    pub heads: (usize, usize, usize),
    experts: (usize, usize),
    kind: Kind,
}

impl Model {
    /// The MoE of this repository: its tokens are bytes, and it continues text.
    pub fn moe() -> Result<Model, Box<dyn Error>> {
        let mut model = Moe::load(&pikv_engine::example("models/austen-moe"))?;
        (model.parallelism, model.rows) = (Parallelism::Rayon(0), Some(ROWS));
        let c = model.config().clone();
        let (name, context, vocab, layers) = ("austen-moe".into(), c.context, VOCAB, c.layers);
        let (heads, experts) = ((c.kv_heads, c.query_heads, c.head_dim), (c.experts, c.top_k));
        let revision = revision(&pikv_engine::example("models/austen-moe/model.safetensors"))?;
        let (end, chat, bos, kind) = (None, None, None, Kind::Moe(Box::new(model)));
        Ok(Model { name, revision, context, vocab, end, chat, bos, layers, heads, experts, kind })
    }

    /// A Llama from GGUF, without a revision.
    pub fn llama(name: &str, gguf: &Gguf) -> Result<Model, Box<dyn Error>> {
        let tokenizer = Tokenizer::new(gguf)?;
        let mut model = Llama::load(gguf)?;
        (model.parallelism, model.rows) = (Parallelism::Rayon(0), Some(ROWS));
        let c = model.config().clone();
        let end = "tokenizer.ggml.eos_token_id";
        let template = "tokenizer.chat_template";
        // Chat templates are programs. Only ChatML is supported; it is recognised by its tokens.
        let template = if gguf.has(template) { gguf.string(template)? } else { "" };
        let token = |text: &str| tokenizer.token(text.as_bytes()).filter(|_| template.contains(text));
        let end = if gguf.has(end) { Some(gguf.whole(end)?) } else { None };
        let chat = token("<|im_start|>").zip(token("<|im_end|>"));
        let (bos, vocab) = (tokenizer.bos(), tokenizer.len().min(c.vocab));
        let (name, revision, context, layers) = (name.into(), String::new(), c.context, c.layers);
        let (heads, experts) = ((c.kv_heads, c.query_heads, c.head_dim), (1, 1));
        let kind = Kind::Llama(Box::new(model), Box::new(tokenizer));
        Ok(Model { name, revision, context, vocab, end, chat, bos, layers, heads, experts, kind })
    }

    pub fn open(path: &Path) -> Result<Model, Box<dyn Error>> {
        let name = path.file_stem().map_or_else(|| "llama".into(), |name| name.to_string_lossy());
        Ok(Model { revision: revision(path)?, ..Model::llama(&name, &Gguf::open(path)?)? })
    }

    /// Builds a cache for the options.
    pub fn cache(&self, options: &Options) -> Result<Cache, pikv::Error> {
        let dtype = if let Store::Dtype(dtype) = options.store { dtype } else { Dtype::Bf16 };
        let (kv_heads, query_heads, dim) = self.heads;
        let layer = LayerShape::new(kv_heads as u32, query_heads as u32, dim as u32, dtype);
        let mut config = CacheConfig::new(vec![layer; self.layers], options.budget)
            .ring(options.ring)
            .experts(self.experts.0 as u32, self.experts.1 as u32);
        if let Store::Packed(code) = options.store {
            config = config.compress(Codec::new(Coding::new(code), Coding::new(code)));
        }
        if options.parking > 0 {
            config = config.tiers(Tiers::new().host(options.parking));
        }
        Cache::new(config)
    }

    /// Encodes a text, with the model's start token in front.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut tokens = Vec::from_iter(self.bos);
        match &self.kind {
            Kind::Moe(_) => tokens.extend(text.bytes().map(u32::from)),
            Kind::Llama(_, tokenizer) => {
                tokens.extend(tokenizer.encode(text).map_err(|error| error.to_string())?);
            }
        }
        Ok(tokens)
    }

    /// Encodes messages in ChatML, each a role and a text, up to the start of the assistant's answer; `None` without that template.
    pub fn encode_chat(&self, messages: &[(String, String)]) -> Option<Result<Vec<u32>, String>> {
        let ((start, end), Kind::Llama(_, tokenizer)) = (self.chat?, &self.kind) else { return None };
        Some(tokenizer.chat(messages, start, end).map_err(|error| error.to_string()))
    }

    /// Bytes of a token; empty for a control token.
    pub fn bytes(&self, token: u32) -> Vec<u8> {
        let control = self.chat.is_some_and(|(start, end)| token == start || token == end);
        match &self.kind {
            _ if control || Some(token) == self.end => Vec::new(),
            Kind::Moe(_) => vec![token as u8],
            Kind::Llama(_, tokenizer) => tokenizer.decode(&[token]).unwrap_or_default(),
        }
    }

    /// Appends tokens to the sequences of a batch in one step of the cache, and returns the logits after each, `[tokens][vocab]`.
    ///
    /// # Errors
    /// The errors of [`Cache::begin`] and [`pikv::Step`]; the sequences are unchanged then.
    pub fn forward(
        &self,
        batch: &mut Batch<'_>,
        tokens: &[u32],
        logits: &mut Vec<f32>,
    ) -> Result<(), pikv::Error> {
        match &self.kind {
            Kind::Moe(model) => {
                let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
                model.forward(&bytes, batch, logits)
            }
            Kind::Llama(model, _) => model.forward(tokens, batch, logits),
        }
    }
}

fn revision(weights: &Path) -> std::io::Result<String> {
    let file = std::fs::metadata(weights)?;
    Ok(format!("{} {:?}", file.len(), file.modified()?))
}
