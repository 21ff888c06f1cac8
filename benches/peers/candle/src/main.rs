//! candle-nn on the CPU, as `benches/peers/common.py` describes a peer. The argument says how: `matmul` (its `KvCache`, the
//! group as rows of one head, matmul-softmax-matmul) or `flash` (its CPU flash attention, tokens first).

use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use candle_nn::attention::{AttnMask, cpu_flash::flash_attn};
use candle_nn::kv_cache::KvCache;
use std::collections::HashMap;
use std::io::Write;
use std::time::Instant;

const QUERY_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const GROUP: usize = QUERY_HEADS / KV_HEADS;
const DIM: usize = 128;
const SAMPLE_SECONDS: f64 = 0.03;

struct Built {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flash: bool,
}

impl Built {
    /// Keys and values from the cache, in the layout that the way wants.
    fn new(dtype: DType, context: usize, flash: bool) -> Result<Built> {
        let mut noise = noise();
        let mut values =
            |n: usize, scale: f32| -> Vec<f32> { noise.by_ref().take(n).map(|x| scale * x).collect() };
        let (q, k, v) = (
            values(QUERY_HEADS * DIM, 8.0),
            values(context * KV_HEADS * DIM, 4.0),
            values(context * KV_HEADS * DIM, 4.0),
        );
        let device = Device::Cpu;
        let rows = |x: Vec<f32>| Tensor::from_vec(x, (1, context, KV_HEADS, DIM), &device)?.to_dtype(dtype);
        let (k, v) = (rows(k)?, rows(v)?);
        let shape = if flash { (1, 1, QUERY_HEADS, DIM) } else { (1, KV_HEADS, GROUP, DIM) };
        let q = Tensor::from_vec(q, shape, &device)?.to_dtype(dtype)?;
        let axis = if flash { 1 } else { 2 };
        let mut cache = KvCache::new(axis, context);
        let (k, v) = if flash {
            cache.append(&k, &v)?
        } else {
            cache.append(&k.transpose(1, 2)?.contiguous()?, &v.transpose(1, 2)?.contiguous()?)?
        };
        Ok(Built { q, k, v, flash })
    }

    /// [QUERY_HEADS, DIM]
    fn call(&self) -> Result<Tensor> {
        let scale = (DIM as f64).powf(-0.5);
        if !self.flash {
            let logits = (self.q.matmul(&self.k.transpose(2, 3)?)? * scale)?;
            return candle_nn::ops::softmax_last_dim(&logits)?.matmul(&self.v)?.reshape((QUERY_HEADS, DIM));
        }
        match self.k.dtype() {
            DType::F32 => self.flash_call::<f32>(scale),
            DType::F16 => self.flash_call::<half::f16>(scale),
            DType::BF16 => self.flash_call::<half::bf16>(scale),
            other => bail!("{other:?}"),
        }
    }

    fn flash_call<T: WithDType + num_traits::Float>(&self, scale: f64) -> Result<Tensor> {
        let mask = AttnMask::causal_with_offset(self.k.dim(1)? - 1);
        flash_attn::<T>(&self.q, &self.k, &self.v, scale as f32, mask, None, None)?
            .reshape((QUERY_HEADS, DIM))
    }

    /// The largest difference from a float64 softmax over the largest output.
    fn check(&self) -> Result<f64> {
        let plain = |x: &Tensor| x.to_dtype(DType::F32)?.contiguous()?.flatten_all()?.to_vec1::<f32>();
        let context = self.k.dim(if self.flash { 1 } else { 2 })?;
        let (q, k, v, out) = (plain(&self.q)?, plain(&self.k)?, plain(&self.v)?, plain(&self.call()?)?);
        let row = |token: usize, head: usize| {
            let at = if self.flash { token * KV_HEADS + head } else { head * context + token };
            at * DIM..(at + 1) * DIM
        };
        let (mut off, mut largest) = (0.0f64, 0.0f64);
        for head in 0..QUERY_HEADS {
            let q = &q[head * DIM..][..DIM];
            let (mut sum, mut total) = ([0.0f64; DIM], 0.0);
            for token in 0..context {
                let at = row(token, head / GROUP);
                let dot: f64 = q.iter().zip(&k[at.clone()]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let weight = (dot * (DIM as f64).powf(-0.5)).exp();
                total += weight;
                sum.iter_mut().zip(&v[at]).for_each(|(s, v)| *s += weight * f64::from(*v));
            }
            for (out, sum) in out[head * DIM..].iter().zip(sum) {
                let difference = (f64::from(*out) - sum / total).abs();
                off = if difference.is_nan() { f64::INFINITY } else { off.max(difference) };
                largest = largest.max((sum / total).abs());
            }
        }
        let (off, bound) = (off / largest, if self.k.dtype() == DType::F32 { 1e-4 } else { 2e-2 });
        if off > bound {
            bail!("{:?}, {context} tokens: off by {off:.1e} of the largest output", self.k.dtype());
        }
        Ok(off)
    }

    /// Seconds a call. The second half counts: the first warms up.
    fn sample(&self) -> Result<f64> {
        let (mut start, mut calls) = (Instant::now(), 0);
        while calls == 0 || start.elapsed().as_secs_f64() < SAMPLE_SECONDS {
            self.call()?;
            calls += 1;
        }
        start = Instant::now();
        for _ in 0..calls {
            self.call()?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(calls))
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let flash = match std::env::args().nth(1).as_deref() {
        Some("flash") => true,
        Some("matmul") => false,
        _ => return Err("the argument is matmul or flash".into()),
    };
    let mut built = HashMap::new();
    println!("{}", version());
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["setup", dtype, context] => match setup(dtype, context.parse()?, flash) {
                Ok((cache, error)) => {
                    println!("ok {} {error:e}", 2 * cache.k.elem_count() * cache.k.dtype().size_in_bytes());
                    built.insert((dtype.to_owned(), context.to_owned()), cache);
                }
                Err(error) => println!("no {}", error.to_string().lines().next().unwrap_or_default()),
            },
            ["sample", dtype, context, threads] => {
                let built: &Built =
                    built.get(&(dtype.to_owned(), context.to_owned())).ok_or("sample before its setup")?;
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.parse()?).build()?;
                println!("{:e}", pool.install(|| built.sample())?);
            }
            _ => return Err(format!("not a request: {line}").into()),
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn setup(dtype: &str, context: usize, flash: bool) -> Result<(Built, f64)> {
    let dtype = match dtype {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => bail!("{other} is no dtype of its tensors"),
    };
    let built = Built::new(dtype, context, flash)?;
    let error = built.check()?;
    Ok((built, error))
}

/// As the manifest pins it.
fn version() -> &'static str {
    let line = include_str!("../Cargo.toml").lines().find_map(|line| line.strip_prefix("candle-nn = \"="));
    line.map_or("?", |version| version.trim_end_matches('"'))
}

/// Pseudo-random numbers in [-0.5, 0.5).
fn noise() -> impl Iterator<Item = f32> {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    std::iter::repeat_with(move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    })
}
