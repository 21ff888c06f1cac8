//! Tokens per second of a Llama and a Mixtral of candle-transformers with candle's own cache, and of the same models patched to use pikv,
//! at several lengths of context. Weights are random and f32, and both caches hold f32. The models are small, so that the cache matters.
//!
//! `RUSTFLAGS="-C target-cpu=native" cargo bench --manifest-path pikv-candle/Cargo.toml -p pikv-candle-models [-- --quick]`
//!
//! Both get the same tokens in turn: the context in parts, then 8 tokens a sample, one per pass. The logits of each pass are compared
//! before its time counts, and may differ by 1e-3. A figure is the median of 7 samples. `threads` is the number of threads of candle and
//! of pikv, set by `RAYON_NUM_THREADS`.
//!
//! Writes `benches/results/candle.csv` at the root of the repository. `--quick`: short contexts, and no file is written.

#[allow(dead_code, reason = "the other benches use the rest")]
#[path = "../../../benches/machine/results.rs"]
mod results;

use candle::{DType, Device, Tensor};
use pikv_candle::KvCache;
use pikv_candle::pikv::{Cache, CacheConfig, Dtype};
use pikv_candle_models::{Model, Shape};
use std::error::Error;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;
/// A model with candle's own cache, and with pikv.
type Pair = [Model; 2];

const COMMAND: &str = "RUSTFLAGS='-C target-cpu=native' cargo bench --manifest-path pikv-candle/Cargo.toml -p pikv-candle-models";
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/results/candle.csv");
const COLUMNS: &str =
    "model,context,own_tokens_s,pikv_tokens_s,shape,dtype,threads,machine,date,commit,command";
/// Model, context, shape, threads and machine.
const KEY: [usize; 5] = [0, 1, 4, 6, 7];
const CONTEXTS: [usize; 3] = [0, 2048, 8192];
/// Tokens of a part of a context.
const PART: usize = 256;
/// Tokens of a sample, and samples of a figure.
const TOKENS: usize = 8;
const SAMPLES: usize = 7;
const BUDGET: u64 = 2 << 30;

const LLAMA: Shape = Shape {
    vocabulary: 1024,
    layers: 8,
    heads: 8,
    kv_heads: 2,
    head_dim: 64,
    intermediate: 1408,
    positions: 16_384,
    experts: 1,
    window: 65_536,
};
const MIXTRAL: Shape = Shape { layers: 4, intermediate: 896, experts: 8, ..LLAMA };

fn kv(config: CacheConfig) -> Result<KvCache> {
    Ok(KvCache::new(Cache::new(config)?))
}

fn llamas() -> Result<Pair> {
    let kv = kv(LLAMA.cache(Dtype::F32, BUDGET))?;
    Ok([LLAMA.own_llama(DType::F32)?, LLAMA.llama(DType::F32, &kv)?])
}

fn mixtrals() -> Result<Pair> {
    let kv = kv(MIXTRAL.cache(Dtype::F32, BUDGET).experts(MIXTRAL.experts, 2))?;
    Ok([MIXTRAL.own_mixtral()?, MIXTRAL.mixtral(&kv)?])
}

/// Description of the model in a row.
fn described(shape: &Shape) -> String {
    let Shape { layers, heads, kv_heads, head_dim, intermediate, .. } = shape;
    let experts = if shape.experts > 1 { format!("; 2 of {} experts", shape.experts) } else { String::new() };
    format!(
        "{layers} layers of {heads} heads over {kv_heads} KV heads of {head_dim}; MLP of {intermediate}{experts}"
    )
}

/// `n` tokens of the text from a position on.
fn tokens(at: usize, n: usize) -> candle::Result<Tensor> {
    Tensor::from_iter((at..at + n).map(|i| (i * 131 % 1021) as u32), &Device::Cpu)?.reshape((1, n))
}

/// Seconds of each model for `passes` passes of `n` tokens. Their logits have to agree.
fn both(models: &mut Pair, at: usize, passes: usize, n: usize) -> Result<[f64; 2]> {
    let mut logits = [Vec::new(), Vec::new()];
    let mut seconds = [0.0; 2];
    for ((model, logits), seconds) in models.iter_mut().zip(&mut logits).zip(&mut seconds) {
        let start = Instant::now();
        for i in 0..passes {
            logits.push(model(&tokens(at + i * n, n)?, at + i * n)?);
        }
        *seconds = start.elapsed().as_secs_f64();
    }
    let [own, ours] = logits;
    for (i, (own, ours)) in own.iter().zip(&ours).enumerate() {
        let off = (own - ours)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        if off.is_nan() || off > 1e-3 {
            return Err(format!("tokens {}..: logits are {off} apart", at + i * n).into());
        }
    }
    Ok(seconds)
}

/// Tokens per second of both after each context.
fn measured(models: fn() -> Result<Pair>, contexts: &[usize]) -> Result<Vec<[f64; 2]>> {
    // Allocations of the first pass are made before measurements begin.
    both(&mut models()?, 0, 1, PART)?;
    let mut models = models()?;
    let mut at = 0;
    let after = |context: &usize| -> Result<[f64; 2]> {
        while at < *context {
            let n = PART.min(context - at);
            both(&mut models, at, 1, n)?;
            at += n;
        }
        let mut samples = [Vec::new(), Vec::new()];
        for _ in 0..SAMPLES {
            let seconds = both(&mut models, at, TOKENS, 1)?;
            samples.iter_mut().zip(seconds).for_each(|(all, seconds)| all.push(TOKENS as f64 / seconds));
            at += TOKENS;
        }
        Ok(samples.map(|all| results::median(&all)))
    };
    contexts.iter().map(after).collect()
}

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let contexts = if quick { [0, 128, 512] } else { CONTEXTS };
    let from = results::provenance(COMMAND)?;
    let threads = candle::utils::get_num_threads();
    let mut rows = Vec::new();
    let all: [fn() -> Result<Pair>; 2] = [llamas, mixtrals];
    for ((name, shape), models) in [("llama", LLAMA), ("mixtral", MIXTRAL)].into_iter().zip(all) {
        for (context, [own, ours]) in contexts.iter().zip(measured(models, &contexts)?) {
            println!(
                "{name} after {context} tokens, {threads} threads: {own:.1} tokens/s of its own, {ours:.1} with pikv"
            );
            rows.push(format!(
                "{name},{context},{own:.1},{ours:.1},{},f32,{threads},{from}",
                described(&shape)
            ));
        }
    }
    if !quick {
        results::replace_rows(PATH, COLUMNS, KEY, &rows)?;
        println!("written to benches/results/candle.csv");
    }
    Ok(())
}
