//! The main example: a real MoE decodes through pikv, and the loss of each form of the cache (bit-exact in f32 while all is in the ring).
//!
//! `cargo run --release -p decode [-- --bytes 65536] [--quick] [--backend cuda] [--tokens 64] [--code int8]`
//!
//! Generates some text. Then it evaluates a novel that the model was not trained on, window by window, over a plain contiguous f32 cache and
//! over pikv in several forms, and prints one table.

use indicatif::{ProgressBar, ProgressStyle};
use pikv::codec::{Code, Codec, Coding};
use pikv::report::Place;
use pikv::shard::ShardMap;
use pikv::{Backend, Cache, CacheConfig, Dtype, LayerShape};
use pikv_engine::common::sample::{SplitMix, nats, sample};
use pikv_engine::moe::model::{Config, Model, VOCAB};
use pikv_engine::moe::{paged::Paged, plain::PlainCache};
use std::error::Error;
use std::time::Instant;

/// Bytes per window, after which the cache is emptied: the context that the model was trained for.
const WINDOW: usize = 2048;
/// Tokens of a prefill step.
const CHUNK: usize = 256;
/// Newest tokens that the ring keeps if older ones are filed by expert.
const RING: u32 = 256;

const DEFAULT_BYTES: usize = 65536;
/// Loss that the model's trainer measured on as much text, in nats/byte.
const TRAINED: f64 = 1.2103;

const HELP: &str = "options: --bytes N (default 65536, a multiple of 2048), --quick (the same as --bytes 4096), --backend cpu or \
                    cuda, --tokens N (write that many and stop), --code NAME (write with packed pages and a short ring)";

/// Newest tokens that the ring keeps if older ones are packed, so that little text fills pages.
const SHORT: u32 = 32;

/// Tokens that are generated before the evaluation.
const WRITTEN: usize = 355;

/// Offset basis and prime of the hash FNV-1a, over words.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { bytes, backend, tokens, code } = arguments()?;
    let mut model = Model::load(&pikv_engine::example("models/austen-moe"))?;
    model.parallelism = pikv_engine::Parallelism::Rayon(0);
    let text = std::fs::read(pikv_engine::example("text/northangerabbey.txt"))?;
    if bytes >= text.len() {
        return Err(format!("--bytes {bytes}: the text has {}; {HELP}", text.len()).into());
    }

    generate(&model, &backend, code, tokens.unwrap_or(WRITTEN))?;
    if tokens.is_some() {
        return Ok(());
    }

    let variants = variants();
    println!(
        "reads {bytes} bytes of a novel in {} forms of the cache; that takes minutes",
        variants.len() + 1
    );
    let bar = ProgressBar::new((variants.len() + 1) as u64 * bytes as u64);
    bar.set_style(ProgressStyle::with_template("{msg:24} {bar:40} {percent}% of all, {eta} left")?);
    let c = model.config().clone();
    let mut plain = PlainCache::new(c.layers, c.kv_heads, c.head_dim);
    bar.set_message("plain f32");
    let reference = evaluate(&model, &text[..=bytes], &mut plain, &bar)?;
    let mut table = vec![Row {
        name: "plain contiguous".into(),
        dtype: "f32",
        shards: String::new(),
        nats: reference.nats,
        bytes: plain.bytes() as u64,
        tokens_per_s: reference.tokens_per_s,
        rows: String::new(),
        balance: String::new(),
        against: "-".into(),
    }];
    let mut failures = Vec::new();
    if bytes == DEFAULT_BYTES && (reference.nats - TRAINED).abs() > 3e-4 {
        failures.push(format!("plain: {} nats/byte, where the trainer found {TRAINED}", reference.nats));
    }
    let mut same: Option<(Dtype, u32, Vec<f32>)> = None;
    for v in &variants {
        bar.set_message(format!("pikv {} G={}", v.dtype.name(), v.shards));
        let mut paged = Paged::new(Cache::new(v.config(&c, &backend)?)?, c.head_dim);
        let result = evaluate(&model, &text[..=bytes], &mut paged, &bar)?;
        let differ = count_different(&result.logits, &reference.logits);
        let worst = largest_difference(&result.logits, &reference.logits);
        let mut against =
            if differ == 0 { "every logit bit equal".into() } else { format!("max |dlogit| {worst:.1e}") };
        let all_in_ring = v.ring as usize >= WINDOW;
        if v.dtype == Dtype::F32 {
            if all_in_ring && differ > 0 {
                failures.push(format!("{differ} logits in the ring differ from the plain cache's"));
            }
            if worst.is_nan() || worst > 1e-4 {
                failures.push(format!("G={}: a logit is {worst:e} off the plain cache's", v.shards));
            }
        }
        let tolerance = if v.dtype == Dtype::F32 { 5e-5 } else { 1e-3 };
        let off = (result.nats - reference.nats).abs();
        if off.is_nan() || off > tolerance {
            failures.push(format!("{} G={}: {} nats/byte", v.dtype.name(), v.shards, result.nats));
        }
        match &same {
            Some((dtype, ring, logits)) if (*dtype, *ring) == (v.dtype, v.ring) => {
                if count_different(&result.logits, logits) > 0 {
                    failures.push(format!("{}: G={} changes bits", v.dtype.name(), v.shards));
                }
                against += ", bits as G=1";
            }
            _ => same = Some((v.dtype, v.ring, result.logits)),
        }
        let rows = rows_by_shard(&paged, &c, v.shards)?;
        let mean = rows.iter().sum::<u64>() as f64 / rows.len() as f64;
        table.push(Row {
            name: if all_in_ring {
                "pikv, all in the ring".into()
            } else {
                format!("pikv, ring {RING} + 8 experts")
            },
            dtype: v.dtype.name(),
            shards: v.shards.to_string(),
            nats: result.nats,
            bytes: paged.sequence.bytes(),
            tokens_per_s: result.tokens_per_s,
            balance: format!("{:.3}", rows.iter().copied().max().unwrap_or(0) as f64 / mean),
            rows: rows.iter().map(u64::to_string).collect::<Vec<_>>().join(" "),
            against,
        });
    }
    bar.finish_and_clear();
    print(&table, bytes);
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

