//! A layer of made-up keys, values and queries, for lengths beyond the training of the models here.

use crate::Result;
use pikv::codec::Codec;
use pikv::report::{PageId, Place};
use pikv::{Attend, AttendOutput, Cache, CacheConfig, Dtype, LayerShape, ReadPages, Sequence, Step};
use pikv_engine::common::sample::SplitMix;
use pikv_engine::measure::results::cpu_time;
use std::collections::{HashMap, HashSet};

pub const KV_HEADS: usize = 4;
pub const QUERY_HEADS: usize = 16;
pub const DIM: usize = 64;
pub const RING: u32 = 128;
/// Tokens per step while the layer is filled.
const STEP: u32 = 128;

/// A filled layer.
pub struct Layer {
    pub cache: Cache,
    pub sequence: Sequence,
    random: SplitMix,
    experts: u32,
    top_k: u32,
}

pub fn noise(random: &mut SplitMix, n: usize) -> Vec<f32> {
    (0..n).map(|_| random.unit() as f32 - 0.5).collect()
}

/// `top_k` different experts of `experts`, each as likely.
pub fn drawn(random: &mut SplitMix, experts: u32, top_k: u32) -> Vec<u16> {
    let mut chosen: Vec<u16> = Vec::new();
    while chosen.len() < top_k as usize {
        let e = (random.next() % u64::from(experts)) as u16;
        if !chosen.contains(&e) {
            chosen.push(e);
        }
    }
    chosen
}

impl Layer {
    /// A layer of `tokens` tokens in bf16, or packed, filed under even experts; with the key bounds that Quest needs, or without.
    pub fn new(
        tokens: u32,
        (experts, top_k): (u32, u32),
        codec: Option<Codec>,
        bounds: bool,
    ) -> Result<Layer> {
        let shape = LayerShape::new(KV_HEADS as u32, QUERY_HEADS as u32, DIM as u32, Dtype::Bf16);
        let config = CacheConfig::new(vec![shape], 8 << 30).ring(RING).sinks(4).key_bounds(bounds);
        let config = config.experts(experts, top_k);
        let cache = Cache::new(match codec {
            Some(codec) => config.compress(codec),
            None => config,
        })?;
        let mut layer = Layer { sequence: cache.sequence(), cache, random: SplitMix(7), experts, top_k };
        let rows = noise(&mut layer.random, 2 * STEP as usize * KV_HEADS * DIM);
        let mut left = tokens;
        while left > 0 {
            let n = left.min(STEP);
            let at = (layer.random.next() % u64::from(STEP)) as usize * KV_HEADS * DIM;
            let rows = &rows[at..at + n as usize * KV_HEADS * DIM];
            let mut step = layer.cache.begin([(&mut layer.sequence, n)])?;
            step.append(0, rows, rows)?;
            if experts > 1 {
                let routes = (0..n).flat_map(|_| drawn(&mut layer.random, experts, top_k));
                step.route(0, &routes.collect::<Vec<_>>())?;
            }
            step.commit()?;
            left -= n;
        }
        Ok(layer)
    }

    /// The CPU time of one decode row's attention under each of `reads`, which take turns; the least of `samples`. Steps are dropped,
    /// so all see the same tokens.
    pub fn times(&mut self, reads: &[ReadPages], samples: usize) -> Result<Vec<f64>> {
        let mut least = vec![f64::INFINITY; reads.len()];
        for _ in 0..samples {
            let (q, routes) = self.query();
            for (read, least) in reads.iter().zip(&mut least) {
                let mut out = vec![0.0; QUERY_HEADS * DIM];
                let start = {
                    let mut step = self.step(&q, &routes)?;
                    let start = cpu_time();
                    step.attend(0, &q, &Attend::new(0.125).read(*read), AttendOutput::new(&mut out))?;
                    start
                };
                *least = least.min((cpu_time() - start).as_secs_f64());
            }
        }
        Ok(least)
    }

    fn query(&mut self) -> (Vec<f32>, Vec<u16>) {
        (noise(&mut self.random, QUERY_HEADS * DIM), drawn(&mut self.random, self.experts, self.top_k))
    }

    /// A step of one token, appended and routed.
    fn step(&mut self, q: &[f32], routes: &[u16]) -> Result<Step<'_>> {
        let mut step = self.cache.begin([(&mut self.sequence, 1)])?;
        step.append(0, &q[..KV_HEADS * DIM], &q[..KV_HEADS * DIM])?;
        if self.experts > 1 {
            step.route(0, routes)?;
        }
        Ok(step)
    }

    /// Bytes of the pages that a decode row reads, of all KV heads; the mean of `samples`.
    pub fn bytes_read(&mut self, read: ReadPages, samples: usize) -> Result<f64> {
        let mut bytes: Vec<HashMap<PageId, u64>> = vec![HashMap::new(); KV_HEADS];
        for (head, of) in bytes.iter_mut().enumerate() {
            of.extend(self.sequence.pages(0, head)?.map(|page| (page.id, page.bytes)));
        }
        let (mut sum, mut mass) = (0, Vec::new());
        for _ in 0..samples {
            let (q, routes) = self.query();
            let mut out = vec![0.0; QUERY_HEADS * DIM];
            let mut step = self.step(&q, &routes)?;
            let output = AttendOutput::new(&mut out).mass(&mut mass);
            step.attend(0, &q, &Attend::new(0.125).read(read), output)?;
            // A page with no visible token is listed with a mass of 0.
            let read: HashSet<(usize, PageId)> = mass
                .iter()
                .filter(|page| page.total() > 0.0 && page.page.place != Place::Ring)
                .map(|page| (page.kv_head, page.page))
                .collect();
            let ring = |head: usize| bytes[head].iter().filter(|(id, _)| id.place == Place::Ring);
            sum += (0..KV_HEADS).flat_map(ring).map(|(_, bytes)| bytes).sum::<u64>();
            sum += read.iter().filter_map(|(head, page)| bytes[*head].get(page)).sum::<u64>();
        }
        Ok(sum as f64 / samples as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pikv::codec::Code;

    #[test]
    fn bytes_read_are_those_of_the_pages_that_a_row_attends() {
        let mut layer = Layer::new(4096, (8, 2), None, true).unwrap();
        let all = layer.bytes_read(ReadPages::All, 1).unwrap();
        assert_eq!(all, layer.sequence.bytes() as f64);
        let few = layer.bytes_read(ReadPages::Experts, 8).unwrap() / all;
        // A quarter of the tokens in experts' pages, and all of the ring and the sinks.
        assert!((0.2..0.35).contains(&few), "{few}");
        let pages = layer.bytes_read(ReadPages::Quest { pages: 8 }, 8).unwrap() / all;
        assert!((0.05..0.2).contains(&pages), "{pages}");
        let mut every = Layer::new(2048, (8, 8), None, false).unwrap();
        let of_all = every.bytes_read(ReadPages::Experts, 1).unwrap();
        assert_eq!(of_all, every.sequence.bytes() as f64);
    }

    #[test]
    fn packed_layers_take_fewer_bytes() {
        let bytes = |code| {
            Layer::new(4096, (1, 1), crate::tables::codec(code), false).unwrap().sequence.bytes() as f64
        };
        let ratio = bytes(Code::Int4) / bytes(Code::Bf16);
        assert!((0.25..0.4).contains(&ratio), "{ratio}");
    }
}
