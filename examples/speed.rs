//! The example engines as one of the engines of `benches/decode/run`, which says what the requests are. `cargo run --release
//! -p pikv-examples --bin speed [-- GGUF stored|f32]`: without a file it runs the MoE of this repository; with one, its matrices stay in
//! the blocks of the file or are widened to f32. Keys and values are in bf16.

use pikv::{Cache, CacheConfig, Dtype, Sequence};
use pikv_engine::common::cache::{Cache as _, Keys};
use pikv_engine::common::sample::nats;
use pikv_engine::llama::tensors::Weights;
use pikv_engine::measure::timed::{Timed, wall_time};
use pikv_engine::measure::{rows, subject::Subject};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tokens of a step at most, and of the ring.
const CHUNK: usize = 512;

struct Engine {
    subject: Subject,
    cache: Timed,
    text: Vec<u32>,
    logits: Vec<f32>,
}

impl Engine {
    fn load(gguf: Option<&Path>, weights: Weights) -> Result<Engine> {
        let subject = Subject::load_as(gguf, weights)?;
        let layers = vec![subject.layer(Dtype::Bf16, Keys::Rotated); subject.layers];
        let (experts, top_k) = subject.experts;
        let config = CacheConfig::new(layers, 4 << 30).ring(CHUNK as u32).experts(experts, top_k);
        let cache = Timed::new(Cache::new(config)?, subject.head_dim, wall_time);
        let text = subject.tokens()?;
        Ok(Engine { subject, cache, text, logits: Vec::new() })
    }

    fn held(&self) -> usize {
        self.cache.len()
    }

    /// Appends the next `n` tokens of the text; logits after the last.
    fn forward(&mut self, n: usize) -> Result<()> {
        let ids = &self.text[self.held()..][..n];
        self.subject.forward_last(ids, &mut self.cache, &mut self.logits)
    }

    fn hold(&mut self, n: usize) -> Result<()> {
        if n < self.held() {
            let sequence: &mut Sequence = &mut self.cache.paged.sequence;
            *sequence = sequence.fork_at(n as u32)?;
        }
        while self.held() < n {
            self.forward(CHUNK.min(n - self.held()))?;
        }
        Ok(())
    }

    /// Nats of the tokens from the second on.
    fn nats(&mut self, n: usize) -> Result<String> {
        self.hold(0)?;
        self.subject.forward(&self.text[..n], &mut self.cache, &mut self.logits)?;
        let vocab = self.subject.vocab();
        let of = |i: usize| nats(&self.logits[i * vocab..][..vocab], self.text[i + 1] as usize);
        Ok((0..n - 1).map(|i| format!("{:.6}", of(i))).collect::<Vec<_>>().join(" "))
    }

    /// Seconds of the next `n` tokens in steps of `chunk`, and the part of them that is spent in pikv.
    fn timed(&mut self, n: usize, chunk: usize, threads: &str) -> Result<String> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.parse()?).build()?;
        (self.cache.layers, self.cache.others) = (Duration::ZERO, Duration::ZERO);
        let start = wall_time();
        pool.install(|| {
            (0..n)
                .step_by(chunk)
                .try_for_each(|at| self.forward(chunk.min(n - at)).map_err(|e| e.to_string()))
        })?;
        let all = (wall_time() - start).as_secs_f64();
        Ok(format!("{all:e} {:.4}", (self.cache.layers + self.cache.others).as_secs_f64() / all))
    }

    fn answer(&mut self, words: &[&str]) -> Result<String> {
        match *words {
            ["text", n] => {
                let tokens = self.text.get(..n.parse()?).ok_or("the text is shorter")?;
                Ok(tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))
            }
            ["take", ref ids @ ..] => {
                self.text = ids.iter().map(|id| id.parse()).collect::<std::result::Result<_, _>>()?;
                Ok("ok".into())
            }
            ["hold", n] => self.hold(n.parse()?).map(|()| "ok".into()),
            ["nats", n] => self.nats(n.parse()?),
            ["prompt", n, threads] => self.timed(n.parse()?, CHUNK, threads),
            ["generate", n, threads] => self.timed(n.parse()?, 1, threads),
            _ => Err(format!("not a request: {}", words.join(" ")).into()),
        }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (gguf, weights) = match &arguments[..] {
        [] => (None, Weights::F32),
        [gguf, weights] if weights == "stored" => (Some(gguf), Weights::Stored),
        [gguf, weights] if weights == "f32" => (Some(gguf), Weights::F32),
        _ => return Err("the arguments are a GGUF file, and stored or f32".into()),
    };
    let mut engine = Engine::load(gguf.map(Path::new), weights)?;
    let subject = &engine.subject;
    println!("pikv {}|{}|{}|{}", env!("CARGO_PKG_VERSION"), rows::name(), subject.name(), subject.context);
    for line in std::io::stdin().lines() {
        let line = line?;
        match engine.answer(&line.split_whitespace().collect::<Vec<_>>()) {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("no {error}"),
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}
