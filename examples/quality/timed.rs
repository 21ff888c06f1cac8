//! pikv for a row, with the time that it takes.

use crate::rows::Row;
use pikv::{Cache, CacheConfig};
use pikv_engine::common::cache::{Cache as AnyCache, Step as AnyStep};
use pikv_engine::measure::subject::Subject;
use pikv_engine::moe::paged::Paged;
use std::error::Error;
use std::time::{Duration, Instant};

/// pikv over `subject` for a row.
pub fn paged(subject: &Subject, row: &Row, ring: usize, sinks: u32) -> Result<Paged, Box<dyn Error>> {
    let layers = vec![subject.layer(row.dtype, row.keys); subject.layers];
    let config = CacheConfig::new(layers, 4 << 30)
        .ring(ring as u32)
        .sinks(sinks)
        .experts(subject.experts.0, subject.experts.1);
    Ok(Paged::new(Cache::new(row.drop(row.compress(config)))?, subject.head_dim))
}

/// A cache that counts the time in which tokens are appended and attended to.
pub struct Timed(Paged, Duration);

impl Timed {
    pub fn new(paged: Paged) -> Timed {
        Timed(paged, Duration::ZERO)
    }

    pub fn time(&self) -> Duration {
        self.1
    }

    pub fn bytes(&self) -> u64 {
        self.0.sequence.bytes()
    }

    /// The share of the tokens that left the ring, sinks apart, that is held.
    pub fn kept(&self) -> Result<f64, pikv::Error> {
        let (config, sequence) = (self.0.cache.config(), &self.0.sequence);
        let (mut held, mut all) = (0, 0);
        for (layer, shape) in config.layers.iter().enumerate() {
            let fixed = sequence.in_ring().0 + self.0.cache.store(layer)?.sinks;
            let left = sequence.next_position().0.saturating_sub(fixed);
            for head in 0..shape.kv_heads as usize {
                held += u64::from(sequence.resident(layer, head)?.0.saturating_sub(fixed));
                all += u64::from(left);
            }
        }
        Ok(if all == 0 { 1.0 } else { held as f64 / all as f64 })
    }

    /// bf16 bytes of the tokens of packed pages over the bytes of those pages.
    pub fn packed(&self) -> Result<f64, pikv::Error> {
        let (mut raw, mut packed) = (0, 0);
        for (layer, shape) in self.0.cache.config().layers.iter().enumerate() {
            let token = 2 * u64::from(shape.layout.k_dim + shape.layout.v_dim);
            for head in 0..shape.kv_heads as usize {
                for page in self.0.sequence.pages(layer, head)?.filter(|page| page.packed) {
                    raw += token * u64::from(page.tokens);
                    packed += page.bytes;
                }
            }
        }
        Ok(raw as f64 / packed as f64)
    }

    pub fn clear(&mut self) {
        self.0.sequence.clear();
    }
}

pub struct TimedStep<'a>(<Paged as AnyCache>::Step<'a>, &'a mut Duration);

impl AnyCache for Timed {
    type Error = pikv::Error;
    type Step<'a> = TimedStep<'a>;

    fn begin(&mut self, n: usize) -> std::result::Result<TimedStep<'_>, pikv::Error> {
        Ok(TimedStep(self.0.begin(n)?, &mut self.1))
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        Timed::clear(self);
    }
}

impl AnyStep for TimedStep<'_> {
    type Error = pikv::Error;

    fn layer(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> std::result::Result<(), pikv::Error> {
        let start = Instant::now();
        let result = self.0.layer(layer, q, k, v, out);
        *self.1 += start.elapsed();
        result
    }

    fn experts(&mut self, layer: usize, experts: &[u16]) -> std::result::Result<(), pikv::Error> {
        self.0.experts(layer, experts)
    }

    fn commit(self) -> std::result::Result<(), pikv::Error> {
        self.0.commit()
    }
}