struct Arguments {
    bytes: usize,
    backend: Backend,
    /// Tokens to generate; the evaluation is then skipped.
    tokens: Option<usize>,
    /// Code of packed pages while text is generated.
    code: Option<Code>,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut parsed = Arguments { bytes: DEFAULT_BYTES, backend: Backend::CPU, tokens: None, code: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument}: of what? {HELP}"));
        let number = |n: String| n.parse().map_err(|e| format!("{argument} {n}: {e}; {HELP}"));
        match argument.as_str() {
            "--quick" => parsed.bytes = 4096,
            "--bytes" => parsed.bytes = number(value()?)?,
            "--tokens" => parsed.tokens = Some(number(value()?)?),
            "--code" => {
                let name = value()?;
                let code = Code::ALL.into_iter().find(|code| code.name() == name);
                let names = Code::ALL.map(Code::name).join(", ");
                parsed.code = Some(code.ok_or(format!("--code {name}: one of {names}; {HELP}"))?);
            }
            "--backend" => {
                parsed.backend = match value()?.as_str() {
                    "cpu" => Backend::CPU,
                    "cuda" => Backend::cuda()?,
                    other => return Err(format!("--backend {other}: cpu or cuda; {HELP}").into()),
                }
            }
            other => return Err(format!("{other}: unknown; {HELP}").into()),
        }
    }
    let bytes = parsed.bytes;
    if bytes == 0 || !bytes.is_multiple_of(WINDOW) {
        return Err(format!("--bytes {bytes}: not a multiple of {WINDOW}; {HELP}").into());
    }
    Ok(parsed)
}

/// One form of the cache.
struct Variant {
    dtype: Dtype,
    shards: u32,
    ring: u32,
}

impl Variant {
    fn config(&self, c: &Config, backend: &Backend) -> Result<CacheConfig, Box<dyn Error>> {
        let dim = c.head_dim as u32;
        let layer = LayerShape::new(c.kv_heads as u32, c.query_heads as u32, dim, self.dtype);
        Ok(CacheConfig::new(vec![layer; c.layers], 64 << 20)
            .backend(backend.clone())
            .ring(self.ring)
            .experts(c.experts as u32, c.top_k as u32)
            .shards(ShardMap::xor(8, c.experts as u32, self.shards)?))
    }
}

fn variants() -> Vec<Variant> {
    let mut variants = vec![Variant { dtype: Dtype::F32, shards: 1, ring: WINDOW as u32 }];
    for dtype in Dtype::ALL {
        variants.extend([1, 2, 4].map(|shards| Variant { dtype, shards, ring: RING }));
    }
    variants
}

