//! candle-transformers' quantised Llama as one of the engines of `benches/decode/run`. The argument is the GGUF file. candle takes its
//! number of threads from the environment, once: a process serves one number. Its cache is in f32.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, Tensor, bail};
use candle_transformers::models::quantized_llama::{MAX_SEQ_LEN, ModelWeights};
use std::io::Write;
use std::time::Instant;

/// Tokens of a pass when the cache is filled.
const CHUNK: usize = 512;

struct Engine {
    /// The model with the cache of so many tokens, for each length that was held: a copy shares its tensors.
    kept: Vec<(usize, ModelWeights)>,
    model: ModelWeights,
    held: usize,
    text: Vec<u32>,
}

impl Engine {
    fn load(path: &str) -> Result<Engine> {
        let mut file = std::fs::File::open(path)?;
        let content = Content::read(&mut file)?;
        let model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
        Ok(Engine { kept: vec![(0, model.clone())], model, held: 0, text: Vec::new() })
    }

    /// The next `n` tokens of the text; the logits after the last.
    fn forward(&mut self, n: usize) -> Result<Vec<f32>> {
        let ids = Tensor::new(&self.text[self.held..self.held + n], &Device::Cpu)?.unsqueeze(0)?;
        let logits = self.model.forward(&ids, self.held)?.flatten_all()?.to_vec1()?;
        self.held += n;
        Ok(logits)
    }

    fn hold(&mut self, n: usize) -> Result<()> {
        if n > MAX_SEQ_LEN {
            bail!("it has RoPE for {MAX_SEQ_LEN} tokens");
        }
        if self.held == n {
            return Ok(());
        }
        let longest = self.kept.iter().filter(|kept| kept.0 <= n).max_by_key(|kept| kept.0);
        let Some((held, model)) = longest.cloned() else { bail!("nothing is kept") };
        (self.held, self.model) = (held, model);
        while self.held < n {
            self.forward(CHUNK.min(n - self.held))?;
        }
        if held < n {
            self.kept.push((n, self.model.clone()));
        }
        Ok(())
    }

    /// Nats of the tokens from the second on.
    fn nats(&mut self, n: usize) -> Result<String> {
        self.hold(0)?;
        let mut out = Vec::new();
        for next in 1..n {
            let logits = self.forward(1)?;
            let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let sum: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
            out.push(format!("{:.6}", sum.ln() + max - f64::from(logits[self.text[next] as usize])));
        }
        Ok(out.join(" "))
    }

    /// The answer to a request.
    fn answer(&mut self, words: &[&str]) -> std::result::Result<String, Box<dyn std::error::Error>> {
        match *words {
            ["take", ref ids @ ..] => {
                self.text = ids.iter().map(|id| id.parse()).collect::<std::result::Result<_, _>>()?;
                Ok("ok".into())
            }
            ["hold", n] => {
                self.hold(n.parse()?)?;
                Ok("ok".into())
            }
            ["nats", n] => Ok(self.nats(n.parse()?)?),
            ["prompt", n, _] => {
                let (n, start) = (n.parse()?, Instant::now());
                self.forward(n)?;
                Ok(format!("{:e}", start.elapsed().as_secs_f64()))
            }
            ["generate", n, _] => {
                let (n, start) = (n.parse::<usize>()?, Instant::now());
                for _ in 0..n {
                    self.forward(1)?;
                }
                Ok(format!("{:e}", start.elapsed().as_secs_f64()))
            }
            _ => Err(format!("not a request: {}", words.join(" ")).into()),
        }
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("the argument is a GGUF file")?;
    let mut engine = Engine::load(&path)?;
    println!("candle {}", version());
    for line in std::io::stdin().lines() {
        let line = line?;
        match engine.answer(&line.split_whitespace().collect::<Vec<_>>()) {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("no {}", error.to_string().lines().next().unwrap_or_default()),
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// As the manifest pins it.
fn version() -> &'static str {
    let line = include_str!("../Cargo.toml").lines().find_map(|line| line.strip_prefix("candle-core = \"="));
    line.map_or("?", |version| version.trim_end_matches('"'))
}
