//! From one expert to 512: bytes of pages and of lists, attention and routing, relative to one expert.

use super::made_up::{DIM, KV_HEADS, Layer, QUERY_HEADS, noise};
use crate::Result;
use pikv::metrics::Collector;
use pikv::router::{CacheAware, Shape};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, ClosedLoop, Dtype, LayerShape, ReadPages};
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::results::{self, Sheet, cpu_time};
use pikv_engine::measure::subject::Subject;
use std::sync::Arc;

const COLUMNS: &str =
    "experts,top_k,tokens,bytes,bytes_of_one,table_bytes,table_share,attend_of_one,route_of_attend";
const EXPERTS: [u32; 9] = [1, 8, 16, 32, 64, 128, 256, 384, 512];
const TOKENS: [u32; 3] = [1024, 16 << 10, 128 << 10];
const SAMPLES: usize = 31;

pub fn run(_: &mut Subject, _: &[u32]) -> Result<()> {
    let mut sheet = Sheet::new(results::file("experts.csv"), COLUMNS, "loop")?;
    for tokens in TOKENS {
        let mut one = Layer::new(tokens, (1, 1), None, false)?;
        let of_one = one.sequence.bytes();
        for experts in EXPERTS {
            let top_k = if experts == 1 { 1 } else { 2.max(experts / 32).min(8) };
            let mut layer = Layer::new(tokens, (experts, top_k), None, false)?;
            // In turns, so that a disturbance hits both.
            let (mut base, mut attend) = (f64::INFINITY, f64::INFINITY);
            for _ in 0..SAMPLES {
                base = base.min(one.times(&[ReadPages::All], 1)?[0]);
                attend = attend.min(layer.times(&[ReadPages::All], 1)?[0]);
            }
            let (bytes, tables) = (layer.sequence.bytes(), layer.sequence.table_bytes());
            let route = if experts == 1 { 0.0 } else { route(experts, top_k)? };
            sheet.row(&format!(
                "{experts},{top_k},{tokens},{bytes},{:.4},{tables},{:.4},{:.4},{:.5}",
                bytes as f64 / of_one as f64,
                tables as f64 / bytes as f64,
                attend / base,
                route / attend
            ))?;
        }
    }
    Ok(())
}

/// CPU time in which R_P ranks a row, files it and learns from its misses, over that of a row without ranking and learning: the
/// mean over rows, of an empty cache whose attention is as short as possible.
fn route(experts: u32, top_k: u32) -> Result<f64> {
    const ROWS: usize = 512;
    let shape = LayerShape::new(KV_HEADS as u32, QUERY_HEADS as u32, DIM as u32, Dtype::Bf16);
    let config = || CacheConfig::new(vec![shape], 1 << 30).ring(1024).experts(experts, top_k);
    let mut random = SplitMix(3);
    let (q, logits) = (noise(&mut random, QUERY_HEADS * DIM), noise(&mut random, experts as usize * ROWS));
    let (kv, attend) = (&q[..KV_HEADS * DIM], Attend::new(0.125));
    let mut least = [f64::INFINITY; 2];
    for _ in 0..5 {
        for (routed, least) in [false, true].into_iter().zip(&mut least) {
            let cache = Cache::new(config())?;
            let router = CacheAware::default().router(Shape::new(experts, top_k))?;
            let sink = Arc::new(Collector::new(experts as usize));
            let mut pikv = ClosedLoop::new(cache.clone(), vec![Box::new(router)])?.sink(sink);
            let mut sequence = cache.sequence();
            let chosen: Vec<u16> = (0..top_k as u16).collect();
            let start = cpu_time();
            for logits in logits.chunks_exact(experts as usize) {
                let mut out = vec![0.0; QUERY_HEADS * DIM];
                if routed {
                    let mut step = pikv.begin([(&mut sequence, 1)])?;
                    step.append(0, kv, kv)?;
                    step.route(0, logits)?;
                    step.attend(0, &q, &attend, AttendOutput::new(&mut out))?;
                    step.commit()?;
                } else {
                    let mut step = cache.begin([(&mut sequence, 1)])?;
                    step.append(0, kv, kv)?;
                    step.route(0, &chosen)?;
                    step.attend(0, &q, &attend, AttendOutput::new(&mut out))?;
                    step.commit()?;
                }
            }
            *least = least.min((cpu_time() - start).as_secs_f64() / ROWS as f64);
        }
    }
    Ok((least[1] - least[0]).max(0.0))
}