/// Generates `tokens` bytes after the novel's first words, and the hash of all logits: equal bits, equal hash.
fn generate(
    model: &Model,
    backend: &Backend,
    code: Option<Code>,
    tokens: usize,
) -> Result<(), Box<dyn Error>> {
    let c = model.config();
    let form = Variant { dtype: Dtype::Bf16, shards: 4, ring: if code.is_some() { SHORT } else { RING } };
    let codec = code.map(|code| Codec::new(Coding::new(code), Coding::new(code)));
    let config = codec.into_iter().fold(form.config(c, backend)?, CacheConfig::compress);
    let mut paged = Paged::new(Cache::new(config)?, c.head_dim);
    let (mut logits, mut random, mut hash) = (Vec::new(), SplitMix(1), FNV_OFFSET);
    let mut text = b"It is a truth universally acknowledged, that ".to_vec();
    let end = text.len() + tokens;
    model.forward(&text, &mut paged, &mut logits)?;
    while text.len() < end {
        hash = logits.iter().fold(hash, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(FNV_PRIME));
        let next = sample(&logits[logits.len() - VOCAB..], 0.7, &mut random) as u8;
        text.push(next);
        model.forward(&[next], &mut paged, &mut logits)?;
    }
    println!(
        "{}\n\nhash of all logits, the same on every back end: {hash:016x}\n",
        String::from_utf8_lossy(&text)
    );
    Ok(())
}

struct Evaluation {
    nats: f64,
    tokens_per_s: f64,
    logits: Vec<f32>,
}

/// Loss over `text` without its first byte, each window from an empty cache.
fn evaluate<C: pikv_engine::common::cache::Cache>(
    model: &Model,
    text: &[u8],
    cache: &mut C,
    bar: &ProgressBar,
) -> Result<Evaluation, Box<dyn Error>> {
    let n = text.len() - 1;
    let (mut loss, mut all, mut logits) = (0.0, Vec::with_capacity(n * VOCAB), Vec::new());
    let start = Instant::now();
    for window in (0..n).step_by(WINDOW) {
        cache.clear();
        for first in (window..window + WINDOW).step_by(CHUNK) {
            model.forward(&text[first..first + CHUNK], cache, &mut logits)?;
            let next = &text[first + 1..=first + CHUNK];
            loss += logits
                .chunks_exact(VOCAB)
                .zip(next)
                .map(|(row, next)| nats(row, usize::from(*next)))
                .sum::<f64>();
            all.extend_from_slice(&logits);
            bar.inc(CHUNK as u64);
        }
    }
    let tokens_per_s = n as f64 / start.elapsed().as_secs_f64();
    Ok(Evaluation { nats: loss / n as f64, tokens_per_s, logits: all })
}

fn count_different(a: &[f32], b: &[f32]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count() + a.len().abs_diff(b.len())
}

/// NaN if any value is NaN.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Rows (tokens of a layer and KV head) on each shard.
fn rows_by_shard(paged: &Paged, c: &Config, shards: u32) -> Result<Vec<u64>, Box<dyn Error>> {
    let mut rows = vec![0; shards as usize];
    for layer in 0..c.layers {
        for head in 0..c.kv_heads {
            for page in paged.sequence.pages(layer, head)? {
                // The ring keeps whole pages; the oldest may hold tokens that are filed already.
                let ring = paged.sequence.next_position().0 - paged.sequence.in_ring().0;
                let filed = if page.id.place == Place::Ring { ring.saturating_sub(page.first.0) } else { 0 };
                rows[page.shard as usize] += u64::from(page.tokens.saturating_sub(filed));
            }
        }
    }
    Ok(rows)
}

struct Row {
    name: String,
    dtype: &'static str,
    shards: String,
    nats: f64,
    bytes: u64,
    tokens_per_s: f64,
    rows: String,
    balance: String,
    against: String,
}

fn print(table: &[Row], bytes: usize) {
    println!(
        "{bytes} bytes of Northanger Abbey in windows of {WINDOW}; bytes and rows at the end of a window\n"
    );
    println!(
        "{:26} {:5} {:>2} {:>10} {:>11} {:>9} {:>8}  {:28} logits against the plain cache",
        "cache", "dtype", "G", "nats/byte", "bytes", "tokens/s", "balance", "rows per shard"
    );
    for row in table {
        println!(
            "{:26} {:5} {:>2} {:>10.5} {:>11} {:>9.0} {:>8}  {:28} {}",
            row.name,
            row.dtype,
            row.shards,
            row.nats,
            row.bytes,
            row.tokens_per_s,
            row.balance,
            row.rows,
            row.against
        );
    }
    println!("\nbalance: rows on the fullest shard over the mean");
}
